"""Render an executed notebook to one HTML file that needs neither a script nor a network.

The page is made from the notebook alone: its status is judged again, its parameters are read from its cells. What it
looks like is in ``templates/report``; here stands what goes onto it.
"""

from __future__ import annotations

import base64
import copy
import csv
import html
import io
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import nbformat
from nbconvert.exporters import HTMLExporter
from pygments.formatters import HtmlFormatter
from traitlets.config import Config

from distmuon.reporting.display import MARK, TABLE
from distmuon.reporting.outcome import Failure, Table, find_failure, find_mark
from distmuon.reporting.parameters import FOLDER_PARAMETER, actual_parameters, declared_parameters
from distmuon.reporting.selfcontained import outside_references
from distmuon.reporting.templates import TEMPLATES

#: A page larger than this is refused.
MAX_PAGE_BYTES = 2_000_000

_MAX_LINES = 200
_HIDDEN_TAGS = {"remove", "parameters", "injected-parameters", "papermill-error-cell-tag"}
_CURSOR_CODES = re.compile(r"\x1b\[[0-9;?]*[A-HJKSTfhlsu]")
# Types that need a script or a plug-in are not among them, so the text beside them is shown.
_SHOWN_TYPES = ["text/html", "text/markdown", "image/svg+xml", "image/png", "image/jpeg", "text/plain"]


@dataclass(frozen=True)
class _ParameterRow:
    name: str
    value: str
    default: str
    changed: bool
    help: str


def render(executed: Path, page: Path | None = None, links: Mapping[str, str] | None = None) -> Path:
    """Render an executed notebook.

    Args:
        executed: the notebook with its outputs.
        page: the file to write; None for the notebook's name with ``.html`` beside it.
        links: pages that lie beside this one, as label -> relative path.

    Returns:
        The page's path.

    Raises:
        ValueError: the page would need a script or a network, or is larger than ``MAX_PAGE_BYTES``; nothing is written.
    """
    page = page or executed.with_suffix(".html")
    content = to_html(nbformat.read(executed, as_version=4), executed, links)
    if references := outside_references(content):
        raise ValueError(f"{executed.name} would not be self-contained: {'; '.join(references[:5])}")
    if (size := len(content.encode())) > MAX_PAGE_BYTES:
        raise ValueError(f"{executed.name} would be {size:,} bytes as a page, the limit is {MAX_PAGE_BYTES:,}")
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(content, encoding="utf-8")
    return page


def to_html(notebook: nbformat.NotebookNode, path: Path, links: Mapping[str, str] | None = None) -> str:
    """The page of an executed notebook that was read from ``path``, with links to pages beside it."""
    failure, mark = find_failure(notebook), find_mark(notebook)
    run = notebook.metadata.get("papermill", {})
    provenance = {**notebook.metadata.get("distmuon", {}).get("provenance", {}), **(mark["provenance"] if mark else {})}
    title, cells = _body(notebook, failure)
    facts = {
        "title": title or path.stem,
        "failure": failure,
        "conclusion": mark["conclusion"] if mark and not failure else None,
        "links": dict(links or {}),
        "started": (run.get("start_time") or "")[:16].replace("T", " "),
        "duration": _duration(run.get("duration")),
        "parameters": _parameter_rows(notebook),
        "provenance": {label: text for label, text in sorted(provenance.items()) if text},
        "sections": [cell.metadata["section"] for cell in cells if "section" in cell.metadata],
        "code_style": HtmlFormatter(style="friendly").get_style_defs(".highlight"),
    }
    shown = copy.copy(notebook)
    shown.cells = cells
    exporter = HTMLExporter(
        template_name="report",
        extra_template_basedirs=[str(TEMPLATES)],
        embed_images=True,
        exclude_anchor_links=True,
        config=Config(NbConvertBase={"display_data_priority": _SHOWN_TYPES}),
    )
    content, _ = exporter.from_notebook_node(shown, {"metadata": {"path": str(path.parent)}, "page": facts})
    return str(content)


def _body(notebook: nbformat.NotebookNode, failure: Failure | None) -> tuple[str | None, list[nbformat.NotebookNode]]:
    """The title, and the cells that the page shows, with their outputs made ready."""
    title, cells = None, []
    for index, original in enumerate(notebook.cells):
        cell = copy.deepcopy(original)
        tags = set(cell.metadata.get("tags", []))
        if tags & _HIDDEN_TAGS:
            continue
        if cell.cell_type == "markdown" and title is None and (found := re.match(r"\s*# +(.+)\n*", cell.source)):
            title, cell.source = found[1].strip(), cell.source[found.end() :]
        if cell.cell_type == "markdown" and (found := re.search(r"^## +(.+)", cell.source, re.MULTILINE)):
            cell.metadata["section"] = found[1].strip()
        if cell.cell_type == "code":
            cell.outputs = [_ready(output, failure) for output in _merged(cell.outputs, failure)]
            cell.metadata["show_code"] = "remove-input" not in tags
            cell.metadata["failed"] = failure is not None and failure.cell == index
        if cell.source.strip():
            cells.append(cell)
    return title, cells


def _merged(outputs: list[nbformat.NotebookNode], failure: Failure | None) -> list[nbformat.NotebookNode]:
    """The outputs to show: progress is gone, and what a stream wrote around it is one text again."""
    merged: list[nbformat.NotebookNode] = []
    for output in outputs:
        if output.output_type != "stream":
            merged.append(output)
        elif output.name == "stdout" or failure is not None:
            if merged and merged[-1].get("name") == output.name:
                merged[-1].text += output.text
            else:
                merged.append(output)
    return [output for output in merged if output.output_type != "stream" or _settled(output.text).strip()]


def _ready(output: nbformat.NotebookNode, failure: Failure | None) -> nbformat.NotebookNode:
    """An output as the page shows it: lines settled, nothing that fetches, long text cut."""
    if output.output_type == "stream":
        output.text = _shorten(_settled(output.text))
        return output
    if "data" not in output:
        return output
    if MARK in output.data and failure is None:
        output.data = {"text/html": f"<p>{html.escape(output.data[MARK]['conclusion'])}</p>"}
    if TABLE in output.data:
        output.data["text/html"] += _data_link(output.data[TABLE])
    if references := outside_references(output.data.get("text/html", "")):
        note = f"An output was left out here: it needs {references[0]}"
        output.data = {"text/plain": f"{note}\n{output.data.get('text/plain', '')}"}
    if "text/plain" in output.data:
        output.data["text/plain"] = _shorten(output.data["text/plain"])
    return output


def _data_link(table: Table) -> str:
    """A link that holds the table's values, unrounded."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([table["columns"], *table["rows"]])
    name = re.sub(r"\W+", "-", table["caption"].lower()).strip("-")[:40] or "table"
    content = base64.b64encode(text.getvalue().encode()).decode()
    return f'<a class="data" download="{name}.csv" href="data:text/csv;base64,{content}">data (CSV)</a>'


def _settled(text: str) -> str:
    """What a terminal shows in the end: of a line that was rewritten, the last state."""
    lines = _CURSOR_CODES.sub("", text).replace("\r\n", "\n").split("\n")
    return "\n".join(line.rstrip("\r").rpartition("\r")[2] for line in lines)


def _shorten(text: str) -> str:
    lines = text.split("\n")
    if len(lines) <= _MAX_LINES:
        return text
    half = _MAX_LINES // 2
    note = f"[... {len(lines) - 2 * half} lines are in the executed notebook ...]"
    return "\n".join([*lines[:half], note, *lines[-half:]])


def _parameter_rows(notebook: nbformat.NotebookNode) -> list[_ParameterRow]:
    try:
        declared, values = declared_parameters(notebook), actual_parameters(notebook)
    except ValueError:  # a notebook that was not run by execute() may hold anything in that cell
        return []
    rows = []
    for name, declared_as in declared.items():
        value, default = values[name], declared_as.default
        changed = value != default and name != FOLDER_PARAMETER
        rows.append(_ParameterRow(name, shown_value(value), shown_value(default), changed, declared_as.help))
    return rows


def shown_value(value: object) -> str:
    """A parameter's value for a reader."""
    if isinstance(value, list | tuple):
        return ", ".join(map(shown_value, value)) or "(empty)"
    return "(empty)" if value == "" else str(value)


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return ""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
