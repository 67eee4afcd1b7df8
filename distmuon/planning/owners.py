"""Owners: which rank of a group orthogonalises which matrix. Deterministic, so that ranks agree without talking.

A *round* is what one exchange brings together. Within a round no rank should be much busier than max(mean, largest
matrix), which nothing can beat, as the others wait for it; over the step totals should come out even.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence

#: How much more than max(mean, largest), which nothing can beat, a rank may be given in a round so that shapes meet.
IMBALANCE = 1.25
#: What a launch is worth in GEMM cost (:func:`distmuon.planning.matrices.gemm_cost`): 5 us at 400 TFLOP/s, where five
#: iterations are ten FLOPs a unit of cost.
LAUNCH_COST = 200_000_000
#: Launches of a batch, and of a worker that has anything: unpack and repack.
BATCH_LAUNCHES, WORKER_LAUNCHES = 30, 2

#: Jobs that only some workers may have, and these.
Holders = Mapping[int, Sequence[int]]


def bound(costs: Sequence[int], workers: int) -> float:
    """What no assignment of jobs of these costs can beat: max(mean of the workers, largest job)."""
    return max(sum(costs) / workers, max(costs, default=0))


def longest_first(costs: Sequence[int], totals: list[int], *, holders: Holders | None = None) -> list[int]:
    """Owner of each job: the longest job first, to the worker with the least work in this round.

    Ties go to the worker with the least in ``totals``, then to the lowest; jobs of one cost keep their order.

    Args:
        costs: of each job.
        totals: what each worker was given before; this round is added to it.
        holders: jobs that only some workers may have; they come first.
    """
    loads = [0] * len(totals)
    held = _held(holders or {}, costs, loads, totals)
    jobs = [job for job in range(len(costs)) if job not in held]
    return _settle(_least_loaded(jobs, costs, loads, totals) | held, costs, totals)


def even(
    costs: Sequence[int],
    shapes: Sequence[Hashable],
    totals: list[int],
    *,
    free: Collection[Hashable] = (),
    holders: Holders | None = None,
) -> list[int]:
    """Owner of each job, such that rounds and totals come out even, and jobs of one shape meet on few workers.

    Shapes meet where that takes no longer than the launches it saves, and within :data:`IMBALANCE`.

    Args:
        costs: of each job; equal for equal shapes.
        shapes: of each job.
        totals: what each worker was given before; this round is added to it.
        free: shapes that cost no batch anywhere, as every worker has others of them: they fill up what is left.
        holders: jobs that only some workers may have; they come first.
    """
    fixed = [0] * len(totals)
    held = _held(holders or {}, costs, fixed, totals)
    jobs = [job for job in range(len(costs)) if job not in held]
    loads = list(fixed)
    owners = _spread(jobs, costs, loads, totals)
    met_loads = list(fixed)
    limit = IMBALANCE * bound(costs, len(totals))
    met = _together(jobs, costs, shapes, free, met_loads, totals, limit)
    if met is not None:
        saved = (launches(owners, shapes, free) - launches(met, shapes, free)) / len(totals)
        if max(met_loads) - max(loads) <= LAUNCH_COST * saved:
            owners = met
    return _settle(owners | held, costs, totals)


def _held(holders: Holders, costs: Sequence[int], loads: list[int], totals: Sequence[int]) -> dict[int, int]:
    """Give each of these jobs to one of its holders, the longest first, to the one with the least work."""
    owners = {}
    for job in sorted(holders, key=lambda job: -costs[job]):
        worker = min(holders[job], key=lambda worker: (totals[worker] + loads[worker], worker))
        owners[job] = worker
        loads[worker] += costs[job]
    return owners


def _least_loaded(jobs: Iterable[int], costs: Sequence[int], loads: list[int], totals: Sequence[int]) -> dict[int, int]:
    """Give ``jobs``, the longest first, to the worker with the least in ``loads``, to which they are added."""
    heap = [(load, total, worker) for worker, (load, total) in enumerate(zip(loads, totals, strict=True))]
    heapq.heapify(heap)
    owners = {}
    for job in sorted(jobs, key=lambda job: -costs[job]):
        load, total, worker = heap[0]
        owners[job] = worker
        loads[worker] += costs[job]
        heapq.heapreplace(heap, (load + costs[job], total, worker))
    return owners


def _spread(jobs: Sequence[int], costs: Sequence[int], loads: list[int], totals: Sequence[int]) -> dict[int, int]:
    """Give ``jobs``, the longest first, to the worker with the least in total, if that makes the round no longer than
    it would be if only this round counted.
    """
    trial_loads = list(loads)
    trial = _least_loaded(jobs, costs, trial_loads, totals)
    limit = max(trial_loads)
    heap = [(totals[worker] + load, load, worker) for worker, load in enumerate(loads)]
    heapq.heapify(heap)
    full: list[tuple[int, int, int]] = []  # workers with no room for a job of this cost
    owners: dict[int, int] = {}
    cost = 0
    for job in sorted(jobs, key=lambda job: -costs[job]):
        if costs[job] != cost:
            cost = costs[job]
            for entry in full:
                heapq.heappush(heap, entry)
            full.clear()
        while heap and heap[0][1] + cost > limit:
            full.append(heapq.heappop(heap))
        if not heap:  # the order in which totals filled the workers left no room: only this round counts
            loads[:] = trial_loads
            return trial
        total, load, worker = heap[0]
        owners[job] = worker
        loads[worker] += cost
        heapq.heapreplace(heap, (total + cost, load + cost, worker))
    return owners


def _together(
    jobs: Sequence[int],
    costs: Sequence[int],
    shapes: Sequence[Hashable],
    free: Collection[Hashable],
    loads: list[int],
    totals: Sequence[int],
    limit: float,
) -> dict[int, int] | None:
    """Give jobs to workers shape by shape, the one with the most work first: to the fullest worker that can take all
    that is left of it, else as much as fits to the emptiest. None if ``limit`` can't be held.
    """
    by_shape: dict[Hashable, list[int]] = {}
    for job in jobs:
        by_shape.setdefault(shapes[job], []).append(job)
    heap = [(load, total, worker) for worker, (load, total) in enumerate(zip(loads, totals, strict=True))]
    heapq.heapify(heap)
    owners: dict[int, int] = {}
    meeting = [left for shape, left in by_shape.items() if shape not in free]
    for left in sorted(meeting, key=lambda jobs: -sum(costs[job] for job in jobs)):
        cost = costs[left[0]]
        while left:
            while heap[0][0] != loads[heap[0][2]]:  # it was given something since
                heapq.heappop(heap)
            worker = heap[0][-1]
            room = int((limit - loads[worker]) // cost)
            if room <= 0:
                return None
            if room >= len(left):
                room, most = len(left), limit - cost * len(left)
                fitting = (each for each, load in enumerate(loads) if load <= most)
                worker = max(fitting, key=lambda each: (loads[each], -totals[each], -each))
            owners |= dict.fromkeys(left[:room], worker)
            left = left[room:]
            loads[worker] += cost * room
            heapq.heappush(heap, (loads[worker], totals[worker], worker))
    rest = [job for job in jobs if shapes[job] in free]
    owners |= _least_loaded(rest, costs, loads, totals)
    return owners if max(loads) <= limit else None


def launches(owners: Mapping[int, int], shapes: Sequence[Hashable], free: Collection[Hashable] = ()) -> int:
    """About how many launches all workers need, beside those that any assignment of owners does.

    Args:
        owners: of each job.
        shapes: of each job; a batch is of one shape.
        free: shapes that cost no batch anywhere.
    """
    batches = {(worker, shapes[job]) for job, worker in owners.items() if shapes[job] not in free}
    return BATCH_LAUNCHES * len(batches) + WORKER_LAUNCHES * len(set(owners.values()))


def _settle(owners: Mapping[int, int], costs: Sequence[int], totals: list[int]) -> list[int]:
    for job, worker in owners.items():
        totals[worker] += costs[job]
    return [owners[job] for job in range(len(costs))]
