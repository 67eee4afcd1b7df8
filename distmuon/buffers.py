"""Buffers: what a step keeps beside parameters and updates, reserved once, in two slots."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from distmuon.planning.plan import Plan
from distmuon.planning.schedule import Stage

SLOTS = 2

Key = tuple[str, int]  # which buffer of a stage, and the slot it is in


class Buffers:
    """The packed and work buffers of a plan.

    Stages that exchange take two slots in turn, as two of them are under way at a time. Work buffers that are filled
    only when a stage computes share one more.

    Args:
        plan: whose stages need them.
        device: where they are.
    """

    def __init__(self, plan: Plan, device: torch.device) -> None:
        self._slots = _slots(plan)
        sizes = buffer_bytes(plan)
        #: 0, 1, 2, ...: what Newton-Schulz without bias copies makes identities of.
        self.counting: Tensor | None = None
        if plan.options.ns_algorithm != "standard":
            sides = (min(batch.rows, batch.cols) for stage in plan.stages for batch in stage.batches)
            self.counting = torch.arange(max(sides, default=0), dtype=torch.int32, device=device)
        self._bytes = {key: self._reserve(key, size, plan, device) for key, size in sizes.items()}

    @property
    def nbytes(self) -> int:
        """Bytes reserved."""
        return sum(buffer.nbytes for buffer in self._bytes.values())

    def holder(self, stage: Stage) -> Tensor:
        """The packed buffer on the holder's side: sent on the way out, received on the way back."""
        assert stage.exchange is not None
        return self._view(_key("holder", stage, self._slots), stage.exchange.holder_bytes, stage.exchange.dtype)

    def owner(self, stage: Stage) -> Tensor:
        """The packed buffer on the owner's side: received on the way out, sent on the way back."""
        assert stage.exchange is not None
        return self._view(_key("owner", stage, self._slots), stage.exchange.owner_bytes, stage.exchange.dtype)

    def work(self, stage: Stage) -> Tensor:
        """The work buffer."""
        return self._view(_key("work", stage, self._slots), stage.work_bytes, stage.work_dtype)

    def _reserve(self, key: Key, size: int, plan: Plan, device: torch.device) -> Tensor:
        try:
            return torch.empty(size, dtype=torch.uint8, device=device)
        except RuntimeError as error:
            largest = max(plan.stages, key=lambda stage: _needs(stage, self._slots).get(key, 0))
            raise RuntimeError(
                f"no room for the {key[0]} buffer of bucket {largest.name!r}, {size} bytes: make buckets smaller "
                f"({str(error).splitlines()[0]})"
            ) from error

    def _view(self, key: Key, size: int, dtype: torch.dtype) -> Tensor:
        return self._bytes[key][:size].view(dtype)


def buffer_bytes(plan: Plan) -> dict[Key, int]:
    """Bytes of each buffer that the plan's stages need."""
    slots = _slots(plan)
    sizes: dict[Key, int] = {}
    for stage in plan.stages:
        for key, size in _needs(stage, slots).items():
            sizes[key] = max(sizes.get(key, 0), size)
    return sizes


def peak_bytes(plan: Plan) -> int:
    """Bytes that a step holds at once beside parameters, gradients and momenta, at most.

    These are the buffers, and the updates of the stages under way (:func:`under_way`). What one batch of Newton-Schulz
    holds for itself comes on top; ``max_batch_bytes`` bounds it.
    """
    updates = (sum(map(plan.update_bytes, stages)) for stages in under_way(plan))
    return sum(buffer_bytes(plan).values()) + max(updates, default=0)


def under_way(plan: Plan) -> list[tuple[Stage, ...]]:
    """For each stage, those that have begun and not finished while it computes: they hold updates.

    As :mod:`distmuon.step` runs them: before a stage that exchanges computes, the next such stage begins, and the one
    before finishes to make room for it.
    """
    upcoming = [stage for stage in plan.stages if stage.exchange]
    alive = [upcoming.pop(0)] if upcoming else []
    found: list[tuple[Stage, ...]] = []
    for stage in plan.stages:
        if stage.exchange and upcoming:
            alive = [stage, upcoming.pop(0)]
        found.append(tuple(alive) if stage.exchange else (*alive, stage))
    return found


def _needs(stage: Stage, slots: Mapping[str, int]) -> dict[Key, int]:
    """Bytes that one stage needs of each buffer."""
    needs = {_key("work", stage, slots): stage.work_bytes}
    if exchange := stage.exchange:
        needs[_key("holder", stage, slots)] = exchange.holder_bytes
        needs[_key("owner", stage, slots)] = exchange.owner_bytes
    return needs


def _slots(plan: Plan) -> dict[str, int]:
    exchanging = [stage.name for stage in plan.stages if stage.exchange]
    return {name: index % SLOTS for index, name in enumerate(exchanging)}


def _key(what: str, stage: Stage, slots: Mapping[str, int]) -> Key:
    filled_early = stage.exchange is not None and (what != "work" or bool(stage.moves))
    return what, slots[stage.name] if filled_early else SLOTS
