"""Read a PyTorch profiler trace: named ranges, and the device activity that was launched inside them.

Any trace serves, CUDA or ROCm, of any PyTorch that writes Chrome traces. What a range caused is found by correlation
id: a launch lies inside the range on the same process and thread, and the activity it started carries its id. Without
device activity (a CPU run) device figures are None, never 0.
"""

from __future__ import annotations

import difflib
import gc
import math
import re
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import accumulate
from pathlib import Path
from typing import Any

from distmuon.traces.intervals import parts_us, union
from distmuon.traces.tracefile import TraceError, base_ns_of, rank_of, read_document
from distmuon.traces.work import Work, own_times, tally

# Categories, and what they were called before PyTorch 1.12; "Operator" then was a range as well.
_HOST = {"user_annotation": "range", "cpu_op": "operator", "Operator": "operator"}
_DEVICE = {"kernel": "kernel", "gpu_memcpy": "memcpy", "gpu_memset": "memset"}
_DEVICE |= {"Kernel": "kernel", "Memcpy": "memcpy", "Memset": "memset"}
_LAUNCHES = ("cuda_runtime", "cuda_driver", "hip_runtime", "Runtime")
_KERNEL_LAUNCH = re.compile("Launch(Cooperative)?Kernel")
_COLLECTIVE = re.compile("nccl|rccl", re.IGNORECASE)
_HOST_EXCHANGE = "gloo:"
#: Operators of the host that copy; the second calls the first on a CPU.
HOST_COPIES = ("aten::copy_", "aten::_foreach_copy_")
_WITHIN = " > "
#: The argument that says on which thread an event ran which a merged trace shows on another track.
TRACK = "track"

Thread = tuple[int | str, int | str]


@dataclass(frozen=True, slots=True)
class Event:
    """Something with a beginning and an end on a thread of the host; times are on the trace's own clock."""

    name: str
    start_us: float
    duration_us: float
    pid: int | str
    tid: int | str

    @property
    def thread(self) -> Thread:
        """Process and thread."""
        return self.pid, self.tid

    @property
    def interval(self) -> tuple[float, float]:
        """Its start and its end."""
        return self.start_us, self.end_us

    @property
    def end_us(self) -> float:
        """When it ends."""
        return self.start_us + self.duration_us

    def contains(self, other: Event) -> bool:
        """Whether ``other`` runs on the same thread and within this one's time."""
        return self.thread == other.thread and self.start_us <= other.start_us and other.end_us <= self.end_us


@dataclass(frozen=True, slots=True)
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
    stream: int | str
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
    collectives: int | None
    exposed_collective_ms: float | None

    @property
    def launches(self) -> int | None:
        """All device activity that is not a collective."""
        if self.kernels is None or self.memset is None or self.memcpy is None:
            return None
        return self.kernels + self.memset + sum(self.memcpy.values())

    def to_dict(self) -> dict[str, Any]:
        """For JSON: None stands for what the trace cannot tell, times are rounded to a tenth of a microsecond."""
        figures = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {name: round(value, 4) if isinstance(value, float) else value for name, value in figures.items()}


class Trace:
    """A trace in memory.

    Args:
        path: a JSON file that the PyTorch profiler wrote, gzipped or not.

    Attributes:
        rank, ranks: which rank wrote it, and of how many; None where the trace does not tell. The file's name may tell
            the rank.
        base_ns: what to add to the trace's clock for nanoseconds since the epoch; 0 in traces that do not tell. Kept
            apart because a float cannot hold microseconds since the epoch to better than a quarter.
        start_us, end_us: when its first event begins and its last ends, on its own clock.
        has_device: whether device activity, and what launched it, was recorded.
        annotations: the ranges of the host (``record_function``, ``Optimizer.step#...``) in order of their start.

    Raises:
        TraceError: the file is cut off or not a trace.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.start_us, self.end_us = math.inf, -math.inf
        self.annotations: list[Event] = []
        self._operators: dict[Thread, list[Event]] = {}
        self._launches: dict[Thread, list[tuple[float, int, bool]]] = {}  # when, correlation id, whether of a kernel
        self._activity: dict[int, list[Activity]] = {}  # by correlation id
        self._launched: Counter[int] = Counter()  # by correlation id, how often
        with _many_objects():
            document = read_document(self.path)
            self.rank, self.ranks = rank_of(document, self.path)
            self.base_ns = base_ns_of(document, self.path)
            for event in document["traceEvents"]:
                if event.get("ph") == "X" and event.get("cat") != "Trace":
                    self._add(event)
        self.annotations.sort(key=_by_start)
        self._host_exchanges = [event for event in self.annotations if event.name.startswith(_HOST_EXCHANGE)]
        for operators in self._operators.values():
            operators.sort(key=_by_start)
        for launches in self._launches.values():
            launches.sort()
        self.has_device = bool(self._activity and self._launches)

    def _add(self, event: dict[str, Any]) -> None:
        category, name, args = event.get("cat", ""), event.get("name", ""), event.get("args") or {}
        try:
            start_us, duration_us = event["ts"], event.get("dur", 0)
            thread = event["pid"], event["tid"] if TRACK not in args else args[TRACK]
            self.start_us = min(self.start_us, start_us)
            self.end_us = max(self.end_us, start_us + duration_us)
        except KeyError as missing:
            raise TraceError(f"{self.path}: not a trace: an event {name!r} has no {missing}") from None
        except TypeError:
            raise TraceError(f"{self.path}: not a trace: an event {name!r} has a time that is no number") from None
        if host := _HOST.get(category):
            mine = Event(name, start_us, duration_us, *thread)
            if host == "range" or (category == "Operator" and "::" not in name):
                self.annotations.append(mine)
            else:
                self._operators.setdefault(thread, []).append(mine)
        elif category in _LAUNCHES and "correlation" in args:
            launch = start_us, args["correlation"], bool(_KERNEL_LAUNCH.search(name))
            self._launches.setdefault(thread, []).append(launch)
            self._launched[launch[1]] += 1
        elif kind := _DEVICE.get(category):
            if kind == "kernel" and _COLLECTIVE.search(name):
                kind = "collective"
            activity = Activity(kind, name, start_us, duration_us, args.get("stream", event["tid"]), args.get("bytes"))
            self._activity.setdefault(args.get("correlation", -1), []).append(activity)

    def range_names(self) -> dict[str, int]:
        """The names of the ranges there are, with how often each occurs, in order of appearance.

        Raises:
            TraceError: there is none.
        """
        if not self.annotations:
            raise TraceError(f"{self.path}: no ranges: nothing was annotated, or only the device was recorded")
        return dict(Counter(event.name for event in self.annotations))

    def ranges(self, name: str) -> list[Event]:
        """The occurrences of a range, in order of their start.

        Args:
            name: of the range; or a pattern, as in ``ProfilerStep#*``; or ``outer > inner`` for those of ``inner``
                that lie inside one of ``outer``.

        Raises:
            TraceError: there is none; the message has the nearest name.
        """
        names = self.range_names()
        outer, within, inner = name.rpartition(_WITHIN)
        if name not in names and within:
            found = _within(self.ranges(inner), self.ranges(outer))
            if not found:
                raise TraceError(f"{self.path}: no range {inner!r} lies inside a range {outer!r}")
            return found
        matching = [name] if name in names else [each for each in names if fnmatchcase(each, name)]
        if not matching:
            nearest = difflib.get_close_matches(name, names, n=1, cutoff=0.0)[0]
            raise TraceError(
                f"{self.path}: no range {name!r} among {len(names)}; did you mean {nearest!r}? Without a range all are "
                "listed"
            )
        return [event for event in self.annotations if event.name in matching]

    def launched_in(self, event: Event) -> list[Activity]:
        """The device activity whose launch lies inside ``event``, in order of its start."""
        launched = {correlation for _, correlation, _ in self._launches_in(event)}
        found = [activity for correlation in launched for activity in self._activity.get(correlation, ())]
        return sorted(found, key=lambda activity: activity.start_us)

    def launches_in(self, event: Event) -> list[tuple[float, list[Activity]]]:
        """When each launch inside ``event`` was made, and the device activity that it started."""
        return [(start_us, self._activity.get(id, [])) for start_us, id, _ in self._launches_in(event)]

    def lost_in(self, event: Event) -> int:
        """How many kernels were launched inside ``event`` whose activity the trace lacks: it ends before they ran."""
        return sum(is_kernel and id not in self._activity for _, id, is_kernel in self._launches_in(event))

    def shared_in(self, event: Event) -> int:
        """How many of its correlation ids launched something elsewhere, too, as in a trace of several processes: which
        of the activity is whose cannot be told then.
        """
        inside = Counter(id for _, id, _ in self._launches_in(event) if id in self._activity)
        return sum(times < self._launched[id] for id, times in inside.items())

    def _untold(self, event: Event) -> bool:
        """Whether the trace cannot tell all that ``event`` launched, and nothing else."""
        return bool(self.lost_in(event) or self.shared_in(event))

    def _launches_in(self, event: Event) -> list[tuple[float, int, bool]]:
        launches = self._launches.get(event.thread, [])
        first = bisect_left(launches, event.start_us, key=lambda launch: launch[0])
        return launches[first : bisect_right(launches, event.end_us, key=lambda launch: launch[0])]

    def operators_in(self, event: Event) -> list[Event]:
        """The operators that ran inside ``event`` on its thread, those that others called too, in order of start."""
        operators = self._operators.get(event.thread, [])
        first = bisect_left(operators, event.start_us, key=lambda operator: operator.start_us)
        last = bisect_right(operators, event.end_us, key=lambda operator: operator.start_us)
        return [operator for operator in operators[first:last] if event.contains(operator)]

    def exchanges_in(self, event: Event) -> list[Event | Activity]:
        """The exchanges of ``event`` as what carried them out saw them, in order of start.

        On a device these are the collectives that it launched, else what gloo's own threads did in its time.
        """
        if self.has_device:
            return [activity for activity in self.launched_in(event) if activity.kind == "collective"]
        exchanges = self._host_exchanges
        first, last = (bisect_left(exchanges, time, key=lambda each: each.start_us) for time in event.interval)
        return [each for each in exchanges[first:last] if each.pid == event.pid]

    def occurrence(self, event: Event) -> Occurrence:
        """What one run of a range did."""
        cpu_span_ms = event.duration_us / 1e3
        if not self.has_device:
            collectives = sum(operator.name.startswith("c10d::") for operator in self.operators_in(event))
            return Occurrence(cpu_span_ms, None, None, None, None, collectives, None)
        if self._untold(event):
            return Occurrence(cpu_span_ms, None, None, None, None, None, None)
        activity = self.launched_in(event)
        kinds = Counter(item.kind for item in activity)
        parts = self.device_parts_us(event)
        return Occurrence(
            cpu_span_ms,
            sum(parts.values()) / 1e3 if parts else None,
            dict(Counter(_direction(item.name) for item in activity if item.kind == "memcpy")),
            kinds["memset"],
            kinds["kernel"],
            kinds["collective"],
            parts["exposed exchange"] / 1e3 if parts else 0.0,
        )

    def occurrences(self, name: str) -> list[Occurrence]:
        """What each run of a range did; raises as :meth:`ranges` does."""
        return [self.occurrence(event) for event in self.ranges(name)]

    def device_parts_us(self, event: Event) -> dict[str, float] | None:
        """Where the time of the GPU span goes: "compute", "copies", "exposed exchange" and "idle" add up to it.

        What runs beside compute counts as compute, so that an exchange is exposed where nothing else ran. None where
        the range launched nothing, or the trace has no device.
        """
        activity = self.launched_in(event)
        covered = union(item.interval for item in activity)
        if not covered or self._untold(event):
            return None
        kinds = {"compute": ("kernel",), "copies": ("memcpy", "memset"), "exposed exchange": ("collective",)}
        layers = {part: [item.interval for item in activity if item.kind in of] for part, of in kinds.items()}
        return parts_us((covered[0][0], covered[-1][1]), layers)

    def host_parts_us(self, event: Event) -> dict[str, float]:
        """Where the time of the CPU span goes: "copies", "compute", "exposed exchange" and "idle" add up to it.

        Copies are ``copy_`` and ``_foreach_copy_``, compute all other operators on the range's thread; an exchange of
        gloo's is exposed where no operator ran. Idle is what remains: Python, and waiting for anything else.
        """
        operators = self.operators_in(event)
        layers = {
            "copies": [each.interval for each in operators if each.name in HOST_COPIES],
            "compute": [each.interval for each in operators],
            "exposed exchange": [] if self.has_device else [each.interval for each in self.exchanges_in(event)],
        }
        return parts_us(event.interval, layers)

    def device_work(self, event: Event) -> list[Work]:
        """What ran on the device for ``event``, by name; nothing where the trace cannot tell all of it."""
        told = [] if self._untold(event) else self.launched_in(event)
        return tally((item.name, item.duration_us) for item in told)

    def host_work(self, event: Event) -> list[Work]:
        """The operators that ran inside ``event``, by name, each without the time of those it called."""
        return tally(own_times((each.name, each.start_us, each.duration_us) for each in self.operators_in(event)))


@contextmanager
def _many_objects() -> Iterator[None]:
    """Without the search for cycles that else goes through millions of new objects again and again."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _by_start(event: Event) -> tuple[float, float]:
    return event.start_us, -event.duration_us


def _within(inner: list[Event], outer: list[Event]) -> list[Event]:
    """Those of ``inner`` that lie inside one of ``outer``; both in order of start."""
    by_thread: dict[Thread, list[Event]] = {}
    for event in outer:
        by_thread.setdefault(event.thread, []).append(event)
    latest = {thread: list(accumulate((each.end_us for each in of), max)) for thread, of in by_thread.items()}
    found = []
    for event in inner:
        before = bisect_right(by_thread.get(event.thread, []), event.start_us, key=lambda each: each.start_us)
        if before and latest[event.thread][before - 1] >= event.end_us:
            found.append(event)
    return found


def _direction(name: str) -> str:
    match = re.match(r"Memcpy (\w+)", name)
    return match[1] if match else name
