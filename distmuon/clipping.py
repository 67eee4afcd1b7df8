"""Clipping gradients that lie on several meshes, which ``torch.nn.utils.clip_grad_norm_`` refuses."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

#: Mesh axes over which gradients are sharded: the process group of each. () for whole gradients.
_Axes = tuple[dist.ProcessGroup, ...]


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> Tensor:
    """Scale the gradients in place so that the norm of all together is at most ``max_norm``.

    Collective over the meshes of the gradients: every rank must call it, with gradients for the same parameters.

    Args:
        parameters: DTensors of any meshes and plain tensors, mixed; those without a gradient are passed over.
        max_norm: upper bound of the norm.
        norm_type: the p of the norm, above 0; may be ``inf``.
        error_if_nonfinite: raise if the norm is not finite, which makes a GPU wait for its host.

    Returns:
        The norm before clipping, a plain 0-D fp32 tensor, equal on all ranks; 0 if there is no gradient.

    Raises:
        ValueError: ``norm_type`` is not above 0, ``max_norm`` is negative or not a number, or a gradient is still to be
            summed over ranks (``Partial``).
        TypeError: a parameter that is not a tensor.
        RuntimeError: the norm is not finite, if that is to be an error: on all ranks, and nothing is scaled.
    """
    if not norm_type > 0:
        raise ValueError(f"norm_type must be above 0, not {norm_type}")
    if not max_norm >= 0:
        raise ValueError(f"max_norm is {max_norm}: give 0 or more")
    pieces: dict[_Axes, list[Tensor]] = {}
    for parameter in [parameters] if isinstance(parameters, Tensor) else parameters:
        if not isinstance(parameter, Tensor):
            raise TypeError(f"parameters has a {type(parameter).__name__}: give tensors, as model.parameters() does")
        if parameter.grad is not None:
            piece, axes = _local(parameter.grad)
            pieces.setdefault(axes, []).append(piece)
    norms = [_norm(tensors, axes, norm_type) for axes, tensors in pieces.items()]
    if not norms:
        return torch.tensor(0.0)
    total = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(f"the norm of the gradients is {total.item()}: they are not scaled")
    # Always multiply, by 1 if need be: asking whether the norm is too large would make a GPU wait for its host.
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0).float()
    for tensors in pieces.values():
        torch._foreach_mul_(tensors, factor)
    return total.float()


def _local(gradient: Tensor) -> tuple[Tensor, _Axes]:
    """This rank's piece of a gradient, and the groups that hold the others."""
    if not isinstance(gradient, DTensor):
        return gradient, ()
    if any(placement.is_partial() for placement in gradient.placements):
        raise ValueError(f"a gradient lies {gradient.placements}, so is still to be summed: redistribute it first")
    sharded = [axis for axis, placement in enumerate(gradient.placements) if not isinstance(placement, Replicate)]
    return gradient.to_local(), tuple(gradient.device_mesh.get_group(axis) for axis in sharded)


def _norm(tensors: list[Tensor], axes: _Axes, norm_type: float) -> Tensor:
    """The norm of gradients over the ranks that share them, 0-D fp64.

    fp32 would add up a million squares with an error that depends on how they are cut, and overflow on large ones.
    """
    largest = math.isinf(norm_type)
    filled = [tensor for tensor in tensors if tensor.numel()]  # an empty piece has no largest element
    value = torch.zeros((), dtype=torch.float64, device=tensors[0].device)
    if filled:
        norms = torch.stack(torch._foreach_norm(filled, norm_type, dtype=torch.float64))
        value = norms.max() if largest else (norms**norm_type).sum()
    for group in axes:
        dist.all_reduce(value, dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, group=group)
    return value if largest else value ** (1 / norm_type)
