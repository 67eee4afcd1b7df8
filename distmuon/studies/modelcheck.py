"""The model against a measured step: what this machine does in a second, and what a step takes, in one run.

``python -m distmuon.studies.modelcheck`` is one rank, started by :func:`check`. In every turn all ranks measure their
rates at once, then step each variant, recorded as a profile records it. Ranks share the cores, so a rate measured so is
a rank's share of them; the model keeps it, while a real rank goes faster whenever another waits.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import pandas as pd
import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from distmuon.counting.contestants import Contestant
from distmuon.counting.dryrun import dry_run, stage_launches
from distmuon.folders import claim, fresh
from distmuon.modelling import Assumptions, Replay, replay
from distmuon.modelling.loads import StageLoad, loads_of
from distmuon.newton_schulz.costs import gemm_flops
from distmuon.planning.matrices import Shape
from distmuon.planning.options import PlanOptions
from distmuon.planning.placement import ParameterSpec
from distmuon.planning.plan import plan_step
from distmuon.planning.totals import step_totals
from distmuon.profiling.events import merge_ranks, rank_events, sent_bytes, step_range
from distmuon.profiling.launch import launch, run_as_rank
from distmuon.profiling.session import Recorder, Settings
from distmuon.richtext import Shown, counted
from distmuon.traces.trace import Trace
from distmuon.workloads import get_workload
from distmuon.workloads.storage import get_buckets, muon_parameters
from distmuon.workloads.training import Trainer

#: What a step's time is compared in: phases of the profile, and what they are in the replay.
PARTS = {
    "momentum, pack": (("momentum", "pack"), ("begin",)),
    "Newton-Schulz, unpack, repack": (("unpack", "newton_schulz", "repack"), ("owned", "whole")),
    "wait": (("all_to_all", "wait"), ("wait out", "wait back")),
    "return unpack, apply": (("return_unpack", "apply"), ("finish",)),
}
_BLOCK_S = 0.05  # for which all ranks do one thing at a time
_SMALL_COPIES = 20
_COLD_NUMEL = 8 << 20


@dataclass(frozen=True, repr=False)
class Check(Shown):
    """A model and a measurement of the same steps. Prints as a table of both.

    Attributes:
        folder: where the measurement lies.
        settings: what was stepped.
        assumptions: measured; medians over turns.
        cores: that the ranks shared.
        turns: a row a variant, turn and part: ``measured_ms``, the mean over ranks, and ``modelled_ms`` by that turn's
            rates. "rest" is what lies between phases, which the model does not know; "step" the span of the last rank
            to be done.
    """

    folder: Path
    settings: Settings
    assumptions: Assumptions
    cores: int
    turns: pd.DataFrame

    def _line(self) -> str:
        asked = self.settings
        cores, turns = counted(self.cores, "core", "cores"), counted(asked.steps, "turn", "turns")
        return f"{asked.workload} on {asked.ranks} CPU ranks that share {cores}, {turns}"

    def _table(self) -> tuple[Sequence[str], list[Sequence[object]]]:
        columns = ["variant", "part", "measured_ms", "modelled_ms"]
        rows = self.table()[columns].itertuples(index=False, name=None)
        return ("variant", "part of a step", "measured (ms)", "modelled (ms)"), list(rows)

    def table(self) -> pd.DataFrame:
        """A row a variant and part: medians over turns of both times and of their ``ratio``, modelled to measured; and
        the ratio's smallest and largest.
        """
        turns = self.turns.assign(ratio=self.turns["modelled_ms"] / self.turns["measured_ms"])
        parts = turns.groupby(["variant", "part"], sort=False)
        table = parts[["measured_ms", "modelled_ms", "ratio"]].median()
        table["low"], table["high"] = parts["ratio"].min(), parts["ratio"].max()
        return table.reset_index()

    def error(self, variant: str) -> float:
        """Of a variant's modelled step relative to the measured one, -0.1 for a tenth too short; median of turns."""
        table = self.table().set_index(["variant", "part"])
        return float(table["ratio"][variant, "step"] - 1)


def check(
    settings: Settings, out: Path | str | None = None, *, silence_s: float = 300.0, progress: TextIO | None = None
) -> Check:
    """Measure on this machine's CPUs, model with what was measured, and compare.

    Args:
        settings: what to step; ``steps`` are the turns. On CPUs with Newton-Schulz in fp32, whatever it asks for.
        out: folder for traces, logs and rates; None for a fresh one under ``runs/``.
        silence_s: how long no rank may write to its log before the run is taken to hang.
        progress: where rank 0's progress goes; None for standard error.

    Raises:
        FileExistsError: ``out`` already holds files.
        RankFailure: a rank died or hung; no process is left.
    """
    folder = Path(out) if out else fresh(f"modelcheck-{settings.workload.replace('/', '-by-')}")
    claim(folder)
    launch(
        __name__,
        [settings.to_json(), str(folder)],
        ranks=settings.ranks,
        folder=folder,
        silence_s=silence_s,
        progress=progress or sys.stderr,
    )
    return read_check(folder)


def read_check(folder: Path) -> Check:
    """What :func:`check` returned for the run in that folder."""
    measured = json.loads((folder / "rates.json").read_text())
    settings = Settings(**measured["settings"])
    events = pd.read_parquet(folder / "events.parquet")
    by_turn = [
        {name: statistics.mean(rates[name] for rates in ranks) for name in ranks[0]}
        for ranks in zip(*measured["rates"], strict=True)
    ]

    def machine(rates: dict[str, float]) -> Assumptions:
        return Assumptions(**rates, ranks_a_host=settings.ranks)

    rows = []
    for variant in settings.variants:
        loads = _loads(settings, variant)
        for turn, rates in enumerate(by_turn):
            found = _measured(events[(events["variant"] == variant) & (events["step"] == turn)])
            modelled = _modelled(replay(loads, machine(rates)))
            rows += [
                {
                    "variant": variant,
                    "turn": turn,
                    "part": part,
                    "measured_ms": found[part],
                    "modelled_ms": modelled[part],
                }
                for part in found
            ]
    medians = {name: statistics.median(rates[name] for rates in by_turn) for name in by_turn[0]}
    return Check(folder, settings, machine(medians), measured["cores"], pd.DataFrame(rows))


def _measured(step: pd.DataFrame) -> dict[str, float]:
    """Milliseconds of each part of a step, and of all of it."""
    spans = step[step["kind"] == "optimizer"]["duration_us"] / 1e3
    each = step[step["kind"] == "phase"].groupby("phase")["duration_us"].sum() / len(spans) / 1e3
    found = {part: float(each.reindex(names).sum()) for part, (names, _) in PARTS.items()}
    return found | {"rest": float(spans.mean()) - sum(found.values()), "step": float(spans.max())}


def _modelled(found: Replay) -> dict[str, float]:
    parts = {part: 1e3 * float(found.total(*kinds).mean()) for part, (_, kinds) in PARTS.items()}
    return parts | {"rest": 0.0, "step": 1e3 * found.step_s}


def _options(settings: Settings, variant: str) -> PlanOptions:
    chosen = Contestant(variant).options(buckets=settings.buckets)
    buckets = get_buckets(get_workload(settings.workload), chosen.pop("buckets"))
    return PlanOptions(buckets, ns_dtype=torch.float32, **chosen)


def _loads(settings: Settings, variant: str) -> list[StageLoad]:
    options = _options(settings, variant)
    parameters = muon_parameters(get_workload(settings.workload), ranks=settings.ranks, ep=settings.ep)
    plan = plan_step(parameters, 0, options)
    operators = stage_launches(plan, dry_run(plan).operators)
    return loads_of(parameters, options, step_totals(parameters, options), operators)


def check_rank(settings: Settings, folder: Path) -> None:
    """Be one rank from its environment (``RANK`` and so on) to its end; rank 0 writes the results of all."""
    rank = int(os.environ["RANK"])

    def say(text: str) -> None:
        print(f"rank {rank} of {settings.ranks}: {text}", file=sys.stderr, flush=True)

    say(f"process {os.getpid()}, {settings.workload}, {', '.join(settings.variants)}")
    dist.init_process_group("gloo")
    torch.set_num_threads(1)  # the ranks share the cores
    workload = get_workload(settings.workload)
    trainers = {
        variant: Trainer(
            workload,
            ranks=settings.ranks,
            ep=settings.ep,
            rank=rank,
            tokens=settings.tokens,
            seed=settings.seed,
            ns_dtype=torch.float32,
            **Contestant(variant).options(buckets=settings.buckets),
        )
        for variant in settings.variants
    }
    parameters = muon_parameters(workload, ranks=settings.ranks, ep=settings.ep)
    recorder = Recorder(torch.device("cpu"))
    rates: list[dict[str, float]] = []
    for trainer in trainers.values():  # a step leaves the gradients as they are
        trainer.forward_backward(0)
        trainer.clip()
    for turn in range(-settings.warmup, settings.steps):
        measured = measure_rates(parameters)
        if turn >= 0:
            rates.append(measured)
        for variant, trainer in list(trainers.items())[:: -1 if turn % 2 else 1]:
            with recorder.record(step_range(variant, 0, turn)) if turn >= 0 else nullcontext():
                trainer.muon.step()
        say(f"turn {turn + 1} of {settings.steps}")
    path = folder / f"rank{rank}.trace.json.gz"
    recorder.write(path)
    trace = Trace(path)
    sent = {variant: sent_bytes(trainer.muon.plan) for variant, trainer in trainers.items()}
    everyone: list[Any] | None = [None] * settings.ranks if rank == 0 else None
    dist.gather_object((rank_events(trace, rank, sent), trace.base_ns, rates), everyone)
    dist.destroy_process_group()
    if everyone is not None:
        frames, bases, of_ranks = zip(*everyone, strict=True)
        merge_ranks(frames, bases).to_parquet(folder / "events.parquet")
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        document = {"settings": asdict(settings), "cores": cores, "rates": of_ranks}
        (folder / "rates.json").write_text(json.dumps(document, indent=1))
    say("done")


def measure_rates(parameters: list[ParameterSpec]) -> dict[str, float]:
    """What this rank does in a second while all others do the same: the assumptions of the model, measured.

    Matrix products of each shape of ``parameters``, weighted by their FLOPs; ``lerp_`` on as many elements as a rank
    has of a parameter, for elementwise work; small copies and views under the profiler, an operator as the step
    dispatches it; all-to-alls of one element and of the parameters' mean bytes.
    """
    operator_s = _operator_seconds()
    exchange_s, bandwidth = _exchange(parameters)
    others = dist.get_world_size() - 1
    return {
        "gemm_flops": _gemm_flops(parameters),
        "memory_bandwidth": _memory_bandwidth(parameters, operator_s),
        "launch_us": 1e6 * operator_s,
        "near_bandwidth": bandwidth,
        "far_bandwidth": bandwidth,
        "message_us": 1e6 * exchange_s / max(others, 1),
    }


def _gemm_flops(parameters: list[ParameterSpec]) -> float:
    counts: Counter[Shape] = Counter()
    for spec in parameters:
        counts.update(spec.shapes)
    flops = seconds = 0.0
    for (rows, cols, _), matrices in counts.items():
        x = torch.randn(min(rows, cols), max(rows, cols)) / (rows * cols) ** 0.5
        flops += matrices * gemm_flops(rows, cols, 1)
        seconds += matrices * _seconds(partial(_iterate, x))
    return flops / seconds


def _iterate(x: Tensor) -> Tensor:
    """The matrix products of one Newton-Schulz iteration."""
    gram = torch.mm(x, x.mT)
    return torch.mm(torch.mm(gram, gram), x)


def _memory_bandwidth(parameters: list[ParameterSpec], operator_s: float) -> float:
    """Of ``lerp_``, which reads two tensors and writes one, on more of them than a cache holds."""
    numel = int(statistics.mean(spec.bytes / 4 for spec in parameters) / dist.get_world_size())
    starts, ends = (torch.ones(-(-_COLD_NUMEL // numel), numel).unbind() for _ in range(2))
    pairs = itertools.cycle(zip(starts, ends, strict=True))

    def mix() -> None:
        start, end = next(pairs)
        start.lerp_(end, 0.5)

    seconds = _seconds(mix)
    return 3 * 4 * numel / max(seconds - operator_s, 0.1 * seconds)


def _operator_seconds() -> float:
    """Of one operator, with what Python does around it, while the profiler looks on as it does at a step."""
    places, packed = torch.zeros(2, _SMALL_COPIES, 8)

    def copy() -> None:
        for index in range(_SMALL_COPIES):
            places[index].copy_(packed[index])  # two views and a copy

    with profile(activities=[ProfilerActivity.CPU]):
        return _seconds(copy) / (3 * _SMALL_COPIES)


def _exchange(parameters: list[ParameterSpec]) -> tuple[float, float]:
    """Seconds of an exchange that moves next to nothing, and bytes/s that a rank sends in a large one."""
    ranks = dist.get_world_size()
    numel = int(statistics.mean(spec.bytes / 4 for spec in parameters) / ranks**2) * 4 + 1

    def exchange_seconds(elements: int, times: int) -> float:
        source, target = torch.zeros(2, ranks * elements)
        taken = []
        for _ in range(times):
            start = time.perf_counter()
            work = dist.all_to_all_single(target, source, async_op=True)
            assert work is not None
            work.wait()
            taken.append(time.perf_counter() - start)
        return statistics.median(taken)

    small, large = exchange_seconds(1, 40), exchange_seconds(numel, 20)
    sent = 4 * numel * (ranks - 1)
    return small, sent / max(large - small, 0.1 * large)


def _seconds(call: Callable[[], Any]) -> float:
    """Of one call, on average over a block that begins on all ranks at once."""
    call()
    dist.barrier()
    start, calls = time.perf_counter(), 0
    while (passed := time.perf_counter() - start) < _BLOCK_S or not calls:
        call()
        calls += 1
    return passed / calls if passed else 0.0


def main() -> None:
    """Read the command line that :func:`check` wrote, and be a rank."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("settings", type=Settings.from_json)
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    check_rank(arguments.settings, arguments.folder)


if __name__ == "__main__":
    run_as_rank(main)
