"""The modelled step: physics, a case worked by hand, an event-driven simulation beside it, and the order of the real
step.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import replace
from itertools import count

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pool import Pool
from torch.utils._python_dispatch import TorchDispatchMode

from distmuon.counting import dryrun
from distmuon.counting.launches import count_launches
from distmuon.modelling import Assumptions, Replay, replay
from distmuon.modelling.loads import StageLaunches, StageLoad, Traffic, Work, loads_of
from distmuon.modelling.pipeline import COMPUTING, WAITING
from distmuon.newton_schulz.costs import gemm_flops
from distmuon.planning.options import PlanOptions
from distmuon.planning.totals import step_totals
from distmuon.ranges import parse
from distmuon.workloads.config import get_workload
from distmuon.workloads.storage import PUBLISHED_BUCKETS, get_buckets, muon_parameters, plan_for
from distmuon.workloads.training import Trainer

#: A second for a FLOP, for a byte and for a launch; no cost of a message.
UNITS = Assumptions(1.0, 1.0, 1e6, 1.0, 1.0, 0.0, ranks_a_host=1)
FREE = replace(UNITS, near_bandwidth=1e300, far_bandwidth=1e300)


def seconds(*each_rank: float) -> Work:
    """Work of so many seconds on each rank under UNITS."""
    flops = np.array(each_rank, dtype=float)
    return Work(flops, 0 * flops, 0 * flops)


def moved(*each_rank: float) -> Traffic:
    """An exchange in which each rank sends and receives so many bytes."""
    sent = np.array(each_rank, dtype=float)
    return Traffic(sent, sent, 0 * sent)


def stage(name: str, works: list[Work], out: Traffic | None = None, back: Traffic | None = None) -> StageLoad:
    groups = (np.arange(works[0].flops.size),) if back else ()
    return StageLoad(name, groups, *works, out, back)


def test_two_ranks_and_two_buckets_worked_by_hand() -> None:
    """All in seconds; a lane in [ ].

    Rank 0 begins a until 1, rank 1 until 2, when both have issued a out [2, 5]. They begin b until 2 and 4; b out [5,
    7] after it on the lane. Ready work of a until 3 and 5, wait for it until 5, own work until 9 and 6: a back [9, 12].
    Both have issued; rank 1 goes on: b came at 7, own work until 10 and 9: b back [12, 14]. Ready work of b: none. a's
    results come at 12, finish until 13 and 14; b's at 14 and, on rank 1, at 14 as well; finish until 15 and 14.5.
    """
    a = stage("a", [seconds(1, 2), seconds(4, 1), seconds(1, 1), seconds(1, 2)], moved(3, 3), moved(3, 1))
    b = stage("b", [seconds(1, 2), seconds(1, 2), seconds(0, 0), seconds(1, 0.5)], moved(2, 2), moved(2, 2))
    found = replay([a, b], UNITS)
    lanes = {
        (span.stage, span.what): (span.start[0], span.end[0]) for span in found.spans if span.what in ("out", "back")
    }
    assert lanes == {("a", "out"): (2, 5), ("b", "out"): (5, 7), ("a", "back"): (9, 12), ("b", "back"): (12, 14)}
    assert found.end.tolist() == [15, 14.5]
    assert found.step_s == 15
    assert found.busy_s.tolist() == [10, 10.5]
    assert found.exposed_s.tolist() == [5, 4]
    assert found.idle_s.tolist() == [0, 0.5]
    assert found.total("wait out", stage="a").tolist() == [2, 0]


def test_microseconds_and_units_add_up() -> None:
    """1 MFLOP at 1 TFLOP/s, 3 MB of memory at 1 TB/s, 4 launches of 5 us: 1 + 3 + 20 us; then 2 messages of 2 us and 1
    MB at 100 GB/s out, the same back.
    """
    assumed = Assumptions(1e12, 1e12, 5.0, 100e9, 100e9, 2.0)
    one = np.ones(2)
    work, none = Work(1e6 * one, 3e6 * one, 4 * one), seconds(0, 0)
    traffic = Traffic(1e6 * one, 0.5e6 * one, 2 * one)
    load = StageLoad("a", (np.arange(2),), none, work, none, none, traffic, traffic)
    assert replay([load], assumed).step_s == pytest.approx((24 + 14 + 14) * 1e-6)


def test_bytes_between_hosts_go_at_their_own_rate() -> None:
    """Of 4 ranks on 2 hosts a rank has a third of its peers near and two thirds far."""
    load = stage("a", [seconds(0, 0, 0, 0)] * 4, None, moved(9, 9, 9, 9))
    slow_far = Assumptions(1, 1, 0, near_bandwidth=1, far_bandwidth=0.5, message_us=0, ranks_a_host=2)
    assert replay([load], slow_far).step_s == pytest.approx(12)
    assert replay([load], replace(slow_far, ranks_a_host=4)).step_s == 9
    assert replay([load], replace(slow_far, ranks_a_host=1)).step_s == 18


@st.composite
def steps(draw: st.DrawFn) -> list[StageLoad]:
    """Stages of any kind on up to 6 ranks, in groups of one size."""
    ranks = draw(st.integers(1, 6))
    numbers = st.lists(st.integers(0, 9), min_size=ranks, max_size=ranks)
    loads = []
    for number in range(draw(st.integers(1, 6))):
        works = [seconds(*draw(numbers)) for _ in range(4)]
        size = draw(st.sampled_from([size for size in range(1, ranks + 1) if ranks % size == 0]))
        kind = draw(st.sampled_from(["none", "back", "both"]))
        groups = (
            tuple(np.arange(ranks).reshape(-1, size))
            if draw(st.booleans())
            else tuple(np.arange(ranks).reshape(size, -1).T)
        )
        out = moved(*draw(numbers)) if kind == "both" else None
        back = moved(*draw(numbers)) if kind != "none" else None
        loads.append(StageLoad(str(number), groups if back else (), *works, out, back))
    return loads


def program(loads: list[StageLoad], rank: int) -> Iterator[tuple[str, object]]:
    """What a rank does, in the order that the step's own documentation gives."""
    travelling = [load for load in loads if load.back]

    def begin(load: StageLoad) -> Iterator[tuple[str, object]]:
        yield "work", load.begin.flops[rank]
        if load.out:
            yield "issue", (load.name, "out")

    def finish(load: StageLoad) -> Iterator[tuple[str, object]]:
        if load.back:
            yield "wait", (load.name, "back")
        yield "work", load.finish.flops[rank]

    if travelling:
        yield from begin(travelling[0])
    for load in loads:
        if not load.back:
            yield from begin(load)
            yield "work", load.whole.flops[rank]
            yield from finish(load)
            continue
        at = travelling.index(load)
        if at + 1 < len(travelling):  # its buffers are those of the one before
            if at:
                yield from finish(travelling[at - 1])
            yield from begin(travelling[at + 1])
        if at == 0:
            yield "work", load.whole.flops[rank]
        if load.out:
            yield "wait", (load.name, "out")
        yield "work", load.owned.flops[rank]
        yield "issue", (load.name, "back")
        if at:
            yield "work", load.whole.flops[rank]
    for load in travelling[-2:]:
        yield from finish(load)


def event_by_event(loads: list[StageLoad]) -> list[float]:
    """When each rank is done: events in the order of time, each rank and each lane by itself."""
    ranks = loads[0].ranks
    traffic = {(load.name, way): getattr(load, way) for load in loads for way in ("out", "back") if getattr(load, way)}
    group_of = {(load.name, rank): group.tolist() for load in loads for group in load.groups for rank in group.tolist()}
    programs = [program(loads, rank) for rank in range(ranks)]
    queues: list[list[tuple[str, str]]] = [[] for _ in range(ranks)]
    over: set[tuple[int, tuple[str, str]]] = set()
    waiting: dict[int, tuple[str, str]] = {}
    moving: set[tuple[int, tuple[str, str]]] = set()
    ends = [0.0] * ranks
    order = count()
    events: list[tuple[float, int, str, int, tuple[str, str]]] = [
        (0.0, next(order), "go", r, ("", "")) for r in range(ranks)
    ]

    def push(time: float, kind: str, rank: int, key: tuple[str, str] = ("", "")) -> None:
        heapq.heappush(events, (time, next(order), kind, rank, key))

    def start(time: float, rank: int) -> None:
        """Start the exchange at the head of a rank's lane if its whole group has it there."""
        if not queues[rank]:
            return
        key = queues[rank][0]
        group = group_of[key[0], rank]
        if (rank, key) in moving or any(queues[peer][:1] != [key] for peer in group):
            return
        length = max(max(traffic[key].sent[peer], traffic[key].received[peer]) for peer in group)
        for peer in group:
            moving.add((peer, key))
            push(time + length, "arrive", peer, key)

    while events:
        time, _, kind, rank, key = heapq.heappop(events)
        if kind == "arrive":
            assert queues[rank].pop(0) == key
            over.add((rank, key))
            if waiting.get(rank) == key:
                del waiting[rank]
                push(time, "go", rank)
            start(time, rank)
            continue
        for what, value in programs[rank]:
            if what == "work":
                push(time + value, "go", rank)
                break
            if what == "issue":
                queues[rank].append(value)
                start(time, rank)
            elif (rank, value) not in over:
                waiting[rank] = value
                break
        else:
            ends[rank] = time
    assert not waiting
    return ends


@given(loads=steps())
@settings(max_examples=300, deadline=None)
def test_the_replay_is_what_happens_event_by_event(loads: list[StageLoad]) -> None:
    assert replay(loads, UNITS).end.tolist() == event_by_event(loads)


@given(loads=steps())
@settings(max_examples=100, deadline=None)
def test_parts_add_up_and_physics_holds(loads: list[StageLoad]) -> None:
    found = replay(loads, UNITS)
    np.testing.assert_allclose(found.busy_s + found.exposed_s + found.idle_s, found.step_s)
    work = sum(
        work.seconds(UNITS)
        for load in loads
        for work in (load.works if load.back else [load.begin, load.whole, load.finish])
    )
    np.testing.assert_allclose(found.busy_s, work)
    moving = sum(
        float(max(t.sent.max(), t.received.max()))
        for load in loads
        for t in (load.out, load.back)
        if t and len(load.groups) == 1
    )
    assert found.step_s >= max(work.max(), moving)
    for better in ({"near_bandwidth": 2.0, "far_bandwidth": 2.0}, {"gemm_flops": 2.0}):
        assert replay(loads, replace(UNITS, **better)).step_s <= found.step_s
    if found.idle_s.size == 1:
        assert replay(loads, FREE).step_s == work[0], "one rank with a free network does its work and nothing else"


def test_an_infinite_network_leaves_the_work_and_no_work_the_network() -> None:
    rng = np.random.default_rng(0)
    even = [
        stage(str(n), [seconds(*[x] * 4) for x in rng.integers(1, 9, 4)], moved(5, 5, 5, 5), moved(5, 5, 5, 5))
        for n in range(5)
    ]
    free = replay(even, FREE)
    assert free.exposed_s.tolist() == [0] * 4
    assert free.step_s == free.busy_s.max()
    idle = [
        replace(
            load,
            begin=seconds(0, 0, 0, 0),
            owned=seconds(0, 0, 0, 0),
            whole=seconds(0, 0, 0, 0),
            finish=seconds(0, 0, 0, 0),
        )
        for load in even
    ]
    assert replay(idle, UNITS).step_s == 5 * 2 * 5


def model(name: str, ranks: int, ep: int, buckets: str = "published", **assumed: float) -> Replay:
    workload = get_workload(name)
    parameters = muon_parameters(workload, ranks=ranks, ep=ep)
    options = PlanOptions(get_buckets(workload, buckets))
    plan = plan_for(name, ranks=ranks, ep=ep, buckets=buckets)
    launches = dryrun.stage_launches(plan, dryrun.dry_run(plan).launches)
    return replay(loads_of(parameters, options, step_totals(parameters, options), launches), Assumptions(**assumed))


def test_a_workload_is_modelled_from_its_plan() -> None:
    """Only GEMMs: what the busiest rank of each rank's matrices come to."""
    free = {
        "memory_bandwidth": 1e300,
        "launch_us": 0,
        "near_bandwidth": 1e300,
        "far_bandwidth": 1e300,
        "message_us": 0,
    }
    found = model("kimi-debug", 4, 2, gemm_flops=1e9, **free)
    for rank in range(4):
        rows = plan_for("kimi-debug", ranks=4, ep=2, rank=rank).report([rank])
        assert found.busy_s[rank] == pytest.approx(sum(row["gemm_flops"] for row in rows) / 1e9)
    slow = model("kimi-debug", 4, 2, near_bandwidth=1e6)
    sent = int(
        step_totals(
            muon_parameters(get_workload("kimi-debug"), ranks=4, ep=2), PlanOptions(PUBLISHED_BUCKETS["kimi-debug"])
        )
        .sent_bytes()
        .max()
    )
    assert slow.step_s >= sent / 1e6
    assert {span.what for span in slow.spans} == {*COMPUTING, *WAITING, "out", "back"}


@pytest.mark.parametrize("variant", ["baseline", "fused"])
def test_a_dry_run_counts_what_the_optimizer_launches(variant: str) -> None:
    counts = count_launches("tiny", 4, 2, variant)
    for rank, expected in enumerate(counts.per_rank):
        plan = plan_for("tiny", ranks=4, ep=2, rank=rank, variant=variant)
        counted = dryrun.dry_run(plan)
        assert counted.launches.total() == expected.launches
        launches = dryrun.stage_launches(plan, counted.launches)
        batches = {
            stage.name: sum(batch.in_work and not batch.ready for batch in stage.batches) for stage in plan.stages
        }
        total = sum(s.begin + s.exchange + s.whole + s.finish + s.batch * batches[name] for name, s in launches.items())
        assert total == pytest.approx(expected.launches)


class Order(TorchDispatchMode):
    """Notes the phases of a step as they are entered."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, str]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.profiler._record_function_enter_new.default and (found := parse(args[0])):
            self.seen.append(found)
        return func(*args, **(kwargs or {}))


def order_of_a_step(rank: int, ranks: int) -> list[tuple[str, str]]:
    trainer = Trainer(get_workload("tiny"), ranks=ranks, ep=2, rank=rank, tokens=16)
    trainer.forward_backward(0)
    with Order() as order:
        trainer.muon.step()
    return order.seen


def test_the_replay_takes_the_order_of_the_real_step(pool: Pool) -> None:
    phases = {
        "begin": "momentum",
        "owned": "unpack",
        "finish": "apply",
        "out": "all_to_all",
        "back": "all_to_all",
        "wait out": "wait",
        "wait back": "wait",
    }
    spans = model("tiny", 4, 2).spans
    modelled = [(phases[span.what], span.stage) for span in spans if span.what in phases]
    for seen in pool.run(4, order_of_a_step):
        assert modelled == [step for step in seen if step[0] in phases.values()]


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="assumption gemm_flops is 0"):
        Assumptions(gemm_flops=0)
    with pytest.raises(ValueError, match="launches of batch are -1"):
        StageLaunches(batch=-1)
    works = [seconds(0, 0)] * 4
    with pytest.raises(ValueError, match="groups and a way back come together"):
        StageLoad("a", (), *works, moved(1, 1), moved(1, 1))
    with pytest.raises(ValueError, match="must hold each of 2 ranks once"):
        StageLoad("a", (np.array([0]),), *works, None, moved(1, 1))
    with pytest.raises(ValueError, match="arrays of \\[2, 3\\] ranks"):
        StageLoad("a", (), *works[:3], seconds(1, 2, 3))
    with pytest.raises(ValueError, match="at least one stage"):
        replay([], UNITS)


def test_flops_are_those_of_the_standard_algorithm() -> None:
    parameters = muon_parameters(get_workload("tiny"), ranks=1, ep=1)
    assert all(spec.storage is None for spec in parameters)
    parameters = muon_parameters(get_workload("tiny"), ranks=2, ep=1)
    totals = step_totals(parameters)
    launches = dict.fromkeys((stage.name for stage in totals.stages), StageLaunches())
    loads = loads_of(parameters, PlanOptions(), totals, launches, ns_steps=3)
    expected = sum(gemm_flops(*shape[:2], 3) * n for spec in parameters for shape, n in spec.shapes.items())
    assert sum((load.owned.flops + load.whole.flops).sum() for load in loads) == expected
