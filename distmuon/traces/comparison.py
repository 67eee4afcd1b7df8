"""Measure a range in two traces, or in those of the ranks of two runs, to be laid side by side.

Every occurrence is measured on every rank; :mod:`distmuon.studies.comparison_tables` gives means over them. Figures
that a trace cannot tell are NaN. Definitions:

- GPU span: from the first activity that the range launched to the end of the last. It is compute (kernels), copies
  (memcpys and memsets with no kernel beside them), exposed exchange (collectives with nothing beside them) and idle.
- CPU span: the range on the host. It is copies (``copy_``, ``_foreach_copy_``), compute (all other operators on the
  range's thread), exposed exchange (gloo's, while no operator runs) and idle.
- Overlap: the share of the exchanges' time in which they were not exposed.
- Waiting: the time of an exchange beyond that of the rank on which it was shortest, which is its transfer.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from distmuon.richtext import Shown, counted
from distmuon.traces.intervals import length_us, union
from distmuon.traces.ranks import RankTraces
from distmuon.traces.trace import HOST_COPIES, Event, Trace
from distmuon.traces.tracefile import TraceError

#: Parts of a span, in the order in which figures stack them.
PARTS = ("compute", "copies", "exposed exchange", "idle")
#: Where work is done, and the span that it belongs to.
SPANS = {"device": "GPU span", "host": "CPU span"}

#: What the names of counts of copies begin with; their direction follows.
COPIES = "memcpy "
_OPTIMIZER = "Optimizer.step#"
#: Of a measured side.
_FRAMES = ("occurrences", "work", "exchanges")
_PLACE = ["rank", "occurrence"]


@dataclass(frozen=True)
class Measured:
    """What a range did in each of its occurrences, on each rank.

    Attributes:
        label: what to call this side.
        range_name: the range.
        traces: the name of the trace, or of the folder with the ranks' and of the one that holds it.
        occurrences: a row a rank and occurrence.
        work: a row a rank, occurrence, place ("device", "host") and name: ``calls`` and ``time_ms``.
        exchanges: a row a rank, occurrence and exchange: ``duration_ms``, of which ``waiting_ms``.
        has_device: whether device figures can be told.
    """

    label: str
    range_name: str
    traces: str
    occurrences: pd.DataFrame
    work: pd.DataFrame
    exchanges: pd.DataFrame
    has_device: bool

    @property
    def ranks(self) -> int:
        """How many ranks there are."""
        return self.occurrences["rank"].nunique()

    def told(self, where: str) -> int:
        """Of how many rows of ``occurrences`` the traces tell all that was done on the "device" or the "host"."""
        if where == "host":
            return len(self.occurrences)
        return int(self.occurrences["kernels"].notna().sum())


@dataclass(frozen=True, repr=False)
class Comparison(Shown):
    """Two sides; the first is what the second is compared with. Prints as a table of their means.

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

    def _line(self) -> str:
        a, b = (
            f"{side.label} ({len(side.occurrences) / side.ranks:g} x {side.range_name} on "
            f"{counted(side.ranks, 'rank', 'ranks')})"
            for side in self.sides
        )
        return f"{b} against {a}"

    def _table(self) -> tuple[Sequence[str], list[Sequence[object]]]:
        means = pd.DataFrame({side.label: side.occurrences.mean() for side in self.sides})
        means = means.drop(index=[*_PLACE, "start_us"]).dropna(how="all")
        rows = means.astype(object).where(means.notna(), None)
        return ("figure", *means.columns), list(rows.itertuples(name=None))

    def write(self, folder: Path) -> None:
        """Write ``comparison.json``, and of each side, "a" and "b", occurrences, work and exchanges as parquet."""
        folder.mkdir(parents=True, exist_ok=True)
        sides = {}
        for name, side in zip("ab", self.sides, strict=True):
            for frame in _FRAMES:
                getattr(side, frame).to_parquet(folder / f"{name}.{frame}.parquet", index=False)
            sides[name] = {field: getattr(side, field) for field in ("label", "range_name", "traces", "has_device")}
        (folder / "comparison.json").write_text(json.dumps(sides, indent=1) + "\n")

    @classmethod
    def read(cls, folder: Path | str) -> Comparison:
        """Read what :meth:`write` left in ``folder``."""
        folder = Path(folder)
        sides = []
        for name, kept in json.loads((folder / "comparison.json").read_text()).items():
            frames = {frame: pd.read_parquet(folder / f"{name}.{frame}.parquet") for frame in _FRAMES}
            sides.append(Measured(**kept, **frames))
        return cls(*sides)


def compare(
    a: Path | str | None,
    b: Path | str | None = None,
    range_a: str | None = None,
    range_b: str | None = None,
    *,
    labels: tuple[str, str] = ("A", "B"),
    partial: bool = False,
) -> Comparison:
    """Measure both sides.

    Args:
        a: a trace, or a folder with those of a run's ranks.
        b: the same, of what is compared with it; None for another range of ``a``.
        range_a: a range's name or pattern (:meth:`distmuon.traces.trace.Trace.ranges`); None for
            :func:`common_range`.
        range_b: the same for ``b``; None for that of ``a``.
        labels: what to call the sides.
        partial: take a folder in which ranks are missing as it is.

    Raises:
        TraceError: a file is not a trace, ranks are missing, or a range is.
        ValueError: ``a`` is None, or the sides are the same.
    """
    if a is None:
        raise ValueError("a is not given: name a trace, or a folder with the traces of a run's ranks")
    first = RankTraces(a, partial=partial)
    second = first if b is None else RankTraces(b, partial=partial)
    range_a = range_a or common_range(first, second)
    range_b = range_b or range_a
    if b is None and range_a == range_b:
        raise ValueError(f"range {range_a!r} of {a} would be compared with itself: name other traces, or another range")
    return Comparison(measure(first, range_a, labels[0]), measure(second, range_b, labels[1]))


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
        range_name: as :meth:`distmuon.traces.trace.Trace.ranges` takes it.
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
    for copies in [name for name in table if name.startswith(COPIES)]:  # a direction that an occurrence lacks: none
        table[copies] = table[copies].fillna(0.0).mask(table["kernels"].isna())
    return Measured(
        label,
        range_name,
        str(Path(*run.path.parts[-2:])) if run.path.is_dir() else run.path.name,
        table.astype({name: "float64" for name in table.columns.drop(["rank", "occurrence"])}),
        pd.DataFrame(work, columns=[*_PLACE, "where", "name", "calls", "time_ms"]),
        _with_waiting(pd.DataFrame(exchanges, columns=[*_PLACE, "exchange", "name", "duration_ms"]), len(run.traces)),
        run.has_device,
    )


def _occurrence(trace: Trace, event: Event) -> dict[str, float | None]:
    """The figures of one occurrence, by the names that tables use; None for what the trace cannot tell."""
    told = trace.occurrence(event)
    device, host = trace.device_parts_us(event), trace.host_parts_us(event)
    exposed_us = (device or {}).get("exposed exchange") if trace.has_device else host["exposed exchange"]
    exchanges = trace.exchanges_in(event)
    exchange_us = length_us(union(each.interval for each in exchanges))
    # A trace that ends too early has not all of them, one of the host of a run on GPUs has none of them.
    untold = told.kernels is None if trace.has_device else bool(told.collectives and not exchanges)
    if trace.has_device or untold:
        del host["exposed exchange"]  # what the host waits for is on the device
    hidden = None if untold or exposed_us is None or not exchange_us else 1 - exposed_us / exchange_us
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
        "exchange (ms)": None if untold else exchange_us / 1e3,
        "overlap (%)": None if hidden is None else 100 * hidden,
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
