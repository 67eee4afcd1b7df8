"""One optimizer for a whole model: DistMuon for its matrices, AdamW for the rest, behind one ``torch.optim.Optimizer``.

Its groups and its state are those of the two, not copies: what a scheduler writes into a group, or a checkpoint into a
state, is what they step with.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from distmuon.matrices import RowBlocks
from distmuon.optimizer import DistMuon
from distmuon.routing import Split, split_parameters
from distmuon.state import other_parameters


def muon_with_adamw(
    model: nn.Module,
    lr: float | Tensor = 1e-3,
    weight_decay: float = 0.1,
    adjust_lr_fn: str | None = "match_rms_adamw",
    *,
    row_blocks: RowBlocks | None = None,
    muon: Sequence[str] = (),
    adamw: Sequence[str] = (),
    muon_options: Mapping[str, Any] | None = None,
    adamw_options: Mapping[str, Any] | None = None,
) -> MuonWithAdamW:
    """One optimizer for all parameters of a model that are not frozen. Collective, as :class:`DistMuon` is.

    Args:
        model: whose parameters to optimize, sharded or not.
        lr: of both.
        weight_decay: of both.
        adjust_lr_fn: of DistMuon. By default its updates are as large as AdamW's, so that one ``lr`` suits both.
        row_blocks: as :func:`split_parameters` takes it.
        muon: likewise, patterns of names that go to Muon.
        adamw: likewise, patterns of names that go to AdamW.
        muon_options: other arguments of :class:`DistMuon`; they win over those above.
        adamw_options: other arguments of ``torch.optim.AdamW``; likewise.

    Raises:
        ValueError: as of :func:`split_parameters` and :class:`DistMuon`; or nothing goes to Muon.
        TypeError: likewise.
    """
    split = split_parameters(model, row_blocks=row_blocks, muon=muon, adamw=adamw)
    if not split.muon:
        raise ValueError("adamw patterns leave nothing to Muon: take torch.optim.AdamW, or drop a pattern")
    both = {"lr": lr, "weight_decay": weight_decay}
    matrices = DistMuon(split.muon, **both | {"adjust_lr_fn": adjust_lr_fn} | dict(muon_options or {}))
    rest = AdamW(split.adamw, **both | dict(adamw_options or {})) if split.adamw else None
    return MuonWithAdamW(matrices, rest, split)


class MuonWithAdamW(Optimizer):
    """DistMuon and AdamW as one optimizer; :func:`muon_with_adamw` makes it from a model.

    Groups are those of DistMuon first, then those of AdamW, and state exists for all parameters from construction. A
    scheduler that cycles ``momentum`` cycles DistMuon's; AdamW's ``betas`` stay. Where DistMuon skips a step
    (``non_finite="skip"``, which looks at the gradients of matrices alone), AdamW does too.

    Args:
        muon: for the matrices.
        adamw: for the rest; None if there is none.
        split: what they were made from.

    Attributes:
        muon: that DistMuon, for its ``plan`` and ``skipped_steps``.
        adamw: that AdamW, or None.
        table: which parameter went where, and why.
    """

    def __init__(self, muon: DistMuon, adamw: AdamW | None, split: Split) -> None:
        super().__init__([group for each in (muon, adamw) if each is not None for group in each.param_groups], {})
        self.table = split.table
        self._join(muon, adamw)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused after construction: a group does not say which of the two it is for.

        Raises:
            TypeError: always.
        """
        if hasattr(self, "muon"):
            raise TypeError(
                "a group does not say whether Muon or AdamW is to have it: make a DistMuon and an AdamW of their own "
                "from split_parameters(model), and add it to one of them"
            )
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters; the matrices first, so that an error of theirs leaves the others as they were.

        Args:
            closure: evaluates the loss again, with gradients; optional.

        Returns:
            What ``closure`` returned.

        Raises:
            ValueError: as of :meth:`DistMuon.step`.
            RuntimeError: likewise.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        skipped = self.muon.skipped_steps
        self.muon.step()
        if self.adamw is not None and self.muon.skipped_steps == skipped:
            self.adamw.step()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict`` returned.

        Raises:
            ValueError: it has other groups or parameters; nothing was loaded.
        """
        state_dict = state_dict.copy()
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = before(self, state_dict) or state_dict
        groups = self._in_own_order(state_dict["param_groups"])
        of_muon = len(self.muon.param_groups)
        for each, part in ((self.adamw, groups[of_muon:]), (self.muon, groups[:of_muon])):
            if each is not None:
                keys = [key for group in part for key in group["params"] if key in state_dict["state"]]
                each.load_state_dict({"state": {k: state_dict["state"][k] for k in keys}, "param_groups": part})
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def __getstate__(self) -> dict[str, Any]:
        return {"muon": self.muon, "adamw": self.adamw, "table": self.table}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Of a copy, which is joined anew to the copies of the two."""
        super().__setstate__({"defaults": {}} | state)
        self._join(self.muon, self.adamw)

    def _join(self, muon: DistMuon, adamw: AdamW | None) -> None:
        self.muon, self.adamw = muon, adamw
        self.defaults = dict(muon.defaults)
        for each in (muon, adamw):
            if each is not None:  # loading gives an optimizer new groups and AdamW a new state
                each.register_load_state_dict_post_hook(self._gather)
        self._gather()

    def _gather(self, _: Optimizer | None = None) -> None:
        both = [self.muon] if self.adamw is None else [self.muon, _with_state(self.adamw)]
        self.param_groups = [group for each in both for group in each.param_groups]
        self.state = defaultdict(dict, {key: state for each in both for key, state in each.state.items()})

    def _in_own_order(self, groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Saved groups, which must be those of this optimizer, with their parameters in its order."""
        sizes, own_sizes = ([len(group["params"]) for group in each] for each in (groups, self.param_groups))
        if sizes != own_sizes:
            raise ValueError(f"the state dict has groups of {sizes} parameters, this optimizer of {own_sizes}")
        return [_in_order_of(own["param_names"], group) for own, group in zip(self.param_groups, groups, strict=True)]


def _in_order_of(names: Sequence[str], group: dict[str, Any]) -> dict[str, Any]:
    # torch.distributed.checkpoint, which numbers parameters by strings, has put them in order, but not their names.
    if "param_names" not in group or any(isinstance(key, str) for key in group["params"]):
        return group | {"param_names": names}
    keys = dict(zip(group["param_names"], group["params"], strict=True))
    missing, extra = [name for name in names if name not in keys], [name for name in keys if name not in names]
    if missing or extra:
        raise ValueError(other_parameters("a group of the state dict", missing, extra))
    return group | {"params": [keys[name] for name in names], "param_names": names}


def _with_state(adamw: AdamW) -> AdamW:
    """An AdamW with what it would make in its first step.

    ``torch.distributed.checkpoint`` loads into the state that is there, and takes an optimizer with any for one with
    all of it.
    """
    for group in adamw.param_groups:
        for parameter in group["params"]:
            if adamw.state[parameter]:
                continue
            on_device = group["capturable"] or group["fused"]
            moments = ["exp_avg", "exp_avg_sq"] + ["max_exp_avg_sq"] * group["amsgrad"]
            adamw.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device if on_device else "cpu"),
                **{name: torch.zeros_like(parameter, requires_grad=False) for name in moments},
            }
    return adamw
