"""Tables as HTML and as text, for objects that show themselves in a notebook and in a terminal."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from typing import SupportsFloat

NBSP = "\N{NO-BREAK SPACE}"

_LEFT = 'style="text-align: left"'


def number(value: SupportsFloat) -> str:
    """A number for reading: 1,474 · 1,421.5 · 0.0312 — at most two decimals, three digits below one."""
    value = float(value)
    if value.is_integer():
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) < 1 else f"{value:,.2f}".rstrip("0").rstrip(".")


def about(value: float) -> str:
    """A number for a sentence: without decimals from 10 on, else as :func:`number` writes it."""
    return number(round(value) if abs(value) >= 10 else value)


def counted(count: int, one: str, many: str) -> str:
    """So many of something: 1 matrix, 1,474 matrices."""
    return f"{count:,} {one if count == 1 else many}"


def html_table(
    header: Sequence[str], rows: Iterable[Sequence[str]], numeric: Sequence[bool], caption: str | None = None
) -> str:
    """A table whose ``numeric`` columns are right-aligned, the others left-aligned.

    Args:
        header: names of the columns, with units.
        rows: the texts of the cells.
        numeric: for each column whether it holds numbers.
        caption: above the table.
    """
    # JupyterLab sets all cells to the right and captions in the middle; only what a cell says itself overrules that.
    kinds = ['class="number"' if is_number else f'class="text" {_LEFT}' for is_number in numeric]

    def row(tag: str, texts: Iterable[str]) -> str:
        pairs = zip(kinds, texts, strict=True)
        cells = [f"<{tag} {kind}>{html.escape(text)}</{tag}>" for kind, text in pairs]
        return f"<tr>{''.join(cells)}</tr>"

    title = f"<caption {_LEFT}>{html.escape(caption)}</caption>" if caption else ""
    body = "".join(row("td", texts) for texts in rows)
    return f'<table class="report">{title}<thead>{row("th", header)}</thead><tbody>{body}</tbody></table>'


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]], numeric: Sequence[bool]) -> str:
    """The same as aligned text."""
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    lines = []
    for row in (header, *rows):
        cells = zip(row, widths, numeric, strict=True)
        padded = [text.rjust(width) if is_number else text.ljust(width) for text, width, is_number in cells]
        lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)


class Shown:
    """Shows an object as a line, a text table and an HTML table; a dataclass that inherits it is made ``repr=False``.

    Subclasses say what in :meth:`_line` and :meth:`_table`.
    """

    def _line(self) -> str:
        """The object on one line."""
        raise NotImplementedError

    def _table(self) -> tuple[Sequence[str], list[Sequence[object]]]:
        """Header and rows; numbers are written by :func:`number`, None as "n/a"."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self._line()}>"

    def __str__(self) -> str:
        return f"{self._line()}\n\n{text_table(*self._written())}"

    def _repr_html_(self) -> str:
        return html_table(*self._written(), caption=self._line())

    def _written(self) -> tuple[Sequence[str], list[list[str]], list[bool]]:
        header, rows = self._table()
        texts = [["n/a" if value is None else _text(value) for value in row] for row in rows]
        columns = list(zip(*rows, strict=True)) if rows else [()] * len(header)
        numeric = [bool(column) and all(value is None or _is_number(value) for value in column) for column in columns]
        return header, texts, numeric


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _text(value: object) -> str:
    return number(value) if isinstance(value, int | float) and not isinstance(value, bool) else str(value)
