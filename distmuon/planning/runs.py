"""Runs and regions: which global indices a rank holds after a dim was cut, and what that leaves of each matrix.

Pure arithmetic on indices, no tensor and no process group. Splits cut a dim into *runs* of global indices, each held by
one rank, or one of several replicas. A *region* is the part of one matrix inside one run of rows and one of columns.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from distmuon.planning.matrices import Matrix

#: Parameters are planned as (batch, rows, cols); a 2-D parameter is a batch of one.
BATCH, ROWS, COLS = range(3)


class Run(NamedTuple):
    """Global indices ``start : stop`` of one dim, stored from local index ``local`` on by ``holder``.

    Holders are numbered along the mesh axes that were left open; without any there is one, 0.
    """

    start: int
    stop: int
    local: int
    holder: int


#: The runs of (batch, rows, cols); the holder of a region is the sum of the holders of its three runs.
Runs = tuple[tuple[Run, ...], tuple[Run, ...], tuple[Run, ...]]


class Region(NamedTuple):
    """``rows`` x ``cols`` of a matrix from (``row``, ``col``) on, stored from ``local`` = (batch, row, col) on."""

    row: int
    col: int
    rows: int
    cols: int
    local: tuple[int, int, int]

    @property
    def numel(self) -> int:
        """Elements of the region."""
        return self.rows * self.cols


class Split(NamedTuple):
    """How one mesh axis cuts a dim: into ``chunks``, of which a rank takes that ``at``, or with None each its own.

    ``factor`` is that of ``_StridedShard``, 1 of a plain ``Shard``; ``step`` is what the next rank adds to ``holder``.
    """

    factor: int
    chunks: int
    at: int | None
    step: int = 0


def _chunk(runs: list[tuple[int, int]], chunks: int, index: int) -> list[tuple[int, int]]:
    """Part ``index`` of ``torch.chunk`` over the indices in ``runs`` (start, stop): equal parts, the last ones short
    or empty.
    """
    total = sum(stop - start for start, stop in runs)
    size = -(-total // chunks)
    low, high = min(index * size, total), min((index + 1) * size, total)
    part, position = [], 0
    for start, stop in runs:
        first, last = max(low - position, 0), min(high - position, stop - start)
        if first < last:
            part.append((start + first, start + last))
        position += stop - start
    return part


@lru_cache(maxsize=4096)
def dim_runs(size: int, splits: tuple[Split, ...]) -> tuple[Run, ...]:
    """The runs of a dim of ``size`` after ``splits``, in mesh axis order: by start, which is also their local order.

    ``_StridedShard(split_factor)`` cuts into ``split_factor`` parts first and takes part ``index`` of each, as
    ``torch.distributed.tensor`` does.
    """
    pieces = [(0, [(0, size)] if size else [])]
    for factor, chunks, index, step in splits:
        pieces = [
            (
                holder + at * step,
                [run for part in range(factor) for run in _chunk(_chunk(runs, factor, part), chunks, at)],
            )
            for holder, runs in pieces
            for at in (range(chunks) if index is None else (index,))
        ]
    found: list[Run] = []
    for holder, runs in pieces:
        local = 0
        for start, stop in runs:
            last = found[-1] if local else None
            if last and last.stop == start:
                found[-1] = last._replace(stop=stop)
            else:
                found.append(Run(start, stop, local, holder))
            local += stop - start
    return tuple(sorted(found))


@lru_cache(maxsize=4096)
def cut_blocks(size: int, starts: tuple[int, ...], layout: tuple[tuple[int, int], ...]) -> tuple[tuple[int, ...], ...]:
    """For each block of a dim, which of the sharding axes (factor, chunks) cut it; blocks begin at ``starts``."""
    steps = [math.prod(chunks for _, chunks in layout[axis + 1 :]) for axis in range(len(layout))]
    splits = tuple(Split(factor, chunks, None, step) for (factor, chunks), step in zip(layout, steps, strict=True))
    held: list[list[set[int]]] = [[set() for _ in layout] for _ in starts]
    for run in dim_runs(size, splits):
        point = [run.holder // step % chunks for (_, chunks), step in zip(layout, steps, strict=True)]
        for block in range(bisect_right(starts, run.start) - 1, bisect_right(starts, run.stop - 1)):
            for at, seen in zip(point, held[block], strict=True):
                seen.add(at)
    return tuple(tuple(axis for axis, seen in enumerate(axes) if len(seen) > 1) for axes in held)


def regions(matrix: Matrix, runs: Runs) -> Iterator[tuple[int, Region]]:
    """The (holder, region)s of ``matrix``, those of one holder in its local order."""
    for batch in within(runs[BATCH], matrix.batch, matrix.batch + 1):
        for rows in within(runs[ROWS], matrix.row, matrix.row + matrix.rows):
            top, bottom = max(rows.start, matrix.row), min(rows.stop, matrix.row + matrix.rows)
            for cols in runs[COLS]:
                local = (batch.local + matrix.batch - batch.start, rows.local + top - rows.start, cols.local)
                region = Region(top - matrix.row, cols.start, bottom - top, cols.stop - cols.start, local)
                yield batch.holder + rows.holder + cols.holder, region


def within(runs: tuple[Run, ...], start: int, stop: int) -> tuple[Run, ...]:
    """Those that meet ``start : stop``."""
    if len(runs) == 1:
        return runs if runs[0].start < stop and start < runs[0].stop else ()
    first = bisect_right(runs, start, key=_STOP)
    return runs[first : bisect_right(runs, stop - 1, lo=first, key=_START)]


_START, _STOP = (lambda run: run.start), (lambda run: run.stop)


#: The (size, step) of each axis of a group along which a parameter is replicated.
Replicas = tuple[tuple[int, int], ...]


def replicas_of(holder: int, replicas: Replicas) -> list[int]:
    """All of a group that hold what ``holder``, of the first replica, does."""
    steps = ([at * step for at in range(size)] for size, step in replicas)
    return [holder + sum(point) for point in itertools.product(*steps)]


def same_replica(one: int, other: int, replicas: Replicas) -> bool:
    """Whether two of a group are in the same replica."""
    return all(one // step % size == other // step % size for size, step in replicas)
