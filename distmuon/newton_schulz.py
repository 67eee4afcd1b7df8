"""Newton-Schulz orthogonalisation of a matrix, or of a batch of one shape, with the bits of ``torch.optim.Muon``."""

from __future__ import annotations

import torch
from torch import Tensor

#: Keller Jordan's quintic, as in torch.optim.Muon: https://kellerjordan.github.io/posts/muon/
COEFFICIENTS = (3.4445, -4.775, 2.0315)

#: On a CPU matrices with a shorter short side are orthogonalised one at a time, each in memory of its own. Up to 16^3
#: multiply-adds PyTorch multiplies one pair of bf16 matrices by itself but hands a batch of them to oneDNN
#: (``use_mkldnn_matmul`` in aten/src/ATen/native/mkldnn/Matmul.cpp), which sums in another order, and fp32 products
#: depend on how the operands are aligned. Above, batched and single products have the same bits.
MIN_BATCHED_SIDE_ON_CPU = 17


def orthogonalize_(
    matrices: Tensor,
    out: Tensor | None = None,
    *,
    ns_coefficients: tuple[float, float, float] = COEFFICIENTS,
    ns_steps: int = 5,
    eps: float = 1e-7,
    ns_dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Orthogonalise ``matrices``: ``X <- a X + (b X X^T + c (X X^T)^2) X`` for ``ns_steps`` iterations, on the short
    side.

    A batch has the bits of its matrices one at a time.

    Args:
        matrices: (rows, cols) or (n, rows, cols), any dtype.
        out: of the same shape, receives the result, rounded to its dtype once, and ``matrices`` are not changed. None:
            the result replaces them, and nothing is cast if they are of ``ns_dtype`` already.
        ns_coefficients: a, b, c.
        ns_steps: iterations.
        eps: lower bound of the norm that divides the input.
        ns_dtype: of norm, products and iterates.
    """
    a, b, c = ns_coefficients
    batched = matrices.ndim == 3
    rows, cols = matrices.shape[-2:]
    small = matrices.device.type == "cpu" and min(rows, cols) < MIN_BATCHED_SIDE_ON_CPU
    if batched and small:
        for matrix, result in zip(matrices, matrices if out is None else out, strict=True):
            orthogonalize_(
                matrix,
                result,
                ns_coefficients=ns_coefficients,
                ns_steps=ns_steps,
                eps=eps,
                ns_dtype=ns_dtype,
            )
        return
    addmm, mm = (torch.baddbmm, torch.bmm) if batched else (torch.addmm, torch.mm)
    in_place = out is None and matrices.dtype == ns_dtype and not small
    # With another out a copy even if nothing is cast: the division below must not reach the momentum.
    x = matrices if in_place else matrices.to(ns_dtype, copy=True)
    out = matrices if out is None else out
    # Over the stored orientation, so that a matrix and its place in a batch are summed in the same order.
    norm = torch.linalg.vector_norm(x.flatten(1), dim=1)[:, None, None] if batched else torch.linalg.vector_norm(x)
    x.div_(norm.clamp(min=eps))
    # The first iteration reads a tall matrix through its transpose and leaves a wide, contiguous one. Copying it into a
    # wide one before would round differently.
    tall = rows > cols
    x = x.mT if tall else x
    for step in range(ns_steps):
        gram = mm(x, x.mT)
        polynomial = addmm(gram, gram, gram, beta=b, alpha=c)
        if in_place and not tall and 0 < step == ns_steps - 1:  # x is no longer in out
            addmm(x, polynomial, x, beta=a, out=out)
            return
        x = addmm(x, polynomial, x, beta=a)
    out.copy_(x.mT if tall else x)
