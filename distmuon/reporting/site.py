"""A static folder of reports: the page of each notebook, linked to one another and to their data.

All links are relative, so that the folder can be served from anywhere, or opened from a disk.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from distmuon.folders import RUNS
from distmuon.reporting.records import COMPLETE, Record, read_records
from distmuon.reporting.rendering import render, shown_value
from distmuon.reporting.templates import write_page
from distmuon.richtext import number

#: Files of a run larger than this stay where they are, as traces do.
MAX_DATA_BYTES = 5_000_000

_INDEX = "index.html"


@dataclass(frozen=True)
class _Entry:
    title: str
    page: str
    conclusion: str
    started: str
    figures: tuple[tuple[str, str], ...]
    parameters: tuple[tuple[str, str], ...]
    data: tuple[str, ...]
    later_failure: str


def write_site(folder: Path, notebooks: Sequence[Path], under: Path = RUNS) -> Path:
    """Write the site.

    Args:
        folder: for the site; what a site wrote there before is replaced.
        notebooks: whose reports, in this order; those without a complete run are left out.
        under: the folder that holds the folders of runs. Of each notebook the latest complete run counts that had its
            default parameters, or if there is none the latest of all.

    Returns:
        The path of ``index.html``.

    Raises:
        ValueError: no notebook has a complete run.
        FileExistsError: ``folder`` holds something else than a site.
    """
    records = read_records(under)
    chosen = {path: found for path in notebooks if (found := _latest(records, path.name))}
    if not chosen:
        names = ", ".join(path.name for path in notebooks)
        raise ValueError(f"{under} holds no complete run of {names}: run `make report` first")
    if folder.exists():
        if any(folder.iterdir()) and not (folder / _INDEX).exists():
            raise FileExistsError(f"{folder} holds something else than a site: name another folder")
        shutil.rmtree(folder)
    pages = {path: f"{path.stem}.html" for path in chosen}
    entries = []
    for path, record in chosen.items():
        data = _copy_data(record, folder / path.stem)
        links = {"All reports": _INDEX}
        links |= {chosen[other].title: page for other, page in pages.items() if other is not path}
        links |= {f"Data: {Path(name).name}": name for name in data}
        render(record.executed, folder / pages[path], links)
        entries.append(_entry(record, pages[path], data, records))
    return write_page(folder / _INDEX, "site", entries=entries)


def _latest(records: Sequence[Record], notebook: str) -> Record | None:
    complete = [each for each in records if each.notebook == notebook and each.status == COMPLETE]
    by_default = [each for each in complete if not _changed(each)]
    return (by_default or complete)[-1] if complete else None


def _changed(record: Record) -> dict[str, object]:
    """The parameters that are not the notebook's own."""
    return {name: value for name, value in record.parameters.items() if value != record.defaults.get(name)}


def _copy_data(record: Record, folder: Path) -> tuple[str, ...]:
    """Copy results and the notebook's own JSON and parquet files; returns their paths in the site."""
    files = [record.folder / "results.json", record.folder / "results.parquet", record.folder / "parameters.json"]
    files += sorted(path for path in record.folder.glob("files/*") if path.suffix in (".json", ".parquet"))
    kept = [path for path in files if path.exists() and path.stat().st_size <= MAX_DATA_BYTES]
    folder.mkdir(parents=True)
    for path in kept:
        shutil.copyfile(path, folder / path.name)
    return tuple(f"{folder.name}/{path.name}" for path in kept)


def _entry(record: Record, page: str, data: tuple[str, ...], records: Sequence[Record]) -> _Entry:
    last = next(each for each in reversed(records) if each.notebook == record.notebook)
    failed = last is not record and last.status != COMPLETE
    return _Entry(
        record.title,
        page,
        record.conclusion or "",
        record.started.replace("T", " ")[:16],
        tuple((name, "n/a" if value is None else number(value)) for name, value in record.figures.items()),
        tuple((name, shown_value(value)) for name, value in _changed(record).items()),
        data,
        f"A later run, {last.folder.name}, did not come to its end." if failed else "",
    )
