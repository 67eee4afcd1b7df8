"""Did a notebook run to its end? Judged from the executed notebook itself.

An exit code is not enough: papermill ends with 0 after ``sys.exit(0)``, and marks the cells of a dead kernel as
completed. A run is complete only if no cell shows an error, none is pending, and the last code cell wrote the mark of
:func:`distmuon.reporting.complete`.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from typing import TypedDict

import nbformat

from distmuon.reporting.display import MARK, TABLE

#: Where :func:`record_failure` writes, in the notebook's metadata.
_METADATA = "distmuon"


@dataclass(frozen=True)
class Failure:
    """Why a run is not complete.

    Attributes:
        cell: index of the cell at fault in ``notebook.cells``; None when there is none.
        where: the same for a reader: the cell's number among the code cells, and its first line.
        error: what happened, in one or a few lines.
        traceback: the traceback's lines, with the terminal's colours; may be empty.
    """

    cell: int | None
    where: str
    error: str
    traceback: tuple[str, ...] = ()


class Mark(TypedDict):
    """The data of the completion mark."""

    conclusion: str
    headline: str | None
    figures: list[tuple[str, float | None]]
    provenance: dict[str, str]


class Table(TypedDict):
    """The values of a table that a notebook shows; what is absent is None."""

    caption: str
    columns: list[str]
    rows: list[list[object]]


def record_failure(notebook: nbformat.NotebookNode, error: str) -> None:
    """Write down a failure that left no trace in a cell (a dead kernel, a timeout), at the last cell that started."""
    started = [i for i, cell in _code(notebook) if cell.metadata.get("papermill", {}).get("start_time")]
    notebook.metadata.setdefault(_METADATA, {})["failure"] = {"cell": started[-1] if started else None, "error": error}


def find_failure(notebook: nbformat.NotebookNode) -> Failure | None:
    """Why an executed notebook is not complete, or None if it is."""
    if recorded := notebook.metadata.get(_METADATA, {}).get("failure"):
        return Failure(recorded["cell"], _where(notebook, recorded["cell"]), recorded["error"])
    for index, cell in _code(notebook):
        for output in cell.outputs:
            if output.output_type == "error":
                error = f"{output.ename}: {output.evalue}"
                return Failure(index, _where(notebook, index), error, tuple(output.traceback))
    for index, cell in _code(notebook):
        if cell.execution_count is None:
            return Failure(index, _where(notebook, index), "the cell was not run")
    if find_mark(notebook) is None:
        last = max((i for i, _ in _code(notebook)), default=None)
        return Failure(
            last, _where(notebook, last), "the completion mark is missing: reporting.complete() was not reached"
        )
    return None


def find_mark(notebook: nbformat.NotebookNode) -> Mark | None:
    """The completion mark that the last code cell wrote, or None."""
    last = _code(notebook)[-1:]
    return next(
        (output.data[MARK] for _, cell in last for output in cell.outputs if MARK in output.get("data", {})), None
    )


def find_title(notebook: nbformat.NotebookNode) -> str | None:
    """The first heading ``# Title`` that opens a markdown cell, or None."""
    texts = (cell.source.lstrip() for cell in notebook.cells if cell.cell_type == "markdown")
    return next((text.partition("\n")[0].lstrip("# ").strip() for text in texts if text.startswith("# ")), None)


def find_tables(notebook: nbformat.NotebookNode) -> list[Table]:
    """The values of all tables that the notebook shows, in order."""
    outputs = [output for _, cell in _code(notebook) for output in cell.outputs]
    return [output.data[TABLE] for output in outputs if TABLE in output.get("data", {})]


def _code(notebook: nbformat.NotebookNode) -> list[tuple[int, nbformat.NotebookNode]]:
    """The code cells that do something, with their index."""
    return [(i, cell) for i, cell in enumerate(notebook.cells) if cell.cell_type == "code" and cell.source.strip()]


def _where(notebook: nbformat.NotebookNode, index: int | None) -> str:
    """Name a cell for a reader: its number among the author's code cells, the heading above it, its first line."""
    if index is None:
        return "before the first cell"
    count = sum(
        i <= index and "injected-parameters" not in cell.metadata.get("tags", []) for i, cell in _code(notebook)
    )
    above = [
        line for cell in notebook.cells[:index] if cell.cell_type == "markdown" for line in cell.source.splitlines()
    ]
    heading = next((line.lstrip("# ") for line in reversed(above) if line.startswith("#")), None)
    under = f", under “{heading}”" if heading else ""
    line = notebook.cells[index].source.strip().splitlines()[0]
    return f"code cell {count}{under}: {textwrap.shorten(line, 80, placeholder=' ...')}"
