"""The workloads over gloo ranks: the same training as in one process, however experts and tokens are spread."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import NamedTuple

import pytest
import torch
from pool import Pool
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from distmuon.workloads import Workload, get_workload
from distmuon.workloads.model import MoE, build_model, initialize
from distmuon.workloads.parallel import make_meshes, parallelize, split_experts
from distmuon.workloads.storage import muon_parameters
from distmuon.workloads.training import ONE_PROCESS_TOLERANCE, StepRecord, Trainer

TINY = get_workload("tiny")


class Trained(NamedTuple):
    records: list[StepRecord]
    digest: str


def train(rank: int, ranks: int, workload: Workload, steps: int, options: dict) -> Trained:
    trainer = Trainer(workload, ranks=ranks, rank=rank, **options)
    return Trained([trainer.train_step(step) for step in range(steps)], trainer.digest())


@cache
def alone(
    pool: Pool, workload: Workload, steps: int, sequences: int, ns_dtype: torch.dtype, tokens: int = 128
) -> list[StepRecord]:
    """The same training in one process, which takes all the sequences."""
    options = {"ep": 1, "sequences": sequences, "ns_dtype": ns_dtype, "tokens": tokens}
    return pool.run(1, train, workload, steps, options, timeout=300)[0].records


def assert_ranks_agree_with(expected: list[StepRecord], results: list[Trained], tolerance: float) -> None:
    for result in results:
        assert result.records == results[0].records  # loss and gradient norm, to the last bit
    for ours, theirs in zip(results[0].records, expected, strict=True):
        assert ours.loss == pytest.approx(theirs.loss, rel=tolerance)
        assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=tolerance)


@pytest.mark.parametrize("ns_dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_four_ranks_train_as_one_process_in_both_variants(pool: Pool, ns_dtype):
    baseline, batched = (
        pool.run(4, train, TINY, 10, {"ep": 2, "ns_dtype": ns_dtype, "variant": variant})
        for variant in ("baseline", "batched")
    )
    assert baseline == batched  # losses, norms and every stored shard, to the last bit
    assert_ranks_agree_with(alone(pool, TINY, 10, 4, ns_dtype), batched, ONE_PROCESS_TOLERANCE[ns_dtype])


@pytest.mark.parametrize(
    ("ranks", "ep", "experts"),
    [(2, 1, 4), (2, 2, 4), (3, 1, 4), (3, 3, 3), (4, 1, 4), (4, 4, 4), (4, 2, 2), (4, 1, 3)],
    ids=lambda number: str(number),
)
def test_any_layout_trains_as_one_process(pool: Pool, ranks, ep, experts):
    workload = replace(TINY, experts=experts, default_ranks=ranks, default_ep=ep)
    options = {"ep": ep, "sequences": 12, "ns_dtype": torch.float32, "tokens": 32, "buckets": "auto"}
    results = pool.run(ranks, train, workload, 2, options)
    expected = alone(pool, replace(workload, default_ranks=1, default_ep=1), 2, 12, torch.float32, 32)
    assert_ranks_agree_with(expected, results, ONE_PROCESS_TOLERANCE[torch.float32])


def test_query_lora_trains_as_one_process(pool: Pool):
    workload = replace(TINY, attention=replace(TINY.attention, q_lora=24))
    results = pool.run(4, train, workload, 2, {"ep": 2, "ns_dtype": torch.float32, "tokens": 32})
    assert_ranks_agree_with(
        alone(pool, workload, 2, 4, torch.float32, 32), results, ONE_PROCESS_TOLERANCE[torch.float32]
    )


def test_a_dense_model_with_grouped_queries_trains_as_one_process(pool: Pool):
    workload = replace(get_workload("qwen3-8b/32"), layers=4, dense_layers=4)
    results = pool.run(2, train, workload, 3, {"ep": 1, "ns_dtype": torch.float32, "tokens": 32})
    assert_ranks_agree_with(
        alone(pool, workload, 3, 2, torch.float32, 32), results, ONE_PROCESS_TOLERANCE[torch.float32]
    )


@pytest.mark.parametrize(("ep", "experts"), [(1, 4), (2, 4), (1, 2)])
def test_replicas_train_as_one_process(pool: Pool, ep, experts):
    workload = replace(TINY, experts=experts, top_k=1, default_ep=ep)
    options = {"ep": ep, "replicas": 2, "ns_dtype": torch.float32, "tokens": 32}
    results = pool.run(4, train, workload, 2, options)
    assert results[:2] == results[2:]  # each shard of one replica is that of the other, to the last bit
    expected = alone(pool, replace(workload, default_ep=1), 2, 4, torch.float32, 32)
    assert_ranks_agree_with(expected, results, ONE_PROCESS_TOLERANCE[torch.float32])


def test_loss_falls(pool: Pool):
    first, *_, last = alone(pool, TINY, 40, 4, torch.float32)
    assert first.loss == pytest.approx(5.5, abs=0.2)  # ln 256, for it knows nothing yet
    assert last.loss < 4.3


@pytest.mark.slow
def test_kimi_debug_on_four_ranks_trains_as_one_process_in_both_variants(pool: Pool):
    workload = get_workload("kimi-debug")
    options = {"ep": 2, "ns_dtype": torch.float32}
    baseline, batched = (
        pool.run(4, train, workload, 3, options | {"variant": variant}, timeout=300)
        for variant in ("baseline", "batched")
    )
    assert baseline == batched
    assert_ranks_agree_with(alone(pool, workload, 3, 4, torch.float32), batched, ONE_PROCESS_TOLERANCE[torch.float32])


def stored(rank: int, ranks: int, workload: Workload, ep: int, replicas: int = 1) -> dict[str, tuple]:
    """By parameter: mesh shape, placements, this rank's coordinate and its piece."""
    model = build_model(workload)
    parallelize(model, workload, make_meshes(ranks, ep, "cpu", replicas))
    return {
        name: (p.device_mesh.shape, p.placements, tuple(p.device_mesh.get_coordinate()), p.to_local().detach().clone())
        for name, p in model.named_parameters()
        if isinstance(p, DTensor)
    }


@pytest.mark.parametrize(
    ("ep", "experts", "replicas"), [(2, 8, 1), (2, 2, 1), (1, 4, 1), (4, 4, 1), (2, 4, 2), (1, 4, 2), (1, 2, 2)]
)
def test_every_parameter_lies_as_planned(pool: Pool, ep, experts, replicas):
    workload = replace(TINY, experts=experts, top_k=2, default_ep=ep)
    results = pool.run(4, stored, workload, ep, replicas)
    whole = dict(build_model(workload).named_parameters())
    assert results[0].keys() == whole.keys()
    for spec in muon_parameters(workload, ranks=4, ep=ep, replicas=replicas):
        for rank in range(4):
            shape, placements, coordinate, piece = results[rank][spec.name]
            assert (shape, placements) == (spec.storage.mesh_shape, spec.storage.placements)
            assert coordinate == spec.storage.coordinate(rank)
            assert piece.shape == spec.local_shape(rank)
    for name in ("layers.0.attention.wq.weight", "output.weight"):
        pieces = [result[name][3] for result in results]
        for first in range(0, 4, 4 // replicas):
            assert torch.equal(torch.cat(pieces[first : first + 4 // replicas]), whole[name])


def test_experts_lie_over_ep_first_and_then_over_efsdp(pool: Pool):
    name = "layers.1.moe.experts.w1"
    workload = replace(TINY, experts=8)
    whole = build_model(workload).get_parameter(name)
    for result in pool.run(4, stored, workload, 2):
        _, placements, (efsdp, ep), piece = result[name]
        assert placements == (_StridedShard(0, split_factor=2), Shard(0))
        first = 4 * ep + 2 * efsdp
        assert torch.equal(piece, whole[first : first + 2])
    few = replace(TINY, experts=2)
    whole = build_model(few).get_parameter(name)
    for result in pool.run(4, stored, few, 2):
        _, placements, (efsdp, ep), piece = result[name]
        assert placements == (Shard(1), Shard(0))
        assert torch.equal(piece, whole[ep : ep + 1].chunk(2, dim=1)[efsdp])


def dispatched(rank: int, ranks: int, all_to_first: bool) -> tuple[torch.Tensor, ...]:
    """Output and input gradient of a MoE with its experts split over all ranks, on this rank's tokens."""
    moe, x = moe_and_tokens(all_to_first)
    split_experts(moe, make_meshes(ranks, ranks, "cpu").expert["ep"])
    mine = x[rank : rank + 1].requires_grad_()
    out = moe(mine)
    out.square().sum().backward()
    return out.detach(), mine.grad, moe.experts.w1.grad.to_local()


def moe_and_tokens(all_to_first: bool) -> tuple[MoE, torch.Tensor]:
    moe = MoE(TINY)
    initialize(moe, 0)
    x = torch.randn(4, 6, TINY.width, generator=torch.Generator().manual_seed(1))
    if all_to_first:  # experts 0 and 1 of 4, whatever the token
        x = x.abs()
        with torch.no_grad():
            moe.router.gate.weight.copy_(torch.tensor([2.0, 1.0, -1.0, -2.0]).unsqueeze(1).expand(-1, TINY.width) / 64)
    return moe, x


@pytest.mark.parametrize("all_to_first", [False, True], ids=["spread", "some ranks get no token"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_dispatch_takes_tokens_to_their_experts_and_back(pool: Pool, ranks, all_to_first):
    moe, x = moe_and_tokens(all_to_first)
    x = x[:ranks].requires_grad_()
    out = moe(x)
    out.square().sum().backward()
    outputs, gradients, weights = (
        torch.cat(parts) for parts in zip(*pool.run(ranks, dispatched, all_to_first), strict=True)
    )
    torch.testing.assert_close(outputs, out)
    torch.testing.assert_close(gradients, x.grad)
    torch.testing.assert_close(weights, moe.experts.w1.grad)
    if all_to_first:
        assert not weights[2:].any()


def test_sequences_that_ranks_cannot_share_are_refused():
    with pytest.raises(ValueError, match="sequences=3 must be a multiple of ranks=2"):
        Trainer(TINY, ranks=2, ep=1, rank=0, sequences=3)


def test_unknown_variant_and_buckets_name_the_nearest():
    with pytest.raises(ValueError, match="unknown variant 'batch'; did you mean 'batched'"):
        Trainer(TINY, ranks=1, ep=1, rank=0, variant="batch")
    with pytest.raises(ValueError, match="unknown buckets 'publishd'; did you mean 'published'"):
        Trainer(TINY, ranks=1, ep=1, rank=0, buckets="publishd")


def diverge(rank: int, ranks: int) -> str:
    trainer = Trainer(TINY, ranks=ranks, ep=1, rank=rank, tokens=16, lr=1e30, ns_dtype=torch.float32)
    try:
        for step in range(3):
            trainer.train_step(step)
    except FloatingPointError as error:
        return str(error)
    return ""


def test_a_training_that_diverges_says_so_on_all_ranks(pool: Pool):
    said = "the norm of the gradients is nan: the training has diverged, take a smaller learning rate"
    assert pool.run(2, diverge) == [said] * 2
