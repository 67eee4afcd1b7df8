"""What a training of DistMuon beside AdamW came to: tables, and sentences computed from them."""

from __future__ import annotations

from itertools import product

import pandas as pd

from distmuon.profiling.training import Training
from distmuon.profiling.training_ranks import ADAMW, DISTMUON, RESUMED

KIB = 1024
_KINDS = ("parameters", "gradients", "optimizer state", "exchange buffers")


def window(found: Training) -> int:
    """Steps over which losses are averaged, a tenth of all: each step has other text."""
    return max(1, found.settings.steps // 10)


def losses(found: Training) -> pd.DataFrame:
    """The steps with ``smooth``, the mean loss of the last :func:`window` steps of that run, NaN before there are so
    many.
    """
    steps = found.steps()
    smooth = steps.groupby("run")["loss"].transform(lambda loss: loss.rolling(window(found)).mean())
    return steps.assign(smooth=smooth)


def overview(found: Training) -> pd.DataFrame:
    """A row an optimizer: loss half-way and at the end, median times, what it holds on a rank."""
    table, kept = losses(found), found.memory().groupby("run").mean() / KIB
    rows = []
    for run in (DISTMUON, ADAMW):
        mine = table[table["run"] == run].set_index("step")
        rows.append(
            {
                "optimizer": run,
                "loss half-way": mine["smooth"].get(found.settings.resume_at - 1),
                "loss at the end": mine["smooth"].iloc[-1],
                "forward and backward (ms)": mine["forward_ms"].median(),
                "optimizer step (ms)": mine["step_ms"].median(),
                "optimizer state (KiB a rank)": kept.loc[run, "optimizer state"],
                "exchange buffers (KiB a rank)": kept.loc[run, "exchange buffers"],
            }
        )
    return pd.DataFrame(rows)


def memory_table(found: Training) -> pd.DataFrame:
    """A row an optimizer and rank: KiB by what they are for, and all together."""
    frame = found.memory().rename(columns={"run": "optimizer"})
    frame[list(_KINDS)] /= KIB
    return frame.assign(total=frame[list(_KINDS)].sum(axis=1)).rename(
        columns={kind: f"{kind} (KiB)" for kind in (*_KINDS, "total")}
    )


def weights_table(found: Training) -> pd.DataFrame:
    """A row a watched weight and optimizer: its updates over the run, its norms before and after."""
    looks, spectra = found.looks(), found.spectra()
    rows = []
    for weight, run in product(found.settings.weights, (DISTMUON, ADAMW)):
        mine = looks[(looks["weight"] == weight) & (looks["run"] == run)]
        largest = spectra[(spectra["weight"] == weight) & (spectra["run"] == run) & (spectra["index"] == 0)]
        by_time = largest.set_index("time")["value"]
        rows.append(
            {
                "weight": weight,
                "optimizer": run,
                "update's departure, first": mine["departure"].iloc[0],
                "update's departure, last": mine["departure"].iloc[-1],
                "update's RMS, last": mine["update_rms"].iloc[-1],
                "spectral norm, start": by_time["start"],
                "spectral norm, end": by_time["end"],
                "RMS, end": mine["rms"].iloc[-1],
            }
        )
    return pd.DataFrame(rows)


def key_figures(found: Training) -> dict[str, float]:
    """The figures that runs are compared by."""
    table = overview(found).set_index("optimizer")
    departures = found.looks().groupby("run")["departure"].median()
    return {
        f"{what} with {run}": float(value)
        for run in (DISTMUON, ADAMW)
        for what, value in (
            ("loss at the end (nats a token)", table.loc[run, "loss at the end"]),
            ("forward and backward (ms)", table.loc[run, "forward and backward (ms)"]),
            ("optimizer step (ms)", table.loc[run, "optimizer step (ms)"]),
            ("optimizer state (KiB a rank)", table.loc[run, "optimizer state (KiB a rank)"]),
            ("departure of updates", departures[run]),
        )
    }


def loss_finding(found: Training) -> str:
    """Whose loss is lower: step by step, where both have the same text, at the end, and after equal time."""
    table, half = losses(found), found.settings.resume_at
    muon, adamw = (table[table["run"] == run].set_index("step") for run in (DISTMUON, ADAMW))
    gaps = (muon["loss"] - adamw["loss"]).loc[half:]
    lower, middle = int((gaps < 0).sum()), gaps.median()
    time_s = min(muon["elapsed_s"].iloc[-1], adamw["elapsed_s"].iloc[-1])
    then = [run.loc[run["elapsed_s"] <= time_s, "smooth"].iloc[-1] for run in (muon, adamw)]
    last = f"the last {window(found)} of {found.settings.steps} steps come"
    if window(found) == 1:
        last = f"the last of {found.settings.steps} steps comes"
    return (
        f"On the same text DistMuon's loss is lower than AdamW's in {lower} of the last {len(gaps)} steps, and "
        f"{abs(middle):.2f} nats a token {'lower' if middle < 0 else 'higher'} in the median; {last} to "
        f"{muon['smooth'].iloc[-1]:.2f} and {adamw['smooth'].iloc[-1]:.2f}. "
        f"{time_s:.0f} s of its own time after its first step, when the quicker of the two is done, DistMuon is at "
        f"{then[0]:.2f} and AdamW at {then[1]:.2f}."
    )


def update_finding(found: Training) -> str:
    """How far from orthogonal the two optimizers' updates are."""
    middle = found.looks().groupby("run")["departure"].median()
    return (
        f"An update's singular values, squared, depart from 1 by {middle[DISTMUON]:.2f} with DistMuon and by "
        f"{middle[ADAMW]:.2f} with AdamW, median over steps and weights; 0 is orthogonal."
    )


def spectrum_finding(found: Training) -> str:
    """What becomes of the largest singular values of the weights."""
    spectra = found.spectra()
    largest = spectra[spectra["index"] == 0].set_index(["run", "time", "weight"])["value"]
    grown = {run: (largest[run]["end"] / largest[run]["start"]).median() for run in (DISTMUON, ADAMW)}
    return (
        f"Over the run the largest singular value of a watched weight is multiplied by {grown[DISTMUON]:.2f} with "
        f"DistMuon and by {grown[ADAMW]:.2f} with AdamW, medians over weights."
    )


def memory_finding(found: Training) -> str:
    """What the optimizers hold beside parameters and gradients."""
    table = overview(found).set_index("optimizer")
    state, buffers = (table[f"{kind} (KiB a rank)"] for kind in ("optimizer state", "exchange buffers"))
    return (
        f"On a rank the optimizer holds {state[DISTMUON]:,.0f} KiB of state and {buffers[DISTMUON]:,.0f} KiB of "
        f"buffers with DistMuon, and {state[ADAMW]:,.0f} KiB of state with AdamW, means over ranks."
    )


def resume_finding(found: Training) -> str:
    """What :class:`Training` has made sure of."""
    steps = len(found.ranks[RESUMED][0]["steps"])
    return (
        f"Resumed in new processes from the checkpoint at step {found.settings.resume_at}, DistMuon's run goes on "
        f"exactly: loss and gradient norm of {steps} steps and the parameters of all {found.settings.ranks} ranks are "
        "equal to the last bit."
    )


def conclusion(found: Training) -> str:
    """The paragraph that a reader should take away."""
    return " ".join((loss_finding(found), update_finding(found), memory_finding(found), resume_finding(found)))
