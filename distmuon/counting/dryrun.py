"""A step of one rank's plan on meta tensors, counted stage by stage: no process group, no parameter, no memory.

What runs is :class:`distmuon.step.StepRunner`, as in training; exchanges move nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from distmuon.buffers import Buffers
from distmuon.counting.counter import LaunchCounter
from distmuon.exchange import Exchanger
from distmuon.modelling.loads import StageLaunches
from distmuon.newton_schulz import COEFFICIENTS, orthogonalize_
from distmuon.planning.plan import Plan
from distmuon.planning.schedule import Stage
from distmuon.settings import Settings
from distmuon.step import LocalParameter, StepRunner
from distmuon.workloads.config import LEARNING_RATE, MUON_RECIPE

_BEGIN, _EXCHANGE, _FINISH = ("momentum", "pack"), ("unpack", "repack"), ("return_unpack", "apply")


class _MovesNothing(Exchanger):
    """Needs no process group."""

    def __init__(self) -> None:
        pass

    def send(self, stage: Stage) -> None:
        """Nothing goes to owners."""

    def send_back(self, stage: Stage) -> None:
        """Nothing comes back."""

    def wait(self, stage: Stage) -> None:
        """Nothing is waited for."""


@dataclass(frozen=True)
class DryRun:
    """What a step does, collectives aside, by phase and bucket.

    Attributes:
        launches: of device activity.
        operators: ATen operators dispatched, views among them.
    """

    launches: Counter[tuple[str, str]]
    operators: Counter[tuple[str, str]]


def dry_run(plan: Plan, toolchain: str = "rocm") -> DryRun:
    """Step once with the recipe's settings."""
    meta = torch.device("meta")
    settings = Settings(
        lr=LEARNING_RATE,
        weight_decay=MUON_RECIPE["weight_decay"],
        momentum=MUON_RECIPE["momentum"],
        nesterov=MUON_RECIPE["nesterov"],
        ns_coefficients=(COEFFICIENTS,) * MUON_RECIPE["ns_steps"],
        eps=1e-7,
        adjust_lr_fn=MUON_RECIPE["adjust_lr_fn"],
    )
    tensors = []
    for spec in plan.parameters:
        parameter, gradient, momentum = torch.empty((3, *spec.local_shape(plan.rank)), dtype=spec.dtype, device=meta)
        tensors.append(LocalParameter(parameter, gradient, momentum, settings))
    counter = LaunchCounter(toolchain)
    runner = StepRunner(plan, Buffers(plan, meta), _MovesNothing(), _Remembering(counter))
    with torch.no_grad(), counter:
        runner.run(tensors)
    return DryRun(counter.counts.launches_in, counter.counts.operators_in)


class _Remembering:
    """Newton-Schulz, of which calls of one kind are dispatched once: a rank may make ten thousand of a few kinds."""

    def __init__(self, counter: LaunchCounter) -> None:
        self._counter = counter
        self._known: dict[object, tuple[int, int]] = {}

    def __call__(self, matrices: Tensor, out: Tensor | None = None, **settings: Any) -> None:
        place = self._counter.place
        launches, operators = self._counter.counts.launches_in, self._counter.counts.operators_in
        kind = tuple((each.shape, each.stride(), each.dtype) for each in (matrices, out) if each is not None)
        if kind in self._known:
            more = self._known[kind]
            launches[place] += more[0]
            operators[place] += more[1]
            return
        before = launches[place], operators[place]
        orthogonalize_(matrices, out, **settings)
        self._known[kind] = launches[place] - before[0], operators[place] - before[1]


def stage_launches(plan: Plan, counted: Mapping[tuple[str, str], int]) -> dict[str, StageLaunches]:
    """Launches by stage, as the model takes them.

    Args:
        plan: of one rank.
        counted: of its step, by phase and bucket: the launches of its dry run, or the operators.
    """
    batches = sum(len(stage.batches) for stage in plan.stages)
    in_batches = sum(number for (phase, _), number in counted.items() if phase == "newton_schulz")
    a_batch = in_batches / batches if batches else 0.0  # the same for all, nearly
    found = {}
    for stage in plan.stages:
        begin, exchange, finish = (
            sum(counted.get((phase, stage.name), 0) for phase in phases) for phases in (_BEGIN, _EXCHANGE, _FINISH)
        )
        whole = sum(batch.ready or not batch.in_work for batch in stage.batches)
        found[stage.name] = StageLaunches(begin, exchange, a_batch, whole * a_batch, finish)
    return found
