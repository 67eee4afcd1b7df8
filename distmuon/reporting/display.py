"""What a notebook shows: figures with alt text, tables, and the mark that says it reached its end.

Everything is displayed as plain HTML that looks the same in JupyterLab and on the rendered page.
"""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Callable, Iterable, Mapping
from numbers import Real
from typing import TYPE_CHECKING, Any, SupportsFloat

import pandas as pd
from IPython.display import display
from pandas.api.types import is_bool_dtype, is_numeric_dtype

from distmuon.provenance import provenance

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: MIME type of the completion mark; its data are those of ``distmuon.reporting.outcome.Mark``.
MARK = "application/vnd.distmuon.complete+json"

Format = str | Callable[[Any], str]


def figure(figure: Figure, alt: str, caption: str | None = None, *, dpi: int = 144) -> None:
    """Show a matplotlib figure as an inlined PNG and close it.

    Args:
        figure: the figure. A page is 9 inches wide.
        alt: what the figure shows, in a sentence that states the finding.
        caption: text under the figure; None for no caption.
        dpi: pixels an inch.

    Raises:
        ValueError: ``alt`` is blank.
    """
    import matplotlib.pyplot as plt  # not needed by a notebook that only shows tables

    if not alt.strip():
        raise ValueError("a figure needs alt text: a sentence that states what it shows")
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=dpi, bbox_inches="tight", metadata={"Software": None})
    plt.close(figure)
    source = f"data:image/png;base64,{base64.b64encode(picture.getvalue()).decode()}"
    width = int.from_bytes(picture.getvalue()[16:20], "big") * 96 // dpi  # pixels by the PNG's header, at its real size
    note = f"<figcaption>{html.escape(caption)}</figcaption>" if caption else ""
    image = f'<img src="{source}" alt="{html.escape(alt)}" width="{width}" style="max-width:100%;height:auto">'
    _show(f"<figure>{image}{note}</figure>", plain=alt)


def table(
    frame: pd.DataFrame, caption: str | None = None, *, formats: Mapping[str, Format] | None = None, index: bool = False
) -> None:
    """Show a table: numbers right-aligned, text left-aligned, absent values as "n/a".

    Args:
        frame: the table; units belong in its column names.
        caption: text above the table; None for no caption.
        formats: by column, a format string such as ``"{:+.1%}"`` or a function from value to text. Other numbers are
            written by :func:`number`.
        index: show the frame's index as first columns.

    Raises:
        ValueError: ``formats`` names a column that the table lacks.
    """
    frame = frame.reset_index() if index else frame
    written = _written(frame, formats or {})
    _show(_table_html(frame, written, caption), plain=_plain(written))


def number(value: SupportsFloat) -> str:
    """A number for reading: 1,474 · 1,421.5 · 0.0312 — at most two decimals, three digits below one."""
    value = float(value)
    if value.is_integer():
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) < 1 else f"{value:,.2f}".rstrip("0").rstrip(".")


def complete(
    conclusion: str,
    *,
    headline: pd.DataFrame | None = None,
    formats: Mapping[str, Format] | None = None,
    **details: object,
) -> None:
    """Mark the notebook as complete. The last call of its last code cell.

    A run whose notebook lacks this mark counts as failed, whatever its exit code.

    Args:
        conclusion: one paragraph, computed from the numbers. It is shown in place, and opens the page.
        headline: the table that is printed in the terminal when the run ends.
        formats: how to write its columns, as in :func:`table`.
        details: what else belongs into the provenance, by label (underscores become spaces): a seed, a data digest.

    Raises:
        ValueError: ``conclusion`` is blank.
    """
    if not conclusion.strip():
        raise ValueError("complete() needs a conclusion: a paragraph computed from the numbers")
    facts = provenance() | {label.replace("_", " "): str(value) for label, value in details.items()}
    text = None if headline is None else _plain(_written(headline, formats or {}))
    listing = "".join(f"<dt>{html.escape(label)}</dt><dd>{html.escape(fact)}</dd>" for label, fact in facts.items())
    page = f"<p>{html.escape(conclusion)}</p><details><summary>Provenance</summary><dl>{listing}</dl></details>"
    mark = {"conclusion": conclusion, "headline": text, "provenance": facts}
    _show(page, plain=conclusion, extra={MARK: mark})


def _show(page: str, plain: str, extra: Mapping[str, object] | None = None) -> None:
    display({"text/html": page, "text/plain": plain, **(extra or {})}, raw=True)


def _written(frame: pd.DataFrame, formats: Mapping[Any, Format]) -> pd.DataFrame:
    """The frame with each value as the text that is shown."""
    if missing := sorted(set(formats) - set(frame.columns)):
        raise ValueError(f"formats for columns {missing} that the table lacks; it has {list(map(str, frame.columns))}")
    columns = [[_cell(value, formats.get(name)) for value in values] for name, values in frame.items()]
    return pd.DataFrame(dict(enumerate(columns)), dtype=object).set_axis(frame.columns, axis="columns")


def _cell(value: Any, form: Format | None) -> str:
    if pd.api.types.is_scalar(value) and pd.isna(value):
        return "n/a"
    if form is not None:
        return form.format(value) if isinstance(form, str) else form(value)
    return number(value) if isinstance(value, Real) and not isinstance(value, bool) else str(value)


def _table_html(frame: pd.DataFrame, written: pd.DataFrame, caption: str | None) -> str:
    """``written`` as a table whose numeric columns in ``frame`` are marked for the page's style."""
    numeric = [is_numeric_dtype(dtype) and not is_bool_dtype(dtype) for dtype in frame.dtypes]
    kinds = ["number" if is_number else "text" for is_number in numeric]

    def row(tag: str, texts: Iterable[str]) -> str:
        pairs = zip(kinds, texts, strict=True)
        cells = [f'<{tag} class="{kind}">{html.escape(text)}</{tag}>' for kind, text in pairs]
        return f"<tr>{''.join(cells)}</tr>"

    title = f"<caption>{html.escape(caption)}</caption>" if caption else ""
    head = row("th", map(str, frame.columns))
    body = "".join(row("td", texts) for texts in written.itertuples(index=False, name=None))
    return f'<table class="report">{title}<thead>{head}</thead><tbody>{body}</tbody></table>'


def _plain(written: pd.DataFrame) -> str:
    return written.to_string(index=False)
