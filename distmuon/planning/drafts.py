"""Drafts of stages: which parameters are handled together, before anything is laid out.

A bucket becomes a draft for each mesh, exchange axes and dtype that its parameters need. Parameters that need no
exchange go with a draft of their bucket; where matrices are batched by shape they are spread over the whole step
instead, so that equal shapes meet: with one another, and with matrices of their shape that are brought to this rank.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from distmuon.planning.buckets import Bucket, runs_within
from distmuon.planning.matrices import Shape, gemm_cost
from distmuon.planning.options import ExchangeKind, PlanOptions
from distmuon.planning.placement import ParameterSpec, Storage


@dataclass(frozen=True)
class Draft:
    """The parameters of one stage.

    Args:
        name: of the stage.
        storage: whose mesh the exchange is on; None if there is none.
        axes: the mesh axes that a group of the exchange spans.
        exchanged: parameters of which some matrix is exchanged.
        whole: parameters that this rank handles without an exchange.
        free: shapes of which each rank holds whole matrices in this stage: a matrix of such a shape costs its owner no
            batch of its own.
    """

    name: str
    storage: Storage | None
    axes: tuple[int, ...]
    exchanged: tuple[int, ...]
    whole: tuple[int, ...]
    free: frozenset[Shape] = frozenset()

    @property
    def groups(self) -> list[tuple[int, ...]]:
        """The ranks of each exchange, in mesh order."""
        return self.storage.groups(self.axes) if self.storage else []


def draft_stages(parameters: Sequence[ParameterSpec], buckets: Iterable[Bucket], options: PlanOptions) -> list[Draft]:
    """The drafts, in the order of the buckets; the same on every rank that has the parameters."""
    drafts = []
    for bucket in buckets:
        exchanged: dict[ExchangeKind, list[int]] = {}
        whole: list[int] = []
        for index in bucket.parameters:
            kind = options.exchange_kind(parameters[index])
            (whole if kind is None else exchanged.setdefault(kind, [])).append(index)
        if not exchanged:
            drafts.append(Draft(bucket.name, None, (), (), tuple(whole)))
        for number, (kind, indices) in enumerate(exchanged.items()):
            # Their work fills the wait for the way back of the first exchange.
            filling = tuple(whole) if number == 0 else ()
            name = bucket.name if number == 0 else f"{bucket.name} ({number + 1})"
            drafts.append(Draft(name, parameters[indices[0]].storage, kind.axes, tuple(indices), filling))
    return drafts


def spread_by_shape(
    parameters: Sequence[ParameterSpec], drafts: Sequence[Draft], rank: int, options: PlanOptions
) -> list[Draft]:
    """Move parameters that need no exchange to where their shapes meet others, each draft taking up to
    ``max_batch_bytes`` of them.

    A shape that is also exchanged in some draft goes to the draft with most of those, if there is room; others then to
    the drafts with least of such work. What finds no room gets drafts of its own. A parameter that is larger than
    ``max_batch_bytes`` by itself stays.

    Whatever decides on ``free``, and so on owners, is the same on every rank of a group.
    """
    meetings = _meetings(parameters, drafts)
    exchanging = [number for number, draft in enumerate(drafts) if draft.storage]
    whole: dict[int, list[int]] = {number: [] for number in range(len(drafts))}
    filled = dict.fromkeys(exchanging, 0)
    cost = dict.fromkeys(exchanging, 0)
    by_shape: dict[Shape, list[tuple[int, int]]] = {}
    for number, draft in enumerate(drafts):
        for index in draft.whole:
            size = local_batch_bytes(parameters[index], rank, options)
            if size > options.max_batch_bytes:
                whole[number].append(index)
            else:
                by_shape.setdefault(next(iter(parameters[index].shapes)), []).append((index, size))
    own: list[list[int]] = []

    def turn(item: tuple[Shape, list[tuple[int, int]]]) -> tuple[bool, int]:
        shape, members = item
        return shape not in meetings, -gemm_cost(*shape[:2]) * len(members)

    for shape, members in sorted(by_shape.items(), key=turn):
        for chunk, size in runs_within(members, options.max_batch_bytes):
            room = [number for number in exchanging if filled[number] + size <= options.max_batch_bytes]
            best = min(
                room, key=lambda number: (number not in meetings.get(shape, ()), cost[number], number), default=None
            )
            if best is None:
                own.append(chunk)
                continue
            whole[best] += chunk
            filled[best] += size
            cost[best] += sum(_local_cost(parameters[index], rank) for index in chunk)
    spread = []
    for number, draft in enumerate(drafts):
        free = frozenset(shape for shape, numbers in meetings.items() if number in numbers)
        if draft.storage or whole[number]:
            spread.append(replace(draft, whole=tuple(whole[number]), free=free))
    for number, chunk in enumerate(own):  # between the others, whose exchanges they hide
        more = f" +{len(chunk) - 1}" if len(chunk) > 1 else ""
        name = f"{parameters[chunk[0]].name.replace('/', '.')}{more}"
        spread.insert(min(2 * number + 1, len(spread)), Draft(name, None, (), (), tuple(chunk)))
    return spread


def _meetings(parameters: Sequence[ParameterSpec], drafts: Sequence[Draft]) -> dict[Shape, set[int]]:
    """For each shape that is both exchanged and held whole, the draft of each set of ranks that exchanges most of it.

    Only what all ranks of the set know counts: parameters on a mesh of at least these ranks, drafts of just these.
    """
    held: dict[Shape, set[frozenset[int]]] = {}
    for draft in drafts:
        for index in draft.whole:
            if storage := parameters[index].storage:
                for shape in parameters[index].shapes:
                    held.setdefault(shape, set()).add(storage.members)
    exchanged: dict[tuple[Shape, frozenset[int]], Counter[int]] = {}
    for number, draft in enumerate(drafts):
        for index in draft.exchanged if draft.storage else ():
            for shape, matrices in parameters[index].shapes.items():
                members = draft.storage.members  # type: ignore[union-attr]
                if any(members <= holders for holders in held.get(shape, ())):
                    exchanged.setdefault((shape, members), Counter())[number] += matrices
    meetings: dict[Shape, set[int]] = {}
    for (shape, _), counts in exchanged.items():
        meetings.setdefault(shape, set()).add(min(counts, key=lambda number: (-counts[number], number)))
    return meetings


def local_batch_bytes(spec: ParameterSpec, rank: int, options: PlanOptions) -> int:
    """Upper bound of what the matrices that ``rank`` holds take in a batch."""
    numel = math.prod(spec.local_shape3(rank))
    return max(
        math.ceil(numel / (rows * spec.cols)) * options.batch_bytes(rows, spec.cols) for rows in spec.matrix_rows
    )


def _local_cost(spec: ParameterSpec, rank: int) -> int:
    rows = max(spec.matrix_rows)
    return math.ceil(math.prod(spec.local_shape3(rank)) / (rows * spec.cols)) * gemm_cost(rows, spec.cols)
