"""What ran in a range, by name: how often, and how long without what it called."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Work:
    """All runs of one operator, kernel or copy in a range.

    Attributes:
        calls: how many.
        time_us: how long it ran: a device's activity from start to end, a host's operator without those it called.
    """

    name: str
    calls: int
    time_us: float


def own_times(runs: Iterable[tuple[str, float, float]]) -> Iterator[tuple[str, float]]:
    """The name of each run and its time without those inside it.

    Args:
        runs: name, start and duration, of one thread and in order of their start, outer ones first.
    """
    open_: list[tuple[str, float, float, float]] = []  # that run: name, end, duration, time of those inside so far
    for name, start_us, duration_us in runs:
        while open_ and open_[-1][1] <= start_us:
            ended, _, whole_us, inner_us = open_.pop()
            yield ended, whole_us - inner_us
        if open_:
            caller, end_us, whole_us, inner_us = open_.pop()
            open_.append((caller, end_us, whole_us, inner_us + duration_us))
        open_.append((name, start_us + duration_us, duration_us, 0.0))
    yield from ((ended, whole_us - inner_us) for ended, _, whole_us, inner_us in open_)


def tally(runs: Iterable[tuple[str, float]]) -> list[Work]:
    """All runs of a name, which come with their times, together."""
    calls: Counter[str] = Counter()
    times: Counter[str] = Counter()
    for name, time_us in runs:
        calls[name] += 1
        times[name] += time_us  # type: ignore[assignment]  # a Counter adds floats as well
    return [Work(name, calls[name], times[name]) for name in calls]
