"""Spread, and whether a change is more than noise."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Change:
    """How one way of doing a thing differs from another, from pairs measured side by side.

    Attributes:
        median: of the pairs' changes, as a fraction: -0.01 is one per cent less.
        low: lower end of an interval for that median: a pair's change, so no distribution is assumed.
        high: its upper end.
        confidence: with which the interval covers the true median, if pairs are as likely above it as below.
        pairs: how many there were.
    """

    median: float
    low: float
    high: float
    confidence: float
    pairs: int

    @property
    def within_noise(self) -> bool:
        """Whether no change at all is inside the interval."""
        return self.low <= 0 <= self.high

    @property
    def verdict(self) -> str:
        """In words."""
        if self.within_noise:
            return "unchanged within noise"
        if self.confidence < CONFIDENCE:
            return f"too few pairs to tell ({self.pairs})"
        return "shorter" if self.median < 0 else "longer"

    def to_dict(self) -> dict[str, object]:
        """For JSON, the verdict included."""
        return asdict(self) | {"verdict": self.verdict}


def paired_change(before: Sequence[float], after: Sequence[float]) -> Change:
    """The change from ``before`` to ``after``, of which each pair was measured under the same circumstances.

    The interval is that of the sign test: from the k-th smallest to the k-th largest change, with the largest k that still
    covers the median with a probability of 95 %; with fewer than 6 pairs it is from the smallest to the largest and covers less.
    """
    changes = sorted(new / old - 1 for old, new in zip(before, after, strict=True))
    if not changes:
        raise ValueError("no pairs to compare")
    pairs = len(changes)
    outside = 0.0  # probability that k or more pairs all lie on one side
    k = 0
    while k < pairs / 2:
        more = outside + 2 * math.comb(pairs, k) / 2**pairs
        if k > 0 and 1 - more < CONFIDENCE:
            break
        outside, k = more, k + 1
    return Change(statistics.median(changes), changes[k - 1], changes[-k], max(0.0, 1 - outside), pairs)


def spread(values: Sequence[float]) -> dict[str, object]:
    """Mean, smallest, largest and all of ``values``, in the order they came."""
    return {"mean": statistics.fmean(values), "min": min(values), "max": max(values), "values": list(values)}
