"""Tables of the pages, worked out from the files of the runs by other means than the reports' own."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest
from executed import Executed

pytestmark = pytest.mark.slow

Executor = Callable[[str], Executed]


def content(run: Executed, name: str) -> Any:
    return json.loads((run.files / name).read_text())


def mean_spans(events: pd.DataFrame) -> dict[str, float]:
    """Mean CPU span of a step by variant, in ms."""
    spans = events[events["kind"] == "optimizer"]
    return (spans.groupby("variant")["duration_us"].mean() / 1e3).to_dict()


def change(before: list[float], after: list[float]) -> float:
    return statistics.median(new / old - 1 for old, new in zip(before, after, strict=True))


# 00_tour


def test_the_tour_counts_what_travels_by_its_regions(executed: Executor) -> None:
    run = executed("00_tour")
    regions = run.read("regions").to_dict("records")
    away = sum(each["numel"] for each in regions if each["rank"] != each["owner"])
    share = away / sum(each["numel"] for each in regions)
    assert run.results["figures"]["elements that travel (%)"] == pytest.approx(100 * share)
    assert f"{share:.0%} of all elements lie on another rank" in run.text
    listed = [each for each in regions if each["parameter"] == run.parameters["parameter"]]
    table = run.table("The regions of")
    assert table["region (bytes of fp32)"].tolist() == [4 * each["numel"] for each in listed]
    assert (table["to"] - table["rows from"]).tolist() == [each["region_rows"] for each in listed]
    covered = sum(
        (each["to"] - each["rows from"]) * (each["to "] - each["columns from"]) for each in table.to_dict("records")
    )
    sizes = {(each["matrix"], each["rows"] * each["cols"]) for each in listed}
    assert covered == sum(numel for _, numel in sizes), "regions cover their matrices"


def test_the_tour_times_copies_by_the_region(executed: Executor) -> None:
    run = executed("00_tour")
    table, sweep = run.table("Packing fp32"), run.read("sweep")
    assert table["a region, single (µs)"].tolist() == (sweep["single_us"] / sweep["regions"]).tolist()
    assert table["a region, batched (µs)"].tolist() == (sweep["batched_us"] / sweep["regions"]).tolist()
    events = run.read("events")
    step_ms = statistics.median(events[events["kind"] == "optimizer"]["duration_us"]) / 1e3
    assert f"takes {step_ms:.1f} ms on the host" in run.text


# 01_published_profile


def test_times_of_a_profile_follow_from_its_events(executed: Executor) -> None:
    run = executed("01_published_profile")
    events = run.read("events")
    for row in run.table("Means over the profiled steps").to_dict("records"):
        mine = events[(events["variant"] == row["variant"]) & (events["rank"] == row["rank"])]
        spans = mine[mine["kind"] == "optimizer"]["duration_us"] / 1e3
        assert [row[name] for name in ("CPU span (ms)", "from", "to")] == pytest.approx(
            [spans.mean(), spans.min(), spans.max()]
        )
        sent = mine[mine["kind"] == "exchange"]
        assert row["sent (KiB)"] == pytest.approx(sent["bytes"].sum() / len(spans) / 1024)
        assert row["collectives"] == len(sent) / len(spans)
        assert row["transfer (ms)"] == pytest.approx(sent["transfer_us"].sum() / 1e3 / len(spans))
        assert row["waiting (ms)"] == pytest.approx(sent["waiting_us"].sum() / 1e3 / len(spans))
        waits = mine[(mine["kind"] == "phase") & (mine["phase"] == "wait")]["duration_us"].sum()
        assert row["host idle (ms)"] == pytest.approx(waits / 1e3 / len(spans))


def test_counts_of_a_profile_follow_from_its_ranks(executed: Executor) -> None:
    run = executed("01_published_profile")
    variants = content(run, "summary.json")["variants"]
    table = run.table("The published profile")
    for position, metric in enumerate(("async_copies", "launches", "collectives")):
        row = table.iloc[position]
        for variant in ("baseline", "batched"):
            ranks = [rank[metric] for rank in variants[variant]["per_rank"]]
            assert row[variant] == sum(ranks) / len(ranks)
        assert row["change"] == pytest.approx(row["batched"] / row["baseline"] - 1)


def test_sources_of_a_profile_add_up_to_its_totals(executed: Executor) -> None:
    run = executed("01_published_profile")
    variants = content(run, "summary.json")["variants"]
    *rows, total = run.table("Async copies and launches").to_dict("records")
    for name in total:
        if name.startswith(("copies, ", "launches, ")):
            assert sum(row[name] for row in rows) == pytest.approx(total[name])
            metric, variant = name.replace("copies", "async_copies").split(", ")
            assert total[name] == variants[variant]["mean"][metric]


# 02_ablation


def test_counts_of_the_ablation_follow_from_those_of_each_rank(executed: Executor) -> None:
    run = executed("02_ablation")
    table, sources = run.table("Each row turns"), run.table("Launches a rank and step")
    counts = content(run, "counts.json")
    assert len(table) == len(counts)
    for position, counted in enumerate(counts.values()):
        ranks = counted["per_rank"]
        activity = [each for rank in ranks for each in rank["by_source"].values()]
        launches = sum(each["memcpys"] + each["memsets"] + each["kernels"] for each in activity) / len(ranks)
        row = table.iloc[position]
        assert row["async copies"] == sum(each["memcpys"] for each in activity) / len(ranks)
        assert row["launches"] == launches == sources["launches"][position]
        assert row["collectives"] == sum(rank["collectives"] for rank in ranks) / len(ranks)
        assert row["sent (KiB)"] == sum(rank["wire_bytes"] for rank in ranks) / len(ranks) / 1024
        assert row["peak buffers (MiB)"] == max(rank["peak_buffer_bytes"] for rank in ranks) / 2**20
        products = sum(sum(rank["by_source"]["gemm"].values()) for rank in ranks) / len(ranks)
        assert sources["products"][position] == products
    parts = sources.drop(columns=["switch", "launches"]).sum(axis="columns")
    assert parts.tolist() == pytest.approx(sources["launches"].tolist())


def test_times_of_the_ablation_follow_from_host_and_events(executed: Executor) -> None:
    run = executed("02_ablation")
    table, host, events = run.table("Operators dispatched"), content(run, "host.json"), run.read("events")
    assert table["operators"].tolist() == [each["operators"] - each["views"] for each in host]
    assert table["host time (ms)"].tolist() == [statistics.median(each["times_ms"]) for each in host]
    means = mean_spans(events)
    assert table["step time (ms)"].tolist() == pytest.approx([means[each["contestant"]] for each in host])
    spans = events[events["kind"] == "optimizer"]
    of_step = spans.pivot_table(index="variant", columns=["repeat", "step"], values="duration_us", aggfunc="mean")
    for each, row in list(zip(host, table.to_dict("records"), strict=True))[1:]:
        on_host = change(host[0]["times_ms"], each["times_ms"])
        of_steps = change(of_step.loc[host[0]["contestant"]].tolist(), of_step.loc[each["contestant"]].tolist())
        assert row["against the first"].startswith(f"{on_host:+.0%}")
        assert row["against the first "].startswith(f"{of_steps:+.0%}")
    assert run.results["figures"]["change of host time (%)"] == pytest.approx(100 * on_host)
    assert run.results["figures"]["change of step time (%)"] == pytest.approx(100 * of_steps)


# 03_scale


def test_the_balance_of_a_job_follows_from_its_ranks(executed: Executor) -> None:
    run = executed("03_scale")
    ranks = run.read("ranks")
    assert len(ranks) == run.parameters["ranks"]
    table = run.table("Over the ranks").set_index("a rank and step")
    for name, label in (("sent_mib", "sent (MiB)"), ("received_mib", "received (MiB)"), ("gemm_tflop", "GEMM TFLOP")):
        values = ranks[name].tolist()
        mean = sum(values) / len(values)
        assert table.loc[label].tolist() == pytest.approx([min(values), mean, max(values), max(values) / mean])
    assert f"The modelled step takes {max(ranks['done_ms']):,.1f} ms." in run.text
    published = run.read("buckets").set_index("bucket").loc["2 layers"]
    assert published["step_ms"] == pytest.approx(max(ranks["done_ms"])), "published buckets are of two layers"


def test_what_is_said_of_planning_and_sharing_follows_from_the_rows(executed: Executor) -> None:
    run = executed("03_scale")
    planning, shared = run.read("planning"), run.read("shared")
    seconds = np.maximum(planning["planning (s)"].to_numpy(), 1e-3)
    power = np.polyfit(np.log(planning["ranks"]), np.log(seconds), 1)[0]
    assert f"growing as ranks^{power:.2f}" in run.text
    steps = shared.set_index(["replicas", "ranks"])["step_ms"]
    for ranks in sorted(set(shared["ranks"])):
        assert f"{steps['shared', ranks] / steps['repeated', ranks] - 1:+.0%} on {ranks} ranks" in run.text
    parts = shared["busy_ms"] + shared["exposed_ms"] + shared["idle_ms"]
    assert parts.tolist() == pytest.approx(shared["step_ms"].tolist())


def test_the_models_error_is_against_the_events_of_the_check(executed: Executor) -> None:
    run = executed("03_scale")
    events = run.read("events")
    optimizer = events[events["kind"] == "optimizer"]
    measured = optimizer.groupby(["variant", "step"])["duration_us"].max().groupby("variant").median() / 1e3
    table = run.table("Modelled to measured").set_index(["variant", "part of a step"])
    for variant, step_ms in measured.items():
        assert table.loc[(variant, "step"), "measured (ms)"] == pytest.approx(step_ms)
        error = table.loc[(variant, "step"), "modelled / measured"] - 1
        assert run.results["figures"][f"error of the model, {variant} (%)"] == pytest.approx(100 * error)
        assert f"{variant} {error:+.0%} (measured {step_ms:.1f} ms" in run.text


# 04_compare_traces


def test_a_comparison_is_of_means_over_ranks_and_occurrences(executed: Executor) -> None:
    run = executed("04_compare_traces")
    sides = content(run, "comparison.json")
    a, b = (run.read(f"{side}.occurrences") for side in "ab")
    labels = [sides[side]["label"] for side in "ab"]
    counts, spans = run.table("In one occurrence"), run.table("Means over ranks and occurrences")
    told = 0
    for row in [*counts.to_dict("records"), *spans.to_dict("records")]:
        if row["figure"] in a and a[row["figure"]].notna().all() and b[row["figure"]].notna().all():
            before, after = a[row["figure"]].sum() / len(a), b[row["figure"]].sum() / len(b)
            assert [row[label] for label in labels] == pytest.approx([before, after])
            assert row["difference"] == pytest.approx(after - before)
            told += 1
    assert told >= 6
    span = [spans.set_index("figure").loc["CPU span (ms)", label] for label in labels]
    assert f"{span[1]:,.2f} ms where {labels[0]} takes {span[0]:,.2f} ms ({span[1] / span[0] - 1:+.1%}" in run.text


def test_operators_and_ranks_of_a_comparison_follow_from_its_files(executed: Executor) -> None:
    run = executed("04_compare_traces")
    sides = content(run, "comparison.json")
    operators, ranks = run.table("operators, kernels and copies"), run.table("Means over the occurrences")
    for side in "ab":
        label, occurrences = sides[side]["label"], run.read(f"{side}.occurrences")
        work, exchanges = run.read(f"{side}.work"), run.read(f"{side}.exchanges")
        for row in operators.to_dict("records"):
            mine = work[(work["where"] == row["where"]) & (work["name"] == row["name"])]
            assert row[f"calls, {label}"] == pytest.approx(mine["calls"].sum() / len(occurrences))
            assert row[f"{label} (ms)"] == pytest.approx(mine["time_ms"].sum() / len(occurrences))
        first = occurrences.groupby("occurrence")["start_us"].min()
        for row in ranks[ranks["side"] == label].to_dict("records"):
            mine = occurrences[occurrences["rank"] == row["rank"]].set_index("occurrence")
            of_rank = exchanges[exchanges["rank"] == row["rank"]]
            assert row["starts after the first (ms)"] == pytest.approx((mine["start_us"] - first).mean() / 1e3)
            assert row["CPU span (ms)"] == pytest.approx(mine["CPU span (ms)"].mean())
            assert row["exchanges (ms)"] == pytest.approx(of_rank["duration_ms"].sum() / len(mine))
            assert row["of it waiting (ms)"] == pytest.approx(of_rank["waiting_ms"].sum() / len(mine))


# 05_training


def test_losses_and_times_of_a_training_follow_from_its_steps(executed: Executor) -> None:
    run = executed("05_training")
    steps, memory = run.read("steps"), run.read("memory")
    overview = run.table("Losses, median times").set_index("optimizer")
    window = max(1, run.parameters["steps"] // 10)
    half = run.parameters["steps"] // 2
    for optimizer in ("DistMuon", "AdamW"):
        mine = steps[steps["run"] == optimizer].sort_values("step")
        loss, row = mine["loss"].tolist(), overview.loc[optimizer]
        assert row["loss at the end"] == pytest.approx(statistics.mean(loss[-window:]))
        assert row["loss half-way"] == pytest.approx(statistics.mean(loss[half - window : half]))
        assert row["optimizer step (ms)"] == statistics.median(mine["step_ms"])
        assert row["forward and backward (ms)"] == statistics.median(mine["forward_ms"])
        held = memory[memory["run"] == optimizer]
        assert row["optimizer state (KiB a rank)"] == pytest.approx(held["optimizer state"].mean() / 1024)
    gaps = steps.pivot(index="step", columns="run", values="loss").loc[half:].eval("DistMuon - AdamW")
    assert f"lower than AdamW's in {(gaps < 0).sum()} of the last {len(gaps)} steps" in run.text


def test_weights_and_memory_of_a_training_follow_from_its_files(executed: Executor) -> None:
    run = executed("05_training")
    looks, spectra, memory = run.read("looks"), run.read("spectra"), run.read("memory")
    for row in run.table("Updates and norms").to_dict("records"):
        mine, values = (
            frame[(frame["run"] == row["optimizer"]) & (frame["weight"] == row["weight"])] for frame in (looks, spectra)
        )
        first, last = mine.sort_values("step").iloc[[0, -1]].to_dict("records")
        assert [row["update's departure, first"], row["update's departure, last"]] == [
            first["departure"],
            last["departure"],
        ]
        assert [row["update's RMS, last"], row["RMS, end"]] == [last["update_rms"], last["rms"]]
        largest = values.groupby("time")["value"].max()
        assert [row["spectral norm, start"], row["spectral norm, end"]] == [largest["start"], largest["end"]]
    kinds = ["parameters", "gradients", "optimizer state", "exchange buffers"]
    for row in run.table("What each rank holds").to_dict("records"):
        (held,) = memory[(memory["run"] == row["optimizer"]) & (memory["rank"] == row["rank"])].to_dict("records")
        assert [row[f"{kind} (KiB)"] for kind in kinds] == pytest.approx([held[kind] / 1024 for kind in kinds])
        assert row["total (KiB)"] == pytest.approx(sum(held[kind] for kind in kinds) / 1024)
