"""What a run's folder says about the run, in files that other programs read; and the runs that a folder holds.

``parameters.json`` has the resolved parameters, ``run.json`` the outcome, ``results.json`` and ``results.parquet`` the
values of every table that the notebook shows, unrounded.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import nbformat
import pandas as pd

from distmuon.reporting.outcome import Table, find_failure, find_mark, find_tables, find_title
from distmuon.reporting.parameters import FOLDER_PARAMETER, actual_parameters, default_parameters
from distmuon.reporting.request import Request

COMPLETE, FAILED, RUNNING = "complete", "failed", "running"


@dataclass(frozen=True)
class Record:
    """One run, as its folder tells.

    Attributes:
        folder: the run's.
        notebook: its file's name.
        status: "complete", "failed", or "running": that it has not ended, or was stopped from outside.
        title: of the notebook.
        failure: where and what, of a failed run.
        conclusion: the paragraph that opens the page, of a complete one.
        figures: key figures by name.
        parameters: all but the folder for files.
        defaults: of those parameters.
        started: UTC, to the second; empty if not known.
        seconds: that it took; None if not known.
        provenance: by label.
    """

    folder: Path
    notebook: str
    status: str
    title: str = ""
    failure: Mapping[str, str] | None = None
    conclusion: str | None = None
    figures: Mapping[str, float | None] = field(default_factory=dict)
    parameters: Mapping[str, Any] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    started: str = ""
    seconds: float | None = None
    provenance: Mapping[str, str] = field(default_factory=dict)

    @property
    def page(self) -> Path:
        """Its report."""
        return self.executed.with_suffix(".html")

    @property
    def executed(self) -> Path:
        """The executed notebook."""
        return self.folder / self.notebook

    @classmethod
    def read(cls, folder: Path) -> Record:
        """Read ``run.json``.

        Raises:
            FileNotFoundError: the folder has none, so it is not that of a notebook's run.
            ValueError: it can't be read.
        """
        path = folder / "run.json"
        content = json.loads(path.read_text(encoding="utf-8"))
        try:
            return cls(folder, **content)
        except TypeError as error:
            raise ValueError(f"{path} is not the record of a run: {error}") from None


def read_records(under: Path) -> list[Record]:
    """All runs in the folders of ``under``, oldest first; what is no run of a notebook is passed over."""
    records = []
    for path in sorted(under.glob("*/run.json")):
        try:
            records.append(Record.read(path.parent))
        except ValueError:  # cut off, or of another version
            continue
    return records


def write_start(folder: Path, request: Request) -> None:
    """Say that a run has begun."""
    _write(folder / "parameters.json", dict(request.parameters))
    begun = {"notebook": request.notebook.name, "status": RUNNING, "parameters": dict(request.parameters)}
    _write(folder / "run.json", begun)


def write_results(executed: Path, notebook: nbformat.NotebookNode) -> None:
    """Say how a run ended, and what its tables hold, beside the executed notebook."""
    folder, name = executed.parent, executed.name
    failure, mark, tables = find_failure(notebook), find_mark(notebook), find_tables(notebook)
    figures = dict(mark["figures"]) if mark else {}
    times = notebook.metadata.get("papermill", {})
    defaults, actual = (
        {each: value for each, value in values.items() if each != FOLDER_PARAMETER}
        for values in (default_parameters(notebook), actual_parameters(notebook))
    )
    _write(folder / "results.json", {"figures": figures, "tables": tables})
    as_long_table(tables).to_parquet(folder / "results.parquet", index=False)
    # The last, so that a run that is said to be complete has all its files.
    _write(
        folder / "run.json",
        {
            "notebook": name,
            "status": FAILED if failure else COMPLETE,
            "title": find_title(notebook) or Path(name).stem,
            "failure": failure and {"where": failure.where, "error": failure.error},
            "conclusion": mark["conclusion"] if mark and not failure else None,
            "figures": figures,
            "parameters": actual,
            "defaults": defaults,
            "started": (times.get("start_time") or "")[:19],
            "seconds": times.get("duration"),
            "provenance": notebook.metadata["distmuon"]["provenance"],
        },
    )


def mark_failed(folder: Path, where: str, error: str) -> None:
    """Say that a run failed after all: its notebook came to its end, but not what was to be made of it."""
    content = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    failure = {"where": where, "error": error}
    _write(folder / "run.json", content | {"status": FAILED, "failure": failure, "conclusion": None})


def as_long_table(tables: Sequence[Table]) -> pd.DataFrame:
    """All cells of tables, a row each: ``table`` (its caption), ``row``, ``column``, and ``number`` or ``text``."""
    rows = []
    for table in tables:
        for number, values in enumerate(table["rows"]):
            for column, value in zip(table["columns"], values, strict=True):
                is_number = isinstance(value, int | float) and not isinstance(value, bool)
                text = None if is_number or value is None else str(value)
                rows.append((table["caption"], number, column, value if is_number else None, text))
    frame = pd.DataFrame(rows, columns=["table", "row", "column", "number", "text"])
    return frame.astype({"row": "int64", "number": "float64", "text": "string"})


def _write(path: Path, content: object) -> None:
    """Write in one piece: whoever reads at the same time finds the old content or the new."""
    part = path.with_suffix(f".part{os.getpid()}")
    part.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    part.replace(path)
