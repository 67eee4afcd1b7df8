"""Drafts of stages: which parameters are handled together, before anything is laid out.

A bucket becomes a draft for each group of ranks and dtype that its cut parameters need. Parameters that need no
exchange go with a draft of their bucket; where matrices are batched by shape they are spread over the whole step
instead, so that equal shapes meet: with one another, and with matrices of their shape that are brought to this rank.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from distmuon.buckets import Bucket
from distmuon.matrices import Shape, gemm_cost
from distmuon.placement import ParameterSpec

#: Bytes that a matrix of so many rows and columns takes in a Newton-Schulz batch.
BatchBytes = Callable[[int, int], int]


@dataclass(frozen=True)
class Draft:
    """The parameters of one stage.

    Args:
        name: of the stage.
        ranks: the group that exchanges; empty if there is none.
        cut: parameters of which some matrix is cut over the group.
        whole: parameters that this rank handles without an exchange.
        free: shapes of which this rank holds whole matrices in this stage: a matrix of such a shape costs its owner no
            batch of its own.
    """

    name: str
    ranks: tuple[int, ...]
    cut: tuple[int, ...]
    whole: tuple[int, ...]
    free: frozenset[Shape] = frozenset()


def draft_stages(parameters: Sequence[ParameterSpec], buckets: Iterable[Bucket], rank: int) -> list[Draft]:
    """The drafts of ``rank``, in the order of the buckets."""
    drafts = []
    for bucket in buckets:
        cut: dict[tuple[object, tuple[int, ...], torch.dtype], list[int]] = {}
        whole: list[int] = []
        for index in bucket.parameters:
            spec = parameters[index]
            axes = spec.exchange_axes()
            if axes and spec.storage:
                # By mesh, not by subgroup: every rank must have the same drafts, in the same order.
                mesh = spec.storage.mesh_shape, spec.storage.ranks
                cut.setdefault((mesh, axes, spec.dtype), []).append(index)
            else:
                whole.append(index)
        if not cut:
            drafts.append(Draft(bucket.name, (), (), tuple(whole)))
        for number, ((_, axes, _), indices) in enumerate(cut.items()):
            storage = parameters[indices[0]].storage
            assert storage is not None
            # Their work fills the wait for the way back of the first exchange.
            filling = tuple(whole) if number == 0 else ()
            name = bucket.name if number == 0 else f"{bucket.name} ({number + 1})"
            drafts.append(Draft(name, storage.subgroup(rank, axes), tuple(indices), filling))
    return drafts


def spread_by_shape(
    parameters: Sequence[ParameterSpec], drafts: Sequence[Draft], rank: int, batch_bytes: BatchBytes, max_bytes: int
) -> list[Draft]:
    """Move parameters that need no exchange to where their shapes meet others, each draft taking up to ``max_bytes`` of
    them.

    A shape that is also cut in some draft goes to the draft with most of those, if there is room; others then to the
    drafts with least of such work. What finds no room gets drafts of its own. A parameter that is larger than
    ``max_bytes`` by itself stays.

    Whatever decides on ``free``, and so on owners, is the same on every rank of a group.
    """
    meetings = _meetings(parameters, drafts)
    exchanging = [number for number, draft in enumerate(drafts) if draft.cut]
    whole: dict[int, list[int]] = {number: [] for number in range(len(drafts))}
    filled = dict.fromkeys(exchanging, 0)
    cost = dict.fromkeys(exchanging, 0)
    by_shape: dict[Shape, list[tuple[int, int]]] = {}
    for number, draft in enumerate(drafts):
        for index in draft.whole:
            size = local_batch_bytes(parameters[index], rank, batch_bytes)
            if size > max_bytes:
                whole[number].append(index)
            else:
                by_shape.setdefault(next(iter(parameters[index].shapes())), []).append((index, size))
    own: list[list[int]] = []

    def turn(item: tuple[Shape, list[tuple[int, int]]]) -> tuple[bool, int]:
        shape, members = item
        return shape not in meetings, -gemm_cost(*shape[:2]) * len(members)

    for shape, members in sorted(by_shape.items(), key=turn):
        for chunk, size in _chunks(members, max_bytes):
            room = [number for number in exchanging if filled[number] + size <= max_bytes]
            best = min(room, key=lambda number: (number != meetings.get(shape), cost[number], number), default=None)
            if best is None:
                own.append(chunk)
                continue
            whole[best] += chunk
            filled[best] += size
            cost[best] += sum(_local_cost(parameters[index], rank) for index in chunk)
    spread = []
    for number, draft in enumerate(drafts):
        free = frozenset(shape for shape, meeting in meetings.items() if meeting == number)
        if draft.cut or whole[number]:
            spread.append(replace(draft, whole=tuple(whole[number]), free=free))
    for number, chunk in enumerate(own):  # between the others, whose exchanges they hide
        name = f"{parameters[chunk[0]].name.replace('/', '.')} +{len(chunk) - 1}"
        spread.insert(min(2 * number + 1, len(spread)), Draft(name, (), (), tuple(chunk)))
    return spread


def _meetings(parameters: Sequence[ParameterSpec], drafts: Sequence[Draft]) -> dict[Shape, int]:
    """For each shape that is both cut and held whole, the draft with most cut matrices of it."""
    held = {shape for draft in drafts for index in draft.whole for shape in parameters[index].shapes()}
    cut: dict[Shape, Counter[int]] = {}
    for number, draft in enumerate(drafts):
        for index in draft.cut:
            for shape, matrices in parameters[index].shapes().items():
                cut.setdefault(shape, Counter())[number] += matrices
    return {
        shape: min(counts, key=lambda number: (-counts[number], number))
        for shape, counts in cut.items()
        if shape in held
    }


def _chunks(members: Iterable[tuple[int, int]], max_bytes: int) -> Iterable[tuple[list[int], int]]:
    """Cut (index, size) members into runs of at most ``max_bytes``."""
    chunk: list[int] = []
    total = 0
    for index, size in members:
        if chunk and total + size > max_bytes:
            yield chunk, total
            chunk, total = [], 0
        chunk.append(index)
        total += size
    if chunk:
        yield chunk, total


def local_batch_bytes(spec: ParameterSpec, rank: int, batch_bytes: BatchBytes) -> int:
    """Upper bound of what the matrices that ``rank`` holds take in a batch."""
    numel = math.prod(spec.local_shape3(rank))
    return max(math.ceil(numel / (rows * spec.cols)) * batch_bytes(rows, spec.cols) for rows in spec.matrix_rows)


def _local_cost(spec: ParameterSpec, rank: int) -> int:
    rows = max(spec.matrix_rows)
    return math.ceil(math.prod(spec.local_shape3(rank)) / (rows * spec.cols)) * gemm_cost(rows, spec.cols)
