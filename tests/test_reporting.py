"""Notebooks run with checked parameters, and are judged honestly."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from called import call
from nbformat.v4 import new_code_cell, new_notebook, new_output
from pages import Page, write_notebook
from sample import SAMPLE

from distmuon.reporting.execution import Run, execute
from distmuon.reporting.outcome import find_failure
from distmuon.reporting.parameters import actual_parameters
from distmuon.reporting.rendering import render
from distmuon.reporting.request import Request

ROOT = Path(__file__).parents[1]


def test_complete_run_says_what_it_was(sample: tuple[Run, str]) -> None:
    run, _ = sample
    assert run.failure is None
    assert run.mark is not None
    assert run.mark["conclusion"] == "Fewer copies."
    assert "1,421.5" in (run.mark["headline"] or "")
    summary = json.loads((run.notebook.parent / "run.json").read_text())
    assert summary["status"] == "complete"
    assert summary["parameters"]["workload"] == "12e3"
    assert summary["parameters"]["variants"] == ["baseline", "fused"]
    assert actual_parameters(nbformat.read(run.notebook, as_version=4))["out"] == "run/files"
    assert json.loads((run.notebook.parent / "parameters.json").read_text())["variants"] == ["baseline", "fused"]
    assert "PROGRESS 2" in (run.notebook.parent / "log.txt").read_text()
    assert summary["provenance"]["command"] == "make sample"


FAILURES = {
    "raise RuntimeError('rank 2 died')": "RuntimeError: rank 2 died",
    "import sys\nsys.exit(0)": "SystemExit: 0",
    "import os\nos.kill(os.getpid(), 9)": "DeadKernelError",
    "import time\ntime.sleep(60)": "CellTimeoutError",
}


@pytest.mark.parametrize("source", FAILURES)
def test_failing_notebook_is_failed_on_its_first_screen(tmp_path: Path, source: str) -> None:
    cells = [("markdown", "# Sample\n\n## Work"), ("code", source), ("code", "1 + 1")]
    limit = 3 if "sleep" in source else None
    run = execute(Request.of(write_notebook(tmp_path / "n.ipynb", cells)), tmp_path / "run", cell_timeout=limit)
    assert run.failure is not None
    assert run.failure.where == f"code cell 1, under “Work”: {source.splitlines()[0]}"
    assert FAILURES[source] in run.failure.error
    assert json.loads((tmp_path / "run/run.json").read_text())["status"] == "failed"
    text = Page(render(run.notebook)).open_text
    top = text[text.index("Sample") : text.index("Work\n") if "Work\n" in text else None]
    assert "FAILED" in top
    assert FAILURES[source] in top
    assert "COMPLETE" not in text


def executed(*outputs: list[nbformat.NotebookNode] | None) -> nbformat.NotebookNode:
    """A notebook with a code cell for each argument: its outputs, or None if it was not run."""
    cells = [new_code_cell("work()", outputs=o or [], execution_count=None if o is None else 1) for o in outputs]
    return new_notebook(cells=cells)


def mark() -> nbformat.NotebookNode:
    data = {
        "application/vnd.distmuon.complete+json": {
            "conclusion": "Done.",
            "headline": None,
            "figures": [],
            "provenance": {},
        }
    }
    return new_output("display_data", data=data)


def test_run_is_complete_only_with_the_mark_in_its_last_cell() -> None:
    assert find_failure(executed([], [mark()])) is None
    for notebook in (executed([], []), executed([mark()], [])):
        failure = find_failure(notebook)
        assert failure is not None
        assert "completion mark is missing" in failure.error


def test_pending_cell_is_a_failure() -> None:
    failure = find_failure(executed([], None, [mark()]))
    assert failure is not None
    assert failure.cell == 1
    assert failure.error == "the cell was not run"


def test_folder_of_a_run_is_not_overwritten(tmp_path: Path) -> None:
    notebook = write_notebook(tmp_path / "n.ipynb", SAMPLE)
    (tmp_path / "run").mkdir()
    (tmp_path / "run/summary.json").write_text("{}")
    with pytest.raises(FileExistsError, match="already holds a run"):
        execute(Request.of(notebook), tmp_path / "run")
    assert [file.name for file in (tmp_path / "run").iterdir()] == ["summary.json"]


# The script


def test_script_exits_with_1_for_a_failed_notebook_and_writes_its_page(tmp_path: Path) -> None:
    notebook = write_notebook(tmp_path / "n.ipynb", [("code", "1 / 0")])
    words = [str(notebook), "--out", str(tmp_path / "run"), "--html", str(tmp_path / "pages/n.html")]
    command = [sys.executable, str(ROOT / "scripts/run_notebook.py"), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "FAILED in code cell 1: 1 / 0" in done.stderr
    assert "FAILED" in Page(tmp_path / "pages/n.html").open_text


def test_script_exits_with_2_for_unknown_names_and_gives_the_nearest(tmp_path: Path) -> None:
    notebook = write_notebook(tmp_path / "n.ipynb", SAMPLE)
    for arguments, nearest in [(["-p", "rnaks", "2"], "'ranks'"), (["--htlm", "x"], "'--html'")]:
        ended = call("run_notebook", notebook, "--out", tmp_path / "run", *arguments)
        assert ended.code == 2
        assert f"did you mean {nearest}" in ended.errors
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_interrupted_script_ends_its_kernel_and_says_so_in_a_line(tmp_path: Path) -> None:
    work = "import os, sys, time\nprint('KERNEL', os.getpid(), file=sys.stderr, flush=True)\ntime.sleep(100)"
    notebook = write_notebook(tmp_path / "n.ipynb", [("code", work)])
    command = [sys.executable, str(ROOT / "scripts/run_notebook.py"), str(notebook), "--out", str(tmp_path / "run")]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as process:
        assert process.stderr is not None
        line = next(line for line in process.stderr if line.startswith("KERNEL"))
        process.send_signal(signal.SIGINT)
        rest = process.stderr.read()
    assert process.returncode == 130
    assert rest.split() == f"interrupted; what there is: {tmp_path}/run/n.html".split()
    assert "KeyboardInterrupt: the run was interrupted" in Page(tmp_path / "run/n.html").open_text
    with pytest.raises(ProcessLookupError):
        os.kill(int(line.split()[1]), 0)


@pytest.mark.slow
def test_page_names_the_rank_that_failed_on_its_first_screen(tmp_path: Path) -> None:
    work = (
        f"import sys\nsys.path.insert(0, {str(ROOT / 'tests')!r})\nimport os\nfrom pathlib import Path\n"
        f"os.environ['PYTHONPATH'] = os.pathsep.join([{str(ROOT / 'tests')!r}, {str(ROOT)!r}])\n"
        "from distmuon.profiling.launch import launch\n"
        f"launch('launched', ['die', '1'], ranks=2, folder=Path({str(tmp_path)!r}))"
    )
    run = execute(Request.of(write_notebook(tmp_path / "n.ipynb", [("code", work)])), tmp_path / "run")
    assert run.failure is not None
    assert "RankFailure: rank 1 was killed" in run.failure.error
    text = Page(render(run.notebook)).open_text
    assert text.index("FAILED") < text.index("RankFailure: rank 1") < text.index("rank1.log")
