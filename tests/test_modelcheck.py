"""The model against real gloo ranks: rates are measured, parts add up, and what is told follows from the numbers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
from executed import Executed

from distmuon.modelling import Assumptions
from distmuon.profiling.session import Settings
from distmuon.studies import scale_plots
from distmuon.studies import scale_report as report
from distmuon.studies.modelcheck import PARTS, Check, check, read_check
from distmuon.studies.scale import Job, plan_job

SETTINGS = Settings("tiny", 2, 2, ("baseline", "fused"), steps=3, repeats=1, tokens=16)


@pytest.mark.slow
def test_the_model_is_checked_on_real_ranks(tmp_path: Path) -> None:
    found = check(SETTINGS, tmp_path / "check")
    assumed = found.assumptions.to_dict()
    assert assumed["ranks_a_host"] == 2
    assert 1e8 < assumed["gemm_flops"] < 1e13
    assert 1e8 < assumed["memory_bandwidth"] < 1e12
    assert 1e6 < assumed["near_bandwidth"] == assumed["far_bandwidth"] < 1e12
    assert 0.1 < assumed["launch_us"] < 1e4
    assert 1 < assumed["message_us"] < 1e6
    assert len(found.turns) == 2 * 3 * (len(PARTS) + 2)
    parts = found.turns.pivot(index=["variant", "turn"], columns="part", values="measured_ms")
    mean_span = parts[[*PARTS, "rest"]].sum(axis="columns")
    assert (mean_span <= parts["step"] + 1e-6).all(), "a mean over ranks is no longer than the last of them"
    assert (parts[[*PARTS]] >= 0).all(axis=None)
    assert (found.turns.query("part == 'step'")["modelled_ms"] > 0).all()
    pd.testing.assert_frame_equal(read_check(tmp_path / "check").turns, found.turns)
    for variant in SETTINGS.variants:
        assert f"{variant} {found.error(variant):+.0%}" in report.check_finding(found)
    assert len(scale_plots.check(found.table()).axes) == 2


def test_the_error_is_the_median_of_the_turns() -> None:
    rows = [
        {"variant": "fused", "turn": turn, "part": "step", "measured_ms": 10.0, "modelled_ms": modelled}
        for turn, modelled in enumerate((9.0, 30.0, 8.0))
    ]
    found = Check(Path(), SETTINGS, Assumptions(), 2, pd.DataFrame(rows))
    assert found.error("fused") == pytest.approx(-0.1)
    (row,) = found.table().to_dict("records")
    assert "tiny on 2 CPU ranks that share 2 cores, 3 turns" in found._repr_html_()
    assert '>step</td><td class="number">10</td><td class="number">9</td>' in found._repr_html_()
    assert (row["low"], row["high"]) == pytest.approx((0.8, 3.0))


def rows_of(*rows: tuple[str, float, float]) -> pd.DataFrame:
    frame = pd.DataFrame(rows, columns=["bucket", "step_ms", "buffer_mib"])
    return frame.assign(busy_ms=1.0, exposed_ms=frame["step_ms"] - 1, idle_ms=0.0)


def test_the_smallest_of_nearly_the_shortest_buckets_is_advised() -> None:
    job = Job("tiny", 4, 2)
    rows = rows_of(("1 layer", 50.0, 1.0), ("2 layers", 20.3, 5.0), ("4 layers", 20.0, 9.0), ("chosen", 30.0, 2.0))
    told = report.bucket_advice(job, rows)
    assert told.startswith("For tiny on 4 ranks (EP 2) take 2 layers a bucket: a modelled step of 20.3 ms")
    assert "with 1 layer a bucket it is 50.0 ms" in told
    assert "take the buckets that DistMuon chooses" in report.bucket_advice(
        job, rows_of(("1 layer", 5, 1), ("chosen", 3, 9))
    )


def test_tables_hold_what_the_plans_say() -> None:
    planned = plan_job(Job("tiny", 8, 4))
    ranks = report.balance(planned)
    assert ranks["sent_mib"].sum() == pytest.approx(ranks["received_mib"].sum())
    assert ranks["sent_mib"].tolist() == (planned.totals.sent_bytes() / 2**20).tolist()
    table = report.balance_table(ranks).set_index("a rank and step")
    assert table.loc["GEMM TFLOP", "most / mean"] == pytest.approx(planned.totals.imbalance())
    assert f"{planned.totals.imbalance():.2f} times the mean of GEMM FLOPs" in report.balance_finding(ranks)
    assert report.assumptions_table(planned.job)["value"].tolist() == [400, 3350, 5, 450, 50, 2, 8]
    bars = scale_plots.timeline(planned.replay, 0).axes[0]
    assert bars.get_xlim()[1] == pytest.approx(1e3 * planned.replay.step_s)


def test_buckets_and_replicas_are_compared_job_by_job() -> None:
    job = Job("tiny", 4, 2)
    rows = report.bucket_sizes(job, [1, 2])
    assert rows["bucket"].tolist() == ["1 layer", "2 layers", "chosen"]
    for label, buckets in (("1 layer", job.model.layer_buckets(1)), ("2 layers", "published"), ("chosen", "auto")):
        step = plan_job(Job("tiny", 4, 2, buckets=buckets)).replay.step_s
        assert rows.set_index("bucket").loc[label, "step_ms"] == pytest.approx(1e3 * step)
    parts = rows[["busy_ms", "exposed_ms", "idle_ms"]].sum(axis="columns")
    assert parts.tolist() == pytest.approx(rows["step_ms"].tolist())
    shared = report.sharing(Job("qwen3-8b/32", 8, 1, replicas=2, buckets="auto"), [8])
    assert shared["gemm_tflop"][0] * 2 == pytest.approx(shared["gemm_tflop"][1])
    assert "on 8 ranks" in report.sharing_finding(shared)


@pytest.mark.slow
def test_the_notebook_runs_with_small_parameters(executed: Callable[[str], Executed]) -> None:
    found = executed("03_scale")
    run = found.run
    assert "For tiny on 8 ranks (EP 4) take" in run.mark["conclusion"]
    assert "the model's error on the step is: baseline" in run.mark["conclusion"]
    assert found.html.count("<figure>") == 6
    assert "DGX H100" in found.html
