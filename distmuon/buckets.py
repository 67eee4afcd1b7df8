"""Buckets: which parameters share an exchange, in which order."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

from distmuon.matrices import gemm_cost, refuse_unmatched
from distmuon.owners import shapes_together
from distmuon.placement import ParameterSpec

Patterns = Sequence[Sequence[str]]

#: Without patterns, the parameters that exchange are cut into about this many buckets a group, so that exchange and
#: compute overlap, of no less than MIN_BYTES each.
AUTO_BUCKETS = 4
MIN_BYTES = 1 << 20
#: Parameters that exchange nothing are handled in buckets of about this, as their updates are all held at once.
WHOLE_BYTES = 64 << 20
#: By shape there are two buckets a group, more only to keep each below this.
MAX_BYTES = 256 << 20
#: Up to so many shapes every way to halve them is tried.
TRY_ALL = 10


class Bucket(NamedTuple):
    """A name for ranges and reports, and the indices of the parameters, in order."""

    name: str
    parameters: tuple[int, ...]


def make_buckets(
    parameters: Sequence[ParameterSpec], patterns: Patterns | None = None, *, by_shape: bool = False
) -> tuple[Bucket, ...]:
    """Put each parameter into one bucket.

    Args:
        parameters: in the order of the optimizer.
        patterns: for each bucket its name patterns (``fnmatchcase``); the first bucket that matches takes a parameter.
            None: chosen by group of ranks, then by size.
        by_shape: choose so that equal shapes share a bucket, instead of consecutive parameters.

    Raises:
        ValueError: a pattern matches nothing, or a parameter is in no bucket; both are named.
    """
    if patterns is None:
        return _chosen_buckets(parameters, by_shape)
    for bucket in patterns:
        if isinstance(bucket, str):
            raise ValueError(f"buckets is a list of tuples of patterns; {bucket!r} stands where a tuple is expected")
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


def _chosen_buckets(parameters: Sequence[ParameterSpec], by_shape: bool) -> tuple[Bucket, ...]:
    kinds: dict[tuple[object, ...], list[int]] = {}
    for index, spec in enumerate(parameters):
        axes = spec.exchange_axes()
        kinds.setdefault((axes, spec.storage, spec.dtype) if axes else (), []).append(index)
    buckets: list[tuple[int, ...]] = []
    for kind, indices in kinds.items():
        if not kind:
            buckets += _runs(parameters, indices, WHOLE_BYTES)
        else:
            buckets += (_by_shape if by_shape else _by_size)(parameters, indices)
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


def _by_shape(parameters: Sequence[ParameterSpec], indices: Sequence[int]) -> list[tuple[int, ...]]:
    """Whole shapes together where they fit, in two buckets or as many as keep each below MAX_BYTES.

    Two buckets overlap: the second's way out with the first's work, the first's way back with the second's. More would
    only take shapes apart.
    """
    total = sum(parameters[index].bytes for index in indices)
    count = max(2, -(-total // MAX_BYTES))
    limit = total / count
    blocks: list[list[int]] = []
    by_shape: dict[object, list[int]] = {}
    for index in indices:
        by_shape.setdefault(tuple(sorted(parameters[index].shapes())), []).append(index)
    for members in by_shape.values():
        parts = max(1, round(sum(parameters[index].bytes for index in members) / limit))
        size = -(-len(members) // parts)
        blocks += [members[start : start + size] for start in range(0, len(members), size)]
    if count == 2 and 1 < len(blocks) <= TRY_ALL:
        return _best_halves(parameters, blocks)
    blocks.sort(key=lambda block: -sum(parameters[index].bytes for index in block))
    buckets: list[list[int]] = [[] for _ in range(min(count, len(blocks)))]
    for block in blocks:
        min(buckets, key=lambda bucket: sum(parameters[index].bytes for index in bucket)).extend(block)
    return [tuple(sorted(bucket)) for bucket in buckets]


def _best_halves(parameters: Sequence[ParameterSpec], blocks: Sequence[list[int]]) -> list[tuple[int, ...]]:
    """The two halves, neither of less than a quarter of the bytes, whose owners orthogonalise in the fewest batches."""
    sizes = [sum(parameters[index].bytes for index in block) for block in blocks]
    best: tuple[tuple[float, ...], list[tuple[int, ...]]] | None = None
    for choice in range(1, 2 ** (len(blocks) - 1)):
        second = [number for number in range(len(blocks)) if choice >> number & 1]
        share = sum(sizes[number] for number in second) / sum(sizes)
        halves = [
            tuple(sorted(i for number, block in enumerate(blocks) if (number in second) == half for i in block))
            for half in (False, True)
        ]
        batches = sum(_batches(parameters, half) for half in halves)
        score = (min(share, 1 - share) < 1 / 4, batches, abs(share - 1 / 2))
        if best is None or score < best[0]:
            best = (score, halves)
    assert best is not None
    return best[1]


def _batches(parameters: Sequence[ParameterSpec], indices: Sequence[int]) -> int:
    """How many batches of one shape the owners of these parameters' cut matrices would have."""
    first = parameters[indices[0]]
    assert first.storage is not None
    ranks = math.prod(first.storage.mesh_shape[axis] for axis in first.exchange_axes())
    shapes = [shape for index in indices for shape, count in parameters[index].shapes().items() for _ in range(count)]
    owners = shapes_together([gemm_cost(*shape[:2]) for shape in shapes], shapes, (), [0] * ranks)
    return len(set(zip(owners, shapes, strict=True)))


def _name(number: int, patterns: Sequence[str]) -> str:
    """Short, distinct and without the separator of range names."""
    more = f" +{len(patterns) - 1}" if len(patterns) > 1 else ""
    return f"{number} {patterns[0].replace('/', '.')}{more}"
