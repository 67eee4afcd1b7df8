"""The ablation: from one contestant to another a switch at a time; what each changes, as tables and sentences."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pandas as pd

from distmuon.buffers import peak_bytes
from distmuon.counting.contestants import Contestant, labels
from distmuon.counting.counter import Counts
from distmuon.counting.launches import LaunchCounts, count_launches
from distmuon.counting.rules import Activity
from distmuon.profiling.host import HostSide
from distmuon.profiling.noise import Change, paired_change
from distmuon.profiling.results import Run
from distmuon.richtext import NBSP, Shown
from distmuon.studies.profile_tables import SOURCE_GROUPS, change_of
from distmuon.workloads.storage import plan_for

#: Groups of sources under short names, for tables that have little room.
BRIEFLY = {
    "products": ("matrix products",),
    "their bias": ("bias copies of matrix products",),
    "rest of N.-S.": ("rest of Newton-Schulz",),
    "elementwise": ("momentum, decay, update",),
    "packing": ("pack", "unpack on the owner", "pack on the owner", "unpack into the update"),
}

COUNTED = ("async_copies", "launches", "collectives", "wire_bytes")


@dataclass(frozen=True, repr=False)
class Ablation(Shown):
    """A ladder of contestants, and what was found of each. Prints as its key figures.

    Attributes:
        counts: by contestant, in the order of the ladder.
        host: the host side of small steps.
        run: the profile of real ranks.
        sweep: of copies, as of :func:`distmuon.profiling.sweep.sweep_copies`.

    Raises:
        ValueError: they are not of the same contestants, two or more.
    """

    counts: Mapping[str, LaunchCounts]
    host: Sequence[HostSide]
    run: Run
    sweep: pd.DataFrame

    def __post_init__(self) -> None:
        ladder = list(self.counts)
        if len(ladder) < 2:
            raise ValueError(f"an ablation compares two contestants or more, not {ladder}: turn a switch")
        for others in ([each.contestant for each in self.host], self.run.variants):
            if others != ladder:
                raise ValueError(f"an ablation of {ladder} can't take figures of {others}")

    def _line(self) -> str:
        return f"{len(self.counts)} contestants, {self.labels[0]} to {self.labels[-1]}"

    def _table(self) -> tuple[Sequence[str], list[Sequence[object]]]:
        return ("figure", "value"), list(key_figures(self).items())

    @property
    def labels(self) -> list[str]:
        """What each contestant adds to the one before."""
        return labels(list(self.counts))

    def write(self) -> None:
        """Write ``counts.json``, ``host.json`` and ``sweep.parquet`` beside the profile."""
        folder = self.run.folder
        counts = {text: _counts_to_json(text, counted) for text, counted in self.counts.items()}
        (folder / "counts.json").write_text(json.dumps(counts, indent=1) + "\n")
        (folder / "host.json").write_text(json.dumps([asdict(each) for each in self.host], indent=1) + "\n")
        self.sweep.to_parquet(folder / "sweep.parquet", index=False)

    @classmethod
    def read(cls, folder: Path | str) -> Ablation:
        """Read what :meth:`write` left in the folder of the profile."""
        folder = Path(folder)
        counts = json.loads((folder / "counts.json").read_text())
        host = json.loads((folder / "host.json").read_text())
        return cls(
            {text: _counts_from_json(counted) for text, counted in counts.items()},
            [HostSide(**each | {"times_ms": tuple(each["times_ms"])}) for each in host],
            Run.read(folder),
            pd.read_parquet(folder / "sweep.parquet"),
        )


def _counts_to_json(text: str, counted: LaunchCounts) -> dict[str, Any]:
    ranks = [
        {
            "by_source": {source: activity._asdict() for source, activity in counts.by_source.items()},
            "collectives": counts.collectives,
            "wire_bytes": counts.wire_bytes,
            "peak_buffer_bytes": peak,
        }
        for counts, peak in zip(counted.per_rank, _peaks(text, counted), strict=True)
    ]
    return {"question": counted.question, "per_rank": ranks}


def _counts_from_json(content: Mapping[str, Any]) -> LaunchCounts:
    ranks = (
        Counts(
            {source: Activity(**activity) for source, activity in rank["by_source"].items()},
            collectives=rank["collectives"],
            wire_bytes=rank["wire_bytes"],
        )
        for rank in content["per_rank"]
    )
    return LaunchCounts(content["question"], tuple(ranks))


def count_ladder(contestants: Sequence[str], workload: str, ranks: int, ep: int) -> dict[str, LaunchCounts]:
    """Launches of each contestant on each rank, by contestant."""
    counts = {}
    for text in contestants:
        counts[text] = count_launches(workload, ranks, ep, **Contestant(text).options(buckets="published"))
    return counts


def sources_table(counts: Mapping[str, LaunchCounts]) -> pd.DataFrame:
    """Launches a rank and step: a row a contestant, a column a group of sources."""
    rows = []
    for label, counted in zip(labels(list(counts)), counts.values(), strict=True):
        by_source = {row["source"]: row["launches"] for row in counted.by_source()}
        groups = {
            name: sum(by_source.get(source, 0.0) for source in members) for name, members in SOURCE_GROUPS.items()
        }
        rows.append({"switch": label, "total": counted.mean("launches"), **groups})
    return pd.DataFrame(rows)


def brief(sources: pd.DataFrame) -> pd.DataFrame:
    """What :func:`sources_table` gives in as few columns as a page has room for: all copies to and from buffers are
    one.
    """
    return pd.DataFrame(
        {
            "switch": sources["switch"],
            "launches": sources["total"],
            **{name: sources[list(groups)].sum(axis="columns") for name, groups in BRIEFLY.items()},
        }
    )


def counts_table(counts: Mapping[str, LaunchCounts]) -> pd.DataFrame:
    """A row a contestant: counts, means over ranks, and the largest peak of buffers on a rank."""
    rows = []
    for label, (text, counted) in zip(labels(list(counts)), counts.items(), strict=True):
        copies, launches, collectives, sent = (counted.mean(value) for value in COUNTED)
        rows.append(
            {
                "switch": label,
                "async copies": copies,
                "launches": launches,
                "collectives": collectives,
                "sent (KiB)": sent / 1024,
                "peak buffers (MiB)": max(_peaks(text, counted)) / 2**20,
            }
        )
    return pd.DataFrame(rows)


def times_table(found: Ablation) -> pd.DataFrame:
    """A row a contestant: operators dispatched, host time of a small step, time of a real one, against the first."""
    rows = []
    for label, host, variant in zip(found.labels, found.host, found.run.variants, strict=True):
        rows.append(
            {
                "switch": label,
                "operators": host.without_views,
                "and views": host.views,
                "host time (ms)": host.median_ms,
                "against the first": _told(host_change(found, host)),
                "step time (ms)": found.run.steps().groupby("variant")["cpu_span_ms"].mean()[variant],
                "against the first ": _told(step_change(found, variant)),
            }
        )
    return pd.DataFrame(rows)


def changes(found: Ablation) -> pd.DataFrame:
    """For the figure: a row a contestant and kind of time ("host time", "step time"): change against the first."""
    rows = []
    for label, host in zip(found.labels, found.host, strict=True):
        for kind, change in (
            ("host time", host_change(found, host)),
            ("step time", step_change(found, host.contestant)),
        ):
            figures = (change.median, change.low, change.high) if change else (0.0, 0.0, 0.0)
            rows.append({"label": label, "kind": kind, **dict(zip(("median", "low", "high"), figures, strict=True))})
    return pd.DataFrame(rows)


def host_change(found: Ablation, host: HostSide) -> Change | None:
    """How its host time differs from the first contestant's; None for that one."""
    first = found.host[0]
    return None if host is first else paired_change(first.times_ms, host.times_ms)


def step_change(found: Ablation, contestant: str) -> Change | None:
    """How its step time differs from the first contestant's; None for that one."""
    return None if contestant == found.run.variants[0] else change_of(found.run, contestant, "cpu_span_ms")


def key_figures(found: Ablation) -> dict[str, float]:
    """What many ablations are compared by: the first contestant and the last."""
    first, *_, last = found.counts.values()
    figures: dict[str, float] = {}
    for name in ("async_copies", "launches", "collectives"):
        label = name.replace("_", " ")
        figures |= {f"{label}, first": first.mean(name), f"{label}, last": last.mean(name)}
    columns = {"sent (KiB)": counts_table(found.counts), "peak buffers (MiB)": counts_table(found.counts)}
    columns |= {"host time (ms)": times_table(found), "step time (ms)": times_table(found)}
    for label, table in columns.items():
        figures |= {f"{label}, first": float(table[label].iloc[0]), f"{label}, last": float(table[label].iloc[-1])}
    for label, change in (
        ("host time", host_change(found, found.host[-1])),
        ("step time", step_change(found, found.run.variants[-1])),
    ):
        if change:
            figures[f"change of {label} (%)"] = 100 * change.median
    return figures


def launches_finding(counts: Mapping[str, LaunchCounts]) -> str:
    """Which source shrinks at which switch."""
    table = sources_table(counts).set_index("switch")
    parts = [f"{table.index[0]} makes {table['total'].iloc[0]:,g} launches a rank and step"]
    for before, after in pairwise(table.index):
        difference = (table.loc[after] - table.loc[before]).drop("total")
        total = table.loc[after, "total"]
        if (difference == 0).all():
            parts.append(f"{after} changes none")
            continue
        most = difference.abs().idxmax()
        parts.append(f"{after} leaves {total:,g}, mostly by {difference[most]:+,g} of {most}")
    return "; ".join(parts) + "."


def times_finding(found: Ablation) -> str:
    """How much the last contestant's times differ from the first's."""
    settings = found.run.summary["settings"]
    ranks = f"{settings['ranks']} {settings['device'].upper()} ranks"
    return (
        f"Against {found.labels[0]}, with all switches turned, the host time of a small step changes by "
        f"{_told(host_change(found, found.host[-1]))}, and the step time on {ranks} by "
        f"{_told(step_change(found, found.run.variants[-1]))}."
    )


def conclusion(found: Ablation) -> str:
    """The paragraph that a reader should take away."""
    names = found.labels
    first, *_, last = (counted.to_dict() for counted in found.counts.values())
    before, after = first["mean"], last["mean"]
    launches = [counted.mean("launches") for counted in found.counts.values()]
    falls = [old - new for old, new in pairwise(launches)]
    sentences = [
        f"On {first['workload']} with {first['ranks']} ranks, {len(names) - 1} switches take a rank's step from "
        f"{before['async_copies']:,g} async copies to {after['async_copies']:,g}, from {before['launches']:,g} "
        f"launches to {after['launches']:,g}, and from {_size(before['wire_bytes'])} sent to "
        f"{_size(after['wire_bytes'])}."
    ]
    if falls and sum(falls) > 0:
        most = max(range(len(falls)), key=falls.__getitem__)
        sentences.append(f"{falls[most] / sum(falls):.0%} of the launches saved go with {names[most + 1][2:]}.")
    return " ".join([*sentences, _host_sentence(found), _steps_sentence(found), bits_finding(found)])


def bits_finding(found: Ablation) -> str:
    """Which contestants trained to the first one's bits."""
    compared = found.run.summary["comparisons"]
    equal = {name: each["bit_equal_training"] and each["bit_equal_parameters"] for name, each in compared.items()}
    different = [name for name, same in equal.items() if not same]
    if not different:
        return "All train to the same bits: loss, gradient norm and parameters of all ranks."
    meant = [name for name in different if Contestant(name).options().get("ns_algorithm", "standard") != "standard"]
    if different == meant:
        return f"All train to the same bits but {_and(different)}, whose arithmetic is another."
    return f"Loss, gradient norm or parameters DIFFER in bits from those of {found.labels[0]} with {_and(different)}."


def sweep_finding(sweep: pd.DataFrame, device: str) -> str:
    """Where a batched copy is shorter, and where it stops to be."""
    best = sweep.loc[sweep["change"].idxmin()]
    shorter = sweep[sweep["verdict"] == "shorter"]
    saved = sweep["single_launches"] / sweep["batched_launches"]
    most = sweep.loc[saved.idxmax()]
    told = (
        f"one batched copy is shorter than single ones for regions of up to "
        f"{_size(shorter['region_bytes'].max())}, at most by {-best['change']:.0%} ({best['regions']} regions of "
        f"{_size(best['region_bytes'])}); for larger ones it is no gain beyond noise"
        if len(shorter)
        else "one batched copy is nowhere shorter than single ones beyond noise"
    )
    longer = sweep[sweep["verdict"] == "longer"]
    cost = f", and it is longer for {_and(sorted(set(longer['regions'])))} regions of some size" if len(longer) else ""
    place = "CPU" if device == "cpu" else "GPU"
    sentence = (
        f"On this {place}, {told}{cost}. On a GPU the same calls launch up to {saved.max():,g} times less "
        f"({most['batched_launches']} instead of {most['single_launches']})"
    )
    return f"{sentence}." if device != "cpu" else f"{sentence}, which a CPU, having no launches, can't time."


def _peaks(text: str, counted: LaunchCounts) -> list[int]:
    question = counted.question
    options = Contestant(text).options(buckets="published")
    size = {"ranks": question["ranks"], "ep": question["ep"]}
    return [
        peak_bytes(plan_for(question["workload"], rank=rank, **size, **options)) for rank in range(question["ranks"])
    ]


def _host_sentence(found: Ablation) -> str:
    """What all switches do to the host side, and where it is shortest."""
    first, *_, last = found.host
    label, best = min(zip(found.labels, found.host, strict=True), key=lambda pair: pair[1].median_ms)
    shortest = (
        "" if best in (first, last) else f", and by {_told(host_change(found, best))} with those up to {label[2:]}"
    )
    return (
        f"With all of them the host side of a step with small matrices changes by {_told(host_change(found, last))}"
        f"{shortest}; it dispatches {last.without_views:,} operators instead of {first.without_views:,}, views not "
        "counted."
    )


def _steps_sentence(found: Ablation) -> str:
    """Which contestants' steps take another time than the first's."""
    settings, first = found.run.summary["settings"], found.labels[0]
    changes = {label[2:]: step_change(found, text) for label, text in zip(found.labels, found.counts, strict=True)}
    known = {label: change for label, change in changes.items() if change}
    moved = {label: change for label, change in known.items() if not _uncertain(change)}
    step = f"The step of {settings['workload']} on {settings['ranks']} {settings['device'].upper()} ranks"
    if any(change.too_few for change in known.values()):
        return f"{step} was timed too few times to tell its changes from noise."
    if not moved:
        return f"{step} takes as long as {first}'s at every switch, within noise."
    listed = "; ".join(f"{_told(change)} with {label}" for label, change in moved.items())
    rest = "" if len(moved) == len(known) else "; with the others it is unchanged within noise"
    return f"{step} changes against {first}'s by {listed}{rest}."


def _uncertain(change: Change) -> bool:
    return change.verdict not in ("shorter", "longer")


def _told(change: Change | None) -> str:
    """A change with its interval: ``-52% (-54% to -51%)``, and whether that may be noise."""
    if change is None:
        return ""
    doubt = f", {change.verdict.removeprefix('unchanged ')}" if _uncertain(change) else ""
    interval = f"{change.median:+z.0%} ({change.low:+z.0%} to {change.high:+z.0%}"
    return f"{interval.replace(' ', NBSP)}{doubt})"


def _size(size_bytes: float) -> str:
    for unit, scale in (("MiB", 2**20), ("KiB", 2**10)):
        if size_bytes >= scale:
            return f"{round(size_bytes / scale, 1):,g} {unit}"
    return f"{size_bytes:g} B"


def _and(values: Sequence[object]) -> str:
    *most, last = map(str, values)
    return f"{', '.join(most)} and {last}" if most else last
