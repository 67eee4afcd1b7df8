"""Figures of a comparison: each takes its tables and returns a matplotlib Figure; the first side comes first."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from distmuon.studies.comparison_tables import short_name
from distmuon.studies.style import INK, VARIANTS, axes
from distmuon.traces.comparison import PARTS, SPANS

_PART_COLOURS = dict(zip(PARTS, ("#0072B2", "#E69F00", "#009E73", "#E5E5E5"), strict=True))
_VERDICT_COLOURS = {"came": "#D55E00", "went": "#0072B2", "grew": "#F0B98D", "shrank": "#9CC7E0"}
_OTHER = "#BBBBBB"
_HATCHES = {"exposed exchange": "////"}  # in grey it is nearly as dark as compute


def parts(spans: pd.DataFrame) -> Figure:
    """Where the time of each span goes: a bar a side, for the device where both sides have one, and for the host.

    Args:
        spans: as of :func:`distmuon.studies.comparison_tables.spans_table`.
    """
    table = spans.set_index("figure")
    labels = list(spans.columns[1:3])
    known = [span for span in SPANS.values() if table.loc[f"{span} (ms)", labels].notna().any()]
    figure, panels = axes(rows=len(known), height=0.9 + 1.25 * len(known))
    for axis, span in zip(panels, known, strict=True):
        largest = table.loc[f"{span} (ms)", labels].max()
        for position, label in enumerate(labels):
            left = 0.0
            for part in PARTS:
                width = table.loc[f"{span}: {part} (ms)", label]
                if pd.notna(width):
                    colour = _PART_COLOURS[part]
                    (bar,) = axis.barh(position, width, left=left, height=0.6, color=colour, hatch=_HATCHES.get(part))
                    bar.set(edgecolor="white", linewidth=0.6)
                    left += width
            text = f"{left:,.2f}" if left else "n/a"
            axis.text(left + 0.01 * largest, position, text, va="center", color=INK)
        axis.set(xlim=(0, 1.12 * largest), xlabel=f"{span} (ms)")
        axis.set_yticks(range(len(labels)), labels)
        axis.invert_yaxis()
    handles = [
        Patch(facecolor=colour, hatch=_HATCHES.get(part), edgecolor="white", linewidth=0, label=part)
        for part, colour in _PART_COLOURS.items()
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False)
    return figure


def counts(table: pd.DataFrame) -> Figure:
    """What each side did, in numbers: a pair of bars a figure, on a scale that shows few beside many.

    Args:
        table: as of :func:`distmuon.studies.comparison_tables.counts_table`; figures that neither side tells are
            left out.
    """
    labels = list(table.columns[1:3])
    known = table[table[labels].notna().any(axis="columns")].reset_index(drop=True)
    figure, (axis,) = axes(height=1.1 + 0.42 * len(known))
    for side, label in enumerate(labels):
        colour, _, _ = VARIANTS[side]
        for position, value in enumerate(known[label]):
            place = position + 0.38 * side - 0.19
            axis.barh(place, value, height=0.36, color=colour)
            end, text = (0.0, "n/a") if pd.isna(value) else (value, f"{value:,g}")
            axis.text(end, place, f" {text}", va="center", color=INK, fontsize=8.5)
    axis.set_xscale("symlog", linthresh=1)
    axis.set(xlim=(0, 3 * max(1.0, known[labels].max(axis=None))), xlabel="number in an occurrence (logarithmic)")
    axis.set_yticks(range(len(known)), known["figure"])
    axis.invert_yaxis()
    _legend(figure, labels)
    return figure


def work(table: pd.DataFrame, rows: int = 15) -> Figure:
    """The operators whose time changed most, longest change first.

    Args:
        table: as of :func:`distmuon.studies.comparison_tables.work_table`.
        rows: how many to show.
    """
    known = table[table["change (ms)"].notna()].head(rows)
    figure, (axis,) = axes(height=1.3 + 0.27 * max(len(known), 1))
    reach = 1.35 * max(known["change (ms)"].abs().max(), 1e-6) if len(known) else 1.0
    for position, (change, verdict) in enumerate(zip(known["change (ms)"], known["verdict"], strict=True)):
        axis.barh(position, change, height=0.7, color=_VERDICT_COLOURS.get(verdict, _OTHER))
        side = "left" if change >= 0 else "right"
        told = f"{change:+,.3g} {verdict}" if verdict in _VERDICT_COLOURS else f"{change:+,.3g}"
        axis.text(change, position, f" {told} ", ha=side, va="center", color=INK, fontsize=8.5)
    axis.axvline(0, color=INK, linewidth=0.8)
    axis.set(xlim=(-reach, reach), xlabel="change of time in an occurrence (ms)")
    names = known["where"] + ": " + known["name"].map(short_name)
    axis.set_yticks(range(len(known)), names, fontsize=8.5)
    axis.invert_yaxis()
    handles = [Patch(color=colour, label=verdict) for verdict, colour in _VERDICT_COLOURS.items()]
    handles.append(Patch(color=_OTHER, label="as often"))
    figure.legend(handles=handles, loc="outside lower center", ncols=5, frameon=False)
    return figure


def skew(ranks: pd.DataFrame) -> Figure:
    """When each rank starts, after the first, and how long it waits for others in its exchanges.

    Args:
        ranks: as of :func:`distmuon.studies.comparison_tables.ranks_table`, at least one side with several ranks.
    """
    labels = list(dict.fromkeys(ranks["side"]))
    figure, panels = axes(columns=2, height=3.0)
    figures = {
        "starts after the first (ms)": "starts after the first rank (ms)",
        "of it waiting (ms)": "waits for others (ms)",
    }
    for axis, (name, text) in zip(panels, figures.items(), strict=True):
        for side, label in enumerate(labels):
            mine = ranks[(ranks["side"] == label) & ranks[name].notna()]
            colour, _, _ = VARIANTS[side]
            axis.bar(mine["rank"] + 0.38 * side - 0.19, mine[name], width=0.36, color=colour)
        axis.set(xlabel="rank", ylabel=text)
        axis.set_xticks(sorted(ranks["rank"].unique()))
        axis.set_ylim(bottom=0)
        if ranks[name].isna().all():
            axis.text(0.5, 0.5, "n/a", transform=axis.transAxes, ha="center")
    _legend(figure, labels)
    return figure


def _legend(figure: Figure, labels: Sequence[str]) -> None:
    handles = [Patch(color=VARIANTS[side][0], label=label) for side, label in enumerate(labels)]
    figure.legend(handles=handles, loc="outside lower center", ncols=2, frameon=False)
