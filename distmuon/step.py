"""One step: the stages of a plan as a pipeline over the local tensors of a rank.

    begin    momentum, Nesterov update, pack, start the exchange
    compute  wait, unpack, Newton-Schulz of owned matrices, repack, start the way back, Newton-Schulz of local matrices
    finish   wait, unpack into the update, weight decay, update

The next stage that exchanges begins before one computes, so its exchange flies meanwhile; a stage finishes after the
stages without an exchange that follow it have computed, so they fill the wait for its way back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import NamedTuple

import torch
from torch import Tensor

from distmuon import elementwise
from distmuon.buffers import Buffers
from distmuon.elementwise import Scalar
from distmuon.exchange import Exchanger
from distmuon.newton_schulz import Results, Scratch, orthogonalize_
from distmuon.packing import copy_group_, group_copies
from distmuon.planning.placement import ParameterSpec
from distmuon.planning.places import Place
from distmuon.planning.plan import Plan
from distmuon.planning.schedule import Copy, Stage, Way
from distmuon.ranges import phase
from distmuon.settings import Settings


class LocalParameter(NamedTuple):
    """The local tensors of a parameter, as they are stored, and its settings.

    Without a gradient it is left alone, as on all ranks that share it; zeros take the place of its update.
    """

    parameter: Tensor
    gradient: Tensor | None
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
        scratch = Scratch(keep=plan.options.capturable)
        self._stages = [_StageRunner(stage, plan, buffers, exchanger, scratch, orthogonalize) for stage in plan.stages]
        self._fused = plan.options.variant.elementwise == "bucket"
        self._scratch = scratch if plan.options.capturable else None
        #: A parameter of each kind.
        self._kinds = {_kind(spec): index for index, spec in enumerate(plan.parameters)}

    def run(self, tensors: Sequence[LocalParameter]) -> None:
        """Update the parameters in place; ``tensors`` has one entry for each parameter of the plan."""
        rates = {}
        for kind, index in self._kinds.items():
            results = self._scratch.results("rates", kind) if self._scratch else None
            rates[kind] = _Rates(tensors[index].settings, tensors[index].parameter.dtype, self._fused, results)
        upcoming = [stage for stage in self._stages if stage.exchanges]
        unfinished: list[_StageRunner] = []
        hide = bool(upcoming)  # the first exchange, which no earlier stage hides, behind what is ready
        if upcoming:
            upcoming.pop(0).begin(tensors)
        for stage in self._stages:
            if not stage.exchanges:
                stage.begin(tensors)
                stage.compute(tensors)
                stage.finish(tensors, rates)
                continue
            if upcoming:
                if unfinished:  # it has the slot that the next exchange needs
                    unfinished.pop().finish(tensors, rates)
                upcoming.pop(0).begin(tensors)
            stage.compute(tensors, ready_first=hide)
            hide = False
            unfinished.append(stage)
        for stage in unfinished:
            stage.finish(tensors, rates)


class _Kind(NamedTuple):
    """What parameters must share to be handled by one elementwise operator."""

    group: int
    dtype: torch.dtype


def _kind(spec: ParameterSpec) -> _Kind:
    return _Kind(spec.group, spec.dtype)


class _Rates:
    """What the parameters and updates of a kind are multiplied by in one step, each made once, when it is first needed.

    Numbers; but 0-dim tensors among ``results``, if there are any, as nothing is read to the host then.
    """

    def __init__(self, settings: Settings, dtype: torch.dtype, fused: bool, results: Results | None) -> None:
        self._settings = settings
        self._dtype = dtype  # of the parameters
        self._fused = fused
        self._results = results
        self._alphas: dict[float, Scalar] = {}

    @cached_property
    def decay(self) -> Scalar:
        """Of the parameters."""
        decay = self._times_lr("decay", -self._settings.weight_decay)
        if isinstance(decay, Tensor):
            return decay.add_(1)
        return elementwise.factor(self._fused, 1 + decay, self._dtype)

    def alpha(self, rows: int, cols: int) -> Scalar:
        """Of the updates of rows x cols matrices, before they are added; one object for all of one ratio."""
        ratio = self._settings.lr_ratio(rows, cols)
        if ratio not in self._alphas:
            self._alphas[ratio] = self._times_lr(f"alpha {ratio}", -ratio)
        return self._alphas[ratio]

    def _times_lr(self, name: str, number: float) -> Scalar:
        if self._results is None:
            return float(self._settings.lr * number)  # a tensor rounds the product to its dtype, as in torch.optim.Muon
        return self._results(name, torch.mul, self._settings.lr, number)


class _Link(NamedTuple):
    """A copy between an update and a buffer: ``place`` in the update of ``parameter``, None for all of it; ``view`` of
    the buffer.
    """

    parameter: int
    place: Place | None
    view: Tensor


#: Copies that share a call: between updates and buffers, with the buffers' views once more as a list; and between the
#: work buffer and a packed one.
_Links = list[tuple[list[_Link], list[Tensor]]]
_Pairs = list[tuple[list[Tensor], list[Tensor]]]


class _Piece(NamedTuple):
    """Local rows of a parameter that share a learning rate: the first and how many, None for all of them."""

    parameter: int
    rows: tuple[int, int] | None


class _Together(NamedTuple):
    """Parameters that one call of an elementwise operator takes, and their pieces by the shape of their matrices."""

    kind: _Kind
    parameters: list[int]
    pieces: dict[tuple[int, int], list[_Piece]]


class _StageRunner:
    """One stage. Views of buffers, places in updates and lists of what is handled together are made once."""

    def __init__(
        self,
        stage: Stage,
        plan: Plan,
        buffers: Buffers,
        exchanger: Exchanger,
        scratch: Scratch,
        orthogonalize: Callable[..., None],
    ) -> None:
        options = plan.options
        self._stage = stage
        self._exchanger = exchanger
        self._sources: dict[int, Tensor] = {}
        self._updates: dict[int, Tensor] = {}
        self._static = scratch.results("updates", stage.name) if options.capturable else None
        self._casts = options.momentum_dtype is not None
        self._fused = options.variant.elementwise == "bucket"
        self._together = _together(stage, plan, self._fused)
        self._orthogonalize_ = partial(
            orthogonalize,
            ns_dtype=options.ns_dtype,
            ns_algorithm=options.ns_algorithm,
            scale_free=options.scale_free,
            counting=buffers.counting,
            max_bytes=options.max_batch_bytes,
            scratch=scratch,
        )

        work = buffers.work(stage)
        self._in_work = [(batch, batch.place.of(work)) for batch in stage.batches if batch.in_work]
        self._in_update = [batch for batch in stage.batches if not batch.in_work]
        self._packing = options.variant.packing
        exchange = stage.exchange
        out, back = (exchange.out, exchange.back) if exchange else (None, None)
        self._fetches = out is not None
        copies = partial(_copies, stage, plan, buffers, work)
        self._homeward, self._leaving = copies(back)
        self._outward, self._arriving = (self._homeward, self._leaving) if out is back else copies(out)

    @property
    def exchanges(self) -> bool:
        """Whether anything travels."""
        return self._stage.exchange is not None

    def begin(self, tensors: Sequence[LocalParameter]) -> None:
        """Momentum, Nesterov update, pack, start the exchange."""
        with phase("momentum", self._stage.name):
            for together in self._together:
                if present := [index for index in together.parameters if tensors[index].gradient is not None]:
                    self._begin_updates(present, [tensors[index] for index in present])
            for index in self._stage.parameters:
                if tensors[index].gradient is None:
                    zeros = torch.zeros_like(tensors[index].momentum, memory_format=torch.contiguous_format)
                    self._updates[index] = self._sources[index] = zeros
        with phase("pack", self._stage.name):
            for links, views in self._outward:
                copy_group_(self._packing, views, _updates_of(links, self._sources))
        if self._fetches:
            self._exchanger.send(self._stage)

    def compute(self, tensors: Sequence[LocalParameter], *, ready_first: bool = True) -> None:
        """Newton-Schulz: what arrives, and what is ready before it or while the results are on their way back."""
        name = self._stage.name
        if ready_first:
            self._orthogonalize_ready(tensors)
        if self.exchanges:
            if self._fetches:
                self._exchanger.wait(self._stage)
            with phase("unpack", name):
                for places, packed in self._arriving:
                    copy_group_(self._packing, places, packed)
            with phase("newton_schulz", name):
                self._orthogonalize_in_work(tensors, ready=False)
            with phase("repack", name):
                for places, packed in self._leaving:
                    copy_group_(self._packing, packed, places)
            self._exchanger.send_back(self._stage)
        if not ready_first:
            self._orthogonalize_ready(tensors)

    def finish(self, tensors: Sequence[LocalParameter], rates: Mapping[_Kind, _Rates]) -> None:
        """Wait for the results, unpack them into the updates, weight decay, update."""
        if self.exchanges:
            self._exchanger.wait(self._stage)
        with phase("return_unpack", self._stage.name):
            for links, views in self._homeward:
                copy_group_(self._packing, _updates_of(links, self._updates), views)
        with phase("apply", self._stage.name):
            for together in self._together:
                self._apply(together, tensors, rates[together.kind])
        self._sources.clear()
        self._updates.clear()

    def _begin_updates(self, indices: Sequence[int], local: Sequence[LocalParameter]) -> None:
        """Momentum, and what is to be orthogonalised: contiguous, and never the momentum itself changed."""
        settings = local[0].settings
        momenta = [each.momentum for each in local]
        gradients = [each.gradient for each in local if each.gradient is not None]
        cast = self._casts and any(m.dtype != g.dtype for m, g in zip(momenta, gradients, strict=True))
        updates = None
        if self._static or cast:
            updates = [self._update_like(index, momentum) for index, momentum in zip(indices, momenta, strict=True)]
            if cast or settings.nesterov:
                torch._foreach_copy_(updates, gradients)
                gradients = updates
        elementwise.lerp_(self._fused, momenta, gradients, 1 - settings.momentum)
        if settings.nesterov and gradients is updates:
            elementwise.lerp_(self._fused, updates, momenta, settings.momentum)
        elif settings.nesterov:
            mixed = elementwise.lerp(self._fused, gradients, momenta, settings.momentum)
            updates = [tensor.contiguous() for tensor in mixed]
        elif updates is None:
            updates = [self._update_like(index, momentum) for index, momentum in zip(indices, momenta, strict=True)]
        sources = updates if settings.nesterov else [tensor.contiguous() for tensor in momenta]
        self._updates.update(zip(indices, updates, strict=True))
        self._sources.update(zip(indices, sources, strict=True))

    def _update_like(self, index: int, momentum: Tensor) -> Tensor:
        """A contiguous tensor for the update of a parameter; made once, if a step must make no storage."""
        if self._static:
            return self._static.empty(f"{index}", momentum, momentum.shape, momentum.dtype)
        return torch.empty_like(momentum, memory_format=torch.contiguous_format)

    def _orthogonalize_ready(self, tensors: Sequence[LocalParameter]) -> None:
        with phase("newton_schulz", self._stage.name):
            self._orthogonalize_in_work(tensors, ready=True)
            for batch in self._in_update:
                matrices, out = (batch.place.of(each[batch.parameter]) for each in (self._sources, self._updates))
                settings = tensors[batch.parameter].settings
                self._orthogonalize_(matrices, out, triples=settings.ns_coefficients, eps=settings.eps)

    def _orthogonalize_in_work(self, tensors: Sequence[LocalParameter], *, ready: bool) -> None:
        for batch, matrices in self._in_work:
            if batch.ready == ready:
                settings = tensors[batch.parameter].settings
                self._orthogonalize_(matrices, triples=settings.ns_coefficients, eps=settings.eps)

    def _apply(self, together: _Together, tensors: Sequence[LocalParameter], rates: _Rates) -> None:
        """Weight decay and update of what has a gradient; pieces of one learning rate are handled together."""
        present = {index for index in together.parameters if tensors[index].gradient is not None}
        if not present:
            return
        elementwise.mul_(self._fused, [tensors[index].parameter for index in sorted(present)], rates.decay)
        scaled: dict[Scalar, tuple[list[Tensor], list[Tensor]]] = {}
        for (rows, cols), all_pieces in together.pieces.items():
            pieces = [piece for piece in all_pieces if piece.parameter in present]
            if not pieces:
                continue
            targets, changes = scaled.setdefault(rates.alpha(rows, cols), ([], []))
            targets += _rows_of(pieces, [tensors[index].parameter for index, _ in pieces])
            new = _rows_of(pieces, [self._updates[index] for index, _ in pieces])
            if rows > cols and new[0].dtype == torch.bfloat16 and new[0].device.type == "cpu":
                # torch.optim.Muon adds the transpose of a wide result here. On a CPU a strided bf16 operand is rounded
                # before it is added, a dense one is not.
                new = [change.mT.contiguous().mT for change in new]
            changes += new
        for alpha, (targets, changes) in scaled.items():
            elementwise.add_(self._fused, targets, changes, alpha)


def _together(stage: Stage, plan: Plan, fused: bool) -> list[_Together]:
    """One parameter each, or all of a kind."""
    found: dict[object, _Together] = {}
    for index in stage.parameters:
        spec = plan.parameters[index]
        together = found.setdefault(_kind(spec) if fused else index, _Together(_kind(spec), [], {}))
        together.parameters.append(index)
        pieces = plan.pieces(index)
        for row, rows, matrix_rows in pieces:
            piece = _Piece(index, (row, rows) if len(pieces) > 1 else None)
            together.pieces.setdefault((matrix_rows, spec.cols), []).append(piece)
    return list(found.values())


def _rows_of(pieces: Sequence[_Piece], tensors: Sequence[Tensor]) -> list[Tensor]:
    """The rows of each piece, of every slice of a 3-D tensor."""
    return [
        tensor if rows is None else tensor.narrow(-2, *rows) for (_, rows), tensor in zip(pieces, tensors, strict=True)
    ]


def _updates_of(links: Sequence[_Link], updates: Mapping[int, Tensor]) -> list[Tensor]:
    """The other sides of the links."""
    return [updates[parameter] if place is None else place.of(updates[parameter]) for parameter, place, _ in links]


def _copies(stage: Stage, plan: Plan, buffers: Buffers, work: Tensor, way: Way | None) -> tuple[_Links, _Pairs]:
    """What is copied one way: between updates and the holder's or the work buffer, and between that and the owner's."""
    packing = plan.options.variant.packing
    shapes = {index: plan.parameters[index].local_shape(plan.rank) for index in stage.parameters}
    links = _links(group_copies(packing, stage.moves), work, shapes)
    pairs: _Pairs = []
    if way:
        links += _links(group_copies(packing, way.held), buffers.holder(stage), shapes)
        owner = buffers.owner(stage)
        for group in group_copies(packing, way.owned):
            pairs.append(([copy.place.of(work) for copy in group], [copy.packed.of(owner) for copy in group]))
    if packing == "bucket":
        links = _merge(links, plan.parameters)
    return [(group, [link.view for link in group]) for group in links], pairs


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


def _merge(groups: Sequence[list[_Link]], specs: Sequence[ParameterSpec]) -> list[list[_Link]]:
    """Join the dense groups of several buffers where both sides have one dtype each."""
    merged: dict[object, list[_Link]] = {}
    for group in groups:
        for link in group:
            dense = link.view.is_contiguous() and (link.place is None or link.place.dense)
            key = (link.view.dtype, specs[link.parameter].dtype) if dense else id(link)
            merged.setdefault(key, []).append(link)
    return list(merged.values())
