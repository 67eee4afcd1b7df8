"""Batches: a grid becomes a folder a run; failed runs do not stop it, complete ones are not repeated, two share."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from called import Ended, call
from pages import Page, needs_browser, page_after, write_notebook

from distmuon.reporting.batch import read_grid
from distmuon.reporting.index import write_index
from distmuon.reporting.records import Record, read_records
from distmuon.reporting.selfcontained import outside_references
from distmuon.reporting.site import write_site

ROOT = Path(__file__).parents[1]

CELLS = [
    ("markdown", "# Squares"),
    ("code", "number: int = 1  # to square\ntag: str = 'a'\nscale: float = 1.0\nout: str | None = None", "parameters"),
    ("code", "if number < 0:\n    raise ValueError(f'number is {number}')", "check"),
    (
        "code",
        "import pandas as pd\nfrom distmuon import reporting\nif number == 3:\n    raise RuntimeError('three is odd')",
    ),
    (
        "code",
        "frame = pd.DataFrame({'square': [scale * number**2]})\nreporting.table(frame, 'Squares')\n"
        "reporting.complete(f'{number} squared.', figures={'square': scale * number**2, 'tags': len(tag)})",
    ),
]


def write_grid(folder: Path, text: str) -> Path:
    write_notebook(folder / "squares.ipynb", CELLS)
    path = folder / "grid.yaml"
    path.write_text(text)
    return path


def start(grid: Path, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, str(ROOT / "scripts/run_batch.py"), str(grid), *map(str, arguments)]
    return subprocess.Popen(command, cwd=grid.parent, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def end(process: subprocess.Popen[str]) -> tuple[int, str]:
    out, _ = process.communicate(timeout=300)
    return process.returncode, out


@pytest.fixture(scope="module")
def batch(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Ended]:
    """A batch of two runs, of which the first fails: the folder of its grid, and how it ended."""
    folder = tmp_path_factory.mktemp("batch")
    text = "notebook: squares.ipynb\nparameters: {tag: 12e3456, scale: 1e-1}\ngrid:\n  number: [3, 007]\n"
    return folder, call("run_batch", write_grid(folder, text), "--runs", folder / "runs")


@pytest.fixture(scope="module")
def again(batch: tuple[Path, Ended], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int, str]:
    """That batch started again: its folder of runs, exit code and output."""
    folder = tmp_path_factory.mktemp("again") / "copy"
    shutil.copytree(batch[0], folder)
    return folder / "runs", *end(start(folder / "grid.yaml"))


def test_a_failed_run_does_not_stop_the_batch_but_fails_it(batch: tuple[Path, Ended]) -> None:
    _, ended = batch
    assert ended.code == 1
    told = [line.split()[1] for line in ended.output.splitlines() if line.startswith("[")]
    assert told == ["FAILED:", "complete:"]
    assert "2 runs, 1 failed, 0 were there already" in ended.output
    assert "RuntimeError: three is odd" in ended.output


@pytest.mark.slow
def test_a_batch_started_again_repeats_only_what_failed(again: tuple[Path, int, str]) -> None:
    runs, code, said = again
    assert code == 1
    assert "2 runs, 1 failed, 1 were there already" in said
    assert sorted(record.parameters["number"] for record in read_records(runs)) == [3, 3, 7]


def test_the_folder_of_a_run_has_all_of_it(batch: tuple[Path, Ended]) -> None:
    runs = batch[0] / "runs"
    record = next(each for each in read_records(runs) if each.parameters["number"] == 7)
    assert re.fullmatch(r"\d{8}T\d{6}-squares-[0-9a-f]{8}", record.folder.name)
    names = {path.name for path in record.folder.iterdir()}
    results = {"results.json", "results.parquet", "parameters.json", "run.json"}
    assert names == results | {"squares.ipynb", "squares.html", "log.txt"}
    assert json.loads((record.folder / "parameters.json").read_text()) == {"number": 7, "tag": "12e3456", "scale": 0.1}
    assert record.figures == {"square": 0.1 * 49, "tags": 7}


def test_the_report_of_a_failed_run_says_so(batch: tuple[Path, Ended]) -> None:
    record = next(each for each in read_records(batch[0] / "runs") if each.status == "failed")
    text = Page(record.page).open_text
    assert text.index("FAILED") < text.index("RuntimeError: three is odd") < 300


@pytest.mark.slow
def test_batches_at_once_share_the_runs(tmp_path: Path) -> None:
    grid = write_grid(tmp_path, "notebook: squares.ipynb\ngrid: {number: [2, 4]}\n")
    batches = [start(grid), start(grid)]
    assert [end(each)[0] for each in batches] == [0, 0]
    assert sorted(record.parameters["number"] for record in read_records(tmp_path / "runs")) == [2, 4]


BLOCK = "notebook: squares.ipynb\n"
MISTAKES = {
    BLOCK + "grid: {nubmer: [1]}": "unknown parameter 'nubmer'; did you mean 'number'",
    BLOCK + "grid: {number: [1, two]}": "parameter 'number' is declared as int, which 'two' is not",
    BLOCK + "grid: {number: [1, null]}": "parameter 'number' is declared as int, which None is not",
    BLOCK + "grid: {number: [1, -1]}": "refuses its parameters: number is -1",
    BLOCK + "grid: {number: [1, 01]}": "runs 1 and 2 are the same (number=1)",
    BLOCK + "grid: {number: 1}": "grid entry 'number' needs a list of values to try",
    BLOCK + "grid: {number: []}": "grid entry 'number' needs a list of values to try",
    BLOCK + "grid: {tag: [[a, b]]}": "parameter 'tag' is declared as str, which ['a', 'b'] is not",
    BLOCK + "parameters: {number: 1}\ngrid: {number: [2]}": "'number' is under parameters and under grid",
    BLOCK + "girds: {number: [1]}": "did you mean 'grid'",
    BLOCK + "parameters: [1]": "parameters must map the names of parameters to values",
    "grid: {number: [1]}": "notebook is the path of one",
    "a: b: c": "can't be read as YAML",
}


@pytest.mark.parametrize("text", MISTAKES)
def test_a_mistake_in_a_grid_is_refused_by_name(tmp_path: Path, text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(MISTAKES[text])):
        read_grid(write_grid(tmp_path, text))


def test_a_grid_of_a_notebook_that_is_not_there_is_told_where_it_is_looked_for(tmp_path: Path) -> None:
    grid = write_grid(tmp_path, "notebook: notebooks/squares.ipynb")
    with pytest.raises(FileNotFoundError, match="its path is relative to the grid's folder"):
        read_grid(grid)


def test_a_mistake_starts_nothing(tmp_path: Path) -> None:
    grid = write_grid(tmp_path, BLOCK + "grid: {number: [1, 2, -1]}")
    assert call("run_batch", grid, "--runs", tmp_path / "runs").code == 2
    assert not (tmp_path / "runs").exists()


def test_grid_values_have_their_declared_types(tmp_path: Path) -> None:
    text = "- " + BLOCK + "  grid: {tag: [on, 12e3456, 1e-3], scale: [1e-3, 2]}\n- " + BLOCK
    requests = read_grid(write_grid(tmp_path, text))
    assert len(requests) == 7
    assert [request.parameters["tag"] for request in requests[::2]] == ["on", "12e3456", "1e-3", "a"]
    assert [request.parameters["scale"] for request in requests[:2]] == [1e-3, 2.0]


def test_grids_of_this_repository_can_be_run() -> None:
    grids = sorted((ROOT / "notebooks/grids").glob("*.yaml"))
    assert grids
    assert all(read_grid(grid) for grid in grids)


# The index


def written(folder: Path, **content: object) -> Record:
    """A run's folder, as a run leaves it."""
    defaults = {"status": "complete", "title": "Squares", "defaults": {"number": 1}, "provenance": {"commit": "abc"}}
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps(defaults | {"notebook": "squares.ipynb"} | content))
    return Record.read(folder)


@pytest.fixture
def index(tmp_path: Path) -> Path:
    """The index of four runs."""
    times = {"started": "2026-01-02T03:04:05", "seconds": 2.5}
    written(tmp_path / "runs/1-a", parameters={"number": 10}, figures={"copies": 493.0}, **times)
    written(tmp_path / "runs/2-b", parameters={"number": 9}, figures={"copies": 76.0}, **times)
    written(tmp_path / "runs/3-c", parameters={"number": 1}, status="failed", **times)
    written(tmp_path / "runs/4-d", parameters={"number": 1}, status="running", notebook="<other>.ipynb")
    return write_index(tmp_path / "runs")


def test_index_lists_status_parameters_and_figures(index: Path) -> None:
    page = Page(index)
    other, squares = page.tables
    assert squares[0] == ["compare", "started (UTC)", "status", "number", "copies", "took (s)", "run"]
    assert [row[2:5] for row in squares[1:]] == [
        ["failed", "1", "n/a"],
        ["complete", "9", "76"],
        ["complete", "10", "493"],
    ]
    assert other[1][2] == "not ended"
    assert "<other>.ipynb" in page.open_text
    assert outside_references(index.read_text(), scripts=True) == []


def test_index_says_once_what_all_runs_have_in_common(tmp_path: Path) -> None:
    for name, copies in (("1-a", 493.0), ("2-b", 76.0)):
        shared = {"parameters": {"number": 5, "copied": copies}, "defaults": {"number": 1, "copied": copies}}
        written(tmp_path / name, figures={"collectives": 8.0, "copies": copies}, **shared)
    page = Page(write_index(tmp_path))
    assert page.tables[0][0] == ["compare", "started (UTC)", "status", "copied", "copies", "took (s)", "run"]
    assert "All runs: number = 5 · collectives = 8" in page.open_text
    written(tmp_path / "3-c", figures={"collectives": 4.0}, notebook="alone.ipynb", parameters={"number": 2})
    page = Page(write_index(tmp_path))
    assert "number = 2\n" in page.open_text
    assert page.tables[0][0] == ["compare", "started (UTC)", "status", "collectives", "took (s)", "run"]


@needs_browser
def test_index_with_many_figures_keeps_the_run_in_sight_and_the_page_still(tmp_path: Path) -> None:
    figures = {f"a key figure with a long name, {number} (ms)": 1000.0 * number for number in range(30)}
    written(tmp_path / "runs/1-a", figures=figures, parameters={"number": 2}, started="2026-01-02T03:04:05")
    script = """
        const box = document.querySelector('.scroll'), cell = box.querySelector('td:nth-child(2)');
        box.scrollLeft = 2000;
        const inside = cell.getBoundingClientRect().left - box.getBoundingClientRect().left;
        document.title = [box.scrollLeft > 0, inside >= 0 && inside < 100, document.body.scrollWidth <= innerWidth];
    """
    for width in (1000, 500):
        after = page_after(write_index(tmp_path / "runs"), tmp_path, script, width).read_text()
        assert "<title>true,true,true</title>" in after


@needs_browser
def test_index_sorts_numbers_as_numbers_without_a_network(index: Path, tmp_path: Path) -> None:
    heading = "[...document.querySelectorAll('th button')].filter(each => each.textContent === 'number').at(-1)"
    sorted_once = Page(page_after(index, tmp_path, f"{heading}.click();"))
    assert [row[3] for row in sorted_once.tables[1][1:]] == ["1", "9", "10"]
    sorted_twice = Page(page_after(index, tmp_path, f"{heading}.click(); {heading}.click();"))
    assert [row[3] for row in sorted_twice.tables[1][1:]] == ["10", "9", "1"]


@needs_browser
def test_index_compares_any_two_runs(index: Path, tmp_path: Path) -> None:
    choose = "for (const name of ['1-a', '2-b']) document.querySelector(`input[value='${name}']`).click();"
    comparison, *_ = Page(page_after(index, tmp_path, choose)).tables
    rows = {row[0]: row[1:] for row in comparison}
    assert rows["number"] == ["10", "9", "differs", ""]
    assert rows["commit"] == ["abc", "abc", "same", ""]
    assert rows["copies"] == ["493", "76", "-417", "-84.6 %"]


# The site


@pytest.mark.slow
def test_site_has_the_latest_report_of_each_notebook_and_its_data(again: tuple[Path, int, str], tmp_path: Path) -> None:
    runs, _, _ = again
    index = write_site(tmp_path / "site", [Path("squares.ipynb"), Path("never_run.ipynb")], runs)
    text = Page(index).open_text
    assert "7 squared." in text
    assert "number = 7" in text
    assert "A later run" in text  # the batch's second try of 3 failed after that
    links = re.findall(r'href="([^"#:]+)"', index.read_text())
    assert {"squares.html", "squares/results.json", "squares/results.parquet", "squares/parameters.json"} == set(links)
    for page in (index, tmp_path / "site/squares.html"):
        assert outside_references(page.read_text()) == []
        for link in re.findall(r'href="([^"#:]+)"', page.read_text()):
            assert (page.parent / link).is_file()
    assert write_site(tmp_path / "site", [Path("squares.ipynb")], runs) == index  # again, in place of the old one


def test_site_takes_no_folder_of_others_and_says_what_it_lacks(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no complete run of squares.ipynb: run `make report` first"):
        write_site(tmp_path / "site", [Path("squares.ipynb")], tmp_path)
    written(tmp_path / "runs/1-a", parameters={})
    (tmp_path / "site").mkdir()
    (tmp_path / "site/precious.txt").write_text("")
    with pytest.raises(FileExistsError, match="something else than a site"):
        write_site(tmp_path / "site", [Path("squares.ipynb")], tmp_path / "runs")
