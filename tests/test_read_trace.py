"""scripts/read_trace.py: what it prints for one trace, several, two side by side, and what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import called
import pytest
from traces import FIGURES, STEP, event, launch, texts, write, write_rank

from distmuon.traces.trace import Trace

SCRIPT = Path(__file__).parents[1] / "scripts" / "read_trace.py"
Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def call() -> Call:
    """Call the script with these words; returns exit code, output and errors."""
    return partial(called.call, "read_trace")


def test_a_range_of_one_trace_as_json(call: Call, tmp_path: Path) -> None:
    path = write(tmp_path, STEP, "rank0.trace.json.gz")
    code, output, _ = call(path, "--range", "step", "--format", "json")
    assert code == 0
    assert json.loads(output) == {"trace": "rank0.trace.json.gz", "range": "step", "occurrences": [FIGURES]}


def test_several_traces_are_a_list_and_a_folder_stands_for_its_ranks(call: Call, tmp_path: Path) -> None:
    paths = [write_rank(tmp_path, rank, 2) for rank in range(2)]
    expected = [{"trace": path.name, "range": "step", "occurrences": [FIGURES]} for path in paths]
    for words in (paths, [tmp_path]):
        code, output, errors = call(*words, "--range", "step", "--format", "json")
        assert (code, json.loads(output), errors) == (0, expected, "")


def test_without_a_range_it_lists_those_there_are(call: Call, tmp_path: Path) -> None:
    path = write(tmp_path, [*STEP, event("user_annotation", "other", 200, 5), event("user_annotation", "step", 300, 5)])
    code, output, _ = call(path, "--format", "json")
    listed = [{"range": "step", "occurrences": 2}, {"range": "other", "occurrences": 1}]
    assert (code, json.loads(output)) == (0, {"trace": "trace.json", "ranges": listed})
    assert [line.split() for line in call(path)[1].splitlines()[2:]] == [["step", "2"], ["other", "1"]]


def test_occurrences_of_several_ranges_say_which_they_are_of(call: Call, tmp_path: Path) -> None:
    path = write(tmp_path, [*STEP, event("user_annotation", "other", 200, 5)])
    found = json.loads(call(path, "--range", "*e*", "--format", "json")[1])["occurrences"]
    assert [each["range"] for each in found] == ["step", "other"]
    assert {name: value for name, value in found[0].items() if name != "range"} == FIGURES
    assert call(path, "--range", "*e*")[1].splitlines()[1].split()[0] == "range"
    (alone,) = json.loads(call(path, "--range", "st*", "--format", "json")[1])["occurrences"]
    assert alone == FIGURES


def test_what_cannot_be_told_is_not_available_and_null_in_json(call: Call, tmp_path: Path) -> None:
    path = write(tmp_path, [event("user_annotation", "step", 0, 100), event("cpu_op", "aten::mm", 1, 2)])
    row = call(path, "--range", "step")[1].splitlines()[-1]
    assert row.split() == ["0.1000", "n/a", "n/a", "n/a", "n/a", "0", "n/a"]
    (figures,) = json.loads(call(path, "--range", "step", "--format", "json")[1])["occurrences"]
    assert [name for name, value in figures.items() if value is None] == [
        "gpu_span_ms", "memcpy", "memset", "kernels", "exposed_collective_ms"
    ]  # fmt: skip


def test_side_by_side_too_what_cannot_be_told_is_null_in_json(call: Call, tmp_path: Path) -> None:
    a = write(tmp_path, STEP, "gpu.json")
    b = write(tmp_path, [event("user_annotation", "step", 0, 100), event("cpu_op", "aten::mm", 1, 2)], "cpu.json")
    found = json.loads(call(a, b, "--compare", "--range", "step", "--format", "json")[1])
    assert not [text for text in texts(found) if "n/a" in text]
    assert [side["device"] for side in found["sides"]] == ["yes", None]
    (gemm,) = [row for row in found["operators"] if row["name"] == "gemm"]
    assert (gemm["calls, A"], gemm["calls, B"], gemm["verdict"]) == (2, None, None)
    shown = call(a, b, "--compare", "--range", "step")[1]
    (line,) = [line for line in shown.splitlines() if " gemm " in line]
    assert line.split()[2:5] == ["n/a", "2.0000", "n/a"]


def test_ranges_in_which_nothing_ran_say_so_side_by_side(call: Call, tmp_path: Path) -> None:
    path = write(tmp_path, [event("user_annotation", "step", 0, 100)])
    code, output, _ = call(path, path, "--compare", "--range", "step")
    assert code == 0
    assert "OPERATORS\nnone\n" in output


def test_what_traces_lack_is_said_beside_the_figures(call: Call, tmp_path: Path) -> None:
    write_rank(tmp_path, 0, 4)
    write_rank(tmp_path, 2, 4, [*STEP, launch(8, 90)])
    code, _, errors = call(tmp_path, "--partial", "--range", "step")
    assert code == 0
    assert "note: ranks 1, 3 of this run are not among these traces" in errors
    assert "rank2.trace.json: the trace ends before 1 kernels of occurrence 1 ran" in errors


def test_two_traces_side_by_side(call: Call, tmp_path: Path) -> None:
    a = write(tmp_path, STEP, "a.json")
    b = write(tmp_path, [each for each in STEP if "Memset" not in each["name"]], "b.json")
    code, output, _ = call(a, b, "--compare", "--range", "step", "--format", "json")
    assert code == 0
    found = json.loads(output)
    assert found["range"] == "step"
    counts = {row["figure"]: row for row in found["counts"]}
    assert counts["memset"] == {"figure": "memset", "A": 1.0, "B": 0.0, "difference": -1.0, "change": -1.0}
    assert counts["memcpy DtoD"]["change"] == 0
    (memset,) = [row for row in found["operators"] if row["name"] == "Memset (Device)"]
    assert (memset["calls, B"], memset["verdict"]) == (0, "went")
    assert call(a, b, "--compare")[1].splitlines() == ["RANGES", "range       A       B", "step   1.0000  1.0000"]


def test_ranks_are_written_as_one_trace(call: Call, tmp_path: Path) -> None:
    for rank in range(2):
        write_rank(tmp_path, rank, 2)
    merged = tmp_path / "merged.json.gz"
    code, output, errors = call(tmp_path, "--merge", merged)
    assert (code, output) == (0, "")
    assert "ranks 0-1, a process each" in errors
    assert Trace(merged).range_names() == {"step": 2}
    code, _, errors = call(tmp_path, "--merge", merged)
    assert code == 2
    assert "merged.json.gz" in errors, "what is there is not overwritten"
    code, _, errors = call(tmp_path, "--merge", tmp_path / "missing" / "merged.json.gz")
    assert code == 2 and errors.startswith("error: ") and "missing" in errors


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["a.json", "--range", "stop"], "did you mean 'step'"),
        (["a.json", "--compare"], "--compare takes two traces or folders, not 1"),
        (["a.json", "b.json", "a.json", "--compare"], "--compare takes two traces or folders, not 3"),
        (["a.json", "b.json", "--compare", "--range", "stop"], "did you mean 'step'"),
        (["a.json", "bare.json", "--compare"], "bare.json: no ranges"),
        (["a.json", "b.json", "--merge", "c.json"], "--merge takes one folder"),
        (["a.json", "--merge", "c.json"], "--merge takes a folder of ranks, and a.json is a file"),
        (["none.json"], "no such file"),
        (["cut.json"], "cut.json: cut off, or not a trace"),
        (["bare.json"], "bare.json: no ranges: nothing was annotated, or only the device was recorded"),
        (["bare.json", "--range", "step"], "no ranges"),
        (["a.json", "--rnage", "step"], "did you mean '--range'"),
        (["a.json", "--format", "csv"], "unknown format 'csv'"),
    ],
)
def test_mistakes_are_refused_by_name(
    call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, words: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a.json", "b.json"):
        write(tmp_path, STEP, name)
    (tmp_path / "cut.json").write_text((tmp_path / "a.json").read_text()[:-20])
    write(tmp_path, STEP[2:], "bare.json")
    code, output, errors = call(*words)
    assert (code, output) == (2, "")
    assert message in errors
    assert not (tmp_path / "c.json").exists()


@pytest.mark.parametrize("option", [["--merge", "merged.json"], ["--compare", "--range", "step"], ["--range", "step"]])
def test_ranks_that_are_missing_are_an_error_unless_a_part_is_asked_for(
    call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, option: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for rank in (2, 3):
        write_rank(tmp_path, rank, 4)
    folders = [".", "."] if "--compare" in option else ["."]
    code, _, errors = call(*folders, *option)
    assert code == 2
    assert "ranks are missing: 0-1" in errors
    assert "--partial" in errors
    assert call(*folders, *option, "--partial")[0] == 0


BIG_MB, LIMIT_S, LIMIT_MIB = 100, 20, 2048
_READ_BIG = """
import resource, sys, time
from distmuon.traces.trace import Trace
start = time.process_time()  # of the processor, as others may be using it, too
found = Trace(sys.argv[1]).occurrences("step")
print(len(found), time.process_time() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
"""


@pytest.mark.slow
def test_a_trace_of_100_mb_is_read_in_20_s_and_2_gib(tmp_path: Path) -> None:
    """A step with the variety of a real one, repeated until the file is so large."""
    path = tmp_path / "big.json"
    operators = [event("cpu_op", "aten::mm", 3 * k, 2, **{"External id": k, "Ev Idx": k}) for k in range(30)]
    python = [event("python_function", "torch/optim/optimizer.py(484): wrapper", 0, 90, **{"Python id": 1})] * 20
    written = repeats = 0
    with path.open("w") as file:
        file.write('{"schemaVersion": 1, "traceEvents": [')
        while written < BIG_MB * 10**6:
            moved = [
                each | {"ts": each["ts"] + 200 * repeats, "args": each["args"] | moved_id(each, repeats)}
                for each in (*STEP, *operators, *python)
            ]
            text = ",\n".join(map(json.dumps, moved))
            written += file.write(text if not repeats else ",\n" + text)
            repeats += 1
        file.write("]}")
    command = [sys.executable, "-c", _READ_BIG, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    count, seconds, mib = map(float, done.stdout.split())
    print(f"{written / 1e6:.0f} MB, {count:.0f} steps: {seconds:.1f} s, {mib:.0f} MiB")
    assert count == repeats
    assert seconds < LIMIT_S
    assert mib < LIMIT_MIB


def moved_id(each: dict, repeats: int) -> dict[str, int]:
    correlation = each["args"].get("correlation")
    return {} if correlation is None else {"correlation": correlation + 10 * repeats}
