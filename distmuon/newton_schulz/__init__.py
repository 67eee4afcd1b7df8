"""Newton-Schulz orthogonalisation: three ways to the same polynomials.

    standard    X <- a X + (b G + c G^2) X with G = X X^T, as torch.optim.Muon: to the bit
    copy_free   the square completed, so that no product adds to a matrix that has to be copied first
    gram        for matrices much wider than tall: iterate on the small G, and apply the outcome to X at the end

:mod:`~distmuon.newton_schulz.orthogonalize` is the call, :mod:`~distmuon.newton_schulz.iterations` the arithmetic,
:mod:`~distmuon.newton_schulz.costs` what it costs and which shape gets what,
:mod:`~distmuon.newton_schulz.coefficients` a, b, c.
"""

from distmuon.newton_schulz.coefficients import COEFFICIENTS, POLAR_EXPRESS, Coefficients, Triple, coefficients_by_step
from distmuon.newton_schulz.costs import MAX_BATCH_BYTES, NS_ALGORITHMS
from distmuon.newton_schulz.orthogonalize import orthogonalize_
from distmuon.newton_schulz.scratch import Results, Scratch

__all__ = [
    "COEFFICIENTS",
    "MAX_BATCH_BYTES",
    "NS_ALGORITHMS",
    "POLAR_EXPRESS",
    "Coefficients",
    "Results",
    "Scratch",
    "Triple",
    "coefficients_by_step",
    "orthogonalize_",
]
