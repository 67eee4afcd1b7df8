"""Something to compare where nothing is named: two variants of a small profile that is taken for the purpose."""

from __future__ import annotations

from pathlib import Path

from distmuon.profiling.run import profile
from distmuon.profiling.session import Settings
from distmuon.traces.comparison import Comparison, compare

VARIANTS = ("baseline", "fused")


def example(folder: Path) -> Comparison:
    """Profile a few steps of the smallest workload under ``folder / "profile"``, and compare its two variants.

    Raises:
        FileExistsError: there is a profile already.
        RankFailure: a rank died or hung; no process is left.
    """
    settings = Settings("tiny", variants=VARIANTS, steps=3, repeats=1, tokens=32, device="cpu")
    profile(settings, folder / "profile", command="notebooks/04_compare_traces.ipynb")
    ranges = [f"distmuon.profile/{variant}/* > Optimizer.step#DistMuon.step" for variant in VARIANTS]
    return compare(folder / "profile", None, *ranges, labels=VARIANTS)
