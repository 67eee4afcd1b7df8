"""Every number on the page of a notebook follows from the files of its run: recomputed here from those.

Tables, key figures and sentences are made again from what was read back; test_recomputed_tables.py works out the
tables by other means.
"""

from __future__ import annotations

import base64
import csv
import io
import re
from collections.abc import Callable, Iterable
from html import unescape
from pathlib import Path
from typing import NamedTuple

import pandas as pd
import pytest
from executed import SMALL, Executed

from distmuon.planning.plan import Plan
from distmuon.profiling.results import Run
from distmuon.profiling.training import Training
from distmuon.richtext import number
from distmuon.studies import ablation, comparison_tables, scale_report, tour, training_tables, whereabouts
from distmuon.studies import profile_findings as findings
from distmuon.studies import profile_plots as plots
from distmuon.studies import profile_tables as tables
from distmuon.traces.comparison import Comparison
from distmuon.workloads.storage import plan_for

DOCUMENT = Path(__file__).parents[1] / "docs/metrics.md"
pytestmark = pytest.mark.slow


class Made(NamedTuple):
    """What a page shows, made from files."""

    tables: list[pd.DataFrame]
    figures: dict[str, float]
    sentences: list[str]


def tour_again(run: Executed) -> Made:
    found, name = tour.Tour.read(run.files), run.parameters["parameter"]
    sentences = [
        tour.conclusion(found),
        whereabouts.regions_finding(found.regions, name),
        whereabouts.ownership_finding(found.regions),
        tour.sweep_finding(found.sweep),
        findings.overlap(plots.typical_step(found.run.events, run.parameters["variant"])),
        found.run._line(),
        tour_plan(run)._line(),
    ]
    frames = [whereabouts.of_parameter(found.regions, name), tour.sweep_table(found.sweep)]
    return Made(frames, tour.key_figures(found), sentences)


def tour_plan(run: Executed) -> Plan:
    return plan_for(run.parameters["workload"], **{name: run.parameters[name] for name in ("ranks", "ep", "variant")})


def profile_again(run: Executed) -> Made:
    found, published = Run.read(run.files), tables.load_published()
    frames = [
        tables.published_table(found, published),
        tables.sources_table(found, published),
        tables.rank_table(found),
        tables.equality_table(found),
    ]
    sentences = [
        findings.conclusion(found, published),
        findings.overlap(plots.typical_step(found.events, found.variants[-1])),
        *(finding(found) for finding in (findings.counts, findings.spans, findings.training)),
    ]
    return Made(frames, tables.key_figures(found), sentences)


def ablation_again(run: Executed) -> Made:
    found = ablation.Ablation.read(run.files)
    frames = [
        ablation.counts_table(found.counts),
        ablation.brief(ablation.sources_table(found.counts)),
        ablation.times_table(found),
    ]
    sentences = [
        ablation.conclusion(found),
        ablation.launches_finding(found.counts),
        ablation.times_finding(found),
        ablation.sweep_finding(found.sweep, found.run.summary["settings"]["device"]),
    ]
    return Made(frames, ablation.key_figures(found), sentences)


def scale_again(run: Executed) -> Made:
    found = scale_report.Scale.read(run.files)
    frames = [
        scale_report.assumptions_table(found.job),
        found.planning,
        scale_report.balance_table(found.ranks),
        scale_report.display(found.shared),
        scale_report.display(found.buckets),
        scale_report.display_check(found.check.table()),
    ]
    sentences = [
        scale_report.conclusion(found),
        scale_report.balance_finding(found.ranks),
        scale_report.step_finding(found.ranks),
        scale_report.sharing_finding(found.shared),
    ]
    return Made(frames, scale_report.key_figures(found), sentences)


def comparison_again(run: Executed) -> Made:
    found, rows = Comparison.read(run.files), run.parameters["rows"]
    short, work = comparison_tables.short_work_table(found, rows), comparison_tables.work_table(found)
    frames = [
        comparison_tables.sides_table(found),
        comparison_tables.counts_table(found),
        comparison_tables.spans_table(found),
        short,
        comparison_tables.ranks_table(found),
    ]
    sentences = [comparison_tables.conclusion(found), f"{len(short)} of {len(work)}"]
    return Made(frames, comparison_tables.key_figures(found), sentences)


def training_again(run: Executed) -> Made:
    found = Training.read(run.files)
    frames = [
        training_tables.overview(found),
        training_tables.weights_table(found),
        training_tables.memory_table(found),
    ]
    sentences = [training_tables.conclusion(found), training_tables.spectrum_finding(found)]
    return Made(frames, training_tables.key_figures(found), sentences)


AGAIN: dict[str, Callable[[Executed], Made]] = {
    "00_tour": tour_again,
    "01_published_profile": profile_again,
    "02_ablation": ablation_again,
    "03_scale": scale_again,
    "04_compare_traces": comparison_again,
    "05_training": training_again,
}


@pytest.fixture(params=SMALL)
def run(request: pytest.FixtureRequest, executed: Callable[[str], Executed]) -> Executed:
    return executed(request.param)


@pytest.fixture
def made(run: Executed) -> Made:
    return AGAIN[run.run.notebook.stem](run)


def test_tables_and_key_figures_are_those_of_the_files(run: Executed, made: Made) -> None:
    assert len(run.tables) == len(made.tables)
    for frame, table in zip(made.tables, run.tables, strict=True):
        assert table["columns"] == list(frame.columns)
        for again, stored in zip(frame.astype(object).to_numpy().tolist(), table["rows"], strict=True):
            again = [None if pd.isna(value) else value for value in again]
            assert again == pytest.approx(stored, nan_ok=True) if numeric(again) else again == stored
    assert run.results["figures"] == pytest.approx(
        {name: None if pd.isna(value) else value for name, value in made.figures.items()}
    )
    assert len(made.figures) >= 6


def numeric(values: Iterable[object]) -> bool:
    return all(isinstance(value, int | float) for value in values)


def numbers(text: str) -> set[str]:
    """The numbers in a text as they are written, those inside of names left out."""
    return {found.rstrip(".,") for found in re.findall(r"(?<![\w.])\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?", unescape(text))}


def test_every_number_in_computed_prose_follows_from_the_files(run: Executed, made: Made) -> None:
    known = set[str]().union(*map(numbers, made.sentences), *(numbers(str(each)) for each in run.parameters.values()))
    known |= {f"{value:,}" for value in run.parameters.values() if isinstance(value, int)}
    told = [text for text in run.prose() if text.strip()]
    assert len(set().union(*map(numbers, told))) > 10
    assert {text: unknown for text in told if (unknown := numbers(text) - known)} == {}
    assert made.sentences[0] in run.text, "the conclusion opens the page"


def test_the_page_shows_what_is_stored(run: Executed) -> None:
    pages = run.page.tables
    for table in run.tables:
        (cells,) = (each[1:] for each in pages if each[0] == table["columns"] and len(each) == len(table["rows"]) + 1)
        for shown, stored in zip(cells, table["rows"], strict=True):
            for text, value in zip(shown, stored, strict=True):
                assert is_written(text, value), (text, value)


def is_written(text: str, value: object) -> bool:
    """Whether a cell shows a value, to half a unit of its last digit."""
    if value is None:
        return text == "n/a"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return text == value or "…" in text
    share = 100 if text.endswith("%") else 1
    digits = text.rstrip("%").replace(",", "")
    if "e" in digits:
        return text == number(value)
    half = 0.5 * 10.0 ** -len(digits.partition(".")[2])
    return abs(float(digits) - share * value) <= half * (1 + 1e-9)


def test_the_data_inside_of_the_page_are_those_stored(run: Executed) -> None:
    found = re.findall(r'href="data:text/csv;base64,([^"]+)"', run.html)
    assert len(found) == len(run.tables)
    for content, table in zip(found, run.tables, strict=True):
        header, *rows = csv.reader(io.StringIO(base64.b64decode(content).decode()))
        assert header == table["columns"]
        assert rows == [["" if value is None else str(value) for value in row] for row in table["rows"]]


def test_the_tables_of_objects_are_those_of_the_files(executed: Callable[[str], Executed]) -> None:
    run = executed("00_tour")
    assert Run.read(run.files)._repr_html_().partition("</caption>")[2] in run.html
    assert tour_plan(run)._repr_html_() in run.html


@pytest.mark.parametrize(
    ("name", "kind"), [("00_tour", tour.Tour), ("02_ablation", ablation.Ablation), ("03_scale", scale_report.Scale)]
)
def test_what_a_notebook_found_shows_itself_as_its_key_figures(
    name: str, kind: type[tour.Tour | ablation.Ablation | scale_report.Scale], executed: Callable[[str], Executed]
) -> None:
    run = executed(name)
    found = kind.read(run.files)
    shown = re.findall(r"<tr><td[^>]*>(.*?)</td><td[^>]*>(.*?)</td></tr>", found._repr_html_())
    assert run.run.mark
    figures = [[label, "n/a" if value is None else number(value)] for label, value in run.run.mark["figures"]]
    assert [[unescape(label), value] for label, value in shown] == figures
    assert repr(found).startswith(f"<{kind.__name__}: ")


#: What stands for a placeholder in docs/metrics.md; ``<label>`` stands for the labels of a comparison's sides.
PLACEHOLDERS = {
    "variant": r"\S+",
    "which": "(first|last)",
    "side": "(a|b)",
    "optimizer": "(DistMuon|AdamW)",
    "span": "(CPU|GPU) span",
    "part": "(compute|copies|exposed exchange|idle)",
    "direction": ".+",
    "label": "(baseline|fused)",
}


def explained(notebook: str) -> re.Pattern[str]:
    """What matches the names that docs/metrics.md explains for a notebook, a profile, and a plan."""
    sections = DOCUMENT.read_text().split("\n## ")
    (own,) = (each for each in sections if each.startswith(f"Notebook {notebook[:2]}:"))
    profile, plans = (each for each in sections if each.startswith(("A profile\n", "Plans\n")))
    names = set(re.findall("`([^`]+)`", own + profile + plans))
    patterns = "|".join(map(re.escape, names))
    return re.compile(re.sub("<([a-z]+)>", lambda found: PLACEHOLDERS.get(found[1], found[0]), patterns))


def test_every_column_and_key_figure_is_explained(run: Executed) -> None:
    of_parameters, *shown = run.page.tables
    assert of_parameters[0] == ["name", "value", "default", "meaning"]
    names = {name.strip() for table in shown for name in table[0]} | set(run.results["figures"])
    files = list(run.files.rglob("*.parquet"))
    assert files, "what tables were made of lies in the files"
    for file in files:
        names |= set(pd.read_parquet(file).columns)
    known = explained(run.run.notebook.stem)
    assert sorted(name for name in names if not known.fullmatch(name)) == []
