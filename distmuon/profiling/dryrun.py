"""A step of one rank's plan on meta tensors, counted stage by stage: no process group, no parameter, no memory.

What runs is :class:`distmuon.step.StepRunner`, as in training; exchanges move nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from distmuon.buffers import Buffers
from distmuon.exchange import Exchanger
from distmuon.modelling.loads import StageLaunches
from distmuon.newton_schulz import COEFFICIENTS
from distmuon.plan import Plan
from distmuon.profiling.counter import Counts, LaunchCounter
from distmuon.schedule import Stage
from distmuon.step import LocalParameter, Settings, StepRunner
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


def count_plan(plan: Plan, toolchain: str = "rocm") -> Counts:
    """What a step of this plan launches and dispatches, but for its collectives; with the recipe's settings."""
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
    runner = StepRunner(plan, Buffers(plan, meta), _MovesNothing())
    with torch.no_grad(), LaunchCounter(toolchain) as counter:
        runner.run(tensors)
    return counter.counts


def stage_launches(plan: Plan, counted: Mapping[tuple[str, str], int]) -> dict[str, StageLaunches]:
    """Launches by stage, as the model takes them.

    Args:
        plan: of one rank.
        counted: of its step, by phase and bucket: ``launches_in`` of its counts, or ``operators_in``.
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
