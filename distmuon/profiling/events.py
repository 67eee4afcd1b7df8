"""From the traces of a run's ranks to one table of what happened: a row for each occurrence of each range.

Columns: ``rank``; ``variant``, ``repeat`` and ``step`` of the profiled step; ``kind``; ``name`` as in the trace;
``phase`` and ``bucket``; ``start_us`` since the run's first profiled step began, on the ranks' common clock;
``duration_us``; ``thread`` ("main", another thread of the host, or a stream of the device). Kinds:

- ``step``: the whole profiled step, both optimizers. ``optimizer``: DistMuon's part, torch's own range.
- ``phase``: a phase of a bucket inside it. ``bucket`` is empty outside of buckets.
- ``exchange``: one all-to-all as the thread or stream that carries it saw it, with ``direction`` ("out", "back") and
  the ``bytes`` sent to other ranks. Its time is split in two: ``transfer_us`` is what the exchange took on the rank
  that had to wait least (the minimum over the ranks), the rest is ``waiting_us`` for others.
- ``kernel``, ``memcpy``, ``memset``: device activity of the optimizer, where there is a device.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pandas as pd

from distmuon import ranges
from distmuon.planning.plan import Plan
from distmuon.traces.trace import Activity, Event, Trace
from distmuon.traces.tracefile import TraceError

OPTIMIZER_RANGE = "Optimizer.step#DistMuon.step"

_STEP = re.compile(r"distmuon\.profile/([^/]+)/(\d+)/(\d+)")
_GLOO_EXCHANGE = "gloo:all_to_all"
_COLUMNS = {
    "rank": "int64",
    "variant": "object",
    "repeat": "int64",
    "step": "int64",
    "kind": "object",
    "name": "object",
    "phase": "object",
    "bucket": "object",
    "direction": "object",
    "thread": "object",
    "start_us": "float64",
    "duration_us": "float64",
    "bytes": "Int64",
}


def step_range(variant: str, repeat: int, step: int) -> str:
    """Name of the range around a profiled step."""
    return f"distmuon.profile/{variant}/{repeat}/{step}"


def sent_bytes(plan: Plan) -> dict[tuple[str, str], int]:
    """Bytes that a plan's rank sends to others in each exchange, by bucket and direction."""
    sent = {}
    for stage in plan.stages:
        if exchange := stage.exchange:
            if exchange.out:
                sent[stage.name, "out"] = exchange.bytes_to_others(plan.rank, exchange.out.held_splits)
            sent[stage.name, "back"] = exchange.bytes_to_others(plan.rank, exchange.back.owned_splits)
    return sent


def rank_events(trace: Trace, rank: int, sent: Mapping[str, Mapping[tuple[str, str], int]]) -> pd.DataFrame:
    """The rows of one rank; ``start_us`` is still on its trace's clock.

    Args:
        trace: of the rank.
        rank: its number.
        sent: for each variant what :func:`sent_bytes` gives.
    """
    rows = []
    for step in trace.annotations:
        if match := _STEP.fullmatch(step.name):
            place = {"rank": rank, "variant": match[1], "repeat": int(match[2]), "step": int(match[3])}
            rows += [place | row for row in _step_rows(trace, step, sent[match[1]])]
    return pd.DataFrame(rows, columns=list(_COLUMNS)).astype(_COLUMNS)


def merge_ranks(frames: Sequence[pd.DataFrame], base_ns: Sequence[int]) -> pd.DataFrame:
    """One table of all ranks' rows: on one clock, which starts with the first step, and with exchanges split in two."""
    shifts_us = [(base - min(base_ns)) / 1e3 for base in base_ns]
    pairs = zip(frames, shifts_us, strict=True)
    events = pd.concat([frame.assign(start_us=frame["start_us"] + shift) for frame, shift in pairs], ignore_index=True)
    events["start_us"] -= events["start_us"].min()
    exchanges = events[events["kind"] == "exchange"]
    same_exchange = exchanges.groupby(["variant", "repeat", "step", "bucket", "direction"])["duration_us"]
    events["transfer_us"] = same_exchange.transform("min")
    events["waiting_us"] = events["duration_us"] - events["transfer_us"]
    return events.sort_values(["rank", "start_us"], ignore_index=True)


def _step_rows(trace: Trace, step: Event, sent: Mapping[tuple[str, str], int]) -> Iterator[dict[str, Any]]:
    """The rows of one profiled step on one rank."""
    inside = [event for event in trace.annotations if step.start_us <= event.start_us < step.end_us]
    on_thread = [event for event in inside if step.contains(event)]
    optimizer = next(event for event in on_thread if event.name == OPTIMIZER_RANGE)
    phases = [(event, *parsed) for event in on_thread if (parsed := ranges.parse(event.name))]
    yield _row("step", step)
    yield _row("optimizer", optimizer)
    for event, phase, bucket in phases:
        yield _row("phase", event, phase=phase, bucket=bucket)

    # The k-th exchange that was issued is the k-th that was carried out, and a bucket's first goes out, its second
    # back.
    issues = [(event, bucket) for event, phase, bucket in phases if phase == "all_to_all"]
    carried: list[list[tuple[Event | Activity, str]]]
    if trace.has_device:
        carried = [
            [(item, f"stream {item.stream}") for item in trace.launched_in(event) if item.kind == "collective"]
            for event, _ in issues
        ]
    else:
        carried = [[(event, f"thread {event.tid}")] for event in inside if event.name == _GLOO_EXCHANGE]
    seen: Counter[str] = Counter()
    ways = []
    for _, bucket in issues:
        direction = [direction for name, direction in sent if name == bucket][seen[bucket]]
        seen[bucket] += 1
        ways.append((bucket, direction, sent[bucket, direction]))
    # A rank without anything to send or receive launches nothing on a GPU.
    fewest = [1 if size or not trace.has_device else 0 for _, _, size in ways]
    if len(carried) != len(issues) or any(not few <= len(of) <= 1 for few, of in zip(fewest, carried, strict=True)):
        done = sum(map(len, carried))
        raise TraceError(f"{trace.path}: {len(issues)} exchanges were issued in {step.name}, {done} carried out")
    for (bucket, direction, size), of in zip(ways, carried, strict=True):
        for exchange, thread in of:
            yield _row("exchange", exchange, bucket=bucket, direction=direction, thread=thread, bytes=size)

    named = {id(item): (phase, bucket) for event, phase, bucket in phases for item in trace.launched_in(event)}
    for item in trace.launched_in(optimizer):
        if item.kind != "collective":
            place = dict(zip(("phase", "bucket"), named.get(id(item), ()), strict=False))
            yield _row(item.kind, item, thread=f"stream {item.stream}", bytes=item.bytes, **place)


def _row(kind: str, event: Event | Activity, **more: Any) -> dict[str, Any]:
    common = {"kind": kind, "name": event.name, "start_us": event.start_us, "duration_us": event.duration_us}
    return {"thread": "main", **common, **more}
