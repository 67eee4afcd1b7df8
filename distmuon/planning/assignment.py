"""Who orthogonalises what, over all ranks of a job: the owners in every exchange of a step.

Every rank works all of it out and takes its own part, so that ranks agree without talking. What one rank knows and
another of its group does not, parameters on a mesh that holds only one of them, must not enter: totals are kept apart
for each set of ranks, of what all of the set know.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from distmuon.planning.drafts import Draft
from distmuon.planning.matrices import Matrix, Shape, gemm_cost
from distmuon.planning.options import PlanOptions
from distmuon.planning.owners import even, longest_first
from distmuon.planning.placement import ParameterSpec
from distmuon.planning.runs import BATCH, COLS, ROWS, Runs, regions, replicas_of, within


@dataclass(frozen=True)
class Round:
    """The exchange of one group of ranks in a draft.

    Args:
        ranks: of the group, in mesh order; holders and owners are indices into it.
        matrices: all that take part.
        owners: of each of them.
    """

    ranks: tuple[int, ...]
    matrices: tuple[Matrix, ...]
    owners: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.matrices) != len(self.owners):
            raise ValueError(f"{len(self.matrices)} matrices need as many owners, got {len(self.owners)}")


def assign(
    parameters: Sequence[ParameterSpec], drafts: Sequence[Draft], options: PlanOptions
) -> list[dict[tuple[int, ...], Round]]:
    """The rounds of each draft, by their ranks."""
    totals = _Totals(parameters, drafts, options)
    return [{ranks: _round(parameters, draft, ranks, options, totals) for ranks in draft.groups} for draft in drafts]


def group_matrices(
    spec: ParameterSpec, index: int, runs: Runs, wanted: Sequence[bool]
) -> Iterator[tuple[Matrix, bool]]:
    """The matrices of parameter ``index`` of which some part lies in ``runs``, and whether they are cut.

    Args:
        spec: the parameter.
        index: in the plan.
        runs: what a group of ranks holds of it.
        wanted: which matrices of a slice.
    """
    if not runs[COLS]:
        return
    here = [
        (row, rows, bool(axes))
        for row, rows, axes, want in zip(spec.matrix_starts, spec.matrix_rows, spec.cut_axes, wanted, strict=True)
        if want and within(runs[ROWS], row, row + rows)
    ]
    for run in runs[BATCH]:
        for batch in range(run.start, run.stop):
            for row, rows, cut in here:
                yield Matrix(index, batch, row, rows, spec.cols), cut


def _round(
    parameters: Sequence[ParameterSpec],
    draft: Draft,
    ranks: tuple[int, ...],
    options: PlanOptions,
    totals: _Totals,
) -> Round:
    """Decide on the owners of one group, and add what they get to the totals."""
    matrices: list[Matrix] = []
    holders: dict[int, list[int]] = {}
    for index in draft.exchanged:
        spec = parameters[index]
        runs = spec.runs(ranks[0], draft.axes)
        for matrix, cut in group_matrices(spec, index, runs, options.exchanged(spec)):
            if not cut:  # whole on each of its replicas: one of them has it already
                holder = next(regions(matrix, runs))[0]
                holders[len(matrices)] = replicas_of(holder, spec.replicas(draft.axes))
            matrices.append(matrix)
    costs = [matrix.cost for matrix in matrices]
    given = totals.of(draft, ranks)
    before = list(given)
    if options.by_shape:
        shapes = [Shape(m.rows, m.cols, parameters[m.parameter].group) for m in matrices]
        owners = even(costs, shapes, given, free=draft.free, holders=holders)
    else:
        owners = longest_first(costs, given, holders=holders)
    totals.add(draft, ranks, [after - earlier for after, earlier in zip(given, before, strict=True)])
    return Round(ranks, tuple(matrices), tuple(owners))


class _Totals:
    """GEMM cost that each rank has been given so far.

    Where matrices are batched by shape, over the whole step, with what ranks hold whole from the start. As published,
    each group of ranks by itself.
    """

    def __init__(self, parameters: Sequence[ParameterSpec], drafts: Sequence[Draft], options: PlanOptions) -> None:
        self._by_shape = options.by_shape
        sets = {draft.storage.members for draft in drafts if draft.storage}
        self._totals: dict[frozenset[int], dict[int, int]] = {members: dict.fromkeys(members, 0) for members in sets}
        self._groups: dict[tuple[int, ...], list[int]] = {}
        if self._by_shape:
            for spec in parameters:
                if spec.storage:
                    self._add(spec.storage.members, whole_costs(spec, options))

    def of(self, draft: Draft, ranks: tuple[int, ...]) -> list[int]:
        """Of each rank of a group."""
        assert draft.storage is not None
        if not self._by_shape:
            return list(self._groups.setdefault(ranks, [0] * len(ranks)))
        totals = self._totals[draft.storage.members]
        return [totals[rank] for rank in ranks]

    def add(self, draft: Draft, ranks: tuple[int, ...], costs: Sequence[int]) -> None:
        """Give each rank of a group so much more."""
        assert draft.storage is not None
        if not self._by_shape:
            self._groups[ranks] = [total + cost for total, cost in zip(self._groups[ranks], costs, strict=True)]
        else:
            self._add(draft.storage.members, dict(zip(ranks, costs, strict=True)))

    def _add(self, known_to: frozenset[int], costs: dict[int, int]) -> None:
        for members, totals in self._totals.items():
            if members <= known_to:
                for rank, cost in costs.items():
                    if rank in totals:
                        totals[rank] += cost


def whole_costs(spec: ParameterSpec, options: PlanOptions) -> dict[int, int]:
    """GEMM cost of the matrices that each rank of the mesh orthogonalises where they lie, for lack of an exchange."""
    storage = spec.storage
    assert storage is not None
    costs = dict.fromkeys(storage.ranks, 0)
    whole = [not exchanged for exchanged in options.exchanged(spec)]
    if not any(whole):
        return costs
    sharded = [axis for axis in range(len(storage.mesh_shape)) if axis not in spec.replica_axes]
    for ranks in storage.groups(sharded):
        runs = spec.runs(ranks[0], sharded)
        in_rows: dict[int, int] = {}
        for row, rows, wanted in zip(spec.matrix_starts, spec.matrix_rows, whole, strict=True):
            if wanted:
                holder = within(runs[ROWS], row, row + rows)[0].holder
                in_rows[holder] = in_rows.get(holder, 0) + gemm_cost(rows, spec.cols)
        for batch in runs[BATCH]:
            for holder, cost in in_rows.items():
                for cols in runs[COLS]:
                    costs[ranks[batch.holder + holder + cols.holder]] += (batch.stop - batch.start) * cost
    return costs
