"""Notebooks run with checked parameters, are judged honestly, and become pages that need neither script nor network."""

from __future__ import annotations

import base64
import io
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import nbformat
import pandas as pd
import pytest
from called import call
from matplotlib.image import imread
from nbformat.v4 import new_code_cell, new_notebook, new_output
from pages import Page, needs_browser, open_page, write_notebook

from distmuon.reporting.execution import Run, execute
from distmuon.reporting.outcome import find_failure
from distmuon.reporting.parameters import actual_parameters, as_written, declared_parameters, load_parameters, resolve
from distmuon.reporting.rendering import MAX_PAGE_BYTES, render
from distmuon.reporting.request import Request
from distmuon.reporting.selfcontained import outside_references
from distmuon.richtext import number

ROOT = Path(__file__).parents[1]

PARAMETERS = """
workload: str = "tiny"  # what to train
ranks: int = 4  # processes
lr: float = 8e-4
nesterov: bool = True
variants: list[str] = ["baseline", "batched"]
limit: int | None = None
out: str | None = None
"""

SAMPLE = [
    ("markdown", "# A sample\n\nWhat this page is about."),
    ("code", PARAMETERS, "parameters"),
    ("code", "import sys\nimport matplotlib.pyplot as plt\nimport pandas as pd\nfrom distmuon import reporting"),
    ("markdown", "## Table"),
    (
        "code",
        "for step in range(3):\n"
        "    print(f'PROGRESS {step}', file=sys.stderr, flush=True)\n"
        "    print(f'\\rREWRITTEN {step}', end='', flush=True)\n"
        "print('\\rSETTLED    ')\n"
        "frame = pd.DataFrame({'metric': ['copies', 'span (ms)'], 'ours': [1421.5, None], 'change': [-0.142, 0.0]})\n"
        "reporting.table(frame, 'Per rank & step', formats={'change': '{:+.1%}'})",
    ),
    ("markdown", "## Figures"),
    (
        "code",
        "fig, ax = plt.subplots(figsize=(9, 3), facecolor='#336699')\n"
        "reporting.figure(fig, alt='Blue <all over>', caption='A blue figure')\n"
        "plt.plot([1, 2]);",
    ),
    ("code", "from IPython.display import HTML, display\ndisplay(HTML('<script>alert(1)</script>'))\nout, ranks"),
    ("code", "print('REMOVED')", "remove"),
    ("markdown", "## Conclusion"),
    (
        "code",
        "figures = {'copies': frame['ours'][0]}\n"
        "reporting.complete('Fewer copies.', headline=frame, figures=figures, seed=7, tokens_digest='ab12')",
    ),
]


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, str]:
    """A complete run of the sample notebook with its page, and what was shown while it ran."""
    folder = tmp_path_factory.mktemp("sample")
    notebook = write_notebook(folder / "sample.ipynb", SAMPLE)
    shown = io.StringIO()
    given = {"workload": "12e3", "variants": "baseline, fused"}
    run = execute(Request.of(notebook, given), folder / "run", command="make sample", progress=shown)
    render(run.notebook)
    return run, shown.getvalue()


@pytest.fixture(scope="module")
def page(sample: tuple[Run, str]) -> Path:
    return sample[0].notebook.with_suffix(".html")


def test_a_page_links_to_pages_beside_it(sample: tuple[Run, str], tmp_path: Path) -> None:
    page = render(sample[0].notebook, tmp_path / "page.html", {"Another <page>": "other.html"})
    assert '<a href="other.html">Another &lt;page&gt;</a>' in page.read_text()
    assert outside_references(page.read_text()) == []


# Parameters


@pytest.mark.parametrize(
    ("name", "given", "value"),
    [
        ("workload", "12e3456", "12e3456"),
        ("workload", "on", "on"),
        ("workload", "007", "007"),
        ("ranks", "8", 8),
        ("ranks", 8, 8),
        ("lr", "1e-3", 1e-3),
        ("lr", 1, 1.0),
        ("nesterov", "off", False),
        ("variants", "baseline, fused", ["baseline", "fused"]),
        ("variants", "[baseline, 007]", ["baseline", "007"]),
        ("variants", "baseline", ["baseline"]),
        ("limit", "3", 3),
        ("limit", "none", None),
        ("limit", None, None),
    ],
)
def test_parameter_becomes_its_declared_type(name: str, given: object, value: object) -> None:
    notebook = new_notebook(cells=[new_code_cell(PARAMETERS, metadata={"tags": ["parameters"]})])
    (read,) = resolve(declared_parameters(notebook), {name: given}).values()
    assert read == value
    assert type(read) is type(value)


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("ranks", "four"),
        ("ranks", "1e3"),
        ("ranks", 4.0),
        ("ranks", True),
        ("ranks", None),
        ("lr", "fast"),
        ("nesterov", "2"),
        ("workload", 7),
        ("workload", ["tiny"]),
        ("variants", {"a": "b"}),
        ("limit", "many"),
    ],
)
def test_value_of_another_type_is_refused_by_name(name: str, given: object) -> None:
    notebook = new_notebook(cells=[new_code_cell(PARAMETERS, metadata={"tags": ["parameters"]})])
    with pytest.raises(ValueError, match=f"parameter '{name}' is declared as "):
        resolve(declared_parameters(notebook), {name: given})


def test_yaml_that_gives_a_name_twice_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "given.yaml"
    file.write_text("ranks: 2\nlr: 1e-3\nranks: 4\n")
    with pytest.raises(ValueError, match="'ranks' is given twice"):
        load_parameters(file)


def test_value_that_the_notebook_refuses_starts_no_kernel(tmp_path: Path) -> None:
    check = "from distmuon.workloads import get_workload\nget_workload(workload).layout(ranks, 1)"
    notebook = write_notebook(tmp_path / "n.ipynb", [("code", PARAMETERS, "parameters"), ("code", check, "check")])
    assert Request.of(notebook).parameters["ranks"] == 4
    with pytest.raises(ValueError, match=r"n\.ipynb refuses its parameters: unknown workload 'kimi'; did you mean"):
        Request.of(notebook, {"workload": "kimi"})
    ended = call("run_notebook", notebook, "--out", tmp_path / "run", "-p", "ranks", "0")
    assert ended.code == 2
    assert "refuses its parameters: ranks" in ended.errors
    assert not (tmp_path / "run").exists()


def test_yaml_values_are_kept_as_written(tmp_path: Path) -> None:
    file = tmp_path / "given.yaml"
    file.write_text("tag: 12e3456\nlr: 1e-3\nflag: on\nnumber: 007\nday: 2026-01-02\nlist: [1.0, no]\nnothing: null\n")
    assert load_parameters(file) == {
        "tag": "12e3456",
        "lr": "1e-3",
        "flag": "on",
        "number": "007",
        "day": "2026-01-02",
        "list": ["1.0", "no"],
        "nothing": None,
    }
    assert as_written("~") is None


def test_yaml_that_is_no_mapping_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "given.yaml"
    file.write_text("- ranks\n")
    with pytest.raises(ValueError, match="must map parameter names to values"):
        load_parameters(file)


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("ranks: int = 2 + 2 * n", "needs a literal default"),
        ("ranks: dict = {}", "a type 'dict' cannot be given from outside"),
        ("ranks: int = 'four'", "declared as int, which 'four' is not"),
        ("print(4)", "holds assignments"),
        ("ranks = = 4", "is not Python"),
    ],
)
def test_parameters_cell_that_cannot_be_read_is_refused(source: str, complaint: str) -> None:
    notebook = new_notebook(cells=[new_code_cell(source, metadata={"tags": ["parameters"]})])
    with pytest.raises(ValueError, match=re.escape(complaint)):
        declared_parameters(notebook)


def test_unknown_parameter_is_refused_before_anything_starts(tmp_path: Path) -> None:
    notebook = write_notebook(tmp_path / "n.ipynb", SAMPLE)
    with pytest.raises(ValueError, match="unknown parameter 'rnaks'; did you mean 'ranks'"):
        Request.of(notebook, {"rnaks": "2"})


# Runs


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


# Pages


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
    notebook = executed([new_output("stream", name="stdout", text="\n".join(f"line-{i}-" for i in range(1000)))])
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
