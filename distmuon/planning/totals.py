"""What every rank of a job does in a step, stage by stage: work and bytes, without laying out a plan for each.

Its cost follows the number of matrices: parameters of one layout have their parts counted once.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from distmuon.planning.assignment import Round, assign, whole_costs
from distmuon.planning.drafts import Draft
from distmuon.planning.matrices import Matrix
from distmuon.planning.options import PlanOptions
from distmuon.planning.owners import bound
from distmuon.planning.placement import ParameterSpec, Storage, ranks_of
from distmuon.planning.plan import make_drafts
from distmuon.planning.runs import BATCH, dim_runs, regions, replicas_of, within
from distmuon.planning.sharing import settled
from distmuon.richtext import Shown

#: Of int64, one for each rank of a job or of a group. Not numpy's, which the package does without.
Counts = Tensor


@dataclass(frozen=True)
class StageTotals:
    """One stage; counts have an entry for each rank of the job, as :attr:`StepTotals.ranks` orders them.

    Attributes:
        name: of the bucket.
        groups: positions, among those, of the ranks that exchange with one another; none without an exchange.
        bound: what no assignment of owners can beat, max(mean, largest matrix) of each group's GEMM cost.
        owned_cost: GEMM cost (:func:`distmuon.planning.matrices.gemm_cost`) of the exchanged matrices that a rank owns.
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
        return max((int(self.owned_cost[group].max()) / bound for group, bound in pairs if bound), default=1.0)


@dataclass(frozen=True, repr=False)
class StepTotals(Shown):
    """All stages of a step, over ``ranks``. Prints as a table of the stages."""

    ranks: tuple[int, ...]
    stages: tuple[StageTotals, ...]

    def _line(self) -> str:
        sent = self.sent_bytes().double() / 1024
        return (
            f"{len(self.ranks)} ranks, {len(self.stages)} stages: {sent.mean():,.1f} KiB sent a rank and step, "
            f"{sent.max():,.1f} at most; GEMM cost {self.imbalance():.3f} of the mean at most"
        )

    def _table(self) -> tuple[Sequence[str], list[Sequence[object]]]:
        header = ("stage", "groups", "matrices owned", "sent (KiB), mean", "at most", "imbalance to bound")
        rows: list[Sequence[object]] = []
        for stage in self.stages:
            sent = (stage.out_sent + stage.back_sent).double() / 1024
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
        return float(cost.max() / cost.double().mean())

    def _over_stages(self, name: str) -> Counts:
        return torch.stack([getattr(stage, name) for stage in self.stages]).sum(0)


def step_totals(parameters: Iterable[ParameterSpec], options: PlanOptions | None = None) -> StepTotals:
    """Work and bytes of every rank of a job.

    Parameters that need no exchange are counted in the stages in which the first rank handles them.

    Args:
        parameters: on meshes; all that any rank has.
        options: as for :func:`distmuon.planning.plan.plan_step`.

    Raises:
        ValueError: as for ``plan_step``, or a parameter without a mesh, or none at all.
    """
    parameters = tuple(parameters)
    options = settled(parameters, options or PlanOptions())
    if not parameters:
        raise ValueError("there are no parameters: give at least one")
    ranks = ranks_of(parameters)
    if plain := next((spec.name for spec in parameters if spec.storage is None), None):
        raise ValueError(f"parameter {plain!r} is a plain tensor: totals over ranks need a mesh")
    position = {rank: index for index, rank in enumerate(ranks)}
    drafts = make_drafts(parameters, ranks[0], options)
    stored = {
        (shape, storage): (torch.tensor([position[rank] for rank in storage.ranks]), _stored(shape, storage))
        for shape, storage in {(spec.shape, spec.storage) for spec in parameters}
        if storage
    }
    stages = []
    for draft, rounds in zip(drafts, assign(parameters, drafts, options), strict=True):
        counts = _Counts(len(ranks))
        local, whole = torch.zeros(len(ranks), dtype=torch.int64), torch.zeros(len(ranks), dtype=torch.int64)
        for index in (*draft.exchanged, *draft.whole):
            for rank, cost in whole_costs(parameters[index], options).items():
                counts.whole_cost[position[rank]] += cost
            here, numel = stored[parameters[index].shape, parameters[index].storage]  # type: ignore[index]
            local[here] += numel
            if index in draft.whole:
                whole[here] += numel
        groups = [[position[rank] for rank in meeting.ranks] for meeting in rounds.values()]
        for group, meeting in zip(groups, rounds.values(), strict=True):
            _add_round(counts, group, parameters, draft, meeting, options)
        bounds = [bound([m.cost for m in meeting.matrices], len(meeting.ranks)) for meeting in rounds.values()]
        counted = {each.name: torch.tensor(getattr(counts, each.name)) for each in fields(counts) if not each.init}
        positions = tuple(map(torch.tensor, groups))
        stages.append(
            StageTotals(draft.name, positions, tuple(bounds), local_numel=local, whole_numel=whole, **counted)
        )
    return StepTotals(tuple(ranks), tuple(stages))


@dataclass
class _Counts:
    """Some of the counts of :class:`StageTotals`, as lists: they are added to one by one, which tensors are slow at."""

    size: int
    owned_cost: list[int] = field(init=False)
    whole_cost: list[int] = field(init=False)
    matrices: list[int] = field(init=False)
    batches: list[int] = field(init=False)
    owned_numel: list[int] = field(init=False)
    out_sent: list[int] = field(init=False)
    out_received: list[int] = field(init=False)
    back_sent: list[int] = field(init=False)
    back_received: list[int] = field(init=False)

    def __post_init__(self) -> None:
        for each in fields(self):
            if not each.init:
                setattr(self, each.name, [0] * self.size)


def _add_round(
    counts: _Counts,
    group: Sequence[int],
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
    for owner, *_ in called:
        counts.batches[group[owner]] += 1
    for matrix, owners in alike.values():
        replicas = parameters[matrix.parameter].replicas(draft.axes)
        held: dict[int, int] = {}  # bytes of each rank of the first replica
        for holder, region in regions(matrix, runs[matrix.parameter]):
            held[holder] = held.get(holder, 0) + region.numel * itemsize
        size, cost, numel = sum(held.values()), matrix.cost, matrix.numel
        offsets = replicas_of(0, replicas)
        served: Counter[int] = Counter()  # by replica, how many of the owners are in it
        for owner in owners:
            near = sum(owner // step % length * step for length, step in replicas)
            served[near] += 1
            at, own = group[owner], held.get(owner - near, 0)
            counts.owned_cost[at] += cost
            counts.owned_numel[at] += numel
            counts.matrices[at] += 1
            counts.out_sent[at] -= own
            counts.out_received[at] += size - own
            counts.back_sent[at] += size * len(offsets) - own
            counts.back_received[at] -= own
        for offset in offsets:
            matrices_near = served[offset]
            for holder, part in held.items():
                at = group[holder + offset]
                counts.out_sent[at] += part * matrices_near
                counts.back_received[at] += part * len(owners)


def _stored(shape: tuple[int, ...], storage: Storage) -> Counts:
    """Elements of a parameter that each rank of its mesh stores, in mesh order."""
    numel = torch.ones(storage.mesh_shape, dtype=torch.int64)
    for dim, size in enumerate(shape):
        axes = storage.axes(dim)
        lengths = [length if axis in axes else 1 for axis, length in enumerate(storage.mesh_shape)]
        held = [0] * math.prod(lengths)
        for run in dim_runs(size, storage.splits(dim, (), storage.steps(axes))):
            held[run.holder] += run.stop - run.start
        numel *= torch.tensor(held).view(lengths)
    return numel.ravel()
