"""One trace of all ranks for Perfetto: a process a rank, on a common clock.

Events keep their names, so that buckets and phases are found as the ranges name them. Processes and threads get numbers
of their own, and so do the ids that join a launch to what it launched: two ranks may have used the same.
"""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from distmuon.profiling.ranks import RankTraces
from distmuon.profiling.tracefile import TraceError, read_document

_THREADS = 10_000  # numbers for each rank's threads: a rank's process has the first of them, as its main thread
_ON_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset", "gpu_user_annotation"}
_FLOWS = {"s", "t", "f"}
_KEPT = {"X", "i", "C", *_FLOWS}


def merge_traces(run: RankTraces, path: Path) -> None:
    """Write the traces of a run's ranks as one.

    The result is a trace like any other, for :class:`distmuon.profiling.trace.Trace` too.

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
    new_ids: dict[Any, int] = {}
    for event in kept:
        event |= {"pid": process, "tid": numbers[event["pid"], event["tid"]], "ts": round(event["ts"] + shift_us, 3)}
        if event["ph"] in _FLOWS:
            event["id"] = new_ids.setdefault(event["id"], next(ids))
        elif "correlation" in (args := event.get("args") or {}):
            args["correlation"] = new_ids.setdefault(args["correlation"], next(ids))
        yield event


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
