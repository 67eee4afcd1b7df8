"""Spread, and whether a change is more than noise."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from distmuon.richtext import counted

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Change:
    """How one way of doing a thing differs from another, from pairs measured side by side.

    Attributes:
        median: of the pairs' changes, as a fraction: -0.01 is one per cent less.
        low: lower end of an interval for that median.
        high: its upper end.
        confidence: with which the interval covers the median that very many pairs would have.
        pairs: how many there were.
    """

    median: float
    low: float
    high: float
    confidence: float
    pairs: int

    def __str__(self) -> str:
        pairs, reach = counted(self.pairs, "pair", "pairs"), f"{self.low:+z.1%} to {self.high:+z.1%}"
        interval = reach if self.too_few else f"{self.confidence:.0%} interval {reach}"
        return f"{self.verdict} ({self.median:+z.1%} in the median of {pairs}, {interval})"

    @property
    def too_few(self) -> bool:
        """Whether the pairs are too few for any verdict, as no interval of theirs covers the median well enough."""
        return self.confidence < CONFIDENCE

    @property
    def verdict(self) -> str:
        """In words."""
        if self.too_few:
            return "too few pairs to tell"
        if self.low <= 0 <= self.high:
            return "unchanged within noise"
        return "shorter" if self.median < 0 else "longer"

    def to_dict(self) -> dict[str, object]:
        """For JSON, the verdict included."""
        return asdict(self) | {"verdict": self.verdict}


def paired_change(before: Sequence[float], after: Sequence[float]) -> Change:
    """The change from ``before`` to ``after``, where each pair was measured under the same circumstances.

    The interval is that of the sign test, which assumes no distribution: from the k-th smallest to the k-th largest
    change, with the largest k that covers the median with a probability of 95 %. Fewer than 6 pairs cannot reach that:
    then it is from the smallest to the largest, and ``confidence`` says how little it covers.
    """
    changes = sorted(new / old - 1 for old, new in zip(before, after, strict=True))
    if not changes:
        raise ValueError("no pairs to compare")
    pairs = len(changes)

    def covered(k: int) -> float:
        return 1 - 2 * sum(math.comb(pairs, below) for below in range(k)) / 2**pairs

    k = max((k for k in range(1, pairs // 2 + 1) if covered(k) >= CONFIDENCE), default=1)
    return Change(statistics.median(changes), changes[k - 1], changes[-k], covered(k), pairs)


def spread(values: Sequence[float]) -> dict[str, object]:
    """Mean, smallest, largest and all of ``values``, in the order they came."""
    return {"mean": statistics.fmean(values), "min": min(values), "max": max(values), "values": list(values)}
