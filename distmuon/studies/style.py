"""What all figures share: page width, colours, axes without frames."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

WIDTH = 9.0  # inches: a page
INK = "#222222"
#: Colour, marker and line of each variant, or side of a comparison, by its place among them.
VARIANTS = (
    ("#0072B2", "o", "-"),
    ("#E69F00", "s", "--"),
    ("#009E73", "^", ":"),
    ("#CC79A7", "D", "-."),
    ("#D55E00", "v", "-"),
    ("#56B4E9", "P", "--"),
    ("#000000", "X", ":"),
    ("#999999", "*", "-."),
)


def axes(
    rows: int = 1, columns: int = 1, *, height: float, width_ratios: Sequence[float] | None = None
) -> tuple[Figure, list[Axes]]:
    """A figure as wide as a page, and its axes, row by row."""
    with rc_context({"font.size": 9.5, "axes.spines.top": False, "axes.spines.right": False}):
        room = ConstrainedLayoutEngine(w_pad=0.1)  # so that no label touches the ticks of the panel beside it
        figure = Figure(figsize=(WIDTH, height), layout=room)
        panels = figure.subplots(rows, columns, squeeze=False, width_ratios=width_ratios)
    return figure, list(panels.flat)
