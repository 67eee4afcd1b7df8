"""Whether replicas share their matrices, left to the plan: the busiest rank decides, mesh by mesh."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

from distmuon.planning.options import PlanOptions
from distmuon.planning.placement import ParameterSpec, Storage
from distmuon.planning.plan import plan_step
from distmuon.planning.sharing import settled
from distmuon.studies.scale import Job, plan_job
from distmuon.workloads import get_workload
from distmuon.workloads.storage import muon_parameters


def sharing(workload: str, ranks: int, ep: int, replicas: int) -> tuple[bool, ...]:
    """Whether the dense parameters share, and, if there are any, the experts."""
    specs = muon_parameters(get_workload(workload), ranks=ranks, ep=ep, replicas=replicas)
    options = settled(specs, PlanOptions())
    found = {len(spec.shape): options.shares(spec) for spec in specs}
    return tuple(found[ndim] for ndim in sorted(found))


@pytest.mark.parametrize(
    ("job", "shares"),
    [
        (("qwen3-8b", 64, 1, 8), (True,)),
        (("qwen3-8b", 512, 1, 8), (True,)),
        (("qwen3-8b", 1024, 1, 8), (False,)),
        (("moonlight-16b", 64, 8, 2), (True, True)),
        (("moonlight-16b", 256, 8, 4), (False, True)),
        (("kimi-k2", 1024, 64, 2), (False, True)),
    ],
)
def test_replicas_share_as_long_as_each_rank_finds_a_matrix(job, shares):
    assert sharing(*job) == shares


def test_the_default_is_no_slower_than_either_way_where_dense_and_experts_differ():
    job = Job("moonlight-16b", 256, 8, replicas=4, buckets="auto")
    default, *others = (plan_job(replace(job, share_replicas=share)).replay.step_s for share in (None, True, False))
    assert default < 0.8 * min(others)


def replicated(name: str, size: int, *ranks: int) -> ParameterSpec:
    storage = Storage((len(ranks),), ranks, (Replicate(),))
    return ParameterSpec(name, (size, size), torch.float32, (size,), storage)


def test_plain_replicas_share_large_matrices_only():
    large = [replicated(f"w{number}", 4096, 0, 1) for number in range(4)]
    small = [replicated(f"w{number}", 256, 0, 1) for number in range(4)]
    for specs, shares in ((large, True), (small, False)):
        assert settled(specs, PlanOptions()).shares(specs[0]) is shares
        for share in (True, False):
            assert settled(specs, PlanOptions(share_replicas=share)).shares(specs[0]) is share


def test_what_only_one_rank_knows_does_not_enter():
    """Ranks 0 and 1 share two matrices; rank 0 holds others with rank 2, which rank 1 knows nothing of."""
    common = [replicated(name, 4096, 0, 1) for name in ("a", "b")]
    others = [replicated(f"c{number}", 64, 0, 2) for number in range(9)]
    mine, theirs = (plan_step(specs, rank, PlanOptions()) for rank, specs in ((0, common + others), (1, common)))
    assert [mine.options.shares(spec) for spec in (*common, *others)] == [True] * 2 + [False] * 9
    assert [theirs.options.shares(spec) for spec in common] == [True] * 2


def test_what_was_not_settled_is_not_answered():
    sharded = ParameterSpec("s", (8, 8), torch.float32, (8,), Storage((2,), (0, 1), (Shard(0),)))
    assert PlanOptions().shares(sharded) is False, "without replicas there is nothing to settle"
    with pytest.raises(ValueError, match="share_replicas is None: settle first"):
        PlanOptions().shares(replicated("a", 8, 0, 1))


def test_replicas_repeat_what_sharing_would_not_finish_sooner():
    storage = Storage((2, 2), (0, 1, 2, 3), (Replicate(), Shard(0)))
    specs = [ParameterSpec(f"w{number}", (512, 512), torch.float32, (512,), storage) for number in range(2)]
    assert not settled(specs, PlanOptions()).shares(specs[0])

    def busiest(share: bool | None) -> tuple[int, int]:
        rows = [
            row for rank in range(4) for row in plan_step(specs, rank, PlanOptions(share_replicas=share)).report([rank])
        ]
        return max(row["gemm_flops"] for row in rows), max(row["sent_bytes"] for row in rows)

    assert busiest(None) == busiest(False) and busiest(True)[0] == busiest(False)[0] and busiest(True) > busiest(False)
