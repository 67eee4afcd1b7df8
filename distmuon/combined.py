"""One optimizer for a whole model: DistMuon for its matrices, AdamW for the rest, behind one ``torch.optim.Optimizer``.

Its groups and its state are those of the two, not copies: what a scheduler writes into a group, or a checkpoint into a
state, is what they step with.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Optimizer

from distmuon.agreement import Claims, agree, host_group, refuse
from distmuon.optimizer import DistMuon
from distmuon.planning.matrices import RowBlocks
from distmuon.routing import RoutingTable, Split, split_parameters
from distmuon.state import opaque, other_parameters


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
        ValueError: as of :func:`split_parameters` and :class:`DistMuon`; or nothing goes to Muon. On all ranks, if on
            any.
        TypeError: likewise.
    """
    both = {"lr": lr, "weight_decay": weight_decay}
    of_muon = both | {"adjust_lr_fn": adjust_lr_fn} | dict(muon_options or {})
    try:
        split = split_parameters(model, row_blocks=row_blocks, muon=muon, adamw=adamw)
        if not split.muon:
            raise ValueError("adamw patterns leave nothing to Muon: take torch.optim.AdamW, or drop a pattern")
        inspect.signature(DistMuon).bind(split.muon, **of_muon)
        rest = AdamW(split.adamw, **both | dict(adamw_options or {})) if split.adamw else None
        if rest:
            _make_state(rest)
    except Exception as error:  # DistMuon, where ranks agree on errors, comes last
        refuse(error)
    optimizer = DistMuon(split.muon, **of_muon)
    if group := host_group():
        agree(_claims(rest) if rest else {}, None, group)
    return MuonWithAdamW(optimizer, rest, split)


class MuonWithAdamW(Optimizer):
    """DistMuon and AdamW as one optimizer; :func:`muon_with_adamw` makes it from a model.

    Groups are those of DistMuon first, then those of AdamW, and state exists for all parameters from construction. A
    scheduler that cycles ``momentum`` cycles DistMuon's; AdamW's ``betas`` stay. ``non_finite`` holds for both: a bad
    gradient of either is one for which neither takes the step. Collective, as it lets DistMuon watch AdamW.

    Args:
        muon: for the matrices.
        adamw: for the rest; None if there is none.
        split: what they were made from.

    Attributes:
        muon: that DistMuon, for its ``plan`` and ``skipped_steps``.
        adamw: that AdamW, or None.
        table: which parameter went where, and why.
    """

    muon: DistMuon
    adamw: AdamW | None
    table: RoutingTable

    def __init__(self, muon: DistMuon, adamw: AdamW | None, split: Split) -> None:
        # Not Optimizer.__init__, which would give it groups and a state of its own.
        self.__setstate__({"muon": muon, "adamw": adamw, "table": split.table})

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Those of the two as they are now; a list of its own."""
        return [group for each in self._both for group in each.param_groups]

    @property
    def state(self) -> _States:  # type: ignore[override]
        """That of the two as it is now; what is written to it is theirs."""
        if self.adamw is not None:
            _make_state(self.adamw)
        return _States(self._both)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused: a group does not say which of the two it is for.

        Raises:
            TypeError: always.
        """
        raise TypeError(
            "a group does not say whether Muon or AdamW is to have it: add it to one of the two, "
            "optimizer.muon.add_param_group(...) or optimizer.adamw.add_param_group(...)"
        )

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

    def state_dict(self) -> dict[str, Any]:
        """That of the two as one, their groups in order."""
        return opaque(super().state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict`` returned.

        Raises:
            ValueError: it has other groups, parameters or shapes; nothing was loaded.
        """
        state_dict = state_dict.copy()
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = before(self, state_dict) or state_dict
        groups = self._in_own_order(state_dict["param_groups"])
        of_muon = len(self.muon.param_groups)
        if self.adamw is not None:
            _refuse_other_shapes(self.adamw, groups[of_muon:], state_dict["state"])
        # DistMuon first: it refuses before it loads anything, and AdamW nothing more.
        for each, part in zip(self._both, (groups[:of_muon], groups[of_muon:]), strict=False):
            keys = [key for group in part for key in group["params"] if key in state_dict["state"]]
            each.load_state_dict({"state": {k: state_dict["state"][k] for k in keys}, "param_groups": part})
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def __getstate__(self) -> dict[str, Any]:
        return {"muon": self.muon, "adamw": self.adamw, "table": self.table}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({"defaults": dict(state["muon"].defaults)} | state)
        if self.adamw is not None:
            self.muon.watch(self.adamw)

    @property
    def _both(self) -> list[Optimizer]:
        return [self.muon] if self.adamw is None else [self.muon, self.adamw]

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


def _refuse_other_shapes(adamw: AdamW, groups: Sequence[dict[str, Any]], states: Mapping[Any, Any]) -> None:
    """Refuse what AdamW would load, and fail with in its next step."""
    for own, group in zip(adamw.param_groups, groups, strict=True):
        for name, parameter, key in zip(own["param_names"], own["params"], group["params"], strict=True):
            for what, value in states.get(key, {}).items():
                if isinstance(value, Tensor) and value.ndim and value.shape != parameter.shape:
                    shapes = f"{tuple(value.shape)}, but the parameter has {tuple(parameter.shape)}"
                    raise ValueError(f"{what} of parameter {name!r} in the state dict has shape {shapes}")


def _claims(adamw: AdamW) -> Claims:
    """The settings, which the ranks that share a parameter must share, as DistMuon's."""
    (group,) = adamw.param_groups
    settings = {name: value for name, value in group.items() if name not in ("params", "param_names")}
    # Shown in full: of a tensor repr gives four digits.
    items = [(f"{name} of AdamW", repr(v.item() if isinstance(v, Tensor) else v)) for name, v in settings.items()]
    meshes = [parameter.device_mesh.mesh for parameter in group["params"] if isinstance(parameter, DTensor)]
    return {tuple(mesh.flatten().tolist()): items for mesh in meshes}


def _make_state(adamw: AdamW) -> None:
    """Give an AdamW what it would make in its first step.

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


class _States(MutableMapping[Tensor, Any]):
    """The states of several optimizers as one: that of a parameter is with the optimizer that has the parameter."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = optimizers

    def __getitem__(self, key: Tensor) -> Any:
        return self._home(key)[key]

    def __setitem__(self, key: Tensor, value: Any) -> None:
        self._home(key)[key] = value

    def __delitem__(self, key: Tensor) -> None:
        del self._home(key)[key]

    def __contains__(self, key: object) -> bool:
        return any(key in each.state for each in self._optimizers)

    def __iter__(self) -> Iterator[Tensor]:
        return (key for each in self._optimizers for key in each.state)

    def __len__(self) -> int:
        return sum(len(each.state) for each in self._optimizers)

    def _home(self, key: Tensor) -> MutableMapping[Tensor, Any]:
        for each in self._optimizers:
            if key in each.state:
                return each.state
        for each in self._optimizers:
            if any(key is parameter for group in each.param_groups for parameter in group["params"]):
                return each.state
        raise KeyError(key)
