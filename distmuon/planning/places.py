"""Places: where a rectangle lies in a flat buffer or a contiguous tensor. Pure arithmetic on sizes, strides and
offsets.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import NamedTuple

from torch import Tensor


class Place(NamedTuple):
    """A strided view, in elements from the start of what it lies in."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @property
    def numel(self) -> int:
        """Elements of the view."""
        return math.prod(self.size)

    @property
    def dense(self) -> bool:
        """Whether its rows follow one another without a gap."""
        expected = 1
        for size, stride in zip(reversed(self.size), reversed(self.stride), strict=True):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return True

    def of(self, tensor: Tensor) -> Tensor:
        """The view of ``tensor``, which is contiguous."""
        return tensor.as_strided(self.size, self.stride, tensor.storage_offset() + self.offset)


def rectangle(rows: int, cols: int, width: int, offset: int) -> Place:
    """``rows`` x ``cols`` in rows of ``width``; one row has the stride of a dense one, as fused copies compare
    strides.
    """
    return Place((rows, cols), (width if rows > 1 else cols, 1), offset)


def flat(numel: int, offset: int) -> Place:
    """A run of elements."""
    return Place((numel,), (1,), offset)


class Pair(NamedTuple):
    """Two places of one size, in things that are told apart by a key: what is copied from one to the other."""

    left_key: Hashable
    left: Place
    right_key: Hashable
    right: Place

    @property
    def dense(self) -> bool:
        """Whether a fused copy takes it, as flat runs."""
        return self.left.dense and self.right.dense


def join(pairs: Sequence[Pair]) -> list[Pair]:
    """Join pairs so that the same elements are copied in fewer, larger pieces.

    Dense runs that follow one another on both sides become one run. Others that repeat at constant steps on both sides,
    as the column blocks of several matrices do, become one strided piece of one more dim, and again, up to 5 dims.
    """
    dense: list[Pair] = []
    strided: list[Pair] = []
    for pair in pairs:
        if not pair.dense:
            strided.append(pair)
            continue
        numel = pair.left.numel
        last = dense[-1] if dense else None
        if (
            last
            and (last.left_key, last.right_key) == (pair.left_key, pair.right_key)
            and last.left.offset + last.left.numel == pair.left.offset
            and last.right.offset + last.right.numel == pair.right.offset
        ):
            total = last.left.numel + numel
            dense[-1] = last._replace(left=flat(total, last.left.offset), right=flat(total, last.right.offset))
        else:
            dense.append(pair._replace(left=flat(numel, pair.left.offset), right=flat(numel, pair.right.offset)))
    for _ in range(3):
        strided = _stack(strided)
    return dense + strided


def _stack(pairs: Sequence[Pair]) -> list[Pair]:
    """Put runs of equally shaped pairs at constant steps into one pair with a leading dim."""
    stacked: list[Pair] = []
    index = 0
    while index < len(pairs):
        first = pairs[index]
        count, steps = 1, (0, 0)
        while index + count < len(pairs):
            previous, following = pairs[index + count - 1], pairs[index + count]
            step = (following.left.offset - previous.left.offset, following.right.offset - previous.right.offset)
            if not _alike(first, following) or min(step) <= 0 or (count > 1 and step != steps):
                break
            steps, count = step, count + 1
        if count > 1:
            left, right = (
                Place((count, *place.size), (step, *place.stride), place.offset)
                for place, step in zip((first.left, first.right), steps, strict=True)
            )
            first = first._replace(left=left, right=right)
        stacked.append(first)
        index += count
    return stacked


def _alike(one: Pair, other: Pair) -> bool:
    return (one.left_key, one.right_key, one.left[:2], one.right[:2]) == (
        other.left_key,
        other.right_key,
        other.left[:2],
        other.right[:2],
    )
