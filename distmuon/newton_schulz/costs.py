"""Which arithmetic a shape gets, and what it costs: pure arithmetic, for planning.

Of a short x long matrix, a product with a Gram matrix is ``short^2 long`` multiply-adds, one of two Gram matrices
``short^3``.
"""

from __future__ import annotations

from collections.abc import Iterator

#: What the optimizer calls them, the default first; :mod:`distmuon.newton_schulz` says what they are.
NS_ALGORITHMS = ("standard", "copy_free", "gram")

#: What one batch of several parameters may hold, unless told otherwise.
MAX_BATCH_BYTES = 64 << 20

#: "copy_free" updates X in place where that takes at most so many of the standard FLOPs: it then needs half the
#: identities and no second iterate. Up to long / short = 1.375.
MOST_FLOPS_IN_PLACE = 1.1

#: "gram" applies what it has to X and starts anew after its first two steps and then after every third: rounding makes
#: eigenvalues of G that should be near zero negative, and the polynomials magnify them.
GRAM_FIRST, GRAM_THEN = 2, 3


def arrangement(rows: int, cols: int, ns_algorithm: str) -> str:
    """How a matrix of that shape is iterated: the name of a function of :mod:`distmuon.newton_schulz.iterations`."""
    short, long = sorted((rows, cols))
    if ns_algorithm == "standard":
        return "standard"
    if ns_algorithm == "gram" and long >= 2 * short:
        return "gram"
    return "in_place" if 3 * long <= MOST_FLOPS_IN_PLACE * (2 * long + short) else "polynomial"


def gram_segments(ns_steps: int) -> Iterator[tuple[int, int]]:
    """First and last step, exclusive, between the restarts of "gram"."""
    start, stop = 0, GRAM_FIRST
    while start < ns_steps:
        yield start, min(stop, ns_steps)
        start, stop = stop, stop + GRAM_THEN


def gemm_flops(rows: int, cols: int, ns_steps: int, ns_algorithm: str = "standard") -> int:
    """Multiplications and additions of the matrix products on one matrix."""
    short, long = sorted((rows, cols))
    wide, small = short * short * long, short**3
    match arrangement(rows, cols, ns_algorithm):
        case "in_place":
            multiply_adds = ns_steps * 3 * wide
        case "gram":
            segments = [stop - start for start, stop in gram_segments(ns_steps)]
            multiply_adds = sum(2 * wide + (4 * steps - 3) * small for steps in segments)
        case _:
            multiply_adds = ns_steps * (2 * wide + small)
    return 2 * multiply_adds


def batch_bytes(rows: int, cols: int, itemsize: int, ns_algorithm: str = "standard", filled_steps: int = 1) -> int:
    """Bytes that one matrix takes in a batch at most: its place in the stack, of ``itemsize``, and scratch or, before
    and after that is needed, fp32 staging.

    Args:
        rows: of the matrix.
        cols: of the matrix.
        itemsize: bytes of an element in Newton-Schulz.
        ns_algorithm: of Newton-Schulz.
        filled_steps: for how many steps identities are made at once.
    """
    numel, square = rows * cols, min(rows, cols) ** 2
    match arrangement(rows, cols, ns_algorithm):
        case "in_place":
            scratch = numel + filled_steps * square
        case "polynomial":
            scratch = 2 * numel + 2 * filled_steps * square
        case "gram":
            scratch = 3 * numel + 8 * square
        case _:
            scratch = 2 * numel + 2 * square
    return numel * itemsize + max(scratch * itemsize, 4 * numel)


def filled_steps(
    matrices: int, rows: int, cols: int, itemsize: int, ns_algorithm: str, ns_steps: int, max_bytes: int
) -> int:
    """For how many of the steps a batch makes its identities at once: all, if that keeps it within ``max_bytes``."""
    for steps in range(ns_steps, 1, -1):
        if matrices * batch_bytes(rows, cols, itemsize, ns_algorithm, steps) <= max_bytes:
            return steps
    return 1
