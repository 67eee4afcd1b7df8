"""Newton-Schulz orthogonalisation of one matrix, or of a batch of matrices of one shape, with the bits of
``torch.optim.Muon``.
"""

from __future__ import annotations

import torch
from torch import Tensor

#: Keller Jordan's quintic, as in torch.optim.Muon: https://kellerjordan.github.io/posts/muon/
COEFFICIENTS = (3.4445, -4.775, 2.0315)


def orthogonalize_(
    out: Tensor,
    matrices: Tensor,
    *,
    ns_coefficients: tuple[float, float, float] = COEFFICIENTS,
    ns_steps: int = 5,
    eps: float = 1e-7,
    ns_dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Write the orthogonalised ``matrices`` into ``out``; ``matrices`` are not changed unless they are ``out``.

    ``X <- a X + (b X X^T + c (X X^T)^2) X`` for ``ns_steps`` iterations, on the short side.

    A batch has the bits of its matrices one at a time if their short side is at least
    :data:`distmuon.plan.MIN_BATCHED_SIDE`.

    Args:
        out: (rows, cols) or (n, rows, cols), any dtype; the result is rounded to it once.
        matrices: of the same shape.
        ns_coefficients: a, b, c.
        ns_steps: iterations.
        eps: lower bound of the norm that divides the input.
        ns_dtype: of norm, products and iterates.
    """
    a, b, c = ns_coefficients
    batched = matrices.ndim == 3
    addmm, mm = (torch.baddbmm, torch.bmm) if batched else (torch.addmm, torch.mm)
    # A copy even if the dtype is ns_dtype already: the division below must not reach the momentum.
    x = matrices.to(ns_dtype, copy=True)
    # Over the stored orientation, so that a matrix and its place in a batch are summed in the same order.
    norm = torch.linalg.vector_norm(x.flatten(1), dim=1)[:, None, None] if batched else torch.linalg.vector_norm(x)
    x.div_(norm.clamp(min=eps))
    tall = x.shape[-2] > x.shape[-1]
    # The first iteration reads a tall matrix through its transpose and leaves a wide, contiguous one. Copying it into a
    # wide one before would round differently.
    x = x.mT if tall else x
    for _ in range(ns_steps):
        gram = mm(x, x.mT)
        polynomial = addmm(gram, gram, gram, beta=b, alpha=c)
        x = addmm(x, polynomial, x, beta=a)
    out.copy_(x.mT if tall else x)
