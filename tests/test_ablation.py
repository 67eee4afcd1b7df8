"""The ablation: the sweep over copies, its tables, figures and sentences, and the notebook with small parameters."""

from __future__ import annotations

import json
from collections.abc import Callable

import pandas as pd
import pytest
from executed import Executed
from matplotlib.colors import to_hex

from distmuon.counting.contestants import ladder
from distmuon.counting.counter import SOURCES
from distmuon.counting.launches import count_launches
from distmuon.profiling.sweep import sweep_copies
from distmuon.studies import ablation
from distmuon.studies import profile_plots as plots
from distmuon.studies.profile_tables import SOURCE_GROUPS

LADDER = ladder("baseline", ["packing=parameter", "packing=bucket", "elementwise=bucket"])


@pytest.fixture(scope="module")
def counts() -> dict:
    return ablation.count_ladder(LADDER, "tiny", 2, 2)


def sweep_of(*rows: tuple[int, int, float, str]) -> pd.DataFrame:
    """A sweep with these (regions, bytes each, change, verdict)."""
    frame = pd.DataFrame(rows, columns=["regions", "region_bytes", "change", "verdict"])
    frame["low"], frame["high"] = frame["change"] - 0.01, frame["change"] + 0.01
    return frame.assign(single_launches=frame["regions"], batched_launches=1, single_us=1.0, batched_us=1.0)


def test_the_sweep_times_both_ways_and_counts_their_launches() -> None:
    sweep = sweep_copies([2, 100], [16, 1024], turns=6)
    assert sweep[["regions", "region_bytes"]].values.tolist() == [[2, 64], [2, 4096], [100, 64], [100, 4096]]
    assert sweep["single_launches"].tolist() == [2, 2, 100, 100]
    assert sweep["batched_launches"].tolist() == [1, 1, 2, 2], "64 tensors a launch"
    assert (sweep[["single_us", "batched_us"]] > 0).all(axis=None)
    assert (sweep["low"] <= sweep["change"]).all()
    assert (sweep["change"] <= sweep["high"]).all()


def test_a_large_region_takes_several_launches_even_when_batched() -> None:
    (row,) = sweep_copies([2], [16 << 20], turns=1, max_bytes=128 << 20).to_dict("records")
    assert row["batched_launches"] == 2, "512 chunks of 65,536 elements, 320 a launch"


def test_what_cannot_be_swept_is_refused() -> None:
    with pytest.raises(ValueError, match=r"counts are \[1, 2\]: one region is never batched"):
        sweep_copies([1, 2], [16])
    with pytest.raises(ValueError, match="is within 100 bytes"):
        sweep_copies([2], [16], max_bytes=100)


def test_the_sweep_is_told_as_it_came_out() -> None:
    told = ablation.sweep_finding(sweep_of((8, 256, -0.3, "shorter"), (8, 2**20, 0.0, "unchanged within noise")), "cpu")
    assert "for regions of up to 256 B, at most by 30% (8 regions of 256 B)" in told
    assert "launch up to 8 times less (1 instead of 8), which a CPU, having no launches, can't time" in told
    told = ablation.sweep_finding(sweep_of((2, 256, 0.2, "longer")), "cuda")
    assert "nowhere shorter" in told
    assert "longer for 2 regions" in told
    assert "can't time" not in told


def test_every_source_is_in_one_group() -> None:
    assert sorted(source for members in SOURCE_GROUPS.values() for source in members) == sorted(SOURCES)


def test_tables_have_a_row_a_switch_and_add_up(counts: dict) -> None:
    table = ablation.counts_table(counts)
    assert table["switch"].str.replace("\N{NO-BREAK SPACE}", " ").tolist()[:2] == ["baseline", "+ packing=parameter"]
    assert table["launches"].tolist() == [counted.mean("launches") for counted in counts.values()]
    assert table.loc[1, "async copies"] == count_launches("tiny", 2, 2, "batched").mean("async_copies")
    sources = ablation.sources_table(counts).set_index("switch")
    assert (sources[list(SOURCE_GROUPS)].sum(axis="columns") == sources["total"]).all()
    assert sources["total"].tolist() == table["launches"].tolist()
    brief = ablation.brief(sources.reset_index())
    assert (brief.drop(columns=["switch", "launches"]).sum(axis="columns") == brief["launches"]).all()


def test_the_waterfall_takes_away_at_each_switch_what_the_counts_lose(counts: dict) -> None:
    sources = ablation.sources_table(counts)
    axis = plots.waterfall(sources).axes[0]
    for position, (before, after) in enumerate(zip(sources["total"], sources["total"][1:], strict=False), start=1):
        bars = [bar for bar in axis.patches if abs(bar.get_y() + bar.get_height() / 2 - position) < 0.1]
        left = min(bar.get_x() for bar in bars if bar.get_width())
        right = max(bar.get_x() + bar.get_width() for bar in bars if bar.get_width())
        assert (left, right) == pytest.approx((after, before)), "nothing grows on this ladder"
    assert "leaves" in ablation.launches_finding(counts)


def test_changes_are_drawn_with_the_first_at_zero_and_in_its_colour() -> None:
    rows = [
        {"label": label, "kind": kind, "median": change, "low": change - 0.1, "high": change + 0.1}
        for kind in ("host time", "step time")
        for label, change in (("baseline", 0.0), ("+ packing=parameter", -0.2))
    ]
    figure = plots.time_changes(pd.DataFrame(rows))
    assert [axis.get_xlabel() for axis in figure.axes] == [
        "host time against baseline (%)",
        "step time against baseline (%)",
    ]
    points = [line for line in figure.axes[0].lines if line.get_marker() in ("o", "s")]
    assert [(point.get_xdata()[0], to_hex(point.get_color())) for point in points] == [(0, "#0072b2"), (-20, "#e69f00")]


def test_the_sweep_figure_has_units_and_a_line_a_count() -> None:
    sweep = sweep_of((2, 256, 0.1, "longer"), (2, 1024, 0.0, "x"), (8, 256, -0.3, "shorter"), (8, 1024, 0.0, "x"))
    times, launches = plots.copies_sweep(sweep).axes
    assert [text.get_text() for text in times.get_legend().get_texts()] == ["2 regions", "8 regions"]
    assert "(KiB)" in times.get_xlabel()
    assert "(%)" in times.get_ylabel()
    assert launches.get_ylabel() == "launches on a GPU"


@pytest.mark.slow
def test_the_notebook_runs_with_small_parameters(executed: Callable[[str], Executed]) -> None:
    found = executed("02_ablation")
    run = found.run
    assert "On tiny with 2 ranks, 3 switches take a rank's step from" in run.mark["conclusion"]
    assert "+\N{NO-BREAK SPACE}ns_batching=shape" in run.mark["headline"]
    summary = json.loads((found.files / "summary.json").read_text())
    last = list(summary["variants"])[-1]
    assert last.endswith("+ns_algorithm=copy_free")
    assert not summary["comparisons"][last]["bit_equal_parameters"]
    assert f"All train to the same bits but {last}, whose arithmetic is another." in run.mark["conclusion"]
    counted = count_launches("tiny", 2, 2, "batched").to_dict()
    assert summary["variants"]["batched"]["by_source"] == counted["by_source"]
    assert found.html.count("<figure>") == 3
