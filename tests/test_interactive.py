"""Notebooks as one runs them in JupyterLab, from a folder elsewhere, and their pages as a browser shows them."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import nbformat
import pytest
from executed import NOTEBOOKS, SMALL, Executed
from nbclient import NotebookClient
from pages import needs_browser, page_after

from distmuon.reporting.outcome import find_failure, find_mark
from distmuon.reporting.request import Request

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", ["00_tour", "04_compare_traces"])
def test_restart_and_run_all_works_with_defaults_from_any_folder_twice(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """These two are short; the others, with defaults, take minutes."""
    for progress in restarts(nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4), tmp_path, monkeypatch):
        assert "rank 0 of 4: repeat 1 of 1, step 1 of 3" in progress, "progress shows while ranks run"


@pytest.mark.parametrize("name", ["01_published_profile", "02_ablation", "03_scale", "05_training"])
def test_restart_and_run_all_works_with_small_parameters_from_any_folder_twice(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one who edits the first cell: every cell is run, as it stands, but the smallest values are assigned at the end
    of the cell of parameters. The defaults of these notebooks are run by ``make report`` and not by a test."""
    notebook = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    (cell,) = (each for each in notebook.cells if "parameters" in each.metadata.get("tags", []))
    smallest = Request.of(NOTEBOOKS / f"{name}.ipynb", SMALL[name]).given
    cell.source += "".join(f"\n{parameter} = {value!r}" for parameter, value in smallest.items())
    for progress in restarts(notebook, tmp_path, monkeypatch):
        assert "rank 0 of" in progress or name == "03_scale"  # which plans ranks, and has few to wait for


def restarts(notebook: nbformat.NotebookNode, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Run all cells twice in ``folder``, each time in a new kernel, and check how it ended; yields what it reported."""
    monkeypatch.setenv("PYTHONPATH", str(NOTEBOOKS.parent))
    monkeypatch.setenv("PYDEVD_DISABLE_FILE_VALIDATION", "1")
    client = NotebookClient(notebook, kernel_name="python3", timeout=300, resources={"metadata": {"path": str(folder)}})
    for times in (1, 2):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the client's own event loop
            client.execute()
        assert find_failure(notebook) is None
        mark = find_mark(notebook)
        assert mark
        assert mark["figures"]
        assert len(list((folder / "runs").iterdir())) == times, "each run has a folder of its own"
        outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
        yield "".join(output.text for output in outputs if output.get("name") == "stderr")


@pytest.mark.parametrize("name", [name for name in SMALL if name != "03_scale"])
def test_progress_is_gone_from_the_page(name: str, executed: Callable[[str], Executed]) -> None:
    run = executed(name)
    log = (run.folder / "log.txt").read_text()
    assert "rank 0 of" in log
    shown = run.page.open_text + run.page.folded_text
    assert [line for line in log.splitlines() if line.strip() and line in shown] == []


@needs_browser
@pytest.mark.parametrize("name", SMALL)
def test_no_table_scrolls_on_a_desk_and_no_page_on_a_phone(
    name: str, executed: Callable[[str], Executed], tmp_path: Path
) -> None:
    page = executed(name).run.notebook.with_suffix(".html")
    tables = "[...document.querySelectorAll('.cell table')]"
    wide = f"{tables}.filter(each => each.offsetWidth > each.parentElement.clientWidth)"
    script = f"document.title = [{wide}.map(each => each.caption.textContent), document.body.scrollWidth - innerWidth]"
    for width, measured in ((1000, r"<title>,(-?\d+)</title>"), (500, r"<title>[^<]*,(-?\d+)</title>")):
        found = re.search(measured, page_after(page, tmp_path, f"{script}.join();", width).read_text())
        assert found, "no table is wider than the page"
        assert int(found[1]) <= 0, "the page itself does not scroll sideways"
