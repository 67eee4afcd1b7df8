"""Two traces side by side: figures worked out by hand, rows that vanished, rank skew, and what a trace cannot tell."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from executed import Executed
from matplotlib.colors import to_hex
from pool import Pool
from traces import STEP, device, event, launch, trace_exchanges, write, write_rank

from distmuon.studies import comparison_plots as plots
from distmuon.studies import comparison_tables as tables
from distmuon.traces.comparison import Comparison, common_range, compare
from distmuon.traces.ranks import RankTraces
from distmuon.traces.tracefile import TraceError

#: Like STEP, but its memset has gone, one gemm is another kernel, and the exchange has nothing beside it.
LATER = [
    event("user_annotation", "step", 1000, 80),
    *(launch(id, 1000 + id) for id in (1, 2, 3)),
    device("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 1030, 10, 1),
    device("kernel", "other", 1045, 5, 2),
    device("kernel", "ncclDevKernel_SendRecv", 1050, 20, 3, stream=20),
]


def row(table: pd.DataFrame, **where: Any) -> pd.Series:
    for name, value in where.items():
        table = table[table[name] == value]
    (index,) = table.index
    return table.loc[index]


@pytest.fixture
def found(tmp_path: Path) -> Comparison:
    return compare(write(tmp_path, STEP, "a.json"), write(tmp_path, LATER, "b.json"))


def test_counts_side_by_side(found: Comparison) -> None:
    assert found.a.range_name == found.b.range_name == "step", "the only range in common"
    counts = tables.counts_table(found).set_index("figure")
    assert counts["A"].tolist() == [1, 1, 2, 4, 1, 0, 0]
    assert counts.loc[["memcpy DtoD", "memset", "kernels", "launches", "collectives"], "B"].tolist() == [1, 0, 1, 2, 1]
    assert counts.loc["launches", ["difference", "change"]].tolist() == [-2, -0.5]
    assert math.isnan(counts.loc["host copies", "change"]), "nothing to take a share of"
    assert "2 launches (4 in A, -50.0%)" in tables.counts_finding(found)
    assert "as many memcpy DtoD, collectives" in tables.counts_finding(found)


def test_spans_and_their_parts_side_by_side(found: Comparison) -> None:
    spans = tables.spans_table(found).set_index("figure")
    parts = ["compute", "copies", "exposed exchange", "idle"]
    for side, expected in (("A", [0.015, 0.011, 0.009, 0.065]), ("B", [0.005, 0.010, 0.020, 0.005])):
        told = [spans.loc[f"GPU span: {part} (ms)", side] for part in parts]
        assert told == pytest.approx(expected)
        assert sum(told) == pytest.approx(spans.loc["GPU span (ms)", side])
    assert spans.loc["overlap (%)", ["A", "B"]].tolist() == pytest.approx([25, 0])
    assert "GPU span: 0.04 ms where A takes 0.10 ms (-60.0%, too few occurrences" in tables.spans_finding(found)


def test_operators_that_came_and_went_are_kept(found: Comparison) -> None:
    work = tables.work_table(found)
    assert dict(zip(work["name"], work["verdict"], strict=True)) == {
        "gemm": "went",
        "other": "came",
        "Memset (Device)": "went",
        "ncclDevKernel_SendRecv": "same",
        "Memcpy DtoD (Device -> Device)": "same",
    }
    gemm = row(work, name="gemm")
    assert gemm[["calls, A", "calls, B", "A (ms)", "B (ms)"]].tolist() == [2, 0, 0.015, 0]
    assert work["change (ms)"].abs().is_monotonic_decreasing
    assert set(tables.short_work_table(found, 1)["verdict"]) == {"went", "came"}
    assert "1 came, 2 went; the time of gemm changes most, by -0.01 ms" in tables.work_finding(found)


def occurrences(durations: list[float], calls: int = 1) -> list[dict[str, Any]]:
    steps = [event("user_annotation", "step", 100 * k, 90) for k in range(len(durations))]
    return steps + [
        event("cpu_op", "aten::mm", 100 * k + 40 * call, each / calls)
        for k, each in enumerate(durations)
        for call in range(calls)
    ]


@pytest.mark.parametrize(
    ("a", "b", "calls", "verdict"),
    [
        ([10, 11, 12], [13, 14, 15], 1, "longer"),
        ([10, 11, 12], [7, 8, 9], 1, "shorter"),
        ([10, 11, 12], [12, 14, 15], 1, "same"),  # one of them took as long
        ([10, 11], [13, 14], 1, "same"),  # too few to tell
        ([10, 11, 12], [13, 14, 15], 2, "grew"),
    ],
)
def test_what_became_of_an_operator(tmp_path: Path, a: list[float], b: list[float], calls: int, verdict: str) -> None:
    before, after = write(tmp_path, occurrences(a), "a.json"), write(tmp_path, occurrences(b, calls), "b.json")
    found = compare(before, after)
    assert tables.work_table(found)["verdict"].tolist() == [verdict]
    assert tables.work_table(compare(after, before))["verdict"].tolist() == [
        {"longer": "shorter", "shorter": "longer", "grew": "shrank"}.get(verdict, verdict)
    ]


def test_a_side_without_a_device_is_not_available_rather_than_zero(tmp_path: Path) -> None:
    on_cpu = [event("user_annotation", "step", 0, 100), event("cpu_op", "aten::mm", 1, 50)]
    found = compare(write(tmp_path, STEP, "gpu.json"), write(tmp_path, on_cpu, "cpu.json"), labels=("gpu", "cpu"))
    counts = tables.counts_table(found).set_index("figure")
    assert counts.loc[["memcpy DtoD", "memset", "kernels", "launches"], "cpu"].isna().all()
    assert counts.loc["collectives", "cpu"] == 0
    work = tables.work_table(found)
    assert pd.isna(row(work, name="gemm")["verdict"]), "it has not gone: that side cannot tell"
    assert row(work, name="aten::mm")["verdict"] == "came"
    spans = tables.spans_table(found).set_index("figure")
    assert spans.loc[[name for name in spans.index if name.startswith("GPU")], "cpu"].isna().all()
    assert spans.loc["CPU span: exposed exchange (ms)", "cpu"] == 0
    assert "GPU span: n/a, as cpu recorded no device" in tables.conclusion(found)


def test_a_device_that_made_no_copies_made_none(tmp_path: Path) -> None:
    no_copies = [each for each in LATER if "Memcpy" not in each["name"] and each["args"].get("correlation") != 1]
    found = compare(write(tmp_path, STEP, "a.json"), write(tmp_path, no_copies, "b.json"))
    assert tables.counts_table(found).set_index("figure").loc["memcpy DtoD", "B"] == 0


def test_a_trace_that_ends_too_early_has_no_work_of_the_device(tmp_path: Path) -> None:
    cut = write(tmp_path, [*STEP, launch(8, 90), event("cpu_op", "aten::mm", 1, 2)], "cut.json")
    found = compare(write(tmp_path, STEP, "whole.json"), cut, labels=("whole", "cut"))
    work = tables.work_table(found)
    assert work[work["where"] == "device"]["verdict"].isna().all()
    assert row(work, name="gemm")[["calls, whole", "calls, cut"]].isna().tolist() == [False, True]
    assert row(work, name="aten::mm")["calls, cut"] == 1
    spans = tables.spans_table(found).set_index("figure")["cut"]
    assert spans[["GPU span (ms)", "exchange (ms)", "overlap (%)"]].isna().all()
    assert math.isnan(tables.counts_table(found).set_index("figure").loc["memcpy DtoD", "cut"])
    assert row(tables.ranks_table(found), side="cut")[["GPU span (ms)", "exchanges (ms)"]].isna().all()
    assert "as a side launched nothing, or its trace cannot tell" in tables.spans_finding(found)


def test_the_host_alone_cannot_tell_how_long_exchanges_on_gpus_took(tmp_path: Path) -> None:
    host = [event("user_annotation", "step", 0, 100), event("cpu_op", "c10d::alltoall_base_", 1, 5)]
    found = compare(write(tmp_path, host, "a.json"), write(tmp_path, host, "b.json"))
    spans = tables.spans_table(found).set_index("figure")["A"]
    assert spans[["exchange (ms)", "CPU span: exposed exchange (ms)", "overlap (%)"]].isna().all()
    assert tables.counts_table(found).set_index("figure").loc["collectives", "A"] == 1
    assert tables.ranks_table(found)["exchanges (ms)"].isna().all()


def test_ranges_in_which_nothing_ran(tmp_path: Path) -> None:
    bare = [event("user_annotation", "step", 0, 100)]
    found = compare(write(tmp_path, bare, "a.json"), write(tmp_path, bare, "b.json"))
    assert tables.work_table(found).empty
    assert "No operators, kernels or copies are recorded" in tables.conclusion(found)


def test_rank_skew_on_a_common_clock(tmp_path: Path) -> None:
    exchange = {rank: [event("user_annotation", "gloo:all_to_all", 20, 30 - 10 * rank, tid=2)] for rank in range(2)}
    for rank, base_ns in enumerate((10**18, 10**18 + 10_000)):  # rank 1 starts 10 us later
        write_rank(tmp_path, rank, 2, [event("user_annotation", "step", 0, 100), *exchange[rank]], base_ns)
    found = compare(tmp_path, write(tmp_path, STEP, "other.json"), labels=("two", "one"))
    ranks = tables.ranks_table(found)
    two = ranks[ranks["side"] == "two"]
    assert two["starts after the first (ms)"].tolist() == pytest.approx([0, 0.01])
    assert two["exchanges (ms)"].tolist() == pytest.approx([0.03, 0.02])
    assert two["of it waiting (ms)"].tolist() == pytest.approx([0.01, 0])
    one = row(ranks, side="one")
    assert one[["starts after the first (ms)", "of it waiting (ms)"]].isna().all()
    told = tables.skew_finding(found)
    assert "In two the last rank starts 0.01 ms after the first" in told
    assert "rank skew of one is n/a, it has one rank" in told


def test_ranks_that_differ_in_their_exchanges_have_no_waiting(tmp_path: Path) -> None:
    for rank in range(2):
        exchanges = [event("user_annotation", "gloo:all_to_all", 20 * k, 5, tid=2) for k in range(1 + rank)]
        write_rank(tmp_path, rank, 2, [event("user_annotation", "step", 0, 100), *exchanges])
    ranks = tables.ranks_table(compare(tmp_path, write(tmp_path, STEP, "other.json")))
    assert ranks["of it waiting (ms)"].isna().tolist() == [False, True, True]


def test_ranges_of_one_trace_are_compared_with_each_other(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, trace_exchanges, str(tmp_path), timeout=120.0)
    found = compare(tmp_path, range_a="outer/*", range_b="outer/* > distmuon/pack/*", labels=("outer", "pack"))
    assert [(side.ranks, len(side.occurrences)) for side in found.sides] == [(2, 6), (2, 6)]
    assert row(tables.work_table(found), name="c10d::alltoall_base_")["verdict"] == "went"
    assert row(tables.work_table(found), name="aten::mm")[["calls, outer", "calls, pack"]].tolist() == [1, 1]
    spans = tables.spans_table(found).set_index("figure")
    assert spans.loc["CPU span (ms)", "outer"] > spans.loc["CPU span (ms)", "pack"] > 0
    assert spans.loc["exchange (ms)", "outer"] > spans.loc["exchange (ms)", "pack"] == 0
    assert tables.ranks_table(found)["starts after the first (ms)"].notna().all()


def test_the_range_to_compare_is_an_optimizers_if_there_is_one(tmp_path: Path) -> None:
    ranges = [("ProfilerStep#1", 500), ("Optimizer.step#Muon.step", 100), ("Optimizer.step#AdamW.step", 50), ("a", 900)]
    trace = write(tmp_path, [event("user_annotation", name, 0, length) for name, length in ranges])
    assert common_range(RankTraces(trace)) == "Optimizer.step#Muon.step"
    other = write(
        tmp_path, [event("user_annotation", name, 0, length) for name, length in (ranges[0], ranges[3])], "b.json"
    )
    assert common_range(RankTraces(trace), RankTraces(other)) == "a"
    third = write(tmp_path, STEP, "c.json")
    with pytest.raises(TraceError, match="no range is in all of"):
        compare(trace, third)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"a": None}, "a is not given"),
        ({"b": None}, "would be compared with itself"),
        ({"labels": ("x", "x")}, "both sides are called 'x'"),
        ({"range_b": "stop"}, "did you mean 'step'"),
    ],
)
def test_what_cannot_be_compared_is_refused(tmp_path: Path, changed: dict[str, Any], message: str) -> None:
    question = {"a": write(tmp_path, STEP, "a.json"), "b": write(tmp_path, LATER, "b.json"), "range_a": "step"}
    with pytest.raises(ValueError, match=message):
        compare(**(question | changed))


def test_figures_show_what_the_tables_say(found: Comparison) -> None:
    spans = plots.parts(tables.spans_table(found))
    assert [axis.get_xlabel() for axis in spans.axes] == ["GPU span (ms)", "CPU span (ms)"]
    first = [bar for bar in spans.axes[0].patches if round(bar.get_y() + bar.get_height() / 2) == 0]
    assert sum(bar.get_width() for bar in first) == pytest.approx(0.1)
    counts = plots.counts(tables.counts_table(found))
    assert counts.axes[0].get_xlabel().startswith("number")
    assert to_hex(counts.axes[0].patches[0].get_facecolor()) == "#0072b2", "the first side has the colour of the first"
    work = tables.work_table(found)
    bars = plots.work(work, rows=2).axes[0].patches
    assert [bar.get_width() for bar in bars] == work["change (ms)"].tolist()[:2]
    ranks = plots.skew(tables.ranks_table(found))
    assert [text.get_text() for axis in ranks.axes for text in axis.texts] == ["n/a", "n/a"]


def test_long_names_of_kernels_keep_what_tells_them_apart() -> None:
    name = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float> >(int, float*)"
    assert tables.short_name(name) == "vectorized_elementwise_kernel<4…tor_add<float> >"
    assert tables.short_name("aten::mm") == "aten::mm"


def test_a_comparison_shows_itself_as_a_table(found: Comparison) -> None:
    assert repr(found) == "<Comparison: B (1 x step on 1 rank) against A (1 x step on 1 rank)>"
    assert '>launches</td><td class="number">4</td><td class="number">2</td>' in found._repr_html_()


def test_a_comparison_is_read_back_as_it_was_written(found: Comparison, tmp_path: Path) -> None:
    found.write(tmp_path / "kept")
    again = Comparison.read(tmp_path / "kept")
    assert tables.conclusion(again) == tables.conclusion(found)
    for name, table in tables.tables(again).items():
        pd.testing.assert_frame_equal(table, tables.tables(found)[name])


@pytest.mark.slow
def test_the_notebook_takes_a_profile_where_nothing_is_named(executed: Callable[[str], Executed]) -> None:
    run = executed("04_compare_traces")
    assert "Fused against baseline, means over 3 occurrences on 4 ranks." in run.run.mark["conclusion"]
    assert (run.files / "profile/rank3.trace.json.gz").exists()
    assert run.html.count("<figure>") == 4
