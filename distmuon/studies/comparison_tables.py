"""Two measured sides as tables and sentences: means over ranks and occurrences, NaN for what cannot be told."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

import pandas as pd

from distmuon.names import shorten
from distmuon.traces.comparison import COPIES, PARTS, SPANS, Comparison, Measured
from distmuon.traces.ranks import RankTraces

#: What may become of an operator.
VERDICTS = ("came", "went", "grew", "shrank", "longer", "shorter", "same")

#: How to write changes as fractions, and times.
CHANGE, TIME = "{:+z.1%}", "{:,.3f}"

_COUNTS = ("memset", "kernels", "launches", "collectives", "host operators", "host copies")
_ENOUGH = 3  # occurrences a side, for a time to count as longer when all of one side's are longer than the other's


def sides_table(found: Comparison) -> pd.DataFrame:
    """What is compared: a row a side."""
    return pd.DataFrame(
        {
            "side": side.label,
            "range": side.range_name,
            "traces": side.traces,
            "ranks": side.ranks,
            "occurrences a rank": len(side.occurrences) / side.ranks,
            "device": "yes" if side.has_device else None,
        }
        for side in found.sides
    )


def counts_table(found: Comparison) -> pd.DataFrame:
    """Copies by direction, launches, collectives and host operators: means over ranks and occurrences."""
    copies = {name: None for side in found.sides for name in side.occurrences if name.startswith(COPIES)}
    return _side_by_side(found, [*(copies or ["memcpy"]), *_COUNTS])


def spans_table(found: Comparison) -> pd.DataFrame:
    """Spans and where their time goes, exchanges and how much of them is hidden: means over ranks and occurrences."""
    rows = [span + part for span in SPANS.values() for part in (" (ms)", *(f": {part} (ms)" for part in PARTS))]
    return _side_by_side(found, [*rows, "exchange (ms)", "overlap (%)"])


def work_table(found: Comparison) -> pd.DataFrame:
    """Operators on the host, kernels and copies on the device: calls and time an occurrence, on each side.

    The verdict says what became of a row: "came", "went", "grew" or "shrank" (in calls), "longer" or "shorter"
    (as often, but in all of three or more occurrences), "same", None (a side cannot tell). Rows that vanished are
    kept. Largest change of time first.
    """
    a, b = (_work_of_an_occurrence(side) for side in found.sides)
    names = a.index.union(b.index)
    times = [_times_by_occurrence(side.work) for side in found.sides]
    rows = []
    for where, name in names:
        absent = [0.0 if side.told(where) else math.nan for side in found.sides]
        (calls_a, time_a), (calls_b, time_b) = (
            sums.loc[(where, name)] if (where, name) in sums.index else (nothing, nothing)
            for sums, nothing in zip((a, b), absent, strict=True)
        )
        verdict = _verdict(calls_a, calls_b, *(values.get((where, name), []) for values in times))
        rows.append((where, name, verdict, calls_a, calls_b, time_a, time_b, time_b - time_a))
    labels = [side.label for side in found.sides]
    columns = [
        "where",
        "name",
        "verdict",
        *(f"calls, {label}" for label in labels),
        *(f"{label} (ms)" for label in labels),
    ]
    table = pd.DataFrame(rows, columns=[*columns, "change (ms)"])
    return table.sort_values("change (ms)", key=abs, ascending=False, ignore_index=True)


def _work_of_an_occurrence(side: Measured) -> pd.DataFrame:
    """Calls and time by place and name: means over the occurrences of which the trace tells what was done there."""
    sums = side.work.groupby(["where", "name"])[["calls", "time_ms"]].sum()
    return sums.div([side.told(where) for where in sums.index.get_level_values("where")], axis="index")


def ranks_table(found: Comparison) -> pd.DataFrame:
    """A row a side and rank: how long after the first rank it starts, its spans, its exchanges, its waiting in them.

    NaN where there is no other rank, or no common clock, or where ranks differ in their occurrences or exchanges.
    """
    rows = []
    for side in found.sides:
        started = start_offsets_ms(side)
        for rank, mine in side.occurrences.groupby("rank"):
            exchanges = side.exchanges[side.exchanges["rank"] == rank]
            known = mine["exchange (ms)"].notna().all()
            rows.append(
                {
                    "side": side.label,
                    "rank": rank,
                    "starts after the first (ms)": started.get(rank, math.nan),
                    "CPU span (ms)": mine["CPU span (ms)"].mean(),
                    "GPU span (ms)": mine["GPU span (ms)"].mean(),
                    "exchanges (ms)": exchanges["duration_ms"].sum() / len(mine) if known else math.nan,
                    "of it waiting (ms)": exchanges["waiting_ms"].sum(skipna=False) / len(mine)
                    if known and side.ranks > 1
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


def _side_by_side(found: Comparison, names: Iterable[str]) -> pd.DataFrame:
    """A row a figure: its mean on each side, and the change as a difference and as a fraction."""
    rows = []
    for name in names:
        a, b = (_mean(side, name) for side in found.sides)
        share = b / a - 1 if a else math.nan
        rows.append({"figure": name, found.a.label: a, found.b.label: b, "difference": b - a, "change": share})
    return pd.DataFrame(rows)


def _mean(side: Measured, name: str) -> float:
    if name in side.occurrences:
        return side.occurrences[name].mean()
    # A side with a device and without such a copy has made none.
    return 0.0 if name.startswith(COPIES.strip()) and side.told("device") else math.nan


def _times_by_occurrence(work: pd.DataFrame) -> dict[tuple[str, str], list[float]]:
    """The time of each kind of work in each occurrence, as a mean over ranks."""
    means = work.groupby(["where", "name", "occurrence"])["time_ms"].mean()
    return means.groupby(["where", "name"]).agg(list).to_dict()


def _verdict(calls_a: float, calls_b: float, times_a: list[float], times_b: list[float]) -> str | None:
    if math.isnan(calls_a + calls_b):
        return None
    if not calls_a or not calls_b:
        return "came" if calls_b else "went"
    if not math.isclose(calls_a, calls_b):
        return "grew" if calls_b > calls_a else "shrank"
    enough = min(len(times_a), len(times_b)) >= _ENOUGH
    return (_apart(times_a, times_b) if enough else "") or "same"


def short_work_table(found: Comparison, rows: int) -> pd.DataFrame:
    """The first ``rows`` of :func:`work_table`, and beyond them every row that came or went."""
    table = work_table(found)
    return table[(table.index < rows) | table["verdict"].isin(["came", "went"])].reset_index(drop=True)


def short_name(name: str) -> str:
    """The name of an operator or kernel, short enough for a page: a C++ kernel's without namespaces and arguments."""
    for left_out in ("void ", "at::native::", "(anonymous namespace)::"):
        name = name.replace(left_out, "")
    return shorten(re.sub(r"(?<=>)\([^>]*\)$", "", name), 48)


def spans_finding(found: Comparison) -> str:
    """How the spans differ, and whether that is more than they differ among themselves."""
    told = []
    for span in reversed(SPANS.values()):
        name = f"{span} (ms)"
        a, b = (_mean(side, name) for side in found.sides)
        if math.isnan(a + b):
            told.append(f"{span}: n/a, as {_why_untold(found)}.")
        else:
            told.append(f"{span}: {b:,.2f} ms where {found.a.label} takes {a:,.2f} ms ({_change(found, name)}).")
    return " ".join(told)


def counts_finding(found: Comparison) -> str:
    """Which counts differ, which are equal, and which cannot be told."""
    changed, equal, unknown = [], [], []
    for name, a, b, difference, change in counts_table(found).itertuples(index=False, name=None):
        if math.isnan(difference):
            unknown.append(name)
        elif math.isclose(a, b):
            equal.append(name)
        else:
            share = "" if math.isnan(change) else f", {change:+z.1%}"
            changed.append(f"{b:,g} {name} ({a:,g} in {found.a.label}{share})")
    parts = [f"an occurrence makes {', '.join(changed)}"] if changed else []
    parts += [f"as many {', '.join(equal)} on both sides"] if equal else []
    parts += [f"n/a: {', '.join(unknown)}"] if unknown else []
    return _sentence("; ".join(parts))


def work_finding(found: Comparison) -> str:
    """What became of the operators, and which changed most."""
    table = work_table(found)
    if table.empty:
        return "No operators, kernels or copies are recorded in the range, on either side."
    counts = table["verdict"].value_counts()
    told = ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS[:6] if counts.get(verdict))
    sentence = f"Of {len(table)} operators, kernels and copies, {told or 'none came, went or changed in number'}"
    first = table.iloc[0]
    if first["change (ms)"]:
        sentence += f"; the time of {shorten(first['name'], 60)} changes most, by {first['change (ms)']:+,.2f} ms"
    return sentence + "."


def skew_finding(found: Comparison) -> str:
    """How far apart the ranks start, and how long they wait for each other."""
    table = ranks_table(found)
    told = []
    for side in found.sides:
        mine = table[table["side"] == side.label]
        late, waiting = mine["starts after the first (ms)"], mine["of it waiting (ms)"]
        parts = [f"the last rank starts {late.max():,.2f} ms after the first"] if late.notna().all() else []
        parts += [f"a rank waits {waiting.mean():,.2f} ms for others"] if waiting.notna().all() else []
        if parts:
            told.append(f"in {side.label} {' and '.join(parts)}")
        else:
            told.append(f"rank skew of {side.label} is n/a" + (", it has one rank" if side.ranks == 1 else ""))
    return _sentence("; ".join(told))


def key_figures(found: Comparison) -> dict[str, float]:
    """What many comparisons are compared by: of each side what it launches and how long it takes."""
    tables = pd.concat([counts_table(found), spans_table(found)]).set_index("figure")
    names = ("launches", "collectives", "host operators", "GPU span (ms)", "CPU span (ms)", "exchange (ms)")
    labels = {"a": found.a.label, "b": found.b.label}
    return {f"{name}, {side}": float(tables.loc[name, label]) for name in names for side, label in labels.items()}


def conclusion(found: Comparison) -> str:
    """The paragraph that a reader should take away."""
    sizes = dict.fromkeys(
        f"{len(side.occurrences) / side.ranks:g} occurrences on {side.ranks} rank{'s' if side.ranks > 1 else ''}"
        for side in found.sides
    )
    start = f"{found.b.label} against {found.a.label}, means over {' and '.join(sizes)}"
    sentences = [_sentence(start), spans_finding(found), counts_finding(found)]
    overlaps = [_mean(side, "overlap (%)") for side in found.sides]
    if not math.isnan(sum(overlaps)):
        shares = [f"{share:.0f}% in {side.label}" for share, side in zip(overlaps, found.sides, strict=True)]
        sentences.append(f"Of the exchanges' time, {' and '.join(shares)} is hidden behind other work.")
    sentences.append(work_finding(found))
    if any(side.ranks > 1 for side in found.sides):
        sentences.append(skew_finding(found))
    return " ".join(sentences)


def _change(found: Comparison, name: str) -> str:
    """How a time changed, and whether all occurrences say so."""
    times = [side.occurrences.groupby("occurrence")[name].mean().tolist() for side in found.sides]
    share = f"{_mean(found.b, name) / _mean(found.a, name) - 1:+z.1%}"
    if min(map(len, times)) < _ENOUGH:
        return f"{share}, too few occurrences to tell from noise"
    return f"{share}, {_apart(*times) or 'within what occurrences differ by'}"


def _apart(a: list[float], b: list[float]) -> str:
    """Whether all of ``b`` are longer or shorter than all of ``a``."""
    return "longer" if min(b) > max(a) else "shorter" if max(b) < min(a) else ""


def _why_untold(found: Comparison) -> str:
    if without := [side.label for side in found.sides if not side.has_device]:
        return f"{' and '.join(without)} recorded no device"
    return "a side launched nothing, or its trace cannot tell all that it launched"


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."
