"""The launch counter: the published figures to the digit, and each rule by which they arise."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from called import call

from distmuon import plan_for
from distmuon.counting.counter import LaunchCounter
from distmuon.counting.launches import count_launches as count
from distmuon.counting.rules import (
    CHUNK,
    KERNEL,
    MEMCPY,
    TOOLCHAINS,
    Activity,
    copy_activity,
    foreach_chunks,
    reduction_splits,
    takes_fused_route,
)
from distmuon.newton_schulz import COEFFICIENTS, orthogonalize_
from distmuon.ranges import phase
from distmuon.variants import VARIANTS
from distmuon.workloads import get_workload
from distmuon.workloads.training import Trainer

ROOT = Path(__file__).parent.parent

#: What is counted once, for all tests that look at it.
count_launches = cache(count)


@pytest.mark.parametrize(("variant", "copies", "launches"), [("baseline", 493.0, 1474.0), ("batched", 423.0, 1421.5)])
def test_published_counts_of_kimi_debug(variant, copies, launches):
    counts = count_launches("kimi-debug", 4, 2, variant)
    assert (counts.mean("async_copies"), counts.mean("launches"), counts.mean("collectives")) == (copies, launches, 8.0)


@pytest.mark.parametrize(
    ("buckets", "copies", "launches", "collectives"), [("published", 76, 272, 8), ("auto", 51, 171, 4)]
)
def test_fused_makes_a_fifth_of_the_launches_and_sends_half_the_bytes(buckets, copies, launches, collectives):
    batched, fused = (count_launches("kimi-debug", 4, 2, variant, buckets=buckets) for variant in ("batched", "fused"))
    assert fused.mean("async_copies") <= copies
    assert fused.mean("launches") <= launches
    assert fused.mean("collectives") <= collectives
    assert fused.mean("wire_bytes") == batched.mean("wire_bytes") / 2


@pytest.mark.parametrize(("buckets", "launches", "collectives"), [("published", 200, 8), ("auto", 124, 4)])
def test_copy_free_makes_no_copies_at_all(buckets, launches, collectives):
    standard, free = (
        count_launches("kimi-debug", 4, 2, "fused", ns_algorithm=algorithm, buckets=buckets)
        for algorithm in ("standard", "copy_free")
    )
    assert free.mean("async_copies") == 0
    assert free.mean("launches") <= launches
    assert free.mean("collectives") <= collectives
    by_source = {row["source"]: row["launches"] for row in free.by_source()}
    assert "gemm_bias" not in by_source
    assert by_source["gemm"] == 15 * by_source["ns_diagonal"]  # all identities of a batch by one kernel
    assert standard.mean("async_copies") == {r["source"]: r["async_copies"] for r in standard.by_source()}["gemm_bias"]


@pytest.mark.slow
def test_identities_leave_batches_as_large_as_the_standard_ones():
    """Where matrices are large, identities are made for fewer steps at once, not for fewer matrices."""
    standard, free = (
        {row["source"]: row["launches"] for row in counted.by_source()}
        for counted in (count_launches("moonlight-16b", ns_algorithm=a) for a in ("standard", "copy_free"))
    )
    assert free["gemm"] <= standard["gemm"]
    assert free["ns_diagonal"] < standard["gemm_bias"] / 2


def test_gram_makes_no_copies_and_multiplies_less():
    counts = count_launches("kimi-debug", 4, 2, "fused", ns_algorithm="gram")
    assert counts.mean("async_copies") == 0
    assert {row["source"] for row in counts.by_source()} >= {"ns_cast", "ns_diagonal", "gemm"}
    standard, gram = (
        sum(row["gemm_flops"] for row in plan_for("kimi-debug", ranks=4, ep=2, ns_algorithm=algorithm).report())
        for algorithm in ("standard", "gram")
    )
    assert gram < 0.92 * standard


def test_published_batched_copies_of_moonlight():
    """161 matrices brought to an owner, two fused copies each, of 8 equal pairs: 322 a step over all ranks."""
    assert dict(count_launches("moonlight-16b", 8, 4, "batched").batched_copies()) == {(8, True): 322}


def test_every_launch_of_the_published_profile_by_source():
    rows = {
        row["source"]: (row["async_copies"], row["launches"])
        for row in count_launches("kimi-debug", 4, 2, "baseline").by_source()
    }
    elementwise = {source: (0.0, 62.0) for source in ("momentum", "nesterov", "decay", "update")}
    packing = {source: (35.0, 35.0) for source in ("pack", "unpack", "repack", "return_unpack")}
    assert rows == elementwise | packing | {
        "ns_cast": (0.0, 2 * 35.75),
        "ns_norm": (0.0, 3 * 35.75 + 13.5),
        "gemm": (0.0, 131.25 + 405.0),
        "gemm_bias": (353.0, 353.0 + 4.5),
    }


@pytest.mark.parametrize(("ranks", "ep"), [(1, 1), (2, 1), (2, 2), (4, 4)])
def test_copies_saved_follow_from_the_plan(ranks, ep):
    """Whatever the ranks, batching turns the owner's copies of a matrix, one for each rank each way, into two
    launches.
    """
    baseline, batched = (count_launches("kimi-debug", ranks, ep, variant) for variant in ("baseline", "batched"))
    saved = baseline.mean("async_copies") - batched.mean("async_copies")
    assert saved == (2 * 35 if ranks > 1 else 0)
    fused = sum(batched.batched_copies().values()) / ranks
    assert baseline.mean("launches") - batched.mean("launches") == saved - fused


#: Gates of 32 x 64: batches of smaller matrices are taken apart on a CPU, for the bits, but not on the GPU that is
#: counted.
WORKLOAD = replace(get_workload("tiny"), name="tiny with 32 experts", experts=32)


def test_experts_cut_over_their_ranks_are_counted_on_every_rank():
    """More efsdp ranks than experts: their rows are sharded, and brought together within each of the two groups."""
    counted = count_launches("tiny", 8, 2, "batched")
    assert len(counted.per_rank) == 8
    assert all(counts.collectives > 0 for counts in counted.per_rank)


def counts_of_real_ranks(rank: int, ranks: int, variant: str, ns_algorithm: str) -> tuple[int, int, int, int]:
    """Count beside a real step of real ranks."""
    options = {"variant": variant, "ns_algorithm": ns_algorithm, "buckets": "auto"}
    trainer = Trainer(WORKLOAD, ranks=ranks, ep=2, rank=rank, device="cpu", tokens=16, **options)
    trainer.forward_backward(0)
    with LaunchCounter() as counter:
        trainer.muon.step()
    counts = counter.counts
    return counts.async_copies, counts.launches, counts.collectives, counts.wire_bytes


@pytest.mark.parametrize(
    ("variant", "ns_algorithm"), [*((v, "standard") for v in VARIANTS), ("fused", "copy_free"), ("fused", "gram")]
)
def test_meta_tensors_dispatch_what_real_ranks_do(pool, variant, ns_algorithm):
    counted = count_launches(WORKLOAD, 4, 2, variant, ns_algorithm=ns_algorithm, buckets="auto")
    expected = [(c.async_copies, c.launches, c.collectives, c.wire_bytes) for c in counted.per_rank]
    assert pool.run(4, counts_of_real_ranks, variant, ns_algorithm) == expected


def test_an_operator_without_a_rule_is_named():
    with pytest.raises(NotImplementedError, match=r"no rule says what aten\.sin\.default launches"), LaunchCounter():
        torch.empty(2, device="meta").sin()


def test_a_launch_outside_the_phases_of_a_step_is_named():
    with pytest.raises(NotImplementedError, match="launches in phase ''"), LaunchCounter():
        torch.empty(2, device="meta").copy_(torch.empty(2, device="meta"))


def test_newton_schulz_of_one_step_transposes_a_tall_result():
    """One step can't write over what it reads; with more the last product writes the result as it is stored."""
    for steps, transposes in ((1, 1), (5, 0)):
        tall = torch.empty(96, 64, dtype=torch.bfloat16, device="meta")
        with LaunchCounter() as counter, phase("newton_schulz", "a batch"):
            orthogonalize_(tall, triples=[COEFFICIENTS] * steps)
        assert counter.counts.by_source.get("transpose", Activity()).kernels == transposes


def test_products_that_add_in_place_copy_no_bias():
    square, bias = torch.empty(2, 4, 4, device="meta"), torch.empty(2, 4, 4, device="meta")
    with LaunchCounter() as counter, phase("newton_schulz", "a batch"):
        bias.baddbmm_(square, square, beta=0.5)
        bias[0].addmm_(square[0], square[0], beta=0.5)
        torch.baddbmm(bias, square, square, beta=0.0)
    assert counter.counts.by_source == {"gemm": Activity(kernels=3)}


def test_attribution_follows_the_profiler_ranges():
    tensor = torch.empty(4, device="meta")
    with LaunchCounter() as counter, phase("pack", "some bucket"):
        tensor.copy_(torch.empty_like(tensor))
    assert counter.counts.by_source == {"pack": Activity(memcpys=1)}


def test_copies_are_memcpys_only_between_dense_tensors_of_one_dtype_and_stride():
    dense, wide = torch.empty(4, 6), torch.empty(4, 12)
    assert copy_activity(dense, torch.empty(4, 6)) == MEMCPY
    assert copy_activity(dense, torch.empty(4, 6, dtype=torch.bfloat16)) == KERNEL
    assert copy_activity(dense, wide[:, :6]) == KERNEL
    assert copy_activity(wide[:, :6], wide[:, 6:]) == KERNEL
    assert copy_activity(torch.empty(6, 4).T, torch.empty(6, 4).T) == MEMCPY
    assert copy_activity(torch.empty(6, 4).T, dense) == KERNEL
    assert copy_activity(torch.empty(0, 4), torch.empty(0, 4)) == Activity()


def test_fused_copies_want_equal_raw_strides_and_one_dtype_a_list():
    row, block = torch.empty(4, 6), torch.empty(4, 12)[:, :6]
    assert takes_fused_route([row, row], [row, row])
    assert takes_fused_route([row, row], [row.bfloat16(), row.bfloat16()])
    assert not takes_fused_route([row, row], [row, row.bfloat16()])
    assert not takes_fused_route([row, row.bfloat16()], [row, row])
    assert not takes_fused_route([row, row], [row, block])
    assert not takes_fused_route([block, block], [block, block])
    assert not takes_fused_route([torch.empty(1, 6)], [torch.empty(2, 12)[:1, :6]])


def test_a_fused_launch_holds_so_many_tensors_and_blocks():
    rocm, cuda = TOOLCHAINS["rocm"], TOOLCHAINS["cuda13"]
    assert foreach_chunks([10] * 64, 2, rocm) == 1
    assert foreach_chunks([10] * 65, 2, rocm) == 2
    assert foreach_chunks([10] * 65, 2, cuda) == 1
    assert foreach_chunks([CHUNK * 320], 2, rocm) == 1
    assert foreach_chunks([CHUNK * 320 + 1], 2, rocm) == 2
    assert foreach_chunks([0, 0], 2, rocm) == 0


@pytest.mark.parametrize("warp", [32, 64])
def test_reductions_split_over_blocks_by_size(warp):
    """A row of 8 x 256 or less stays in one block; a whole matrix, and every head or expert of a batch, is split."""
    assert not reduction_splits(8 * 256, 1, warp)
    assert reduction_splits(576 * 256, 1, warp)


@pytest.mark.slow
def test_cuda_13_limits_change_launches_but_no_copies():
    rocm, cuda = (
        count_launches("moonlight-16b", 8, 4, "batched", toolchain=toolchain) for toolchain in ("rocm", "cuda13")
    )
    assert rocm.mean("async_copies") == cuda.mean("async_copies")
    assert rocm.mean("launches") > cuda.mean("launches")


def test_the_script_prints_json():
    words = ["--workload", "kimi-debug", "--ranks", "4", "--ep", "2", "--variant", "batched", "--format", "json"]
    command = [sys.executable, str(ROOT / "scripts" / "count_launches.py"), *words]
    report = json.loads(subprocess.check_output(command, timeout=120))
    question = ["workload", "ranks", "ep", "variant", "ns_algorithm", "buckets"]
    assert list(report) == [*question, "mean", "per_rank", "by_source", "batched_copies"]
    assert report["batched_copies"] == {"calls": 70, "by_pairs": {"4": 70}}
    assert [row["rank"] for row in report["per_rank"]] == [0, 1, 2, 3]


def test_the_script_turns_switches_of_a_variant():
    words = ("--workload", "tiny", "--variant", "baseline", "--set", "packing=parameter", "--format", "json")
    report = json.loads(call("count_launches", *words).output)
    assert report == count_launches("tiny", variant="batched").to_dict()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "paking=bucket"], "unknown switch 'paking'; did you mean 'packing'?"),
        (["--variant", "basline"], "unknown variant 'basline'; did you mean 'baseline'?"),
        (["--ns-algorithm", "copyfree"], "unknown ns_algorithm 'copyfree'; did you mean 'copy_free'?"),
        (["--workload", "kimi"], "unknown workload 'kimi'; did you mean 'kimi-k2'?"),
        (["--varaint", "baseline"], "unknown option '--varaint'; did you mean '--variant'?"),
        (["--variant", "baseline", "--variant", "fused"], "--variant is given 2 times: give it once"),
        (["--ranks", "4", "--ep", "3"], "ranks=4 is not divisible by ep=3"),
    ],
)
def test_the_script_refuses_what_it_does_not_know(arguments, message):
    ended = call("count_launches", *arguments)
    assert ended.code == 2
    assert message in ended.errors
