"""Reading traces: spans, what belongs to a range, and "n/a" where a trace cannot tell."""

from __future__ import annotations

import gzip
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pool import Pool
from traces import FIGURES, REAL, STEP, device, event, launch, needs_real_traces, trace_exchanges, write

from distmuon.traces.intervals import length_us, overlap_us, parts_us, union
from distmuon.traces.trace import Trace
from distmuon.traces.tracefile import TraceError
from distmuon.traces.work import Work


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
    idle = trace.occurrences("idle")[0].to_dict()
    assert (idle["gpu_span_ms"], idle["kernels"], idle["exposed_collective_ms"]) == (None, 0, 0.0)


@pytest.fixture(scope="module")
def ranks(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the traces of two real ranks."""
    folder = tmp_path_factory.mktemp("ranks")
    pool.run(2, trace_exchanges, str(folder), timeout=120.0)
    return folder


def test_without_a_device_its_figures_are_not_available(ranks: Path) -> None:
    trace = Trace(ranks / "rank1.trace.json.gz")
    assert (trace.rank, trace.ranks, trace.has_device) == (1, 2, False)
    assert trace.range_names()["step"] == 6
    first, second, *_ = trace.occurrences("step")
    assert (first.collectives, second.collectives) == (1, 0)
    assert first.cpu_span_ms > second.cpu_span_ms > 0
    for name in ("gpu_span_ms", "memcpy", "memset", "kernels", "exposed_collective_ms"):
        assert first.to_dict()[name] is None
    assert first.launches is None


def test_ranges_are_found_by_pattern_and_inside_others(ranks: Path) -> None:
    trace = Trace(ranks / "rank0.trace.json.gz")
    assert [event.name for event in trace.ranges("outer/*")] == ["outer/0", "outer/1", "outer/2"]
    inside = trace.ranges("outer/[12] > step")
    assert len(inside) == 2
    assert trace.ranges("outer/2 > step > distmuon/*")[0].start_us > inside[1].start_us
    with pytest.raises(TraceError, match="no range 'outer/0' lies inside a range 'step'"):
        trace.ranges("step > outer/0")


def test_parts_of_real_spans_add_up_to_the_microsecond(ranks: Path) -> None:
    trace = Trace(ranks / "rank0.trace.json.gz")
    for step in trace.ranges("step"):
        parts = trace.host_parts_us(step)
        assert sum(parts.values()) == pytest.approx(step.duration_us, abs=0.01)
        assert min(parts.values()) >= 0 < parts["compute"]
        # Operators without those that they called fill the time in which any runs.
        working = parts["compute"] + parts["copies"]
        assert sum(each.time_us for each in trace.host_work(step)) == pytest.approx(working, abs=0.1)
    (exchanging,) = trace.ranges("outer/0 > step")
    (exchange,) = trace.exchanges_in(exchanging)
    assert exchange.name == "gloo:all_to_all"
    assert trace.host_parts_us(exchanging)["exposed exchange"] <= exchange.duration_us + 0.01  # clocks are large floats


def test_where_the_time_of_a_gpu_span_goes(tmp_path: Path) -> None:
    trace = Trace(write(tmp_path, STEP))
    (step,) = trace.ranges("step")
    # 30 copy 40, 45 gemm 50, exchange 48-60 with a memset at 55-56, nothing until 120, gemm 130
    assert trace.device_parts_us(step) == {"compute": 15, "copies": 11, "exposed exchange": 9, "idle": 65}
    assert Work("gemm", 2, 15) in trace.device_work(step)


def test_operators_are_told_without_those_that_they_called(tmp_path: Path) -> None:
    names = [("aten::linear", 0, 10), ("aten::mm", 2, 3), ("aten::mm", 6, 2), ("aten::copy_", 10, 5)]
    operators = [event("cpu_op", *each) for each in names] + [event("cpu_op", "aten::mm", 3, 1, tid=2)]
    exchange = event("user_annotation", "gloo:all_to_all", 12, 5, tid=3)  # beside the copy for 3 us
    trace = Trace(write(tmp_path, [event("user_annotation", "step", 0, 20), *operators, exchange]))
    (step,) = trace.ranges("step")
    assert trace.host_work(step) == [Work("aten::mm", 2, 5), Work("aten::linear", 1, 5), Work("aten::copy_", 1, 5)]
    assert trace.host_parts_us(step) == {"copies": 5, "compute": 10, "exposed exchange": 2, "idle": 3}


def old_schema(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """As PyTorch wrote before 1.12: other categories, and a range was an operator."""
    names = {"user_annotation": "Operator", "cuda_runtime": "Runtime", "cuda_driver": "Runtime"}
    names |= {"kernel": "Kernel", "gpu_memcpy": "Memcpy", "gpu_memset": "Memset"}
    old = [each | {"cat": names[each["cat"]]} for each in events if each["cat"] in names]
    return [*old, event("Operator", "aten::mm", 20, 5)]


def rocm(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """As on ROCm: other names, and all launches from one library."""
    names = {"cudaLaunchKernel": "hipLaunchKernel", "cudaMemcpyAsync": "hipMemcpyWithStream"}
    names |= {"cudaMemsetAsync": "hipMemsetAsync", "ncclDevKernel_SendRecv": "rcclGenericKernel"}
    one_library = [each | {"cat": each["cat"].replace("cuda_driver", "cuda_runtime")} for each in events]
    return [each | {"name": names.get(each["name"], each["name"])} for each in one_library]


def since_the_epoch(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """As with whole microseconds since 1970 in a trace that has no base of its own, and other kernel names."""
    names = {"ncclDevKernel_SendRecv": "ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclDevComm*)"}
    moved = [each | {"ts": int(each["ts"]) + 1682725898236567} for each in events]
    return [each | {"name": names.get(each["name"], each["name"])} for each in moved]


@pytest.mark.parametrize("schema", [list, old_schema, rocm, since_the_epoch])
def test_traces_of_all_schemas_tell_the_same(tmp_path: Path, schema: Any) -> None:
    trace = Trace(write(tmp_path, {"schemaVersion": 1, "traceEvents": schema(STEP)}))
    assert trace.range_names() == {"step": 1}
    assert trace.occurrences("step")[0].to_dict() == FIGURES


def test_a_trace_that_ends_before_its_kernels_ran_has_no_device_figures(tmp_path: Path) -> None:
    trace = Trace(write(tmp_path, [*STEP, launch(8, 90)]))
    (step,) = trace.ranges("step")
    assert trace.lost_in(step) == 1
    figures = trace.occurrence(step).to_dict()
    assert figures.pop("cpu_span_ms") == 0.1
    assert set(figures.values()) == {None}


def test_activity_whose_launches_were_not_recorded_is_not_available(tmp_path: Path) -> None:
    trace = Trace(write(tmp_path, [each for each in STEP if not each["cat"].startswith("cuda_")]))
    assert trace.occurrences("step")[0].kernels is None


def test_ranges_of_one_name_each_have_what_their_own_thread_and_process_launched(tmp_path: Path) -> None:
    inner = event("user_annotation", "step", 15, 20)  # lies in the first, and has that of its name, too
    other = [event("user_annotation", "step", 0, 100, tid=2), event("user_annotation", "step", 300, 50, pid=2)]
    theirs = [launch(20, 310) | {"pid": 2}, launch(21, 310), device("kernel", "k", 400, 5, 20)]
    trace = Trace(write(tmp_path, [*STEP, inner, *other, *theirs, device("kernel", "k", 410, 5, 21)]))
    assert [each.kernels for each in trace.occurrences("step")] == [2, 1, 1, 1]


def test_an_id_that_two_processes_used_leaves_both_without_device_figures(tmp_path: Path) -> None:
    other = [event("user_annotation", "step", 300, 50, pid=2), launch(2, 310) | {"pid": 2}]
    trace = Trace(write(tmp_path, [*STEP, *other, device("kernel", "k", 400, 5, 2)]))
    first, second = trace.ranges("step")
    assert (trace.shared_in(first), trace.shared_in(second)) == (1, 1)
    for figures in (trace.occurrence(each).to_dict() for each in (first, second)):
        assert {figures[name] for name in figures if name != "cpu_span_ms"} == {None}
    assert trace.device_parts_us(first) is None
    assert trace.device_work(first) == []


def test_an_unknown_range_is_refused_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no range 'stop' among 1; did you mean 'step'"):
        Trace(write(tmp_path, STEP)).ranges("stop")


def test_a_trace_without_annotations_says_so(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no ranges: nothing was annotated"):
        Trace(write(tmp_path, STEP[2:])).ranges("step")


def test_a_file_that_is_cut_off_or_no_trace_is_named(tmp_path: Path) -> None:
    whole = write(tmp_path, STEP, "trace.json.gz").read_bytes()
    cut = tmp_path / "cut.json.gz"
    cut.write_bytes(whole[: len(whole) // 2])
    damaged = tmp_path / "damaged.json.gz"
    damaged.write_bytes(whole[:40] + bytes([whole[40] ^ 255]) + whole[41:])
    plain = tmp_path / "plain.json"
    plain.write_bytes(gzip.decompress(whole)[:-100])
    no_time = [{key: value for key, value in STEP[0].items() if key != "ts"}]
    others = {"other": {"other": 1}, "text": "text", "empty": [], "words": ["no", "events"], "timeless": no_time}
    others |= {"nothing": None, "worded_time": [STEP[0] | {"ts": "12"}], "no_length": [STEP[0] | {"dur": None}]}
    others |= {"based": {"traceEvents": STEP, "baseTimeNanoseconds": "noon"}}
    others |= {"ranked": {"traceEvents": STEP, "distributedInfo": {"rank": "first"}}}
    blank, blank_gz = tmp_path / "blank.json", tmp_path / "blank.json.gz"
    blank.write_bytes(b"")
    blank_gz.write_bytes(gzip.compress(b""))
    written = [write(tmp_path, other, f"{name}.json") for name, other in others.items()]
    for path in (cut, damaged, plain, blank, blank_gz, *written):
        with pytest.raises(TraceError, match=path.name):
            Trace(path)


def test_a_gzipped_trace_may_be_named_as_if_it_were_not(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(gzip.compress(json.dumps(STEP).encode()))
    assert Trace(path).range_names() == {"step": 1}


def test_interval_arithmetic() -> None:
    assert union([(5, 6), (0, 2), (1, 3), (3, 4)]) == [(0, 4), (5, 6)]
    assert length_us([(0, 4), (5, 6)]) == 5
    assert overlap_us([(0, 4), (5, 6)], [(3, 5.5)]) == 1.5


_INTERVALS = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20)).map(lambda each: (each[0], sum(each))))


@given(st.tuples(_INTERVALS, _INTERVALS, _INTERVALS), st.sampled_from([0, 1_700_000_000_000_000]))
def test_parts_add_up_and_each_time_is_the_first_layers(layers: tuple[list[tuple[int, int]], ...], epoch: int) -> None:
    start, end = 10, 45
    moved = {str(place): [(left + epoch, right + epoch) for left, right in layer] for place, layer in enumerate(layers)}
    parts = parts_us((start + epoch, end + epoch), moved)
    assert sum(parts.values()) == end - start

    def running(tick: int) -> str:
        """What runs in the microsecond after ``tick``, found one by one."""
        names = [str(place) for place, layer in enumerate(layers) if any(left <= tick < right for left, right in layer)]
        return names[0] if names else "idle"

    ticks = [running(tick) for tick in range(start, end)]
    assert parts == {name: ticks.count(name) for name in ("0", "1", "2", "idle")}
    assert all(left[1] < right[0] for left, right in pairwise(union(layers[0])))


@needs_real_traces
def test_real_trace_of_eight_gpus_gives_what_was_worked_out_by_hand() -> None:
    occurrences = Trace(REAL / "h100x8_normuon_rank0.json.gz").occurrences("Optimizer.step#NorMuon.step")
    spans = [(each.to_dict()["cpu_span_ms"], each.to_dict()["gpu_span_ms"]) for each in occurrences]
    assert spans == [(11.6846, 4.0276), (9.708, 3.0437), (11.7363, 4.594), (9.5827, 3.0548)]
    counts = {(tuple(each.memcpy.items()), each.memset, each.kernels, each.collectives) for each in occurrences}
    assert counts == {((("DtoD", 111),), 4, 159, 8)}


@needs_real_traces
def test_parts_of_the_gpu_spans_of_a_real_trace_add_up_to_the_microsecond() -> None:
    trace = Trace(REAL / "h100x8_normuon_rank0.json.gz")
    for step in trace.ranges("Optimizer.step#*"):
        activity, parts = trace.launched_in(step), trace.device_parts_us(step)
        span_us = max(each.interval[1] for each in activity) - activity[0].start_us
        assert sum(parts.values()) == pytest.approx(span_us, abs=0.01)
        assert min(parts.values()) >= 0


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
