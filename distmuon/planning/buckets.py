"""Buckets: which parameters share an exchange, in which order."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple, TypeVar

from distmuon.planning.matrices import gemm_cost, refuse_unmatched
from distmuon.planning.options import ExchangeKind, PlanOptions
from distmuon.planning.owners import LAUNCH_COST, even, launches
from distmuon.planning.placement import ParameterSpec

#: Without patterns, the parameters that exchange are cut into about this many buckets a group, so that exchange and
#: compute overlap, of no less than MIN_BYTES each.
AUTO_BUCKETS = 4
MIN_BYTES = 1 << 20
#: Parameters that exchange nothing are handled in buckets of about this, as their updates are all held at once.
WHOLE_BYTES = 64 << 20
#: By shape there are two buckets a group, more only to keep what each rank holds of one below this.
MAX_RANK_BYTES = 64 << 20
#: Every way to halve the shapes is tried if that means no more than so many matrices to find owners for.
TRY_ALL = 50_000


Item = TypeVar("Item")


def runs_within(sized: Iterable[tuple[Item, int]], limit: int) -> Iterator[tuple[list[Item], int]]:
    """Cut (item, size) pairs into consecutive runs of at most ``limit``, or of one item, and say what each comes to."""
    run: list[Item] = []
    filled = 0
    for item, size in sized:
        if run and filled + size > limit:
            yield run, filled
            run, filled = [], 0
        run.append(item)
        filled += size
    if run:
        yield run, filled


class Bucket(NamedTuple):
    """A name for ranges and reports, and the indices of the parameters, in order."""

    name: str
    parameters: tuple[int, ...]


def make_buckets(parameters: Sequence[ParameterSpec], options: PlanOptions) -> tuple[Bucket, ...]:
    """Put each parameter into one bucket.

    Args:
        parameters: in the order of the optimizer.
        options: ``buckets`` are the name patterns of each (``fnmatchcase``); the first bucket that matches takes a
            parameter. None: chosen by group of ranks, then by size, or if matrices are batched by shape so that equal
            shapes share a bucket.

    Raises:
        ValueError: a pattern matches nothing, or a parameter is in no bucket; both are named.
    """
    patterns = options.buckets
    if patterns is None:
        return _chosen_buckets(parameters, options)
    for bucket in patterns:
        refuse_unmatched("buckets", bucket, (spec.name for spec in parameters))
    members: list[list[int]] = [[] for _ in patterns]
    for index, spec in enumerate(parameters):
        for bucket, indices in zip(patterns, members, strict=True):
            if any(fnmatchcase(spec.name, pattern) for pattern in bucket):
                indices.append(index)
                break
        else:
            raise ValueError(f"parameter {spec.name!r} is in no bucket: add a pattern that matches it")
    return tuple(
        Bucket(_name(number, bucket), tuple(indices))
        for number, (bucket, indices) in enumerate(zip(patterns, members, strict=True))
        if indices
    )


def _chosen_buckets(parameters: Sequence[ParameterSpec], options: PlanOptions) -> tuple[Bucket, ...]:
    kinds: dict[ExchangeKind | None, list[int]] = {}
    for index, spec in enumerate(parameters):
        kinds.setdefault(options.exchange_kind(spec), []).append(index)
    buckets: list[tuple[int, ...]] = []
    for kind, indices in kinds.items():
        if kind is None:
            buckets += _runs(parameters, indices, WHOLE_BYTES)
        elif options.by_shape:
            buckets += _by_shape(parameters, indices, options)
        else:
            buckets += _by_size(parameters, indices)
    buckets.sort()
    return tuple(
        Bucket(_name(number, [parameters[index].name for index in members]), members)
        for number, members in enumerate(buckets)
    )


def _by_size(parameters: Sequence[ParameterSpec], indices: Sequence[int]) -> list[tuple[int, ...]]:
    """Runs of consecutive parameters of about equal size."""
    total = sum(parameters[index].bytes for index in indices)
    return _runs(parameters, indices, max(total / AUTO_BUCKETS, MIN_BYTES))


def _runs(parameters: Sequence[ParameterSpec], indices: Sequence[int], limit: float) -> list[tuple[int, ...]]:
    """Consecutive parameters of ``limit`` bytes, give or take half a parameter."""
    buckets: list[tuple[int, ...]] = []
    members: list[int] = []
    filled = 0
    for index in indices:
        size = parameters[index].bytes
        if members and filled + size / 2 > limit:
            buckets.append(tuple(members))
            members, filled = [], 0
        members.append(index)
        filled += size
    return [*buckets, tuple(members)]


def _by_shape(
    parameters: Sequence[ParameterSpec], indices: Sequence[int], options: PlanOptions
) -> list[tuple[int, ...]]:
    """Whole shapes together where they fit, in two buckets or as many as keep each below MAX_RANK_BYTES a rank.

    Two buckets overlap: the second's way out with the first's work, the first's way back with the second's. More would
    only take shapes apart.
    """
    ranks = _ranks(parameters[indices[0]], options)
    total = sum(parameters[index].bytes for index in indices)
    by_shape: dict[object, list[int]] = {}
    for index in indices:
        by_shape.setdefault(tuple(sorted(parameters[index].shapes)), []).append(index)
    if total > 2 * MAX_RANK_BYTES * ranks:
        return _in_rounds(parameters, list(by_shape.values()), ranks, options)
    blocks: list[list[int]] = []
    for members in by_shape.values():
        parts = max(1, round(2 * sum(parameters[index].bytes for index in members) / total))
        size = -(-len(members) // parts)
        blocks += [members[start : start + size] for start in range(0, len(members), size)]
    matrices = sum(_group_matrices(parameters[index], options) for index in indices)
    if len(blocks) > 1 and matrices << len(blocks) <= TRY_ALL:
        return _best_halves(parameters, blocks, ranks)
    blocks.sort(key=lambda block: -sum(parameters[index].bytes for index in block))
    buckets: list[list[int]] = [[] for _ in range(min(2, len(blocks)))]
    for block in blocks:
        min(buckets, key=lambda bucket: sum(parameters[index].bytes for index in bucket)).extend(block)
    return [tuple(sorted(bucket)) for bucket in buckets]


def _in_rounds(
    parameters: Sequence[ParameterSpec], shapes: Sequence[list[int]], ranks: int, options: PlanOptions
) -> list[tuple[int, ...]]:
    """Buckets in which every rank has as many matrices of a shape as any other, so that none waits for another.

    What is left of each shape shares the last bucket, with enough of smaller shapes that its mean is no less than its
    largest matrix, as long as there are any.
    """
    limit = MAX_RANK_BYTES * ranks
    units: list[list[int]] = []  # the fewest parameters that give every rank as many matrices
    left: list[int] = []
    for members in sorted(shapes, key=lambda members: -_largest(parameters[members[0]])):
        matrices = max(1, _group_matrices(parameters[members[0]], options))
        unit = ranks // math.gcd(ranks, matrices)
        full = len(members) - len(members) % unit
        units += [members[start : start + unit] for start in range(0, full, unit)]
        left += members[full:]
    while left and units:
        largest = max(_largest(parameters[index]) for index in left)
        cost = sum(_group_cost(parameters[index], options) for index in left)
        smaller = [unit for unit in units if _largest(parameters[unit[0]]) < largest]
        if cost >= largest * ranks or not smaller:
            break
        units.remove(smaller[0])
        left += smaller[0]
    sizes = [sum(parameters[index].bytes for index in members) for members in units]
    joined = [
        sorted(itertools.chain.from_iterable(run)) for run, _ in runs_within(zip(units, sizes, strict=True), limit)
    ]
    return [tuple(bucket) for bucket in (*joined, sorted(left)) if bucket]


def _best_halves(parameters: Sequence[ParameterSpec], blocks: Sequence[list[int]], ranks: int) -> list[tuple[int, ...]]:
    """The two halves, neither of less than a quarter of the bytes, whose owners are done first."""
    sizes = [sum(parameters[index].bytes for index in block) for block in blocks]
    best: tuple[tuple[float, ...], list[tuple[int, ...]]] | None = None
    for choice in range(1, 2 ** (len(blocks) - 1)):
        second = [number for number in range(len(blocks)) if choice >> number & 1]
        share = sum(sizes[number] for number in second) / sum(sizes)
        halves = [
            tuple(sorted(i for number, block in enumerate(blocks) if (number in second) == half for i in block))
            for half in (False, True)
        ]
        score = (
            min(share, 1 - share) < 1 / 4,
            sum(_time(parameters, half, ranks) for half in halves),
            abs(share - 1 / 2),
        )
        if best is None or score < best[0]:
            best = (score, halves)
    assert best is not None
    return best[1]


def _time(parameters: Sequence[ParameterSpec], indices: Sequence[int], ranks: int) -> float:
    """How long the owners of these parameters' matrices take, in GEMM cost: the busiest, and launches on average."""
    shapes = [shape for index in indices for shape, count in parameters[index].shapes.items() for _ in range(count)]
    loads = [0] * ranks
    owners = even([gemm_cost(*shape[:2]) for shape in shapes], shapes, loads)
    return max(loads) + LAUNCH_COST * launches(dict(enumerate(owners)), shapes) / ranks


def _ranks(spec: ParameterSpec, options: PlanOptions) -> int:
    """Ranks of the group that exchanges a parameter's matrices."""
    assert spec.storage is not None
    return spec.storage.size(options.exchange_axes(spec))


def _group_matrices(spec: ParameterSpec, options: PlanOptions) -> int:
    """How many of its matrices one group exchanges."""
    assert spec.storage is not None
    apart = set(range(len(spec.storage.mesh_shape))).difference(options.exchange_axes(spec), spec.replica_axes)
    return sum(spec.shapes.values()) // spec.storage.size(apart)


def _group_cost(spec: ParameterSpec, options: PlanOptions) -> float:
    """GEMM cost of the matrices of a parameter that one group exchanges."""
    cost = sum(gemm_cost(*shape[:2]) * matrices for shape, matrices in spec.shapes.items())
    return cost * _group_matrices(spec, options) / sum(spec.shapes.values())


def _largest(spec: ParameterSpec) -> int:
    """GEMM cost of its largest matrix."""
    return max(gemm_cost(*shape[:2]) for shape in spec.shapes)


def _name(number: int, patterns: Sequence[str]) -> str:
    """Short, distinct and without the separator of range names."""
    more = f" +{len(patterns) - 1}" if len(patterns) > 1 else ""
    return f"{number} {patterns[0].replace('/', '.')}{more}"
