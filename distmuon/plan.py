"""The plan of a step: which rank orthogonalises which matrix, what travels, and where each region lies in a buffer.

Pure: from names, shapes, meshes and placements, with no tensor and no process group, so the plan of any rank of any job
can be made, printed and checked on a laptop. Every rank makes its own; ranks agree because owners and the order of
regions follow from what all of them know.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from distmuon.buckets import Patterns, make_buckets
from distmuon.drafts import Draft, draft_stages, local_batch_bytes, spread_by_shape
from distmuon.matrices import Matrix, Shape
from distmuon.names import choose
from distmuon.newton_schulz.costs import MAX_BATCH_BYTES, NS_ALGORITHMS, batch_bytes, gemm_flops
from distmuon.owners import longest_first, shapes_together
from distmuon.placement import BATCH, COLS, ROWS, ParameterSpec, Region, Segment, regions
from distmuon.places import Place, flat, rectangle
from distmuon.schedule import Batch, Copy, Exchange, Piece, Stage
from distmuon.variants import Variant

NS_DTYPES = (torch.bfloat16, torch.float32)
MOMENTUM_DTYPES = (None, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True)
class PlanOptions:
    """What a plan is asked for, beside the parameters; names and meaning are those of ``DistMuon``."""

    buckets: Patterns | None = None
    variant: Variant = field(default_factory=Variant)
    ns_dtype: torch.dtype = torch.bfloat16
    ns_algorithm: str = "standard"
    max_batch_bytes: int = MAX_BATCH_BYTES
    capturable: bool = False
    momentum_dtype: torch.dtype | None = None
    scale_free: bool = False

    def __post_init__(self) -> None:
        if self.capturable and self.variant.elementwise != "bucket":
            raise ValueError("capturable=True needs a variant with elementwise='bucket', as 'fused' is")
        choose("ns_algorithm", self.ns_algorithm, NS_ALGORITHMS)
        if self.ns_dtype not in NS_DTYPES:
            raise ValueError(f"ns_dtype is {self.ns_dtype}: choose torch.bfloat16 or torch.float32")
        if self.momentum_dtype not in MOMENTUM_DTYPES:
            raise ValueError(f"momentum_dtype is {self.momentum_dtype}: choose one of {MOMENTUM_DTYPES}")
        if self.max_batch_bytes <= 0:
            raise ValueError(f"max_batch_bytes is {self.max_batch_bytes}: give a positive number of bytes")

    @property
    def by_shape(self) -> bool:
        """Whether all matrices of one shape are batched together."""
        return self.variant.ns_batching == "shape"

    def batch_bytes(self, rows: int, cols: int) -> int:
        """Bytes that one matrix takes in a Newton-Schulz batch: its place in the stack, scratch, fp32 staging."""
        return batch_bytes(rows, cols, self.ns_dtype.itemsize, self.ns_algorithm)

    def wire_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """What travels for parameters of ``dtype``."""
        narrower = self.variant.wire_dtype == "newton_schulz" and self.ns_dtype.itemsize < dtype.itemsize
        return self.ns_dtype if narrower else dtype


@dataclass(frozen=True)
class Plan:
    """The step of one rank: ``stages`` in the order in which they are computed."""

    rank: int
    parameters: tuple[ParameterSpec, ...]
    stages: tuple[Stage, ...]
    options: PlanOptions

    def pieces(self, parameter: int) -> tuple[Piece, ...]:
        """The local rows of a parameter by the shape of their matrices; one piece if all are alike."""
        spec = self.parameters[parameter]
        pieces: list[Piece] = []
        for segment in spec.segments(self.rank)[ROWS]:
            for start, rows in zip(spec.matrix_starts, spec.matrix_rows, strict=True):
                top, bottom = max(segment.start, start), min(segment.stop, start + rows)
                if top >= bottom:
                    continue
                if pieces and pieces[-1].matrix_rows == rows:
                    pieces[-1] = pieces[-1]._replace(rows=pieces[-1].rows + bottom - top)
                else:
                    pieces.append(Piece(segment.local + top - segment.start, bottom - top, rows))
        return tuple(pieces)

    def ranks(self) -> tuple[int, ...]:
        """All ranks that hold a parameter of this plan."""
        everyone = {rank for spec in self.parameters if spec.storage for rank in spec.storage.ranks}
        return tuple(sorted(everyone)) or (self.rank,)

    def report(self, ranks: Iterable[int] | None = None, *, ns_steps: int = 5) -> list[dict[str, object]]:
        """One row a bucket and rank.

        Args:
            ranks: default all ranks of the job; each is planned anew.
            ns_steps: Newton-Schulz iterations, for the FLOPs.

        Returns:
            Rows with ``bucket``, ``rank``, ``matrices`` it orthogonalises, ``gemm_flops``, ``sent_bytes`` to and
            ``received_bytes`` from other ranks (both ways), ``collectives``, ``imbalance`` and ``imbalance_to_bound``
            of the GEMM cost of matrices brought together (see :meth:`distmuon.schedule.Exchange.imbalance`; 1 without
            any), and ``buffer_bytes``: updates, work buffer and packed buffers.
        """
        rows: list[dict[str, object]] = []
        for rank in self.ranks() if ranks is None else ranks:
            plan = self if rank == self.rank else plan_step(self.parameters, rank, self.options)
            rows.extend(plan._row(stage, ns_steps) for stage in plan.stages)
        return rows

    def _row(self, stage: Stage, ns_steps: int) -> dict[str, object]:
        exchange = stage.exchange
        wire = exchange.wire_bytes(self.rank) if exchange else 0
        imbalance, to_bound = exchange.imbalance() if exchange else (1.0, 1.0)
        updates = sum(self.parameters[index].local_bytes(self.rank) for index in stage.parameters)
        return {
            "bucket": stage.name,
            "rank": self.rank,
            "matrices": sum(batch.matrices for batch in stage.batches),
            "gemm_flops": sum(
                batch.matrices * gemm_flops(batch.rows, batch.cols, ns_steps, self.options.ns_algorithm)
                for batch in stage.batches
            ),
            "sent_bytes": wire,
            "received_bytes": wire,
            "collectives": 2 if exchange else 0,
            "imbalance": imbalance,
            "imbalance_to_bound": to_bound,
            "buffer_bytes": updates + stage.work_bytes + (exchange.packed_bytes if exchange else 0),
        }


def plan_step(parameters: Iterable[ParameterSpec], rank: int, options: PlanOptions | None = None) -> Plan:
    """Plan the step of ``rank``.

    Args:
        parameters: all Muon parameters, in the optimizer's order, the same on every rank that shares a mesh.
        rank: the global rank to plan for.
        options: buckets, variant, and what else there is to choose.

    Raises:
        ValueError: a parameter in no bucket, a pattern that matches nothing, a mesh that does not hold ``rank``.
    """
    parameters = tuple(parameters)
    options = options or PlanOptions()
    buckets = make_buckets(parameters, options.buckets, by_shape=options.by_shape)
    drafts = draft_stages(parameters, buckets, rank)
    if options.by_shape:
        drafts = spread_by_shape(parameters, drafts, rank, options.batch_bytes, options.max_batch_bytes)
    planner = _Planner(parameters, rank, options)
    return Plan(rank, parameters, tuple(planner.stage(draft) for draft in drafts), options)


class _Planner:
    """Lays out the stages of one rank, in order."""

    def __init__(self, parameters: tuple[ParameterSpec, ...], rank: int, options: PlanOptions) -> None:
        self._parameters = parameters
        self._rank = rank
        self._options = options
        #: GEMM cost that each rank of a group has been given so far.
        self._loads: dict[tuple[int, ...], list[int]] = {}

    def stage(self, draft: Draft) -> Stage:
        """Decide on owners, lay out the work buffer, and say what is copied where."""
        members = tuple(sorted(draft.cut + draft.whole))
        cut = [matrix for index in draft.cut for matrix in self._matrices(index, cut=True)]
        owners = self._owners(cut, draft) if cut else []
        owned = [matrix for matrix, owner in zip(cut, owners, strict=True) if draft.ranks[owner] == self._rank]
        whole = {matrix: offset for index in members for matrix, offset in self._held_whole(index)}
        stacked = [matrix for matrix in whole if self._options.by_shape and not self._too_large(matrix)]
        in_work = sorted(owned + stacked, key=self._shape) if self._options.by_shape else owned
        offsets = itertools.accumulate((matrix.numel for matrix in in_work), initial=0)
        work = dict(zip(in_work, offsets, strict=False))

        # Also where its group has nothing to bring together, as an expert group without experts: ranks that share
        # another group with this one must issue their exchanges in the same order.
        exchange, moves = self._exchange(draft, cut, owners, work) if draft.cut else (None, [])
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

    def _owners(self, matrices: Sequence[Matrix], draft: Draft) -> list[int]:
        loads = self._loads.setdefault(draft.ranks, [0] * len(draft.ranks))
        costs = [matrix.cost for matrix in matrices]
        if not self._options.by_shape:
            return longest_first(costs, loads)
        return shapes_together(costs, [self._shape(matrix) for matrix in matrices], draft.free, loads)

    def _exchange(
        self, draft: Draft, matrices: Sequence[Matrix], owners: Sequence[int], work: Mapping[Matrix, int]
    ) -> tuple[Exchange, list[Copy]]:
        """The exchange, and the copies of what stays on this rank if that does not go through it."""
        own = draft.ranks.index(self._rank)
        by_owner = [
            [m for m, owner in zip(matrices, owners, strict=True) if owner == index]
            for index in range(len(draft.ranks))
        ]
        through = [
            index for index in range(len(draft.ranks)) if index != own or self._options.variant.packing != "bucket"
        ]
        sends, send_splits = _pack(
            [
                [
                    (m.parameter, r, self._in_update(m, r))
                    for m in theirs
                    for r in regions(m, self._segments(m, self._rank))
                ]
                if owner in through
                else []
                for owner, theirs in enumerate(by_owner)
            ]
        )
        receives, receive_splits = _pack(
            [
                [
                    (m.parameter, r, _in_work(m, r, work))
                    for m in by_owner[own]
                    for r in regions(m, self._segments(m, holder))
                ]
                if index in through
                else []
                for index, holder in enumerate(draft.ranks)
            ]
        )
        moves = [
            Copy(m.parameter, self._in_update(m, r), _in_work(m, r, work))
            for m in (by_owner[own] if own not in through else ())
            for r in regions(m, self._segments(m, self._rank))
        ]
        dtype = self._options.wire_dtype(self._parameters[draft.cut[0]].dtype)
        exchange = Exchange(
            draft.ranks, tuple(matrices), tuple(owners), sends, receives, send_splits, receive_splits, dtype
        )
        return exchange, moves

    def _matrices(self, index: int, *, cut: bool) -> Iterator[Matrix]:
        """Matrices of a parameter that are cut over this rank's exchange subgroup, or that one rank of it holds
        whole.
        """
        spec, rank = self._parameters[index], self._rank
        if not spec.subgroup_runs(rank, COLS):
            return
        runs = spec.subgroup_runs(rank, ROWS)
        here = [
            (row, rows)
            for row, rows, axes in zip(spec.matrix_starts, spec.matrix_rows, spec.cut_axes(), strict=True)
            if bool(axes) == cut and any(start < row + rows and row < stop for start, stop in runs)
        ]
        for segment in spec.segments(rank)[BATCH]:
            for batch in range(segment.start, segment.stop):
                for row, rows in here:
                    yield Matrix(index, batch, row, rows, spec.cols)

    def _held_whole(self, index: int) -> Iterator[tuple[Matrix, int]]:
        """The matrices of a parameter that this rank holds whole, and their offsets in its update."""
        for matrix in self._matrices(index, cut=False):
            for region in regions(matrix, self._segments(matrix, self._rank)):
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

    def _too_large(self, matrix: Matrix) -> bool:
        """Whether the matrices of its parameter on this rank are too large to be stacked with others."""
        size = local_batch_bytes(self._parameters[matrix.parameter], self._rank, self._options.batch_bytes)
        return size > self._options.max_batch_bytes

    def _shape(self, matrix: Matrix) -> Shape:
        return Shape(matrix.rows, matrix.cols, self._parameters[matrix.parameter].group)

    def _segments(self, matrix: Matrix, rank: int) -> tuple[tuple[Segment, ...], ...]:
        return self._parameters[matrix.parameter].segments(rank)

    def _in_update(self, matrix: Matrix, region: Region) -> Place:
        """Where a region lies in the contiguous local update of its parameter."""
        _, rows, cols = self._parameters[matrix.parameter].local_shape3(self._rank)
        batch, row, col = region.local
        return rectangle(region.rows, region.cols, cols, (batch * rows + row) * cols + col)


def _in_work(matrix: Matrix, region: Region, work: Mapping[Matrix, int]) -> Place:
    """Where a region lies in the work buffer, in which whole matrices lie one after another."""
    offset = work[matrix] + region.row * matrix.cols + region.col
    return rectangle(region.rows, region.cols, matrix.cols, offset)


def _pack(parts: Iterable[Sequence[tuple[int, Region, Place]]]) -> tuple[tuple[Copy, ...], tuple[int, ...]]:
    """Pack regions one after another, part by part (a part is what one peer gets or sends): copies and split sizes."""
    copies: list[Copy] = []
    splits: list[int] = []
    offset = 0
    for part in parts:
        begin = offset
        for parameter, region, place in part:
            copies.append(Copy(parameter, place, rectangle(region.rows, region.cols, region.cols, offset)))
            offset += region.numel
        splits.append(offset - begin)
    return tuple(copies), tuple(splits)
