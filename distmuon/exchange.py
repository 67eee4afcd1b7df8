"""The exchange: packed all-to-alls between the holders of regions and the owners of matrices.

One that fails, as a rank died, stopped or came too late, says on which rank, in which bucket and on which way.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from distmuon.agreement import collective_failure
from distmuon.buffers import Buffers
from distmuon.planning.plan import Plan
from distmuon.planning.schedule import Stage, Way
from distmuon.process_groups import Groups
from distmuon.ranges import phase


class _Side(NamedTuple):
    """A packed buffer and how many of its elements go to or come from each rank."""

    buffer: Tensor
    splits: list[int]


class Exchanger:
    """Starts the exchanges of a plan, and waits for them.

    Args:
        plan: whose stages exchange.
        groups: a process group for the ranks of each exchange. Each is warmed here with one small all-to-all, since a
            first exchange that opens connections lazily can deadlock on a large group.
        buffers: of the plan.
        device: of the buffers.
    """

    def __init__(self, plan: Plan, groups: Groups, buffers: Buffers, device: torch.device) -> None:
        self._out: dict[str, tuple[_Side, _Side]] = {}  # from, to
        self._back: dict[str, tuple[_Side, _Side]] = {}
        self._groups: dict[str, dist.ProcessGroup] = {}
        self._work: dict[str, tuple[str, dist.Work]] = {}
        for stage in plan.stages:
            if exchange := stage.exchange:
                holder, owner = buffers.holder(stage), buffers.owner(stage)
                if exchange.out:
                    self._out[stage.name] = _sides(exchange.out, holder, owner)
                self._back[stage.name] = _sides(exchange.back, holder, owner)[::-1]
                self._groups[stage.name] = groups[exchange.ranks]
        for group in dict.fromkeys(self._groups.values()):
            token = torch.zeros(group.size(), device=device)
            try:
                dist.all_to_all_single(torch.empty_like(token), token, group=group)
            except RuntimeError as error:
                raise collective_failure("the first all_to_all, which opens connections,", group, error) from error

    def send(self, stage: Stage) -> None:
        """Start bringing regions to their owners."""
        self._start(stage, "out", *self._out[stage.name])

    def send_back(self, stage: Stage) -> None:
        """Start bringing results back to the holders."""
        self._start(stage, "back", *self._back[stage.name])

    def wait(self, stage: Stage) -> None:
        """Wait for the exchange of this stage that was started last; on a GPU the stream waits, not the host."""
        way, work = self._work.pop(stage.name)
        try:
            with phase("wait", stage.name):
                work.wait()
        except RuntimeError as error:
            raise self._failure(stage, way, error) from error

    def _start(self, stage: Stage, way: str, source: _Side, target: _Side) -> None:
        try:
            with phase("all_to_all", stage.name):
                work = dist.all_to_all_single(
                    target.buffer,
                    source.buffer,
                    target.splits,
                    source.splits,
                    group=self._groups[stage.name],
                    async_op=True,
                )
        except RuntimeError as error:
            raise self._failure(stage, way, error) from error
        self._work[stage.name] = way, work

    def _failure(self, stage: Stage, way: str, error: RuntimeError) -> RuntimeError:
        what = f"the all_to_all of bucket {stage.name!r}, on its way {way},"
        return collective_failure(what, self._groups[stage.name], error)


def _sides(way: Way, holder: Tensor, owner: Tensor) -> tuple[_Side, _Side]:
    """The holder's and the owner's, of the packed buffers as much as this way takes."""
    return (
        _Side(holder[: way.held_numel], list(way.held_splits)),
        _Side(owner[: way.owned_numel], list(way.owned_splits)),
    )
