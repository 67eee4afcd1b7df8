"""The profile: a real run of the tiny workload from the command line, its files, its tables and figures, and its
faults."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from called import call
from matplotlib.colors import to_hex
from traces import event, texts

from distmuon.counting.launches import count_launches
from distmuon.profiling.events import rank_events, step_range
from distmuon.profiling.noise import paired_change
from distmuon.profiling.results import RankResults, Run, write_results
from distmuon.profiling.session import Settings
from distmuon.studies import profile_findings as findings
from distmuon.studies import profile_plots as plots
from distmuon.studies import profile_tables as tables
from distmuon.traces.trace import Trace, TraceError

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "scripts" / "profile_step.py"
RANKS, EP, STEPS, REPEATS = 2, 2, 1, 2
QUESTION = ["--workload", "tiny", "--ranks", str(RANKS), "--ep", str(EP), "--tokens", "32"]
VARIANTS = ["--variant", "baseline", "--variant", "batched"]
PUBLISHED = tables.load_published(ROOT / "data" / "published" / "kimi_debug_mi250.json")


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """One run of the script, which the tests below look at from all sides."""
    folder = tmp_path_factory.mktemp("profile") / "run"
    length = ["--steps", str(STEPS), "--repeats", str(REPEATS), "--out", str(folder), "--format", "json"]
    command = [sys.executable, str(SCRIPT), *QUESTION, *VARIANTS, *length]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    run = Run.read(folder)
    assert json.loads(done.stdout) == run.summary
    assert "rank 0 of 2: repeat 2 of 2, step 1 of 1, batched: loss" in done.stderr, "progress is shown"
    return run


def test_the_files_of_a_run(run: Run) -> None:
    ranks = [f"rank{rank}.{kind}" for rank in range(RANKS) for kind in ("log", "trace.json.gz")]
    assert sorted(path.name for path in run.folder.iterdir()) == sorted(["summary.json", "events.parquet", *ranks])
    assert "loss" in (run.folder / "rank1.log").read_text()


def test_the_summary_says_what_was_run_and_where_it_comes_from(run: Run) -> None:
    settings, provenance = run.summary["settings"], run.summary["provenance"]
    assert (settings["workload"], settings["ranks"], settings["ep"], settings["seed"]) == ("tiny", RANKS, EP, 0)
    assert (settings["device"], settings["ns_dtype"]) == ("cpu", "float32"), "auto is resolved"
    assert "profile_step.py --workload tiny" in provenance["command"]
    assert re.fullmatch("[0-9a-f]{64}", provenance["text digest"])
    assert {"packages", "device", "commit"} <= provenance.keys()


def test_counts_are_those_of_the_counter_and_the_trace_has_as_many_exchanges(run: Run) -> None:
    for variant in run.variants:
        counted = count_launches("tiny", RANKS, EP, variant).to_dict()
        assert run.of(variant)["counts_source"] == "counted"
        assert run.of(variant)["by_source"] == counted["by_source"]
        for rank, mine in zip(run.of(variant)["per_rank"], counted["per_rank"], strict=True):
            assert {name: rank[name] for name in mine if name != "wire_bytes"} == {
                name: value for name, value in mine.items() if name != "wire_bytes"
            }
            assert rank["sent_bytes"] == mine["wire_bytes"]
            events = run.events[(run.events["variant"] == variant) & (run.events["rank"] == rank["rank"])]
            assert (events["kind"] == "exchange").sum() == mine["collectives"] * STEPS * REPEATS > 0


def test_a_step_lies_around_the_optimizer_and_the_optimizer_around_its_phases(run: Run) -> None:
    for _, step in run.events.groupby(["variant", "rank", "repeat", "step"]):
        inner = step[step["kind"] == "phase"]
        bounds = []
        for rows in (step[step["kind"] == "step"], step[step["kind"] == "optimizer"], inner):
            bounds.append((rows["start_us"].min(), (rows["start_us"] + rows["duration_us"]).max()))
        assert bounds[0][0] <= bounds[1][0] <= bounds[2][0] < bounds[2][1] <= bounds[1][1] <= bounds[0][1]
        assert {"momentum", "pack", "all_to_all", "wait", "unpack", "newton_schulz", "apply"} <= set(inner["phase"])
        assert inner["bucket"].notna().all()
    assert run.events["start_us"].min() == 0


def test_phases_do_not_overlap_on_the_host_and_fill_no_more_than_the_span(run: Run) -> None:
    phases = run.events[run.events["kind"] == "phase"].sort_values("start_us")
    for _, rows in phases.groupby(["variant", "rank", "repeat", "step"]):
        assert (
            rows["start_us"].to_numpy()[1:] >= (rows["start_us"] + rows["duration_us"]).to_numpy()[:-1] - 1e-3
        ).all()


def test_waiting_is_apart_from_transfer(run: Run) -> None:
    exchanges = run.events[run.events["kind"] == "exchange"]
    assert (exchanges["transfer_us"] + exchanges["waiting_us"]).tolist() == pytest.approx(
        exchanges["duration_us"].tolist()
    )
    for _, same in exchanges.groupby(["variant", "repeat", "step", "bucket", "direction"]):
        assert len(same) == RANKS
        assert same["transfer_us"].nunique() == 1
        assert same["waiting_us"].min() == 0, "the rank that waits least does not wait"


def test_spans_have_their_spread_and_no_gpu_is_not_zero(run: Run) -> None:
    for variant in run.variants:
        for rank in run.of(variant)["per_rank"]:
            span = rank["cpu_span_ms"]
            assert len(span["values"]) == STEPS * REPEATS
            assert 0 < span["min"] <= span["mean"] <= span["max"] == max(span["values"])
            assert rank["gpu_span_ms"] is None
    assert run.summary["comparisons"]["batched"]["gpu_span_ms"] is None
    assert run.steps()["gpu_span_ms"].isna().all()
    assert not [text for text in texts(run.summary) if "n/a" in text], "null in a file; only a table writes n/a"
    table = tables.profile_table(run).to_string(na_rep="n/a")
    assert table.count("n/a") == len(run.variants)


def test_training_is_equal_to_the_bit_between_ranks_repeats_and_variants(run: Run) -> None:
    training = run.training()
    assert len(training) == 2 * RANKS * REPEATS * (STEPS + 1)
    assert (training.groupby("step")[["loss", "grad_norm"]].nunique() == 1).all(axis=None)
    assert set(tables.equality_table(run)["bit-equal"]) == {"yes"}


def test_an_inequality_is_told(run: Run) -> None:
    changed = json.loads(json.dumps(run.summary))
    changed["variants"]["batched"]["per_rank"][1]["training"][0]["loss"] += 1e-9
    other = Run(run.folder, changed, run.events)
    assert tables.equality_table(other)["bit-equal"].tolist().count("NO") == 1
    assert "NOT bit-equal: loss and gradient norm, between the ranks" in findings.conclusion(other, PUBLISHED)
    assert "do NOT agree" in findings.training(other)


#: Counted once: what is compared with the published figures.
count_kimi = cache(lambda variant: count_launches("kimi-debug", 4, 2, variant).to_dict())


def kimi(run: Run, copies: float = 423) -> Run:
    """The run with the counts and the setup of the published profile, so that they can be compared."""
    summary = json.loads(json.dumps(run.summary))
    summary["settings"] |= {"workload": "kimi-debug", "ranks": 4}
    for variant in run.variants:
        counted = count_kimi(variant)
        summary["variants"][variant] |= {"mean": counted["mean"], "by_source": counted["by_source"]}
    summary["variants"]["batched"]["mean"]["async_copies"] = copies
    return Run(run.folder, summary, run.events)


def test_the_published_table_has_a_verdict_a_row(run: Run) -> None:
    table = tables.published_table(kimi(run), PUBLISHED).set_index("per rank and step")
    assert table["verdict"].tolist()[:4] == ["equal", "equal", "equal", "no GPU here"]
    assert re.match(r"too few pairs to tell \(", table.loc["CPU span (ms)", "verdict"])
    assert table.loc["GPU span (ms)", ["baseline", "batched", "change"]].isna().all()
    assert set(tables.sources_table(kimi(run), PUBLISHED)[tables.DERIVED]) == {"equal", ""}
    assert "Every published count is met exactly." in findings.conclusion(kimi(run), PUBLISHED)


def test_a_count_that_differs_is_told(run: Run) -> None:
    table = tables.published_table(kimi(run, copies=424), PUBLISHED)
    assert table["verdict"].tolist()[:2] == ["DIFFERS", "equal"]
    assert "Published counts that differ: async copies." in findings.conclusion(kimi(run, copies=424), PUBLISHED)


def test_another_setup_is_not_compared_with_the_published_one(run: Run) -> None:
    assert set(tables.published_table(run, PUBLISHED)["verdict"]) == {"another setup"}
    assert "published" not in findings.conclusion(run, PUBLISHED)


def test_tables_give_every_variant_and_rank(run: Run) -> None:
    assert tables.rank_table(run)[["variant", "rank"]].values.tolist() == [
        [variant, rank] for variant in ("baseline", "batched") for rank in range(RANKS)
    ]
    assert tables.profile_table(run)["variant"].tolist() == ["baseline", "batched"]
    total = tables.sources_table(run, PUBLISHED).iloc[-1]
    assert total["launches, batched"] == run.of("batched")["mean"]["launches"]


def test_figures_can_be_read_in_grey(run: Run) -> None:
    """Of what a legend tells apart, no two are as dark as one another, unless a hatch of their own marks them."""
    for figure in (plots.copies_and_launches(run.sources()), plots.timeline(plots.typical_step(run.events, "batched"))):
        (legend,) = figure.legends
        patches = legend.get_patches()
        hatches = [patch.get_hatch() for patch in patches if patch.get_hatch()]
        assert len(set(hatches)) == len(hatches)
        colours = [patch.get_facecolor() for patch in patches if not patch.get_hatch()]
        greys = sorted(255 * np.dot(colour[:3], (0.299, 0.587, 0.114)) for colour in colours)
        assert min(np.diff(greys)) > 15, greys


def test_figures_show_what_their_alt_texts_say(run: Run) -> None:
    changes = {"batched": tables.change_of(run, "batched", "cpu_span_ms")}
    step = plots.typical_step(run.events, "batched")
    assert step["kind"].value_counts()["optimizer"] == RANKS
    figures = {
        findings.counts(run): plots.copies_and_launches(run.sources()),
        findings.spans(run): plots.spans(run.steps(), changes),
        findings.overlap(step): plots.timeline(step),
        findings.training(run): plots.training(run.training()),
    }
    labels = [axis.get_xlabel() + axis.get_ylabel() for figure in figures.values() for axis in figure.axes]
    assert all("(ms)" in label or "(%)" in label or "step" in label for label in labels), labels
    copies = run.of("baseline")["mean"]["async_copies"]
    assert f"baseline makes {copies:,g} async copies" in findings.counts(run).lower()
    bars = figures[findings.counts(run)].axes[0].patches
    assert sum(bar.get_width() for bar in bars if round(bar.get_y() + bar.get_height() / 2) == 0) == copies
    for figure in (figures[findings.spans(run)], figures[findings.training(run)]):
        lines = [line for line in figure.axes[0].lines if line.get_label() == "baseline"] or figure.axes[0].lines
        assert to_hex(lines[0].get_color()) == "#0072b2", "the first variant has the same colour everywhere"


def test_overlap_is_the_share_of_exchange_beside_work() -> None:
    row = {"rank": 0, "variant": "batched", "bucket": "b"}
    step = pd.DataFrame(
        [
            row | {"kind": "exchange", "phase": None, "start_us": 0.0, "duration_us": 10.0},
            row | {"kind": "phase", "phase": "newton_schulz", "start_us": 2.0, "duration_us": 4.0},
            row | {"kind": "phase", "phase": "wait", "start_us": 6.0, "duration_us": 4.0},
        ]
    )
    assert findings.overlap_share(step) == 0.4


@pytest.mark.parametrize(
    ("changes", "low", "high", "confidence", "verdict"),
    [
        ([-0.3, -0.2, -0.1, -0.2, -0.3, -0.1], -0.3, -0.1, 0.96875, "shorter"),
        ([0.1] * 6, 0.1, 0.1, 0.96875, "longer"),
        ([-0.1, 0.1, 0.2, 0.3, 0.4, 0.5], -0.1, 0.5, 0.96875, "unchanged within noise"),
        ([0.1, 0.2], 0.1, 0.2, 0.5, "too few pairs to tell"),
        ([-0.1, 0.2], -0.1, 0.2, 0.5, "too few pairs to tell"),
        ([-0.9, *[0.1] * 8], 0.1, 0.1, 1 - 20 / 512, "longer"),  # of 9, one outlier a side is left out
    ],
)
def test_noise(changes: list[float], low: float, high: float, confidence: float, verdict: str) -> None:
    change = paired_change([4.0] * len(changes), [4 * (1 + each) for each in changes])
    assert (change.low, change.high, change.confidence) == pytest.approx((low, high, confidence))
    assert change.verdict == verdict


def test_a_change_of_nothing_has_no_minus() -> None:
    assert "(+0.0% in the median" in str(paired_change([4.0] * 6, [3.9999] * 6))


def test_a_change_of_few_pairs_claims_no_confidence() -> None:
    told = "too few pairs to tell (+25.0% in the median of 1 pair, +25.0% to +25.0%)"
    assert str(paired_change([4.0], [5.0])) == told


def gpu_trace(folder: Path, rank: int) -> Path:
    """One baseline step as a GPU's profiler writes it: 2 copies, 1 kernel, 1 memset, and an exchange each way."""

    def on_device(
        category: str, name: str, launched: float, start: float, duration: float, id: int
    ) -> list[dict[str, Any]]:
        launch = event("cuda_runtime", "hipLaunchKernel", launched, 1, correlation=id)
        return [launch, event(category, name, start, duration, tid=0, correlation=id, stream=id % 2, bytes=64)]

    events = [
        event("user_annotation", step_range("baseline", 0, 1), 0, 100),
        event("user_annotation", "Optimizer.step#DistMuon.step", 1, 98),
        event("user_annotation", "distmuon/pack/b", 2, 4),
        event("user_annotation", "distmuon/all_to_all/b", 10, 2),
        event("user_annotation", "distmuon/newton_schulz/b", 20, 10),
        event("user_annotation", "distmuon/all_to_all/b", 40, 2),
        *on_device("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 3, 10, 5, 1),
        *on_device("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 4, 15, 5, 2),
        *on_device("kernel", "ncclDevKernel_Generic", 10.5, 20, 10 + 5 * rank, 3),
        *on_device("kernel", "gemm", 21, 40, 10, 4),
        *on_device("gpu_memset", "Memset (Device)", 22, 50, 1, 5),
        *on_device("kernel", "ncclDevKernel_Generic", 40.5, 60, 20 - 5 * rank, 6),
        *on_device("kernel", "adamw", 99.5, 200, 10, 7),  # after DistMuon's range
    ]
    path = folder / f"rank{rank}.trace.json.gz"
    path.with_suffix("").write_text(json.dumps({"baseTimeNanoseconds": 0, "traceEvents": events}))
    return path.with_suffix("")


def test_where_there_is_a_gpu_spans_and_counts_come_from_the_trace(tmp_path: Path) -> None:
    sent = {"baseline": {("b", "out"): 100, ("b", "back"): 50}}
    ranks = []
    for rank in range(2):
        trace = Trace(gpu_trace(tmp_path, rank))
        rows = [{"repeat": 0, "step": 1, "loss": 1.0, "grad_norm": 2.0}]
        events = rank_events(trace, rank, sent)
        ranks.append(RankResults(events, trace.base_ns, {"baseline": rows}, {"baseline": ["d"]}))
    counts = {"baseline": count_launches("tiny", 2, 2, "baseline")}
    write_results(tmp_path, settings={}, ranks=ranks, counts=counts, origin={})
    found = Run.read(tmp_path).of("baseline")
    assert found["counts_source"] == "trace"
    assert found["mean"] == {"async_copies": 2, "launches": 4, "collectives": 2, "sent_bytes": 150}
    first, second = found["per_rank"]
    assert (first["gpu_span_ms"]["mean"], second["gpu_span_ms"]["mean"]) == (0.07, 0.065)
    assert (first["transfer_ms"]["mean"], first["waiting_ms"]["mean"]) == pytest.approx((0.025, 0.005))
    assert (second["transfer_ms"]["mean"], second["waiting_ms"]["mean"]) == pytest.approx((0.025, 0.005))
    kernels = Run.read(tmp_path).events.query("kind == 'kernel'")
    assert kernels["phase"].tolist() == ["newton_schulz"] * 2


def test_a_trace_that_lacks_an_exchange_is_refused(tmp_path: Path) -> None:
    path = gpu_trace(tmp_path, 0)
    path.write_text(path.read_text().replace("ncclDevKernel_Generic", "something_else", 1))
    with pytest.raises(TraceError, match=r"2 exchanges were issued in distmuon\.profile/baseline/0/1, 1 carried out"):
        rank_events(Trace(path), 0, {"baseline": {("b", "out"): 100, ("b", "back"): 50}})


def test_a_rank_with_nothing_to_exchange_launches_nothing_for_it(tmp_path: Path) -> None:
    path = gpu_trace(tmp_path, 0)
    path.write_text(path.read_text().replace("ncclDevKernel_Generic", "something_else", 1))
    events = rank_events(Trace(path), 0, {"baseline": {("b", "out"): 0, ("b", "back"): 50}})
    assert events.query("kind == 'exchange'")[["direction", "bytes"]].values.tolist() == [["back", 50]]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--workload", "kimi-debgu"], "did you mean 'kimi-debug'"),
        (["--variant", "bacthed"], "did you mean 'batched'"),
        (["--variant", "fused+paking=bucket"], "unknown switch 'paking'; did you mean 'packing'"),
        (["--set", "packing=buckt"], "did you mean 'bucket'"),
        (["--variant", "baseline", "--variant", "batched", "--set", "packing=bucket"], "each once"),
        (["--rank", "4"], "did you mean '--ranks'"),
        (["--device", "gpu"], "unknown device 'gpu'"),
        (["--ns-algorithm", "gramm"], "unknown ns_algorithm 'gramm'; did you mean 'gram'"),
        pytest.param(
            *(["--device", "cuda"], "device 'cuda' needs a GPU a rank: 4, and there are 0"),
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here"),
        ),
        (["--ranks", "3", "--ep", "2"], "3"),
        (["--workload", "kimi-k2", "--ranks", "1024", "--ep", "64"], "of memory for its weights alone"),
        (["--steps", "0"], "steps must be 1 or more, not 0"),
        (["--variant", "batched", "--variant", "batched"], "each once"),
    ],
)
def test_mistakes_in_the_request_are_refused_before_anything_starts(
    tmp_path: Path, words: list[str], message: str
) -> None:
    out = tmp_path / "run"
    ended = call("profile_step", *words, "--out", out)
    assert ended.code == 2
    assert message in ended.errors
    assert not out.exists()


def test_a_run_is_not_overwritten(run: Run) -> None:
    before = {path: path.read_bytes() for path in run.folder.iterdir()}
    ended = call("profile_step", *QUESTION, "--out", run.folder)
    assert ended.code == 2
    assert "already holds a run" in ended.errors
    assert {path: path.read_bytes() for path in run.folder.iterdir()} == before


def test_settings_survive_the_command_line() -> None:
    settings = Settings(workload="tiny", variants=("batched",), seed=7)
    assert Settings.from_json(settings.to_json()) == settings


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "message"), [(signal.SIGKILL, "rank 1 was killed by SIGKILL"), (signal.SIGSTOP, "rank 1 hangs")]
)
def test_a_rank_that_dies_or_hangs_while_it_trains_ends_the_run(
    tmp_path: Path, how: signal.Signals, message: str
) -> None:
    out = tmp_path / "run"
    command = [sys.executable, str(SCRIPT), *QUESTION, "--steps", "1000", "--time-limit", "5", "--out", str(out)]
    with subprocess.Popen(command, env=environment(), stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 120
        logs = [out / f"rank{rank}.log" for rank in range(RANKS)]
        while not all(log.exists() and "step 1 " in log.read_text() for log in logs) and time.monotonic() < deadline:
            time.sleep(0.1)
        ranks = [int(re.search(r"process (\d+)", log.read_text())[1]) for log in logs]
        os.kill(ranks[1], how)
        error = process.communicate(timeout=60)[1]
    assert process.returncode == 1
    assert message in error
    assert "Last lines of" in error
    for rank in ranks:
        with pytest.raises(ProcessLookupError):
            os.kill(rank, 0)


@pytest.mark.slow
def test_under_torchrun_it_joins_the_ranks_that_are_there(tmp_path: Path) -> None:
    out = tmp_path / "run"
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    command = [sys.executable, *torchrun, str(SCRIPT), *QUESTION, "--steps", "1", "--repeats", "1", "--out", str(out)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert Run.read(out).variants == ["baseline", "batched"]
    for rank in range(RANKS):
        assert "done" in (out / f"rank{rank}.log").read_text()
        assert (out / f"rank{rank}.trace.json.gz").exists()
