"""Every number on the page of the published profile follows from the files of its run: recomputed here from those."""

from __future__ import annotations

import json
from html import unescape
from pathlib import Path

import pandas as pd
import pytest
from pages import Page

from distmuon.profiling import findings, tables
from distmuon.profiling.results import Run
from distmuon.reporting.execution import execute
from distmuon.reporting.rendering import render
from distmuon.reporting.request import Request

ROOT = Path(__file__).parents[1]
NOTEBOOK = ROOT / "notebooks/01_published_profile.ipynb"
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small run, with its page."""
    folder = tmp_path_factory.mktemp("profile") / "run"
    given = {"workload": "tiny", "steps": 2, "repeats": 1, "tokens": 32}
    run = execute(Request.of(NOTEBOOK, given), folder)
    assert run.failure is None
    render(run.notebook)
    return folder


def shown(folder: Path) -> list[list[list[str]]]:
    """The tables of the page; the first is that of the parameters."""
    return Page(folder / "01_published_profile.html").tables[1:]


def read(text: str) -> float:
    """A number as the page writes it."""
    return float(text.replace(",", "").rstrip("%")) / (100 if text.endswith("%") else 1)


def test_times_follow_from_the_events(folder: Path) -> None:
    events = pd.read_parquet(folder / "files/events.parquet")
    milliseconds = events.assign(ms=events["duration_us"] / 1e3, transfer=events["transfer_us"] / 1e3)
    optimizer, exchanges = (milliseconds[milliseconds["kind"] == kind] for kind in ("optimizer", "exchange"))
    header, *rows = shown(folder)[2]
    for row in rows:
        cells = dict(zip(header, row, strict=True))
        mine = (optimizer["variant"] == cells["variant"]) & (optimizer["rank"] == int(cells["rank"]))
        span = optimizer[mine]["ms"]
        assert [read(cells[name]) for name in ("CPU span (ms)", "from", "to")] == pytest.approx(
            [span.mean(), span.min(), span.max()], abs=0.051
        )
        sent = exchanges[(exchanges["variant"] == cells["variant"]) & (exchanges["rank"] == int(cells["rank"]))]
        assert read(cells["sent (KiB)"]) == pytest.approx(sent["bytes"].sum() / len(span) / 1024, abs=0.0051)
        assert read(cells["collectives"]) == len(sent) / len(span)
        assert read(cells["transfer (ms)"]) == pytest.approx(sent["transfer"].sum() / len(span), abs=0.051)


def test_counts_follow_from_the_ranks(folder: Path) -> None:
    summary = json.loads((folder / "files/summary.json").read_text())
    header, *rows = shown(folder)[0]
    metrics = ("async_copies", "launches", "collectives")
    for row, metric in zip(rows, metrics, strict=False):
        for variant in ("baseline", "batched"):
            ranks = [rank[metric] for rank in summary["variants"][variant]["per_rank"]]
            assert read(row[header.index(variant)]) == pytest.approx(sum(ranks) / len(ranks), abs=0.0051)
        before, after = (read(row[header.index(variant)]) for variant in ("baseline", "batched"))
        assert read(row[header.index("change")]) == pytest.approx(after / before - 1, abs=0.00051)


def test_sources_add_up_to_the_totals(folder: Path) -> None:
    header, *rows, total = shown(folder)[1]
    for column in range(1, len(header) - 1):
        assert sum(read(row[column]) for row in rows) == pytest.approx(read(total[column]), abs=0.02)


def test_tables_and_prose_are_those_of_the_files(folder: Path) -> None:
    run, published = Run.read(folder / "files"), tables.load_published()
    frames = [
        tables.published_table(run, published),
        tables.sources_table(run, published),
        tables.rank_table(run),
        tables.equality_table(run),
    ]
    stored = json.loads((folder / "results.json").read_text())
    assert len(stored["tables"]) == len(frames) == len(shown(folder))
    for frame, table in zip(frames, stored["tables"], strict=True):
        assert table["columns"] == list(frame.columns)
        assert table["rows"] == frame.astype(object).where(frame.notna(), None).to_numpy().tolist()
    assert stored["figures"] == pytest.approx(tables.key_figures(run))
    page = unescape((folder / "01_published_profile.html").read_text())
    assert findings.conclusion(run, published) in page
    for finding in (findings.counts, findings.spans, findings.training):
        assert finding(run) in page


def test_every_column_is_explained(folder: Path) -> None:
    text = (ROOT / "docs/metrics.md").read_text()
    events = pd.read_parquet(folder / "files/events.parquet")
    columns = {name for table in shown(folder) for name in table[0] if ", " not in name} | set(events.columns)
    assert {name for name in columns if f"`{name}`" not in text} == set()
