"""The plan of a step: which rank orthogonalises which matrix, what travels, and where each region lies in a buffer.

Pure: from names, shapes, meshes and placements, with no tensor and no process group, so the plan of any rank of any job
can be made, printed and checked on a laptop. Every rank makes its own; ranks agree because owners and the order of
regions follow from what all of them know.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from distmuon.newton_schulz.costs import gemm_flops
from distmuon.planning.assignment import assign
from distmuon.planning.buckets import make_buckets
from distmuon.planning.drafts import Draft, draft_stages, spread_by_shape
from distmuon.planning.layout import Layout
from distmuon.planning.options import PlanOptions
from distmuon.planning.placement import ParameterSpec, ranks_of
from distmuon.planning.runs import ROWS
from distmuon.planning.schedule import Piece, Stage
from distmuon.planning.sharing import settled
from distmuon.richtext import Shown, counted


@dataclass(frozen=True, repr=False)
class Plan(Shown):
    """The step of one rank: ``stages`` in the order in which they are computed. Prints as a table of this rank's rows
    of :meth:`report`.
    """

    rank: int
    parameters: tuple[ParameterSpec, ...]
    stages: tuple[Stage, ...]
    options: PlanOptions

    def pieces(self, parameter: int) -> tuple[Piece, ...]:
        """The local rows of a parameter by the shape of their matrices; one piece if all are alike."""
        spec = self.parameters[parameter]
        pieces: list[Piece] = []
        for run in spec.runs(self.rank)[ROWS]:
            for start, rows in zip(spec.matrix_starts, spec.matrix_rows, strict=True):
                top, bottom = max(run.start, start), min(run.stop, start + rows)
                if top >= bottom:
                    continue
                if pieces and pieces[-1].matrix_rows == rows:
                    pieces[-1] = pieces[-1]._replace(rows=pieces[-1].rows + bottom - top)
                else:
                    pieces.append(Piece(run.local + top - run.start, bottom - top, rows))
        return tuple(pieces)

    def update_bytes(self, stage: Stage) -> int:
        """Bytes of the updates of a stage: the local shards of its parameters."""
        return sum(self.parameters[index].local_bytes(self.rank) for index in stage.parameters)

    def ranks(self) -> tuple[int, ...]:
        """All ranks that hold a parameter of this plan."""
        return tuple(ranks_of(self.parameters)) or (self.rank,)

    def report(self, ranks: Iterable[int] | None = None, *, ns_steps: int = 5) -> list[dict[str, Any]]:
        """One row a bucket and rank.

        Args:
            ranks: default all ranks of the job; each is planned anew.
            ns_steps: Newton-Schulz iterations, for the FLOPs.

        Returns:
            Rows with ``bucket``, ``rank``, ``parameters`` it handles there, ``matrices`` it orthogonalises,
            ``gemm_flops``, ``sent_bytes`` to and ``received_bytes`` from other ranks (both ways), ``collectives``,
            ``imbalance`` and ``imbalance_to_bound`` of the GEMM cost of matrices brought together (see
            :meth:`distmuon.planning.schedule.Exchange.imbalance`; 1 without any), and ``buffer_bytes``: updates, work
            buffer and packed buffers. ``replicas`` says whether replicas share the bucket's matrices, "shared" or
            "repeated", or "none" there; "mixed" if its parameters differ in that. ``gemm_flops_otherwise`` and
            ``sent_bytes_otherwise`` are what the bucket, by itself, would cost this rank if each parameter that has
            replicas did the other.

            Parameters that need no exchange may leave the bucket that patterns put them into: where matrices are
            batched by shape they go where others of their shape are.
        """
        rows: list[dict[str, Any]] = []
        for rank in self.ranks() if ranks is None else ranks:
            plan = self if rank == self.rank else plan_step(self.parameters, rank, self.options)
            rows.extend(plan._row(stage, ns_steps) | plan._replicas(stage, ns_steps) for stage in plan.stages)
        return rows

    def _row(self, stage: Stage, ns_steps: int) -> dict[str, Any]:
        exchange = stage.exchange
        imbalance, to_bound = exchange.imbalance() if exchange else (1.0, 1.0)
        return {
            "bucket": stage.name,
            "rank": self.rank,
            "parameters": len(stage.parameters),
            "matrices": sum(batch.matrices for batch in stage.batches),
            "gemm_flops": self._gemm_flops([stage], ns_steps),
            "sent_bytes": self._sent_bytes([stage]),
            "received_bytes": exchange.received_bytes(self.rank) if exchange else 0,
            "collectives": len(exchange.ways) if exchange else 0,
            "imbalance": imbalance,
            "imbalance_to_bound": to_bound,
            "buffer_bytes": self.update_bytes(stage)
            + stage.work_bytes
            + (exchange.holder_bytes + exchange.owner_bytes if exchange else 0),
        }

    def _replicas(self, stage: Stage, ns_steps: int) -> dict[str, Any]:
        """The columns of a row that compare with the other way round, for which the bucket is planned anew."""
        specs = [self.parameters[index] for index in stage.parameters]
        replicated = [spec for spec in specs if spec.replica_axes]
        does = {"shared" if self.options.shares(spec) else "repeated" for spec in replicated}
        if len(replicated) < len(specs):
            does.add("none")
        other = self
        stages: tuple[Stage, ...] = (stage,)
        if replicated:
            sharing = frozenset(spec.storage for spec in replicated if spec.storage and not self.options.shares(spec))
            options = replace(self.options, buckets=None, share_replicas=None, sharing=sharing)
            other = plan_step(specs, self.rank, options)
            stages = other.stages
        return {
            "replicas": does.pop() if len(does) == 1 else "mixed",
            "gemm_flops_otherwise": other._gemm_flops(stages, ns_steps),
            "sent_bytes_otherwise": other._sent_bytes(stages),
        }

    def _line(self) -> str:
        matrices = sum(batch.matrices for stage in self.stages for batch in stage.batches)
        return (
            f"rank {self.rank} of {len(self.ranks())}, {self.options.variant.name}: "
            f"{counted(len(self.parameters), 'parameter', 'parameters')} in "
            f"{counted(len(self.stages), 'bucket', 'buckets')}, {counted(matrices, 'matrix', 'matrices')} to "
            f"orthogonalise, {self._sent_bytes(self.stages):,} bytes to send"
        )

    def _table(self) -> tuple[Sequence[str], list[Sequence[object]]]:
        header = (
            "bucket",
            "parameters",
            "matrices",
            "GFLOP",
            "sent (KiB)",
            "received (KiB)",
            "collectives",
            "buffers (KiB)",
        )
        rows = [self._row(stage, ns_steps=5) for stage in self.stages]
        sizes = ("sent_bytes", "received_bytes", "collectives", "buffer_bytes")
        return header, [
            (
                row["bucket"],
                row["parameters"],
                row["matrices"],
                row["gemm_flops"] / 1e9,
                *(row[name] if name == "collectives" else row[name] / 1024 for name in sizes),
            )
            for row in rows
        ]

    def _gemm_flops(self, stages: Iterable[Stage], ns_steps: int) -> int:
        return sum(
            batch.matrices * gemm_flops(batch.rows, batch.cols, ns_steps, self.options.ns_algorithm)
            for stage in stages
            for batch in stage.batches
        )

    def _sent_bytes(self, stages: Iterable[Stage]) -> int:
        return sum(stage.exchange.sent_bytes(self.rank) for stage in stages if stage.exchange)


def plan_step(parameters: Iterable[ParameterSpec], rank: int, options: PlanOptions | None = None) -> Plan:
    """Plan the step of ``rank``.

    Args:
        parameters: all Muon parameters of this rank, in the optimizer's order: those of a mesh in the same order on
            every rank of it.
        rank: the global rank to plan for.
        options: buckets, variant, and what else there is to choose.

    Raises:
        ValueError: a parameter in no bucket, a pattern that matches nothing, a mesh that does not hold ``rank``.
    """
    parameters = tuple(parameters)
    options = settled(parameters, options or PlanOptions())
    for spec in parameters:
        if spec.storage and rank not in spec.storage.members:
            raise ValueError(f"parameter {spec.name!r} is on a mesh of ranks {spec.storage.ranks}, without rank {rank}")
    drafts = make_drafts(parameters, rank, options)
    layout = Layout(parameters, rank, options)
    stages = []
    for draft, rounds in zip(drafts, assign(parameters, drafts, options), strict=True):
        own = draft.storage.group(rank, draft.axes) if draft.storage else ()
        stages.append(layout.stage(draft, rounds[own] if own else None))
    return Plan(rank, parameters, tuple(stages), options)


def make_drafts(parameters: tuple[ParameterSpec, ...], rank: int, options: PlanOptions) -> list[Draft]:
    """The drafts of the stages of ``rank``; those that exchange are the same on every rank of their mesh."""
    buckets = make_buckets(parameters, options)
    drafts = draft_stages(parameters, buckets, options)
    return spread_by_shape(parameters, drafts, rank, options) if options.by_shape else drafts
