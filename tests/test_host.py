"""The host side of a step, and what a step holds at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from distmuon.buffers import Buffers, buffer_bytes, peak_bytes, under_way
from distmuon.counting.contestants import Contestant
from distmuon.counting.standin import make_optimizer, stand_for
from distmuon.packing import group_copies
from distmuon.planning.options import PlanOptions
from distmuon.planning.plan import Plan, plan_step
from distmuon.profiling.host import SMALL_WORKLOAD, OperatorCounter, measure_host
from distmuon.ranges import parse
from distmuon.workloads import get_workload
from distmuon.workloads.storage import muon_parameters, plan_for

CONTESTANTS = ["baseline", "batched", "fused", "fused+buckets=auto"]


def test_operators_are_counted_exactly_and_views_apart() -> None:
    matrix = torch.ones(3, 4)
    with OperatorCounter() as counter:
        matrix.mT.add_(1)
        torch._foreach_copy_([matrix[0], matrix[1]], [torch.zeros(4), torch.zeros(4)])
    aten = torch.ops.aten
    assert counter.operators == {
        aten.transpose.int: 1,
        aten.add_.Tensor: 1,
        aten.select.int: 2,
        aten.zeros.default: 2,
        aten._foreach_copy_.default: 1,
    }
    assert counter.views == 3


def test_batching_saves_as_many_operators_as_the_plan_has_copies_to_join() -> None:
    baseline, batched = measure_host(["baseline", "batched"], "tiny", turns=1)
    plan = plan_for("tiny", variant="baseline")
    joined = 0
    for exchange in (stage.exchange for stage in plan.stages if stage.exchange):
        for copies in (exchange.back.held, exchange.back.owned):
            joined += len(copies) - len(group_copies("parameter", copies))
    assert baseline.operators - batched.operators == 2 * joined > 0  # each is made on the way out and on the way back
    assert baseline.views == batched.views


def test_contestants_are_timed_in_turn() -> None:
    found = measure_host(CONTESTANTS, turns=3)
    assert [each.contestant for each in found] == CONTESTANTS
    for each in found:
        assert len(each.times_ms) == 3
        assert min(each.times_ms) <= each.median_ms <= max(each.times_ms)
        assert 0 < each.without_views < each.operators
    assert found[2].without_views < found[0].without_views


def test_measuring_leaves_nothing_behind() -> None:
    threads = torch.get_num_threads()
    measure_host(["fused"], "tiny", turns=1)
    assert torch.get_num_threads() == threads
    assert not torch.distributed.is_initialized()
    with stand_for(0, 2):
        received = torch.zeros(2)
        torch.distributed.all_to_all_single(received, torch.full((2,), 7.0))
        assert received.tolist() == [7, 7], "the fake process group's own all-to-all is back"


def test_what_cannot_be_measured_is_refused() -> None:
    with pytest.raises(ValueError, match="turns is 0"):
        measure_host(["baseline"], turns=0)
    with pytest.raises(ValueError, match="did you mean 'fused'"):
        measure_host(["fusd"], turns=1)
    with stand_for(0, 2), pytest.raises(RuntimeError, match="a process group exists already"):
        measure_host(["baseline"], turns=1)


class Watch(TorchDispatchMode):
    """Which stages have begun and not finished whenever one is in Newton-Schulz."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.alive: set[str] = set()
        self.seen: dict[str, set[str]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is torch.ops.profiler._record_function_enter_new.default:
            self.open.append(args[0])
            if found := parse(args[0]):
                self.alive.add(found[1])
                if found[0] == "newton_schulz":
                    self.seen.setdefault(found[1], set()).update(self.alive)
        elif func is torch.ops.profiler._record_function_exit._RecordFunction:
            found = parse(self.open.pop())
            if found and found[0] == "apply":
                self.alive.discard(found[1])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("workload", ["tiny", SMALL_WORKLOAD])
@pytest.mark.parametrize("text", CONTESTANTS)
@pytest.mark.parametrize("rank", [0, 3])
def test_the_stages_under_way_are_those_of_a_step(workload: str, text: str, rank: int) -> None:
    model = get_workload(workload)
    options = Contestant(text).options(buckets="published")
    options["buckets"] = None if options["buckets"] == "auto" else model.published_buckets
    specs = muon_parameters(model, ranks=4, ep=2)
    with stand_for(rank, 4):
        optimizer = make_optimizer(specs, rank, "meta", **options)
        with Watch() as watch:
            optimizer.step()
    plan = optimizer.plan
    expected = zip(plan.stages, under_way(plan), strict=True)
    assert watch.seen == {stage.name: {each.name for each in stages} for stage, stages in expected}


def test_peak_bytes_are_the_buffers_and_the_updates_under_way() -> None:
    specs = muon_parameters(get_workload("tiny"), ranks=1, ep=1)
    plan: Plan = plan_step(specs, 0, PlanOptions(variant=Contestant("baseline").variant))
    assert not any(stage.exchange for stage in plan.stages)
    largest = max(sum(specs[index].bytes for index in stage.parameters) for stage in plan.stages)
    assert peak_bytes(plan) == Buffers(plan, torch.device("cpu")).nbytes + largest
    assert sum(buffer_bytes(plan).values()) == 0


@pytest.mark.parametrize("text", ["batched", "fused", "fused+buckets=auto"])
def test_fused_holds_no_more_than_baseline_and_a_batch(text: str) -> None:
    for rank in range(4):
        plan = plan_for("kimi-debug", rank=rank, **Contestant(text).options(buckets="published"))
        baseline = plan_for("kimi-debug", rank=rank, variant="baseline")
        assert peak_bytes(plan) <= peak_bytes(baseline) + plan.options.max_batch_bytes
