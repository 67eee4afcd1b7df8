"""Whether replicas share their matrices, where that is left to the plan: by what the busiest rank would have to do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from distmuon.newton_schulz.costs import gemm_flops
from distmuon.planning.matrices import gemm_cost
from distmuon.planning.options import PlanOptions
from distmuon.planning.owners import longest_first
from distmuon.planning.placement import ParameterSpec, Storage

#: FLOPs for each byte: what a GPU of 400 TFLOP/s does while a network of 50 GB/s moves one.
FLOPS_PER_BYTE = 8_000


def settled(parameters: Iterable[ParameterSpec], options: PlanOptions) -> PlanOptions:
    """``options`` that say of each mesh whether its replicas share; as they are if they do already.

    Parameters that lie alike share or repeat their work together. They share where the busiest rank is done sooner:
    where the bytes that it moves in addition are worth less than the GEMM FLOPs that it saves, at
    :data:`FLOPS_PER_BYTE`. Sums over ranks do not decide: with fewer matrices than ranks an owner's way back to all
    replicas takes longer than what it saves.

    What is looked at is known to all ranks of a mesh, so that they decide alike.
    """
    if options.share_replicas is not None or options.sharing is not None:
        return options
    alike: dict[Storage, list[ParameterSpec]] = {}
    for spec in parameters:
        if spec.replica_axes and spec.storage:
            alike.setdefault(spec.storage, []).append(spec)
    shared = (storage for storage, specs in alike.items() if _shared_sooner(specs, storage, options))
    return replace(options, sharing=frozenset(shared))


def _shared_sooner(specs: Sequence[ParameterSpec], storage: Storage, options: PlanOptions) -> bool:
    together, apart = (_busiest(specs, storage, options, shared=shared) for shared in (True, False))
    return together.flops + FLOPS_PER_BYTE * together.bytes < apart.flops + FLOPS_PER_BYTE * apart.bytes


class _Busiest(NamedTuple):
    flops: float
    bytes: float


def _busiest(specs: Sequence[ParameterSpec], storage: Storage, options: PlanOptions, *, shared: bool) -> _Busiest:
    """What the busiest rank has to do for parameters that lie alike: GEMM FLOPs, and bytes either way.

    A rank holds 1/S of each matrix, S ranks a whole replica of R. Of a matrix of m bytes that it owns it receives
    (1 - 1/S) m, and sends back as much if each replica works by itself, (R - 1/S) m if they share. Of what it holds it
    sends all but what it owns, and receives that back; if they share it sends the part whose owners are in its replica.
    The one that owns most and the one that owns least are the busiest.
    """
    holders = storage.size({axis for spec in specs for axes in spec.cut_axes for axis in axes})
    replicas = storage.size(specs[0].replica_axes)
    groups = len(storage.ranks) // (holders * replicas)
    workers = holders * replicas if shared else holders
    counts: Counter[tuple[int, int, int]] = Counter()  # matrices of a group by rows, columns, bytes of an element
    for spec in specs:
        for shape, matrices in spec.shapes.items():
            counts[shape.rows, shape.cols, options.wire_dtype(spec.dtype).itemsize] += matrices
    flops = moved = held = 0.0
    left: list[tuple[int, int, int]] = []
    for (rows, cols, itemsize), matrices in counts.items():
        each, rest = divmod(-(-matrices // groups), workers)
        flops += each * gemm_flops(rows, cols, 5, options.ns_algorithm)
        moved += each * rows * cols * itemsize
        held += matrices / groups * rows * cols * itemsize / holders
        left += [(rows, cols, itemsize)] * rest
    owners = longest_first([gemm_cost(rows, cols) for rows, cols, _ in left], [0] * workers)
    loads = [[0, 0] for _ in range(workers)]
    for (rows, cols, itemsize), owner in zip(left, owners, strict=True):
        loads[owner][0] += gemm_flops(rows, cols, 5, options.ns_algorithm)
        loads[owner][1] += rows * cols * itemsize
    sizes = [size for _, size in loads]
    flops += max(load for load, _ in loads)
    most, least = moved + max(sizes), moved + min(sizes)
    kept = 1 / holders
    targets = replicas if shared else 1
    out = max(most * (1 - kept), held / targets - least * kept) if holders > 1 else 0.0
    back = max(most * (targets - kept), held - least * kept) if workers > 1 else 0.0
    return _Busiest(flops, out + back)
