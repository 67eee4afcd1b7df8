"""What the matrices of a parameter are.

Muon orthogonalises whole matrices. A parameter is a batch of them: a 2-D parameter is one matrix unless ``row_blocks``
cuts its rows (heads, fused projections), a 3-D parameter is a batch along dim 0 (experts), each of which may be cut
too. Everything after this module works a matrix at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import NamedTuple

from distmuon.checks import check_row_blocks

RowBlocks = Mapping[str, "int | tuple[int, ...]"]

#: Prefixes that wrappers put into parameter names (``torch.compile``, activation checkpointing).
WRAPPER_PREFIXES = ("_orig_mod.", "_checkpoint_wrapped_module.")


class Shape(NamedTuple):
    """What matrices must share to be orthogonalised in one call: their shape and their parameter group."""

    rows: int
    cols: int
    group: int


class Matrix(NamedTuple):
    """One matrix: rows ``row : row + rows`` of slice ``batch`` of a parameter, all ``cols`` columns.

    ``parameter`` is the index of the parameter in its plan; ``batch`` is 0 for a 2-D parameter.
    """

    parameter: int
    batch: int
    row: int
    rows: int
    cols: int

    @property
    def numel(self) -> int:
        """Elements of the matrix."""
        return self.rows * self.cols

    @property
    def cost(self) -> int:
        """Relative GEMM cost of orthogonalising it, by which owners are balanced."""
        return gemm_cost(self.rows, self.cols)


def gemm_cost(rows: int, cols: int) -> int:
    """``short^2 * (2 long + short)``: half the FLOPs of one Newton-Schulz iteration on a rows x cols matrix.

    An iteration is ``X X^T`` (short * long * short multiply-adds), its square (short^3) and the product with ``X``
    (short * short * long).
    """
    short, long = min(rows, cols), max(rows, cols)
    return short * short * (2 * long + short)


def clean_name(name: str) -> str:
    """A parameter's name with the prefixes of wrappers taken off, as patterns match it."""
    for prefix in WRAPPER_PREFIXES:
        name = name.replace(prefix, "")
    return name


def matrix_rows(name: str, shape: tuple[int, ...], row_blocks: RowBlocks | None = None) -> tuple[int, ...]:
    """Rows of each matrix within one (R, C) slice of a parameter.

    Args:
        name: the parameter's name; patterns of ``row_blocks`` match it by ``fnmatchcase``, the first match wins.
        shape: its global shape, (R, C) or (batch, R, C).
        row_blocks: pattern -> rows of every matrix, or a tuple of the rows of each in turn.

    Returns:
        The rows of the matrices, in order; they add up to R.

    Raises:
        ValueError: the shape is not 2-D or 3-D, or the rows do not add up to R.
        TypeError: ``row_blocks`` is not what it should be.
    """
    if len(shape) not in (2, 3):
        raise ValueError(
            f"parameter {name!r} has shape {tuple(shape)}: Muon takes matrices, so 2-D (rows, cols) or 3-D "
            f"(batch, rows, cols) parameters. Give it to AdamW, or train a 2-D view of it"
        )
    total = shape[-2]
    check_row_blocks(row_blocks or {})
    for pattern, blocks in (row_blocks or {}).items():
        if not fnmatchcase(name, pattern):
            continue
        sizes = (blocks,) * (total // blocks or 1) if isinstance(blocks, int) else blocks
        if sum(sizes) != total:
            raise ValueError(
                f"row_blocks[{pattern!r}] = {blocks!r} does not add up on parameter {name!r} of shape {tuple(shape)}: "
                f"it has {total} rows"
            )
        return tuple(sizes)
    return (total,)


def refuse_unmatched(kind: str, patterns: Iterable[str], names: Iterable[str]) -> None:
    """Refuse a pattern that no parameter's name matches: a typing error would pass silently otherwise.

    Without names there is nothing to tell one by: a pipeline stage without parameters is given what all stages are.

    Raises:
        ValueError: naming the pattern and, as a hint, the first names there are.
    """
    names = list(names)
    for pattern in patterns if names else ():
        if not any(fnmatchcase(name, pattern) for name in names):
            shown = ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
            raise ValueError(f"{kind} pattern {pattern!r} matches no parameter; there are {len(names)}: {shown}")
