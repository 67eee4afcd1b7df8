"""Buckets: which parameters share an exchange, in which order."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

from distmuon.matrices import refuse_unmatched
from distmuon.placement import ParameterSpec

Patterns = Sequence[Sequence[str]]

#: Without patterns, the parameters that exchange are cut into about this many buckets a group, so that exchange and
#: compute overlap, of no less than MIN_BYTES each.
AUTO_BUCKETS = 4
MIN_BYTES = 1 << 20


class Bucket(NamedTuple):
    """A name for ranges and reports, and the indices of the parameters, in order."""

    name: str
    parameters: tuple[int, ...]


def make_buckets(parameters: Sequence[ParameterSpec], patterns: Patterns | None = None) -> tuple[Bucket, ...]:
    """Put each parameter into one bucket.

    Args:
        parameters: in the order of the optimizer.
        patterns: for each bucket its name patterns (``fnmatchcase``); the first bucket that matches takes a parameter.
            None: consecutive parameters of one kind, by size.

    Raises:
        ValueError: a pattern matches nothing, or a parameter is in no bucket; both are named.
    """
    if patterns is None:
        return _buckets_by_size(parameters)
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


def _buckets_by_size(parameters: Sequence[ParameterSpec]) -> tuple[Bucket, ...]:
    kinds: dict[tuple[tuple[int, ...], tuple[int, ...]], list[int]] = {}
    for index, spec in enumerate(parameters):
        axes = spec.exchange_axes()
        kinds.setdefault((axes, spec.storage.ranks if axes and spec.storage else ()), []).append(index)
    buckets: list[tuple[int, ...]] = []
    for (axes, _), indices in kinds.items():
        sizes = [math.prod(parameters[index].shape) * parameters[index].dtype.itemsize for index in indices]
        limit = max(sum(sizes) / AUTO_BUCKETS, MIN_BYTES) if axes else math.inf
        members: list[int] = []
        filled = 0
        for index, size in zip(indices, sizes, strict=True):
            if members and filled + size / 2 > limit:
                buckets.append(tuple(members))
                members, filled = [], 0
            members.append(index)
            filled += size
        buckets.append(tuple(members))
    buckets.sort()
    return tuple(
        Bucket(_name(number, (parameters[members[0]].name,)), members) for number, members in enumerate(buckets)
    )


def _name(number: int, patterns: Sequence[str]) -> str:
    """Short, distinct and without the separator of range names."""
    more = f" +{len(patterns) - 1}" if len(patterns) > 1 else ""
    return f"{number} {patterns[0].replace('/', '.')}{more}"
