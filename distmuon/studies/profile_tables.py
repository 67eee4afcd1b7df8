"""Tables of a finished profile: DataFrames with units in column names, NaN standing for what cannot be measured."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from distmuon.profiling.noise import Change
from distmuon.profiling.results import COUNTED, Run

#: How to write the columns that are changes.
CHANGE = "{:+z.1%}"

#: How to write the columns that are times.
TIME = "{:,.1f}"

PUBLISHED_VARIANTS = ("baseline", "batched")

#: The column of :func:`sources_table` with a verdict.
DERIVED = "against the derivation"

#: The sources of launches in groups, in the order of their size, with the names that figures and tables use.
SOURCE_GROUPS = {
    "matrix products": ("gemm",),
    "bias copies of matrix products": ("gemm_bias",),
    "rest of Newton-Schulz": ("ns_cast", "ns_norm", "ns_diagonal", "transpose"),
    "momentum, decay, update": ("momentum", "nesterov", "decay", "update"),
    "pack": ("pack",),
    "unpack on the owner": ("unpack",),
    "pack on the owner": ("repack",),
    "unpack into the update": ("return_unpack",),
}


#: The published figures, in a checkout.
PUBLISHED = Path(__file__).parents[2] / "data/published/kimi_debug_mi250.json"


def load_published(path: Path | str = PUBLISHED) -> dict[str, Any]:
    """Read published figures, in the form of ``data/published``."""
    return json.loads(Path(path).read_text())


def is_published_setup(run: Run, published: Mapping[str, Any]) -> bool:
    """Whether a run has the workload, ranks, expert parallelism and variants of the published figures."""
    settings, setup = run.summary["settings"], published["setup"]
    same = all(settings[name] == setup[name] for name in ("workload", "ranks", "ep"))
    same = same and (settings["buckets"], settings["ns_algorithm"]) == ("published", "standard")
    return same and set(PUBLISHED_VARIANTS) <= set(run.variants)


def published_table(run: Run, published: Mapping[str, Any]) -> pd.DataFrame:
    """The published figures beside ours, with a verdict a row.

    A count must be equal. A time is that of other hardware: what is compared is whether it changes. Of another setup
    (workload, ranks, expert parallelism, variants) nothing is compared.
    """
    comparable = is_published_setup(run, published)
    rows = []
    for metric in published["metrics"]:
        name, counted = metric["metric"], metric["counted"]
        theirs = [metric[variant] for variant in PUBLISHED_VARIANTS]
        ours = [_figure(run, variant, name) for variant in PUBLISHED_VARIANTS]
        verdict: str | None
        if not comparable:
            verdict = "another setup"
        elif counted:
            verdict = "equal" if ours == theirs else "DIFFERS"
        else:
            verdict = _time_verdict(run, name)
        rows.append(
            {
                "per rank and step": metric["label"] if counted else f"{metric['label']} ({metric['unit']})",
                "published baseline": theirs[0],
                "published batched": theirs[1],
                "published change": _change(theirs),
                "baseline": ours[0],
                "batched": ours[1],
                "change": _change(ours),
                "verdict": verdict,
            }
        )
    return pd.DataFrame(rows)


def sources_table(run: Run, published: Mapping[str, Any]) -> pd.DataFrame:
    """Copies and launches of each variant by source, means over ranks, and whether they are those that are derived from
    the published setup: the profile itself gives totals only.
    """
    sources = run.sources()
    comparable = is_published_setup(run, published)
    rows = []
    for group, members in SOURCE_GROUPS.items():
        row: dict[str, Any] = {"source": group}
        agrees = True
        for value, label in [("async_copies", "copies"), ("launches", "launches")]:
            for variant in run.variants:
                ours = sources[(sources["variant"] == variant) & sources["source"].isin(members)][value].sum()
                row[f"{label}, {variant}"] = ours
                if comparable and variant in PUBLISHED_VARIANTS:
                    derived = [entry for entry in published["derivation"] if set(entry["sources"]) <= set(members)]
                    agrees = agrees and ours == sum(entry[variant][value] for entry in derived)
        rows.append(row | {DERIVED: ("equal" if agrees else "DIFFERS") if comparable else None})
    table = pd.DataFrame(rows)
    total = {"source": "total", **table.drop(columns=["source", DERIVED]).sum().to_dict(), DERIVED: ""}
    return pd.concat([table, pd.DataFrame([total])], ignore_index=True)


def rank_table(run: Run) -> pd.DataFrame:
    """A row a variant and rank: spans with their spread, exchanges with bytes, waiting apart from transfer."""
    rows = []
    for variant in run.variants:
        for rank in run.of(variant)["per_rank"]:
            cpu = rank["cpu_span_ms"]
            row = {"variant": variant, "rank": rank["rank"]}
            row |= {"CPU span (ms)": cpu["mean"], "from": cpu["min"], "to": cpu["max"]}
            row |= {"GPU span (ms)": _mean(rank["gpu_span_ms"])}
            row |= {"collectives": rank["collectives"], "sent (KiB)": rank["sent_bytes"] / 1024}
            row |= {"transfer (ms)": _mean(rank["transfer_ms"]), "waiting (ms)": _mean(rank["waiting_ms"])}
            row |= {"host idle (ms)": _mean(rank["exposed_wait_ms"])}
            rows.append(row)
    return pd.DataFrame(rows)


def profile_table(run: Run) -> pd.DataFrame:
    """A row a variant: means over ranks and steps, and how its span compares with the first variant's."""
    ranks = rank_table(run).drop(columns=["rank", "from", "to"])
    table = ranks.groupby("variant", sort=False).mean().reset_index()
    for position, name in enumerate(("async_copies", "launches"), start=1):
        table.insert(position, name.replace("_", " "), [run.of(variant)["mean"][name] for variant in run.variants])
    verdicts = {name: comparison["cpu_span_ms"]["verdict"] for name, comparison in run.summary["comparisons"].items()}
    table["CPU span against the first"] = [verdicts.get(variant, "") for variant in run.variants]
    return table


def key_figures(run: Run) -> dict[str, float]:
    """What many profiles are compared by: the last variant, and how it stands to the first."""
    first, last = run.variants[0], run.variants[-1]
    before, after = run.of(first)["mean"], run.of(last)["mean"]
    figures: dict[str, float] = {}
    for name in COUNTED:
        label = name.replace("_", " ")
        figures |= {f"{label}, first": before[name], f"{label}, last": after[name]}
    figures["sent (KiB), last"] = after["sent_bytes"] / 1024
    figures["CPU span (ms), first"] = _figure(run, first, "cpu_span_ms")
    figures["CPU span (ms), last"] = _figure(run, last, "cpu_span_ms")
    if last != first and (change := change_of(run, last, "cpu_span_ms")):
        figures["change of CPU span (%)"] = 100 * change.median
    figures["loss, last step"] = float(run.training().query("variant == @last")["loss"].iloc[-1])
    return figures


def equality_table(run: Run) -> pd.DataFrame:
    """What was compared bit by bit, and whether it was equal."""
    training = run.training()
    over_ranks = training.groupby(["variant", "repeat", "step"])[["loss", "grad_norm"]].nunique()
    rows = [("loss and gradient norm, between the ranks", bool((over_ranks == 1).all(axis=None)))]
    if run.summary["settings"]["repeats"] > 1:
        equal = all(run.of(variant)["repeats_bit_equal"] for variant in run.variants)
        rows.append(("loss, gradient norm and parameters of all ranks, between repeats from the seed on", equal))
    for name, comparison in run.summary["comparisons"].items():
        pair = f"between {comparison['compared_with']} and {name}"
        rows.append((f"loss and gradient norm of all ranks, {pair}", comparison["bit_equal_training"]))
        rows.append((f"parameters of all ranks after the last step, {pair}", comparison["bit_equal_parameters"]))
    table = pd.DataFrame(rows, columns=["compared", "bit-equal"])
    table["bit-equal"] = table["bit-equal"].map({True: "yes", False: "NO"})
    return table


def change_of(run: Run, variant: str, span: str) -> Change | None:
    """How a span (``cpu_span_ms``, ``gpu_span_ms``) of a variant differs from the first's; None where not measured."""
    change = run.summary["comparisons"][variant][span]
    return None if change is None else Change(**{key: value for key, value in change.items() if key != "verdict"})


def _figure(run: Run, variant: str, metric: str) -> float:
    if variant not in run.variants:
        return math.nan
    if metric in COUNTED:
        return run.of(variant)["mean"][metric]
    values = [_mean(rank[metric]) for rank in run.of(variant)["per_rank"]]
    return sum(values) / len(values)


def _mean(spread: Mapping[str, Any] | None) -> float:
    return math.nan if spread is None else spread["mean"]


def _change(pair: list[float]) -> float:
    return pair[1] / pair[0] - 1


def _time_verdict(run: Run, span: str) -> str | None:
    if span == "gpu_span_ms" and run.summary["settings"]["device"] == "cpu":
        return "no GPU here"
    if run.variants[0] != "baseline":
        return "baseline was not the first variant"
    change = change_of(run, "batched", span)
    return None if change is None else f"{change.verdict} ({change.low:+z.1%} to {change.high:+z.1%})"
