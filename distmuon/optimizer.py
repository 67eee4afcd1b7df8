"""DistMuon: Muon for parameters of which no rank holds a whole matrix. An ordinary ``torch.optim.Optimizer``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from distmuon.agreement import Claims, agree, host_group
from distmuon.buffers import Buffers
from distmuon.exchange import Exchanger
from distmuon.gradients import GradientAgreement, GradientPolicy, checked_gradient
from distmuon.newton_schulz import COEFFICIENTS, MAX_BATCH_BYTES, Coefficients
from distmuon.parameters import claims, describe, local, names_of, one_device, settled_row_blocks
from distmuon.planning.matrices import RowBlocks
from distmuon.planning.options import Patterns, PlanOptions
from distmuon.planning.placement import ParameterSpec
from distmuon.planning.plan import Plan, plan_step
from distmuon.process_groups import find_groups
from distmuon.routing import Split
from distmuon.settings import Settings, group_settings, refuse_unknown_keys
from distmuon.state import loading, opaque
from distmuon.step import LocalParameter, StepRunner
from distmuon.variants import Variant, get_variant


class DistMuon(torch.optim.Optimizer):
    """Muon over sharded matrices: each is brought to an owner, orthogonalised there, and its update sent back.

    Names, defaults and meaning up to ``adjust_lr_fn`` are those of ``torch.optim.Muon``. The update of a matrix depends
    neither on how it is stored nor on the number of ranks. Where ``torch.distributed`` is initialized construction is
    collective, whatever the parameters: all ranks of the job construct it together, each with the parameters that it
    holds, as pipeline stages do, and a stage without any with an empty list. It raises on all of them if one finds an
    error, or if ranks that share a mesh were given different parameters or settings, or if a rank does not come within
    the time-out of the default group.

    Args:
        params: parameters, named parameters, or groups (dicts with ``params``, best with named ones, and their own
            settings). 2-D parameters are one matrix unless ``row_blocks`` cuts their rows, 3-D ones a batch along dim
            0. DTensors sharded by ``Shard`` or ``_StridedShard`` or replicated, or plain tensors.
        lr: learning rate, a float or a tensor of one element.
        weight_decay: decoupled weight decay.
        momentum: of the running mean of gradients.
        nesterov: Nesterov momentum.
        ns_coefficients: a, b, c of the Newton-Schulz polynomial; or a sequence of them, one a step, the last for all
            further steps; or "polar_express".
        eps: lower bound of the norm that divides a matrix.
        ns_steps: Newton-Schulz iterations.
        adjust_lr_fn: None or "original", sqrt(max(1, rows / cols)); "match_rms_adamw", 0.2 sqrt(max(rows, cols)).
        row_blocks: pattern -> rows of each matrix (one size, or a tuple); for a 3-D parameter, within each matrix of
            the batch. Groups may carry it instead.
        buckets: name patterns of each bucket, in order; None: chosen by size and process group.
        variant: "fused", "batched", "baseline", or a :class:`~distmuon.variants.Variant`.
        ns_algorithm: arithmetic of Newton-Schulz, "standard", "copy_free" or "gram"; see
            :mod:`distmuon.newton_schulz`. Only "standard" has the bits of ``torch.optim.Muon``.
        ns_dtype: of Newton-Schulz, bfloat16 or float32.
        momentum_dtype: of the momentum and of what is orthogonalised; None: the parameter's.
        scale_free: normalise so that gradients from 1e-30 to 1e30 are orthogonalised alike. Times a power of two, from
            2^-100 to 2^100, they give the same bits; times another number the same update but for rounding, at most
            1e-5 of its largest element where all is fp32, 0.15 where bfloat16 has a part. ``eps`` matters no more.
        missing_gradients: "error": a rank without a gradient raises before it joins any exchange. "skip": a parameter
            without one on all its ranks is left alone, and one with it on some is an error on every rank; one small
            collective a step, on the CPU, agrees.
        non_finite: what becomes of infinite and NaN gradients. "carry": they spread over their matrices. "skip": no
            rank takes the step, and ``skipped_steps`` counts it; "error": every rank raises. These agree likewise, and
            look at another optimizer's gradients, too, if asked to :meth:`watch` it.
        max_batch_bytes: what one Newton-Schulz batch of several parameters may hold: stack, scratch, fp32 staging.
        share_replicas: whether the replicas of a matrix (``Replicate`` axes, as HSDP has them) split the work, each
            matrix orthogonalised once over all of them, or repeat it. None: those that lie alike share if the busiest
            rank is done sooner so, see :func:`distmuon.planning.sharing.settled`.
        process_group: ranks that hold the same plain tensors (DDP), to share their work; None: each does all of it.
        capturable: from the second step on a step makes no storage and reads nothing to the host, so that a CUDA graph
            can hold it. ``lr`` must be a tensor then, on the parameters' device; change it in place.

    Raises:
        ValueError: a setting, parameter, pattern or placement that can't be used, named; or ranks that differ.
        TypeError: a parameter that is not a floating point tensor, or a setting that is not what it should be.
        RuntimeError: a rank does not construct it in time, or has no room for its state or buffers.

    State is ``momentum_buffer`` for each parameter, from construction, with the parameter's mesh and placements.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: Coefficients = COEFFICIENTS,
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        row_blocks: RowBlocks | None = None,
        buckets: Patterns | None = None,
        variant: str | Variant = "fused",
        ns_algorithm: str = "standard",
        ns_dtype: torch.dtype = torch.bfloat16,
        momentum_dtype: torch.dtype | None = None,
        scale_free: bool = False,
        missing_gradients: str = "error",
        non_finite: str = "carry",
        max_batch_bytes: int = MAX_BATCH_BYTES,
        share_replicas: bool | None = None,
        process_group: dist.ProcessGroup | None = None,
        capturable: bool = False,
    ) -> None:
        # Made where an error is agreed with the other ranks.
        self._make_options = partial(
            _options,
            variant,
            buckets=buckets,
            ns_dtype=ns_dtype,
            ns_algorithm=ns_algorithm,
            momentum_dtype=momentum_dtype,
            scale_free=scale_free,
            max_batch_bytes=max_batch_bytes,
            share_replicas=share_replicas,
            capturable=capturable,
        )
        self._make_policy = partial(GradientPolicy, missing_gradients, non_finite, capturable)
        self._process_group = process_group
        self._row_blocks = row_blocks
        self._plan: Plan | None = None
        self._watched: torch.optim.Optimizer | None = None
        self.skipped_steps = 0
        self._host = host_group()
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
            "row_blocks": None,
        }
        try:
            super().__init__(_groups_of(params, alone=self._host is None), defaults)
        except Exception as error:
            self._agree({}, error)
        self._set_up()

    @property
    def plan(self) -> Plan:
        """This rank's plan; ``plan.report()`` has a row for each bucket and rank."""
        assert self._plan is not None
        return self._plan

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters and plan anew; collective, as construction is.

        Raises:
            ValueError: as of construction; on all ranks, and all go on as if the group had not been there.
            TypeError: likewise.
            RuntimeError: likewise.
        """
        if self._plan is None:  # under construction, where errors are agreed for all groups
            self._append(param_group)
            return
        before = len(self.param_groups)
        error: Exception | None = None
        try:
            self._append(param_group)
        except Exception as found:
            error = found
        try:
            self._set_up(error)
        except Exception:
            del self.param_groups[before:]
            raise

    def watch(self, other: torch.optim.Optimizer) -> None:
        """Let ``non_finite`` hold for the gradients of another optimizer, too, in every step from now on. Collective.

        That one is to step after this one, and only if this one has: ``skipped_steps`` says so. ``muon_with_adamw``
        does it all.

        Args:
            other: of the rest of the model's parameters.
        """
        self._watched = other
        self._agreement = self._agree_on_gradients(self._policy, self.plan.parameters)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters.

        Args:
            closure: evaluates the loss again, with gradients; optional.

        Returns:
            What ``closure`` returned.

        Raises:
            ValueError: a parameter has no gradient, or one that is placed or typed unlike the parameter, or the ranks
                agreed that gradients are missing or not finite; raised before this rank joins any exchange.
            RuntimeError: an exchange failed; names rank and bucket.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        tensors: list[LocalParameter] = []
        error: Exception | None = None
        try:
            for group, names in zip(self.param_groups, self._names, strict=True):
                settings = group_settings(group, self._options)
                for name, parameter in zip(names, group["params"], strict=True):
                    tensors.append(self._local(name, parameter, settings))
        except (ValueError, TypeError) as found:
            error = found
        if self._agreement is None:
            if error:
                raise error
        elif not self._agreement.take_step([each.gradient for each in tensors], self._watched_gradients(), error):
            self.skipped_steps += 1
            return loss
        self._runner.run(tensors)
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Names, settings and momenta, which are not copied, as of ``torch.optim.Muon``."""
        return opaque(super().state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what was saved, also by ``torch.optim.Muon``.

        Parameters are matched by name where both sides have names, else by position. A parameter without momentum in
        ``state_dict`` gets zeros; but if it is frozen it keeps what it has, since ``torch.distributed.checkpoint``
        leaves frozen parameters out. Momenta are loaded in place and keep their dtype, and ``row_blocks`` are not
        loaded, only compared: they say what the matrices are.

        Raises:
            ValueError: it is of other parameters, shapes, matrices or of another optimizer; nothing was loaded.
        """
        with loading(self):
            super().load_state_dict(state_dict)

    def __getstate__(self) -> dict[str, Any]:
        if self._process_group is not None:
            raise TypeError("a process_group can't be copied: construct DistMuon anew and load a state_dict into it")
        names = ("_make_options", "_make_policy", "_row_blocks", "_watched", "skipped_steps")
        return super().__getstate__() | {name: getattr(self, name) for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Also of a copy, which plans anew: copying is collective, as construction is."""
        super().__setstate__(state)
        if "_plan" not in self.__dict__:
            self._process_group = None
            self._host = host_group()
            self._set_up()

    def _append(self, param_group: dict[str, Any]) -> None:
        """Add a group to the others, a copy, so that one that is refused stays as it was."""
        if isinstance(param_group, dict):
            if "params" not in param_group:
                raise ValueError(f"a parameter group needs 'params'; this one has {', '.join(map(repr, param_group))}")
            refuse_unknown_keys(param_group, self.defaults)
            param_group = param_group.copy()
        # Torch wants all groups to have names, or none; one of no parameters can't know.
        every, self.param_groups = self.param_groups, [group for group in self.param_groups if group["params"]]
        try:
            super().add_param_group(param_group)
            every.append(self.param_groups[-1])
        finally:
            self.param_groups = every

    def _set_up(self, error: Exception | None = None) -> None:
        """Check, plan, reserve state and buffers, and agree with the other ranks that all could; else change nothing.

        Args:
            error: what this rank has already found wrong.
        """
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        claimed: Claims = {}
        momenta: dict[Tensor, Tensor] = {}
        rank = dist.get_rank() if dist.is_initialized() else 0
        try:
            if error:
                raise error
            names = [names_of(number, group) for number, group in enumerate(self.param_groups)]
            options, policy = self._make_options(), self._make_policy()
            if not isinstance(self._process_group, dist.ProcessGroup | None):
                raise TypeError(f"process_group is {self._process_group!r}: give a process group, or None")
            settings = [group_settings(group, options) for group in self.param_groups]
            if not parameters and self._host is None:
                raise ValueError("there are no parameters: give at least one")
            device = one_device(parameters, names)
            blocks = settled_row_blocks(self.param_groups, self._row_blocks, [name for each in names for name in each])
            specs = describe(self.param_groups, names, blocks, options.momentum_dtype, self._process_group)
            claimed = claims(specs, settings, options, policy)
            plan = plan_step(specs, rank, options)
            for parameter, spec in zip(parameters, specs, strict=True):
                if "momentum_buffer" not in self.state.get(parameter, {}):
                    momenta[parameter] = torch.zeros_like(parameter, dtype=spec.dtype, requires_grad=False)
            buffers = Buffers(plan, device)
        except Exception as found:  # out of memory, too
            error = found
        self._agree({} if error else claimed, error, parameters=bool(parameters))
        groups = find_groups(plan, parameters, self._process_group, self._host)
        runner = StepRunner(plan, buffers, Exchanger(plan, groups, buffers, device))
        agreement = self._agree_on_gradients(policy, specs)
        # From here on nothing fails.
        for group, its_blocks in zip(self.param_groups, blocks, strict=True):
            group["row_blocks"] = its_blocks
        for parameter, momentum in momenta.items():
            self.state[parameter]["momentum_buffer"] = momentum
        self._names, self._options, self._policy = names, options, policy
        self._plan, self._runner, self._agreement = plan, runner, agreement

    def _agree(self, claimed: Claims, error: Exception | None, *, parameters: bool = True) -> None:
        """Raise ``error``; of several ranks all raise, or none."""
        if self._host is not None:
            agree(claimed, error, self._host, parameters=parameters)
        elif error:
            raise error

    def _agree_on_gradients(self, policy: GradientPolicy, specs: Sequence[ParameterSpec]) -> GradientAgreement | None:
        if not policy.needs_agreement:
            return None
        shared = any(isinstance(parameter, DTensor) for _, parameter in self._watched_parameters())
        return GradientAgreement(policy, specs, self._host, shared)

    def _watched_parameters(self) -> Iterator[tuple[str, Tensor]]:
        for number, group in enumerate(self._watched.param_groups if self._watched else ()):
            yield from zip(names_of(number, group), group["params"], strict=True)

    def _watched_gradients(self) -> dict[str, Tensor]:
        """This rank's part of the gradients that there are."""
        found = ((name, parameter.grad) for name, parameter in self._watched_parameters())
        return {name: local(gradient) for name, gradient in found if gradient is not None}

    def _local(self, name: str, parameter: Tensor, settings: Settings) -> LocalParameter:
        momentum = self.state[parameter]["momentum_buffer"]
        # Without a dtype of its own the momentum has the gradient's, so that nothing is cast.
        dtype = momentum.dtype if self._options.momentum_dtype is None else None
        gradient = checked_gradient(name, parameter, dtype, self._policy)
        held = None if gradient is None else local(gradient)
        return LocalParameter(local(parameter), held, local(momentum), settings)


def _groups_of(params: Any, *, alone: bool) -> Any:
    """What ``torch.optim.Optimizer`` takes: of one of several ranks that is without parameters a group of none."""
    if isinstance(params, nn.Module):
        raise TypeError("params is a module: give its matrices, as split_parameters(model).muon has them")
    if isinstance(params, Split):
        raise TypeError("params is a Split: give its .muon, and its .adamw to torch.optim.AdamW")
    return params if alone or isinstance(params, Tensor) else list(params) or [{"params": []}]


def _options(variant: str | Variant, **options: Any) -> PlanOptions:
    return PlanOptions(variant=get_variant(variant), **options)
