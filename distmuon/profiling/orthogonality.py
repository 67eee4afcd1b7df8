"""How well, and for what, each arithmetic of Newton-Schulz orthogonalises: its error, its products, its launches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from distmuon.counting.counter import LaunchCounter
from distmuon.newton_schulz import Coefficients, Triple, coefficients_by_step, orthogonalize_
from distmuon.newton_schulz.costs import arrangement, gemm_flops
from distmuon.ranges import phase

#: Singular values of a matrix of a spectrum, largest first, None for those that a Gaussian matrix has by itself.
SPECTRA: dict[str, Callable[[int], Tensor] | None] = {
    "gaussian": None,
    "power_law": lambda short: torch.arange(1, short + 1, dtype=torch.float64).reciprocal(),
    "low_rank": lambda short: torch.linspace(1, 0.5, max(short // 8, 1), dtype=torch.float64),
}


def sample(spectrum: str, rows: int, cols: int, seed: int) -> Tensor:
    """A random matrix: Gaussian; or its singular vectors with singular values 1/i ("power_law"), or with short/8 of
    them from 1 to 1/2 and the others 0 ("low_rank").

    Returns:
        (rows, cols), float32.
    """
    generator = torch.Generator().manual_seed(seed)
    matrix = torch.randn(rows, cols, generator=generator, dtype=torch.float64)
    if values_of := SPECTRA[spectrum]:
        left, _, right = torch.linalg.svd(matrix, full_matrices=False)
        values = values_of(min(rows, cols))
        matrix = (left[:, : len(values)] * values) @ right[: len(values)]
    return matrix.float()


def reference(matrix: Tensor, triples: Sequence[Triple]) -> Tensor:
    """The standard iteration in float64: ``a X + (b G + c G^2) X`` with ``G = X X^T`` on the short side."""
    x = matrix.double()
    x = x if len(x) <= x.shape[1] else x.mT
    x = x / torch.linalg.vector_norm(x)
    for a, b, c in triples:
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x if matrix.shape == x.shape else x.mT


def orthogonality_error(matrix: Tensor) -> float:
    """Root mean square over the singular values s of ``s^2 - 1``."""
    squares = torch.linalg.svdvals(matrix.double()).square()
    return (squares - 1).square().mean().sqrt().item()


def departure(matrix: Tensor) -> float:
    """How far a matrix of any scale is from orthogonal: its :func:`orthogonality_error` once the root mean square of
    its singular values is 1. 0 where all are equal; the square root of ``short - 1`` where only one is not 0.

    A matrix of zeros is as far as one can be.
    """
    short = min(matrix.shape)
    size = torch.linalg.vector_norm(matrix.double()) / short**0.5
    return orthogonality_error(matrix.double() / size) if size > 0 else (short - 1) ** 0.5


def accuracy(
    ns_algorithm: str,
    coefficients: Coefficients,
    spectrum: str,
    rows: int,
    cols: int,
    *,
    seeds: Sequence[int] = range(4),
    ns_steps: int = 5,
    ns_dtype: torch.dtype = torch.bfloat16,
) -> dict[str, Any]:
    """Errors of one arithmetic, means over ``seeds``.

    Returns:
        ``arrangement``: what the shape gets. ``error``: distance to the float64 standard iteration, relative, in the
        Frobenius norm. ``error_to_standard``: that over the standard arithmetic's. ``orthogonality``: root mean square
        of ``s^2 - 1`` over the singular values s; ``orthogonality_float64``: of the float64 iteration.
        ``flops_to_standard``: of the matrix products, over the standard arithmetic's.
    """
    triples = coefficients_by_step(coefficients, ns_steps, ns_algorithm)
    errors: dict[str, list[float]] = {"standard": [], ns_algorithm: []}
    orthogonality, exact = [], []
    for seed in seeds:
        matrix = sample(spectrum, rows, cols, seed)
        wanted = reference(matrix, triples)
        exact.append(orthogonality_error(wanted))
        for algorithm, found in errors.items():
            result = torch.empty_like(matrix)
            orthogonalize_(matrix, result, triples=triples, ns_algorithm=algorithm, ns_dtype=ns_dtype)
            found.append(((result - wanted).norm() / wanted.norm()).item())
            if algorithm == ns_algorithm:
                orthogonality.append(orthogonality_error(result))
    standard = gemm_flops(rows, cols, ns_steps)
    return {
        "arrangement": arrangement(rows, cols, ns_algorithm),
        "error": _mean(errors[ns_algorithm]),
        "error_to_standard": _mean(errors[ns_algorithm]) / _mean(errors["standard"]),
        "orthogonality": _mean(orthogonality),
        "orthogonality_float64": _mean(exact),
        "flops_to_standard": gemm_flops(rows, cols, ns_steps, ns_algorithm) / standard,
    }


def batch_counts(ns_algorithm: str, matrices: int, rows: int, cols: int, *, ns_steps: int = 5) -> dict[str, Any]:
    """What one batch of bf16 matrices launches on a GPU: ``gemms``, all ``launches``, and ``copies`` (memcpys)."""
    batch = torch.empty(matrices, rows, cols, dtype=torch.bfloat16, device="meta")
    counting = torch.empty(min(rows, cols), dtype=torch.int32, device="meta")
    triples = coefficients_by_step("quintic", ns_steps, ns_algorithm)
    with LaunchCounter() as counter, phase("newton_schulz", "batch"):
        orthogonalize_(batch, triples=triples, ns_algorithm=ns_algorithm, counting=counting)
    counts = counter.counts
    return {
        "gemms": counts.by_source["gemm"].launches,
        "launches": counts.launches,
        "copies": counts.async_copies,
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
