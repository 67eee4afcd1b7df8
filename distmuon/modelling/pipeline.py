"""The replay: a step's pipeline on all ranks, as a discrete-event simulation.

The order is that of :meth:`distmuon.step.StepRunner.run`. A rank computes one thing at a time. It has one lane to the
network, which carries its exchanges one after another in the order in which they are issued. An exchange starts once
all ranks of its group have issued it and have their lanes free, and ends on all of them when the slowest has sent and
received everything. Ranks issue the same exchanges in the same order, so that events can be taken in the order of the
program, for all ranks at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from distmuon.modelling.assumptions import Assumptions
from distmuon.modelling.loads import Groups, Numbers, StageLoad, Traffic, Work

#: What a rank does with its time; the waits are for an exchange, "idle" is what is left when others still compute.
COMPUTING, WAITING = ("begin", "owned", "whole", "finish"), ("wait out", "wait back")


@dataclass(frozen=True)
class Span:
    """From when to when something happened, in seconds since the step began; an entry a rank.

    ``what`` is one of :data:`COMPUTING`, :data:`WAITING`, or "out" or "back": the exchange on the rank's lane.
    """

    stage: str
    what: str
    start: Numbers
    end: Numbers

    @property
    def seconds(self) -> Numbers:
        """How long."""
        return self.end - self.start


@dataclass(frozen=True)
class Replay:
    """A step that was replayed. Of each rank, busy + exposed + idle is the span of the step.

    Attributes:
        spans: all that happened, in the order of the program.
        end: when each rank was done.
    """

    spans: tuple[Span, ...]
    end: Numbers

    @property
    def step_s(self) -> float:
        """Until the last rank is done."""
        return float(self.end.max())

    @cached_property
    def busy_s(self) -> Numbers:
        """What each rank computed."""
        return self.total(*COMPUTING)

    @cached_property
    def exposed_s(self) -> Numbers:
        """What each rank waited for exchanges: for their bytes, for its lane, or for ranks that came late."""
        return self.total(*WAITING)

    @property
    def idle_s(self) -> Numbers:
        """What was left on each rank when it was done."""
        return self.step_s - self.end

    def total(self, *what: str, stage: str | None = None) -> Numbers:
        """Seconds of all spans of these kinds on each rank, of one stage or of all."""
        found = [span.seconds for span in self.spans if span.what in what and stage in (None, span.stage)]
        return np.sum(found, axis=0) if found else np.zeros(len(self.end))


def replay(loads: Sequence[StageLoad], assumptions: Assumptions) -> Replay:
    """Replay a step in which all ranks begin at once.

    Args:
        loads: of each stage, in the order of the plan.
        assumptions: the machine.

    Raises:
        ValueError: no stages, or of different numbers of ranks.
    """
    if len({load.ranks for load in loads}) != 1:
        raise ValueError("give at least one stage, and all of one number of ranks")
    state = _State(assumptions, np.zeros(loads[0].ranks), np.zeros(loads[0].ranks))
    upcoming = [load for load in loads if load.groups]
    unfinished: list[StageLoad] = []
    hide = bool(upcoming)
    if upcoming:
        state.begin(upcoming.pop(0))
    for load in loads:
        if not load.groups:
            state.begin(load)
            state.compute(load, ready_first=True)
            state.finish(load)
            continue
        if upcoming:
            if unfinished:
                state.finish(unfinished.pop())
            state.begin(upcoming.pop(0))
        state.compute(load, ready_first=hide)
        hide = False
        unfinished.append(load)
    for load in unfinished:
        state.finish(load)
    return Replay(tuple(state.spans), state.now)


@dataclass
class _State:
    """Where each rank is.

    Args:
        assumptions: the machine.
        now: what each rank's computing has come to.
        lane: until when each rank's lane is taken.
    """

    assumptions: Assumptions
    now: Numbers
    lane: Numbers
    spans: list[Span] = field(default_factory=list)
    _ends: dict[tuple[str, str], Numbers] = field(default_factory=dict)

    def begin(self, load: StageLoad) -> None:
        self._work(load, "begin", load.begin)
        if load.out:
            self._issue(load, "out", load.out)

    def compute(self, load: StageLoad, *, ready_first: bool) -> None:
        if ready_first:
            self._work(load, "whole", load.whole)
        if load.out:
            self._wait(load, "out")
        if load.back:
            self._work(load, "owned", load.owned)
            self._issue(load, "back", load.back)
        if not ready_first:
            self._work(load, "whole", load.whole)

    def finish(self, load: StageLoad) -> None:
        if load.back:
            self._wait(load, "back")
        self._work(load, "finish", load.finish)

    def _work(self, load: StageLoad, what: str, work: Work) -> None:
        self._pass(load, what, self.now + work.seconds(self.assumptions))

    def _wait(self, load: StageLoad, way: str) -> None:
        self._pass(load, f"wait {way}", np.maximum(self.now, self._ends[load.name, way]))

    def _pass(self, load: StageLoad, what: str, until: Numbers) -> None:
        self.spans.append(Span(load.name, what, self.now, until))
        self.now = until

    def _issue(self, load: StageLoad, way: str, traffic: Traffic) -> None:
        start = _slowest(np.maximum(self.now, self.lane), load.groups)
        self.lane = start + _slowest(traffic_seconds(traffic, load.groups, self.assumptions), load.groups)
        self._ends[load.name, way] = self.lane
        self.spans.append(Span(load.name, way, start, self.lane))


def traffic_seconds(traffic: Traffic, groups: Groups, assumptions: Assumptions) -> Numbers:
    """What one way of an exchange takes each rank: its messages, then the larger of its two directions.

    Bytes are taken to be spread evenly over the other ranks of its group. Those to its own host and those to others go
    beside one another.
    """
    sizes = [len(group) for group in groups]
    size, number = np.empty((2, len(traffic.sent)), dtype=np.int64)
    size[np.concatenate(groups)] = np.repeat(sizes, sizes)
    number[np.concatenate(groups)] = np.repeat(np.arange(len(groups)), sizes)
    hosts = np.arange(len(number)) // assumptions.ranks_a_host
    together = number * (hosts[-1] + 1) + hosts  # ranks of one group on one host
    near = (np.bincount(together)[together] - 1) / np.maximum(size - 1, 1)
    most = np.maximum(traffic.sent, traffic.received)
    moving = np.maximum(most * near / assumptions.near_bandwidth, most * (1 - near) / assumptions.far_bandwidth)
    return traffic.messages * assumptions.message_us * 1e-6 + moving


def _slowest(values: Numbers, groups: Groups) -> Numbers:
    """The largest value of each rank's group."""
    order, sizes = np.concatenate(groups), [len(group) for group in groups]
    starts = np.cumsum([0, *sizes[:-1]])
    slowest = np.empty_like(values)
    slowest[order] = np.repeat(np.maximum.reduceat(values[order], starts), sizes)
    return slowest
