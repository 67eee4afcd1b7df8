"""Where everything lies: the stages of one rank, from drafts and owners to copies, buffers and batches."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from distmuon.planning.assignment import Round, group_matrices
from distmuon.planning.drafts import Draft, local_batch_bytes
from distmuon.planning.matrices import Matrix, Shape
from distmuon.planning.options import PlanOptions
from distmuon.planning.placement import ParameterSpec
from distmuon.planning.places import Place, flat, rectangle
from distmuon.planning.runs import Region, regions, replicas_of, same_replica
from distmuon.planning.schedule import Batch, Copy, Exchange, Stage, Way

#: A region of a matrix, and its place in an update or a work buffer.
_Part = tuple[Matrix, Region, Place]


class Layout:
    """Lays out the stages of ``rank``."""

    def __init__(self, parameters: tuple[ParameterSpec, ...], rank: int, options: PlanOptions) -> None:
        self._parameters = parameters
        self._rank = rank
        self._options = options
        self._local_shapes = [spec.local_shape3(rank) for spec in parameters]

    def stage(self, draft: Draft, meeting: Round | None) -> Stage:
        """Lay out the work buffer, and say what is copied where.

        Args:
            draft: what the stage handles.
            meeting: the exchange of this rank's group, if there is one.
        """
        members = tuple(sorted(draft.exchanged + draft.whole))
        owned: list[Matrix] = []
        if meeting:
            own = meeting.ranks.index(self._rank)
            owned = [matrix for matrix, owner in zip(meeting.matrices, meeting.owners, strict=True) if owner == own]
        whole = {matrix: offset for index in members for matrix, offset in self._held_whole(index)}
        stackable = {index for index in members if self._options.by_shape and not self._too_large(index)}
        stacked = [matrix for matrix in whole if matrix.parameter in stackable]
        in_work = sorted(owned + stacked, key=self._shape) if self._options.by_shape else owned
        offsets = itertools.accumulate((matrix.numel for matrix in in_work), initial=0)
        work = dict(zip(in_work, offsets, strict=False))

        # Also where its group has nothing to bring together, as an expert group without experts: ranks that share
        # another group with this one must issue their exchanges in the same order.
        exchange, moves = self._exchange(draft, meeting, work) if meeting else (None, [])
        moves += [Copy(m.parameter, flat(m.numel, whole[m]), flat(m.numel, work[m])) for m in stacked]
        local = {matrix: offset for matrix, offset in whole.items() if matrix not in work}
        return Stage(
            draft.name,
            members,
            exchange,
            tuple(moves),
            (*self._batches(work, in_work=True, ready=set(stacked)), *self._batches(local, in_work=False, ready=local)),
            sum(matrix.numel for matrix in work),
            self._options.ns_dtype if self._options.by_shape or exchange is None else exchange.dtype,
        )

    def _exchange(self, draft: Draft, meeting: Round, work: Mapping[Matrix, int]) -> tuple[Exchange, list[Copy]]:
        """The exchange, and the copies of what stays on this rank if that does not go through it."""
        own = meeting.ranks.index(self._rank)
        direct = self._options.variant.packing == "bucket"
        specs = {index: self._parameters[index] for index in draft.exchanged}
        replicas = {index: spec.replicas(draft.axes) for index, spec in specs.items()}
        back = _Parts()
        out = _Parts() if any(replicas.values()) else back
        near = (back,) if out is back else (back, out)
        moves: list[Copy] = []
        here = {index: spec.runs(self._rank) for index, spec in specs.items()}
        together = {index: spec.runs(self._rank, draft.axes) for index, spec in specs.items()}
        for matrix, owner in zip(meeting.matrices, meeting.owners, strict=True):
            for _, region in regions(matrix, here[matrix.parameter]):
                place = self._in_update(matrix, region)
                if owner == own and direct:
                    moves.append(Copy(matrix.parameter, place, _in_work(matrix, region, work)))
                    continue
                for parts in near if same_replica(own, owner, replicas[matrix.parameter]) else (back,):
                    parts.held.setdefault(owner, []).append((matrix, region, place))
            if owner != own:
                continue
            for holder, region in regions(matrix, together[matrix.parameter]):
                place = _in_work(matrix, region, work)
                for peer in replicas_of(holder, replicas[matrix.parameter]):
                    if peer == own and direct:
                        continue
                    for parts in near if same_replica(own, peer, replicas[matrix.parameter]) else (back,):
                        parts.owned.setdefault(peer, []).append((matrix, region, place))
        order = sorted(range(len(meeting.ranks)), key=meeting.ranks.__getitem__)  # as process groups order them
        position = {peer: index for index, peer in enumerate(order)}
        way_back = back.way(order)
        exchange = Exchange(
            tuple(meeting.ranks[peer] for peer in order),
            meeting.matrices,
            tuple(position[owner] for owner in meeting.owners),
            (way_back if out is back else out.way(order)) if not direct or _any_cut(specs.values()) else None,
            way_back,
            self._options.wire_dtype(self._parameters[draft.exchanged[0]].dtype),
        )
        return exchange, moves

    def _held_whole(self, index: int) -> Iterator[tuple[Matrix, int]]:
        """The matrices of a parameter that this rank orthogonalises as they lie, and their offsets in its update."""
        spec = self._parameters[index]
        runs = spec.runs(self._rank)
        wanted = [not exchanged for exchanged in self._options.exchanged(spec)]
        for matrix, _ in group_matrices(spec, index, runs, wanted):
            for _, region in regions(matrix, runs):
                yield matrix, self._in_update(matrix, region).offset

    def _batches(self, placed: Mapping[Matrix, int], *, in_work: bool, ready: Collection[Matrix]) -> Iterator[Batch]:
        """Join matrices that lie one after another: of one shape if batches are by shape, else of one parameter as
        well.
        """
        last: Batch | None = None
        for matrix, offset in placed.items():
            alike = last is not None and (
                self._shape(matrix) == (last.rows, last.cols, self._parameters[last.parameter].group)
                and (last.parameter == matrix.parameter or (in_work and self._options.by_shape))
                and last.offset + last.numel == offset
                and last.matrices < self._most(matrix)
            )
            if last is not None and alike:
                last = last._replace(matrices=last.matrices + 1, ready=last.ready and matrix in ready)
                continue
            if last is not None:
                yield last
            last = Batch(matrix.parameter, offset, 1, matrix.rows, matrix.cols, in_work, matrix in ready)
        if last is not None:
            yield last

    def _most(self, matrix: Matrix) -> float:
        """How many matrices like this one a batch may hold."""
        if not self._options.by_shape:
            return math.inf
        return self._options.max_batch_bytes // self._options.batch_bytes(matrix.rows, matrix.cols)

    def _too_large(self, index: int) -> bool:
        """Whether the matrices of a parameter on this rank are too large to be stacked with others."""
        size = local_batch_bytes(self._parameters[index], self._rank, self._options)
        return size > self._options.max_batch_bytes

    def _shape(self, matrix: Matrix) -> Shape:
        return Shape(matrix.rows, matrix.cols, self._parameters[matrix.parameter].group)

    def _in_update(self, matrix: Matrix, region: Region) -> Place:
        """Where a region lies in the contiguous local update of its parameter."""
        _, rows, cols = self._local_shapes[matrix.parameter]
        batch, row, col = region.local
        return rectangle(region.rows, region.cols, cols, (batch * rows + row) * cols + col)


def _in_work(matrix: Matrix, region: Region, work: Mapping[Matrix, int]) -> Place:
    """Where a region lies in the work buffer, in which whole matrices lie one after another."""
    offset = work[matrix] + region.row * matrix.cols + region.col
    return rectangle(region.rows, region.cols, matrix.cols, offset)


class _Parts:
    """What one way of an exchange packs, by the index of the rank at the other end."""

    def __init__(self) -> None:
        self.held: dict[int, list[_Part]] = {}
        self.owned: dict[int, list[_Part]] = {}

    def way(self, order: Sequence[int]) -> Way:
        """Packed in that order of the ranks."""
        held, held_splits = _pack([self.held.get(peer, []) for peer in order])
        owned, owned_splits = _pack([self.owned.get(peer, []) for peer in order])
        return Way(held, owned, held_splits, owned_splits)


def _any_cut(specs: Iterable[ParameterSpec]) -> bool:
    return any(axes for spec in specs for axes in spec.cut_axes)


def _pack(parts: Iterable[Sequence[_Part]]) -> tuple[tuple[Copy, ...], tuple[int, ...]]:
    """Pack regions one after another, part by part (a part is what one peer gets or sends): copies and split sizes."""
    copies: list[Copy] = []
    splits: list[int] = []
    offset = 0
    for part in parts:
        begin = offset
        for matrix, region, place in part:
            copies.append(Copy(matrix.parameter, place, rectangle(region.rows, region.cols, region.cols, offset)))
            offset += region.numel
        splits.append(offset - begin)
    return tuple(copies), tuple(splits)
