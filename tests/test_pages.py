"""Executed notebooks become pages that need neither script nor network."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path

import nbformat
import pandas as pd
import pytest
from matplotlib.image import imread
from nbformat.v4 import new_code_cell, new_notebook, new_output
from pages import Page, needs_browser, open_page, write_notebook

from distmuon.reporting.execution import Run
from distmuon.reporting.rendering import MAX_PAGE_BYTES, render
from distmuon.reporting.selfcontained import outside_references
from distmuon.richtext import number

ROOT = Path(__file__).parents[1]


def test_page_has_no_outside_reference(page: Path) -> None:
    assert outside_references(page.read_text()) == []
    assert page.stat().st_size < MAX_PAGE_BYTES


def test_images_are_inlined_with_alt_text(page: Path) -> None:
    images = Page(page).images
    assert [image["alt"] for image in images] == ["Blue <all over>", "A figure without a description"]
    assert all((image["src"] or "").startswith("data:image/png;base64,") for image in images)


def test_progress_shows_while_running_and_is_gone_from_the_page(sample: tuple[Run, str], page: Path) -> None:
    _, shown = sample
    text = Page(page).open_text
    assert "PROGRESS 2" in shown
    assert "REWRITTEN 1" in shown
    assert "PROGRESS" not in text
    assert "REWRITTEN" not in text
    assert "SETTLED" in text


def test_code_is_folded_and_removed_cells_are_gone(page: Path) -> None:
    content = Page(page)
    assert "plt.subplots" in content.folded_text
    assert "plt.subplots" not in content.open_text
    assert "REMOVED" not in content.folded_text + content.open_text


def test_page_opens_with_status_conclusion_and_what_is_not_default(page: Path) -> None:
    text = Page(page).open_text
    first_section = text.index("What this page is about")
    assert text.index("A sample") < text.index("COMPLETE") < text.index("Fewer copies.") < first_section
    html = page.read_text()
    assert re.findall(r'<tr class="changed"><td>(\w+)</td><td>([^<]*)', html) == [
        ("workload", "12e3"),
        ("variants", "baseline, fused"),
    ]
    assert "what to train" in html


def test_page_ends_with_its_provenance(page: Path) -> None:
    text = Page(page).open_text
    provenance = text[text.rindex("Provenance") :]
    for label in ("commit", "device", "packages", "processor", "make sample", "seed", "tokens digest", "ab12"):
        assert label in provenance


def test_tables_align_text_and_numbers_and_say_what_is_absent(page: Path) -> None:
    """Text says so itself: JupyterLab's own style has all cells to the right and captions in the middle."""
    html, left = page.read_text(), 'style="text-align: left"'
    assert f"<caption {left}>Per rank &amp; step</caption>" in html
    assert f'<td class="text" {left}>copies</td>' in html
    assert '>copies</td><td class="number">1,421.5</td><td class="number">-14.2%</td>' in html
    assert '<td class="number">n/a</td>' in html


def test_tables_carry_their_values_unrounded(sample: tuple[Run, str], page: Path) -> None:
    html = page.read_text()
    (link,) = re.findall(r'<a class="data" download="([^"]+)" href="data:text/csv;base64,([^"]+)">', html)
    assert link[0] == "per-rank-step.csv"
    assert base64.b64decode(link[1]).decode() == "metric,ours,change\ncopies,1421.5,-0.142\nspan (ms),,0.0\n"
    values = pd.read_parquet(sample[0].notebook.parent / "results.parquet")
    assert values["number"].dropna().tolist() == [1421.5, -0.142, 0.0]
    assert json.loads((sample[0].notebook.parent / "results.json").read_text())["figures"] == {"copies": 1421.5}


def test_output_that_needs_a_script_is_left_out_aloud(page: Path) -> None:
    text = Page(page).open_text
    assert "alert(1)" not in text
    assert "An output was left out here: it needs <script>" in text


@pytest.mark.parametrize(
    "piece",
    [
        "<script>1</script>",
        '<script src="https://host/x.js"></script>',
        '<link rel="stylesheet" href="style.css">',
        '<img src="https://host/x.png">',
        '<img src="x.png">',
        '<img src="data:," srcset="https://host/x.png 2x">',
        "<style>@import 'x.css';</style>",
        "<style>p { background: url(https://host/x.png) }</style>",
        "<p style=\"background: url('x.png')\">",
        '<iframe src="data:text/html,x"></iframe>',
        '<svg><image xlink:href="https://host/x.png"/></svg>',
        '<p onclick="x()">',
        '<a href="javascript:x()">',
        '<meta http-equiv="Refresh" content="0; url=https://host">',
        '<video poster="x.png"></video>',
    ],
)
def test_outside_reference_is_found(piece: str) -> None:
    assert len(outside_references(f"<p>text</p>{piece}<p>text</p>")) == 1


def test_what_stays_inside_is_no_outside_reference() -> None:
    inside = (
        '<link rel="icon" href="data:,"><a href="https://host">a link to click</a><a href="#below">below</a>'
        '<img src="data:image/png;base64,AA" alt="x"><svg><use href="#mark"/></svg>'
        "<style>p { background: url(data:,) }</style><p>url(https://host) in text</p>"
    )
    assert outside_references(inside) == []


@pytest.mark.parametrize(
    ("source", "complaint"),
    [("![x](https://host/x.png)", "would not be self-contained"), ("word " * 500_000, "the limit is 2,000,000")],
)
def test_page_that_would_break_its_promise_is_refused(tmp_path: Path, source: str, complaint: str) -> None:
    notebook = write_notebook(tmp_path / "n.ipynb", [("markdown", source)])
    with pytest.raises(ValueError, match=complaint):
        render(notebook)
    assert not notebook.with_suffix(".html").exists()


def test_long_text_is_cut_in_the_middle(tmp_path: Path) -> None:
    lines = new_output("stream", name="stdout", text="\n".join(f"line-{i}-" for i in range(1000)))
    notebook = new_notebook(cells=[new_code_cell("work()", outputs=[lines], execution_count=1)])
    nbformat.write(notebook, tmp_path / "n.ipynb")
    text = Page(render(tmp_path / "n.ipynb")).open_text
    assert "line-0-" in text
    assert "line-999-" in text
    assert "line-500-" not in text
    assert "800 lines are in the executed notebook" in text


@pytest.mark.parametrize(
    ("value", "text"), [(493, "493"), (1474.0, "1,474"), (1421.5, "1,421.5"), (92.642, "92.64"), (-0.0312, "-0.0312")]
)
def test_numbers_are_written_for_reading(value: float, text: str) -> None:
    assert number(value) == text


def test_display_refuses_what_a_reader_could_not_use() -> None:
    from distmuon import reporting

    frame = pd.DataFrame({"copies": [1]})
    with pytest.raises(ValueError, match="needs alt text"):
        reporting.figure(None, alt=" ")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"formats for columns \['copy'\]"):
        reporting.table(frame, formats={"copy": "{}"})
    with pytest.raises(ValueError, match="needs a conclusion"):
        reporting.complete("")


def test_a_page_links_to_pages_beside_it(sample: tuple[Run, str], tmp_path: Path) -> None:
    page = render(sample[0].notebook, tmp_path / "page.html", {"Another <page>": "other.html"})
    assert '<a href="other.html">Another &lt;page&gt;</a>' in page.read_text()
    assert outside_references(page.read_text()) == []


# The browser


@needs_browser
@pytest.mark.parametrize("width", [1000, 500])
def test_page_opens_in_a_browser_without_a_network(page: Path, tmp_path: Path, width: int) -> None:
    picture, urls = open_page(page, tmp_path, width)
    assert urls == set()
    pixels = (imread(picture)[..., :3] * 255).round()
    blue = (abs(pixels - [0x33, 0x66, 0x99]) <= 2).all(axis=-1)
    assert blue.sum() > 0.2 * blue.any(axis=0).sum() * blue.any(axis=1).sum()  # the figure is there ...
    assert blue.any(axis=0).sum() > 0.7 * min(width, 900)  # ... as wide as the page
    assert not blue[:, -10:].any()  # ... and inside it


@needs_browser
def test_browser_test_would_see_a_request(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text('<img src="http://elsewhere.invalid/x.png">')
    _, urls = open_page(page, tmp_path, 500)
    assert urls == {"http://elsewhere.invalid/x.png"}


# The report of this checkout, when `make report` has made one (CI does so first)

REPORT = ROOT / "reports/distmuon.html"
needs_report = pytest.mark.skipif(not REPORT.exists(), reason="NO REPORT: run `make report` to have it read, too")


@needs_report
def test_report_is_one_complete_file() -> None:
    assert outside_references(REPORT.read_text()) == []
    assert REPORT.stat().st_size < MAX_PAGE_BYTES
    content = Page(REPORT)
    assert "COMPLETE" in content.open_text
    assert content.images
    assert all(image["alt"] and image["alt"] != "A figure without a description" for image in content.images)


@needs_report
@needs_browser
def test_report_opens_in_a_browser_without_a_network(tmp_path: Path) -> None:
    picture, urls = open_page(REPORT, tmp_path, 1000)
    assert urls == set()
    rows = (imread(picture)[..., :3] < 1).any(axis=(1, 2))
    assert rows.mean() > 0.3  # something stands on the page
