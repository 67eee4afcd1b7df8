"""Arithmetic of time intervals: what is covered, what overlaps, and where the time of a span goes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

#: Pairs of start and end, in microseconds.
Intervals = list[tuple[float, float]]


def union(intervals: Iterable[tuple[float, float]]) -> Intervals:
    """The time covered by ``intervals``, as disjoint intervals in order."""
    merged: Intervals = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def length_us(intervals: Intervals) -> float:
    """Total length of disjoint intervals."""
    return sum(end - start for start, end in intervals)


def overlap_us(left: Intervals, right: Intervals) -> float:
    """Time that two unions have in common."""
    return length_us(left) + length_us(right) - length_us(union(left + right))


def parts_us(span: tuple[float, float], layers: Mapping[str, Iterable[tuple[float, float]]]) -> dict[str, float]:
    """Where the time of ``span`` goes: the parts of all layers and "idle" add up to the span.

    Args:
        span: start and end.
        layers: what runs, by name. Where several run at once, the time is the first's.

    Returns:
        Microseconds of each layer, and of "idle", in which none runs.
    """
    start, end = span
    parts: dict[str, float] = {}
    covered: Intervals = []
    for name, intervals in layers.items():
        # Times are taken from the span's start, so that microseconds since the epoch lose no digits.
        inside = [(max(left, start) - start, min(right, end) - start) for left, right in intervals]
        wider = union(covered + [(left, right) for left, right in inside if left < right])
        parts[name] = length_us(wider) - length_us(covered)
        covered = wider
    parts["idle"] = end - start - length_us(covered)
    return parts
