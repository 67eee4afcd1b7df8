"""The index of many runs: a table a notebook with status, parameters and key figures, and a comparison of any two.

One file that needs no network. It reads without scripts; the one inside sorts the tables and compares two runs.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distmuon.folders import RUNS
from distmuon.reporting.records import RUNNING, Record, read_records
from distmuon.reporting.templates import write_page
from distmuon.richtext import number


@dataclass(frozen=True)
class _Cell:
    """What a cell shows, and by what its column is sorted."""

    text: str
    value: float | str
    is_number: bool = False
    changed: bool = False


@dataclass(frozen=True)
class _Row:
    run: str
    page: str
    status: str
    cells: tuple[_Cell, ...]


@dataclass(frozen=True)
class _Group:
    """The runs of one notebook; what is the ``same`` in all of them is said once and has no column."""

    title: str
    notebook: str
    columns: tuple[str, ...]
    rows: tuple[_Row, ...]
    same: tuple[tuple[str, _Cell], ...]

    @property
    def numeric(self) -> tuple[bool, ...]:
        """Of each column, whether what it holds are numbers, where it holds anything."""
        cells = zip(*(row.cells for row in self.rows), strict=True)
        return tuple(any(cell.is_number for cell in column) for column in cells)


def write_index(under: Path = RUNS) -> Path:
    """Write ``index.html`` for all notebooks' runs in ``under``, beside their folders."""
    records = read_records(under)
    by_notebook: dict[str, list[Record]] = {}
    for record in records:
        by_notebook.setdefault(record.notebook, []).append(record)
    groups = [_group(notebook, by_notebook[notebook], under) for notebook in sorted(by_notebook)]
    runs = {record.folder.name: _facts(record) for record in records}
    return write_page(under / "index.html", "index", groups=groups, runs=runs, count=len(records))


def _group(notebook: str, records: Sequence[Record], under: Path) -> _Group:
    known = [name for name in _names(each.parameters for each in records) if _varies(name, records)]
    parameters = [name for name in known if len({str(each.parameters.get(name)) for each in records}) > 1]
    same = [(name, _cell(records[-1].parameters[name], changed=True)) for name in known if name not in parameters]
    figures = _names(each.figures for each in records)
    if len(records) > 1:  # the figures of one run are what it is looked up for
        alike = [name for name in figures if len({each.figures.get(name) for each in records}) == 1]
        same += [(name, _cell(records[-1].figures[name])) for name in alike]
        figures = [name for name in figures if name not in alike]
    columns = ("started (UTC)", "status", *parameters, *figures, "took (s)")
    rows = []
    for record in reversed(records):
        cells = [_cell(record.started.replace("T", " ") or "-"), _cell(_status(record))]
        for name in parameters:
            changed = name in record.defaults and record.parameters.get(name) != record.defaults[name]
            cells.append(_cell(record.parameters.get(name), changed=changed))
        cells += [_cell(record.figures.get(name)) for name in figures]
        cells.append(_cell(record.seconds and round(record.seconds, 1)))
        page = os.path.relpath(record.page, under) if record.page.exists() else ""
        rows.append(_Row(record.folder.name, page, record.status, tuple(cells)))
    title = next((each.title for each in reversed(records) if each.title), notebook)
    return _Group(title, notebook, columns, tuple(rows), tuple(same))


def _facts(record: Record) -> dict[str, Any]:
    """What the comparison shows of a run; texts and numbers alone."""
    parameters = {name: _cell(value).text for name, value in record.parameters.items()}
    commit = record.provenance.get("commit", "")
    return {
        "notebook": record.notebook,
        "status": _status(record),
        "facts": parameters | {"commit": commit, "started (UTC)": record.started.replace("T", " ")},
        "figures": dict(record.figures) | {"took (s)": record.seconds},
    }


def _status(record: Record) -> str:
    return "not ended" if record.status == RUNNING else record.status


def _names(mappings: Iterable[Mapping[str, object]]) -> list[str]:
    return list(dict.fromkeys(name for mapping in mappings for name in mapping))


def _varies(name: str, records: Sequence[Record]) -> bool:
    """Whether runs differ in a parameter, or the only run has another value than the notebook's."""
    values = [str(record.parameters.get(name)) for record in records]
    defaults = [str(record.defaults[name]) for record in records if name in record.defaults]
    return len(set(values + defaults)) > 1


def _cell(value: object, *, changed: bool = False) -> _Cell:
    if value is None:
        return _Cell("n/a", "", changed=changed)
    if isinstance(value, list | tuple):
        return _Cell(", ".join(map(str, value)), ", ".join(map(str, value)), changed=changed)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return _Cell(str(value), str(value), changed=changed)
    return _Cell(number(value), value, is_number=True, changed=changed)
