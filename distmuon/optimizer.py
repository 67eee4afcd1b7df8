"""DistMuon: Muon for parameters of which no rank holds a whole matrix. An ordinary ``torch.optim.Optimizer``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from distmuon.agreement import Claims, agree, host_group
from distmuon.buffers import Buffers
from distmuon.exchange import Exchanger
from distmuon.gradients import GradientAgreement, GradientPolicy, checked_gradient
from distmuon.matrices import RowBlocks, matrix_rows, refuse_unmatched
from distmuon.names import choose
from distmuon.newton_schulz import COEFFICIENTS, MAX_BATCH_BYTES, Coefficients
from distmuon.options import Patterns, PlanOptions
from distmuon.placement import ParameterSpec, Storage
from distmuon.plan import Plan, plan_step
from distmuon.settings import GROUP_KEYS, Settings, group_settings
from distmuon.state import loading, named
from distmuon.step import LocalParameter, StepRunner
from distmuon.variants import Variant, get_variant


class DistMuon(torch.optim.Optimizer):
    """Muon over sharded matrices: each is brought to an owner, orthogonalised there, and its update sent back.

    Names, defaults and meaning up to ``adjust_lr_fn`` are those of ``torch.optim.Muon``. The update of a matrix depends
    neither on how it is stored nor on the number of ranks. Where ``torch.distributed`` is initialized construction is
    collective, whatever the parameters: all ranks of the job construct it together, each with the parameters that it
    holds, as pipeline stages do. It raises on all of them if one finds an error, or if ranks that share a mesh were
    given different parameters or settings, or if a rank does not come.

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
        scale_free: normalise so that gradients from 1e-30 to 1e30 give the same update. ``eps`` matters no more.
        missing_gradients: "error": a rank without a gradient raises before it joins any exchange. "skip": a parameter
            without one on all its ranks is left alone, and one with it on some is an error on every rank; one small
            collective a step, on the CPU, agrees.
        non_finite: what becomes of infinite and NaN gradients. "carry": they spread over their matrices. "skip": no
            rank takes the step, and ``skipped_steps`` counts it; "error": every rank raises. These agree likewise.
        max_batch_bytes: what one Newton-Schulz batch of several parameters may hold: stack, scratch, fp32 staging.
        share_replicas: whether the replicas of a matrix (``Replicate`` axes, as HSDP has them) split the work, each
            matrix orthogonalised once over all of them, or repeat it. None: they share unless that sends more bytes
            than the FLOPs it saves are worth, see :meth:`distmuon.options.PlanOptions.shares`.
        process_group: ranks that hold the same plain tensors (DDP), to share their work; None: each does all of it.
        capturable: from the second step on a step makes no storage and reads nothing to the host, so that a CUDA graph
            can hold it. ``lr`` must be a tensor then, on the parameters' device; change it in place.

    Raises:
        ValueError: a setting, parameter, pattern or placement that can't be used, named; or ranks that differ.
        TypeError: a parameter that is not a floating point tensor, or a setting of another type.
        RuntimeError: a rank does not construct it.

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
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self._row_blocks = row_blocks
        self._plan: Plan | None = None
        self.skipped_steps = 0
        #: Keys that groups were given.
        self._given: set[str] = set()
        self._host = host_group() if dist.is_initialized() else None
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
            super().__init__(params, defaults)
        except Exception as error:
            self._agree({}, error)
        self._set_up()

    @property
    def plan(self) -> Plan:
        """This rank's plan; ``plan.report()`` has a row for each bucket and rank."""
        assert self._plan is not None
        return self._plan

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters and plan anew; collective, as construction is."""
        if isinstance(param_group, dict):
            if "params" not in param_group:
                raise ValueError(f"a parameter group needs 'params'; this one has {', '.join(map(repr, param_group))}")
            self._given.update(param_group)
        super().add_param_group(param_group)
        if self._plan is not None:
            self._set_up()

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
        elif not self._agreement.take_step([local.gradient for local in tensors], error):
            self.skipped_steps += 1
            return loss
        self._runner.run(tensors)
        return loss

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
        names = ("_make_options", "_make_policy", "_row_blocks", "skipped_steps")
        return super().__getstate__() | {name: getattr(self, name) for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Also of a copy, which plans anew: copying is collective, as construction is."""
        super().__setstate__(state)
        if "_plan" not in self.__dict__:
            self._process_group, self._groups, self._given = None, {}, set()
            self._host = host_group() if dist.is_initialized() else None
            self._set_up()

    def _set_up(self) -> None:
        """Check, plan, reserve state and buffers, and agree with the other ranks."""
        error: Exception | None = None
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        self._names = [[name for name, _ in named(number, group)] for number, group in enumerate(self.param_groups)]
        claims: Claims = {}
        rank = dist.get_rank() if dist.is_initialized() else 0
        try:
            for key in self._given.difference(GROUP_KEYS):
                choose("setting of a parameter group", key, self.defaults)
            self._options = self._make_options()
            policy = self._policy = self._make_policy()
            settings = [group_settings(group, self._options) for group in self.param_groups]
            device = _one_device(parameters, self._names)
            specs = self._specs()
            claims = _claims(specs, settings, self._options, policy)
            plan = plan_step(specs, rank, self._options)
            for parameter, spec in zip(parameters, specs, strict=True):
                if "momentum_buffer" not in self.state[parameter]:
                    momentum = torch.zeros_like(parameter, dtype=spec.dtype, requires_grad=False)
                    self.state[parameter]["momentum_buffer"] = momentum
            buffers = Buffers(plan, device)
        except Exception as found:
            error = found
        self._agree({} if error else claims, error)
        self._plan = plan
        self._find_groups(plan, parameters)
        exchanger = Exchanger(plan, self._groups, buffers, device)
        self._runner = StepRunner(plan, buffers, exchanger)
        self._agreement = GradientAgreement(policy, specs, rank, self._host) if policy.needs_agreement else None

    def _agree(self, claims: Claims, error: Exception | None) -> None:
        """Raise ``error``; of several ranks all raise, or none."""
        if self._host is not None:
            agree(claims, error, self._host)
        elif error:
            raise error

    def _specs(self) -> tuple[ParameterSpec, ...]:
        """Describe every parameter, checking it."""
        specs: list[ParameterSpec] = []
        names = list(chain.from_iterable(self._names))
        _refuse_no_row_blocks(self._row_blocks)
        refuse_unmatched("row_blocks", self._row_blocks or (), names)
        for number, (group, its_names) in enumerate(zip(self.param_groups, self._names, strict=True)):
            blocks = group["row_blocks"]
            _refuse_no_row_blocks(blocks)
            if blocks and self._row_blocks and dict(blocks) != dict(self._row_blocks):
                raise ValueError(f"row_blocks is {self._row_blocks!r}, but a group carries {blocks!r}: give it once")
            blocks = group["row_blocks"] = dict(blocks or self._row_blocks or {}) or None
            refuse_unmatched("row_blocks", blocks or (), names)
            for name, parameter in zip(its_names, group["params"], strict=True):
                if not parameter.is_floating_point() or parameter.dtype == torch.float16:
                    raise TypeError(
                        f"parameter {name!r} is {parameter.dtype}: give bfloat16, float32 or float64 matrices"
                    )
                shape = tuple(parameter.shape)
                rows = matrix_rows(name, shape, blocks)
                try:
                    storage = _storage(parameter, self._process_group)
                    dtype = self._options.momentum_dtype or parameter.dtype
                    specs.append(ParameterSpec(name, shape, dtype, rows, storage, number))
                except ValueError as refused:
                    raise ValueError(f"parameter {name!r}: {refused}") from None
        duplicate = next((name for index, name in enumerate(names) if name in names[:index]), None)
        if duplicate:
            raise ValueError(f"two parameters are named {duplicate!r}: patterns and plans need distinct names")
        return tuple(specs)

    def _find_groups(self, plan: Plan, parameters: list[Tensor]) -> None:
        """The process group of each exchange, from the mesh of a parameter that takes part in it."""
        for spec, parameter in zip(plan.parameters, parameters, strict=True):
            axes = plan.options.exchange_axes(spec)
            if not axes or spec.storage is None:
                continue
            ranks = tuple(sorted(spec.storage.group(plan.rank, axes)))
            if ranks not in self._groups:
                mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
                group = _group_of_axes(mesh, axes, ranks) if mesh else self._process_group
                assert group is not None
                self._groups[ranks] = group

    def _local(self, name: str, parameter: Tensor, settings: Settings) -> LocalParameter:
        momentum = self.state[parameter]["momentum_buffer"]
        # Without a dtype of its own the momentum has the gradient's, so that nothing is cast.
        dtype = momentum.dtype if self._options.momentum_dtype is None else None
        gradient = checked_gradient(name, parameter, dtype, self._policy)
        local = None if gradient is None else _plain(gradient)
        return LocalParameter(_plain(parameter), local, _plain(momentum), settings)


def _refuse_no_row_blocks(blocks: object) -> None:
    if blocks is not None and not (isinstance(blocks, Mapping) and all(isinstance(key, str) for key in blocks)):
        raise TypeError(f"row_blocks is {blocks!r}: give a dict, name pattern -> rows of each matrix")


def _options(variant: str | Variant, **options: Any) -> PlanOptions:
    return PlanOptions(variant=get_variant(variant), **options)


def _storage(parameter: Tensor, group: dist.ProcessGroup | None) -> Storage | None:
    """Where a parameter lies; a plain one is a replica on every rank of ``group``, if there is one."""
    if not isinstance(parameter, DTensor):
        ranks = dist.get_process_group_ranks(group) if group else ()
        return Storage((len(ranks),), tuple(ranks), (Replicate(),)) if ranks else None
    mesh = parameter.device_mesh
    return Storage(tuple(mesh.shape), tuple(mesh.mesh.flatten().tolist()), tuple(parameter.placements))


def _claims(
    specs: Sequence[ParameterSpec], settings: Sequence[Settings], options: PlanOptions, policy: GradientPolicy
) -> Claims:
    """What this rank is about to do with each mesh, for :func:`~distmuon.agreement.agree`."""
    common = [(option.name, repr(getattr(options, option.name))) for option in fields(options)]
    claims: dict[tuple[int, ...], list[tuple[str, str]]] = {}
    for spec in specs:
        if spec.storage:
            items = claims.setdefault(spec.storage.ranks, list(common))
            own = replace(settings[spec.group], lr=float(settings[spec.group].lr))
            items.append((f"parameter {len(items) - len(common)} there", f"{spec}, {own}"))
    if dist.is_initialized():
        everyone = claims.setdefault(tuple(range(dist.get_world_size())), [])
        everyone.insert(0, ("missing_gradients or non_finite", repr(policy)))
    return claims


def _one_device(parameters: Iterable[Tensor], names: Iterable[Iterable[str]]) -> torch.device:
    devices: dict[torch.device, str] = {}
    for parameter, name in zip(parameters, chain.from_iterable(names), strict=True):
        devices.setdefault(_plain(parameter).device, name)
    if not devices:
        raise ValueError("there are no parameters: give every rank at least one")
    if len(devices) > 1:
        shown = ", ".join(f"{name!r} on {device}" for device, name in devices.items())
        raise ValueError(f"the parameters are on several devices ({shown}): move them to one")
    return next(iter(devices))


def _plain(tensor: Tensor) -> Tensor:
    # Not to_local(), which makes a view: three a parameter and step are most of what the host does for a small model.
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _group_of_axes(mesh: DeviceMesh, axes: tuple[int, ...], ranks: tuple[int, ...]) -> dist.ProcessGroup:
    """The process group of ``ranks``, which are those along ``axes``."""
    if len(axes) == 1:
        return mesh.get_group(axes[0])
    if names := mesh.mesh_dim_names:  # a mesh keeps what it flattens, so that the next optimizer finds it
        part = mesh if len(axes) == mesh.ndim else mesh[tuple(names[axis] for axis in axes)]
        return part._flatten().get_group()
    made = dist.new_group(list(ranks), use_local_synchronization=True)
    assert made is not None
    return made
