"""Who holds what: from a mesh and placements to the regions of a matrix that each rank stores.

Pure arithmetic on global indices, no tensor and no process group. A placement maps each dim of a parameter to
*segments*: the runs of global indices that a rank holds, in the order in which they lie in its local tensor. A *region*
is the part of one matrix inside one run of rows and one run of columns.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard, _StridedShard

from distmuon.matrices import Matrix, Shape

#: Parameters are planned as (batch, rows, cols); a 2-D parameter is a batch of one.
BATCH, ROWS, COLS = range(3)


class Segment(NamedTuple):
    """Global indices ``start : stop`` of one dim, stored from local index ``local`` on."""

    start: int
    stop: int
    local: int


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


Split = tuple[int, int, int]  # (split_factor, chunks, index); split_factor 1 is a plain Shard


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


@lru_cache(maxsize=65536)
def dim_segments(size: int, splits: tuple[Split, ...]) -> tuple[Segment, ...]:
    """The segments of a dim of ``size`` after ``splits``, in mesh axis order.

    ``_StridedShard(split_factor)`` cuts into ``split_factor`` parts first and takes part ``index`` of each, as
    ``torch.distributed.tensor`` does.
    """
    runs = [(0, size)]
    for split_factor, chunks, index in splits:
        parts = (_chunk(runs, split_factor, part) for part in range(split_factor))
        runs = [run for part in parts for run in _chunk(part, chunks, index)]
    segments: list[Segment] = []
    local = 0
    for start, stop in runs:
        if segments and segments[-1].stop == start:
            segments[-1] = segments[-1]._replace(stop=stop)
        else:
            segments.append(Segment(start, stop, local))
        local += stop - start
    return tuple(segments)


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

    def coordinate(self, rank: int) -> tuple[int, ...]:
        """Where ``rank`` stands in the mesh.

        Raises:
            ValueError: the mesh does not hold this rank.
        """
        if rank not in self.ranks:
            raise ValueError(f"rank {rank} is not in the mesh of ranks {self.ranks}")
        index = self.ranks.index(rank)
        coordinate = []
        for size in reversed(self.mesh_shape):
            index, at = divmod(index, size)
            coordinate.append(at)
        return tuple(reversed(coordinate))

    def splits(self, dim: int, coordinate: Sequence[int]) -> tuple[Split, ...]:
        """The splits of tensor dim ``dim`` at a mesh coordinate."""
        return tuple(
            (getattr(placement, "split_factor", 1), size, at)
            for placement, size, at in zip(self.placements, self.mesh_shape, coordinate, strict=True)
            if _sharded_dim(placement) == dim
        )

    def axes(self, dim: int) -> tuple[int, ...]:
        """The mesh axes over which tensor dim ``dim`` is sharded."""
        return tuple(axis for axis, placement in enumerate(self.placements) if _sharded_dim(placement) == dim)

    def subgroup(self, rank: int, axes: tuple[int, ...]) -> tuple[int, ...]:
        """The ranks that differ from ``rank`` along ``axes`` only, in mesh order."""
        coordinate = self.coordinate(rank)
        choices = [range(size) if axis in axes else (coordinate[axis],) for axis, size in enumerate(self.mesh_shape)]
        strides = [math.prod(self.mesh_shape[axis + 1 :]) for axis in range(len(self.mesh_shape))]
        return tuple(
            self.ranks[sum(at * stride for at, stride in zip(point, strides, strict=True))]
            for point in itertools.product(*choices)
        )


@dataclass(frozen=True)
class ParameterSpec:
    """All that planning needs to know of a parameter.

    Args:
        name: its name, without wrappers' prefixes.
        shape: global shape, (rows, cols) or (batch, rows, cols).
        dtype: of its momentum, so of what is orthogonalised: the parameter's, unless ``momentum_dtype`` is another.
        matrix_rows: rows of each matrix within a (rows, cols) slice, see :func:`distmuon.matrices.matrix_rows`.
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
    def matrix_starts(self) -> tuple[int, ...]:
        """First row of each matrix of a slice."""
        return tuple(itertools.accumulate(self.matrix_rows, initial=0))[:-1]

    def segments(self, rank: int) -> tuple[tuple[Segment, ...], tuple[Segment, ...], tuple[Segment, ...]]:
        """What ``rank`` holds of (batch, rows, cols)."""
        if self.storage is None:
            return tuple(dim_segments(size, ()) for size in self.shape3)  # type: ignore[return-value]
        coordinate = self.storage.coordinate(rank)
        return tuple(  # type: ignore[return-value]
            dim_segments(size, self.storage.splits(self._tensor_dim(dim), coordinate))
            for dim, size in enumerate(self.shape3)
        )

    def local_shape3(self, rank: int) -> tuple[int, int, int]:
        """Shape of the local tensor of ``rank`` as (batch, rows, cols)."""
        return tuple(sum(s.stop - s.start for s in segments) for segments in self.segments(rank))  # type: ignore[return-value]

    def shapes(self) -> Counter[Shape]:
        """How many matrices of each shape the parameter has, over all ranks."""
        shapes = Counter(Shape(rows, self.cols, self.group) for rows in self.matrix_rows)
        return Counter({shape: matrices * self.shape3[BATCH] for shape, matrices in shapes.items()})

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """Shape of the local tensor of ``rank``."""
        return self.local_shape3(rank)[3 - len(self.shape) :]

    @property
    def bytes(self) -> int:
        """Bytes of the whole parameter."""
        return math.prod(self.shape) * self.dtype.itemsize

    def local_bytes(self, rank: int) -> int:
        """Bytes of the local tensor of ``rank``."""
        return math.prod(self.local_shape3(rank)) * self.dtype.itemsize

    def exchange_axes(self) -> tuple[int, ...]:
        """The mesh axes along which some matrix is cut: bringing every matrix together needs the ranks along them."""
        return tuple(sorted({axis for axes in self.cut_axes() for axis in axes}))

    def cut_axes(self) -> tuple[tuple[int, ...], ...]:
        """For each matrix of a slice, the mesh axes along which it is cut; none, and one rank holds it whole."""
        if self.storage is None:
            return ((),) * len(self.matrix_rows)
        (cols,) = self._cut(COLS, (0,))
        return tuple(rows + cols for rows in self._cut(ROWS, self.matrix_starts))

    def _cut(self, dim: int, starts: tuple[int, ...]) -> list[tuple[int, ...]]:
        assert self.storage is not None
        axes = self.storage.axes(self._tensor_dim(dim))
        layout = tuple(
            (getattr(self.storage.placements[axis], "split_factor", 1), self.storage.mesh_shape[axis]) for axis in axes
        )
        return [tuple(axes[index] for index in cut) for cut in cut_blocks(self.shape3[dim], starts, layout)]

    def subgroup_runs(self, rank: int, dim: int) -> list[tuple[int, int]]:
        """(start, stop) runs of ``dim`` that the ranks along the exchange axes of ``rank`` hold together, sorted and
        joined.
        """
        if self.storage is None:
            return [(0, self.shape3[dim])]
        tensor_dim, exchange = self._tensor_dim(dim), self.exchange_axes()
        choices = [
            range(size) if axis in exchange and axis in self.storage.axes(tensor_dim) else (at,)
            for axis, (size, at) in enumerate(zip(self.storage.mesh_shape, self.storage.coordinate(rank), strict=True))
        ]
        found = sorted(
            {
                (segment.start, segment.stop)
                for point in itertools.product(*choices)
                for segment in dim_segments(self.shape3[dim], self.storage.splits(tensor_dim, point))
            }
        )
        runs: list[tuple[int, int]] = []
        for start, stop in found:
            if runs and runs[-1][1] == start:
                runs[-1] = (runs[-1][0], stop)
            else:
                runs.append((start, stop))
        return runs

    def _tensor_dim(self, dim: int) -> int:
        """The dim of the tensor behind ``dim`` of ``shape3``; -1, which no placement has, for the batch of a 2-D
        one.
        """
        return dim + len(self.shape) - 3


@lru_cache(maxsize=4096)
def cut_blocks(size: int, starts: tuple[int, ...], layout: tuple[tuple[int, int], ...]) -> tuple[tuple[int, ...], ...]:
    """For each block of a dim, which of the sharding axes (split_factor, chunks) cut it; blocks begin at ``starts``."""
    low: dict[int, list[int]] = {}
    high: dict[int, list[int]] = {}
    for point in itertools.product(*(range(chunks) for _, chunks in layout)):
        splits = tuple((factor, chunks, at) for (factor, chunks), at in zip(layout, point, strict=True))
        for segment in dim_segments(size, splits):
            for block in range(bisect_right(starts, segment.start) - 1, bisect_right(starts, segment.stop - 1)):
                low[block] = [min(pair) for pair in zip(low.get(block, point), point, strict=True)]
                high[block] = [max(pair) for pair in zip(high.get(block, point), point, strict=True)]
    return tuple(
        tuple(axis for axis in range(len(layout)) if block in low and low[block][axis] != high[block][axis])
        for block in range(len(starts))
    )


def regions(matrix: Matrix, segments: tuple[tuple[Segment, ...], ...]) -> list[Region]:
    """The regions of ``matrix`` in a local tensor with these segments, in local order."""
    found = []
    for batch in segments[BATCH]:
        if not batch.start <= matrix.batch < batch.stop:
            continue
        for rows in segments[ROWS]:
            top, bottom = max(rows.start, matrix.row), min(rows.stop, matrix.row + matrix.rows)
            if top >= bottom:
                continue
            for cols in segments[COLS]:
                local = (batch.local + matrix.batch - batch.start, rows.local + top - rows.start, cols.local)
                found.append(Region(top - matrix.row, cols.start, bottom - top, cols.stop - cols.start, local))
    return found
