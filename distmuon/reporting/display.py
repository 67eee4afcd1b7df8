"""What a notebook shows: figures with alt text, tables, and the mark that says it reached its end.

Everything is displayed as plain HTML that looks the same in JupyterLab and on the rendered page.
"""

from __future__ import annotations

import base64
import html
import io
import math
from collections.abc import Callable, Mapping
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, SupportsFloat

import pandas as pd
from IPython.display import display
from pandas.api.types import is_bool_dtype, is_numeric_dtype

from distmuon.provenance import provenance
from distmuon.richtext import html_table, number

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: MIME type of the completion mark; its data are those of ``distmuon.reporting.outcome.Mark``.
MARK = "application/vnd.distmuon.complete+json"

#: MIME type of a table's values; its data are those of ``distmuon.reporting.outcome.Table``.
TABLE = "application/vnd.distmuon.table+json"

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
        formats: by column, a format string such as ``"{:+z.1%}"`` or a function from value to text. Other numbers are
            written by :func:`distmuon.richtext.number`.
        index: show the frame's index as first columns.

    Raises:
        ValueError: ``formats`` names a column that the table lacks.
    """
    frame = frame.reset_index() if index else frame
    written = _written(frame, formats or {})
    values = {"caption": caption or "", "columns": list(map(str, frame.columns)), "rows": _values(frame)}
    _show(_table_html(frame, written, caption), plain=_plain(written), extra={TABLE: values})


def complete(
    conclusion: str,
    *,
    headline: pd.DataFrame | None = None,
    formats: Mapping[str, Format] | None = None,
    figures: Mapping[str, SupportsFloat] | None = None,
    **details: object,
) -> None:
    """Mark the notebook as complete. The last call of its last code cell.

    A run whose notebook lacks this mark counts as failed, whatever its exit code.

    Args:
        conclusion: one paragraph, computed from the numbers. It is shown in place, and opens the page.
        headline: the table that is printed in the terminal when the run ends.
        formats: how to write its columns, as in :func:`table`.
        figures: the key figures by name, with units in the names: what an index of many runs lists and compares.
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
    key_figures = [[name, _value(value)] for name, value in (figures or {}).items()]  # notebooks sort mappings
    mark = {"conclusion": conclusion, "headline": text, "figures": key_figures, "provenance": facts}
    _show(page, plain=conclusion, extra={MARK: mark})


def _show(page: str, plain: str, extra: Mapping[str, object] | None = None) -> None:
    display({"text/html": page, "text/plain": plain, **(extra or {})}, raw=True)


def _written(frame: pd.DataFrame, formats: Mapping[Any, Format]) -> pd.DataFrame:
    """The frame with each value as the text that is shown."""
    if missing := sorted(set(formats) - set(frame.columns)):
        raise ValueError(f"formats for columns {missing} that the table lacks; it has {list(map(str, frame.columns))}")
    columns = [[_cell(value, formats.get(name)) for value in values] for name, values in frame.items()]
    return pd.DataFrame(dict(enumerate(columns)), dtype=object).set_axis(frame.columns, axis="columns")


def _values(frame: pd.DataFrame) -> list[list[object]]:
    """The frame's values for JSON, a list a row."""
    return [[_value(value) for value in row] for row in frame.itertuples(index=False, name=None)]


def _value(value: Any) -> object:
    """As JSON has it: what is absent or no finite number is None, what is neither number nor text becomes text."""
    if pd.api.types.is_scalar(value) and pd.isna(value):
        return None
    if isinstance(value, bool | str):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value) if math.isfinite(value) else None
    return str(value)


def _cell(value: Any, form: Format | None) -> str:
    if pd.api.types.is_scalar(value) and pd.isna(value):
        return "n/a"
    if form is not None:
        return form.format(value) if isinstance(form, str) else form(value)
    return number(value) if isinstance(value, Real) and not isinstance(value, bool) else str(value)


def _table_html(frame: pd.DataFrame, written: pd.DataFrame, caption: str | None) -> str:
    """``written`` as a table, with the numeric columns of ``frame``."""
    numeric = [is_numeric_dtype(dtype) and not is_bool_dtype(dtype) for dtype in frame.dtypes]
    rows = written.itertuples(index=False, name=None)
    return html_table(list(map(str, frame.columns)), rows, numeric, caption)


def _plain(written: pd.DataFrame) -> str:
    return written.to_string(index=False)
