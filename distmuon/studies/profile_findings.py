"""What a profile found, in sentences computed from its numbers: alt texts of the figures, and the conclusion."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from distmuon.profiling.results import COUNTED, Run
from distmuon.studies.profile_tables import change_of, equality_table, is_published_setup, published_table
from distmuon.traces.intervals import length_us, overlap_us, union


def counts(run: Run) -> str:
    """Copies and launches of each variant."""
    parts = []
    for variant in run.variants:
        mean = run.of(variant)["mean"]
        parts.append(f"{variant} makes {mean['async_copies']:,g} async copies and {mean['launches']:,g} launches")
    return _sentence("; ".join(parts) + " a rank and step")


def spans(run: Run) -> str:
    """CPU spans and how they differ."""
    first = run.variants[0]
    steps = run.steps()
    means = steps.groupby("variant")["cpu_span_ms"].mean()
    parts = [f"the mean CPU span of a {first} step is {means[first]:.1f} ms"]
    for variant in run.variants[1:]:
        parts.append(f"of {variant} {means[variant]:.1f} ms, {_change_text(run, variant, 'cpu_span_ms')}")
    return _sentence("; ".join(parts))


def overlap(step: pd.DataFrame) -> str:
    """How much of the exchange time of one step (rows of all ranks) ran beside other work."""
    return _sentence(
        f"in one step of {step['variant'].iat[0]}, {overlap_share(step):.0%} of the time that exchanges take runs "
        "beside packing, Newton-Schulz and the rest of the same rank; during the remainder the rank stands still"
    )


def overlap_share(step: pd.DataFrame) -> float:
    """The share of the exchanges' time in which their rank did something else than wait; NaN without exchanges."""
    hidden = total = 0.0
    for _, rows in step.groupby("rank"):
        exchange = _intervals(rows[rows["kind"] == "exchange"])
        working = _intervals(rows[(rows["kind"] == "phase") & (rows["phase"] != "wait")])
        hidden += overlap_us(exchange, working)
        total += length_us(exchange)
    return hidden / total if total else float("nan")


def training(run: Run) -> str:
    """Where loss and gradient norm went, and whether ranks and variants agree."""
    rows = run.training()
    first, last = (rows[rows["step"] == step] for step in (rows["step"].min(), rows["step"].max()))
    agree = (rows.groupby("step")[["loss", "grad_norm"]].nunique() == 1).all(axis=None)
    return _sentence(
        f"loss goes from {first['loss'].mean():.3f} to {last['loss'].mean():.3f} and the gradient norm from "
        f"{first['grad_norm'].mean():.2f} to {last['grad_norm'].mean():.2f}; all ranks, variants and repeats "
        f"{'agree to the last bit' if agree else 'do NOT agree'}"
    )


def conclusion(run: Run, published: Mapping[str, Any]) -> str:
    """The paragraph that a reader should take away."""
    settings = run.summary["settings"]
    first = run.variants[0]
    sentences = []
    for variant in run.variants[1:]:
        copies, launches, collectives = (_counted(run, variant, name) for name in COUNTED)
        place = f"On {settings['workload']} with {settings['ranks']} ranks"
        sentences.append(f"{place}, {variant} makes, a rank and step, {copies}, {launches}, and {collectives}.")
    if is_published_setup(run, published):
        table = published_table(run, published)
        wrong = table[table["verdict"] == "DIFFERS"]["per rank and step"].tolist()
        sentences.append(
            f"Published counts that differ: {', '.join(wrong)}." if wrong else "Every published count is met exactly."
        )
    for variant in run.variants[1:]:
        for span, label in [("cpu_span_ms", "CPU span"), ("gpu_span_ms", "GPU span")]:
            if change_of(run, variant, span):
                sentences.append(f"{label} of a step, {variant} against {first}: {_change_text(run, variant, span)}.")
    if settings["device"] == "cpu":
        sentences.append(
            "There is no GPU here: launches are counted from the operators dispatched, and GPU spans are n/a."
        )
    unequal = equality_table(run)
    unequal = unequal[unequal["bit-equal"] != "yes"]["compared"].tolist()
    sentences.append(
        f"NOT bit-equal: {'; '.join(unequal)}."
        if unequal
        else "All that must be equal is equal to the last bit: ranks, repeats and variants."
    )
    return " ".join(sentences)


def _change_text(run: Run, variant: str, span: str) -> str:
    change = change_of(run, variant, span)
    return "not measured" if change is None else str(change)


def _counted(run: Run, variant: str, name: str) -> str:
    first = run.variants[0]
    before, after = run.of(first)["mean"][name], run.of(variant)["mean"][name]
    figure = f"{after:,g} {name.replace('_', ' ')}"
    return (
        f"{figure} as {first} does"
        if before == after
        else f"{figure} where {first} makes {before:,g} ({after / before - 1:+z.1%})"
    )


def _intervals(rows: pd.DataFrame) -> list[tuple[float, float]]:
    return union(zip(rows["start_us"], rows["start_us"] + rows["duration_us"], strict=True))


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."
