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
    results: for all others; those of the step before may be written over.
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
from distmuon.newton_schulz.scratch import Results


class Identities(NamedTuple):
    """Makes identities of one size, any number by one kernel.

    Attributes:
        counting: 0, 1, 2, ..., as many as they have rows.
        filled_steps: for how many steps of a batch they are made at once.
        results: for them.
    """

    counting: Tensor
    filled_steps: int
    results: Results

    def make(self, x: Tensor, *numbers: int) -> Tensor:
        """(*numbers, short, short) of the dtype of ``x``: 1 where row and column have one number."""
        size = (*numbers, len(self.counting), len(self.counting))
        return self._fill(self.results.empty(f"{numbers} identities", x, size, x.dtype))

    def each(self, x: Tensor, a_step: int, steps: int) -> Iterator[Tensor]:
        """Identities like the Gram matrices of ``x``, ``a_step`` for each of the steps, each to be used once."""
        made = self.make(x, a_step * min(self.filled_steps, steps), *x.shape[:-2])
        yield from made
        for start in range(self.filled_steps, steps, self.filled_steps):
            yield from self._fill(made[: a_step * (steps - start)])

    def _fill(self, tensor: Tensor) -> Tensor:
        size = tensor.shape
        return torch.eq(self.counting[:, None].expand(size), self.counting.expand(size), out=tensor)


def standard(
    x: Tensor, triples: Sequence[Triple], out: Tensor | None, results: Results, _: Identities | None
) -> Tensor:
    """As ``torch.optim.Muon``, product by product."""
    addmm, mm = (torch.baddbmm, torch.bmm) if x.ndim == 3 else (torch.addmm, torch.mm)
    x_t = x.mT
    for step, (a, b, c) in enumerate(triples, 1):
        gram = results("gram", mm, x, x_t)
        polynomial = results("polynomial", addmm, gram, gram, gram, beta=b, alpha=c)
        if out is not None and 1 < step == len(triples):  # in the first step x may be in out
            if _by_columns(out):
                addmm(x_t, x_t, polynomial.mT, beta=a, out=out.mT)
                return out
            return addmm(x, polynomial, x, beta=a, out=out)
        name = f"iterate {step % 2}"
        x = results(name, addmm, x, polynomial, x, beta=a)
        x_t = results.transposed(name)
    return x


def polynomial(
    x: Tensor, triples: Sequence[Triple], out: Tensor | None, results: Results, identities: Identities
) -> Tensor:
    """The square completed; exactly the standard FLOPs."""
    bias = identities.each(x, 2, len(triples))
    for step, (a, b, c) in enumerate(triples, 1):
        weight = b * b / (4 * c)
        square = _add_product_(next(bias), x, x.mT, beta=1.0, alpha=2 * c / b)
        factor = _add_product_(next(bias), square, square, beta=a - weight, alpha=weight)
        if out is not None and 1 < step == len(triples):
            return _product_into(out, factor, x)
        x = results(f"iterate {step % 2}", _mm(x), factor, x)
    return x


def in_place(
    x: Tensor, triples: Sequence[Triple], _: Tensor | None, results: Results, identities: Identities
) -> Tensor:
    """The square completed and X updated in place; for matrices that are square or nearly so."""
    bias = identities.each(x, 1, len(triples))
    for a, b, c in triples:
        weight = b * b / (4 * c)
        square = _add_product_(next(bias), x, x.mT, beta=1.0, alpha=2 * c / b)
        _add_product_(x, square, results("product", _mm(x), square, x), beta=a - weight, alpha=weight)
    return x


def gram(x: Tensor, triples: Sequence[Triple], out: Tensor | None, results: Results, identities: Identities) -> Tensor:
    """On the Gram matrix; for matrices much wider than tall. X is read anew at every restart."""
    mm = _mm(x)
    identity = identities.make(x)
    for number, (start, stop) in enumerate(gram_segments(len(triples))):
        square, applied = results("square 1", mm, x, x.mT), None
        for step, (a, b, c) in enumerate(triples[start:stop], start + 1):
            factor = results(f"factor {step % 2}", torch.add, identity, square, alpha=b / a)
            _add_product_(factor, square, square, beta=a, alpha=c)
            applied = factor if applied is None else results(f"applied {step % 2}", mm, applied, factor)
            if step < stop:
                square = results("half", mm, factor, square)
                square = results(f"square {(step - start + 1) % 2}", mm, square, factor)
        assert applied is not None
        if out is not None and number and stop == len(triples):
            return _product_into(out, applied, x)
        x = results(f"iterate {number % 2}", mm, applied, x)
    return x


def iteration_dtype(arithmetic: str, ns_dtype: torch.dtype) -> torch.dtype:
    """The dtype of ``x``: half precision with the more digits for "gram", which rounds the small matrices more often.

    Their entries are of the order of 1, and between two restarts the polynomials magnify by less than 50: far from the
    ends of its range.
    """
    return torch.float16 if arithmetic == "gram" and ns_dtype == torch.bfloat16 else ns_dtype


def _mm(x: Tensor) -> Callable[..., Tensor]:
    return torch.bmm if x.ndim == 3 else torch.mm


def _product_into(out: Tensor, left: Tensor, right: Tensor) -> Tensor:
    if _by_columns(out):
        _mm(out)(right.mT, left.mT, out=out.mT)
        return out
    return _mm(out)(left, right, out=out)


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
ITERATIONS: dict[str, Callable[[Tensor, Sequence[Triple], Tensor | None, Results, Any], Tensor]] = {
    "standard": standard,
    "polynomial": polynomial,
    "in_place": in_place,
    "gram": gram,
}
