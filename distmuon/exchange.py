"""The exchange: packed all-to-alls between the holders of regions and the owners of matrices, in two slots of
buffers.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from distmuon.plan import Exchange, Plan
from distmuon.ranges import phase

Groups = Mapping[tuple[int, ...], dist.ProcessGroup]

SLOTS = 2


class Exchanger:
    """Runs the exchanges of a plan: buffers reserved once, two slots, so that the next exchange can fly while one
    computes.

    The buffers of a slot serve both ways: what was the send buffer on the way out receives on the way back.

    Args:
        plan: whose exchanges are run, in order.
        groups: a process group for the ranks of each exchange; each is warmed here with one small all-to-all, since a
            first exchange that opens connections lazily can deadlock on a large group.
        device: of the buffers.
    """

    def __init__(self, plan: Plan, groups: Groups, device: torch.device) -> None:
        self.device = device
        self._groups = groups
        exchanges = [(stage.name, stage.exchange) for stage in plan.stages if stage.exchange]
        self._slots = {name: index % SLOTS for index, (name, _) in enumerate(exchanges)}
        self._work: dict[str, dist.Work] = {}
        sizes = [[0, 0] for _ in range(SLOTS)]
        for name, exchange in exchanges:
            slot = sizes[self._slots[name]]
            slot[0] = max(slot[0], exchange.send_numel * exchange.dtype.itemsize)
            slot[1] = max(slot[1], exchange.receive_numel * exchange.dtype.itemsize)
        self._buffers = [[torch.empty(size, dtype=torch.uint8, device=device) for size in slot] for slot in sizes]
        for group in {ranks: groups[ranks] for _, exchange in exchanges for ranks in [exchange.ranks]}.values():
            token = torch.zeros(group.size(), device=device)
            dist.all_to_all_single(torch.empty_like(token), token, group=group)

    @property
    def buffer_bytes(self) -> int:
        """Bytes reserved for all slots."""
        return sum(buffer.nbytes for slot in self._buffers for buffer in slot)

    def holder_buffer(self, name: str, exchange: Exchange) -> Tensor:
        """The flat buffer on the holder's side: packed before :meth:`send`, filled by :meth:`send_back`."""
        return self._view(name, exchange, 0, exchange.send_numel)

    def owner_buffer(self, name: str, exchange: Exchange) -> Tensor:
        """The flat buffer on the owner's side: filled by :meth:`send`, packed before :meth:`send_back`."""
        return self._view(name, exchange, 1, exchange.receive_numel)

    def send(self, name: str, exchange: Exchange) -> None:
        """Start bringing regions to their owners."""
        self._start(
            name,
            exchange,
            self.owner_buffer(name, exchange),
            self.holder_buffer(name, exchange),
            exchange.receive_splits,
            exchange.send_splits,
        )

    def send_back(self, name: str, exchange: Exchange) -> None:
        """Start bringing results back to the holders."""
        self._start(
            name,
            exchange,
            self.holder_buffer(name, exchange),
            self.owner_buffer(name, exchange),
            exchange.send_splits,
            exchange.receive_splits,
        )

    def wait(self, name: str) -> None:
        """Wait for the exchange of this stage that was started last; on a GPU the stream waits, not the host."""
        with phase("wait", name):
            self._work.pop(name).wait()

    def _start(
        self,
        name: str,
        exchange: Exchange,
        output: Tensor,
        source: Tensor,
        output_splits: tuple[int, ...],
        source_splits: tuple[int, ...],
    ) -> None:
        with phase("all_to_all", name):
            self._work[name] = dist.all_to_all_single(
                output,
                source,
                list(output_splits),
                list(source_splits),
                group=self._groups[exchange.ranks],
                async_op=True,
            )

    def _view(self, name: str, exchange: Exchange, side: int, numel: int) -> Tensor:
        buffer = self._buffers[self._slots[name]][side]
        return buffer[: numel * exchange.dtype.itemsize].view(exchange.dtype)
