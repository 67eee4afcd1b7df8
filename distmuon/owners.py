"""Owners: which rank of a group orthogonalises which matrix. Deterministic, so that ranks agree without talking."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence

#: How much more than max(mean load, largest job), which nothing can beat, a rank may be given so that shapes meet.
IMBALANCE = 1.25


def longest_first(costs: Sequence[int], totals: list[int]) -> list[int]:
    """Owner of each job: the longest job first, to the worker with the least work.

    Ties go to the worker with the least in ``totals``, then to the lowest; jobs of one cost keep their order.

    Args:
        costs: of each job.
        totals: what each worker was given before; this round is added to it.
    """
    owners = _fill(range(len(costs)), costs, [0] * len(totals), totals)
    return _settle(owners, costs, totals)


def shapes_together(
    costs: Sequence[int], shapes: Sequence[Hashable], free: Collection[Hashable], totals: list[int]
) -> list[int]:
    """Owner of each job, such that jobs of one shape meet on few workers, within :data:`IMBALANCE`.

    The shape with the most work first: to the fullest worker that can take all that is left of it, else as much as fits
    to the emptiest. Where the bound can't be held that way, the longest job goes first.

    Args:
        costs: of each job; equal for equal shapes.
        shapes: of each job.
        free: shapes that may be anywhere, as every worker has others of them: they fill up what is left.
        totals: what each worker was given before, for ties; this round is added to it.
    """
    workers = range(len(totals))
    limit = IMBALANCE * max(sum(costs) / len(totals), max(costs, default=0))
    by_shape: dict[Hashable, list[int]] = {}
    for job, shape in enumerate(shapes):
        by_shape.setdefault(shape, []).append(job)
    loads = [0] * len(totals)
    owners: dict[int, int] = {}
    together = [jobs for shape, jobs in by_shape.items() if shape not in free]
    for jobs in sorted(together, key=lambda jobs: -sum(costs[job] for job in jobs)):
        left, cost = list(jobs), costs[jobs[0]]
        while left:
            fits = [int((limit - load) // cost) for load in loads]
            whole = [worker for worker in workers if fits[worker] >= len(left)]
            if whole:
                worker = max(whole, key=lambda worker: (loads[worker], -totals[worker], -worker))
            else:
                worker = min(workers, key=lambda worker: (loads[worker], totals[worker], worker))
            if not fits[worker]:
                return longest_first(costs, totals)
            taken, left = left[: fits[worker]], left[fits[worker] :]
            owners |= dict.fromkeys(taken, worker)
            loads[worker] += cost * len(taken)
    owners |= _fill([job for shape in free for job in by_shape.get(shape, ())], costs, loads, totals)
    return _settle(owners, costs, totals) if max(loads) <= limit else longest_first(costs, totals)


def _fill(jobs: Iterable[int], costs: Sequence[int], loads: list[int], totals: Sequence[int]) -> dict[int, int]:
    """Give ``jobs``, the longest first, to the worker with the least in ``loads``, to which they are added."""
    heap = [(load, total, worker) for worker, (load, total) in enumerate(zip(loads, totals, strict=True))]
    heapq.heapify(heap)
    owners = {}
    for job in sorted(jobs, key=lambda job: -costs[job]):
        load, total, worker = heapq.heappop(heap)
        owners[job] = worker
        loads[worker] += costs[job]
        heapq.heappush(heap, (load + costs[job], total, worker))
    return owners


def _settle(owners: Mapping[int, int], costs: Sequence[int], totals: list[int]) -> list[int]:
    for job, worker in owners.items():
        totals[worker] += costs[job]
    return [owners[job] for job in range(len(costs))]
