"""What one rank of a profile does: train each variant side by side, and record the optimizer's steps.

``python -m distmuon.profiling.session`` is one rank, started by :mod:`distmuon.profiling.run`. Every rank trains all
variants in turn, step by step, so that they meet the same circumstances; the turns are reversed with every step and
repeat. Only the optimizer's step is recorded: each on its own, after a barrier, and all of a rank into one trace.
"""

from __future__ import annotations

import argparse
import gc
import gzip
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from distmuon.counting.contestants import Contestant
from distmuon.counting.launches import count_launches
from distmuon.names import choose
from distmuon.newton_schulz import NS_ALGORITHMS
from distmuon.profiling.asked import Asked
from distmuon.profiling.devices import DEVICES, NS_DTYPES, local_ranks, newton_schulz_dtype, rank_device, use_gpu
from distmuon.profiling.events import rank_events, sent_bytes, step_range
from distmuon.profiling.launch import run_as_rank
from distmuon.profiling.results import RankResults, write_results
from distmuon.traces.trace import Trace
from distmuon.workloads import get_workload
from distmuon.workloads.storage import BUCKETS
from distmuon.workloads.training import Trainer


@dataclass(frozen=True)
class Settings(Asked):
    """What to profile.

    Args:
        workload: name of a workload.
        ranks: number of ranks.
        ep: expert-parallel degree.
        variants: texts of contestants (:mod:`distmuon.counting.contestants`); the others are compared with the first.
        steps: profiled steps of a repeat.
        repeats: how often the training is done, from the seed on; each must come to the same.
        warmup: steps of a repeat that come before, and are not recorded.
        tokens: of a rank and step.
        seed: of the weights.
        device: "auto" takes a GPU a rank where there are so many, else the CPU.
        ns_dtype: of Newton-Schulz; "auto" is bfloat16 on a GPU and float32 on a CPU, which may lack units for the
            other.
        buckets: of variants that do not set them: "published", the workload's own, or "auto", DistMuon's choice.
        ns_algorithm: of variants that do not set it.

    Raises:
        ValueError: a name is unknown (the nearest is given), a number is too small, or ranks, ep and workload do not
            fit.
    """

    workload: str = "kimi-debug"
    ranks: int = 4
    ep: int = 2
    variants: tuple[str, ...] = ("baseline", "batched")
    steps: int = 3
    repeats: int = 2
    warmup: int = 1
    tokens: int = 128
    seed: int = 0
    device: str = "auto"
    ns_dtype: str = "auto"
    buckets: str = "published"
    ns_algorithm: str = "standard"

    def __post_init__(self) -> None:
        object.__setattr__(self, "variants", tuple(self.variants))
        get_workload(self.workload).layout(self.ranks, self.ep)
        for variant in self.variants:
            Contestant(variant)
        if not self.variants or len(set(self.variants)) < len(self.variants):
            raise ValueError(f"variants must be one or more, each once, not {list(self.variants)}")
        self._refuse_less({"steps": 1, "repeats": 1, "warmup": 0, "tokens": 1})
        choose("device", self.device, DEVICES)
        choose("ns_dtype", self.ns_dtype, NS_DTYPES)
        choose("buckets", self.buckets, BUCKETS)
        choose("ns_algorithm", self.ns_algorithm, NS_ALGORITHMS)


def profile_rank(settings: Settings, folder: Path, command: str, *, own_log: bool = False) -> None:
    """Run one rank from its environment (``RANK`` and so on) to its end; rank 0 writes the results of all.

    Args:
        settings: the same on all ranks.
        folder: where traces and results go, of rank 0, where it exists; the others follow.
        command: what the user called, for the results.
        own_log: write ``rank{r}.log`` as well, where no launcher does it from standard error.
    """
    rank, device = int(os.environ["RANK"]), rank_device(settings.device, settings.ranks)
    log: TextIO | None = None

    def say(text: str) -> None:
        for stream in (sys.stderr, log):
            if stream:
                print(f"rank {rank} of {settings.ranks}: {text}", file=stream, flush=True)

    gpus = f"{torch.cuda.device_count()} GPUs for {local_ranks(settings.ranks)} ranks"
    say(f"process {os.getpid()}, {settings.workload} on {device} ({gpus}), {', '.join(settings.variants)}")
    dist.init_process_group("gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl")  # "nccl" is RCCL with ROCm
    if dist.get_world_size() != settings.ranks:
        raise ValueError(f"ranks is {settings.ranks}, but this job has {dist.get_world_size()}")
    place = [str(folder)]
    dist.broadcast_object_list(place)
    folder = Path(place[0])
    if own_log:  # not before rank 0 has claimed the folder
        folder.mkdir(parents=True, exist_ok=True)
        log = (folder / f"rank{rank}.log").open("w")
    if device.type == "cpu":
        torch.set_num_threads(1)  # the ranks share the cores
    else:
        use_gpu(device)

    recorder = Recorder(device)
    training: dict[str, list[dict[str, Any]]] = {variant: [] for variant in settings.variants}
    digests: dict[str, list[str]] = {variant: [] for variant in settings.variants}
    last = settings.warmup + settings.steps - 1
    for repeat in range(settings.repeats):
        trainers = {variant: _trainer(settings, variant, rank, device) for variant in settings.variants}
        for step in range(last + 1):
            profiled = step >= settings.warmup
            for variant in settings.variants[:: -1 if (repeat + step) % 2 else 1]:
                trainer = trainers[variant]
                loss, grad_norm = trainer.forward_backward(step), trainer.clip()
                with recorder.record(step_range(variant, repeat, step)) if profiled else nullcontext():
                    trainer.optimizer_step()
                training[variant].append({"repeat": repeat, "step": step, "loss": loss, "grad_norm": grad_norm})
                where = f"repeat {repeat + 1} of {settings.repeats}, step {step} of {last}"
                kind = variant if profiled else f"{variant}, warm-up"
                say(f"{where}, {kind}: loss {loss:.4f}, gradient norm {grad_norm:.4f}")
        for variant, trainer in trainers.items():
            digests[variant].append(trainer.digest())

    path = folder / f"rank{rank}.trace.json.gz"
    recorder.write(path)
    trace = Trace(path)
    sent = {variant: sent_bytes(trainer.muon.plan) for variant, trainer in trainers.items()}
    mine = RankResults(rank_events(trace, rank, sent), trace.base_ns, training, digests)
    say("gathering")
    everyone: list[Any] | None = [None] * settings.ranks if rank == 0 else None
    dist.gather_object(mine, everyone)
    text = trainers[settings.variants[0]].text
    dist.destroy_process_group()
    if everyone is not None:
        # Counting makes process groups of its own, so it comes last. It is always the bfloat16 program that is counted.
        question = settings.workload, settings.ranks, settings.ep
        counts = {name: count_launches(*question, **_options(settings, name)) for name in settings.variants}
        write_results(
            folder,
            settings=asdict(settings)
            | {"device": device.type, "ns_dtype": str(newton_schulz_dtype(settings.ns_dtype, device))[6:]},
            ranks=everyone,
            counts=counts,
            origin={"command": command, "text": text.source, "text digest": text.digest},
        )
    say("done")
    if log:
        log.close()


class Recorder:
    """Records steps with the PyTorch profiler, each in a session of its own, and writes them as one trace.

    A session a step is complete when the step ends, device activity included, and leaves out what lies between:
    pausing one long session would do neither on a GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
        self._document: dict[str, Any] = {}
        with self._session():  # the first session of a process imports for seconds
            torch.ones(1, device=device).add_(1)

    @contextmanager
    def record(self, name: str) -> Iterator[None]:
        """Record what the caller does, as a range of that name, once all ranks are here."""
        gc.collect()
        gc.disable()
        with self._session() as session:
            dist.barrier()
            self._synchronize()
            with record_function(name):
                yield
            self._synchronize()
        gc.enable()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "step.json")
            session.export_chrome_trace(str(path))
            document = json.loads(path.read_text())
        if not self._document:
            self._document = document
        else:  # its description of the process is there already
            self._document["traceEvents"] += [event for event in document["traceEvents"] if event["ph"] != "M"]

    def write(self, path: Path) -> None:
        """Write all recorded steps as one gzipped trace."""
        with gzip.open(path, "wt") as file:
            json.dump(self._document, file)

    def _session(self) -> profile:
        self._synchronize()
        return profile(activities=self._activities)

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()


def _trainer(settings: Settings, variant: str, rank: int, device: torch.device) -> Trainer:
    return Trainer(
        get_workload(settings.workload),
        ranks=settings.ranks,
        ep=settings.ep,
        rank=rank,
        device=device,
        tokens=settings.tokens,
        seed=settings.seed,
        ns_dtype=newton_schulz_dtype(settings.ns_dtype, device),
        **_options(settings, variant),
    )


def _options(settings: Settings, variant: str) -> dict[str, Any]:
    return Contestant(variant).options(buckets=settings.buckets, ns_algorithm=settings.ns_algorithm)


def main() -> None:
    """Read the command line that :mod:`distmuon.profiling.run` wrote, and be a rank."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("settings", type=Settings.from_json)
    parser.add_argument("folder", type=Path)
    parser.add_argument("command")
    arguments = parser.parse_args()
    profile_rank(arguments.settings, arguments.folder, arguments.command)


if __name__ == "__main__":
    run_as_rank(main)
