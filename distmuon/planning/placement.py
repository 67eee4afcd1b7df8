"""Who holds what: from a mesh and placements to the regions of a matrix that each rank stores.

Pure arithmetic on global indices, no tensor and no process group. Placements cut each dim of a parameter into *runs* of
global indices, each held by one rank, or one of several replicas. A *region* is the part of one matrix inside one run
of rows and one run of columns.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import torch
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard, _StridedShard

from distmuon.planning.matrices import Matrix, Shape

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


def _sharded_dim(placement: Placement) -> int | None:
    """The tensor dim that a placement shards; None for ``Replicate``."""
    return None if isinstance(placement, Replicate) else placement.dim  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Storage:
    """How a parameter is spread: a device mesh and one placement for each of its axes.

    Args:
        mesh_shape: size of each mesh axis.
        ranks: the global ranks of the mesh, row-major.
        placements: ``Shard``, ``Replicate`` or ``_StridedShard`` for each axis, as on the DTensor.

    Raises:
        ValueError: sizes don't fit together, a rank appears twice, or a placement can't be stored (``Partial``).
    """

    mesh_shape: tuple[int, ...]
    ranks: tuple[int, ...]
    placements: tuple[Placement, ...]

    def __post_init__(self) -> None:
        if math.prod(self.mesh_shape) != len(self.ranks) or len(set(self.ranks)) != len(self.ranks):
            raise ValueError(f"a mesh of shape {self.mesh_shape} needs that many distinct ranks, got {self.ranks}")
        if len(self.placements) != len(self.mesh_shape):
            raise ValueError(f"mesh of shape {self.mesh_shape} takes one placement an axis, got {self.placements}")
        for placement in self.placements:
            if not isinstance(placement, Shard | Replicate | _StridedShard):
                raise ValueError(f"placement {placement!r} can't be planned: use Shard or Replicate")

    @cached_property
    def _hash(self) -> int:
        return hash((self.mesh_shape, self.ranks, self.placements))

    def __hash__(self) -> int:
        return self._hash  # of a thousand ranks and asked for a thousand times a plan

    @cached_property
    def members(self) -> frozenset[int]:
        """The global ranks of the mesh, in no order."""
        return frozenset(self.ranks)

    @cached_property
    def _positions(self) -> dict[int, int]:
        return {rank: position for position, rank in enumerate(self.ranks)}

    def coordinate(self, rank: int) -> tuple[int, ...]:
        """Where ``rank`` stands in the mesh.

        Raises:
            ValueError: the mesh does not hold this rank.
        """
        if rank not in self._positions:
            raise ValueError(f"rank {rank} is not in the mesh of ranks {self.ranks}")
        index = self._positions[rank]
        coordinate = []
        for size in reversed(self.mesh_shape):
            index, at = divmod(index, size)
            coordinate.append(at)
        return tuple(reversed(coordinate))

    @cached_property
    def _axes(self) -> dict[int | None, tuple[int, ...]]:
        axes: dict[int | None, tuple[int, ...]] = {}
        for axis, (placement, size) in enumerate(zip(self.placements, self.mesh_shape, strict=True)):
            dim = _sharded_dim(placement)
            if dim is not None or size > 1:
                axes[dim] = (*axes.get(dim, ()), axis)
        return axes

    def axes(self, dim: int | None) -> tuple[int, ...]:
        """The mesh axes over which tensor dim ``dim`` is sharded; None: over which all of it is replicated."""
        return self._axes.get(dim, ())

    def steps(self, axes: Collection[int]) -> dict[int, int]:
        """For each of ``axes``, how far apart neighbours along it are in a group that spans them, row-major."""
        steps, step = {}, 1
        for axis in sorted(axes, reverse=True):
            steps[axis] = step
            step *= self.mesh_shape[axis]
        return steps

    def splits(self, dim: int, coordinate: Sequence[int], steps: Mapping[int, int]) -> tuple[Split, ...]:
        """The splits of tensor dim ``dim`` at a mesh coordinate, open along the axes that have ``steps``."""
        return tuple(
            Split(
                getattr(self.placements[axis], "split_factor", 1),
                self.mesh_shape[axis],
                None if axis in steps else coordinate[axis],
                steps.get(axis, 0),
            )
            for axis in self.axes(dim)
        )

    def size(self, axes: Iterable[int]) -> int:
        """How many ranks a group along ``axes`` has."""
        return math.prod(self.mesh_shape[axis] for axis in axes)

    def group(self, rank: int, axes: Collection[int]) -> tuple[int, ...]:
        """The ranks that differ from ``rank`` along ``axes`` only, in mesh order."""
        coordinate = self.coordinate(rank)
        choices = [range(size) if axis in axes else (coordinate[axis],) for axis, size in enumerate(self.mesh_shape)]
        every = self.steps(range(len(self.mesh_shape)))
        return tuple(
            self.ranks[sum(at * every[axis] for axis, at in enumerate(point))] for point in itertools.product(*choices)
        )

    def groups(self, axes: Collection[int]) -> list[tuple[int, ...]]:
        """All groups along ``axes``: each rank of the mesh is in one."""
        other = [axis for axis in range(len(self.mesh_shape)) if axis not in axes]
        return [self.group(first, axes) for first in self.group(self.ranks[0], other)]


@dataclass(frozen=True)
class ParameterSpec:
    """All that planning needs to know of a parameter.

    Args:
        name: its name, without wrappers' prefixes.
        shape: global shape, (rows, cols) or (batch, rows, cols).
        dtype: of its momentum, so of what is orthogonalised: the parameter's, unless ``momentum_dtype`` is another.
        matrix_rows: rows of each matrix within a (rows, cols) slice, see
            :func:`distmuon.planning.matrices.matrix_rows`.
        storage: mesh and placements; None for a plain tensor, which its rank holds whole.
        group: index of its parameter group, as matrices of different settings are not batched.

    Raises:
        ValueError: naming the parameter, if the pieces don't fit together.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    matrix_rows: tuple[int, ...]
    storage: Storage | None = None
    group: int = 0

    def __post_init__(self) -> None:
        if len(self.shape) not in (2, 3):
            raise ValueError(f"parameter {self.name!r}: shape {self.shape} is neither 2-D nor 3-D")
        if 0 in self.shape:
            raise ValueError(f"parameter {self.name!r} of shape {self.shape} has no elements: leave it out")
        if sum(self.matrix_rows) != self.shape[-2]:
            raise ValueError(f"parameter {self.name!r}: matrices of {self.matrix_rows} rows in shape {self.shape}")
        for placement in self.storage.placements if self.storage else ():
            dim = _sharded_dim(placement)
            if dim is not None and not 0 <= dim < len(self.shape):
                raise ValueError(f"parameter {self.name!r} of shape {self.shape} can't be placed {placement}")

    def __str__(self) -> str:
        """As messages name it."""
        storage = self.storage
        placed = f"{storage.placements} on a mesh of {storage.mesh_shape}" if storage else "plain"
        return f"{self.name!r} of shape {self.shape}, {self.dtype}, {placed}, matrices of {self.matrix_rows} rows"

    @property
    def shape3(self) -> tuple[int, int, int]:
        """The global shape as (batch, rows, cols)."""
        return (1, *self.shape) if len(self.shape) == 2 else self.shape  # type: ignore[return-value]

    @property
    def cols(self) -> int:
        """Columns of each of its matrices."""
        return self.shape[-1]

    @property
    def bytes(self) -> int:
        """Bytes of the whole parameter."""
        return math.prod(self.shape) * self.dtype.itemsize

    @cached_property
    def matrix_starts(self) -> tuple[int, ...]:
        """First row of each matrix of a slice."""
        return tuple(itertools.accumulate(self.matrix_rows, initial=0))[:-1]

    @cached_property
    def shapes(self) -> Mapping[Shape, int]:
        """How many matrices of each shape the parameter has, over all ranks."""
        counts = Counter(Shape(rows, self.cols, self.group) for rows in self.matrix_rows)
        return {shape: matrices * self.shape3[BATCH] for shape, matrices in counts.items()}

    @cached_property
    def cut_axes(self) -> tuple[tuple[int, ...], ...]:
        """For each matrix of a slice, the mesh axes along which it is cut; none, and one rank, or each of its replicas,
        holds it whole.
        """
        if self.storage is None:
            return ((),) * len(self.matrix_rows)
        (cols,) = self._cut(COLS, (0,))
        return tuple(rows + cols for rows in self._cut(ROWS, self.matrix_starts))

    @cached_property
    def replica_axes(self) -> tuple[int, ...]:
        """The mesh axes along which all of it is replicated."""
        return self.storage.axes(None) if self.storage else ()

    def runs(self, rank: int, axes: Collection[int] = ()) -> Runs:
        """The runs of each dim that ``rank`` holds, or that the ranks of its group along ``axes`` hold together."""
        if self.storage is None:
            return tuple(dim_runs(size, ()) for size in self.shape3)  # type: ignore[return-value]
        coordinate, steps = self.storage.coordinate(rank), self.storage.steps(axes)
        return tuple(  # type: ignore[return-value]
            dim_runs(size, self.storage.splits(self._tensor_dim(dim), coordinate, steps))
            for dim, size in enumerate(self.shape3)
        )

    def replicas(self, axes: Collection[int]) -> Replicas:
        """The replicas of it within a group along ``axes``."""
        if self.storage is None:
            return ()
        steps = self.storage.steps(axes)
        return tuple((self.storage.mesh_shape[axis], steps[axis]) for axis in self.replica_axes if axis in steps)

    def local_shape3(self, rank: int) -> tuple[int, int, int]:
        """Shape of the local tensor of ``rank`` as (batch, rows, cols)."""
        return tuple(sum(run.stop - run.start for run in runs) for runs in self.runs(rank))  # type: ignore[return-value]

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """Shape of the local tensor of ``rank``."""
        return self.local_shape3(rank)[3 - len(self.shape) :]

    def local_bytes(self, rank: int) -> int:
        """Bytes of the local tensor of ``rank``."""
        return math.prod(self.local_shape3(rank)) * self.dtype.itemsize

    def _cut(self, dim: int, starts: tuple[int, ...]) -> list[tuple[int, ...]]:
        assert self.storage is not None
        axes = self.storage.axes(self._tensor_dim(dim))
        layout = tuple(
            (getattr(self.storage.placements[axis], "split_factor", 1), self.storage.mesh_shape[axis]) for axis in axes
        )
        return [tuple(axes[index] for index in cut) for cut in cut_blocks(self.shape3[dim], starts, layout)]

    def _tensor_dim(self, dim: int) -> int:
        """The dim of the tensor behind ``dim`` of ``shape3``; -1, which no placement has, for the batch of a 2-D
        one.
        """
        return dim + len(self.shape) - 3


def ranks_of(parameters: Iterable[ParameterSpec]) -> list[int]:
    """All ranks that hold one of the parameters on meshes, sorted."""
    return sorted({rank for spec in parameters if spec.storage for rank in spec.storage.ranks})
