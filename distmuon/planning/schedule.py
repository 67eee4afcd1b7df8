"""What a plan consists of: plain data that check themselves. :mod:`distmuon.planning.plan` makes them,
:mod:`distmuon.step` runs them.

A bucket becomes one *stage*: at most one exchange, a packed all-to-all each way within one group of ranks, and matrices
that this rank holds whole anyway. Three things hold elements in a stage:

    update   of each parameter, the local shard of what is orthogonalised and then of the result; contiguous
    work     flat, one a stage: whole matrices, brought here or moved here, one after another
    packed   flat, two a stage: what is sent and what is received; the way back has them swapped
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from distmuon.planning.matrices import Matrix
from distmuon.planning.owners import bound
from distmuon.planning.places import Place


class Copy(NamedTuple):
    """A rectangle of elements of ``parameter`` that is copied between two places, one way and later back.

    ``place`` is in its update, or for what an owner receives in the work buffer; ``packed`` is in a packed buffer, or
    for what stays on the rank in the work buffer.
    """

    parameter: int
    place: Place
    packed: Place


class Batch(NamedTuple):
    """Matrices of one shape and one parameter group, orthogonalised in one call.

    They lie one after another from element ``offset`` on: of the work buffer, or of the update of ``parameter``. If
    they lie in the work buffer ``parameter`` is the first that they belong to, for the settings of its group. ``ready``
    batches need nothing from other ranks.
    """

    parameter: int
    offset: int
    matrices: int
    rows: int
    cols: int
    in_work: bool
    ready: bool

    @property
    def numel(self) -> int:
        """Elements of all its matrices."""
        return self.matrices * self.rows * self.cols

    @property
    def place(self) -> Place:
        """One matrix as 2-D, several as 3-D."""
        size, stride = (self.rows, self.cols), (self.cols, 1)
        if self.matrices == 1:
            return Place(size, stride, self.offset)
        return Place((self.matrices, *size), (self.rows * self.cols, *stride), self.offset)


class Piece(NamedTuple):
    """Local rows ``row : row + rows`` (of every slice) belong to matrices of ``matrix_rows`` rows: one learning
    rate.
    """

    row: int
    rows: int
    matrix_rows: int


@dataclass(frozen=True)
class Way:
    """One way of an exchange, as one rank takes part in it: between holders' updates and owners' work buffers.

    Args:
        held: this rank's regions in packed order: by owner, then matrix, then local order.
        owned: the regions of the matrices it owns: by holder, then matrix, then the holder's local order.
        held_splits: elements of ``held`` for each rank of the group.
        owned_splits: elements of ``owned`` for each rank of the group.
    """

    held: tuple[Copy, ...]
    owned: tuple[Copy, ...]
    held_splits: tuple[int, ...]
    owned_splits: tuple[int, ...]

    def __post_init__(self) -> None:
        for copies, numel in ((self.held, self.held_numel), (self.owned, self.owned_numel)):
            if sum(copy.packed.numel for copy in copies) != numel:
                raise ValueError(f"splits of {numel} elements do not add up to the regions packed")

    @property
    def held_numel(self) -> int:
        """Elements between this rank's updates and its packed buffer as a holder."""
        return sum(self.held_splits)

    @property
    def owned_numel(self) -> int:
        """Elements between its work buffer and its packed buffer as an owner."""
        return sum(self.owned_splits)


@dataclass(frozen=True)
class Exchange:
    """The packed all-to-alls of a stage, as one rank takes part in them.

    Without shared replicas the way back is the way out reversed. With them a matrix comes from the replica that its
    owner is in, and its result goes to all.

    Args:
        ranks: global ranks of the group, in group order.
        matrices: all matrices that are orthogonalised in this group.
        owners: for each of them the index in ``ranks`` of the rank that does it.
        out: from holders to owners; None if every owner holds its matrices whole.
        back: its places and splits; here owners send and holders receive.
        dtype: on the wire.
    """

    ranks: tuple[int, ...]
    matrices: tuple[Matrix, ...]
    owners: tuple[int, ...]
    out: Way | None
    back: Way
    dtype: torch.dtype

    def __post_init__(self) -> None:
        for way in self.ways:
            if not len(way.held_splits) == len(way.owned_splits) == len(self.ranks):
                raise ValueError(f"an exchange of {len(self.ranks)} ranks needs as many splits each way")

    @property
    def ways(self) -> tuple[Way, ...]:
        """Those that travel: one collective each."""
        return (self.out, self.back) if self.out else (self.back,)

    @property
    def holder_bytes(self) -> int:
        """Bytes of the packed buffer on the holder's side."""
        return max(way.held_numel for way in self.ways) * self.dtype.itemsize

    @property
    def owner_bytes(self) -> int:
        """Bytes of the packed buffer on the owner's side."""
        return max(way.owned_numel for way in self.ways) * self.dtype.itemsize

    def imbalance(self) -> tuple[float, float]:
        """The largest GEMM cost that a rank owns, relative to the mean and to max(mean, largest matrix).

        The second is what owners can be held to: no rank can have less than the mean or the largest matrix.
        """
        costs = [matrix.cost for matrix in self.matrices]
        loads = [0] * len(self.ranks)
        for cost, owner in zip(costs, self.owners, strict=True):
            loads[owner] += cost
        if not costs:
            return 1.0, 1.0
        return max(loads) / (sum(costs) / len(self.ranks)), max(loads) / bound(costs, len(self.ranks))

    def sent_bytes(self, rank: int) -> int:
        """Bytes that ``rank`` sends to others in a step, both ways."""
        out = self.bytes_to_others(rank, self.out.held_splits) if self.out else 0
        return out + self.bytes_to_others(rank, self.back.owned_splits)

    def received_bytes(self, rank: int) -> int:
        """Bytes that ``rank`` receives from others in a step, both ways."""
        out = self.bytes_to_others(rank, self.out.owned_splits) if self.out else 0
        return out + self.bytes_to_others(rank, self.back.held_splits)

    def bytes_to_others(self, rank: int, splits: Sequence[int]) -> int:
        """Bytes of these splits, elements for or from each rank of the group, but for those of ``rank`` itself."""
        return (sum(splits) - splits[self.ranks.index(rank)]) * self.dtype.itemsize


@dataclass(frozen=True)
class Stage:
    """What a rank does for one bucket.

    Args:
        name: the bucket's name, as it stands in profiler ranges and reports.
        parameters: indices of the parameters whose shards it updates.
        exchange: None if nothing travels.
        moves: what goes from updates to the work buffer, and back, on this rank.
        batches: what it orthogonalises.
        work_numel: elements of the work buffer.
        work_dtype: of the work buffer.
    """

    name: str
    parameters: tuple[int, ...]
    exchange: Exchange | None
    moves: tuple[Copy, ...]
    batches: tuple[Batch, ...]
    work_numel: int
    work_dtype: torch.dtype

    def __post_init__(self) -> None:
        filled = sum(copy.place.numel for copy in self.moves)
        filled += self.exchange.out.owned_numel if self.exchange and self.exchange.out else 0
        used = sum(batch.numel for batch in self.batches if batch.in_work)
        if not filled == used == self.work_numel:
            raise ValueError(
                f"stage {self.name!r}: of a work buffer of {self.work_numel} elements {filled} are filled, {used} used"
            )

    @property
    def work_bytes(self) -> int:
        """Bytes of the work buffer."""
        return self.work_numel * self.work_dtype.itemsize
