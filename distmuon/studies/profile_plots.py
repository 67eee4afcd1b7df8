"""Figures of a profile: each takes a DataFrame and returns a matplotlib Figure.

The first variant comes first and always has the same colour. Colours are from the Okabe-Ito palette, which colour-blind
readers can tell apart, and differ in lightness, so that they can be told apart in grey as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator

from distmuon.profiling.noise import Change
from distmuon.ranges import PHASES
from distmuon.studies.profile_tables import SOURCE_GROUPS
from distmuon.studies.style import INK, VARIANTS, axes

_SOURCE_COLOURS = ("#062A42", "#4A94D0", "#9FC9E0", "#D9D9D9", "#7A3806", "#AA5305", "#EE9A32", "#FEE5C4")
_PHASE_COLOURS = {
    "momentum": "#C4C4C4",
    "pack": "#D55E00",
    "all_to_all": "#1A1A1A",
    "wait": "#FFFFFF",
    "unpack": "#E69F00",
    "newton_schulz": "#0072B2",
    "repack": "#CC79A7",
    "return_unpack": "#F0E442",
    "apply": "#56B4E9",
}
#: Of phases that in grey are as dark as another.
_PHASE_HATCHES = {"pack": "\\\\\\\\", "unpack": "////", "apply": "...."}
_TRANSFER, _WAITING = "#009E73", "#DDF0EA"


def copies_and_launches(sources: pd.DataFrame) -> Figure:
    """Stacked bars of async copies and launches by source.

    Args:
        sources: ``variant``, ``source``, ``async_copies``, ``launches``: means a rank and step.
    """
    variants = list(dict.fromkeys(sources["variant"]))
    figure, panels = axes(rows=2, height=1.5 + 1.1 * len(variants))
    for axis, (value, label) in zip(panels, [("async_copies", "async copies"), ("launches", "launches")], strict=True):
        left = dict.fromkeys(variants, 0.0)
        for (group, members), colour in zip(SOURCE_GROUPS.items(), _SOURCE_COLOURS, strict=True):
            for position, variant in enumerate(variants):
                mine = (sources["variant"] == variant) & sources["source"].isin(members)
                width = sources[mine][value].sum()
                axis.barh(
                    position, width, left=left[variant], color=colour, edgecolor="white", linewidth=0.6, label=group
                )
                left[variant] += width
        largest = max(left.values())
        for position, variant in enumerate(variants):
            axis.text(left[variant] + 0.01 * largest, position, f"{left[variant]:,g}", va="center", color=INK)
        axis.set(xlim=(0, 1.1 * largest), xlabel=f"{label} a rank and step")
        axis.set_yticks(range(len(variants)), variants)
        axis.invert_yaxis()
    handles = [Patch(color=colour, label=group) for group, colour in zip(SOURCE_GROUPS, _SOURCE_COLOURS, strict=True)]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False, fontsize=8.5)
    return figure


def spans(steps: pd.DataFrame, changes: Mapping[str, Change]) -> Figure:
    """Spans of the optimizer step on each rank: mean, smallest to largest, and a dot a step; and the change with its
    interval.

    Args:
        steps: ``variant``, ``rank``, ``repeat``, ``step``, ``cpu_span_ms``, ``gpu_span_ms``.
        changes: of the variants after the first, of the CPU span.
    """
    variants = list(dict.fromkeys(steps["variant"]))
    spans = [name for name in ("cpu_span_ms", "gpu_span_ms") if steps[name].notna().any()]
    figure, panels = axes(columns=len(spans) + 1, height=3.4, width_ratios=[2] * len(spans) + [1])
    for axis, span in zip(panels, spans, strict=False):
        for position, variant in enumerate(variants):
            offset = (position - (len(variants) - 1) / 2) * 0.25
            values = steps[steps["variant"] == variant].groupby("rank")[span]
            centre = values.mean()
            reach = [centre - values.min(), values.max() - centre]
            colour, marker, _ = VARIANTS[position % len(VARIANTS)]
            axis.errorbar(
                centre.index + offset,
                centre,
                yerr=reach,
                fmt=marker,
                color=colour,
                capsize=4,
                label=variant,
            )
            for rank, each in values:
                axis.plot([rank + offset + 0.07] * len(each), each, ".", color=colour, markersize=4, alpha=0.7)
        ranks = sorted(steps["rank"].unique())
        axis.set(ylim=(0, 1.08 * steps[span].max()), ylabel=f"{span[:3].upper()} span of the step (ms)", xlabel="rank")
        axis.set_xticks(ranks, [str(rank) for rank in ranks])
        axis.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=len(variants), frameon=False)
    _changes(panels[-1], variants, changes)
    return figure


def timeline(step: pd.DataFrame) -> Figure:
    """One optimizer step: a lane a rank, phase by phase, and below it the exchanges in flight.

    Of an exchange, the waiting for other ranks is drawn before the transfer, as it is when the last to come is awaited.

    Args:
        step: events of one variant, repeat and step, of all ranks.
    """
    ranks = sorted(step["rank"].unique())
    figure, (axis,) = axes(height=1.4 + 0.75 * len(ranks))
    start = step[step["kind"] == "optimizer"]["start_us"].min()
    for position, rank in enumerate(ranks):
        mine = step[step["rank"] == rank]
        for name in PHASES:
            look = _PHASE_COLOURS[name], _PHASE_HATCHES.get(name)
            _bars(axis, mine[mine["phase"] == name], start, position - 0.36, 0.4, *look)
        # Two exchanges may be in flight, each on its own thread.
        exchanges = mine[mine["kind"] == "exchange"]
        for lane, (_, carried) in enumerate(exchanges.groupby("thread", sort=False)):
            bottom = position + 0.07 + 0.15 * lane
            waiting_end = carried["start_us"] + carried["waiting_us"]
            _bars(axis, carried.assign(duration_us=carried["waiting_us"]), start, bottom, 0.13, _WAITING)
            transfers = carried.assign(start_us=waiting_end, duration_us=carried["transfer_us"])
            _bars(axis, transfers, start, bottom, 0.13, _TRANSFER)
    axis.set(xlabel="time since the step began (ms)", ylim=(len(ranks) - 0.5, -0.5))
    axis.set_xlim(left=0)
    lanes = [(position + offset, text) for position, rank in enumerate(ranks) for offset, text in _lanes(rank)]
    axis.set_yticks([place for place, _ in lanes], [text for _, text in lanes])
    named = [(name, _PHASE_COLOURS[name]) for name in PHASES]
    named += [("exchange: waiting", _WAITING), ("exchange: transfer", _TRANSFER)]
    handles = [
        Patch(facecolor=colour, edgecolor=INK, linewidth=0.4, hatch=_PHASE_HATCHES.get(label), label=label)
        for label, colour in named
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False, fontsize=8.5)
    return figure


def training(rows: pd.DataFrame) -> Figure:
    """Loss and gradient norm by step: a line a variant, a ring a rank; equal values lie on one another.

    Args:
        rows: ``variant``, ``rank``, ``repeat``, ``step``, ``loss``, ``grad_norm``.
    """
    variants = list(dict.fromkeys(rows["variant"]))
    ranks = sorted(rows["rank"].unique())
    figure, panels = axes(columns=2, height=3.2)
    labels = {"loss": "loss (nats a token)", "grad_norm": "gradient norm"}
    for axis, (value, label) in zip(panels, labels.items(), strict=True):
        for position, variant in enumerate(variants):
            mine = rows[rows["variant"] == variant]
            colour, _, line = VARIANTS[position % len(VARIANTS)]
            means = mine.groupby("step")[value].mean()
            axis.plot(means.index, means, line, color=colour, linewidth=2 if position else 4, label=variant)
        for size, rank in enumerate(ranks):
            mine = rows[rows["rank"] == rank]
            ring: dict[str, Any] = {"markersize": 4 + 3 * size, "markerfacecolor": "none", "markeredgewidth": 0.7}
            axis.plot(mine["step"], mine[value], "o", color=INK, label=f"rank {rank}", **ring)
        axis.set(xlabel="step", ylabel=label)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    panels[0].legend(frameon=False, fontsize=8, ncols=2)
    return figure


def waterfall(sources: pd.DataFrame) -> Figure:
    """Launches from one contestant to the last, a switch at a time: what each switch takes away, by source, and adds.

    Args:
        sources: a row a contestant: ``switch``, and launches of each group of sources.
    """
    table = sources.set_index("switch")[list(SOURCE_GROUPS)].T
    names = list(table.columns)
    figure, (axis,) = axes(height=1.4 + 0.48 * (len(names) + 1))
    colours = dict(zip(SOURCE_GROUPS, _SOURCE_COLOURS, strict=True))
    style: dict[str, Any] = {"edgecolor": "white", "linewidth": 0.6}
    largest = table.sum().max()

    def stack(position: int, widths: pd.Series, left: float) -> None:
        for group, width in widths.items():
            axis.barh(position, width, left=left, height=0.62, color=colours[str(group)], **style)
            left += width

    stack(0, table[names[0]], 0)
    stack(len(names), table[names[-1]], 0)
    for position, (before, after) in enumerate(pairwise(names), start=1):
        change = table[after] - table[before]
        fallen = (-change).clip(lower=0)
        low = table[before].sum() - fallen.sum()
        stack(position, fallen, low)
        for group, width in change.clip(lower=0).items():
            axis.barh(position + 0.4, width, left=low, height=0.12, color=colours[str(group)], hatch="////", **style)
            low += width
        axis.plot([table[before].sum()] * 2, [position - 0.7, position + 0.3], color=INK, linewidth=0.6)
        text = f"{change.sum():+,g}" if change.any() else "none"
        axis.text(table[before].sum() + 0.01 * largest, position, text, va="center", color=INK)
    for position, name in ((0, names[0]), (len(names), names[-1])):
        axis.text(table[name].sum() + 0.01 * largest, position, f"{table[name].sum():,g}", va="center", color=INK)
    axis.set(xlim=(0, 1.1 * largest), xlabel="launches a rank and step")
    axis.set_yticks(range(len(names) + 1), [*names, "what is left"])
    axis.invert_yaxis()
    handles = [Patch(color=colour, label=group) for group, colour in colours.items()]
    handles.append(Patch(facecolor="white", edgecolor=INK, hatch="////", label="thin: added"))
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False, fontsize=8.5)
    return figure


def time_changes(changes: pd.DataFrame) -> Figure:
    """How the times of each contestant differ from the first's, with intervals: a panel a kind of time.

    Args:
        changes: ``label``, ``kind``, ``median``, ``low``, ``high`` as fractions; those of the first are 0.
    """
    kinds = list(dict.fromkeys(changes["kind"]))
    names = list(dict.fromkeys(changes["label"]))
    figure, panels = axes(columns=len(kinds), height=0.9 + 0.36 * len(names))
    for panel, (axis, kind) in enumerate(zip(panels, kinds, strict=True)):
        axis.axvline(0, color=INK, linewidth=0.8)
        for position, row in enumerate(changes[changes["kind"] == kind].itertuples()):
            colour, marker, _ = VARIANTS[position % len(VARIANTS)]
            median, low, high = (100 * value for value in (row.median, row.low, row.high))
            reach = [[median - low], [high - median]]
            axis.errorbar([median], [position], xerr=reach, fmt=marker, color=colour, capsize=4)
        axis.set(xlabel=f"{kind} against {names[0]} (%)", ylim=(len(names) - 0.5, -0.5))
        axis.set_yticks(range(len(names)), names if panel == 0 else [""] * len(names))
        axis.grid(axis="x", color="#E5E5E5", linewidth=0.6)
        axis.set_axisbelow(True)
    return figure


def copies_sweep(sweep: pd.DataFrame) -> Figure:
    """Batched against single copies: time by region size, a line a number of regions; and launches by that number.

    Args:
        sweep: as of :func:`distmuon.profiling.sweep.sweep_copies`.
    """
    figure, (times, launches) = axes(columns=2, height=3.6, width_ratios=[3, 2])
    counts = sorted(sweep["regions"].unique())
    times.axhline(0, color=INK, linewidth=0.8)
    for position, count in enumerate(counts):
        mine = sweep[sweep["regions"] == count]
        shade = 0.75 * (1 - (position + 1) / len(counts))
        _, marker, _ = VARIANTS[position % len(VARIANTS)]
        times.errorbar(
            mine["region_bytes"] / 1024,
            100 * mine["change"],
            yerr=[100 * (mine["change"] - mine["low"]), 100 * (mine["high"] - mine["change"])],
            marker=marker,
            color=(shade, shade, shade),
            markersize=5,
            linewidth=1.2,
            capsize=2,
            label=f"{count} regions",
        )
    reach = 1.6 * max(25.0, 100 * sweep["change"].abs().max())  # an interval may go on beyond
    times.set(
        ylim=(-reach, reach),
        xscale="log",
        xlabel="size of a region (KiB)",
        ylabel="time of one batched copy\nagainst single ones (%)",
    )
    times.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    times.legend(frameon=False, fontsize=8.5, ncols=2)
    (single, _, line), (batched, _, dashes) = VARIANTS[:2]
    launches.plot(counts, counts, line, color=single, label="a copy_ each")
    mine = sweep[sweep["region_bytes"] == sweep["region_bytes"].min()]
    launches.plot(
        mine["regions"], mine["batched_launches"], dashes, marker="s", color=batched, label="one batched copy"
    )
    launches.set(xscale="log", yscale="log", xlabel="regions", ylabel="launches on a GPU")
    for axis in (launches.xaxis, launches.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    launches.legend(frameon=False, fontsize=8.5)
    return figure


def typical_step(events: pd.DataFrame, variant: str) -> pd.DataFrame:
    """The events of that step of ``variant`` whose span, as a mean over ranks, is in the middle of all of them."""
    mine = events[events["variant"] == variant]
    means = mine[mine["kind"] == "optimizer"].groupby(["repeat", "step"])["duration_us"].mean().sort_values()
    repeat, step = means.index[len(means) // 2]
    return mine[(mine["repeat"] == repeat) & (mine["step"] == step)]


def _bars(
    axis: Axes,
    rows: pd.DataFrame,
    start_us: float,
    bottom: float,
    height: float,
    colour: str,
    hatch: str | None = None,
) -> None:
    spans = list(zip((rows["start_us"] - start_us) / 1e3, rows["duration_us"] / 1e3, strict=True))
    axis.broken_barh(spans, (bottom, height), facecolors=colour, edgecolors=INK, linewidth=0.3, hatch=hatch)


def _lanes(rank: int) -> list[tuple[float, str]]:
    return [(-0.16, f"rank {rank}"), (0.21, "exchange")]


def _changes(axis: Axes, variants: Sequence[str], changes: Mapping[str, Change]) -> None:
    """The median change of each variant after the first, with its interval, in per cent."""
    axis.axhline(0, color=INK, linewidth=0.8)
    largest = 1.0
    for position, variant in enumerate(variants[1:], start=1):
        median, low, high = (
            100 * value for value in (changes[variant].median, changes[variant].low, changes[variant].high)
        )
        colour, marker, _ = VARIANTS[position % len(VARIANTS)]
        axis.errorbar([position], [median], [[median - low], [high - median]], fmt=marker, color=colour, capsize=6)
        largest = max(largest, abs(low), abs(high))
    axis.set(xlim=(0.4, len(variants) - 0.4), ylim=(-1.15 * largest, 1.15 * largest))
    axis.set_xticks(range(1, len(variants)), variants[1:])
    axis.set_ylabel(f"change of the CPU span\nagainst {variants[0]} (%)")
