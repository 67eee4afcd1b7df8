"""Which arithmetic a shape gets, and what it costs: pure arithmetic, for planning.

Of a short x long matrix, a product with a Gram matrix is ``short^2 long`` multiply-adds, one of two Gram matrices
``short^3``.
"""

from __future__ import annotations

from collections.abc import Iterator

#: What the optimizer calls them, the default first; :mod:`distmuon.newton_schulz` says what they are.
NS_ALGORITHMS = ("standard", "copy_free", "gram")

#: "copy_free" updates X in place where that takes at most so many of the standard FLOPs: it then needs half the
#: identities and no second iterate. Up to long / short = 1.375.
MOST_FLOPS_IN_PLACE = 1.1

#: Iterations that one filling of identities lasts for; ns_steps is usually 5.
STEPS_A_FILLING = 5

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


def scratch_numel(rows: int, cols: int, ns_algorithm: str = "standard") -> int:
    """Elements that an iteration holds beside one matrix: iterates and Gram matrices."""
    square = min(rows, cols) ** 2
    match arrangement(rows, cols, ns_algorithm):
        case "in_place":
            return rows * cols + STEPS_A_FILLING * square
        case "polynomial":
            return 2 * rows * cols + 2 * STEPS_A_FILLING * square
        case "gram":
            return 3 * rows * cols + 5 * square
        case _:
            return 2 * rows * cols + 2 * square


def batch_bytes(rows: int, cols: int, itemsize: int, ns_algorithm: str = "standard") -> int:
    """Bytes that one matrix takes in a batch at most: its place in the stack, of ``itemsize``, and scratch or, before
    and after that is needed, fp32 staging.
    """
    return rows * cols * itemsize + max(scratch_numel(rows, cols, ns_algorithm) * itemsize, 4 * rows * cols)
