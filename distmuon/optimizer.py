"""DistMuon: Muon for parameters of which no rank holds a whole matrix. An ordinary ``torch.optim.Optimizer``."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from itertools import chain
from numbers import Real
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from distmuon.agreement import Claims, agree, host_group
from distmuon.buffers import Buffers
from distmuon.exchange import Exchanger
from distmuon.matrices import RowBlocks, clean_name, matrix_rows, refuse_unmatched
from distmuon.names import choose
from distmuon.newton_schulz import COEFFICIENTS, MAX_BATCH_BYTES, Coefficients, coefficients_by_step
from distmuon.options import Patterns, PlanOptions
from distmuon.placement import ParameterSpec, Storage
from distmuon.plan import Plan, plan_step
from distmuon.step import LocalParameter, Settings, StepRunner
from distmuon.variants import Variant, get_variant

ADJUST_LR_FNS = (None, "original", "match_rms_adamw")
NS_DTYPES = (torch.bfloat16, torch.float32)

#: What a parameter group may hold beside settings: parameters, a label, and what learning rate schedulers keep there.
GROUP_KEYS = (
    *("params", "param_names", "name", "initial_lr", "swa_lr"),
    *("max_lr", "min_lr", "base_momentum", "max_momentum"),
)


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
        max_batch_bytes: what one Newton-Schulz batch of several parameters may hold: stack, scratch, fp32 staging.
        share_replicas: whether the replicas of a matrix (``Replicate`` axes, as HSDP has them) split the work, each
            matrix orthogonalised once over all of them, or repeat it. None: they share unless that sends more bytes
            than the FLOPs it saves are worth, see :meth:`distmuon.options.PlanOptions.shares`.
        process_group: ranks that hold the same plain tensors (DDP), to share their work; None: each does all of it.
        capturable: from the second step on a step makes no storage and reads nothing to the host, so that a CUDA graph
            can hold it. ``lr`` must be a tensor then, on the parameters' device; change it in place.

    Raises:
        ValueError: a setting, parameter, pattern or placement that can't be used, named; or ranks that differ.
        TypeError: a parameter that is not a floating point tensor, or a setting that is none.
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
        max_batch_bytes: int = MAX_BATCH_BYTES,
        share_replicas: bool | None = None,
        process_group: dist.ProcessGroup | None = None,
        capturable: bool = False,
    ) -> None:
        # Made where an error is agreed with the other ranks.
        self._make_options = partial(
            _options, buckets, variant, ns_dtype, ns_algorithm, max_batch_bytes, share_replicas, capturable
        )
        self._process_group = process_group
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self._row_blocks = row_blocks
        self._plan: Plan | None = None
        #: Keys that groups were given.
        self._given: set[str] = set()
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
            _agree({}, error)
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
            ValueError: a parameter has no gradient, or one that is placed or typed unlike the parameter; raised before
                this rank joins any exchange.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        tensors = []
        for group, names in zip(self.param_groups, self._names, strict=True):
            settings = _settings(group, self._options)
            for name, parameter in zip(names, group["params"], strict=True):
                tensors.append(self._local(name, parameter, settings))
        self._runner.run(tensors)
        return loss

    def _set_up(self) -> None:
        """Check, agree with the other ranks, plan, and reserve state and buffers."""
        error: Exception | None = None
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        self._names = [_names(number, group) for number, group in enumerate(self.param_groups)]
        claims: Claims = {}
        plan: Plan | None = None
        rank = dist.get_rank() if dist.is_initialized() else 0
        try:
            for key in self._given.difference(GROUP_KEYS):
                choose("setting of a parameter group", key, self.defaults)
            self._options = self._make_options()
            settings = [_settings(group, self._options) for group in self.param_groups]
            device = _one_device(parameters, self._names)
            specs = self._specs()
            claims = _claims(specs, settings, self._options)
            plan = plan_step(specs, rank, self._options)
        except Exception as found:
            error = found
        _agree({} if error else claims, error)
        assert plan is not None
        for parameter in parameters:
            if "momentum_buffer" not in self.state[parameter]:
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter, requires_grad=False)
        self._plan = plan
        buffers = Buffers(plan, device)
        self._find_groups(plan, parameters)
        exchanger = Exchanger(plan, self._groups, buffers, device)
        self._runner = StepRunner(plan, buffers, exchanger)

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
            refuse_unmatched("row_blocks", blocks or (), names)
            for name, parameter in zip(its_names, group["params"], strict=True):
                if not parameter.is_floating_point() or parameter.dtype == torch.float16:
                    raise TypeError(
                        f"parameter {name!r} is {parameter.dtype}: give bfloat16, float32 or float64 matrices"
                    )
                shape = tuple(parameter.shape)
                rows = matrix_rows(name, shape, blocks or self._row_blocks)
                try:
                    storage = _storage(parameter, self._process_group)
                    specs.append(ParameterSpec(name, shape, parameter.dtype, rows, storage, number))
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
        gradient = parameter.grad
        if gradient is None:
            raise ValueError(
                f"parameter {name!r} has no gradient on this rank: each step needs one on every rank. Leave it "
                "out of DistMuon, or give it a zero gradient"
            )
        if isinstance(parameter, DTensor) and (
            not isinstance(gradient, DTensor) or gradient.placements != parameter.placements
        ):
            placed = gradient.placements if isinstance(gradient, DTensor) else "a plain tensor"
            raise ValueError(f"parameter {name!r} is placed {parameter.placements}, but its gradient {placed}")
        if gradient.is_sparse:
            raise ValueError(f"parameter {name!r} has a sparse gradient: Muon needs a dense one")
        momentum = self.state[parameter]["momentum_buffer"]
        if gradient.dtype != momentum.dtype:
            raise ValueError(f"parameter {name!r} has a gradient of {gradient.dtype}, but momentum of {momentum.dtype}")
        return LocalParameter(_plain(parameter), _plain(gradient), _plain(momentum), settings)


def _agree(claims: Claims, error: Exception | None) -> None:
    """Raise ``error``; of several ranks all raise, or none."""
    if dist.is_initialized():
        agree(claims, error, host_group())
    elif error:
        raise error


def _refuse_no_row_blocks(blocks: object) -> None:
    if blocks is not None and not (isinstance(blocks, Mapping) and all(isinstance(key, str) for key in blocks)):
        raise TypeError(f"row_blocks is {blocks!r}: give a dict, name pattern -> rows of each matrix")


def _options(
    buckets: Patterns | None,
    variant: str | Variant,
    ns_dtype: torch.dtype,
    ns_algorithm: str,
    max_batch_bytes: int,
    share_replicas: bool | None,
    capturable: bool,
) -> PlanOptions:
    """The options of the plan, checked.

    Raises:
        ValueError: an unknown name, or a number out of range.
    """
    if ns_dtype not in NS_DTYPES:
        raise ValueError(f"ns_dtype is {ns_dtype}: choose torch.bfloat16 or torch.float32")
    return PlanOptions(
        buckets, get_variant(variant), ns_dtype, ns_algorithm, max_batch_bytes, share_replicas, capturable
    )


def _names(number: int, group: dict[str, Any]) -> list[str]:
    """Names of the parameters of group ``number``; unnamed ones are numbered."""
    names = group.get("param_names") or [f"group{number}.{index}" for index in range(len(group["params"]))]
    return [clean_name(name) for name in names]


def _settings(group: dict[str, Any], options: PlanOptions) -> Settings:
    """The settings of a group, as numbers but for a learning rate that must not be read.

    Raises:
        ValueError: a setting out of range, named.
    """
    lr = group["lr"]
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError(f"lr is a tensor of {lr.numel()} elements: give one")
    if options.capturable and not isinstance(lr, Tensor):
        raise ValueError(f"capturable=True reads no number on the host: lr is {lr}, give a tensor")
    if isinstance(lr, Tensor):
        lr = lr.view(()) if options.capturable else lr.item()
    values = {field.name: group[field.name] for field in fields(Settings)} | {"lr": lr}
    for name in ("lr", "weight_decay", "momentum", "eps"):
        value = values[name]
        if name == "lr" and isinstance(value, Tensor):
            continue
        if not isinstance(value, Real):
            raise TypeError(f"{name} is {value!r}: give a number" + " or a tensor of one" * (name == "lr"))
        if not 0.0 <= float(value) < math.inf:
            raise ValueError(f"{name} is {value}: give a finite number that is not negative")
    if values["adjust_lr_fn"] not in ADJUST_LR_FNS:
        raise ValueError(f"adjust_lr_fn is {values['adjust_lr_fn']!r}: choose one of {ADJUST_LR_FNS}")
    ns_steps = group["ns_steps"]
    if not isinstance(ns_steps, int) or not 0 < ns_steps < 100:
        raise ValueError(f"ns_steps is {ns_steps!r}: give 1 to 99")
    values["ns_coefficients"] = coefficients_by_step(values["ns_coefficients"], ns_steps, options.ns_algorithm)
    return Settings(**values)


def _storage(parameter: Tensor, group: dist.ProcessGroup | None) -> Storage | None:
    """Where a parameter lies; a plain one is a replica on every rank of ``group``, if there is one."""
    if not isinstance(parameter, DTensor):
        ranks = dist.get_process_group_ranks(group) if group else ()
        return Storage((len(ranks),), tuple(ranks), (Replicate(),)) if ranks else None
    mesh = parameter.device_mesh
    return Storage(tuple(mesh.shape), tuple(mesh.mesh.flatten().tolist()), tuple(parameter.placements))


def _claims(specs: Sequence[ParameterSpec], settings: Sequence[Settings], options: PlanOptions) -> Claims:
    """What this rank is about to do with each mesh, for :func:`~distmuon.agreement.agree`."""
    common = [(option.name, repr(getattr(options, option.name))) for option in fields(options)]
    claims: dict[tuple[int, ...], list[tuple[str, str]]] = {}
    for spec in specs:
        if spec.storage:
            items = claims.setdefault(spec.storage.ranks, list(common))
            items.append((f"parameter {len(items) - len(common)} there", f"{spec}, {settings[spec.group]}"))
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
