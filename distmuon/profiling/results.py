"""The results of a profile: ``summary.json`` and ``events.parquet`` in the run's folder, and how to read them back.

A summary holds what was asked for, where the figures come from, and for each variant what it counted, how long its
steps took on each rank, what it trained, and how it compares with the first variant. What cannot be measured is null.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from distmuon.counting.launches import LaunchCounts
from distmuon.profiling.events import merge_ranks
from distmuon.profiling.noise import paired_change, spread
from distmuon.provenance import provenance
from distmuon.richtext import Shown

COUNTED = ("async_copies", "launches", "collectives")
#: Times of a step on one rank, in ms, by their name in the summary.
TIMES = ("cpu_span_ms", "gpu_span_ms", "exchange_ms", "transfer_ms", "waiting_ms", "exposed_wait_ms")


@dataclass(frozen=True)
class RankResults:
    """What one rank brings to the results.

    Attributes:
        events: its rows, on its trace's clock.
        base_ns: of that clock.
        training: by variant, a row a repeat and step: ``repeat``, ``step``, ``loss``, ``grad_norm``.
        digests: by variant and repeat, of the parameters that this rank had in the end.
    """

    events: pd.DataFrame
    base_ns: int
    training: dict[str, list[dict[str, Any]]]
    digests: dict[str, list[str]]


@dataclass(frozen=True, repr=False)
class Run(Shown):
    """A finished profile. Prints as a table of its variants.

    Attributes:
        folder: where it lies.
        summary: as in ``summary.json``.
        events: as in ``events.parquet``; see :mod:`distmuon.profiling.events`.
    """

    folder: Path
    summary: dict[str, Any]
    events: pd.DataFrame

    @classmethod
    def read(cls, folder: Path | str) -> Run:
        """Read the results in ``folder``."""
        folder = Path(folder)
        summary = json.loads((folder / "summary.json").read_text())
        return cls(folder, summary, pd.read_parquet(folder / "events.parquet"))

    def _line(self) -> str:
        settings = self.summary["settings"]
        return (
            f"{settings['workload']} on {settings['ranks']} {settings['device'].upper()} ranks, "
            f"{settings['repeats']} x {settings['steps']} profiled steps, files in {self.folder}"
        )

    def _table(self) -> tuple[Sequence[str], list[Sequence[object]]]:
        spans = self.steps().groupby("variant")[["cpu_span_ms", "gpu_span_ms"]].mean()
        spans = spans.astype(object).where(spans.notna(), None)
        header = ("variant", *(name.replace("_", " ") for name in COUNTED), "CPU span (ms)", "GPU span (ms)")
        return header, [
            (variant, *(self.of(variant)["mean"][name] for name in COUNTED), *spans.loc[variant])
            for variant in self.variants
        ]

    @property
    def variants(self) -> list[str]:
        """Names in the order asked for; the others are compared with the first."""
        return list(self.summary["variants"])

    def of(self, variant: str) -> dict[str, Any]:
        """The part of the summary about one variant."""
        return self.summary["variants"][variant]

    def steps(self) -> pd.DataFrame:
        """A row a variant, rank, repeat and profiled step, with its times (:data:`TIMES`; NaN without a device)."""
        order = {variant: position for position, variant in enumerate(self.variants)}
        return step_times(self.events).sort_values("variant", key=lambda names: names.map(order), kind="stable")

    def training(self) -> pd.DataFrame:
        """A row a variant, rank, repeat and step, warm-up included: ``loss`` and ``grad_norm``."""
        return pd.DataFrame(
            {"variant": variant, "rank": row["rank"], **record}
            for variant in self.variants
            for row in self.of(variant)["per_rank"]
            for record in row["training"]
        )

    def sources(self) -> pd.DataFrame:
        """A row a variant and source: ``async_copies`` and ``launches``, means over ranks."""
        return pd.DataFrame(
            {"variant": variant, **row} for variant in self.variants for row in self.of(variant)["by_source"]
        )


def step_times(events: pd.DataFrame) -> pd.DataFrame:
    """Times of each variant, rank, repeat and profiled step, in ms.

    ``cpu_span_ms`` is DistMuon's range on the host and ``gpu_span_ms`` the time from the first to the last activity
    that it launched on a device. ``exchange_ms`` is the total time of the exchanges as their own thread or stream saw
    it, of which ``transfer_ms`` is transfer and ``waiting_ms`` waiting for other ranks; ``exposed_wait_ms`` is how
    long the host stood still for them.
    """
    place = ["variant", "rank", "repeat", "step"]
    optimizer = events[events["kind"] == "optimizer"].set_index(place)
    exchange = events[events["kind"] == "exchange"].groupby(place)
    device = events[events["kind"].isin(["kernel", "memcpy", "memset"]) | events["thread"].str.startswith("stream")]
    ends = (device["start_us"] + device["duration_us"]).groupby([device[name] for name in place]).max()
    waits = events[events["phase"] == "wait"].groupby(place)["duration_us"].sum()
    times = pd.DataFrame(
        {
            "cpu_span_ms": optimizer["duration_us"],
            "gpu_span_ms": ends - device.groupby(place)["start_us"].min(),
            "exchange_ms": exchange["duration_us"].sum(),
            "transfer_ms": exchange["transfer_us"].sum(),
            "waiting_ms": exchange["waiting_us"].sum(),
            "exposed_wait_ms": waits,
        }
    ).reindex(optimizer.index)
    # A step without an exchange has spent no time on one; a step without a device has no span on it.
    exchange_columns = [name for name in TIMES if name != "gpu_span_ms"]
    times[exchange_columns] = times[exchange_columns].fillna(0.0)
    return (times / 1e3).reset_index()


def write_results(
    folder: Path,
    *,
    settings: Mapping[str, Any],
    ranks: Sequence[RankResults],
    counts: Mapping[str, LaunchCounts],
    origin: Mapping[str, Any],
) -> None:
    """Write the results of a run.

    Args:
        folder: of the run.
        settings: as resolved.
        ranks: what each rank brings.
        counts: by variant.
        origin: what belongs into the provenance beside versions, device and commit.
    """
    first, *others = counts
    events = merge_ranks([rank.events for rank in ranks], [rank.base_ns for rank in ranks])
    times = step_times(events)
    summary = {
        "settings": dict(settings),
        "provenance": provenance() | dict(origin),
        "variants": {name: _variant(name, events, times, ranks, counts[name]) for name in counts},
        "comparisons": {name: _compare(first, name, times, ranks) for name in others},
    }
    events.to_parquet(folder / "events.parquet", index=False)
    (folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")


def _variant(
    name: str, events: pd.DataFrame, times: pd.DataFrame, ranks: Sequence[RankResults], counted: LaunchCounts
) -> dict[str, Any]:
    events, times = events[events["variant"] == name], times[times["variant"] == name]
    source, counts = _counts(events, counted)
    per_rank: list[dict[str, Any]] = []
    for rank, brought in enumerate(ranks):
        mine = times[times["rank"] == rank]
        exchanges = events[(events["rank"] == rank) & (events["kind"] == "exchange")]
        per_rank.append(
            {
                "rank": rank,
                **counts[rank],
                "sent_bytes": int(exchanges["bytes"].sum()) // len(mine),
                **{time: None if mine[time].isna().any() else spread(mine[time].tolist()) for time in TIMES},
                "training": brought.training[name],
                "digests": brought.digests[name],
            }
        )
    return {
        "counts_source": source,
        "mean": {value: sum(row[value] for row in per_rank) / len(per_rank) for value in (*COUNTED, "sent_bytes")},
        "by_source": counted.by_source(),
        "repeats_bit_equal": all(_same_in_each_repeat(brought, name) for brought in ranks),
        "per_rank": per_rank,
    }


def _same_in_each_repeat(brought: RankResults, variant: str) -> bool:
    by_step: dict[int, set[tuple[float, float]]] = {}
    for row in brought.training[variant]:
        by_step.setdefault(row["step"], set()).add((row["loss"], row["grad_norm"]))
    return len(set(brought.digests[variant])) == 1 and all(len(values) == 1 for values in by_step.values())


def _counts(events: pd.DataFrame, counted: LaunchCounts) -> tuple[str, list[dict[str, float]]]:
    """Copies, launches and collectives by rank: measured where there is a device, else counted from the operators."""
    per_rank = counted.to_dict()["per_rank"]
    device = events[events["kind"].isin(["kernel", "memcpy", "memset"])]
    if device.empty:
        return "counted", [{value: row[value] for value in COUNTED} for row in per_rank]
    steps = len(events[["repeat", "step"]].drop_duplicates())
    kinds = {
        "async_copies": device[device["kind"] == "memcpy"],
        "launches": device,
        "collectives": events[events["kind"] == "exchange"],
    }
    by_rank = {value: rows.groupby("rank").size() / steps for value, rows in kinds.items()}
    return "trace", [{value: float(by_rank[value].get(row["rank"], 0)) for value in COUNTED} for row in per_rank]


def _compare(first: str, name: str, times: pd.DataFrame, ranks: Sequence[RankResults]) -> dict[str, Any]:
    """How a variant differs from the first: times by pairs of steps (means over ranks), what was trained by bits."""
    means = times.groupby(["variant", "repeat", "step"])[["cpu_span_ms", "gpu_span_ms"]].mean()
    changes: dict[str, dict[str, object] | None] = {}
    for span in means:
        before, after = means.loc[first, span], means.loc[name, span]
        known = before.notna().all() and after.notna().all()
        changes[span] = paired_change(before.tolist(), after.tolist()).to_dict() if known else None
    return {
        "compared_with": first,
        **changes,
        "bit_equal_training": all(rank.training[first] == rank.training[name] for rank in ranks),
        "bit_equal_parameters": all(rank.digests[first] == rank.digests[name] for rank in ranks),
    }
