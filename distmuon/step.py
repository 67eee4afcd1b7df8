"""One step: the stages of a plan as a pipeline over the local tensors of a rank.

    begin    momentum, Nesterov update, pack, start the exchange
    compute  wait, unpack, Newton-Schulz of owned matrices, repack, start the way back, Newton-Schulz of local matrices
    finish   wait, unpack into the update, weight decay, update

The next stage that exchanges begins before one computes, so its exchange flies meanwhile; a stage finishes after the
stages without an exchange that follow it have computed, so they fill the wait for its way back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from distmuon import elementwise
from distmuon.buffers import Buffers
from distmuon.exchange import Exchanger
from distmuon.newton_schulz import Scratch, Triple, orthogonalize_
from distmuon.packing import copy_group_, group_copies
from distmuon.placement import ParameterSpec
from distmuon.places import Place
from distmuon.plan import Plan
from distmuon.ranges import phase
from distmuon.schedule import Copy, Stage


@dataclass(frozen=True)
class Settings:
    """The settings of a parameter's group; names and meaning are those of ``torch.optim.Muon``."""

    lr: float | Tensor
    weight_decay: float
    momentum: float
    nesterov: bool
    ns_coefficients: tuple[Triple, ...]  # of each Newton-Schulz iteration
    eps: float
    adjust_lr_fn: str | None

    def lr_ratio(self, rows: int, cols: int) -> float:
        """The learning rate of a rows x cols matrix relative to ``lr``, by the rules of ``torch.optim.Muon``."""
        if self.adjust_lr_fn == "match_rms_adamw":
            return 0.2 * math.sqrt(max(rows, cols))
        return math.sqrt(max(1, rows / cols))


@dataclass(frozen=True)
class LocalParameter:
    """The local tensors of a parameter, as they are stored, and its settings."""

    parameter: Tensor
    gradient: Tensor
    momentum: Tensor
    settings: Settings


class StepRunner:
    """Runs the steps of a plan.

    Args:
        plan: this rank's plan.
        buffers: of the plan.
        exchanger: for its exchanges.
        orthogonalize: what to call for each batch.
    """

    def __init__(
        self, plan: Plan, buffers: Buffers, exchanger: Exchanger, orthogonalize: Callable[..., None] = orthogonalize_
    ) -> None:
        call = partial(orthogonalize, scratch=Scratch(keep=plan.options.capturable))
        self._stages = [_StageRunner(stage, plan, buffers, exchanger, call) for stage in plan.stages]

    def run(self, tensors: Sequence[LocalParameter]) -> None:
        """Update the parameters in place; ``tensors`` has one entry for each parameter of the plan."""
        upcoming = [stage for stage in self._stages if stage.exchanges]
        unfinished: list[_StageRunner] = []
        hide = bool(upcoming)  # the first exchange, which no earlier stage hides, behind what is ready
        if upcoming:
            upcoming.pop(0).begin(tensors)
        for stage in self._stages:
            if not stage.exchanges:
                stage.begin(tensors)
                stage.compute(tensors)
                stage.finish(tensors)
                continue
            if upcoming:
                if unfinished:  # it has the slot that the next exchange needs
                    unfinished.pop().finish(tensors)
                upcoming.pop(0).begin(tensors)
            stage.compute(tensors, ready_first=hide)
            hide = False
            unfinished.append(stage)
        for stage in unfinished:
            stage.finish(tensors)


class _Link(NamedTuple):
    """A copy between an update and a buffer: ``place`` in the update of ``parameter``, None for all of it; ``view`` of
    the buffer.
    """

    parameter: int
    place: Place | None
    view: Tensor

    def of(self, updates: Mapping[int, Tensor]) -> Tensor:
        """The other side."""
        update = updates[self.parameter]
        return update if self.place is None else self.place.of(update)


class _StageRunner:
    """One stage. Views of buffers, places in updates and lists of what is handled together are made once."""

    def __init__(
        self, stage: Stage, plan: Plan, buffers: Buffers, exchanger: Exchanger, orthogonalize: Callable[..., None]
    ) -> None:
        self._stage = stage
        self._exchanger = exchanger
        self._options = plan.options
        self._counting = buffers.counting
        self._orthogonalize = orthogonalize
        self._kept: dict[Hashable, Tensor] = {}
        self._pieces = {index: plan.pieces(index) for index in stage.parameters}
        self._specs = {index: plan.parameters[index] for index in stage.parameters}
        self._sources: dict[int, Tensor] = {}
        self._updates: dict[int, Tensor] = {}
        self._fused = plan.options.variant.elementwise == "bucket"
        # What one call of an elementwise operator takes: all that share a group and a dtype, or one parameter.
        together: dict[object, list[int]] = {}
        for index, spec in self._specs.items():
            key = (spec.group, spec.dtype) if self._fused else index
            together.setdefault(key, []).append(index)
        self._together = list(together.values())

        work = buffers.work(stage)
        self._in_work = [(batch, batch.place.of(work)) for batch in stage.batches if batch.in_work]
        self._in_update = [batch for batch in stage.batches if not batch.in_work]
        self._packing = packing = plan.options.variant.packing
        shapes = {index: spec.local_shape(plan.rank) for index, spec in self._specs.items()}
        moves = _links(group_copies(packing, stage.moves), work, shapes)
        self._outward, self._homeward = moves, moves
        self._arriving: _Pairs = []
        self._leaving: _Pairs = []
        if exchange := stage.exchange:
            holder, owner = buffers.holder(stage), buffers.owner(stage)
            self._leaving = self._arriving = _pairs(group_copies(packing, exchange.back.owned), work, owner)
            self._homeward = moves + _links(group_copies(packing, exchange.back.held), holder, shapes)
            if exchange.out is exchange.back:
                self._outward = self._homeward
            else:
                out = exchange.out
                self._arriving = _pairs(group_copies(packing, out.owned if out else ()), work, owner)
                self._outward = moves + _links(group_copies(packing, out.held if out else ()), holder, shapes)
        if packing == "bucket":
            self._outward = _merge(self._outward, self._specs)
            self._homeward = _merge(self._homeward, self._specs)

    @property
    def exchanges(self) -> bool:
        """Whether anything travels."""
        return self._stage.exchange is not None

    def begin(self, tensors: Sequence[LocalParameter]) -> None:
        """Momentum, Nesterov update, pack, start the exchange."""
        with phase("momentum", self._stage.name):
            for indices in self._together:
                self._begin_updates(indices, [tensors[index] for index in indices])
        with phase("pack", self._stage.name):
            for group in self._outward:
                copy_group_(self._packing, [link.view for link in group], [link.of(self._sources) for link in group])
        if self._stage.exchange and self._stage.exchange.out:
            self._exchanger.send(self._stage)

    def compute(self, tensors: Sequence[LocalParameter], *, ready_first: bool = True) -> None:
        """Newton-Schulz: what arrives, and what is ready before it or while the results are on their way back."""
        name = self._stage.name
        if ready_first:
            self._orthogonalize_ready(tensors)
        if self.exchanges:
            if self._stage.exchange and self._stage.exchange.out:
                self._exchanger.wait(self._stage)
            with phase("unpack", name):
                for places, packed in self._arriving:
                    copy_group_(self._packing, places, packed)
            with phase("newton_schulz", name):
                for batch, matrices in self._in_work:
                    if not batch.ready:
                        self._orthogonalize_(matrices, None, tensors[batch.parameter].settings)
            with phase("repack", name):
                for places, packed in self._leaving:
                    copy_group_(self._packing, packed, places)
            self._exchanger.send_back(self._stage)
        if not ready_first:
            self._orthogonalize_ready(tensors)

    def finish(self, tensors: Sequence[LocalParameter]) -> None:
        """Wait for the results, unpack them into the updates, weight decay, update."""
        if self.exchanges:
            self._exchanger.wait(self._stage)
        with phase("return_unpack", self._stage.name):
            for group in self._homeward:
                copy_group_(self._packing, [link.of(self._updates) for link in group], [link.view for link in group])
        with phase("apply", self._stage.name):
            self._apply(tensors)
        self._sources.clear()
        self._updates.clear()

    def _begin_updates(self, indices: Sequence[int], local: Sequence[LocalParameter]) -> None:
        """Momentum, and what is to be orthogonalised: contiguous, and never the momentum itself changed."""
        settings = local[0].settings
        momenta, gradients = [each.momentum for each in local], [each.gradient for each in local]
        elementwise.lerp_(self._fused, momenta, gradients, 1 - settings.momentum)
        if self._options.capturable:
            updates = [
                self._static("update", index, gradient) for index, gradient in zip(indices, gradients, strict=True)
            ]
            if settings.nesterov:
                torch._foreach_copy_(updates, gradients)
                elementwise.lerp_(self._fused, updates, momenta, settings.momentum)
        elif settings.nesterov:
            mixed = elementwise.lerp(self._fused, gradients, momenta, settings.momentum)
            updates = [tensor.contiguous() for tensor in mixed]
        else:
            updates = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in momenta]
        sources = updates if settings.nesterov else [tensor.contiguous() for tensor in momenta]
        self._updates |= zip(indices, updates, strict=True)
        self._sources |= zip(indices, sources, strict=True)

    def _static(self, what: str, key: Hashable, like: Tensor) -> Tensor:
        """A contiguous tensor like another one, made once."""
        if (what, key) not in self._kept:
            self._kept[what, key] = torch.empty_like(like, memory_format=torch.contiguous_format)
        return self._kept[what, key]

    def _times(self, what: str, key: Hashable, lr: float | Tensor, factor: float) -> float | Tensor:
        """``factor lr``; of a tensor a tensor, which is made once."""
        if not isinstance(lr, Tensor):
            return lr * factor
        return torch.mul(lr, factor, out=self._static(what, key, lr))

    def _orthogonalize_ready(self, tensors: Sequence[LocalParameter]) -> None:
        with phase("newton_schulz", self._stage.name):
            for batch, matrices in self._in_work:
                if batch.ready:
                    self._orthogonalize_(matrices, None, tensors[batch.parameter].settings)
            for batch in self._in_update:
                out, matrices = (
                    batch.place.of(self._updates[batch.parameter]),
                    batch.place.of(self._sources[batch.parameter]),
                )
                self._orthogonalize_(matrices, out, tensors[batch.parameter].settings)

    def _orthogonalize_(self, matrices: Tensor, out: Tensor | None, settings: Settings) -> None:
        self._orthogonalize(
            matrices,
            out,
            triples=settings.ns_coefficients,
            eps=settings.eps,
            ns_dtype=self._options.ns_dtype,
            ns_algorithm=self._options.ns_algorithm,
            counting=self._counting,
            max_bytes=self._options.max_batch_bytes,
        )

    def _apply(self, tensors: Sequence[LocalParameter]) -> None:
        """Weight decay and update; pieces of one learning rate are handled together."""
        for indices in self._together:
            settings = tensors[indices[0]].settings
            parameters = [tensors[index].parameter for index in indices]
            decay = self._times("decay", indices[0], settings.lr, -settings.weight_decay)
            elementwise.mul_(self._fused, parameters, decay.add_(1) if isinstance(decay, Tensor) else 1 + decay)
            scaled: dict[float, tuple[list[Tensor], list[Tensor]]] = {}
            for index, parameter in zip(indices, parameters, strict=True):
                for row, rows, matrix_rows in self._pieces[index]:
                    target, change = parameter, self._updates[index]
                    cols = self._specs[index].cols
                    if len(self._pieces[index]) > 1:
                        target, change = target.narrow(-2, row, rows), change.narrow(-2, row, rows)
                    if matrix_rows > cols and change.dtype == torch.bfloat16 and change.device.type == "cpu":
                        # torch.optim.Muon adds the transpose of a wide result here. On a CPU a strided bf16 operand is
                        # rounded before it is added, a dense one is not.
                        change = change.mT.contiguous().mT
                    targets, changes = scaled.setdefault(settings.lr_ratio(matrix_rows, cols), ([], []))
                    targets.append(target)
                    changes.append(change)
            for ratio, (targets, changes) in scaled.items():
                alpha = self._times("alpha", (indices[0], ratio), settings.lr, -ratio)
                elementwise.add_(self._fused, targets, changes, alpha)


#: For each group of copies, the places in a work buffer and those in a packed one.
_Pairs = list[tuple[list[Tensor], list[Tensor]]]


def _pairs(groups: Sequence[Sequence[Copy]], work: Tensor, packed: Tensor) -> _Pairs:
    return [([copy.place.of(work) for copy in group], [copy.packed.of(packed) for copy in group]) for group in groups]


def _links(
    groups: Sequence[Sequence[Copy]], buffer: Tensor, shapes: Mapping[int, tuple[int, ...]]
) -> list[list[_Link]]:
    """Copies as views of the buffer; one that is all of an update takes its shape, so that it needs no view of that."""
    return [[_link(copy, buffer, shapes[copy.parameter]) for copy in group] for group in groups]


def _link(copy: Copy, buffer: Tensor, shape: tuple[int, ...]) -> _Link:
    if copy.place.numel == math.prod(shape) and copy.place.dense and copy.packed.dense:
        stride = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
        return _Link(copy.parameter, None, Place(shape, stride, copy.packed.offset).of(buffer))
    return _Link(copy.parameter, copy.place, copy.packed.of(buffer))


def _merge(groups: Sequence[list[_Link]], specs: Mapping[int, ParameterSpec]) -> list[list[_Link]]:
    """Join the dense groups of several buffers where both sides have one dtype each."""
    merged: dict[object, list[_Link]] = {}
    for group in groups:
        for link in group:
            dense = link.view.is_contiguous() and (link.place is None or link.place.dense)
            key = (link.view.dtype, specs[link.parameter].dtype) if dense else id(link)
            merged.setdefault(key, []).append(link)
    return list(merged.values())
