"""Reading traces: spans, what belongs to a range, and "n/a" where a trace cannot tell."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from distmuon.profiling.trace import Trace, TraceError, length_us, overlap_us, union

REAL = Path(__file__).parents[2] / "shared" / "traces"
needs_real_traces = pytest.mark.skipif(not REAL.is_dir(), reason=f"the real traces are not there: {REAL}")


def event(
    category: str, name: str, start: float, duration: float, tid: int = 1, pid: int = 1, **args: Any
) -> dict[str, Any]:
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "ts": start,
        "dur": duration,
        "pid": pid,
        "tid": tid,
        "args": args,
    }


def launch(correlation: int, start: float, tid: int = 1, category: str = "cuda_runtime") -> dict[str, Any]:
    return event(category, "cudaLaunchKernel", start, 1, tid=tid, correlation=correlation)


def device(
    category: str, name: str, start: float, duration: float, correlation: int, stream: int = 7
) -> dict[str, Any]:
    return event(category, name, start, duration, tid=stream, pid=0, correlation=correlation, stream=stream)


# A step of 100 us on thread 1 that launches five activities, and others that only look as if they were its own.
STEP = [
    event("user_annotation", "step", 0, 100),
    event("gpu_user_annotation", "step", 20, 100, tid=7, pid=0),
    launch(1, 10),
    launch(2, 20, category="cuda_driver"),
    launch(3, 30),
    launch(4, 40),
    launch(5, 100),
    launch(6, 50, tid=2),  # another thread
    launch(7, 101),  # too late
    device("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 30, 10, 1),
    device("kernel", "gemm", 45, 5, 2),
    device("kernel", "ncclDevKernel_SendRecv", 48, 12, 3, stream=20),
    device("gpu_memset", "Memset (Device)", 55, 1, 4),
    device("kernel", "gemm", 120, 10, 5),  # runs after the range has ended on the host
    device("kernel", "gemm", 60, 10, 6),
    device("kernel", "gemm", 130, 10, 7),
]


def write(folder: Path, document: Any, name: str = "trace.json") -> Path:
    path = folder / name
    opened = gzip.open if name.endswith(".gz") else open
    with opened(path, "wt") as file:
        json.dump(document, file)
    return path


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
@pytest.mark.parametrize("bare", [False, True], ids=["dict", "list"])
def test_activity_belongs_to_the_range_on_whose_thread_it_was_launched(tmp_path: Path, name: str, bare: bool) -> None:
    trace = Trace(write(tmp_path, STEP if bare else {"traceEvents": STEP}, name))
    (occurrence,) = trace.occurrences("step")
    assert occurrence.to_dict() == {
        "cpu_span_ms": 0.1,
        "gpu_span_ms": 0.1,  # from 30 to 130
        "memcpy": {"DtoD": 1},
        "memset": 1,
        "kernels": 2,
        "collectives": 1,
        "exposed_collective_ms": 0.009,  # 12 us, of which 2 beside a kernel and 1 beside the memset
    }
    assert occurrence.launches == 4
    assert trace.range_names() == {"step": 1}, "the device's copy of a range is not another range"


def test_a_graph_launch_causes_all_that_bears_its_id(tmp_path: Path) -> None:
    events = [
        event("user_annotation", "step", 0, 9),
        launch(1, 1),
        *(device("kernel", "k", t, 1, 1) for t in (3, 5, 7)),
    ]
    assert Trace(write(tmp_path, events)).occurrences("step")[0].kernels == 3


def test_a_range_without_activity_has_no_gpu_span(tmp_path: Path) -> None:
    trace = Trace(write(tmp_path, [*STEP, event("user_annotation", "idle", 200, 5)]))
    assert trace.occurrences("idle")[0].to_dict()["gpu_span_ms"] == "n/a"


def test_without_a_device_its_figures_are_not_available(tmp_path: Path) -> None:
    with profile(activities=[ProfilerActivity.CPU]) as session, record_function("step"):
        torch.ones(8) @ torch.ones(8)
    session.export_chrome_trace(str(tmp_path / "trace.json.gz"))
    (occurrence,) = Trace(tmp_path / "trace.json.gz").occurrences("step")
    figures = occurrence.to_dict()
    assert figures.pop("cpu_span_ms") > 0
    assert figures.pop("collectives") == 0
    assert set(figures.values()) == {"n/a"}
    assert occurrence.launches is None


def test_an_unknown_range_is_refused_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="unknown range 'stop'; did you mean 'step'"):
        Trace(write(tmp_path, STEP)).ranges("stop")


def test_a_trace_without_annotations_says_so(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no ranges: nothing was annotated"):
        Trace(write(tmp_path, STEP[2:])).ranges("step")


def test_a_file_that_is_cut_off_or_no_trace_is_named(tmp_path: Path) -> None:
    whole = write(tmp_path, STEP, "trace.json.gz").read_bytes()
    cut = tmp_path / "cut.json.gz"
    cut.write_bytes(whole[: len(whole) // 2])
    for path in (cut, write(tmp_path, {"other": 1}, "other.json"), write(tmp_path, "text", "text.json")):
        with pytest.raises(TraceError, match=path.name):
            Trace(path)


def test_interval_arithmetic() -> None:
    assert union([(5, 6), (0, 2), (1, 3), (3, 4)]) == [(0, 4), (5, 6)]
    assert length_us([(0, 4), (5, 6)]) == 5
    assert overlap_us([(0, 4), (5, 6)], [(3, 5.5)]) == 1.5


@needs_real_traces
def test_real_trace_of_eight_gpus_gives_what_was_worked_out_by_hand() -> None:
    occurrences = Trace(REAL / "h100x8_normuon_rank0.json.gz").occurrences("Optimizer.step#NorMuon.step")
    spans = [(each.to_dict()["cpu_span_ms"], each.to_dict()["gpu_span_ms"]) for each in occurrences]
    assert spans == [(11.6846, 4.0276), (9.708, 3.0437), (11.7363, 4.594), (9.5827, 3.0548)]
    counts = {(tuple(each.memcpy.items()), each.memset, each.kernels, each.collectives) for each in occurrences}
    assert counts == {((("DtoD", 111),), 4, 159, 8)}


@needs_real_traces
def test_real_traces_of_other_kinds_are_read() -> None:
    old = Trace(REAL / "a100x128_recommender_rank0.json.gz").occurrences("ProfilerStep#551")[0]
    assert (old.collectives, old.memcpy, old.memset) == (3, {"DtoH": 4, "HtoD": 12, "DtoD": 4}, 1)
    rocm = Trace(REAL / "mi300_bert_forward.json.gz").occurrences("ProfilerStep#6")[0]
    assert (rocm.kernels, rocm.memcpy, rocm.collectives) == (60, {"DtoD": 1}, 0)
    bare = Trace(REAL / "mi210_gpu_only.json.gz")
    assert bare.has_device
    with pytest.raises(TraceError, match="no ranges"):
        bare.ranges("ProfilerStep#6")
