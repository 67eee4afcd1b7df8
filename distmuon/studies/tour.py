"""What the tour measures and says: the cost of a copy, and one recorded step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from distmuon.profiling.results import COUNTED, Run
from distmuon.profiling.run import profile
from distmuon.profiling.session import Settings
from distmuon.profiling.sweep import sweep_copies
from distmuon.richtext import Shown, counted
from distmuon.studies.whereabouts import ownership_finding, travelling_share

#: How to write the columns of :func:`sweep_table` that are not plain numbers.
FORMATS = {
    "change": "{:+z.0%}",
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
    most = _smallest_copies(sweep)
    single, batched = most["single_us"] / most["regions"], most["batched_us"] / most["regions"]
    return (
        f"A `copy_` of {most['region_bytes']:,} bytes takes {single:.2f} µs here, nearly all of it the call itself. "
        f"One batched copy of {most['regions']} such regions takes {batched:.2f} µs a region, and on a GPU it is "
        f"{counted(most['batched_launches'], 'launch', 'launches')} instead of {most['single_launches']:,}."
    )


def record(settings: Settings, out: Path | str | None = None) -> Run:
    """Record a few steps on real ranks, of which the tour shows a typical one."""
    run = profile(settings, out, command="notebooks/00_tour.ipynb")
    if run is None:
        raise ValueError("the tour starts ranks of its own: run it outside of torchrun")
    return run


@dataclass(frozen=True, repr=False)
class Tour(Shown):
    """What the tour found. Prints as its key figures.

    Attributes:
        regions: of all matrices, as of :func:`distmuon.studies.whereabouts.regions_table`.
        sweep: of copies, as of :func:`sweep`.
        run: the recorded step.
    """

    regions: pd.DataFrame
    sweep: pd.DataFrame
    run: Run

    def _line(self) -> str:
        return self.run._line()

    def _table(self) -> tuple[Sequence[str], list[Sequence[object]]]:
        return ("figure", "value"), list(key_figures(self).items())

    def write(self) -> None:
        """Write ``regions.parquet`` and ``sweep.parquet`` beside the profile of the step."""
        self.regions.to_parquet(self.run.folder / "regions.parquet", index=False)
        self.sweep.to_parquet(self.run.folder / "sweep.parquet", index=False)

    @classmethod
    def read(cls, folder: Path | str) -> Tour:
        """Read what :meth:`write` left in the folder of the profile."""
        folder = Path(folder)
        regions, sweep = (pd.read_parquet(folder / f"{name}.parquet") for name in ("regions", "sweep"))
        return cls(regions, sweep, Run.read(folder))


def key_figures(found: Tour) -> dict[str, float]:
    """What many tours are compared by: what travels, what a copy costs, and the recorded step."""
    most = _smallest_copies(found.sweep)
    variant = found.run.variants[-1]
    mean = found.run.of(variant)["mean"]
    return {
        "elements that travel (%)": 100 * travelling_share(found.regions),
        "a small region, copied singly (µs)": float(most["single_us"] / most["regions"]),
        "a small region, batched (µs)": float(most["batched_us"] / most["regions"]),
        **{name.replace("_", " "): mean[name] for name in COUNTED},
        "sent (KiB)": mean["sent_bytes"] / 1024,
        "CPU span (ms)": _span_ms(found.run),
    }


def conclusion(found: Tour) -> str:
    """The paragraph that a reader should take away."""
    run = found.run
    variant = run.variants[-1]
    mean, settings = run.of(variant)["mean"], run.summary["settings"]
    step = (
        f"A {variant} step of {settings['workload']} on {settings['ranks']} {settings['device'].upper()} ranks takes "
        f"{_span_ms(run):.1f} ms on the host, {mean['collectives']:g} exchanges a rank among them; on a GPU it "
        f"launches {mean['async_copies']:,g} async copies and {mean['launches']:,g} activities in all."
    )
    return " ".join([ownership_finding(found.regions), sweep_finding(found.sweep).replace("`", ""), step])


def _smallest_copies(sweep: pd.DataFrame) -> pd.Series:
    """Of the smallest regions, the row with most of them."""
    small = sweep[sweep["region_bytes"] == sweep["region_bytes"].min()]
    return small.loc[small["regions"].idxmax()]


def _span_ms(run: Run) -> float:
    """Of a step on the host: the median over ranks and recorded steps, one of which may have met a busy machine."""
    return float(run.steps()["cpu_span_ms"].median())
