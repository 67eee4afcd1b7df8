"""One step: the stages of a plan as a pipeline over the local tensors of a rank.

    begin    momentum, Nesterov update, pack, start the exchange
    compute  wait, unpack, Newton-Schulz of owned matrices, repack, start the way back, Newton-Schulz of local matrices
    finish   wait, unpack into the update, weight decay, update

The next stage that exchanges begins before one computes, so its exchange flies meanwhile; a stage finishes after the
stages without an exchange that follow it have computed, so they fill the wait for its way back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from distmuon.exchange import Exchanger
from distmuon.newton_schulz import orthogonalize_
from distmuon.packing import copy_regions_
from distmuon.plan import Batch, Exchange, Plan, Stage, Transfer
from distmuon.ranges import phase
from distmuon.variants import Variant


@dataclass(frozen=True)
class Settings:
    """The settings of a parameter's group, as numbers; names and meaning are those of ``torch.optim.Muon``."""

    lr: float
    weight_decay: float
    momentum: float
    nesterov: bool
    ns_coefficients: tuple[float, float, float]
    eps: float
    ns_steps: int
    adjust_lr_fn: str | None

    def adjusted_lr(self, rows: int, cols: int) -> float:
        """The learning rate of a rows x cols matrix, by the rules and with the rounding of ``torch.optim.Muon``."""
        if self.adjust_lr_fn == "match_rms_adamw":
            return self.lr * (0.2 * math.sqrt(max(rows, cols)))
        return self.lr * math.sqrt(max(1, rows / cols))


@dataclass(frozen=True)
class LocalParameter:
    """The local tensors of a parameter, each as (batch, rows, cols), and its settings."""

    parameter: Tensor
    gradient: Tensor
    momentum: Tensor
    settings: Settings


class Place(NamedTuple):
    """Where a region or a batch lies in a contiguous tensor: ``size``, ``stride`` and ``offset``, in elements."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def of(self, tensor: Tensor) -> Tensor:
        """The view of ``tensor``."""
        return tensor.as_strided(self.size, self.stride, tensor.storage_offset() + self.offset)


def _rectangle(rows: int, cols: int, width: int, offset: int) -> Place:
    """A rectangle in rows of ``width``; one row has the stride of a dense one, as fused copies compare strides."""
    return Place((rows, cols), (width if rows > 1 else cols, 1), offset)


def _batch(batch: Batch) -> Place:
    """One matrix as 2-D, several as 3-D."""
    rows, cols = batch.rows, batch.cols
    if batch.matrices == 1:
        return Place((rows, cols), (cols, 1), batch.offset)
    return Place((batch.matrices, rows, cols), (rows * cols, cols, 1), batch.offset)


class StepRunner:
    """Runs the steps of a plan.

    Args:
        plan: this rank's plan.
        exchanger: for the plan's exchanges.
        variant: the ways of packing.
        ns_dtype: of Newton-Schulz.
    """

    def __init__(self, plan: Plan, exchanger: Exchanger, variant: Variant, ns_dtype: torch.dtype) -> None:
        self._stages = [_StageRunner(stage, plan, exchanger, variant, ns_dtype) for stage in plan.stages]

    def run(self, tensors: Sequence[LocalParameter]) -> None:
        """Update the parameters in place; ``tensors`` has one entry for each parameter of the plan."""
        exchanging = iter([stage for stage in self._stages if stage.exchanges])
        unfinished: _StageRunner | None = None
        upcoming = next(exchanging, None)
        if upcoming:
            upcoming.begin(tensors)
        for stage in self._stages:
            if not stage.exchanges:
                stage.begin(tensors)
                stage.compute(tensors)
                stage.finish(tensors)
                continue
            if unfinished:  # it has the slot that the next exchange needs
                unfinished.finish(tensors)
            upcoming = next(exchanging, None)
            if upcoming:
                upcoming.begin(tensors)
            stage.compute(tensors)
            unfinished = stage
        if unfinished:
            unfinished.finish(tensors)


class _Copy(NamedTuple):
    """A region that travels: its view of the packed buffer, and its place in the unpacked tensor."""

    packed: Tensor
    place: Place


class _StageRunner:
    """One stage; views of the packed buffers and places in other tensors are made once."""

    def __init__(self, stage: Stage, plan: Plan, exchanger: Exchanger, variant: Variant, ns_dtype: torch.dtype) -> None:
        self._stage = stage
        self._exchanger = exchanger
        self._packing = variant.packing
        self._ns_dtype = ns_dtype
        self._device = exchanger.device
        self._local = [(batch.parameter, _batch(batch)) for batch in stage.local]
        self._owned = [(batch.parameter, _batch(batch)) for batch in stage.owned]
        self._pieces = {index: plan.pieces(index) for index in stage.parameters}
        self._cols = {index: plan.parameters[index].cols for index in stage.parameters}
        self._sources: dict[int, Tensor] = {}
        self._updates: dict[int, Tensor] = {}
        if exchange := stage.exchange:
            shapes = {index: plan.parameters[index].local_shape3(plan.rank) for index in stage.parameters}

            def held(transfer: Transfer) -> Place:
                _, rows, cols = shapes[exchange.matrices[transfer.matrix].parameter]
                region = transfer.region
                batch, row, col = region.local
                return _rectangle(region.rows, region.cols, cols, (batch * rows + row) * cols + col)

            def staged(transfer: Transfer) -> Place:
                cols, region = exchange.matrices[transfer.matrix].cols, transfer.region
                offset = exchange.staging[transfer.matrix] + region.row * cols + region.col
                return _rectangle(region.rows, region.cols, cols, offset)

            holder = exchanger.holder_buffer(stage.name, exchange)
            owner = exchanger.owner_buffer(stage.name, exchange)
            self._sends = _by_parameter(exchange, exchange.sends, holder, held)
            self._receives = _by_parameter(exchange, exchange.receives, owner, staged)

    @property
    def exchanges(self) -> bool:
        return self._stage.exchange is not None

    def begin(self, tensors: Sequence[LocalParameter]) -> None:
        stage = self._stage
        with phase("momentum", stage.name):
            for index in stage.parameters:
                self._begin_update(index, tensors[index])
        if stage.exchange:
            with phase("pack", stage.name):
                copy_regions_(
                    self._packing,
                    (
                        ([copy.packed for copy in copies], [copy.place.of(self._sources[index]) for copy in copies])
                        for index, copies in self._sends.items()
                    ),
                )
            self._exchanger.send(stage.name, stage.exchange)

    def compute(self, tensors: Sequence[LocalParameter]) -> None:
        stage = self._stage
        if exchange := stage.exchange:
            self._exchanger.wait(stage.name)
            staging = torch.empty(exchange.staging_numel, dtype=exchange.dtype, device=self._device)
            unpacked = [
                ([copy.place.of(staging) for copy in copies], [copy.packed for copy in copies])
                for copies in self._receives.values()
            ]
            with phase("unpack", stage.name):
                copy_regions_(self._packing, unpacked)
            with phase("newton_schulz", stage.name):
                for index, place in self._owned:
                    matrices = place.of(staging)
                    self._orthogonalize_(matrices, matrices, tensors[index].settings)
            with phase("repack", stage.name):
                copy_regions_(self._packing, ((packed, places) for places, packed in unpacked))
            self._exchanger.send_back(stage.name, exchange)
        with phase("newton_schulz", stage.name):
            for index, place in self._local:
                out, matrices = place.of(self._updates[index]), place.of(self._sources[index])
                self._orthogonalize_(out, matrices, tensors[index].settings)

    def finish(self, tensors: Sequence[LocalParameter]) -> None:
        stage = self._stage
        if stage.exchange:
            self._exchanger.wait(stage.name)
            with phase("return_unpack", stage.name):
                copy_regions_(
                    self._packing,
                    (
                        ([copy.place.of(self._updates[index]) for copy in copies], [copy.packed for copy in copies])
                        for index, copies in self._sends.items()
                    ),
                )
        with phase("apply", stage.name):
            for index in stage.parameters:
                self._apply(index, tensors[index])
        self._sources.clear()
        self._updates.clear()

    def _begin_update(self, index: int, local: LocalParameter) -> None:
        """Momentum, and what is to be orthogonalised: a contiguous source, never the momentum itself changed."""
        settings = local.settings
        local.momentum.lerp_(local.gradient, 1 - settings.momentum)
        update = torch.empty_like(local.momentum, memory_format=torch.contiguous_format)
        self._updates[index] = update
        if settings.nesterov:
            self._sources[index] = torch.lerp(local.gradient, local.momentum, settings.momentum, out=update)
        else:
            self._sources[index] = local.momentum.contiguous()

    def _orthogonalize_(self, out: Tensor, matrices: Tensor, settings: Settings) -> None:
        orthogonalize_(
            out,
            matrices,
            ns_coefficients=settings.ns_coefficients,
            ns_steps=settings.ns_steps,
            eps=settings.eps,
            ns_dtype=self._ns_dtype,
        )

    def _apply(self, index: int, local: LocalParameter) -> None:
        settings, parameter, update = local.settings, local.parameter, self._updates[index]
        parameter.mul_(1 - settings.lr * settings.weight_decay)
        pieces = self._pieces[index]
        for row, rows, matrix_rows in pieces:
            target, change = parameter, update
            if len(pieces) > 1:
                target, change = parameter.narrow(1, row, rows), update.narrow(1, row, rows)
            if matrix_rows > self._cols[index] and change.dtype == torch.bfloat16 and change.device.type == "cpu":
                # torch.optim.Muon adds the transpose of a wide result here. On a CPU a strided bf16 operand is rounded
                # before it is added, a dense one is not.
                change = change.mT.contiguous().mT
            target.add_(change, alpha=-settings.adjusted_lr(matrix_rows, self._cols[index]))


def _by_parameter(
    exchange: Exchange, transfers: Iterable[Transfer], buffer: Tensor, place: Callable[[Transfer], Place]
) -> dict[int, list[_Copy]]:
    """The copies of each parameter, for a packed buffer on one side and places in another tensor."""
    copies: dict[int, list[_Copy]] = {}
    for transfer in transfers:
        rows, cols = transfer.region.rows, transfer.region.cols
        packed = _rectangle(rows, cols, cols, transfer.offset).of(buffer)
        parameter = exchange.matrices[transfer.matrix].parameter
        copies.setdefault(parameter, []).append(_Copy(packed, place(transfer)))
    return copies
