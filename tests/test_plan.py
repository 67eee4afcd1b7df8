"""The plan, by exhaustion: every element of every matrix reaches its owner once, and its result every holder."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from generated import jobs
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Replicate, Shard

from distmuon import PUBLISHED_BUCKETS, VARIANTS, plan_for
from distmuon.planning.options import PlanOptions
from distmuon.planning.owners import IMBALANCE, even, longest_first
from distmuon.planning.placement import ParameterSpec, Storage
from distmuon.planning.plan import Plan, plan_step
from distmuon.planning.schedule import Stage
from distmuon.planning.sharing import settled


def local_numbers(spec: ParameterSpec, rank: int) -> torch.Tensor:
    """What ``rank`` stores if the parameter's elements are numbered, cut by torch's own placements."""
    numbers = torch.arange(math.prod(spec.shape)).view(spec.shape)
    if spec.storage is None:
        return numbers.view(spec.shape3)
    for placement, size, at in zip(
        spec.storage.placements, spec.storage.mesh_shape, spec.storage.coordinate(rank), strict=True
    ):
        if not isinstance(placement, Replicate):
            numbers = placement._split_tensor(numbers, size, with_padding=False, contiguous=False)[0][at]
    return numbers.unsqueeze(0) if numbers.ndim == 2 else numbers


class Replay:
    """All ranks' plans on numbered elements, in which a matrix is 'orthogonalised' by adding DONE to its numbers."""

    def __init__(self, specs: list[ParameterSpec], ranks: int, options: PlanOptions) -> None:
        self.specs = specs
        #: The parameters that each rank knows: those on a mesh that holds it.
        self.known = [
            [number for number, spec in enumerate(specs) if spec.storage is None or rank in spec.storage.ranks]
            for rank in range(ranks)
        ]
        self.plans = [plan_step([specs[number] for number in self.known[rank]], rank, options) for rank in range(ranks)]
        self.held = [
            [local_numbers(specs[number], rank).contiguous() for number in self.known[rank]] for rank in range(ranks)
        ]
        self.results = [[torch.full_like(local, -1) for local in locals_] for locals_ in self.held]
        self.whole = [torch.arange(math.prod(spec.shape)).view(spec.shape3) for spec in specs]
        self.computed = [torch.zeros_like(numbers) for numbers in self.whole]

    def run(self) -> None:
        """Every stage of every rank; ranks of one exchange together."""
        work = [[torch.full((stage.work_numel,), -1) for stage in plan.stages] for plan in self.plans]
        for rank, plan in enumerate(self.plans):
            for stage, buffer in zip(plan.stages, work[rank], strict=True):
                for copy in stage.moves:
                    self.fill(copy.packed.of(buffer), copy.place.of(self.held[rank][copy.parameter]))
        exchanges = [[self.rounds(rank, stage) for stage in plan.stages if stage.exchange] for rank, plan in self.all()]
        for one, other in itertools.combinations(range(len(self.plans)), 2):
            common = [[key for key in exchanges[rank] if {one, other} <= set(key[1])] for rank in (one, other)]
            assert common[0] == common[1], "ranks issue the exchanges that they share in the same order"
        joined = {key: self.members(key) for keys in exchanges for key in keys}
        for (_, ranks), members in joined.items():
            assert sorted(members) == sorted(ranks), "every rank of the group joins"
            stages = [self.plans[rank].stages[members[rank]] for rank in ranks]
            assert len({stage.exchange.owners for stage in stages}) == 1
            if any(stage.exchange.out is None for stage in stages):
                assert all(stage.exchange.out is None for stage in stages)
                continue
            buffers = []
            for rank, stage in zip(ranks, stages, strict=True):
                buffers.append(torch.full((stage.exchange.out.held_numel,), -1))
                for copy in stage.exchange.out.held:
                    self.fill(copy.packed.of(buffers[-1]), copy.place.of(self.held[rank][copy.parameter]))
                assert not (buffers[-1] == -1).any(), "nothing is padded"
            arrived = all_to_all(buffers, [stage.exchange.out.held_splits for stage in stages])
            for rank, stage, packed in zip(ranks, stages, arrived, strict=True):
                assert len(packed) == stage.exchange.out.owned_numel
                for copy in stage.exchange.out.owned:
                    self.fill(copy.place.of(work[rank][members[rank]]), copy.packed.of(packed))
        for rank, plan in enumerate(self.plans):
            for stage, buffer in zip(plan.stages, work[rank], strict=True):
                assert not (buffer == -1).any(), "the work buffer holds whole matrices"
                for batch in stage.batches:
                    held, result = self.held[rank][batch.parameter], self.results[rank][batch.parameter]
                    source, target = (buffer, buffer) if batch.in_work else (held, result)
                    shape = (batch.matrices, batch.rows, batch.cols)
                    numbers = batch.place.of(source).reshape(shape)
                    done = self.orthogonalize(numbers)
                    target.view(-1)[batch.offset : batch.offset + batch.numel] = done.flatten()
                for copy in stage.moves:
                    self.fill(copy.place.of(self.results[rank][copy.parameter]), copy.packed.of(buffer))
        for (_, ranks), members in joined.items():
            stages = [self.plans[rank].stages[members[rank]] for rank in ranks]
            buffers = []
            for rank, stage in zip(ranks, stages, strict=True):
                buffers.append(torch.full((stage.exchange.back.owned_numel,), -1))
                for copy in stage.exchange.back.owned:
                    self.fill(copy.packed.of(buffers[-1]), copy.place.of(work[rank][members[rank]]))
                assert not (buffers[-1] == -1).any(), "nothing is padded"
            returned = all_to_all(buffers, [stage.exchange.back.owned_splits for stage in stages])
            for rank, stage, packed in zip(ranks, stages, returned, strict=True):
                assert len(packed) == stage.exchange.back.held_numel
                for copy in stage.exchange.back.held:
                    self.fill(copy.place.of(self.results[rank][copy.parameter]), copy.packed.of(packed))

    def all(self) -> Iterator[tuple[int, Plan]]:
        """Every rank and its plan."""
        return enumerate(self.plans)

    def rounds(self, rank: int, stage: Stage) -> tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]:
        """What tells an exchange from others whatever else a rank knows: its matrices and its ranks."""
        matrices = (matrix._replace(parameter=self.known[rank][matrix.parameter]) for matrix in stage.exchange.matrices)
        return tuple(map(tuple, matrices)), stage.exchange.ranks

    def members(self, key: tuple[object, ...]) -> dict[int, int]:
        """Position of the stage in each rank's plan."""
        return {
            rank: index
            for rank, plan in self.all()
            for index, stage in enumerate(plan.stages)
            if stage.exchange and self.rounds(rank, stage) == key
        }

    @staticmethod
    def fill(area: torch.Tensor, numbers: torch.Tensor) -> None:
        assert (area == -1).all(), "written once"
        area.copy_(numbers)

    def orthogonalize(self, batch: torch.Tensor) -> torch.Tensor:
        """Each must be a matrix of some parameter, complete and in order; parameters are told apart by trying."""
        for numbers in batch:
            for spec, whole, computed in zip(self.specs, self.whole, self.computed, strict=True):
                number, inside = divmod(int(numbers[0, 0]), spec.shape3[1] * spec.cols)
                row = inside // spec.cols
                place = number, slice(row, row + numbers.shape[0])
                if (row, numbers.shape[0]) in zip(spec.matrix_starts, spec.matrix_rows, strict=True) and (
                    number < spec.shape3[0] and torch.equal(numbers, whole[place])
                ):
                    computed[place] += 1
                    break
            else:
                raise AssertionError(f"no parameter has this matrix: {numbers}")
        return batch + DONE

    def check(self) -> None:
        """Every holder has every result; each matrix was orthogonalised once, or once by each replica."""
        for held, results in zip(self.held, self.results, strict=True):
            assert all(torch.equal(result, local + DONE) for local, result in zip(held, results, strict=True))
        options = settled(self.specs, replace(self.plans[0].options, sharing=None))
        times = [1 if options.shares(spec) else replicas_of(spec, len(self.plans)) for spec in self.specs]
        # Parameters of equal numbers can't be told apart, so sums are compared.
        assert sum(int(computed.sum()) for computed in self.computed) == sum(
            whole.numel() * each for whole, each in zip(self.whole, times, strict=True)
        )


DONE = 1_000_000


def replicas_of(spec: ParameterSpec, ranks: int) -> int:
    if spec.storage is None:
        return ranks
    placed = zip(spec.storage.placements, spec.storage.mesh_shape, strict=True)
    return math.prod(size for placement, size in placed if isinstance(placement, Replicate))


def all_to_all(buffers: list[torch.Tensor], splits: list[tuple[int, ...]]) -> list[torch.Tensor]:
    """What ``all_to_all_single`` does."""
    parts = [buffer.split(split) for buffer, split in zip(buffers, splits, strict=True)]
    return [torch.cat([theirs[index] for theirs in parts]) for index in range(len(buffers))]


def step_on_numbers(specs: list[ParameterSpec], ranks: int, options: PlanOptions) -> None:
    replay = Replay(specs, ranks, options)
    replay.run()
    replay.check()


@pytest.mark.parametrize("variant", VARIANTS)
@given(
    job=jobs(),
    max_batch_bytes=st.sampled_from([1, 3_000, 64 << 20]),
    share_replicas=st.sampled_from([None, True, True, False]),
)
@settings(max_examples=100, deadline=None)
def test_every_element_travels_once_each_way(variant, job, max_batch_bytes, share_replicas):
    options = PlanOptions(variant=VARIANTS[variant], max_batch_bytes=max_batch_bytes, share_replicas=share_replicas)
    step_on_numbers(*job, options)


@pytest.mark.parametrize("variant", VARIANTS)
@given(job=jobs(parts=True), share_replicas=st.sampled_from([None, True, False]))
@settings(max_examples=150, deadline=None)
def test_ranks_that_know_different_parameters_agree_on_what_they_share(variant, job, share_replicas):
    """Pipeline stages, expert groups on some of the ranks: meshes that overlap, contain one another or neither."""
    step_on_numbers(*job, PlanOptions(variant=VARIANTS[variant], share_replicas=share_replicas))


@pytest.mark.parametrize("variant", VARIANTS)
def test_plain_tensors_stay_where_they_are(variant):
    specs = [
        ParameterSpec("a", (12, 5), torch.float32, (4, 8)),
        ParameterSpec("b", (3, 20, 20), torch.float32, (20,)),
    ]
    step_on_numbers(specs, 1, PlanOptions(variant=VARIANTS[variant]))


def test_published_plan_of_kimi_debug():
    """35 matrices are brought together in four exchanges; the other 27 parameters stay whole on their ranks."""
    plans = [plan_for("kimi-debug", ranks=4, ep=2, rank=rank, variant="baseline") for rank in range(4)]
    for plan in plans:
        exchanges = [stage.exchange for stage in plan.stages if stage.exchange]
        assert len(plan.stages) == 7  # layer 0; three pairs of experts and rest
        assert len(exchanges) == 4
        assert sum(len(exchange.matrices) for exchange in exchanges) == 35
        assert sum(not batch.in_work for stage in plan.stages for batch in stage.batches) == 27
        assert len(plan.parameters) == 62
    batches = [batch for plan in plans for stage in plan.stages for batch in stage.batches if batch.in_work]
    assert [batch.matrices for batch in batches] == [1] * 35


def test_the_longest_job_goes_first_and_ties_to_the_least_loaded():
    totals = [5, 0, 0]
    assert longest_first([3, 9, 3, 3], totals) == [2, 1, 0, 2]
    assert totals == [8, 9, 6]


def test_equal_shapes_meet_within_the_bound():
    costs, shapes = [6, 6, 3, 3, 3, 3, 1, 1, 1, 1], "aabbbbcccc"
    owners = even(costs, list(shapes), [0, 0, 0])
    loads = [sum(cost for cost, owner in zip(costs, owners, strict=True) if owner == worker) for worker in range(3)]
    assert max(loads) <= IMBALANCE * sum(costs) / 3
    assert len(set(zip(owners, shapes, strict=True))) < len(
        set(zip(longest_first(costs, [0, 0, 0]), shapes, strict=True))
    )


@given(
    st.lists(st.sampled_from([(1, "a"), (4, "b"), (9, "c"), (16, "d"), (17, "e")]), min_size=1, max_size=40),
    st.integers(1, 8),
)
def test_owners_never_exceed_what_longest_first_or_the_bound_gives(jobs, workers):
    costs, shapes = [cost for cost, _ in jobs], [shape for _, shape in jobs]
    loads = {}
    for name, owners in [
        ("first", longest_first(costs, [0] * workers)),
        ("meet", even(costs, shapes, [0] * workers, free={"a"})),
    ]:
        assert len(owners) == len(costs)
        loads[name] = max(
            sum(c for c, o in zip(costs, owners, strict=True) if o == worker) for worker in range(workers)
        )
    assert loads["meet"] <= max(loads["first"], IMBALANCE * max(sum(costs) / workers, max(costs)))


def test_report_has_a_row_for_each_bucket_and_rank():
    rows = plan_for("kimi-debug", ranks=4, ep=2, variant="batched").report()
    assert len(rows) == 7 * 4
    assert sum(row["collectives"] for row in rows) == 4 * 8
    assert sum(row["sent_bytes"] for row in rows) == sum(row["received_bytes"] for row in rows)
    assert sum(row["matrices"] for row in rows) == 35 + 6 * 2 * 16 + 5 * 3 * 8


def test_owners_of_kimi_debug_are_balanced_as_far_as_its_largest_matrix_allows():
    for buckets in ("published", "auto"):
        rows = plan_for("kimi-debug", ranks=4, ep=2, buckets=buckets).report()
        assert all(1 <= row["imbalance_to_bound"] <= IMBALANCE for row in rows)
        assert all(row["imbalance_to_bound"] <= row["imbalance"] for row in rows)


def test_a_rank_outside_the_mesh_is_refused():
    spec = ParameterSpec("a", (4, 4), torch.float32, (4,), Storage((2,), (0, 1), (Shard(0),)))
    with pytest.raises(ValueError, match=r"'a' is on a mesh of ranks .*without rank 2"):
        plan_step([spec], 2)


def test_a_partial_placement_is_refused():
    with pytest.raises(ValueError, match=r"placement Partial\(sum\) can't be planned"):
        Storage((2,), (0, 1), (Partial(),))


def test_published_buckets_are_known_by_name():
    assert PUBLISHED_BUCKETS["kimi-debug"][0] == ("layers.0.*",)
    with pytest.raises(ValueError, match="did you mean 'auto'"):
        plan_for("kimi-debug", buckets="autos")


def test_a_bucket_of_parameters_with_and_without_replicas_is_mixed():
    """One mesh of replicas, one of shards; both in the bucket that the user names."""
    hybrid = Storage((2, 2), (0, 1, 2, 3), (Replicate(), Shard(0)))
    sharded = Storage((4,), (0, 1, 2, 3), (Shard(0),))
    specs = [
        ParameterSpec("sharded", (64, 64), torch.float32, (64,), sharded),
        ParameterSpec("hybrid", (32, 32), torch.float32, (32,), hybrid),
        ParameterSpec(
            "whole", (4, 16, 16), torch.float32, (16,), Storage((2, 2), (0, 1, 2, 3), (Replicate(), Shard(0)))
        ),
    ]

    def rows_of(share: bool, **options: object) -> list[dict]:
        return plan_step(specs, 0, PlanOptions(share_replicas=share, **options)).report()

    by_stage = {row["bucket"]: row["replicas"] for row in rows_of(False, buckets=[("*",)])}
    assert by_stage == {"0 *": "mixed", "0 * (2)": "repeated"}
    shared, repeated = rows_of(True, variant=VARIANTS["baseline"]), rows_of(False, variant=VARIANTS["baseline"])
    for this in ("gemm_flops", "sent_bytes"):
        for rows, others in ((shared, repeated), (repeated, shared)):
            assert sum(row[f"{this}_otherwise"] for row in rows) == sum(row[this] for row in others)


def test_where_some_share_and_some_repeat_otherwise_is_each_the_other_way():
    rows_cut, cols_cut = (Storage((2, 3), tuple(range(6)), (Replicate(), Shard(dim))) for dim in (0, 1))
    specs = [
        ParameterSpec(f"{name}{number}", (32, 32), torch.float32, (32,), storage)
        for name, storage in (("a", rows_cut), ("b", cols_cut))
        for number in range(1 if name == "a" else 3)
    ]
    first, second = (
        plan_step(specs, 0, PlanOptions(variant=VARIANTS["baseline"], sharing=frozenset({storage}))).report()
        for storage in (rows_cut, cols_cut)
    )
    for this in ("gemm_flops", "sent_bytes"):
        assert sum(row[this] for row in first) != sum(row[this] for row in second)
        for rows, others in ((first, second), (second, first)):
            assert sum(row[f"{this}_otherwise"] for row in rows) == sum(row[this] for row in others)


def test_parameters_that_leave_their_bucket_are_seen():
    """Experts that one rank holds whole go to the exchange of matrices of their shape."""
    mesh = Storage((2,), (0, 1), (Shard(0),))
    specs = [
        ParameterSpec("a.experts", (4, 16, 8), torch.float32, (16,), mesh),
        ParameterSpec("a.w", (32, 8), torch.float32, (32,), mesh),
        ParameterSpec("b.w", (16, 8), torch.float32, (16,), mesh),
    ]
    for variant, found in (("batched", [2, 1]), ("fused", [1, 2])):
        plan = plan_step(specs, 0, PlanOptions([("a.*",), ("b.*",)], VARIANTS[variant]))
        assert [row["parameters"] for row in plan.report([0])] == found
        assert "parameters" in str(plan)
