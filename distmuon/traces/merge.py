"""One trace of all ranks for Perfetto: a process a rank, on a common clock.

Events keep their names, so that buckets and phases are found as the ranges name them. Processes and threads get numbers
of their own, and so do the ids that join a launch to what it launched: two ranks may have used the same.

On one track Perfetto shows slices that nest and drops those that overlap (google/perfetto#4280), as kernels of one
stream may since one can start before the one before it has ended. Such a slice goes to a further track beside its own,
and its argument ``track`` says which that is, for the reader. Arrows from launches have an end each; one that lacks its
beginning or its end is left out.
"""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from distmuon.traces.ranks import RankTraces
from distmuon.traces.trace import TRACK
from distmuon.traces.tracefile import TraceError, read_document

_THREADS = 10_000  # numbers for each rank's threads: a rank's process has the first of them, as its main thread
_ON_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset", "gpu_user_annotation", "Kernel", "Memcpy", "Memset"}
_FLOWS = {"s", "f"}
_CLOCK_NS = 2  # what the ends of slices may be apart by rounding: less than this is no overlap
_KEPT = {"X", "i", "C", *_FLOWS}


def merge_traces(run: RankTraces, path: Path) -> None:
    """Write the traces of a run's ranks as one.

    The result is a trace like any other, for :class:`distmuon.traces.trace.Trace` too.

    Args:
        run: the traces, on a common clock.
        path: the file to write, gzipped if its name ends so.

    Raises:
        TraceError: the traces have no common clock, or were not taken at the same time.
        FileExistsError: the file is there already.
    """
    if run.clock_shifts_us is None:
        raise TraceError(f"{run.path}: no common clock: not every trace tells what its times count from")
    windows = [
        (trace.start_us + shift, trace.end_us + shift)
        for trace, shift in zip(run.traces, run.clock_shifts_us, strict=True)
    ]
    first_us = math.floor(min(start for start, _ in windows))
    if max(start for start, _ in windows) > min(end for _, end in windows):
        raise TraceError(f"{run.path}: not taken at the same time, so not the ranks of one run")
    base_ns = min(trace.base_ns for trace in run.traces) + 1000 * first_us
    ids = count(1)
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "xt") as file:
        file.write(f'{{"displayTimeUnit": "ms", "baseTimeNanoseconds": {base_ns}, "traceEvents": [')
        separator = "\n"
        for trace, shift_us in zip(run.traces, run.clock_shifts_us, strict=True):
            # One rank's events at a time: those of all might not fit into memory.
            for event in _events(read_document(trace.path)["traceEvents"], trace.rank or 0, shift_us - first_us, ids):
                file.write(separator + json.dumps(event))
                separator = ",\n"
        file.write("\n]}\n")


def _events(
    events: Sequence[dict[str, Any]], rank: int, shift_us: float, ids: Iterator[int]
) -> Iterator[dict[str, Any]]:
    """One rank's events as those of one process, after the names of the process and its threads."""
    kept = [event for event in events if event.get("ph") in _KEPT and event.get("cat") != "Trace" and _numbered(event)]
    process = (rank + 1) * _THREADS
    threads = {thread: process + number for number, thread in enumerate(_threads(events, kept))}
    yield _named("process_name", process, process, name=f"rank {rank}")
    yield _named("process_sort_index", process, process, sort_index=rank)
    for (_, name), number in threads.items():
        yield _named("thread_name", process, number, name=name)
        yield _named("thread_sort_index", process, number, sort_index=number)
    numbers = {place: number for (place, _), number in threads.items()}
    moved: dict[tuple[int, int], int] = {}  # track and start of a slice -> the track that it went to
    free = count(process + len(threads))
    for event in kept:
        event |= {"pid": process, "tid": numbers[event["pid"], event["tid"]], "ts": round(event["ts"] + shift_us, 3)}
    for number, slices in _slices(kept).items():
        for lane, overlapping in enumerate(_nested(slices)[1:], start=1):
            track = next(free)
            named = next(name for (_, name), thread in threads.items() if thread == number)
            yield _named("thread_name", process, track, name=f"{named}, overlapping {lane}")
            yield _named("thread_sort_index", process, track, sort_index=number)
            for event in overlapping:
                moved[number, _ns(event["ts"])] = track
                event |= {"tid": track, "args": {**(event.get("args") or {}), TRACK: number}}
    new_ids: dict[Any, int] = {}
    begun = {_flow(event): event for event in kept if event["ph"] == "s"}
    for event in kept:
        if event["ph"] not in _FLOWS:
            if "correlation" in (args := event.get("args") or {}):
                args["correlation"] = new_ids.setdefault(args["correlation"], next(ids))
            yield event
        elif event["ph"] == "f" and _flow(event) in begun:  # the launch of a graph ends at each of its kernels
            number = next(ids)
            for end in (begun[_flow(event)], event):
                yield end | {"id": number, "tid": moved.get((end["tid"], _ns(end["ts"])), end["tid"])}


def _flow(event: dict[str, Any]) -> tuple[Any, ...]:
    return event.get("cat"), event.get("name"), event["id"]


def _slices(events: Sequence[dict[str, Any]]) -> dict[int, list[dict[str, Any]]]:
    """The slices of each track in order of their start, outer ones first."""
    found: dict[int, list[dict[str, Any]]] = {}
    for event in events:
        if event["ph"] == "X":
            event["dur"] = round(event.get("dur", 0), 3)
            found.setdefault(event["tid"], []).append(event)
    for slices in found.values():
        slices.sort(key=lambda event: (event["ts"], -event["dur"]))
    return found


def _nested(slices: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """The slices of one track as lanes, in each of which they nest; what is apart by rounding only is shortened."""
    lanes: list[tuple[list[dict[str, Any]], list[dict[str, Any]]]] = [([], [])]  # all slices, and those that run
    for event in slices:
        lane = next((lane for lane in lanes if _fits(event, lane[1])), None)
        if lane is None:
            lanes.append(lane := ([], []))
        for of in lane:
            of.append(event)
    return [of for of, _ in lanes]


def _fits(event: dict[str, Any], running: list[dict[str, Any]]) -> bool:
    """Whether a slice lies within the last of those that run, once those that ended before it are taken out."""
    start = _ns(event["ts"])
    while running and _end_ns(running[-1]) <= start + _CLOCK_NS and _end_ns(running[-1]) < _end_ns(event):
        ended = running.pop()
        ended["dur"] = min(ended["dur"], max(start - _ns(ended["ts"]), 0) / 1000)
    if running and _end_ns(event) > _end_ns(running[-1]):
        if _end_ns(event) > _end_ns(running[-1]) + _CLOCK_NS:
            return False
        event["dur"] = max(_end_ns(running[-1]) - start, 0) / 1000
    return True


def _ns(time_us: float) -> int:
    return round(1000 * time_us)


def _end_ns(event: dict[str, Any]) -> int:
    return _ns(event["ts"]) + _ns(event["dur"])


def _threads(events: Sequence[dict[str, Any]], kept: Sequence[dict[str, Any]]) -> list[tuple[tuple[Any, Any], str]]:
    """Threads and streams with their names: the main thread, then those of the host, then those of devices."""
    told = {
        (event["pid"], event["tid"]): str(event["args"]["name"]).strip()
        for event in events
        if event.get("ph") == "M" and event.get("name") == "thread_name"
    }
    devices = {event["pid"] for event in kept if event.get("cat") in _ON_DEVICE}
    found = []
    for pid, tid in dict.fromkeys((event["pid"], event["tid"]) for event in kept):
        name = told.get((pid, tid), f"stream {tid}" if pid in devices else f"thread {tid}")
        is_main = pid == tid and pid not in devices
        found.append((pid in devices, not is_main, (pid, tid), f"GPU {pid} {name}" if pid in devices else name))
    return [(place, name) for _, _, place, name in sorted(found, key=lambda each: each[:2])]


def _named(what: str, process: int, thread: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "ts": 0, "args": args}


def _numbered(event: dict[str, Any]) -> bool:
    """Whether an event is of a thread; the profiler's own have words for a process."""
    return "ts" in event and str(event.get("pid", "")).lstrip("-").isdigit() and "tid" in event
