"""What one rank of a training does: DistMuon and AdamW in turn, step by step, or DistMuon alone from a checkpoint on.

``python -m distmuon.profiling.training_ranks`` is one rank, started by :mod:`distmuon.profiling.training`. Both
optimizers start from the same weights, see the same text, and are timed under the same circumstances.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Optimizer

from distmuon import checkpoint
from distmuon.buffers import peak_bytes
from distmuon.names import choose
from distmuon.planning.matrices import matrix_rows
from distmuon.profiling.asked import Asked
from distmuon.profiling.devices import DEVICES, newton_schulz_dtype, rank_device, use_gpu
from distmuon.profiling.launch import run_as_rank
from distmuon.profiling.orthogonality import departure
from distmuon.workloads import get_workload
from distmuon.workloads.config import ADAMW_RECIPE
from distmuon.workloads.storage import muon_parameters
from distmuon.workloads.training import Trainer

DISTMUON, ADAMW, RESUMED = "DistMuon", "AdamW", "resumed"
CHECKPOINT = "checkpoint"
RESULTS = "results.json"


@dataclass(frozen=True)
class Settings(Asked):
    """What to train.

    Args:
        workload: name of a workload.
        ranks: number of ranks.
        ep: expert-parallel degree.
        steps: of each optimizer.
        tokens: of a rank and step.
        lr: of DistMuon and the AdamW beside it.
        adamw_lr: of AdamW alone.
        weights: names of Muon's parameters to watch: of each, its first matrix.
        every: steps from one look at them to the next.
        seed: of the weights.
        device: "auto" takes a GPU a rank where there are so many, else the CPU.

    Raises:
        ValueError: a name is unknown (the nearest is given), a number is too small, or ranks, ep and workload do not
            fit.
    """

    workload: str = "tiny"
    ranks: int = 4
    ep: int = 2
    steps: int = 60
    tokens: int = 64
    lr: float = 3e-3
    adamw_lr: float = 3e-3
    weights: tuple[str, ...] = (
        "layers.0.attention.wo.weight",
        "layers.0.feed_forward.w2.weight",
        "layers.1.moe.experts.w1",
    )
    every: int = 5
    seed: int = 0
    device: str = "auto"

    def __post_init__(self) -> None:
        object.__setattr__(self, "weights", tuple(self.weights))
        workload = get_workload(self.workload)
        workload.layout(self.ranks, self.ep)
        names = [spec.name for spec in muon_parameters(workload, ranks=self.ranks, ep=self.ep)]
        for weight in self.weights:
            choose("weight", weight, names)
        self._refuse_less({"steps": 4, "tokens": 1, "every": 1, "lr": 0, "adamw_lr": 0})
        choose("device", self.device, DEVICES)

    @property
    def resume_at(self) -> int:
        """The step before which the checkpoint is written."""
        return self.steps // 2


class _Course:
    """One optimizer's training on this rank, and what is written down of it.

    Args:
        name: of the optimizer.
        settings: of all.
        rank: this one.
        device: of this rank.
        seed: of the weights.
    """

    def __init__(self, name: str, settings: Settings, rank: int, device: torch.device, seed: int) -> None:
        self.name = name
        self.trainer = Trainer(
            get_workload(settings.workload),
            ranks=settings.ranks,
            ep=settings.ep,
            rank=rank,
            device=device,
            tokens=settings.tokens,
            seed=seed,
            lr=settings.lr,
            ns_dtype=newton_schulz_dtype("auto", device),
        )
        model, muon, adamw = self.trainer.model, self.trainer.muon, self.trainer.adamw
        self.optimizers: list[Optimizer] = [muon, adamw]
        if name == ADAMW:
            self.optimizers = [AdamW(model.parameters(), lr=settings.adamw_lr, **ADAMW_RECIPE)]
        self.steps: list[dict[str, Any]] = []
        self.looks: list[dict[str, Any]] = []
        self._settings, self._rank, self._device = settings, rank, device

    def train_step(self, step: int) -> None:
        """Train, and write down what the step was and how long it took."""
        looking = self.name != RESUMED and step % self._settings.every == 0
        (loss, norm), forward_s = self._timed(lambda: (self.trainer.forward_backward(step), self.trainer.clip()))
        before = self._weights() if looking else {}
        _, step_s = self._timed(self._optimizer_step)
        times = {"forward_ms": 1e3 * forward_s, "step_ms": 1e3 * step_s}
        self.steps.append({"step": step, "loss": loss, "grad_norm": norm, **times})
        if looking:
            self.looks += self._look(step, before)

    def spectra(self) -> dict[str, list[float]]:
        """Singular values of the watched weights, largest first."""
        return {name: torch.linalg.svdvals(weight).tolist() for name, weight in self._weights().items()}

    def memory(self) -> dict[str, int]:
        """Bytes that this rank holds, by what for."""
        parameters = list(self.trainer.model.parameters())
        states = [value for each in self.optimizers for state in each.state.values() for value in state.values()]
        return {
            "parameters": _bytes(parameters),
            "gradients": _bytes(parameters),
            "optimizer state": _bytes([value for value in states if isinstance(value, Tensor)]),
            "exchange buffers": 0 if self.name == ADAMW else peak_bytes(self.trainer.muon.plan),
        }

    def _optimizer_step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
        self.trainer.model.zero_grad(set_to_none=True)

    def _timed(self, work: Callable[[], Any]) -> tuple[Any, float]:
        """What it returns, and its time from when all ranks were here until all had done it."""
        self._meet()
        start = time.perf_counter()
        result = work()
        self._meet()
        return result, time.perf_counter() - start

    def _meet(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        if self._settings.ranks > 1:
            dist.barrier()

    def _weights(self) -> dict[str, Tensor]:
        """The first matrix of each watched parameter, whole, in float64 on the CPU. Collective."""
        found = {}
        for name in self._settings.weights:
            parameter = self.trainer.model.get_parameter(name).detach()
            whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            rows = matrix_rows(name, tuple(whole.shape), self.trainer.workload.row_blocks)
            matrix = whole[0] if whole.ndim == 3 else whole
            found[name] = matrix[: rows[0]].cpu().double()
        return found

    def _look(self, step: int, before: dict[str, Tensor]) -> list[dict[str, Any]]:
        """What the step did to the watched weights."""
        group = self.optimizers[0].param_groups[0]
        kept = 1 - group["lr"] * group["weight_decay"]
        rows = []
        for name, weight in self._weights().items():
            values = torch.linalg.svdvals(weight)
            update = kept * before[name] - weight
            rows.append(
                {
                    "step": step,
                    "weight": name,
                    "departure": departure(update),
                    "update_rms": update.square().mean().sqrt().item(),
                    "spectral_norm": values[0].item(),
                    "rms": weight.square().mean().sqrt().item(),
                }
            )
        return rows


def train_rank(settings: Settings, folder: Path, checkpoint_from: Path | None) -> None:
    """Be one rank, from its environment (``RANK`` and so on) to its end; rank 0 writes the results of all.

    Args:
        settings: the same on all ranks.
        folder: where results go, and the checkpoint.
        checkpoint_from: resume from there, in place of training both from the seed on.
    """
    rank, device = int(os.environ["RANK"]), rank_device(settings.device, settings.ranks)

    def say(text: str) -> None:
        print(f"rank {rank} of {settings.ranks}: {text}", file=sys.stderr, flush=True)

    say(f"process {os.getpid()}, {settings.workload} on {device}")
    dist.init_process_group("gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl")
    if device.type == "cpu":
        torch.set_num_threads(1)  # the ranks share the cores
    else:
        use_gpu(device)
    # It warns that experts, which lie on two axes, are gathered one axis after the other.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    names = [DISTMUON, ADAMW] if checkpoint_from is None else [RESUMED]
    # What resumes starts from other weights, so that only a checkpoint that is read makes it go on.
    seed = settings.seed if checkpoint_from is None else settings.seed + 1
    courses = [_Course(name, settings, rank, device, seed) for name in names]
    start = {name: course.spectra() for name, course in zip(names, courses, strict=True)}
    if checkpoint_from is not None:
        checkpoint.load(checkpoint_from, courses[0].trainer.model, courses[0].optimizers)
    for step in range(settings.resume_at if checkpoint_from else 0, settings.steps):
        if step == settings.resume_at and checkpoint_from is None:
            checkpoint.save(folder / CHECKPOINT, courses[0].trainer.model, courses[0].optimizers)
        for course in courses[:: -1 if step % 2 else 1]:
            course.train_step(step)
        say(f"step {step + 1} of {settings.steps}: " + _losses(courses))
    mine = {
        course.name: {
            "steps": course.steps,
            "looks": course.looks,
            "spectra": {"start": start[course.name], "end": course.spectra()},
            "memory": course.memory(),
            "digest": course.trainer.digest(),
        }
        for course in courses
    }
    everyone: list[Any] | None = [None] * settings.ranks if rank == 0 else None
    dist.gather_object(mine, everyone)
    text = courses[0].trainer.text
    if everyone is not None:
        origin = {"device": device.type, "text": text.source, "text digest": text.digest}
        (folder / RESULTS).write_text(json.dumps({"ranks": everyone, "origin": origin}) + "\n")
    dist.destroy_process_group()
    say("done")


def _losses(courses: Sequence[_Course]) -> str:
    return ", ".join(f"{course.name} {course.steps[-1]['loss']:.4f}" for course in courses)


def _bytes(tensors: Sequence[Tensor]) -> int:
    return sum((tensor.to_local() if isinstance(tensor, DTensor) else tensor).nbytes for tensor in tensors)


def main() -> None:
    """Read the command line that :mod:`distmuon.profiling.training` wrote, and be a rank."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("settings", type=Settings.from_json)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--resume", type=Path)
    arguments = parser.parse_args()
    train_rank(arguments.settings, arguments.folder, arguments.resume)


if __name__ == "__main__":
    run_as_rank(main)
