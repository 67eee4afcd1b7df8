"""What every rank of a job does in a step, stage by stage: work and bytes, without laying out a plan for each.

Its cost follows the number of matrices: parameters of one layout have their parts counted once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distmuon.assignment import Round, assign, whole_costs
from distmuon.drafts import Draft
from distmuon.matrices import Matrix
from distmuon.options import PlanOptions
from distmuon.owners import bound
from distmuon.placement import BATCH, ParameterSpec, Storage, dim_runs, ranks_of, regions, replicas_of, within
from distmuon.plan import make_drafts
from distmuon.richtext import Shown
from distmuon.sharing import settled

Counts = NDArray[np.int64]


@dataclass(frozen=True)
class StageTotals:
    """One stage; arrays have an entry for each rank of the job, as :attr:`StepTotals.ranks` orders them.

    Attributes:
        name: of the bucket.
        groups: positions, in those arrays, of the ranks that exchange with one another; none without an exchange.
        bound: what no assignment of owners can beat, max(mean, largest matrix) of each group's GEMM cost.
        owned_cost: GEMM cost (:func:`distmuon.matrices.gemm_cost`) of the exchanged matrices that a rank owns.
        whole_cost: of those that it orthogonalises where they lie.
        matrices: how many it owns.
        batches: calls of Newton-Schulz that these take, if ``max_batch_bytes`` cuts none.
        owned_numel: elements of these.
        whole_numel: elements that it stores of parameters of which nothing is exchanged.
        local_numel: elements that it stores of all parameters of the stage.
        out_sent: bytes to other ranks on the way out.
        out_received: bytes from other ranks on the way out.
        back_sent: bytes to other ranks on the way back.
        back_received: bytes from other ranks on the way back.
    """

    name: str
    groups: tuple[Counts, ...]
    bound: tuple[float, ...]
    owned_cost: Counts
    whole_cost: Counts
    matrices: Counts
    batches: Counts
    owned_numel: Counts
    whole_numel: Counts
    local_numel: Counts
    out_sent: Counts
    out_received: Counts
    back_sent: Counts
    back_received: Counts

    def imbalance_to_bound(self) -> float:
        """The largest GEMM cost that a rank owns relative to its group's bound, in the worst group; 1 without any."""
        pairs = zip(self.groups, self.bound, strict=True)
        return max((float(self.owned_cost[group].max() / bound) for group, bound in pairs if bound), default=1.0)


@dataclass(frozen=True, repr=False)
class StepTotals(Shown):
    """All stages of a step, over ``ranks``. Prints as a table of the stages."""

    ranks: tuple[int, ...]
    stages: tuple[StageTotals, ...]

    def _line(self) -> str:
        sent = self.sent_bytes()
        return (
            f"{len(self.ranks)} ranks, {len(self.stages)} stages: {sent.mean() / 1024:,.1f} KiB sent a rank and step, "
            f"{sent.max() / 1024:,.1f} at most; GEMM cost {self.imbalance():.3f} of the mean at most"
        )

    def _table(self) -> tuple[Sequence[str], list[Sequence[object]]]:
        header = ("stage", "groups", "matrices owned", "sent (KiB), mean", "at most", "imbalance to bound")
        rows: list[Sequence[object]] = []
        for stage in self.stages:
            sent = (stage.out_sent + stage.back_sent) / 1024
            figures = int(stage.matrices.sum()), float(sent.mean()), float(sent.max()), stage.imbalance_to_bound()
            rows.append((stage.name, len(stage.groups), *figures))
        return header, rows

    def cost(self) -> Counts:
        """GEMM cost of each rank over the step."""
        return self._over_stages("owned_cost") + self._over_stages("whole_cost")

    def sent_bytes(self) -> Counts:
        """Bytes that each rank sends to others in a step, both ways."""
        return self._over_stages("out_sent") + self._over_stages("back_sent")

    def imbalance(self) -> float:
        """The largest GEMM cost of a rank over the step relative to the mean."""
        cost = self.cost()
        return float(cost.max() / cost.mean())

    def _over_stages(self, name: str) -> Counts:
        return np.sum([getattr(stage, name) for stage in self.stages], axis=0)


def step_totals(parameters: Iterable[ParameterSpec], options: PlanOptions | None = None) -> StepTotals:
    """Work and bytes of every rank of a job.

    Parameters that need no exchange are counted in the stages in which the first rank handles them.

    Args:
        parameters: on meshes; all that any rank has.
        options: as for :func:`distmuon.plan.plan_step`.

    Raises:
        ValueError: as for ``plan_step``, or a parameter without a mesh.
    """
    parameters = tuple(parameters)
    options = settled(parameters, options or PlanOptions())
    ranks = ranks_of(parameters)
    if plain := next((spec.name for spec in parameters if spec.storage is None), None):
        raise ValueError(f"parameter {plain!r} is a plain tensor: totals over ranks need a mesh")
    position = {rank: index for index, rank in enumerate(ranks)}
    drafts = make_drafts(parameters, ranks[0], options)
    stored = {
        (shape, storage): (np.array([position[rank] for rank in storage.ranks]), _stored(shape, storage))
        for shape, storage in {(spec.shape, spec.storage) for spec in parameters}
        if storage
    }
    stages = []
    for draft, rounds in zip(drafts, assign(parameters, drafts, options), strict=True):
        counts = _Counts(len(ranks))
        for index in (*draft.exchanged, *draft.whole):
            for rank, cost in whole_costs(parameters[index], options).items():
                counts.whole_cost[position[rank]] += cost
            here, numel = stored[parameters[index].shape, parameters[index].storage]  # type: ignore[index]
            counts.local_numel[here] += numel
            if index in draft.whole:
                counts.whole_numel[here] += numel
        groups = [np.array([position[rank] for rank in meeting.ranks]) for meeting in rounds.values()]
        for group, meeting in zip(groups, rounds.values(), strict=True):
            _add_round(counts, group, parameters, draft, meeting, options)
        arrays = {each.name: getattr(counts, each.name) for each in fields(counts) if each.name != "size"}
        bounds = [bound([m.cost for m in meeting.matrices], len(meeting.ranks)) for meeting in rounds.values()]
        stages.append(StageTotals(draft.name, tuple(groups), tuple(bounds), **arrays))
    return StepTotals(tuple(ranks), tuple(stages))


@dataclass
class _Counts:
    size: int
    owned_cost: Counts = field(init=False)
    whole_cost: Counts = field(init=False)
    matrices: Counts = field(init=False)
    batches: Counts = field(init=False)
    owned_numel: Counts = field(init=False)
    whole_numel: Counts = field(init=False)
    local_numel: Counts = field(init=False)
    out_sent: Counts = field(init=False)
    out_received: Counts = field(init=False)
    back_sent: Counts = field(init=False)
    back_received: Counts = field(init=False)

    def __post_init__(self) -> None:
        for each in fields(self):
            if not each.init:
                setattr(self, each.name, np.zeros(self.size, dtype=np.int64))


def _add_round(
    counts: _Counts,
    group: Counts,
    parameters: Sequence[ParameterSpec],
    draft: Draft,
    meeting: Round,
    options: PlanOptions,
) -> None:
    """Count one exchange; matrices whose parts lie alike are counted together."""
    itemsize = options.wire_dtype(parameters[draft.exchanged[0]].dtype).itemsize
    runs = {index: parameters[index].runs(meeting.ranks[0], draft.axes) for index in draft.exchanged}
    alike: dict[object, tuple[Matrix, list[int]]] = {}  # one of them, and the owners of all
    called: set[tuple[Any, ...]] = set()  # the calls of Newton-Schulz: the owner, and what the call takes
    for matrix, owner in zip(meeting.matrices, meeting.owners, strict=True):
        spec = parameters[matrix.parameter]
        stack = within(runs[matrix.parameter][BATCH], matrix.batch, matrix.batch + 1)[0].holder
        key = (spec.shape, spec.storage, matrix.row, matrix.rows, stack)
        alike.setdefault(key, (matrix, []))[1].append(owner)
        called.add((owner, matrix.rows, matrix.cols, spec.group) if options.by_shape else (owner, matrix.parameter))
    np.add.at(counts.batches, group[[owner for owner, *_ in called]], 1)
    for matrix, owned_by in alike.values():
        spec = parameters[matrix.parameter]
        replicas = spec.replicas(draft.axes)
        held = np.zeros(len(group), dtype=np.int64)  # bytes of each rank of the first replica
        for holder, region in regions(matrix, runs[matrix.parameter]):
            held[holder] += region.numel * itemsize
        holders, whole = np.flatnonzero(held), int(held.sum())
        owners = np.array(owned_by)
        at = group[owners]
        near = sum((owners // step % size * step for size, step in replicas), np.zeros_like(owners))
        own = held[owners - near]
        offsets = replicas_of(0, replicas)
        for array, each in (
            (counts.owned_cost, matrix.cost),
            (counts.owned_numel, matrix.numel),
            (counts.matrices, 1),
            (counts.out_sent, -own),
            (counts.out_received, whole - own),
            (counts.back_sent, whole * len(offsets) - own),
            (counts.back_received, -own),
        ):
            np.add.at(array, at, each)
        for offset in offsets:
            there = group[holders + offset]
            counts.out_sent[there] += held[holders] * np.count_nonzero(near == offset)
            counts.back_received[there] += held[holders] * len(owners)


def _stored(shape: tuple[int, ...], storage: Storage) -> Counts:
    """Elements of a parameter that each rank of its mesh stores, in mesh order."""
    numel = np.ones(storage.mesh_shape, dtype=np.int64)
    for dim, size in enumerate(shape):
        axes = storage.axes(dim)
        lengths = [length if axis in axes else 1 for axis, length in enumerate(storage.mesh_shape)]
        held = np.zeros(math.prod(lengths), dtype=np.int64)
        for run in dim_runs(size, storage.splits(dim, (), storage.steps(axes))):
            held[run.holder] += run.stop - run.start
        numel *= held.reshape(lengths)
    return numel.ravel()
