"""Who holds what: from a mesh and placements to the runs of a parameter that each rank stores.

Pure: :class:`Storage` is a mesh and placements without a process group, :class:`ParameterSpec` a parameter without a
tensor. What their cuts come to in global indices is in :mod:`distmuon.planning.runs`.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard, _StridedShard

from distmuon.planning.matrices import Shape
from distmuon.planning.runs import BATCH, COLS, ROWS, Replicas, Runs, Split, cut_blocks, dim_runs


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
