"""Counts of one optimizer step of a workload, on every rank in turn, with no GPU, no weights and no other process.

Each rank's real ``DistMuon`` steps on meta tensors under torch's fake process group, so what is counted is what the
code that trains dispatches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from distmuon.counting.counter import SOURCES, Counts, LaunchCounter
from distmuon.counting.standin import make_optimizer, stand_for
from distmuon.planning.options import Patterns
from distmuon.planning.placement import ParameterSpec
from distmuon.richtext import Shown
from distmuon.variants import Variant, get_variant
from distmuon.workloads.config import Workload, get_workload
from distmuon.workloads.storage import get_buckets, muon_parameters


@dataclass(frozen=True, repr=False)
class LaunchCounts(Shown):
    """What a step of a workload launches on each rank. Prints as a table of the sources of launches.

    Attributes:
        question: workload, ranks, ep, variant, ns_algorithm and buckets, as asked.
        per_rank: counts by rank.
    """

    question: dict[str, Any]
    per_rank: tuple[Counts, ...]

    def mean(self, value: str) -> float:
        """Mean over ranks of ``async_copies``, ``launches``, ``collectives`` or ``wire_bytes``."""
        return sum(getattr(counts, value) for counts in self.per_rank) / len(self.per_rank)

    def _line(self) -> str:
        asked = "{workload}, {ranks} ranks, EP {ep}, {variant}, {buckets} buckets".format(**self.question)
        copies, launches, collectives = (self.mean(each) for each in ("async_copies", "launches", "collectives"))
        return f"{asked}: {copies:,g} async copies, {launches:,g} launches, {collectives:g} collectives a rank and step"

    def _table(self) -> tuple[Sequence[str], list[Sequence[object]]]:
        return ("source", "async copies", "launches"), [tuple(row.values()) for row in self.by_source()]

    def by_source(self) -> list[dict[str, Any]]:
        """Mean copies and launches of each source that has any, in the order of a step."""
        rows = []
        for source in SOURCES:
            found = [counts.by_source[source] for counts in self.per_rank if source in counts.by_source]
            if found:
                copies, launches = (
                    sum(values) / len(self.per_rank)
                    for values in zip(*((a.memcpys, a.launches) for a in found), strict=True)
                )
                rows.append({"source": source, "async_copies": copies, "launches": launches})
        return rows

    def batched_copies(self) -> Counter[tuple[int, bool]]:
        """Fused copies of more than one pair, summed over ranks: (pairs, all of one size?) -> calls."""
        return sum((counts.batched_copies for counts in self.per_rank), Counter())

    def to_dict(self) -> dict[str, Any]:
        """Everything, as the scripts print it."""
        values = ("async_copies", "launches", "collectives", "wire_bytes")
        by_pairs: Counter[int] = Counter()
        for (pairs, _), calls in self.batched_copies().items():
            by_pairs[pairs] += calls
        return {
            **self.question,
            "mean": {value: self.mean(value) for value in values},
            "per_rank": [
                {"rank": rank, **{value: getattr(counts, value) for value in values}}
                for rank, counts in enumerate(self.per_rank)
            ],
            "by_source": self.by_source(),
            "batched_copies": {
                "calls": by_pairs.total(),
                "by_pairs": {str(pairs): by_pairs[pairs] for pairs in sorted(by_pairs)},
            },
        }


def count_launches(
    workload: str | Workload,
    ranks: int | None = None,
    ep: int | None = None,
    variant: str | Variant = "fused",
    *,
    ns_algorithm: str = "standard",
    buckets: str | Patterns = "published",
    toolchain: str = "rocm",
) -> LaunchCounts:
    """Count what one optimizer step launches on a GPU, on every rank.

    Args:
        workload: a name or a :class:`~distmuon.workloads.Workload`.
        ranks: of the job; default the workload's own.
        ep: expert-parallel degree; default the workload's own.
        variant: of the step.
        ns_algorithm: arithmetic of Newton-Schulz, as DistMuon takes it.
        buckets: "published", "auto", or patterns.
        toolchain: "rocm", "cuda12" or "cuda13", whose limits a fused launch has.

    Raises:
        ValueError: an unknown name, with the nearest; or ranks, ep and experts that do not fit.
        RuntimeError: a process group exists already; counting needs one of its own.
    """
    workload = get_workload(workload) if isinstance(workload, str) else workload
    ranks = workload.default_ranks if ranks is None else ranks
    ep = workload.default_ep if ep is None else ep
    variant_name = variant if isinstance(variant, str) else repr(variant)
    variant = get_variant(variant)
    patterns = get_buckets(workload, buckets)
    specs = muon_parameters(workload, ranks=ranks, ep=ep)
    options = {"variant": variant, "buckets": patterns, "ns_algorithm": ns_algorithm}
    per_rank = tuple(_count_rank(specs, rank, ranks, options, toolchain) for rank in range(ranks))
    question = {
        "workload": workload.name,
        "ranks": ranks,
        "ep": ep,
        "variant": variant_name,
        "ns_algorithm": ns_algorithm,
        "buckets": buckets if isinstance(buckets, str) else "custom",
    }
    return LaunchCounts(question, per_rank)


def _count_rank(specs: list[ParameterSpec], rank: int, ranks: int, options: dict[str, Any], toolchain: str) -> Counts:
    with stand_for(rank, ranks):
        optimizer = make_optimizer(specs, rank, "meta", **options)
        with LaunchCounter(toolchain) as counter:
            optimizer.step()
        return counter.counts
