"""Figures of a training of DistMuon beside AdamW: each takes DataFrames and returns a matplotlib Figure."""

from __future__ import annotations

from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from distmuon.profiling.training_ranks import ADAMW, DISTMUON, RESUMED
from distmuon.studies.style import INK, VARIANTS, axes

_ORDER = (DISTMUON, ADAMW)


def loss_curves(losses: pd.DataFrame) -> Figure:
    """Loss by step and by time: thin each step, thick the mean of the last ones; the resumed run as rings on its own.

    Args:
        losses: as of :func:`distmuon.studies.training_tables.losses`.
    """
    figure, panels = axes(columns=2, height=3.6)
    resumed = losses[losses["run"] == RESUMED]
    start = resumed["step"].min()
    for axis, (x, label) in zip(
        panels, {"step": "step", "elapsed_s": "own time after the first step (s)"}.items(), strict=True
    ):
        for run, (colour, _, line) in zip(_ORDER, VARIANTS, strict=False):
            mine = losses[losses["run"] == run]
            axis.plot(mine[x], mine["loss"], color=colour, linewidth=0.7, alpha=0.5)
            axis.plot(mine[x], mine["smooth"], line, color=colour, linewidth=2.2, label=run)
        axis.set(xlabel=label, ylabel="loss (nats a token)")
    left = panels[0]
    left.axvline(start, ymax=0.75, color=INK, linewidth=0.8, linestyle=":")
    ring: dict[str, Any] = {"markersize": 4, "markerfacecolor": "none", "markeredgewidth": 0.8}
    left.plot(resumed["step"], resumed["loss"], "o", color=INK, label=f"{DISTMUON}, resumed at {start:g}", **ring)
    left.xaxis.set_major_locator(MaxNLocator(integer=True))
    left.legend(frameon=False, fontsize=8.5)
    return figure


def updates_and_norms(looks: pd.DataFrame) -> Figure:
    """By step, a column a weight: above how far its updates depart from orthogonal, below its spectral norm.

    Args:
        looks: as of :meth:`distmuon.profiling.training.Training.looks`.
    """
    weights = list(dict.fromkeys(looks["weight"]))
    figure, panels = axes(rows=2, columns=len(weights), height=5.0)
    values = {"departure": "departure of the update\nfrom orthogonal", "spectral_norm": "spectral norm\nof the weight"}
    for row, (value, label) in enumerate(values.items()):
        for column, weight in enumerate(weights):
            axis = panels[row * len(weights) + column]
            _lines(axis, looks[looks["weight"] == weight], "step", value)
            axis.set_ylim(bottom=0, top=1.08 * looks[value].max())
            axis.set(ylabel=label if column == 0 else "", xlabel="step" if row else "")
            axis.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=5))
            if row == 0:
                axis.set_title(_two_lines(weight), fontsize=9)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False, fontsize=8.5)
    return figure


def singular_values(spectra: pd.DataFrame) -> Figure:
    """Singular values of each weight, largest first: before the first step, and in the end.

    Args:
        spectra: as of :meth:`distmuon.profiling.training.Training.spectra`.
    """
    weights = list(dict.fromkeys(spectra["weight"]))
    figure, panels = axes(columns=len(weights), height=3.0)
    for column, (axis, weight) in enumerate(zip(panels, weights, strict=True)):
        mine = spectra[spectra["weight"] == weight]
        start = mine[(mine["time"] == "start") & (mine["run"] == DISTMUON)]
        axis.plot(start["index"] + 1, start["value"], color="#999999", linewidth=1.4, label="start, both")
        _lines(axis, mine[mine["time"] == "end"].assign(index=mine["index"] + 1), "index", "value", marked=False)
        axis.set(ylim=(0, 1.08 * spectra["value"].max()), xlabel="number", ylabel="" if column else "singular value")
        axis.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=5))
        axis.set_title(_two_lines(weight), fontsize=9)
    panels[0].legend(frameon=False, fontsize=8.5)
    return figure


def _lines(axis: Axes, rows: pd.DataFrame, x: str, y: str, marked: bool = True) -> None:
    for run, (colour, marker, line) in zip(_ORDER, VARIANTS, strict=False):
        mine = rows[rows["run"] == run]
        shape: dict[str, Any] = {"marker": marker, "markersize": 3.5} if marked else {}
        axis.plot(mine[x], mine[y], line, color=colour, linewidth=1.8, label=run, **shape)


def _two_lines(weight: str) -> str:
    """A name as a title of a narrow panel."""
    head, _, tail = weight.removesuffix(".weight").rpartition(".")
    return f"{head}\n{tail}"
