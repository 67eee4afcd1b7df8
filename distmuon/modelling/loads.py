"""Loads: what each rank of a job has to do in each stage, as the model takes it.

FLOPs and bytes on the wire come from the totals of a plan. Elementwise work is counted in bytes that are read and
written, and launches are those of one rank's plan, given by who counted them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distmuon.modelling.assumptions import Assumptions
from distmuon.planning.options import PlanOptions
from distmuon.planning.placement import ParameterSpec
from distmuon.planning.totals import StageTotals, StepTotals

Numbers = NDArray[np.floating[Any]]
Groups = tuple[NDArray[np.int64], ...]


@dataclass(frozen=True)
class Work:
    """What ranks compute without a pause; an entry a rank.

    Attributes:
        flops: of matrix products.
        memory_bytes: that elementwise work and copies read and write.
        launches: of kernels.
    """

    flops: Numbers
    memory_bytes: Numbers
    launches: Numbers

    def seconds(self, assumptions: Assumptions) -> Numbers:
        """The three one after another: nothing of a rank's work overlaps."""
        computing = self.flops / assumptions.gemm_flops + self.memory_bytes / assumptions.memory_bandwidth
        return computing + self.launches * assumptions.launch_us * 1e-6


@dataclass(frozen=True)
class Traffic:
    """One way of an exchange; an entry a rank.

    Attributes:
        sent: bytes to other ranks.
        received: bytes from other ranks.
        messages: that it sends or receives, whichever are more.
    """

    sent: Numbers
    received: Numbers
    messages: Numbers


@dataclass(frozen=True)
class StageLoad:
    """One stage, on all ranks of a job.

    Attributes:
        name: of the bucket.
        groups: positions of ranks that exchange with one another: all ranks, each once, or none without an exchange.
        begin: momentum, update, packing.
        owned: unpacking, Newton-Schulz of matrices that are brought here, repacking.
        whole: Newton-Schulz of matrices that lie here whole.
        finish: unpacking of results, decay, update.
        out: from holders to owners; None if nothing travels that way.
        back: from owners to holders; None without an exchange.
    """

    name: str
    groups: Groups
    begin: Work
    owned: Work
    whole: Work
    finish: Work
    out: Traffic | None = None
    back: Traffic | None = None

    def __post_init__(self) -> None:
        sizes = {len(array) for work in self.works for array in vars(work).values()}
        if len(sizes) != 1:
            raise ValueError(f"stage {self.name!r}: arrays of {sorted(sizes)} ranks")
        (ranks,) = sizes
        if self.groups and sorted(np.concatenate(self.groups).tolist()) != list(range(ranks)):
            raise ValueError(f"stage {self.name!r}: its groups must hold each of {ranks} ranks once")
        if bool(self.groups) != (self.back is not None) or (self.out and not self.back):
            raise ValueError(f"stage {self.name!r}: groups and a way back come together")

    @property
    def works(self) -> tuple[Work, ...]:
        """In the order of a step."""
        return self.begin, self.owned, self.whole, self.finish

    @property
    def ranks(self) -> int:
        """Ranks of the job."""
        return len(self.begin.flops)


@dataclass(frozen=True)
class StageLaunches:
    """Launches of a rank in one stage, by what they belong to; see :class:`StageLoad`. ``batch`` are those of a call of
    Newton-Schulz, ``exchange`` of unpacking and repacking an owner's matrices.
    """

    begin: float = 0.0
    exchange: float = 0.0
    batch: float = 0.0
    whole: float = 0.0
    finish: float = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            if getattr(self, field.name) < 0:
                raise ValueError(f"launches of {field.name} are {getattr(self, field.name)}")


def loads_of(
    parameters: Iterable[ParameterSpec],
    options: PlanOptions,
    totals: StepTotals,
    launches: Mapping[str, StageLaunches],
    *,
    ns_steps: int = 5,
) -> list[StageLoad]:
    """The loads of a job.

    Bytes read and written, an element: momentum and Nesterov 3 times each, decay 2 and update 3 times; packing and
    unpacking once on either side; Newton-Schulz once for the cast, 4 times in its dtype for norm and scaling, and twice
    an iteration for the bias of the last product. FLOPs are those of the standard algorithm.

    Args:
        parameters: as for :func:`distmuon.planning.totals.step_totals`.
        options: as for it.
        totals: what it gives.
        launches: of one rank, by stage; those of owned matrices are taken a batch and given to each rank for its own
            batches, the others are given to all ranks alike.
        ns_steps: Newton-Schulz iterations.

    Raises:
        ValueError: some rank takes no part in an exchange, as in pipeline parallelism: model each of its stages alone.
    """
    parameter = next(iter(parameters)).dtype.itemsize
    wire = options.wire_dtype(next(iter(parameters)).dtype).itemsize
    ns = options.ns_dtype.itemsize
    orthogonalise = parameter + (4 + 2 * ns_steps) * ns
    loads = []
    for stage in totals.stages:
        counted = launches[stage.name]
        local, owned, whole = stage.local_numel.numpy(), stage.owned_numel.numpy(), stage.whole_numel.numpy()
        batches = stage.batches.numpy()
        exchanged = local - whole
        every = np.ones(len(totals.ranks))
        out, back = _traffic(stage)
        loads.append(
            StageLoad(
                stage.name,
                tuple(group.numpy() for group in stage.groups),
                begin=Work(
                    0 * every,
                    6.0 * parameter * local + (parameter + wire) * exchanged,
                    counted.begin * every,
                ),
                owned=Work(
                    2.0 * ns_steps * stage.owned_cost.numpy(),
                    (4.0 * wire + orthogonalise) * owned,
                    counted.batch * batches + counted.exchange * (batches > 0),
                ),
                whole=Work(
                    2.0 * ns_steps * stage.whole_cost.numpy(), orthogonalise * whole * 1.0, counted.whole * every
                ),
                finish=Work(
                    0 * every,
                    5.0 * parameter * local + (parameter + wire) * exchanged,
                    counted.finish * every,
                ),
                out=out,
                back=back,
            )
        )
    return loads


def _traffic(stage: StageTotals) -> tuple[Traffic | None, Traffic | None]:
    """Both ways; as if each rank that sends anything sent some to every owner of its group."""
    if not stage.groups:
        return None, None
    owns = stage.matrices.numpy() > 0
    owners, others = np.zeros(len(owns)), np.zeros(len(owns))
    for group in stage.groups:
        owners[group] = np.count_nonzero(owns[group])
        others[group] = len(group) - 1
    messages = np.maximum(owners - owns, others * owns)
    ways = []
    for way in ((stage.out_sent, stage.out_received), (stage.back_sent, stage.back_received)):
        sent, received = (counts.numpy().astype(float) for counts in way)
        ways.append(Traffic(sent, received, messages * ((sent > 0) | (received > 0))))
    out, back = ways
    return out if out.sent.any() else None, back
