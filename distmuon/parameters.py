"""The parameters of an optimizer as a plan takes them, described and checked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from distmuon.agreement import Claims
from distmuon.checks import check_row_blocks
from distmuon.gradients import GradientPolicy
from distmuon.planning.matrices import RowBlocks, clean_name, matrix_rows, refuse_unmatched
from distmuon.planning.options import PlanOptions
from distmuon.planning.placement import ParameterSpec, Storage
from distmuon.settings import Settings

Group = dict[str, Any]


def names_of(number: int, group: Group) -> list[str]:
    """Names of the parameters of group ``number``, without wrappers' prefixes; unnamed ones are numbered."""
    names = group.get("param_names") or [f"group{number}.{index}" for index in range(len(group["params"]))]
    return [clean_name(name) for name in names]


def settled_row_blocks(
    groups: Sequence[Group], row_blocks: RowBlocks | None, names: Iterable[str]
) -> list[RowBlocks | None]:
    """The ``row_blocks`` that hold for each group: its own, or else those given for all.

    Raises:
        TypeError: they are no dict, pattern -> rows.
        ValueError: they are given twice and differ, or a pattern matches nothing.
    """
    for each in (row_blocks, *(group["row_blocks"] for group in groups)):
        if each is not None:
            check_row_blocks(each)
        refuse_unmatched("row_blocks", each or (), names)
    for group in groups:
        own = group["row_blocks"]
        if own and row_blocks and dict(own) != dict(row_blocks):
            raise ValueError(f"row_blocks is {row_blocks!r}, but a group carries {own!r}: give it once")
    return [dict(group["row_blocks"] or row_blocks or {}) or None for group in groups]


def describe(
    groups: Sequence[Group],
    names: Sequence[Sequence[str]],
    row_blocks: Sequence[RowBlocks | None],
    momentum_dtype: torch.dtype | None,
    process_group: dist.ProcessGroup | None,
) -> tuple[ParameterSpec, ...]:
    """All parameters of an optimizer, in order.

    Args:
        groups: of the optimizer.
        names: of the parameters of each group.
        row_blocks: that hold for each group.
        momentum_dtype: None for that of each parameter.
        process_group: whose ranks hold the plain ones, too.

    Raises:
        TypeError: a parameter that is not a floating point tensor.
        ValueError: a parameter that can't be planned, or two of one name.
    """
    specs: dict[str, ParameterSpec] = {}
    seen: dict[Tensor, str] = {}
    for number, (group, its_names, blocks) in enumerate(zip(groups, names, row_blocks, strict=True)):
        for name, parameter in zip(its_names, group["params"], strict=True):
            if parameter in seen:
                raise ValueError(f"parameter {name!r} is {seen[parameter]!r} once more: give each tensor once")
            seen[parameter] = name
            if name in specs:
                raise ValueError(f"two parameters are named {name!r}: patterns and plans need distinct names")
            if not parameter.is_floating_point() or parameter.dtype == torch.float16:
                raise TypeError(f"parameter {name!r} is {parameter.dtype}: give bfloat16, float32 or float64 matrices")
            shape = tuple(parameter.shape)
            rows = matrix_rows(name, shape, blocks)
            try:
                storage = _storage(parameter, process_group)
            except ValueError as refused:
                raise ValueError(f"parameter {name!r}: {refused}") from None
            specs[name] = ParameterSpec(name, shape, momentum_dtype or parameter.dtype, rows, storage, number)
    return tuple(specs.values())


def claims(
    specs: Sequence[ParameterSpec], settings: Sequence[Settings], options: PlanOptions, policy: GradientPolicy
) -> Claims:
    """What this rank is about to do, with each mesh and with all ranks, for :func:`~distmuon.agreement.agree`.

    Args:
        specs: its parameters.
        settings: of each group.
        options: of the plan.
        policy: which all ranks share, also those that share no mesh.
    """
    # Shown in full, and read to the host just here: of a tensor repr gives four digits.
    shown = [vars(replace(each, lr=float(each.lr))) for each in settings]
    common = [(option.name, repr(getattr(options, option.name))) for option in fields(options)]
    found: dict[tuple[int, ...], list[tuple[str, str]]] = {}
    number: Counter[tuple[int, ...]] = Counter()
    last_group: dict[tuple[int, ...], int] = {}
    for spec in specs:
        if spec.storage:
            ranks = spec.storage.ranks
            # A rank that has no parameter there lacks this item first.
            items = found.setdefault(ranks, [("parameter 0 there", f"{spec.name!r} of shape {spec.shape}"), *common])
            begins = last_group.get(ranks) != spec.group
            items.append((f"parameter {number[ranks]} there", f"{spec}{', first of a parameter group' * begins}"))
            if begins:
                its = shown[spec.group].items()
                items += [(f"{name} of the group of {spec.name!r}", repr(value)) for name, value in its]
            number[ranks] += 1
            last_group[ranks] = spec.group
    if dist.is_initialized():
        everyone = found.setdefault(tuple(range(dist.get_world_size())), [])
        everyone.insert(0, ("missing_gradients or non_finite", repr(policy)))
    return found


def one_device(parameters: Iterable[Tensor], names: Iterable[Iterable[str]]) -> torch.device:
    """The device of all parameters; without any the CPU.

    Raises:
        ValueError: there is more than one.
    """
    devices: dict[torch.device, str] = {}
    for parameter, name in zip(parameters, chain.from_iterable(names), strict=True):
        devices.setdefault(local(parameter).device, name)
    if len(devices) > 1:
        shown = ", ".join(f"{name!r} on {device}" for device, name in devices.items())
        raise ValueError(f"the parameters are on several devices ({shown}): move them to one")
    return next(iter(devices), torch.device("cpu"))


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of it."""
    # Not to_local(), which makes a view: three a parameter and step are most of what the host does for a small model.
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _storage(parameter: Tensor, group: dist.ProcessGroup | None) -> Storage | None:
    """Where a parameter lies; a plain one is a replica on every rank of ``group``, if there is one."""
    if not isinstance(parameter, DTensor):
        ranks = dist.get_process_group_ranks(group) if group else ()
        return Storage((len(ranks),), tuple(ranks), (Replicate(),)) if ranks else None
    mesh = parameter.device_mesh
    for axis, placement in enumerate(parameter.placements):
        if not isinstance(placement, Replicate) and (mesh.mesh.diff(dim=axis) < 0).any():
            raise ValueError(
                f"it is sharded over axis {axis} of mesh {mesh.mesh.tolist()}, along which ranks do not ascend. FSDP2 "
                "cuts it there in the order of ranks and DTensor in that of the mesh, so what a rank holds can't be "
                "told: make the mesh with ascending ranks along each axis"
            )
    return Storage(tuple(mesh.shape), tuple(mesh.mesh.flatten().tolist()), tuple(parameter.placements))
