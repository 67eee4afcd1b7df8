"""Two traces, or the ranks of two runs, side by side: counts, spans, operators that came and went, and rank skew.

A side is measured first (:func:`measure`): every occurrence of a range on every rank. The tables then give means over
ranks and occurrences. Figures that a trace cannot tell are NaN. Definitions:

- GPU span: from the first activity that the range launched to the end of the last. It is compute (kernels), copies
  (memcpys and memsets with no kernel beside them), exposed exchange (collectives with nothing beside them) and idle.
- CPU span: the range on the host. It is copies (``copy_``, ``_foreach_copy_``), compute (all other operators on the
  range's thread), exposed exchange (gloo's, while no operator runs) and idle.
- Overlap: the share of the exchanges' time in which they were not exposed.
- Waiting: the time of an exchange beyond that of the rank on which it was shortest, which is its transfer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pandas as pd

from distmuon.profiling.intervals import length_us, union
from distmuon.profiling.ranks import RankTraces
from distmuon.profiling.trace import HOST_COPIES, Event, Trace
from distmuon.profiling.tracefile import TraceError

#: Parts of a span, in the order in which figures stack them.
PARTS = ("compute", "copies", "exposed exchange", "idle")
#: Where work is done, and the span that it belongs to.
SPANS = {"device": "GPU span", "host": "CPU span"}

_COUNTS = ("memset", "kernels", "launches", "collectives", "host operators", "host copies")
_COPIES = "memcpy "
_OPTIMIZER = "Optimizer.step#"
_PLACE = ["rank", "occurrence"]
_ENOUGH = 3  # occurrences a side, for a time to count as longer when all of one side's are longer than the other's


@dataclass(frozen=True)
class Measured:
    """What a range did in each of its occurrences, on each rank.

    Attributes:
        label: what to call this side.
        source: where the traces lie, and the range.
        occurrences: a row a rank and occurrence.
        work: a row a rank, occurrence, place ("device", "host") and name: ``calls`` and ``time_ms``.
        exchanges: a row a rank, occurrence and exchange: ``duration_ms``, of which ``waiting_ms``.
        has_device: whether device figures can be told.
    """

    label: str
    source: str
    occurrences: pd.DataFrame
    work: pd.DataFrame
    exchanges: pd.DataFrame
    has_device: bool

    @property
    def ranks(self) -> int:
        """How many ranks there are."""
        return self.occurrences["rank"].nunique()


@dataclass(frozen=True)
class Comparison:
    """Two sides; the first is what the second is compared with.

    Raises:
        ValueError: both have one label.
    """

    a: Measured
    b: Measured

    def __post_init__(self) -> None:
        if self.a.label == self.b.label:
            raise ValueError(f"both sides are called {self.a.label!r}: give them different labels")

    @property
    def sides(self) -> tuple[Measured, Measured]:
        """Both, the first first."""
        return self.a, self.b


def common_range(*runs: RankTraces) -> str:
    """The range to compare when none is asked for: an optimizer's step if there is one, else the longest in total.

    Raises:
        TraceError: no range is in all traces.
    """
    traces = [trace for run in runs for trace in run.traces]
    names = set.intersection(*(set(trace.range_names()) for trace in traces))
    if not names:
        raise TraceError(f"no range is in all of {', '.join(str(run.path) for run in runs)}: name one for each side")
    times = dict.fromkeys(sorted(names), 0.0)
    for event in (event for trace in traces for event in trace.annotations if event.name in names):
        times[event.name] += event.duration_us
    return max(times, key=lambda name: (name.startswith(_OPTIMIZER), times[name]))


def measure(run: RankTraces, range_name: str, label: str) -> Measured:
    """Measure a range in every trace of a run.

    Args:
        run: the traces.
        range_name: as :meth:`distmuon.profiling.trace.Trace.ranges` takes it.
        label: what to call this side.

    Raises:
        TraceError: a trace lacks the range.
    """
    occurrences: list[dict[str, Any]] = []
    work: list[dict[str, Any]] = []
    exchanges: list[dict[str, Any]] = []
    for position, trace in enumerate(run.traces):
        shift_us = run.clock_shifts_us[position] if run.clock_shifts_us else math.nan
        for number, event in enumerate(trace.ranges(range_name)):
            place = dict(zip(_PLACE, (trace.rank or 0, number), strict=True))
            occurrences.append(place | {"start_us": event.start_us + shift_us} | _occurrence(trace, event))
            for where, done in (("device", trace.device_work(event)), ("host", trace.host_work(event))):
                work += [
                    place | {"where": where, "name": each.name, "calls": each.calls, "time_ms": each.time_us / 1e3}
                    for each in done
                ]
            exchanges += [
                place | {"exchange": index, "name": each.name, "duration_ms": each.duration_us / 1e3}
                for index, each in enumerate(trace.exchanges_in(event))
            ]
    table = pd.DataFrame(occurrences)
    for copies in [name for name in table if name.startswith(_COPIES)]:  # a direction that an occurrence lacks: none
        table[copies] = table[copies].fillna(0.0).mask(table["kernels"].isna())
    return Measured(
        label,
        f"{range_name} in {run.path}",
        table.astype({name: "float64" for name in table.columns.drop(["rank", "occurrence"])}),
        pd.DataFrame(work, columns=[*_PLACE, "where", "name", "calls", "time_ms"]),
        _with_waiting(pd.DataFrame(exchanges, columns=[*_PLACE, "exchange", "name", "duration_ms"]), len(run.traces)),
        run.has_device,
    )


def sides_table(found: Comparison) -> pd.DataFrame:
    """What is compared: a row a side."""
    return pd.DataFrame(
        {
            "side": side.label,
            "range and traces": side.source,
            "ranks": side.ranks,
            "occurrences": len(side.occurrences),
            "device": "yes" if side.has_device else "n/a: none recorded",
        }
        for side in found.sides
    )


def counts_table(found: Comparison) -> pd.DataFrame:
    """Copies by direction, launches, collectives and host operators: means over ranks and occurrences."""
    copies = {name: None for side in found.sides for name in side.occurrences if name.startswith(_COPIES)}
    return _side_by_side(found, [*(copies or ["memcpy"]), *_COUNTS])


def spans_table(found: Comparison) -> pd.DataFrame:
    """Spans and where their time goes, exchanges and how much of them is hidden: means over ranks and occurrences."""
    rows = [span + part for span in SPANS.values() for part in (" (ms)", *(f": {part} (ms)" for part in PARTS))]
    return _side_by_side(found, [*rows, "exchange (ms)", "overlap"])


def work_table(found: Comparison) -> pd.DataFrame:
    """Operators on the host, kernels and copies on the device: calls and time an occurrence, on each side.

    The last column says what became of a row: "came", "went", "grew" or "shrank" (in calls), "longer" or "shorter"
    (as often, but in all of three or more occurrences), "same", "n/a" (a side cannot tell). Rows that vanished are
    kept. Largest change of time first.
    """
    a, b = (side.work.groupby(["where", "name"])[["calls", "time_ms"]].sum() for side in found.sides)
    a, b = (sums / len(side.occurrences) for sums, side in zip((a, b), found.sides, strict=True))
    names = a.index.union(b.index)
    times = [_times_by_occurrence(side.work) for side in found.sides]
    rows = []
    for where, name in names:
        known = [where == "host" or side.has_device for side in found.sides]
        figures = [
            sums.loc[(where, name)].tolist()
            if (where, name) in sums.index
            else [0.0, 0.0]
            if can_tell
            else [math.nan] * 2
            for sums, can_tell in zip((a, b), known, strict=True)
        ]
        (calls_a, time_a), (calls_b, time_b) = figures
        verdict = _verdict(calls_a, calls_b, *(values.get((where, name), []) for values in times))
        rows.append((where, name, calls_a, calls_b, time_a, time_b, time_b - time_a, verdict))
    labels = [side.label for side in found.sides]
    columns = ["where", "name", *(f"calls, {label}" for label in labels), *(f"{label} (ms)" for label in labels)]
    table = pd.DataFrame(rows, columns=[*columns, "change (ms)", "verdict"])
    return table.sort_values("change (ms)", key=abs, ascending=False, ignore_index=True)


def ranks_table(found: Comparison) -> pd.DataFrame:
    """A row a side and rank: how long after the first rank it starts, its spans, its exchanges, its waiting in them.

    NaN where there is no other rank, or no common clock, or where ranks differ in their occurrences or exchanges.
    """
    rows = []
    for side in found.sides:
        started = start_offsets_ms(side)
        for rank, mine in side.occurrences.groupby("rank"):
            exchanges = side.exchanges[side.exchanges["rank"] == rank]
            rows.append(
                {
                    "side": side.label,
                    "rank": rank,
                    "starts after the first (ms)": started.get(rank, math.nan),
                    "CPU span (ms)": mine["CPU span (ms)"].mean(),
                    "GPU span (ms)": mine["GPU span (ms)"].mean(),
                    "exchanges (ms)": exchanges["duration_ms"].sum() / len(mine),
                    "of it waiting (ms)": exchanges["waiting_ms"].sum(skipna=False) / len(mine)
                    if side.ranks > 1
                    else math.nan,
                }
            )
    return pd.DataFrame(rows)


def start_offsets_ms(side: Measured) -> dict[int, float]:
    """By rank, how long after the first rank it starts an occurrence, on average; empty where that cannot be told."""
    counts = side.occurrences.groupby("rank").size()
    if side.ranks < 2 or counts.nunique() > 1 or side.occurrences["start_us"].isna().any():
        return {}
    first = side.occurrences.groupby("occurrence")["start_us"].transform("min")
    return ((side.occurrences["start_us"] - first) / 1e3).groupby(side.occurrences["rank"]).mean().to_dict()


def ranges_table(a: RankTraces, b: RankTraces) -> pd.DataFrame:
    """The ranges of two runs and how often each occurs on a rank."""
    sides: list[dict[str, float]] = []
    for run in (a, b):
        counts: dict[str, float] = {}
        for trace in run.traces:
            for name, count in trace.range_names().items():
                counts[name] = counts.get(name, 0.0) + count / len(run.traces)
        sides.append(counts)
    names = dict.fromkeys([*sides[0], *sides[1]])
    return pd.DataFrame({"range": name, "A": sides[0].get(name, 0.0), "B": sides[1].get(name, 0.0)} for name in names)


def tables(found: Comparison) -> dict[str, pd.DataFrame]:
    """All tables, by what they hold."""
    return {
        "sides": sides_table(found),
        "counts": counts_table(found),
        "spans": spans_table(found),
        "operators": work_table(found),
        "ranks": ranks_table(found),
    }


def _occurrence(trace: Trace, event: Event) -> dict[str, float | None]:
    """The figures of one occurrence, by the names that tables use; None for what the trace cannot tell."""
    told = trace.occurrence(event)
    device, host = trace.device_parts_us(event), trace.host_parts_us(event)
    exposed_us = (device or {}).get("exposed exchange") if trace.has_device else host["exposed exchange"]
    exchange_us = length_us(union(each.interval for each in trace.exchanges_in(event)))
    if trace.has_device:
        del host["exposed exchange"]  # what the host waits for is on the device
    operators = trace.operators_in(event)
    figures: dict[str, float | None] = {
        "CPU span (ms)": told.cpu_span_ms,
        "GPU span (ms)": told.gpu_span_ms,
        "memset": told.memset,
        "kernels": told.kernels,
        "launches": told.launches,
        "collectives": told.collectives,
        "host operators": len(operators),
        "host copies": _outermost(each for each in operators if each.name in HOST_COPIES),
        "exchange (ms)": exchange_us / 1e3,
        "overlap": None if exposed_us is None or not exchange_us else 1 - exposed_us / exchange_us,
    }
    figures |= {f"memcpy {direction}": count for direction, count in (told.memcpy or {}).items()}
    for span, parts in ((SPANS["device"], device), (SPANS["host"], host)):
        figures |= {f"{span}: {part} (ms)": time_us / 1e3 for part, time_us in (parts or {}).items()}
    return figures


def _outermost(events: Iterable[Event]) -> int:
    """How many of ``events``, of one thread and in order of start, lie in none of the others."""
    count, end_us = 0, -math.inf
    for event in events:
        if event.start_us >= end_us:
            count, end_us = count + 1, event.end_us
    return count


def _with_waiting(exchanges: pd.DataFrame, ranks: int) -> pd.DataFrame:
    """With ``waiting_ms``; NaN where not every rank has the same exchanges in the same order."""
    same = exchanges.groupby(["occurrence", "exchange"])
    alone = (same["rank"].transform("size") < ranks) | (same["name"].transform("nunique") > 1) | (ranks < 2)
    waiting = exchanges["duration_ms"] - same["duration_ms"].transform("min")
    return exchanges.assign(waiting_ms=waiting.mask(alone))


def _side_by_side(found: Comparison, names: Iterable[str]) -> pd.DataFrame:
    """A row a figure: its mean on each side, and the change as a difference and as a fraction."""
    rows = []
    for name in names:
        a, b = (side.occurrences[name].mean() if name in side.occurrences else math.nan for side in found.sides)
        share = b / a - 1 if a else math.nan
        rows.append({"figure": name, found.a.label: a, found.b.label: b, "difference": b - a, "change": share})
    return pd.DataFrame(rows)


def _times_by_occurrence(work: pd.DataFrame) -> dict[tuple[str, str], list[float]]:
    """The time of each kind of work in each occurrence, as a mean over ranks."""
    means = work.groupby(["where", "name", "occurrence"])["time_ms"].mean()
    return means.groupby(["where", "name"]).agg(list).to_dict()


def _verdict(calls_a: float, calls_b: float, times_a: list[float], times_b: list[float]) -> str:
    if math.isnan(calls_a + calls_b):
        return "n/a"
    if not calls_a or not calls_b:
        return "came" if calls_b else "went"
    if not math.isclose(calls_a, calls_b):
        return "grew" if calls_b > calls_a else "shrank"
    if min(len(times_a), len(times_b)) >= _ENOUGH:
        if min(times_b) > max(times_a):
            return "longer"
        if max(times_b) < min(times_a):
            return "shorter"
    return "same"
