"""What planning at scale found, as tables and as sentences computed from them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd

from distmuon.modelling import Assumptions
from distmuon.richtext import Shown, about
from distmuon.studies.modelcheck import Check, read_check
from distmuon.studies.scale import LABELS, Job, Planned, curve, growth, plan_each, plan_rows, shown

#: A smaller bucket is advised where its modelled step is no longer than the shortest by more than this.
TOLERANCE = 0.02

_FRAMES = ("planning", "ranks", "shared", "buckets")
SHARED, REPEATED = "shared", "repeated"
CHOSEN = "chosen"


@dataclass(frozen=True, repr=False)
class Scale(Shown):
    """What the report is made of. Prints as its key figures.

    Attributes:
        job: that is planned.
        planning: as of :func:`planning_table`.
        ranks: as of :func:`balance`.
        shared: as of :func:`sharing`.
        buckets: as of :func:`bucket_sizes`.
        check: the model against a measured step.
    """

    job: Job
    planning: pd.DataFrame
    ranks: pd.DataFrame
    shared: pd.DataFrame
    buckets: pd.DataFrame
    check: Check

    def _line(self) -> str:
        return self.job.title

    def _table(self) -> tuple[Sequence[str], list[Sequence[object]]]:
        return ("figure", "value"), list(key_figures(self).items())

    def write(self) -> None:
        """Write ``job.json`` and a parquet file a frame beside the files of the check."""
        folder = self.check.folder
        (folder / "job.json").write_text(json.dumps(asdict(self.job), indent=1) + "\n")
        for name in _FRAMES:
            getattr(self, name).to_parquet(folder / f"{name}.parquet", index=False)

    @classmethod
    def read(cls, folder: Path | str) -> Scale:
        """Read what :meth:`write` left in the folder of the check."""
        folder = Path(folder)
        job = json.loads((folder / "job.json").read_text())
        frames = {name: pd.read_parquet(folder / f"{name}.parquet") for name in _FRAMES}
        return cls(
            job=Job(**job | {"assumptions": Assumptions(**job["assumptions"])}), check=read_check(folder), **frames
        )


def planning_table(job: Job, sizes: Iterable[int]) -> pd.DataFrame:
    """The job planned on each of these numbers of ranks: a row a size."""
    rows = []
    for found in plan_each(curve(job, sizes)):
        rows.append(
            {
                "ranks": found["ranks"],
                "EP": found["ep"],
                "planning (s)": found["plan_seconds"],
                "memory above torch's (MiB)": found["peak_rss_mib"],
                "sent a rank (MiB)": found["wire_bytes"]["mean"] / 2**20,
                "GEMM FLOPs, max / mean": found["ns_flops_imbalance"],
                "modelled step (ms)": found["modelled_step_ms"],
            }
        )
    return pd.DataFrame(rows)


def balance(planned: Planned) -> pd.DataFrame:
    """A row a rank: ``sent_mib`` and ``received_mib`` in a step, both ways, ``gemm_tflop``, and ``done_ms``, when it is
    done with the modelled step.
    """
    stages = planned.totals.stages
    received = np.sum([(stage.out_received + stage.back_received).numpy() for stage in stages], axis=0)
    flops = np.sum([load.owned.flops + load.whole.flops for load in planned.loads], axis=0)
    return pd.DataFrame(
        {
            "sent_mib": planned.totals.sent_bytes().numpy() / 2**20,
            "received_mib": received / 2**20,
            "gemm_tflop": flops / 1e12,
            "done_ms": 1e3 * planned.replay.end,
        }
    )


def balance_table(ranks: pd.DataFrame) -> pd.DataFrame:
    """Smallest, mean and largest over the ranks."""
    labels = {
        "sent_mib": "sent (MiB)",
        "received_mib": "received (MiB)",
        "gemm_tflop": "GEMM TFLOP",
    }
    rows = []
    for name, label in labels.items():
        values = ranks[name]
        largest = values.max() / values.mean() if values.mean() else 1.0
        rows.append(
            {
                "a rank and step": label,
                "least": values.min(),
                "mean": values.mean(),
                "most": values.max(),
                "most / mean": largest,
            }
        )
    return pd.DataFrame(rows)


def sharing(job: Job, sizes: Sequence[int]) -> pd.DataFrame:
    """The job with its replicas on each of these numbers of ranks, the work shared and repeated: a row each."""
    both = {SHARED: True, REPEATED: False}
    jobs = [(way, replace(each, share_replicas=share)) for each in curve(job, sizes) for way, share in both.items()]
    rows = plan_rows([job for _, job in jobs])
    return pd.DataFrame([{"replicas": way, **row} for (way, _), row in zip(jobs, rows, strict=True)])


def bucket_sizes(job: Job, layers: Sequence[int]) -> pd.DataFrame:
    """The job with so many layers a bucket, and with the buckets that DistMuon chooses: a row each."""
    patterns = {f"{number} layers" if number > 1 else "1 layer": job.model.layer_buckets(number) for number in layers}
    jobs = {label: replace(job, buckets=buckets) for label, buckets in (patterns | {CHOSEN: "auto"}).items()}
    return pd.DataFrame([{"bucket": label, **row} for label, row in zip(jobs, plan_rows(jobs.values()), strict=True)])


def display(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows of jobs with the columns that a reader wants, labelled; idle time in whole microseconds."""
    labels = {"bucket": "a bucket", "ranks": "ranks", "replicas": "work of replicas", **LABELS}
    rows = pd.DataFrame([shown(row) for row in rows.to_dict("records")])
    return rows[[name for name in labels if name in rows]].rename(columns=labels)


def display_check(table: pd.DataFrame) -> pd.DataFrame:
    """The comparison with labels for a reader; what the model does not know has no ratio."""
    labels = {
        "variant": "variant",
        "part": "part of a step",
        "measured_ms": "measured (ms)",
        "modelled_ms": "modelled (ms)",
        "ratio": "modelled / measured",
        "low": "least",
        "high": "most",
    }
    known = table["modelled_ms"] > 0
    ratios = table[["ratio", "low", "high"]].where(known)
    return table.assign(**dict(ratios.items()))[list(labels)].rename(columns=labels)


def planning_finding(table: pd.DataFrame) -> str:
    """How planning grows."""
    (first, last), seconds = (table["ranks"].iloc[[0, -1]], table["planning (s)"])
    power = growth(table["ranks"], seconds.clip(lower=1e-3))
    memory = table["memory above torch's (MiB)"].max()
    return (
        f"Planning takes {seconds.iloc[0]:.2f} s on {first:,} ranks and {seconds.iloc[-1]:.2f} s on {last:,}, growing "
        f"as ranks^{power:.2f}, and at most {memory:.0f} MiB above what importing torch takes."
    )


def balance_finding(ranks: pd.DataFrame) -> str:
    """How even the ranks are."""
    flops, sent = (ranks[name].max() / (ranks[name].mean() or 1) for name in ("gemm_tflop", "sent_mib"))
    return (
        f"The busiest of {len(ranks):,} ranks has {flops:.2f} times the mean of GEMM FLOPs, and none sends more than "
        f"{sent:.2f} times the mean of bytes."
    )


def sharing_finding(rows: pd.DataFrame) -> str:
    """When it pays that replicas share the work."""
    steps = rows.pivot(index="ranks", columns="replicas", values="step_ms")
    change = steps[SHARED] / steps[REPEATED] - 1
    parts = [f"{value:+z.0%} on {ranks:,} ranks" for ranks, value in change.items()]
    return f"Where replicas share the work instead of repeating it, the modelled step changes by {_listed(parts)}."


def step_finding(ranks: pd.DataFrame) -> str:
    """How long the modelled step takes."""
    return f"The modelled step takes {ranks['done_ms'].max():,.1f} ms."


def best_bucket(rows: pd.DataFrame) -> pd.Series:
    """Of the buckets whose step is nearly the shortest, the row with the smallest buffers."""
    good = rows[rows["step_ms"] <= (1 + TOLERANCE) * rows["step_ms"].min()]
    return good.sort_values("buffer_mib").iloc[0]


def bucket_advice(job: Job, rows: pd.DataFrame) -> str:
    """Which size of bucket to take, and what the slowest other would cost."""
    best = best_bucket(rows)
    worst = rows[rows["bucket"] != best["bucket"]].sort_values("step_ms").iloc[-1]
    return (
        f"For {job.title} take {_bucket(best)}: a modelled step of {best['step_ms']:,.1f} ms, of which a rank waits "
        f"{best['exposed_ms']:,.1f} ms for exchanges, with {about(best['buffer_mib'])} MiB of buffers; with "
        f"{_bucket(worst)} it is {worst['step_ms']:,.1f} ms and {worst['exposed_ms']:,.1f} ms of waiting, with "
        f"{about(worst['buffer_mib'])} MiB."
    )


def _bucket(row: pd.Series) -> str:
    return "the buckets that DistMuon chooses" if row["bucket"] == CHOSEN else f"{row['bucket']} a bucket"


def check_finding(found: Check) -> str:
    """How far the model is off."""
    table = found.table().set_index(["variant", "part"])
    parts = []
    for variant in found.settings.variants:
        step = table.loc[(variant, "step")]
        times = f"measured {step['measured_ms']:.1f} ms, modelled {step['modelled_ms']:.1f} ms"
        reach = f"single turns {step['low'] - 1:+z.0%} to {step['high'] - 1:+z.0%}"
        parts.append(f"{variant} {found.error(variant):+z.0%} ({times}; {reach})")
    settings = found.settings
    return (
        f"Against {settings.workload} measured on {settings.ranks} CPU ranks that share {found.cores} cores, the "
        f"model's error on the step is: {', '.join(parts)}."
    )


def assumptions_table(job: Job) -> pd.DataFrame:
    """What is assumed, with units."""
    values = job.assumptions.to_dict()
    labels = {
        "gemm_flops": ("GEMM rate", "TFLOP/s a rank", 1e12),
        "memory_bandwidth": ("memory", "GB/s a rank", 1e9),
        "launch_us": ("a launch", "µs", 1),
        "near_bandwidth": ("network inside a host", "GB/s a rank, each way", 1e9),
        "far_bandwidth": ("network between hosts", "GB/s a rank, each way", 1e9),
        "message_us": ("a message", "µs", 1),
        "ranks_a_host": ("ranks a host", "", 1),
    }
    rows = [(label, values[name] / unit, text) for name, (label, text, unit) in labels.items()]
    return pd.DataFrame(rows, columns=["assumed", "value", "unit"])


def key_figures(found: Scale) -> dict[str, float]:
    """What many of these are compared by: planning at the largest size, the modelled step, the model's error."""
    last, best = found.planning.iloc[-1], best_bucket(found.buckets)
    figures = {
        "planning, most ranks (s)": float(last["planning (s)"]),
        "memory above torch's, most (MiB)": float(found.planning["memory above torch's (MiB)"].max()),
        "modelled step (ms)": float(found.ranks["done_ms"].max()),
        "sent, mean (MiB)": float(found.ranks["sent_mib"].mean()),
        "GEMM FLOPs, most / mean": float(found.ranks["gemm_tflop"].max() / found.ranks["gemm_tflop"].mean()),
        "modelled step, advised bucket (ms)": float(best["step_ms"]),
        "exposed exchange, advised bucket (ms)": float(best["exposed_ms"]),
    }
    errors = {
        f"error of the model, {name} (%)": 100 * found.check.error(name) for name in found.check.settings.variants
    }
    return figures | errors


def conclusion(found: Scale) -> str:
    """The paragraph that a reader should take away."""
    return " ".join(
        [planning_finding(found.planning), bucket_advice(found.job, found.buckets), check_finding(found.check)]
    )


def _listed(parts: Sequence[str]) -> str:
    *first, last = parts
    return f"{', '.join(first)} and {last}" if first else last
