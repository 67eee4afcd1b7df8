"""Read a PyTorch profiler trace: named ranges, and the device activity that was launched inside them.

Any trace serves, CUDA or ROCm, of any PyTorch that writes Chrome traces. What a range caused is found by correlation
id: a launch lies inside the range on the same process and thread, and the activity it started carries its id. Without
device activity (a CPU run) device figures are None, never 0.
"""

from __future__ import annotations

import gzip
import json
import re
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distmuon.names import choose

_DEVICE_KINDS = {"kernel": "kernel", "gpu_memcpy": "memcpy", "gpu_memset": "memset"}
_LAUNCHES = ("cuda_runtime", "cuda_driver")
_COLLECTIVE = re.compile("nccl|rccl", re.IGNORECASE)

Intervals = list[tuple[float, float]]


class TraceError(ValueError):
    """A file is not a trace, is cut off, or lacks what was asked of it."""


@dataclass(frozen=True)
class Event:
    """Something with a beginning and an end on a thread of the host; times are on the trace's own clock."""

    name: str
    start_us: float
    duration_us: float
    pid: int
    tid: int

    @property
    def end_us(self) -> float:
        """When it ends."""
        return self.start_us + self.duration_us

    def contains(self, other: Event) -> bool:
        """Whether ``other`` runs on the same thread and within this one's time."""
        same_thread = (other.pid, other.tid) == (self.pid, self.tid)
        return same_thread and self.start_us <= other.start_us and other.end_us <= self.end_us


@dataclass(frozen=True)
class Activity:
    """Something a device did.

    Attributes:
        kind: "kernel", "memcpy", "memset" or "collective".
        bytes: of copies, where the trace tells.
    """

    kind: str
    name: str
    start_us: float
    duration_us: float
    stream: int
    bytes: int | None

    @property
    def interval(self) -> tuple[float, float]:
        """Its start and its end."""
        return self.start_us, self.start_us + self.duration_us


@dataclass(frozen=True)
class Occurrence:
    """One run of a range, with what it caused on the device; device figures are None where the trace has no device.

    Attributes:
        cpu_span_ms: from the range's beginning to its end.
        gpu_span_ms: from the start of the first activity to the end of the last, collectives included.
        memcpy: number of copies by direction, as in {"DtoD": 111}.
        kernels: those that are not collectives.
        collectives: kernels of NCCL or RCCL; without a device, the ``c10d`` operators called.
        exposed_collective_ms: time in which collectives ran and nothing else of this range did.
    """

    cpu_span_ms: float
    gpu_span_ms: float | None
    memcpy: dict[str, int] | None
    memset: int | None
    kernels: int | None
    collectives: int
    exposed_collective_ms: float | None

    @property
    def launches(self) -> int | None:
        """All device activity that is not a collective."""
        if self.kernels is None or self.memset is None or self.memcpy is None:
            return None
        return self.kernels + self.memset + sum(self.memcpy.values())

    def to_dict(self) -> dict[str, Any]:
        """For JSON, "n/a" standing for what the trace cannot tell."""
        figures = {name: "n/a" if value is None else value for name, value in vars(self).items()}
        return {name: round(value, 4) if isinstance(value, float) else value for name, value in figures.items()}


class Trace:
    """A trace in memory.

    Args:
        path: a ``.json`` or ``.json.gz`` file that the PyTorch profiler wrote.

    Attributes:
        base_ns: what to add to the trace's clock for nanoseconds since the epoch; 0 in traces that do not tell. Kept
            apart because a float cannot hold microseconds since the epoch to better than a quarter.
        has_device: whether any device activity was recorded.
        annotations: the ranges of the host (``record_function``, ``Optimizer.step#...``) in order of their start.

    Raises:
        TraceError: the file is cut off or not a trace.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.annotations: list[Event] = []
        self._communication: list[Event] = []
        self._launches: dict[tuple[int, int], list[tuple[float, int]]] = {}  # by thread: when, correlation id
        self._activity: dict[int, list[Activity]] = {}  # by correlation id
        document = _load(self.path)
        self.base_ns = int(document.get("baseTimeNanoseconds", 0))
        for event in document["traceEvents"]:
            if event.get("ph") == "X":
                self._add(event)
        self.annotations.sort(key=lambda event: (event.start_us, -event.duration_us))
        for launches in self._launches.values():
            launches.sort()
        self.has_device = bool(self._activity)

    def _add(self, event: dict[str, Any]) -> None:
        category, name, args = event.get("cat"), event["name"], event.get("args", {})
        start_us, duration_us = event["ts"], event.get("dur", 0)
        if category == "user_annotation":
            self.annotations.append(Event(name, start_us, duration_us, event["pid"], event["tid"]))
        elif category == "cpu_op" and name.startswith("c10d::"):
            self._communication.append(Event(name, start_us, duration_us, event["pid"], event["tid"]))
        elif category in _LAUNCHES and "correlation" in args:
            thread = event["pid"], event["tid"]
            self._launches.setdefault(thread, []).append((start_us, args["correlation"]))
        elif kind := _DEVICE_KINDS.get(category or ""):
            if kind == "kernel" and _COLLECTIVE.search(name):
                kind = "collective"
            activity = Activity(kind, name, start_us, duration_us, args.get("stream", event["tid"]), args.get("bytes"))
            self._activity.setdefault(args.get("correlation", -1), []).append(activity)

    def range_names(self) -> dict[str, int]:
        """The names of the ranges there are, with how often each occurs, in order of appearance."""
        return dict(Counter(event.name for event in self.annotations))

    def ranges(self, name: str) -> list[Event]:
        """The occurrences of a range.

        Raises:
            TraceError: there is none; the message has the nearest name.
        """
        found = [event for event in self.annotations if event.name == name]
        if not found:
            if not self.annotations:
                raise TraceError(f"{self.path}: no ranges: nothing was annotated, or only the device was recorded")
            try:
                choose("range", name, self.range_names())
            except ValueError as error:
                raise TraceError(f"{self.path}: {error}") from None
        return found

    def launched_in(self, event: Event) -> list[Activity]:
        """The device activity whose launch lies inside ``event``, in order of its start."""
        launches = self._launches.get((event.pid, event.tid), [])
        first = bisect_left(launches, event.start_us, key=lambda launch: launch[0])
        last = bisect_right(launches, event.end_us, key=lambda launch: launch[0])
        found = [
            activity for _, correlation in launches[first:last] for activity in self._activity.get(correlation, ())
        ]
        return sorted(found, key=lambda activity: activity.start_us)

    def occurrence(self, event: Event) -> Occurrence:
        """What one run of a range did."""
        cpu_span_ms = event.duration_us / 1e3
        if not self.has_device:
            collectives = sum(event.contains(operator) for operator in self._communication)
            return Occurrence(cpu_span_ms, None, None, None, None, collectives, None)
        activity = self.launched_in(event)
        kinds = Counter(item.kind for item in activity)
        exchange = union(item.interval for item in activity if item.kind == "collective")
        rest = union(item.interval for item in activity if item.kind != "collective")
        covered = union(exchange + rest)
        return Occurrence(
            cpu_span_ms,
            (covered[-1][1] - covered[0][0]) / 1e3 if covered else None,
            dict(Counter(_direction(item.name) for item in activity if item.kind == "memcpy")),
            kinds["memset"],
            kinds["kernel"],
            kinds["collective"],
            (length_us(exchange) - overlap_us(exchange, rest)) / 1e3,
        )

    def occurrences(self, name: str) -> list[Occurrence]:
        """What each run of a range did; raises as :meth:`ranges` does."""
        return [self.occurrence(event) for event in self.ranges(name)]


def union(intervals: Iterable[tuple[float, float]]) -> Intervals:
    """The time covered by ``intervals``, as disjoint intervals in order."""
    merged: Intervals = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def length_us(intervals: Intervals) -> float:
    """Total length of disjoint intervals."""
    return sum(end - start for start, end in intervals)


def overlap_us(left: Intervals, right: Intervals) -> float:
    """Time that two unions have in common."""
    return length_us(left) + length_us(right) - length_us(union(left + right))


def _direction(name: str) -> str:
    match = re.match(r"Memcpy (\w+)", name)
    return match[1] if match else name


def _load(path: Path) -> dict[str, Any]:
    opened = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rb") as file:
            document = json.load(file)
    except (EOFError, gzip.BadGzipFile, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise TraceError(f"{path}: cut off, or not a trace ({error})") from None
    if isinstance(document, list):
        document = {"traceEvents": document}
    if not isinstance(document, dict) or not isinstance(document.get("traceEvents"), list):
        raise TraceError(f"{path}: not a trace: it has no list of traceEvents")
    return document
