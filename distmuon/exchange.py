"""The exchange: packed all-to-alls between the holders of regions and the owners of matrices."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from distmuon.buffers import Buffers
from distmuon.plan import Plan
from distmuon.ranges import phase
from distmuon.schedule import Stage

Groups = Mapping[tuple[int, ...], dist.ProcessGroup]


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
        self._groups = groups
        self._buffers = buffers
        self._work: dict[str, dist.Work] = {}
        for ranks in dict.fromkeys(stage.exchange.ranks for stage in plan.stages if stage.exchange):
            token = torch.zeros(len(ranks), device=device)
            dist.all_to_all_single(torch.empty_like(token), token, group=groups[ranks])

    def send(self, stage: Stage) -> None:
        """Start bringing regions to their owners."""
        assert stage.exchange is not None
        splits = stage.exchange.receive_splits, stage.exchange.send_splits
        self._start(stage, self._buffers.owner(stage), self._buffers.holder(stage), *splits)

    def send_back(self, stage: Stage) -> None:
        """Start bringing results back to the holders."""
        assert stage.exchange is not None
        splits = stage.exchange.send_splits, stage.exchange.receive_splits
        self._start(stage, self._buffers.holder(stage), self._buffers.owner(stage), *splits)

    def wait(self, stage: Stage) -> None:
        """Wait for the exchange of this stage that was started last; on a GPU the stream waits, not the host."""
        with phase("wait", stage.name):
            self._work.pop(stage.name).wait()

    def _start(
        self, stage: Stage, output: Tensor, source: Tensor, output_splits: tuple[int, ...], splits: tuple[int, ...]
    ) -> None:
        assert stage.exchange is not None
        with phase("all_to_all", stage.name):
            self._work[stage.name] = dist.all_to_all_single(
                output,
                source,
                list(output_splits),
                list(splits),
                group=self._groups[stage.exchange.ranks],
                async_op=True,
            )
