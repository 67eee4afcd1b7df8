"""Elementwise operators on lists of tensors: one fused ``torch._foreach_*`` each, or one tensor at a time. Same
bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

Tensors = list[Tensor] | tuple[Tensor, ...]

#: A number, or a 0-dim tensor that stays where it is.
Scalar = float | Tensor


def lerp_(fused: bool, starts: Tensors, ends: Tensors, weight: float) -> None:
    """``start <- start + weight (end - start)`` for each pair."""
    if fused:
        torch._foreach_lerp_(starts, ends, weight)
    else:
        for start, end in zip(starts, ends, strict=True):
            start.lerp_(end, weight)


def lerp(fused: bool, starts: Tensors, ends: Tensors, weight: float) -> Tensors:
    """``start + weight (end - start)`` for each pair."""
    if fused:
        return torch._foreach_lerp(starts, ends, weight)
    return [start.lerp(end, weight) for start, end in zip(starts, ends, strict=True)]


def factor(fused: bool, number: float, dtype: torch.dtype) -> Scalar:
    """A number as :func:`mul_` takes it for tensors of ``dtype``."""
    if not fused:
        return number
    # As a tensor: on a CPU a Python number would be rounded to bf16 before it multiplies bf16 tensors. In fp32, in
    # which they are multiplied, as fp32 tensors are; converting a float64 each time takes longer than to multiply.
    return torch.tensor(number, dtype=dtype if dtype.itemsize > 4 else torch.float32)


def mul_(fused: bool, tensors: Tensors, factor: Scalar) -> None:
    """``tensor <- factor tensor`` for each."""
    if fused:
        torch._foreach_mul_(tensors, factor)
    else:
        for tensor in tensors:
            tensor.mul_(factor)


def add_(fused: bool, tensors: Tensors, others: Tensors, alpha: Scalar) -> None:
    """``tensor <- tensor + alpha other`` for each pair, rounded once.

    No fused operator takes ``alpha`` as a tensor without reading it or rounding twice, so then it is one tensor at a
    time.
    """
    if isinstance(alpha, Tensor):
        for tensor, other in zip(tensors, others, strict=True):
            tensor.addcmul_(other, alpha)
    elif fused:
        torch._foreach_add_(tensors, others, alpha=alpha)
    else:
        for tensor, other in zip(tensors, others, strict=True):
            tensor.add_(other, alpha=alpha)
