"""The plan, by exhaustion: every element of every matrix reaches its owner once, and its result every holder."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from distmuon import PUBLISHED_BUCKETS, plan_for
from distmuon.placement import ParameterSpec, Storage
from distmuon.plan import MIN_BATCHED_SIDE, longest_first, plan_step


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


def step_on_numbers(specs: list[ParameterSpec], ranks: int) -> None:
    """Replay all ranks' plans on numbered elements; a matrix is 'orthogonalised' by adding a million."""
    plans = [plan_step(specs, rank) for rank in range(ranks)]
    held = [[local_numbers(spec, rank) for spec in specs] for rank in range(ranks)]
    results = [[torch.full_like(local, -1) for local in locals_] for locals_ in held]
    whole = [torch.arange(math.prod(spec.shape)).view(spec.shape3) for spec in specs]
    times_computed = [torch.zeros_like(numbers) for numbers in whole]

    def check_matrix(parameter: int, numbers: torch.Tensor) -> torch.Tensor:
        """It is a matrix of the parameter, complete and in order."""
        spec = specs[parameter]
        batch, inside = divmod(int(numbers[0, 0]), spec.shape3[1] * spec.cols)
        row = inside // spec.cols
        assert (row, numbers.shape[0]) in list(zip(spec.matrix_starts, spec.matrix_rows, strict=True))
        assert torch.equal(numbers, whole[parameter][batch, row : row + numbers.shape[0]])
        times_computed[parameter][batch, row : row + numbers.shape[0]] += 1
        return numbers + 1_000_000

    for rank, plan in enumerate(plans):
        for stage in plan.stages:
            for batch in stage.local:
                flat, result = held[rank][batch.parameter].reshape(-1), results[rank][batch.parameter].view(-1)
                for index in range(batch.matrices):
                    numel = batch.rows * batch.cols
                    part = slice(batch.offset + index * numel, batch.offset + (index + 1) * numel)
                    result[part] = check_matrix(batch.parameter, flat[part].view(batch.rows, batch.cols)).reshape(-1)

    def of(local: torch.Tensor, transfer) -> torch.Tensor:
        batch, row, col = transfer.region.local
        return local[batch, row : row + transfer.region.rows, col : col + transfer.region.cols]

    def packed(rank: int, stage) -> torch.Tensor:
        buffer = torch.full((stage.exchange.send_numel,), -1)
        for transfer in stage.exchange.sends:
            parameter = stage.exchange.matrices[transfer.matrix].parameter
            part = slice(transfer.offset, transfer.offset + transfer.region.numel)
            assert (buffer[part] == -1).all()
            buffer[part] = of(held[rank][parameter], transfer).reshape(-1)
        return buffer

    def exchange(buffers: list[torch.Tensor], splits: list[tuple[int, ...]]) -> list[torch.Tensor]:
        """What ``all_to_all_single`` does."""
        parts = [buffer.split(split) for buffer, split in zip(buffers, splits, strict=True)]
        return [torch.cat([theirs[index] for theirs in parts]) for index in range(len(buffers))]

    def unit(stage) -> tuple:
        return (stage.name, stage.exchange.ranks)

    exchanging = [[stage for stage in plan.stages if stage.exchange] for plan in plans]
    for ranks_of_unit in {unit(stage) for stages in exchanging for stage in stages}:
        members = {
            rank: stage for rank, stages in enumerate(exchanging) for stage in stages if unit(stage) == ranks_of_unit
        }
        assert list(members) == sorted(ranks_of_unit[1]), "every rank of the group joins"
        order = [members[rank] for rank in ranks_of_unit[1]]
        assert len({(stage.exchange.matrices, stage.exchange.owners) for stage in order}) == 1
        buffers = [packed(rank, members[rank]) for rank in ranks_of_unit[1]]
        assert not any((buffer == -1).any() for buffer in buffers), "nothing is padded"
        arrived = exchange(buffers, [stage.exchange.send_splits for stage in order])
        back = []
        for stage, buffer in zip(order, arrived, strict=True):
            assert len(buffer) == stage.exchange.receive_numel
            staging = torch.full((stage.exchange.staging_numel,), -1)
            done = buffer.clone()
            for phase in ("unpack", "compute", "repack"):
                if phase == "compute":
                    for batch in stage.owned:
                        for numbers in staging[batch.offset : batch.offset + batch.numel].view(
                            -1, batch.rows, batch.cols
                        ):
                            numbers.copy_(check_matrix(batch.parameter, numbers.clone()))
                    continue
                for transfer in stage.exchange.receives:
                    matrix = stage.exchange.matrices[transfer.matrix]
                    start = stage.exchange.staging[transfer.matrix]
                    target = staging[start : start + matrix.numel].view(matrix.rows, matrix.cols)
                    region = transfer.region
                    area = target[region.row : region.row + region.rows, region.col : region.col + region.cols]
                    part = slice(transfer.offset, transfer.offset + region.numel)
                    if phase == "unpack":
                        area.copy_(buffer[part].view(region.rows, region.cols))
                    else:
                        done[part] = area.reshape(-1)
            back.append(done)
        returned = exchange(back, [stage.exchange.receive_splits for stage in order])
        for rank, stage, buffer in zip(ranks_of_unit[1], order, returned, strict=True):
            for transfer in stage.exchange.sends:
                parameter = stage.exchange.matrices[transfer.matrix].parameter
                part = buffer[transfer.offset : transfer.offset + transfer.region.numel]
                area = of(results[rank][parameter], transfer)
                assert (area == -1).all(), "written once"
                area.copy_(part.view(area.shape))

    for rank in range(ranks):
        for result, local in zip(results[rank], held[rank], strict=True):
            assert torch.equal(result, local + 1_000_000)
    replicas = [
        math.prod(
            size
            for placement, size in zip(spec.storage.placements, spec.storage.mesh_shape, strict=True)
            if isinstance(placement, Replicate)
        )
        if spec.storage
        else ranks
        for spec in specs
    ]
    for computed, times in zip(times_computed, replicas, strict=True):
        assert (computed == times).all(), "each matrix once in each replica"


@st.composite
def jobs(draw: st.DrawFn) -> tuple[list[ParameterSpec], int]:
    mesh = draw(st.sampled_from([(1,), (2,), (3,), (4,), (2, 2), (3, 2), (2, 3), (2, 2, 2)]))
    ranks = math.prod(mesh)
    specs = []
    for number in range(draw(st.integers(1, 3))):
        shape = tuple(draw(st.lists(st.integers(1, 13), min_size=2, max_size=3)))
        placements = []
        for axis in range(len(mesh)):
            dim = draw(st.integers(0, len(shape) - 1))
            kind = draw(st.sampled_from(["shard", "shard", "replicate", "strided"]))
            if kind == "strided" and axis + 1 < len(mesh):
                placements.append(_StridedShard(dim, split_factor=mesh[axis + 1]))
            else:
                placements.append(Replicate() if kind == "replicate" else Shard(dim))
        cuts = sorted(draw(st.sets(st.integers(1, max(shape[-2] - 1, 1)), max_size=3)) - {shape[-2]})
        rows = tuple(b - a for a, b in itertools.pairwise([0, *cuts, shape[-2]]))
        dtype = draw(st.sampled_from([torch.float32, torch.bfloat16]))
        specs.append(
            ParameterSpec(f"p{number}", shape, dtype, rows, Storage(mesh, tuple(range(ranks)), tuple(placements)))
        )
    return specs, ranks


@given(jobs())
@settings(max_examples=150, deadline=None)
def test_every_element_travels_once_each_way(job):
    step_on_numbers(*job)


def test_plain_tensors_stay_where_they_are():
    step_on_numbers(
        [ParameterSpec("a", (12, 5), torch.float32, (4, 8)), ParameterSpec("b", (3, 20, 20), torch.float32, (20,))], 1
    )


def test_published_plan_of_kimi_debug():
    """35 matrices are brought together in four exchanges; the other 27 parameters stay whole on their ranks."""
    plans = [plan_for("kimi-debug", ranks=4, ep=2, rank=rank) for rank in range(4)]
    for plan in plans:
        exchanges = [stage.exchange for stage in plan.stages if stage.exchange]
        assert len(plan.stages) == 7  # layer 0; three pairs of experts and rest
        assert len(exchanges) == 4
        assert sum(len(exchange.matrices) for exchange in exchanges) == 35
        assert sum(len(stage.local) for stage in plan.stages) == 27
        assert len(plan.parameters) == 62
    assert sum(batch.matrices for plan in plans for stage in plan.stages for batch in stage.owned) == 35


def test_the_longest_job_goes_first_and_ties_to_the_least_loaded():
    totals = [5, 0, 0]
    assert longest_first([3, 9, 3, 3], totals) == [2, 1, 0, 2]
    assert totals == [8, 9, 6]


def test_matrices_of_one_shape_are_batched_only_where_the_bits_agree():
    side = MIN_BATCHED_SIDE
    small = plan_step([ParameterSpec("a", (4, side - 1, 40), torch.float32, (side - 1,))], 0)
    large = plan_step([ParameterSpec("a", (4, side, 40), torch.float32, (side,))], 0)
    assert [batch.matrices for batch in small.stages[0].local] == [1, 1, 1, 1]
    assert [batch.matrices for batch in large.stages[0].local] == [4]


def test_report_has_a_row_for_each_bucket_and_rank():
    rows = plan_for("kimi-debug", ranks=4, ep=2).report()
    assert len(rows) == 7 * 4
    assert sum(row["collectives"] for row in rows) == 4 * 8
    assert sum(row["sent_bytes"] for row in rows) == sum(row["received_bytes"] for row in rows)
    assert sum(row["matrices"] for row in rows) == 35 + 6 * 2 * 16 + 5 * 3 * 8


def test_a_rank_outside_the_mesh_is_refused():
    spec = ParameterSpec("a", (4, 4), torch.float32, (4,), Storage((2,), (0, 1), (Shard(0),)))
    with pytest.raises(ValueError, match="rank 2 is not in the mesh"):
        plan_step([spec], 2)


def test_a_partial_placement_is_refused():
    with pytest.raises(ValueError, match=r"placement Partial\(sum\) can't be planned"):
        Storage((2,), (0, 1), (Partial(),))


def test_published_buckets_are_known_by_name():
    assert PUBLISHED_BUCKETS["kimi-debug"][0] == ("layers.0.*",)
    with pytest.raises(ValueError, match="did you mean 'auto'"):
        plan_for("kimi-debug", buckets="autos")
