"""Notebooks as one runs them in JupyterLab, from a folder elsewhere, and their pages as a browser shows them."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from pathlib import Path

import nbformat
import pytest
from executed import NOTEBOOKS, SMALL, Executed
from nbclient import NotebookClient
from pages import needs_browser, page_after

from distmuon.reporting.outcome import find_failure, find_mark

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", ["00_tour", "04_compare_traces"])
def test_restart_and_run_all_works_with_defaults_from_any_folder_twice(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others do the same at more length: all are run in full, with small parameters, by the other tests."""
    monkeypatch.setenv("PYTHONPATH", str(NOTEBOOKS.parent))
    monkeypatch.setenv("PYDEVD_DISABLE_FILE_VALIDATION", "1")
    notebook = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    client = NotebookClient(
        notebook, kernel_name="python3", timeout=300, resources={"metadata": {"path": str(tmp_path)}}
    )
    for times in (1, 2):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the client's own event loop
            client.execute()
        assert find_failure(notebook) is None
        assert find_mark(notebook)["figures"]
        assert len(list((tmp_path / "runs").iterdir())) == times, "each run has a folder of its own"
        progress = "".join(
            output.text
            for cell in notebook.cells
            for output in cell.get("outputs", [])
            if output.get("name") == "stderr"
        )
        assert "rank 0 of 4: repeat 1 of 1, step 1 of 3" in progress, "progress shows while ranks run"


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
