"""Derive the Polar Express coefficients (Amsel et al. 2025, arXiv:2505.16932), and compare them with those in use.

    python scripts/polar_express.py

In each step the odd polynomial of degree 5 that comes nearest to 1, in the worst case, on the interval in which the
polynomials before it left the singular values: first [1e-3, 1], then [l, 2 - l]. It is found by Remez's exchange: on
the interval's ends and two points between them the error alternates, and those points are where its slope is zero. The
lower end is raised to CUSHION times the upper one, so that no polynomial has a large slope far from 0, and the result
scaled so that the true ends lie as far below 1 as above it.

Prints a, b, c of each polynomial, without the allowance for rounding that POLAR_EXPRESS has, and the largest difference
from that. Exit code 1 if they differ by more than 1e-8, relative.
"""

from __future__ import annotations

import sys

import torch

from distmuon.commandline import Parser
from distmuon.newton_schulz import POLAR_EXPRESS
from distmuon.newton_schulz.coefficients import SAFETY, Triple

LOWER = 1e-3
CUSHION = 0.02407327424182761  # the paper's
TOLERANCE = 1e-8


def main() -> int:
    """Derive, print and compare."""
    Parser(__doc__).parse_args()
    worst = 0.0
    last = len(POLAR_EXPRESS) - 1
    for number, derived in enumerate(compose(LOWER, len(POLAR_EXPRESS))):
        safety = 1.0 if number == last else SAFETY
        used = tuple(value * safety ** (2 * power + 1) for power, value in enumerate(POLAR_EXPRESS[number]))
        worst = max(worst, *(abs(one / other - 1) for one, other in zip(derived, used, strict=True)))
        print(*(f"{value:22.16f}" for value in derived))
    print(f"largest relative difference from POLAR_EXPRESS: {worst:.1e}")
    return int(worst > TOLERANCE)


def compose(lower: float, steps: int) -> list[Triple]:
    """The polynomials in turn, for singular values in [lower, 1]."""
    upper = 1.0
    polynomials = []
    for _ in range(steps):
        a, b, c = best_quintic(max(lower, CUSHION * upper), upper)
        if CUSHION * upper > lower:
            scale = 2 / (value_at(lower, (a, b, c)) + value_at(upper, (a, b, c)))
            a, b, c = a * scale, b * scale, c * scale
        polynomials.append((a, b, c))
        lower = value_at(lower, (a, b, c))
        upper = 2 - lower
    return polynomials


def best_quintic(lower: float, upper: float) -> Triple:
    """a, b, c of the odd quintic nearest to 1 on [lower, upper]."""
    if lower / upper > 1 - 5e-6:  # the limit: value 1 and two derivatives 0 at one point
        return 15 / (8 * upper), -10 / (8 * upper**3), 3 / (8 * upper**5)
    inner, error, before = [(3 * lower + upper) / 4, (lower + 3 * upper) / 4], 0.0, 1.0
    while abs(error - before) > 1e-15:
        points = torch.tensor([lower, *inner, upper], dtype=torch.float64)
        signs = torch.tensor([1.0, -1.0, 1.0, -1.0], dtype=torch.float64)
        system = torch.stack([points, points**3, points**5, signs], dim=1)
        before = error
        a, b, c, error = torch.linalg.solve(system, torch.ones(4, dtype=torch.float64)).tolist()
        root = (9 * b * b - 20 * a * c) ** 0.5
        inner = [((-3 * b - root) / (10 * c)) ** 0.5, ((-3 * b + root) / (10 * c)) ** 0.5]
    return a, b, c


def value_at(x: float, polynomial: Triple) -> float:
    """``a x + b x^3 + c x^5``."""
    a, b, c = polynomial
    return a * x + b * x**3 + c * x**5


if __name__ == "__main__":
    sys.exit(main())
