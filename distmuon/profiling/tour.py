"""What the tour measures and says: the cost of a copy, and one recorded step."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from distmuon.profiling.results import Run
from distmuon.profiling.run import profile
from distmuon.profiling.session import Settings
from distmuon.profiling.sweep import sweep_copies
from distmuon.profiling.whereabouts import ownership_finding

#: How to write the columns of :func:`sweep_table` that are not plain numbers.
FORMATS = {
    "change": "{:+.0%}",
    "single (µs)": "{:,.1f}",
    "batched (µs)": "{:,.1f}",
}


def sweep(device: str = "cpu") -> pd.DataFrame:
    """:func:`distmuon.profiling.sweep.sweep_copies` at a few sizes, in a second or two."""
    return sweep_copies((8, 32, 128), (64, 1_024, 16_384), device=device, turns=9)


def sweep_table(sweep: pd.DataFrame) -> pd.DataFrame:
    """The sweep with units in its column names."""
    return pd.DataFrame(
        {
            "regions": sweep["regions"],
            "bytes of each": sweep["region_bytes"],
            "single (µs)": sweep["single_us"],
            "batched (µs)": sweep["batched_us"],
            "a region, single (µs)": sweep["single_us"] / sweep["regions"],
            "a region, batched (µs)": sweep["batched_us"] / sweep["regions"],
            "change": sweep["change"],
            "verdict": sweep["verdict"],
            "launches on a GPU, single": sweep["single_launches"],
            "batched": sweep["batched_launches"],
        }
    )


def sweep_finding(sweep: pd.DataFrame) -> str:
    """What a call costs however little it copies, and what one call for all regions leaves of that."""
    small = sweep[sweep["region_bytes"] == sweep["region_bytes"].min()]
    most = small.loc[small["regions"].idxmax()]
    single, batched = most["single_us"] / most["regions"], most["batched_us"] / most["regions"]
    return (
        f"A `copy_` of {most['region_bytes']:,} bytes takes {single:.2f} µs here, nearly all of it the call itself. "
        f"One batched copy of {most['regions']} such regions takes {batched:.2f} µs a region, and on a GPU it is "
        f"{_launches(most['batched_launches'])} instead of {most['single_launches']:,}."
    )


def one_step(settings: Settings, out: Path | str | None = None) -> Run:
    """Record one step on real ranks."""
    run = profile(settings, out, command="notebooks/00_tour.ipynb")
    if run is None:
        raise ValueError("the tour starts ranks of its own: run it outside of torchrun")
    return run


def conclusion(regions: pd.DataFrame, sweep: pd.DataFrame, run: Run) -> str:
    """The paragraph that a reader should take away."""
    variant = run.variants[-1]
    mean, settings = run.of(variant)["mean"], run.summary["settings"]
    span = run.steps()["cpu_span_ms"].mean()
    step = (
        f"A {variant} step of {settings['workload']} on {settings['ranks']} {settings['device'].upper()} ranks takes "
        f"{span:.1f} ms on the host, {mean['collectives']:g} exchanges a rank among them; on a GPU it launches "
        f"{mean['async_copies']:,g} async copies and {mean['launches']:,g} activities in all."
    )
    return " ".join([ownership_finding(regions), sweep_finding(sweep).replace("`", ""), step])


def _launches(count: int) -> str:
    return "1 launch" if count == 1 else f"{count:,} launches"
