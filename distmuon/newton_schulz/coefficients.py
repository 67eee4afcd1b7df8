"""Coefficients a, b, c of the polynomials ``a x + b x^3 + c x^5`` that are applied to the singular values in turn."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from distmuon.names import choose

Triple = tuple[float, float, float]

#: Keller Jordan's quintic, as in torch.optim.Muon, in every step: https://kellerjordan.github.io/posts/muon/
COEFFICIENTS: Triple = (3.4445, -4.775, 2.0315)

#: Polar Express (Amsel et al. 2025, arXiv:2505.16932): each polynomial is the best one after those before it, for
#: singular values in [1e-3, 1]. ``scripts/polar_express.py`` derives them, with the paper's cushion.
_POLAR_EXPRESS: tuple[Triple, ...] = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
    (1.875, -1.25, 0.375),
)

#: By how much a singular value may exceed what a polynomial was made for, by rounding; all but the last allow for it.
SAFETY = 1.01

#: Polar Express as it is to be used: ``p(x / SAFETY)``, but the last, which later steps repeat.
POLAR_EXPRESS: tuple[Triple, ...] = (
    *((a / SAFETY, b / SAFETY**3, c / SAFETY**5) for a, b, c in _POLAR_EXPRESS[:-1]),
    _POLAR_EXPRESS[-1],
)

NAMED = {"quintic": (COEFFICIENTS,), "polar_express": POLAR_EXPRESS}

#: What :func:`coefficients_by_step` takes.
Coefficients = str | Sequence[float] | Sequence[Sequence[float]]

#: Completing the square takes ``b^2 / 4c`` from a, which loses bits of a if it is much larger. No set in use comes near
#: a factor of 2.
MOST_CANCELLED = 16.0


def coefficients_by_step(
    coefficients: Coefficients, ns_steps: int, ns_algorithm: str = "standard"
) -> tuple[Triple, ...]:
    """a, b, c of each step.

    Args:
        coefficients: a, b, c for all steps; or a sequence of them, one a step, of which the last is repeated if there
            are more steps and the first are taken if there are fewer; or a name, "quintic" or "polar_express".
        ns_steps: iterations.
        ns_algorithm: that they are for.

    Raises:
        ValueError: an unknown name, something else than finite numbers in threes, or a, b, c that the algorithm loses
            precision with.
    """
    if isinstance(coefficients, str):
        triples: tuple[Triple, ...] = NAMED[choose("ns_coefficients", coefficients, NAMED)]
    else:
        given: Sequence[Any] = coefficients if _are_sequences(coefficients) else (coefficients,)
        if not given or not all(_is_triple(triple) for triple in given):
            raise ValueError(
                f"ns_coefficients is {coefficients!r}: give a, b, c as three finite numbers, a sequence of such "
                f"triples, one a step, or one of the names {', '.join(NAMED)}"
            )
        triples = tuple((float(a), float(b), float(c)) for a, b, c in given)
    if ns_algorithm != "standard":
        for a, b, c in triples[:ns_steps]:
            if b == 0 or b * b > 4 * MOST_CANCELLED * abs(a * c):
                raise ValueError(
                    f"ns_coefficients has {(a, b, c)}: ns_algorithm {ns_algorithm!r} completes a square, for which b "
                    f"must not be 0, and b^2 / 4c at most {MOST_CANCELLED:g} times a. Choose ns_algorithm='standard'"
                )
    return (*triples[:ns_steps], *triples[-1:] * (ns_steps - len(triples)))


def _are_sequences(values: Any) -> bool:
    return isinstance(values, Sequence) and any(isinstance(value, Sequence) for value in values)


def _is_triple(values: Any) -> bool:
    return (
        isinstance(values, Sequence)
        and not isinstance(values, str)
        and len(values) == 3
        and all(
            isinstance(value, float | int) and not isinstance(value, bool) and math.isfinite(value) for value in values
        )
    )
