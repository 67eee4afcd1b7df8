"""Buffers: what a step keeps beside parameters and updates, reserved once, in two slots."""

from __future__ import annotations

import torch
from torch import Tensor

from distmuon.plan import Plan
from distmuon.schedule import Stage

SLOTS = 2


class Buffers:
    """The packed and work buffers of a plan.

    Stages that exchange take two slots in turn, as two of them are under way at a time. Work buffers that are filled
    only when a stage computes share one more.

    Args:
        plan: whose stages need them.
        device: where they are.
    """

    def __init__(self, plan: Plan, device: torch.device) -> None:
        exchanging = [stage.name for stage in plan.stages if stage.exchange]
        self._slots = {name: index % SLOTS for index, name in enumerate(exchanging)}
        sizes: dict[tuple[str, int], int] = {}
        for stage in plan.stages:
            for key, size in self._needs(stage).items():
                sizes[key] = max(sizes.get(key, 0), size)
        #: 0, 1, 2, ...: what Newton-Schulz without bias copies makes identities of.
        self.counting: Tensor | None = None
        if plan.options.ns_algorithm != "standard":
            sides = (min(batch.rows, batch.cols) for stage in plan.stages for batch in stage.batches)
            self.counting = torch.arange(max(sides, default=0), dtype=torch.int32, device=device)
        self._bytes = {key: torch.empty(size, dtype=torch.uint8, device=device) for key, size in sizes.items()}

    @property
    def nbytes(self) -> int:
        """Bytes reserved."""
        return sum(buffer.nbytes for buffer in self._bytes.values())

    def holder(self, stage: Stage) -> Tensor:
        """The packed buffer on the holder's side: sent on the way out, received on the way back."""
        assert stage.exchange is not None
        return self._view(self._key("holder", stage), stage.exchange.send_numel, stage.exchange.dtype)

    def owner(self, stage: Stage) -> Tensor:
        """The packed buffer on the owner's side: received on the way out, sent on the way back."""
        assert stage.exchange is not None
        return self._view(self._key("owner", stage), stage.exchange.receive_numel, stage.exchange.dtype)

    def work(self, stage: Stage) -> Tensor:
        """The work buffer."""
        return self._view(self._key("work", stage), stage.work_numel, stage.work_dtype)

    def _needs(self, stage: Stage) -> dict[tuple[str, int], int]:
        needs = {self._key("work", stage): stage.work_bytes}
        if exchange := stage.exchange:
            needs[self._key("holder", stage)] = exchange.send_numel * exchange.dtype.itemsize
            needs[self._key("owner", stage)] = exchange.receive_numel * exchange.dtype.itemsize
        return needs

    def _key(self, what: str, stage: Stage) -> tuple[str, int]:
        filled_early = stage.exchange is not None and (what != "work" or bool(stage.moves))
        return what, self._slots[stage.name] if filled_early else SLOTS

    def _view(self, key: tuple[str, int], numel: int, dtype: torch.dtype) -> Tensor:
        return self._bytes[key][: numel * dtype.itemsize].view(dtype)
