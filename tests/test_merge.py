"""One trace of all ranks: processes and threads of their own, on one clock, readable by the reader again."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from pool import Pool
from traces import REAL, STEP, device, event, launch, needs_real_traces, trace_exchanges, write, write_rank

from distmuon.traces.merge import merge_traces
from distmuon.traces.ranks import RankTraces, shown_ranks
from distmuon.traces.trace import Trace
from distmuon.traces.tracefile import TraceError

RANKS = 3


@pytest.fixture(scope="module")
def run(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> RankTraces:
    folder = tmp_path_factory.mktemp("ranks")
    pool.run(RANKS, trace_exchanges, str(folder), timeout=120.0)
    return RankTraces(folder)


@pytest.fixture(scope="module")
def merged(run: RankTraces, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("merged") / "merged.trace.json.gz"
    merge_traces(run, path)
    return path


def events_of(path: Path) -> list[dict[str, Any]]:
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt") as file:
        return json.load(file)["traceEvents"]


def test_each_rank_is_a_process_with_named_threads(merged: Path) -> None:
    events = events_of(merged)
    told = {
        what: {(event["pid"], event["tid"]): event["args"] for event in events if event["name"] == what}
        for what in ("process_name", "process_sort_index", "thread_name", "thread_sort_index")
    }
    assert [args["name"] for args in told["process_name"].values()] == ["rank 0", "rank 1", "rank 2"]
    assert [args["sort_index"] for args in told["process_sort_index"].values()] == [0, 1, 2]
    threads = {(event["pid"], event["tid"]) for event in events if event["ph"] == "X"}
    assert threads == told["thread_name"].keys() == told["thread_sort_index"].keys()
    assert len({pid for pid, _ in threads}) == RANKS
    assert len({tid for _, tid in threads}) == len(threads), "no thread's number is another's, in any process"
    exchanging = {(event["pid"], event["tid"]) for event in events if event["name"] == "gloo:all_to_all"}
    assert len(exchanging) >= RANKS
    assert all(thread != process for process, thread in exchanging), "not the main thread, which is the process's first"


def test_all_events_are_there_under_their_own_names(run: RankTraces, merged: Path) -> None:
    events = [event for event in events_of(merged) if event["ph"] == "X"]
    alone = [event for trace in run.traces for event in events_of(trace.path) if event["ph"] == "X"]
    assert len(events) == sum(event["cat"] != "Trace" for event in alone)
    packs = [event for event in events if event["name"] == "distmuon/pack/0 layers"]
    assert len(packs) == 3 * RANKS
    assert all(event["ts"] >= 0 and event["dur"] >= 0 for event in events)


def test_an_exchange_overlaps_in_time_on_all_ranks(merged: Path) -> None:
    exchanges: dict[int, list[tuple[float, float]]] = {}
    for each in sorted(events_of(merged), key=lambda each: each["ts"]):
        if each["name"] == "gloo:all_to_all":
            exchanges.setdefault(each["pid"], []).append((each["ts"], each["ts"] + each["dur"]))
    assert [len(mine) for mine in exchanges.values()] == [3] * RANKS
    for same in zip(*exchanges.values(), strict=True):
        # None can end before the last has begun; a clock that is wrong by more than an exchange takes shows here.
        assert max(start for start, _ in same) < min(end for _, end in same)


def test_the_reader_reads_it_as_it_reads_the_ranks(run: RankTraces, merged: Path) -> None:
    whole = Trace(merged)
    for name in ("step", "outer/1 > step", "gloo:*"):
        alone = [each.to_dict() for trace in run.traces for each in trace.occurrences(name)]
        together = [each.to_dict() for each in whole.occurrences(name)]
        assert sorted(map(str, together)) == sorted(map(str, alone))
    first = run.traces[0]
    start_ns = first.base_ns + 1000 * first.ranges("outer/0")[0].start_us
    assert whole.base_ns + 1000 * min(each.start_us for each in whole.ranges("outer/0")) <= start_ns + 1000


def test_launches_of_one_id_on_two_ranks_stay_apart(tmp_path: Path) -> None:
    flows = [{"ph": ph, "cat": "ac2g", "id": 1, "pid": 1, "tid": 1, "ts": 10, "name": "ac2g"} for ph in "sf"]
    for rank in range(2):
        write_rank(tmp_path, rank, 2, [*STEP, *flows])
    merge_traces(RankTraces(tmp_path), tmp_path / "merged.json")
    whole = Trace(tmp_path / "merged.json")
    assert [each.to_dict() for each in whole.occurrences("step")] == [
        each.to_dict() for each in Trace(tmp_path / "rank0.trace.json").occurrences("step")
    ] * 2
    events = events_of(tmp_path / "merged.json")
    ids = [event["id"] for event in events if event["ph"] in "sf"]
    assert ids[0] == ids[1] != ids[2] == ids[3]
    streams = [event["args"]["name"] for event in events if event["name"] == "thread_name"]
    assert streams == ["thread 1", "thread 2", "GPU 0 stream 7", "GPU 0 stream 20"] * 2


_TYPES = {"name": str, "cat": str, "ph": str, "ts": int | float, "pid": int, "tid": int}
_NAMED = {"process_name": str, "process_sort_index": int, "thread_name": str, "thread_sort_index": int}


def assert_trace_event_format(path: Path, ranks: int) -> list[dict[str, Any]]:
    """What Perfetto's importer takes without dropping anything; returns the slices."""
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt") as file:
        document = json.load(file, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    assert document["displayTimeUnit"] == "ms"
    by_phase: dict[str, list[dict[str, Any]]] = {}
    for each in document["traceEvents"]:
        by_phase.setdefault(each["ph"], []).append(each)
        assert all(isinstance(each[key], kind) for key, kind in _TYPES.items() if key != "cat" or key in each), each
        assert isinstance(each.get("args", {}), dict)
        assert each["ts"] >= 0
    assert by_phase.keys() <= {"M", "X", "i", "s", "f"}
    for each in by_phase["M"]:
        (value,) = each["args"].values()
        assert isinstance(value, _NAMED[each["name"]])
        assert value != ""
    names = [each["args"]["name"] for each in by_phase["M"] if each["name"] == "process_name"]
    assert names == [f"rank {rank}" for rank in range(ranks)]
    threads = [(each["pid"], each["tid"]) for each in by_phase["M"] if each["name"] == "thread_name"]
    assert len(set(threads)) == len(threads)
    assert len({pid for pid, _ in threads}) == ranks, "a process a rank, its GPUs' streams included"

    tracks: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for each in by_phase["X"]:
        assert isinstance(each["dur"], int | float)
        start = round(1000 * each["ts"])
        tracks.setdefault((each["pid"], each["tid"]), []).append((start, start + round(1000 * each["dur"])))
    assert tracks.keys() <= set(threads)
    for slices in tracks.values():
        running: list[int] = []
        for start, end in sorted(slices, key=lambda each: (each[0], -each[1])):
            assert end >= start
            while running and running[-1] <= start and running[-1] < end:
                running.pop()
            assert not running or end <= running[-1], "overlaps, and would be dropped"
            running.append(end)

    begun, ended = ({each["id"]: each for each in by_phase.get(phase, [])} for phase in "sf")
    assert (len(begun), len(ended)) == (len(by_phase.get("s", [])), len(by_phase.get("f", [])))
    assert begun.keys() == ended.keys()
    for number, start in begun.items():
        end = ended[number]
        assert (start["cat"], start["name"]) == (end["cat"], end["name"])
        assert end["bp"] == "e"
        for each in (start, end):
            time = round(1000 * each["ts"])
            assert any(left <= time <= right for left, right in tracks[each["pid"], each["tid"]]), "nothing to end at"
    return by_phase["X"]


def test_real_ranks_make_a_trace_that_perfetto_takes(merged: Path) -> None:
    slices = assert_trace_event_format(merged, RANKS)
    for pid in {each["pid"] for each in slices}:
        mine = [each["name"] for each in slices if each["pid"] == pid]
        assert mine.count("distmuon/pack/0 layers") == 3


def with_arrows(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """With an arrow from each launch to each activity, as the profiler writes them; and one without a beginning."""
    arrows = [{**each, "ph": "f", "cat": "ac2g", "name": "ac2g", "bp": "e", "id": 99} for each in events[-1:]]
    for each in events:
        if "correlation" in each["args"]:
            phase = {"ph": "s"} if each["cat"].startswith("cuda_") else {"ph": "f", "bp": "e"}
            arrows.append({**each, "cat": "ac2g", "name": "ac2g", "id": each["args"]["correlation"]} | phase)
    return [*events, *({key: value for key, value in each.items() if key not in ("dur", "args")} for each in arrows)]


def test_kernels_that_overlap_on_a_stream_get_a_track_beside_it(tmp_path: Path) -> None:
    early = [launch(30, 60), device("kernel", "early", 125, 10, 30), device("kernel", "third", 127, 20, 30)]
    late = event("user_annotation", "late", 90, 50)  # begins inside of another range, and ends after it
    inside = [launch(31, 95), device("kernel", "k", 300, 5, 31)]
    for rank in range(2):
        write_rank(tmp_path, rank, 2, with_arrows([*STEP, *early, late, *inside]))
    merge_traces(RankTraces(tmp_path), tmp_path / "merged.json")
    slices = assert_trace_event_format(tmp_path / "merged.json", 2)
    assert len(slices) == 2 * len([*STEP, *early, late, *inside]), "nothing is left out"
    arrows = [each for each in events_of(tmp_path / "merged.json") if each["ph"] == "f"]
    tracks = {each["name"]: each["tid"] for each in slices if each["pid"] == arrows[0]["pid"]}
    assert {tracks["early"], tracks["third"]} <= {each["tid"] for each in arrows}
    assert len(arrows) == 2 * 10, "a graph's launch has an arrow to each of its two kernels"
    names = [each["args"]["name"] for each in events_of(tmp_path / "merged.json") if each["name"] == "thread_name"]
    assert names[:8].count("GPU 0 stream 7, overlapping 1") == 1
    whole, alone = Trace(tmp_path / "merged.json"), Trace(tmp_path / "rank0.trace.json")
    for name in ("step", "late"):
        assert [each.to_dict() for each in whole.occurrences(name)] == [
            each.to_dict() for each in alone.occurrences(name)
        ] * 2


def test_slices_that_only_rounding_makes_overlap_stay_on_their_track(tmp_path: Path) -> None:
    close = [device("kernel", "a", 10, 5.002, 1), device("kernel", "b", 15, 5, 1), device("kernel", "c", 20.0, 1, 1)]
    outer = event("gpu_user_annotation", "step", 10, 10.999, tid=7, pid=0)
    write_rank(tmp_path, 0, 1, [event("user_annotation", "step", 0, 9), launch(1, 1), outer, *close])
    merge_traces(RankTraces(tmp_path), tmp_path / "merged.json")
    slices = assert_trace_event_format(tmp_path / "merged.json", 1)
    assert {each["name"]: each["dur"] for each in slices if each["name"] in "abc"} == {"a": 5, "b": 5, "c": 0.999}
    assert not any("track" in each.get("args", {}) for each in slices)


@needs_real_traces
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("h100x8_normuon_rank0", marks=pytest.mark.slow),
        "a100x128_recommender_rank0",
        "mi300_bert_forward",
    ],
)
def test_real_traces_with_overlaps_make_a_trace_that_perfetto_takes(tmp_path: Path, name: str) -> None:
    (tmp_path / "rank0.trace.json.gz").write_bytes((REAL / f"{name}.json.gz").read_bytes())
    merge_traces(RankTraces(tmp_path, partial=True), tmp_path / "merged.json.gz")
    slices = assert_trace_event_format(tmp_path / "merged.json.gz", 1)
    alone = [each for each in events_of(tmp_path / "rank0.trace.json.gz") if each["ph"] == "X"]
    assert len(slices) == sum(each["cat"] != "Trace" for each in alone)
    range_name = "Optimizer.step#*" if "normuon" in name else "ProfilerStep#*"
    merged, own = (Trace(tmp_path / file).occurrences(range_name) for file in ("merged.json.gz", "rank0.trace.json.gz"))
    assert [each.to_dict() for each in merged] == [each.to_dict() for each in own]


def test_clocks_that_start_at_different_times_become_one(tmp_path: Path) -> None:
    write_rank(tmp_path, 0, 2, base_ns=10**18 + 30_000)
    write_rank(tmp_path, 1, 2, base_ns=10**18)
    merge_traces(RankTraces(tmp_path), tmp_path / "merged.json")
    events = events_of(tmp_path / "merged.json")
    assert sorted(event["ts"] for event in events if event.get("cat") == "user_annotation") == [0, 30]


@pytest.mark.parametrize(
    ("bases", "message"),
    [
        ((0, 10**18), "no common clock"),
        ((0, 0), "no common clock"),
        ((10**18, 2 * 10**18), "not taken at the same time"),
    ],
)
def test_ranks_without_a_common_clock_are_refused(tmp_path: Path, bases: tuple[int, int], message: str) -> None:
    for rank, base_ns in enumerate(bases):
        write_rank(tmp_path, rank, 2, base_ns=base_ns)
    with pytest.raises(TraceError, match=message):
        merge_traces(RankTraces(tmp_path), tmp_path / "merged.json")
    assert not (tmp_path / "merged.json").exists()


def test_missing_and_doubled_ranks_are_named(tmp_path: Path) -> None:
    for rank in (0, 3):
        write_rank(tmp_path, rank, 5)
    with pytest.raises(TraceError, match="ranks are missing: 1-2, 4"):
        RankTraces(tmp_path)
    partial = RankTraces(tmp_path, partial=True)
    assert (partial.missing, [trace.rank for trace in partial.traces]) == ([1, 2, 4], [0, 3])
    (tmp_path / "rank3-again.trace.json").write_text((tmp_path / "rank3.trace.json").read_text())
    with pytest.raises(TraceError, match=r"rank 3 is there twice, in rank3-again\.trace\.json too"):
        RankTraces(tmp_path, partial=True)


def test_without_a_word_on_their_number_ranks_up_to_the_last_are_expected(tmp_path: Path) -> None:
    write_rank(tmp_path, 1)
    with pytest.raises(TraceError, match="ranks are missing: 0"):
        RankTraces(tmp_path)
    write_rank(tmp_path, 0)
    assert [trace.rank for trace in RankTraces(tmp_path).traces] == [0, 1]


def test_what_is_no_folder_of_one_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no such file or folder"):
        RankTraces(tmp_path / "none")
    (tmp_path / "summary.json").write_text("{}")
    with pytest.raises(TraceError, match="no traces"):
        RankTraces(tmp_path)
    write(tmp_path, STEP, "a.trace.json")
    with pytest.raises(TraceError, match=r"a\.trace\.json: does not tell its rank"):
        RankTraces(tmp_path)
    write_rank(tmp_path, 0, 2)
    write_rank(tmp_path, 1, 3)
    with pytest.raises(TraceError, match=r"rank0\.trace\.json of 2, rank1\.trace\.json of 3"):
        RankTraces(tmp_path)


def test_ranks_are_written_short() -> None:
    assert shown_ranks([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"
