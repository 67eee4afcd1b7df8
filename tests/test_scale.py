"""Jobs of any size: the script's figures are those of the plans, and a trillion parameters are planned in seconds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from called import call

from distmuon.buffers import peak_bytes
from distmuon.counting.launches import count_launches
from distmuon.modelling import Assumptions
from distmuon.profiling.memory import peak_rss_bytes, torch_rss_bytes
from distmuon.richtext import number
from distmuon.studies.scale import Job, curve, growth, plan_each, plan_job, shown
from distmuon.workloads.storage import plan_for

ROOT = Path(__file__).parents[1]
KEYS = [
    "workload",
    "ranks",
    "ep",
    "rank",
    "plan_seconds",
    "peak_rss_mib",
    "wire_bytes",
    "ns_flops_imbalance",
    "ns_flops_imbalance_by_bucket",
    "buffer_bytes",
    "launches",
    "modelled_step_ms",
    "assumptions",
]


@pytest.mark.parametrize(
    ("ranks", "ep", "seconds"), [pytest.param(1024, 64, 5.0, marks=pytest.mark.slow), (128, 8, 1.0)]
)
def test_a_trillion_parameters_are_planned_in_seconds(ranks, ep, seconds):
    """With room for a machine that is busy with something else; ``scripts/plan_scale.py --curve`` prints the times."""
    words = ["--workload", "kimi-k2", "--ranks", str(ranks), "--ep", str(ep), "--format", "json"]
    command = [sys.executable, str(ROOT / "scripts/plan_scale.py"), *words]
    found = json.loads(subprocess.check_output(command, timeout=300))
    assert list(found) == KEYS
    assert found["plan_seconds"] < 5 * seconds
    assert 0 < found["peak_rss_mib"] < 300
    assert found["assumptions"] == Assumptions().to_dict()


def test_figures_are_those_of_the_plans_of_all_ranks():
    found = plan_job(Job("kimi-debug", 4, 2, rank=3)).to_dict(0)
    counts = count_launches("kimi-debug", 4, 2)
    assert found["launches"] == counts.per_rank[3].launches
    assert found["wire_bytes"]["mean"] == counts.mean("wire_bytes")
    assert found["wire_bytes"]["max"] == max(rank.wire_bytes for rank in counts.per_rank)
    rows = [row for rank in range(4) for row in plan_for("kimi-debug", rank=rank).report([rank])]
    flops = [sum(row["gemm_flops"] for row in rows if row["rank"] == rank) for rank in range(4)]
    assert found["ns_flops_imbalance"] == pytest.approx(max(flops) / (sum(flops) / 4))
    exchanged = [row["imbalance_to_bound"] for row in rows if row["rank"] == 0 and row["collectives"]]
    assert found["ns_flops_imbalance_by_bucket"]["max"] == pytest.approx(max(exchanged))
    assert found["buffer_bytes"] == peak_bytes(plan_for("kimi-debug", rank=3))


def test_a_planned_job_shows_itself_as_its_modelled_step():
    planned = plan_job(Job("tiny", 8, 4, rank=3))
    assert repr(planned).startswith("<Planned: tiny on 8 ranks (EP 4), rank 3 planned in ")
    step = f'<td class="number">{number(planned.row()["step_ms"])}</td>'
    assert planned._repr_html_().count("<tr>") == 2
    assert step in planned._repr_html_()


def test_what_is_left_at_the_end_is_nothing_below_a_microsecond():
    """Some ranks are done a fraction of a launch before others, which no assumption is exact to."""
    slow, fast = (plan_job(Job("tiny", 8, 4, assumptions=Assumptions(launch_us=each))) for each in (50.0, 0.5))
    assert 0 < 1e3 * fast.replay.idle_s.mean() < 5e-4
    assert fast.row()["idle_ms"] == 1e3 * fast.replay.idle_s.mean()
    assert shown(fast.row())["idle_ms"] == 0
    assert shown(slow.row())["idle_ms"] == pytest.approx(1e3 * slow.replay.idle_s.mean(), abs=5e-4) != 0
    assert fast._repr_html_().endswith('<td class="number">0</td></tr></tbody></table>')


def test_the_table_says_what_was_assumed():
    text = call("plan_scale", "--workload", "tiny", "--gemm-flops", "1e12", "--replicas", "2", "--ep", "1").output
    assert "tiny, 4 ranks" in text
    assert "1e+12" in text
    assert "modelled step" in text


def test_what_does_not_fit_is_refused_by_the_script():
    for arguments, message in (
        (["--workload", "kimi-k3"], "did you mean 'kimi-k2'"),
        (["--rank", "1024"], "rank is 1024: give a whole number, 0 to 1023"),
        (["--curve", "--ranks", "16"], "leave out --ranks and --rank"),
    ):
        ended = call("plan_scale", *arguments)
        assert ended.code == 2
        assert message in ended.errors


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"buckets": "publishd"}, "did you mean 'published'"),
        ({"variant": "fusd"}, "did you mean 'fused'"),
        ({"rank": 4}, "rank is 4: give a whole number, 0 to 3"),
        ({"ranks": 3}, "ranks=3 is not divisible by ep=2"),
        ({"ranks": 1, "ep": 1}, "one rank exchanges nothing"),
    ],
)
def test_what_does_not_fit_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        Job(**{"workload": "tiny", "ranks": 4, "ep": 2} | changes)


def test_each_job_is_planned_in_a_fresh_process():
    jobs = curve(Job("tiny", 4, 4), [2, 4, 8])
    assert [(job.ranks, job.ep) for job in jobs] == [(2, 2), (4, 4), (8, 4)]
    rows = list(plan_each(jobs))
    assert [row["ranks"] for row in rows] == [2, 4, 8]
    for job, row in zip(jobs, rows, strict=True):
        here = plan_job(job).to_dict(0)
        assert {key: row[key] for key in KEYS if key not in ("plan_seconds", "peak_rss_mib")} == {
            key: here[key] for key in KEYS if key not in ("plan_seconds", "peak_rss_mib")
        }


def test_planning_grows_no_faster_than_the_ranks():
    jobs = curve(Job("qwen3-8b", 64, 1, buckets="auto"), [64, 256, 1024])
    rows = list(plan_each(jobs))
    assert growth([row["ranks"] for row in rows], [row["plan_seconds"] for row in rows]) < 1.0


def test_growth_is_the_power_of_the_law():
    assert growth([1, 2, 4, 8], [3, 12, 48, 192]) == pytest.approx(2)
    with pytest.raises(ValueError, match="1 sizes say nothing of growth"):
        growth([1], [1])


def test_memory_is_a_peak():
    assert 50 * 2**20 < torch_rss_bytes() <= peak_rss_bytes() + 50 * 2**20
    before = peak_rss_bytes()
    block = bytearray(before)
    assert peak_rss_bytes() > 1.5 * before
    del block
    assert peak_rss_bytes() > 1.5 * before


def test_sharing_replicas_halves_the_work_of_two():
    shared, repeated = (
        plan_job(Job("qwen3-8b", 16, 1, replicas=2, share_replicas=share, buckets="auto")) for share in (True, False)
    )
    assert shared.totals.cost().sum() * 2 == repeated.totals.cost().sum()
    assert shared.replay.busy_s.max() < repeated.replay.busy_s.max()
