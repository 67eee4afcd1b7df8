"""The plan of a step: which rank orthogonalises which matrix, what travels, and where each region lies in a buffer.

Pure: from names, shapes, meshes and placements, with no tensor and no process group, so the plan of any rank of any job
    can
be made, printed and checked on a laptop. Every rank makes its own plan; ranks agree because owners and the order
of regions follow from what all of them know.

A bucket becomes one *stage*: at most one exchange, one packed all-to-all each way within one group of ranks, and the
matrices that this rank already holds whole. Parameters of a bucket that need different groups or dtypes become stages
of their own.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from distmuon.buckets import Bucket, Patterns, make_buckets
from distmuon.matrices import Matrix
from distmuon.placement import BATCH, COLS, ROWS, ParameterSpec, Region, regions

#: Matrices with a shorter short side are orthogonalised one at a time. Up to 16^3 multiply-adds PyTorch multiplies one
#: pair of bf16 matrices by itself but hands a batch of them to oneDNN (``use_mkldnn_matmul`` in
#: aten/src/ATen/native/mkldnn/Matmul.cpp), which sums in another order; above, batched and single products have the
#: same bits.
MIN_BATCHED_SIDE = 17


class Transfer(NamedTuple):
    """One region of ``matrices[matrix]``, at ``offset`` elements in the packed buffer of the rank that this plan is
    for.
    """

    matrix: int
    region: Region
    offset: int


class Batch(NamedTuple):
    """Matrices of one parameter and shape, orthogonalised in one call.

    They lie one after another from element ``offset`` on: of the parameter's contiguous local update if this rank holds
    them whole, of the stage's staging buffer if they were brought to it.
    """

    parameter: int
    offset: int
    matrices: int
    rows: int
    cols: int

    @property
    def numel(self) -> int:
        """Elements of all its matrices."""
        return self.matrices * self.rows * self.cols


class Piece(NamedTuple):
    """Local rows ``row : row + rows`` (of every slice) belong to matrices of ``matrix_rows`` rows: one learning
    rate.
    """

    row: int
    rows: int
    matrix_rows: int


@dataclass(frozen=True)
class Exchange:
    """The packed all-to-all of a stage, as one rank takes part in it; the way back has the splits swapped.

    Args:
        ranks: global ranks of the group, in group order.
        matrices: all matrices that are brought together in this group.
        owners: for each of them the index in ``ranks`` of the rank that orthogonalises it.
        sends: this rank's regions in buffer order: by owner, then matrix, then local order.
        receives: the regions of the matrices it owns: by holder, then matrix, then the holder's local order.
        send_splits: elements for each rank of the group.
        receive_splits: elements from each rank of the group.
        staging: for each matrix that this rank owns, its element offset in the staging buffer.
        dtype: of the buffers.
    """

    ranks: tuple[int, ...]
    matrices: tuple[Matrix, ...]
    owners: tuple[int, ...]
    sends: tuple[Transfer, ...]
    receives: tuple[Transfer, ...]
    send_splits: tuple[int, ...]
    receive_splits: tuple[int, ...]
    staging: dict[int, int]
    dtype: torch.dtype

    def __post_init__(self) -> None:
        if not len(self.send_splits) == len(self.receive_splits) == len(self.ranks):
            raise ValueError(f"an exchange of {len(self.ranks)} ranks needs as many splits each way")
        if self.send_numel != sum(transfer.region.numel for transfer in self.sends):
            raise ValueError("send splits do not add up to the regions sent")
        if self.receive_numel != self.staging_numel:
            raise ValueError(f"owned matrices have {self.staging_numel} elements but {self.receive_numel} arrive")

    @property
    def send_numel(self) -> int:
        """Elements that this rank sends on the way out."""
        return sum(self.send_splits)

    @property
    def receive_numel(self) -> int:
        """Elements that it receives on the way out."""
        return sum(self.receive_splits)

    @property
    def staging_numel(self) -> int:
        """Elements of all matrices that it owns."""
        return sum(self.matrices[index].numel for index in self.staging)

    def wire_bytes(self, rank: int) -> int:
        """Bytes that this rank sends to others in a step, both ways; what stays with itself does not count."""
        own = self.ranks.index(rank)
        forward = self.send_numel - self.send_splits[own]
        back = self.receive_numel - self.receive_splits[own]
        return (forward + back) * self.dtype.itemsize


@dataclass(frozen=True)
class Stage:
    """What a rank does for one bucket.

    Args:
        name: the bucket's name, as it stands in profiler ranges and reports.
        parameters: indices of the parameters whose shards it updates.
        exchange: None if no matrix of the bucket is cut.
        local: batches of matrices that this rank holds whole, in the parameters' local updates.
        owned: batches of matrices brought to this rank, in the staging buffer.
    """

    name: str
    parameters: tuple[int, ...]
    exchange: Exchange | None
    local: tuple[Batch, ...]
    owned: tuple[Batch, ...]


@dataclass(frozen=True)
class Plan:
    """The step of one rank: ``stages`` in order. ``buckets`` is what it was asked for, None if it chose."""

    rank: int
    parameters: tuple[ParameterSpec, ...]
    stages: tuple[Stage, ...]
    buckets: Patterns | None

    def pieces(self, parameter: int) -> tuple[Piece, ...]:
        """The local rows of a parameter by the shape of their matrices; one piece if all are alike."""
        spec = self.parameters[parameter]
        starts = spec.matrix_starts
        pieces: list[Piece] = []
        for segment in spec.segments(self.rank)[ROWS]:
            for start, rows in zip(starts, spec.matrix_rows, strict=True):
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
        return tuple(sorted({rank for spec in self.parameters if spec.storage for rank in spec.storage.ranks})) or (
            self.rank,
        )

    def report(self, ranks: Iterable[int] | None = None, *, ns_steps: int = 5) -> list[dict[str, object]]:
        """One row a bucket and rank.

        Args:
            ranks: default all ranks of the job; each is planned anew.
            ns_steps: Newton-Schulz iterations, for the FLOPs.

        Returns:
            Rows with ``bucket``, ``rank``, ``matrices`` it orthogonalises, ``gemm_flops``, ``sent_bytes`` to and
            ``received_bytes`` from other ranks (both ways), ``collectives``, and ``buffer_bytes``: send and receive
            buffers, staging and local updates.
        """
        rows: list[dict[str, object]] = []
        for rank in self.ranks() if ranks is None else ranks:
            plan = self if rank == self.rank else plan_step(self.parameters, rank, self.buckets)
            rows.extend(plan._report_row(stage, ns_steps) for stage in plan.stages)
        return rows

    def _report_row(self, stage: Stage, ns_steps: int) -> dict[str, object]:
        batches = stage.local + stage.owned
        updates = sum(self.update_bytes(index) for index in stage.parameters)
        exchange = stage.exchange
        # What is sent on the way out is received on the way back, so the two sums are one and the same.
        wire = exchange.wire_bytes(self.rank) if exchange else 0
        return {
            "bucket": stage.name,
            "rank": self.rank,
            "matrices": sum(batch.matrices for batch in batches),
            "gemm_flops": sum(
                2 * ns_steps * batch.matrices * Matrix(0, 0, 0, batch.rows, batch.cols).cost for batch in batches
            ),
            "sent_bytes": wire,
            "received_bytes": wire,
            "collectives": 2 if exchange else 0,
            "buffer_bytes": updates + (self._exchange_bytes(exchange) if exchange else 0),
        }

    def update_bytes(self, parameter: int) -> int:
        """Bytes of the local update of a parameter."""
        spec = self.parameters[parameter]
        batch, rows, cols = spec.local_shape3(self.rank)
        return batch * rows * cols * spec.dtype.itemsize

    @staticmethod
    def _exchange_bytes(exchange: Exchange) -> int:
        return (exchange.send_numel + exchange.receive_numel + exchange.staging_numel) * exchange.dtype.itemsize


def plan_step(parameters: Sequence[ParameterSpec], rank: int, buckets: Patterns | None = None) -> Plan:
    """Plan the step of ``rank``.

    Args:
        parameters: all Muon parameters, in the optimizer's order, the same on every rank that shares a mesh.
        rank: the global rank to plan for.
        buckets: name patterns, see :func:`distmuon.buckets.make_buckets`.

    Raises:
        ValueError: a parameter in no bucket, a pattern that matches nothing, a mesh that does not hold ``rank``.
    """
    parameters = tuple(parameters)
    loads: dict[tuple[int, ...], list[int]] = {}
    stages: list[Stage] = []
    for bucket in make_buckets(parameters, buckets):
        stages.extend(_plan_bucket(parameters, bucket, rank, loads))
    return Plan(rank, parameters, tuple(stages), buckets)


def _plan_bucket(
    parameters: tuple[ParameterSpec, ...], bucket: Bucket, rank: int, loads: dict[tuple[int, ...], list[int]]
) -> list[Stage]:
    """The stages of one bucket; ``loads`` holds the GEMM cost that each rank of a group has been given so far."""
    exchanging: dict[tuple[tuple[int, ...], torch.dtype], list[int]] = {}
    local_only: list[int] = []
    for index in bucket.parameters:
        spec = parameters[index]
        axes = spec.exchange_axes()
        if axes and spec.storage:
            exchanging.setdefault((spec.storage.subgroup(rank, axes), spec.dtype), []).append(index)
        else:
            local_only.append(index)
    if not exchanging:
        return [Stage(bucket.name, bucket.parameters, None, _local_batches(parameters, bucket.parameters, rank), ())]
    stages = []
    for number, ((ranks, dtype), indices) in enumerate(exchanging.items()):
        # Parameters that need no exchange go with the first that does: their work fills the wait for its way back.
        members = tuple(sorted(indices + local_only)) if number == 0 else tuple(indices)
        name = bucket.name if number == 0 else f"{bucket.name} ({number + 1})"
        exchange, owned = _plan_exchange(parameters, indices, rank, ranks, dtype, loads)
        stages.append(Stage(name, members, exchange, _local_batches(parameters, members, rank), owned))
    return stages


def _matrices(spec: ParameterSpec, index: int, rank: int, *, cut: bool) -> Iterator[Matrix]:
    """The matrices in the exchange subgroup of ``rank`` that are cut over it, or that one rank of it holds whole."""
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


def _local_batches(parameters: tuple[ParameterSpec, ...], indices: Iterable[int], rank: int) -> tuple[Batch, ...]:
    batches: list[Batch] = []
    for index in indices:
        spec = parameters[index]
        segments = spec.segments(rank)
        _, local_rows, _ = spec.local_shape3(rank)
        placed = []
        for matrix in _matrices(spec, index, rank, cut=False):
            for region in regions(matrix, segments):
                batch, row, _ = region.local
                placed.append(((batch * local_rows + row) * spec.cols, matrix))
        batches.extend(_batches(sorted(placed)))
    return tuple(batches)


def _batches(placed: Iterable[tuple[int, Matrix]]) -> list[Batch]:
    """Join matrices of one parameter and shape that lie one after another; ``placed`` is (element offset, matrix),
    sorted.
    """
    batches: list[Batch] = []
    for offset, matrix in placed:
        last = batches[-1] if batches else None
        if (
            last
            and (last.parameter, last.rows, last.cols) == (matrix.parameter, matrix.rows, matrix.cols)
            and last.offset + last.numel == offset
            and min(matrix.rows, matrix.cols) >= MIN_BATCHED_SIDE
        ):
            batches[-1] = last._replace(matrices=last.matrices + 1)
        else:
            batches.append(Batch(matrix.parameter, offset, 1, matrix.rows, matrix.cols))
    return batches


def _plan_exchange(
    parameters: tuple[ParameterSpec, ...],
    indices: list[int],
    rank: int,
    ranks: tuple[int, ...],
    dtype: torch.dtype,
    loads: dict[tuple[int, ...], list[int]],
) -> tuple[Exchange | None, tuple[Batch, ...]]:
    matrices = tuple(matrix for index in indices for matrix in _matrices(parameters[index], index, rank, cut=True))
    if not matrices:  # an expert group that holds no experts
        return None, ()
    own = ranks.index(rank)
    owners = longest_first([matrix.cost for matrix in matrices], loads.setdefault(ranks, [0] * len(ranks)))
    owned = [index for index, owner in enumerate(owners) if owner == own]
    staging = dict(
        zip(owned, itertools.accumulate((matrices[index].numel for index in owned), initial=0), strict=False)
    )

    by_owner: list[list[int]] = [[] for _ in ranks]
    for index, owner in enumerate(owners):
        by_owner[owner].append(index)
    send_order = [by_owner[owner] for owner in range(len(ranks))]
    segments = {index: parameters[index].segments(rank) for index in indices}
    sends, send_splits = _pack(
        [[(m, regions(matrices[m], segments[matrices[m].parameter])) for m in part] for part in send_order]
    )
    receive_order = []
    for holder in ranks:
        theirs = {matrices[m].parameter: parameters[matrices[m].parameter].segments(holder) for m in owned}
        receive_order.append([(m, regions(matrices[m], theirs[matrices[m].parameter])) for m in owned])
    receives, receive_splits = _pack(receive_order)
    exchange = Exchange(ranks, matrices, tuple(owners), sends, receives, send_splits, receive_splits, staging, dtype)
    return exchange, tuple(_batches((staging[index], matrices[index]) for index in owned))


def _pack(parts: Iterable[list[tuple[int, list[Region]]]]) -> tuple[tuple[Transfer, ...], tuple[int, ...]]:
    """Lay regions one after another, part by part (a part is what one peer sends or gets): transfers and split
    sizes.
    """
    transfers: list[Transfer] = []
    splits: list[int] = []
    offset = 0
    for part in parts:
        begin = offset
        for matrix, found in part:
            for region in found:
                transfers.append(Transfer(matrix, region, offset))
                offset += region.numel
        splits.append(offset - begin)
    return tuple(transfers), tuple(splits)


def longest_first(costs: Sequence[int], totals: list[int]) -> list[int]:
    """Owner of each job: the longest job first, to the worker with the least work.

    Ties go to the worker with the least in ``totals``, then to the lowest; jobs of one cost keep their order.

    Args:
        costs: of each job.
        totals: what each worker was given before; this round is added to it.
    """
    heap = [(0, total, worker) for worker, total in enumerate(totals)]
    heapq.heapify(heap)
    owners = [0] * len(costs)
    for job in sorted(range(len(costs)), key=lambda job: -costs[job]):
        load, total, worker = heapq.heappop(heap)
        owners[job] = worker
        totals[worker] += costs[job]
        heapq.heappush(heap, (load + costs[job], total, worker))
    return owners
