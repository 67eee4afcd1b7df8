"""The iterations, on one matrix or a batch that is as wide as tall or wider and normalised.

All are the polynomials ``X <- (a I + b G + c G^2) X`` with ``G = X X^T``. What tells them apart on a GPU is what the
products add to. A product adds to what is in its result, so ``addmm(bias, ...)`` copies the bias there first: two
copies an iteration. Here, a product that adds writes in place, to a matrix that is there for it:

    standard     b G + c G^2 and a X + ... by addmm: the two copies, and the bits of torch.optim.Muon
    polynomial   S = I + (2c/b) G;   P = (a - w) I + w S^2 with w = b^2/4c;   X <- P X
    in_place     S as above;   Y = S X;   X <- (a - w) X + w S Y, in place
    gram         P = a I + b G + c G^2 as it stands, but G <- P G P and Q <- Q P; X <- Q X at the end

The identities are used up by the products that add to them, so all that a batch needs are made by one kernel, if there
is room. They are exact in bf16, and the constants are factors that a product applies before it rounds. That S begins
with I, and not with a multiple of it, matters: its diagonal lies just below 1, where bf16 is finest for its size.

Each function takes

    x: (short, long) or (n, short, long), any strides; may be changed.
    triples: a, b, c of each step.
    out: where the last product may write its result, None for a tensor of its own. It may be what ``x`` is in.
    identities: what makes them; "standard" needs none.

and returns the result: ``out``, ``x`` itself, or a new contiguous tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from distmuon.newton_schulz.coefficients import Triple
from distmuon.newton_schulz.costs import gram_segments


class Identities(NamedTuple):
    """Makes identities of one size, any number by one kernel.

    Attributes:
        counting: 0, 1, 2, ..., as many as they have rows.
        filled_steps: for how many steps of a batch they are made at once.
    """

    counting: Tensor
    filled_steps: int

    def make(self, dtype: torch.dtype, *numbers: int) -> Tensor:
        """(*numbers, short, short): 1 where row and column have one number."""
        size = (*numbers, len(self.counting), len(self.counting))
        result = torch.empty(size, dtype=dtype, device=self.counting.device)
        return torch.eq(self.counting[:, None].expand(size), self.counting.expand(size), out=result)

    def each(self, x: Tensor, a_step: int, steps: int) -> Iterator[Tensor]:
        """Identities like the Gram matrices of ``x``, ``a_step`` for each of the steps, each to be used once."""
        for start in range(0, steps, self.filled_steps):
            filled = a_step * min(self.filled_steps, steps - start)
            yield from self.make(x.dtype, filled, *x.shape[:-2])


def standard(x: Tensor, triples: Sequence[Triple], out: Tensor | None, identities: Identities | None = None) -> Tensor:
    """As ``torch.optim.Muon``, product by product."""
    addmm, mm = (torch.baddbmm, torch.bmm) if x.ndim == 3 else (torch.addmm, torch.mm)
    if len(triples) == 1:
        out = None  # x is still read when it is written
    for step, (a, b, c) in enumerate(triples, 1):
        gram = mm(x, x.mT)
        polynomial = addmm(gram, gram, gram, beta=b, alpha=c)
        if step < len(triples) or out is None:
            x = addmm(x, polynomial, x, beta=a)
        elif _by_columns(out):
            addmm(x.mT, x.mT, polynomial.mT, beta=a, out=out.mT)
        else:
            addmm(x, polynomial, x, beta=a, out=out)
    return x if out is None else out


def polynomial(x: Tensor, triples: Sequence[Triple], out: Tensor | None, identities: Identities) -> Tensor:
    """The square completed; exactly the standard FLOPs."""
    if len(triples) == 1:
        out = None
    bias = identities.each(x, 2, len(triples))
    for step, (a, b, c) in enumerate(triples, 1):
        weight = b * b / (4 * c)
        square = _add_product_(next(bias), x, x.mT, beta=1.0, alpha=2 * c / b)
        factor = _add_product_(next(bias), square, square, beta=a - weight, alpha=weight)
        x = _product(factor, x, out if step == len(triples) else None)
    return x


def in_place(x: Tensor, triples: Sequence[Triple], out: Tensor | None, identities: Identities) -> Tensor:
    """The square completed and X updated in place; for matrices that are square or nearly so."""
    bias = identities.each(x, 1, len(triples))
    for a, b, c in triples:
        weight = b * b / (4 * c)
        square = _add_product_(next(bias), x, x.mT, beta=1.0, alpha=2 * c / b)
        _add_product_(x, square, _product(square, x), beta=a - weight, alpha=weight)
    return x


def gram(x: Tensor, triples: Sequence[Triple], out: Tensor | None, identities: Identities) -> Tensor:
    """On the Gram matrix; for matrices much wider than tall. X is read anew at every restart."""
    identity = identities.make(x.dtype)
    segments = list(gram_segments(len(triples)))
    if len(segments) == 1:
        out = None
    for start, stop in segments:
        square, applied = _product(x, x.mT), None
        for step, (a, b, c) in enumerate(triples[start:stop], start + 1):
            factor = _add_product_(torch.add(identity, square, alpha=b / a), square, square, beta=a, alpha=c)
            applied = factor if applied is None else _product(applied, factor)
            if step < stop:
                square = _product(_product(factor, square), factor)
        assert applied is not None
        x = _product(applied, x, out if stop == len(triples) else None)
    return x


def iteration_dtype(arithmetic: str, ns_dtype: torch.dtype) -> torch.dtype:
    """The dtype of ``x``: half precision with the more digits for "gram", which rounds the small matrices more often.

    Their entries are of the order of 1, and between two restarts the polynomials magnify by less than 50: far from the
    ends of its range.
    """
    return torch.float16 if arithmetic == "gram" and ns_dtype == torch.bfloat16 else ns_dtype


def _product(left: Tensor, right: Tensor, out: Tensor | None = None) -> Tensor:
    mm = torch.bmm if left.ndim == 3 else torch.mm
    if out is None:
        return mm(left, right)
    if _by_columns(out):
        mm(right.mT, left.mT, out=out.mT)
    else:
        mm(left, right, out=out)
    return out


def _add_product_(bias: Tensor, left: Tensor, right: Tensor, *, beta: float, alpha: float) -> Tensor:
    """``bias <- beta bias + alpha left right``."""
    if _by_columns(bias):
        _add_product_(bias.mT, right.mT, left.mT, beta=beta, alpha=alpha)
        return bias
    if bias.ndim == 3:
        return bias.baddbmm_(left, right, beta=beta, alpha=alpha)
    return bias.addmm_(left, right, beta=beta, alpha=alpha)


def _by_columns(tensor: Tensor) -> bool:
    """Whether it is the transpose of what is stored. A product is written to that as the transposed product: on a CPU a
    batched product into strided memory would be summed in another order than a single one.
    """
    return tensor.stride(-2) < tensor.stride(-1)


#: By the names that :func:`~distmuon.newton_schulz.costs.arrangement` chooses from.
ITERATIONS: dict[str, Callable[[Tensor, Sequence[Triple], Tensor | None, Any], Tensor]] = {
    "standard": standard,
    "polynomial": polynomial,
    "in_place": in_place,
    "gram": gram,
}
