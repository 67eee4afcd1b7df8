"""Orthogonalising a matrix, or a batch of one shape."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from distmuon.newton_schulz.coefficients import COEFFICIENTS, Triple
from distmuon.newton_schulz.costs import MAX_BATCH_BYTES, arrangement, filled_steps
from distmuon.newton_schulz.iterations import ITERATIONS, Identities, iteration_dtype
from distmuon.newton_schulz.scratch import Results, Scratch

#: On a CPU matrices with a shorter short side are orthogonalised one at a time, each in memory of its own. Up to 16^3
#: multiply-adds PyTorch multiplies one pair of bf16 matrices by itself but hands a batch of them to oneDNN
#: (``use_mkldnn_matmul`` in aten/src/ATen/native/mkldnn/Matmul.cpp), which sums in another order; small fp32 products
#: depend on how the operands are aligned. From here on batched and single products have the same bits
#: (``scripts/measure_bits.py``).
MIN_BATCHED_SIDE_ON_CPU = {torch.bfloat16: 17, torch.float32: 12}


def orthogonalize_(
    matrices: Tensor,
    out: Tensor | None = None,
    *,
    triples: Sequence[Triple] = (COEFFICIENTS,) * 5,
    eps: float = 1e-7,
    ns_dtype: torch.dtype = torch.bfloat16,
    ns_algorithm: str = "standard",
    scale_free: bool = False,
    counting: Tensor | None = None,
    max_bytes: int = MAX_BATCH_BYTES,
    scratch: Scratch | None = None,
) -> None:
    """Orthogonalise ``matrices``: ``X <- a X + (b X X^T + c (X X^T)^2) X`` for each of ``triples``, on the short side.

    A batch has the bits of its matrices one at a time.

    Args:
        matrices: (rows, cols) or (n, rows, cols), any dtype.
        out: of the same shape, receives the result, rounded to its dtype once, and ``matrices`` are not changed. None:
            the result replaces them, and nothing is cast if they are of ``ns_dtype`` already.
        triples: a, b, c of each iteration.
        eps: lower bound of the norm that divides the input.
        ns_dtype: of norm, products and iterates; where it is bfloat16, "gram" iterates in float16.
        ns_algorithm: one of :data:`~distmuon.newton_schulz.NS_ALGORITHMS`.
        scale_free: divide each matrix by a power of two first, so that its norm neither overflows nor comes near
            ``eps``: the bits are the same wherever they did not before.
        counting: 0, 1, 2, ... on the device, at least as many as the short side has, from which identities are made;
            None for a tensor of its own.
        max_bytes: within which identities are made for several steps at once.
        scratch: for what is needed on the way; None for tensors of its own.
    """
    batched = matrices.ndim == 3
    rows, cols = matrices.shape[-2:]
    small = matrices.device.type == "cpu" and min(rows, cols) < MIN_BATCHED_SIDE_ON_CPU[ns_dtype]
    if batched and small:
        for matrix, result in zip(matrices, matrices if out is None else out, strict=True):
            orthogonalize_(
                matrix,
                result,
                triples=triples,
                eps=eps,
                ns_dtype=ns_dtype,
                ns_algorithm=ns_algorithm,
                scale_free=scale_free,
                counting=counting,
                max_bytes=max_bytes,
                scratch=scratch,
            )
        return
    results = (scratch or Scratch()).results(matrices.shape, matrices.dtype)
    in_place = out is None and matrices.dtype == ns_dtype and not small
    x = matrices
    if not in_place:  # with another out a copy even if nothing is cast: the division must not reach the momentum
        x = results.empty("input", matrices, matrices.shape, ns_dtype).copy_(matrices)
    out = matrices if out is None else out
    if scale_free:
        _divide_by_power_of_two_(x, results)
    # Over the stored orientation, so that a matrix and its place in a batch are summed in the same order.
    norm = results("norm", torch.linalg.vector_norm, x, dim=(-2, -1), keepdim=True).clamp_(min=eps)
    arithmetic = arrangement(rows, cols, ns_algorithm)
    dtype = iteration_dtype(arithmetic, ns_dtype)
    if dtype == x.dtype:
        x.div_(norm)
    else:
        x = torch.div(x, norm, out=results.empty("divided", x, x.shape, dtype))
    # The first iteration reads a tall matrix through its transpose and leaves a wide, contiguous one. Copying it into a
    # wide one before would round differently.
    tall = rows > cols
    wide = x.mT if tall else x
    wide_out = wide if x is out else out.mT if tall else out
    identities = None
    if arithmetic != "standard":
        short, number = min(rows, cols), len(matrices) if batched else 1
        if counting is None:
            counting = torch.arange(short, dtype=torch.int32, device=x.device)
        together = filled_steps(number, rows, cols, dtype.itemsize, ns_algorithm, len(triples), max_bytes)
        identities = Identities(counting[:short], together, results)
    target = None if small or out.dtype != dtype else wide_out
    result = ITERATIONS[arithmetic](wide, triples, target, results, identities)
    if result is not wide_out:
        if ns_dtype not in (dtype, out.dtype):  # rounded to that, too, wherever it goes
            result = results.empty("rounded", result, result.shape, ns_dtype).copy_(result)
        wide_out.copy_(result)


def _divide_by_power_of_two_(x: Tensor, results: Results) -> None:
    """Divide each matrix, exactly, by the power of two that its largest element lies just above; zeros stay zeros."""
    dims = (-2, -1)
    largest = results("largest", torch.linalg.vector_norm, x, math.inf, dims, keepdim=True, dtype=torch.float32)
    largest.clamp_(min=torch.finfo(torch.float32).tiny)
    largest.view(torch.int32).bitwise_and_(0x7F800000)  # the exponent alone, without sign and fraction
    x.div_(largest)
