"""Figures of planning at scale: each takes a table and returns a matplotlib Figure."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, NullFormatter, NullLocator

from distmuon.modelling import Replay
from distmuon.richtext import about
from distmuon.studies.style import INK, VARIANTS, axes

_BUSY, _EXPOSED, _IDLE = "#0072B2", "#E69F00", "#D9D9D9"
#: In grey it is nearly as dark as Newton-Schulz.
_HATCHES = {"begin": "\\\\\\\\"}
#: Of a timeline: what a rank computes and waits for, and its lane.
_KINDS = {
    "begin": ("#D55E00", "momentum, pack"),
    "owned": ("#0072B2", "Newton-Schulz of owned matrices"),
    "whole": ("#56B4E9", "Newton-Schulz of whole matrices"),
    "finish": ("#D9D9D9", "decay, update"),
    "wait": ("#FFFFFF", "waiting"),
    "out": ("#009E73", "exchange out"),
    "back": ("#CC79A7", "exchange back"),
}


def planning(table: pd.DataFrame) -> Figure:
    """Planning time and memory against ranks, and a line of slope 1 through the last point.

    Args:
        table: as of :func:`distmuon.studies.scale_report.planning_table`.
    """
    figure, (times, memory) = axes(columns=2, height=3.2)
    ranks, seconds = table["ranks"], table["planning (s)"]
    colour, marker, _ = VARIANTS[0]
    times.plot(ranks, seconds, marker=marker, color=colour, label="planned")
    last = table.iloc[-1]
    times.plot(ranks, last["planning (s)"] * ranks / last["ranks"], ":", color=INK, linewidth=1, label="linear growth")
    times.set(yscale="log", ylabel="planning (s)")
    times.legend(frameon=False)
    memory.plot(ranks, table["memory above torch's (MiB)"], marker=marker, color=colour)
    memory.set(ylim=(0, 1.1 * table["memory above torch's (MiB)"].max()), ylabel="memory above torch's (MiB)")
    for axis in (times, memory):
        _by_ranks(axis, ranks)
    times.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    few = seconds.max() < 10 * seconds.min()  # an axis that may hold no power of ten
    times.yaxis.set_minor_formatter(FuncFormatter(lambda value, _: f"{value:.2g}") if few else NullFormatter())
    return figure


def balance(ranks: pd.DataFrame) -> Figure:
    """Bytes and FLOPs of every rank, most first, and their means.

    Args:
        ranks: as of :func:`distmuon.studies.scale_report.balance`.
    """
    figure, panels = axes(columns=2, height=3.0)
    names = [("sent_mib", "sent in a step (MiB)"), ("gemm_tflop", "GEMM TFLOP in a step")]
    for axis, (name, label) in zip(panels, names, strict=True):
        values = np.sort(ranks[name].to_numpy())[::-1]
        axis.stairs(values, fill=True, color=_BUSY)
        axis.axhline(values.mean(), color=INK, linewidth=1, linestyle="--")
        axis.text(len(values), values.mean(), "mean ", ha="right", va="bottom", color=INK)
        axis.set(xlim=(0, len(values)), ylim=(0, 1.08 * values.max() or 1), ylabel=label, xlabel="ranks, most first")
    return figure


def sharing(rows: pd.DataFrame) -> Figure:
    """Modelled step against ranks, with the work of replicas shared and repeated; and what a rank then sends.

    Args:
        rows: as of :func:`distmuon.studies.scale_report.sharing`.
    """
    figure, (steps, sent) = axes(columns=2, height=3.3)
    for position, (way, mine) in enumerate(rows.groupby("replicas", sort=False)):
        colour, marker, line = VARIANTS[position]
        for axis, name in ((steps, "step_ms"), (sent, "sent_mib")):
            axis.plot(mine["ranks"], mine[name], line, marker=marker, color=colour, label=way)
    steps.set(ylim=(0, 1.08 * rows["step_ms"].max()), ylabel="modelled step (ms)")
    sent.set(ylim=(0, 1.08 * rows["sent_mib"].max() or 1), ylabel="sent a rank and step (MiB)")
    for axis in (steps, sent):
        _by_ranks(axis, rows["ranks"])
    steps.legend(frameon=False, title="work of replicas")
    return figure


def bucket_sizes(rows: pd.DataFrame) -> Figure:
    """What a modelled step is spent on, for each size of bucket: means over ranks.

    Args:
        rows: as of :func:`distmuon.studies.scale_report.bucket_sizes`.
    """
    figure, (axis,) = axes(height=1.3 + 0.4 * len(rows))
    left = np.zeros(len(rows))
    for name, colour, label in (
        ("busy_ms", _BUSY, "busy"),
        ("exposed_ms", _EXPOSED, "exposed exchange"),
        ("idle_ms", _IDLE, "done before the last rank"),
    ):
        axis.barh(range(len(rows)), rows[name], left=left, color=colour, edgecolor="white", linewidth=0.6, label=label)
        left += rows[name].to_numpy()
    for position, (total, buffers) in enumerate(zip(left, rows["buffer_mib"], strict=True)):
        text = f" {total:,.1f} ms, {about(buffers)} MiB of buffers"
        axis.text(total, position, text, va="center", color=INK)
    axis.set(xlim=(0, 1.35 * left.max()), xlabel="modelled step, mean over ranks (ms)")
    axis.set_yticks(range(len(rows)), [f"{label} a bucket" if "layer" in label else label for label in rows["bucket"]])
    axis.invert_yaxis()
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    return figure


def timeline(replayed: Replay, rank: int) -> Figure:
    """A modelled step on one rank: what it computes, and below it the exchanges on its lane.

    Args:
        replayed: of the step.
        rank: position of the rank.
    """
    figure, (axis,) = axes(height=2.5)
    for kind, (colour, _) in _KINDS.items():
        spans = [
            (1e3 * float(span.start[rank]), 1e3 * float(span.seconds[rank]))
            for span in replayed.spans
            if span.what.split()[0] == kind and span.seconds[rank] > 0
        ]
        lane = kind in ("out", "back")
        place, hatch = (0.6 if lane else -0.4, 0.8), _HATCHES.get(kind)
        axis.broken_barh(spans, place, facecolors=colour, edgecolors=INK, linewidth=0.2, hatch=hatch)
    axis.set(xlim=(0, 1e3 * replayed.step_s), ylim=(1.5, -0.5), xlabel="time since the step began (ms)")
    axis.set_yticks([0, 1], [f"rank {rank}", "its lane"])
    handles = [
        Patch(facecolor=colour, edgecolor=INK, linewidth=0.4, hatch=_HATCHES.get(kind), label=label)
        for kind, (colour, label) in _KINDS.items()
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False, fontsize=8.5)
    return figure


def check(table: pd.DataFrame) -> Figure:
    """Measured and modelled times of the parts of a step, a panel a variant.

    Args:
        table: as of :meth:`distmuon.studies.modelcheck.Check.table`.
    """
    variants = list(dict.fromkeys(table["variant"]))
    figure, panels = axes(columns=len(variants), height=3.4)
    for axis, variant in zip(panels, variants, strict=True):
        mine = table[table["variant"] == variant].reset_index(drop=True)
        for side, (name, label) in enumerate((("measured_ms", "measured"), ("modelled_ms", "modelled"))):
            colour, _, _ = VARIANTS[side]
            axis.barh(mine.index + 0.4 * side - 0.2, mine[name], height=0.38, color=colour, label=label)
        axis.set(xlabel=f"{variant}: time of a step (ms)")
        axis.set_yticks(mine.index, mine["part"] if axis is panels[0] else [""] * len(mine))
        axis.invert_yaxis()
    panels[-1].legend(frameon=False, loc="center right")
    return figure


def _by_ranks(axis: Axes, ranks: pd.Series) -> None:
    """A logarithmic axis with a tick at each number of ranks."""
    axis.set(xscale="log", xlabel="ranks")
    ticks = sorted(set(ranks))
    axis.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axis.xaxis.set_minor_locator(NullLocator())
