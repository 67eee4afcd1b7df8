"""A job of any size, planned in one process: what it costs to plan, what each rank does, what a step would take.

One rank is planned in full; of the others only work and bytes are added up. Launches are counted on a dry run of that
rank, and the step is replayed for all.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.pool import Pool
from typing import Any

from distmuon.buffers import peak_bytes
from distmuon.checks import check_whole
from distmuon.counting.dryrun import dry_run, stage_launches
from distmuon.modelling import Assumptions, Replay, replay
from distmuon.modelling.loads import StageLoad, loads_of
from distmuon.planning.options import Patterns, PlanOptions
from distmuon.planning.plan import Plan, plan_step
from distmuon.planning.totals import StepTotals, step_totals
from distmuon.profiling.memory import peak_rss_bytes, torch_rss_bytes
from distmuon.richtext import Shown
from distmuon.variants import Variant, get_variant
from distmuon.workloads.config import Workload, get_workload
from distmuon.workloads.storage import get_buckets, muon_parameters

#: What a reader calls the figures of :meth:`Planned.row`.
LABELS = {
    "exchanges": "exchanges",
    "sent_mib": "sent a rank (MiB)",
    "gemm_tflop": "GEMM TFLOP a rank",
    "buffer_mib": "peak buffers (MiB)",
    "step_ms": "step (ms)",
    "busy_ms": "busy (ms)",
    "exposed_ms": "exposed exchange (ms)",
    "idle_ms": "idle at the end (ms)",
}


@dataclass(frozen=True)
class Job:
    """What is planned.

    Attributes:
        workload: name of a workload.
        ranks: of the job.
        ep: expert-parallel degree.
        rank: which is planned in full.
        replicas: copies of the model (HSDP).
        share_replicas: whether they split the work, as DistMuon takes it.
        buckets: "published", "auto", or patterns.
        variant: of the step.
        assumptions: of the modelled time.

    Raises:
        ValueError: a name is unknown, or numbers do not fit.
        TypeError: what should be a number or a name is none.
    """

    workload: str
    ranks: int
    ep: int
    rank: int = 0
    replicas: int = 1
    share_replicas: bool | None = None
    buckets: str | Patterns = "published"
    variant: str | Variant = "fused"
    assumptions: Assumptions = field(default_factory=Assumptions)

    def __post_init__(self) -> None:
        self.model.layout(self.ranks, self.ep, self.replicas)
        if self.ranks < 2:
            raise ValueError("one rank exchanges nothing: give ranks=2 or more")
        check_whole("rank", self.rank, 0, self.ranks - 1)
        _ = self.options

    @property
    def model(self) -> Workload:
        """The workload itself."""
        return get_workload(self.workload)

    @property
    def title(self) -> str:
        """What is planned, in a few words."""
        return f"{self.model.name} on {self.ranks:,} ranks (EP {self.ep})"

    @property
    def options(self) -> PlanOptions:
        """For planning."""
        variant, buckets = get_variant(self.variant), get_buckets(self.model, self.buckets)
        return PlanOptions(buckets, variant, share_replicas=self.share_replicas)


@dataclass(frozen=True, repr=False)
class Planned(Shown):
    """A job that was planned. Prints as its modelled step.

    Attributes:
        job: what was asked for.
        plan: of its rank.
        totals: of all ranks.
        plan_seconds: for both and for describing the parameters: CPU time, as all of it is one thread.
        launches: of its rank, collectives aside.
        loads: of all ranks, as modelled.
        replay: of the step.
        peak_rss_bytes: most memory that the process held so far.
    """

    job: Job
    plan: Plan
    totals: StepTotals
    plan_seconds: float
    launches: int
    loads: list[StageLoad]
    replay: Replay
    peak_rss_bytes: int

    def _line(self) -> str:
        return (
            f"{self.job.title}, rank {self.job.rank} planned in {self.plan_seconds:.2f} s; modelled, means over ranks"
        )

    def _table(self) -> tuple[Sequence[str], list[Sequence[object]]]:
        row = shown(self.row())
        return list(LABELS.values()), [[row[name] for name in LABELS]]

    def to_dict(self, torch_rss_bytes: int) -> dict[str, Any]:
        """What the script prints.

        ``wire_bytes`` are sent to other ranks in a step, both ways. ``ns_flops_imbalance`` is the largest of GEMM FLOPs
        over their mean, over the step; ``by_bucket`` is over max(mean, largest matrix), which no owners can beat.
        ``buffer_bytes`` is what a step holds beside parameters, gradients and momenta, at most.

        Args:
            torch_rss_bytes: what importing torch takes, see :func:`torch_rss_bytes`.
        """
        sent = self.totals.sent_bytes()
        by_bucket = [stage.imbalance_to_bound() for stage in self.totals.stages if stage.groups]
        replicas = {"replicas": self.job.replicas} if self.job.replicas > 1 else {}
        return {
            "workload": self.job.model.name,
            "ranks": self.job.ranks,
            "ep": self.job.ep,
            **replicas,
            "rank": self.job.rank,
            "plan_seconds": round(self.plan_seconds, 3),
            "peak_rss_mib": round((self.peak_rss_bytes - torch_rss_bytes) / 2**20, 1),
            "wire_bytes": {"mean": round(float(sent.double().mean())), "max": int(sent.max())},
            "ns_flops_imbalance": self.totals.imbalance(),
            "ns_flops_imbalance_by_bucket": {
                "mean": sum(by_bucket) / len(by_bucket) if by_bucket else 1.0,
                "max": max(by_bucket, default=1.0),
            },
            "buffer_bytes": peak_bytes(self.plan),
            "launches": self.launches,
            "modelled_step_ms": self.replay.step_s * 1e3,
            "assumptions": self.job.assumptions.to_dict(),
        }

    def row(self) -> dict[str, Any]:
        """For a table of jobs: means over ranks in ms of what a step is spent on, and what else differs."""
        replayed = self.replay
        return {
            "ranks": self.job.ranks,
            "exchanges": sum(bool(stage.groups) for stage in self.totals.stages),
            "sent_mib": float(self.totals.sent_bytes().double().mean()) / 2**20,
            "gemm_tflop": float(sum((load.owned.flops + load.whole.flops).mean() for load in self.loads)) / 1e12,
            "buffer_mib": peak_bytes(self.plan) / 2**20,
            "step_ms": 1e3 * replayed.step_s,
            "busy_ms": 1e3 * float(replayed.busy_s.mean()),
            "exposed_ms": 1e3 * float(replayed.exposed_s.mean()),
            "idle_ms": 1e3 * float(replayed.idle_s.mean()),
        }


def shown(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of :meth:`Planned.row` as a reader gets it: idle time in whole microseconds, as no assumption is finer."""
    return {**row, "idle_ms": round(row["idle_ms"], 3)}


def plan_job(job: Job) -> Planned:
    """Plan a job and replay its step, in this process."""
    options = job.options
    start = time.process_time()
    parameters = muon_parameters(job.model, ranks=job.ranks, ep=job.ep, replicas=job.replicas)
    plan = plan_step(parameters, job.rank, options)
    totals = step_totals(parameters, options)
    plan_seconds = time.process_time() - start
    launches = dry_run(plan).launches
    loads = loads_of(parameters, options, totals, stage_launches(plan, launches))
    replayed = replay(loads, job.assumptions)
    return Planned(job, plan, totals, plan_seconds, launches.total(), loads, replayed, peak_rss_bytes())


def plan_each(jobs: Iterable[Job]) -> Iterator[dict[str, Any]]:
    """What :meth:`Planned.to_dict` gives for each job, one after another, each planned in a process of its own."""
    torch_bytes = torch_rss_bytes()
    with _processes(1) as pool:
        yield from pool.imap(partial(_answer, torch_bytes=torch_bytes), jobs)


def plan_rows(jobs: Iterable[Job]) -> list[dict[str, Any]]:
    """What :meth:`Planned.row` gives for each job, as many at a time as there are cores."""
    with _processes(os.cpu_count() or 1) as pool:
        return pool.map(_row, jobs, chunksize=1)


def _processes(number: int) -> Pool:
    """So many at a time, each for one job: forked from a process that has imported this module, with nothing cached."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context.Pool(number, maxtasksperchild=1)


def _answer(job: Job, torch_bytes: int) -> dict[str, Any]:
    return plan_job(job).to_dict(torch_bytes)


def _row(job: Job) -> dict[str, Any]:
    return plan_job(job).row()


def curve(job: Job, sizes: Iterable[int]) -> list[Job]:
    """The same job on other numbers of ranks; with fewer experts' ranks where ``ep`` does not divide them."""
    return [replace(job, ranks=ranks, ep=math.gcd(job.ep, ranks // job.replicas), rank=0) for ranks in sizes]


def growth(sizes: Iterable[float], costs: Iterable[float]) -> float:
    """The p with which costs grow as sizes^p: the slope of a line through both logarithms, by least squares.

    Raises:
        ValueError: fewer than two sizes.
    """
    points = [(math.log(size), math.log(cost)) for size, cost in zip(sizes, costs, strict=True)]
    if len(points) < 2:
        raise ValueError(f"{len(points)} sizes say nothing of growth: give at least 2")
    mean_x, mean_y = (sum(values) / len(points) for values in zip(*points, strict=True))
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)
