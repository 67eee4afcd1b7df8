"""When a batched copy pays: one ``batched_copy_`` against a ``copy_`` a region, over how many and how large regions."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence

import pandas as pd
import torch
from torch import Tensor

from distmuon.counting.counter import LaunchCounter
from distmuon.packing import batched_copy_
from distmuon.profiling.noise import paired_change
from distmuon.ranges import phase

#: Region counts and sizes (in elements) of a sweep, unless told otherwise.
COUNTS = (2, 8, 32, 128, 512)
NUMELS = (64, 1_024, 16_384, 65_536, 262_144, 1_048_576)

_BLOCK_S = 2e-4


def sweep_copies(
    counts: Sequence[int] = COUNTS,
    numels: Sequence[int] = NUMELS,
    *,
    device: str = "cpu",
    turns: int = 15,
    max_bytes: int = 64 << 20,
) -> pd.DataFrame:
    """Pack fp32 regions from tensors of their own into one buffer, both ways in turn.

    On a GPU a time is from the first launch to the end of the last copy.

    Args:
        counts: of regions, two or more.
        numels: elements of each region.
        device: "cpu" or "cuda".
        turns: timed pairs of each combination.
        max_bytes: combinations of more bytes than this are left out.

    Returns:
        A row a combination: ``regions``, ``region_bytes``; ``single_us`` and ``batched_us``, median times; ``change``,
        of the time from single to batched, with its interval ``low`` to ``high`` and ``verdict``; ``single_launches``
        and ``batched_launches``, counted as on a GPU.

    Raises:
        ValueError: fewer than two regions, or nothing within ``max_bytes``.
    """
    if min(counts) < 2:
        raise ValueError(f"counts are {list(counts)}: one region is never batched, so give two or more")
    rows = [_row(count, numel, device, turns) for count in counts for numel in numels if 4 * count * numel <= max_bytes]
    if not rows:
        raise ValueError(
            f"no combination of {list(counts)} regions of {list(numels)} elements is within {max_bytes} bytes"
        )
    return pd.DataFrame(rows)


def _row(count: int, numel: int, device: str, turns: int) -> dict[str, object]:
    regions = _regions(count, numel, device)
    single, batched = _time(regions, turns)
    change = paired_change(single, batched)
    on_meta = _regions(count, numel, "meta")
    return {
        "regions": count,
        "region_bytes": 4 * numel,
        "single_us": statistics.median(single),
        "batched_us": statistics.median(batched),
        "change": change.median,
        "low": change.low,
        "high": change.high,
        "verdict": change.verdict,
        "single_launches": _launches(copy_each, on_meta),
        "batched_launches": _launches(batched_copy_, on_meta),
    }


def copy_each(destinations: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """One ``copy_`` a region."""
    for destination, source in zip(destinations, sources, strict=True):
        destination.copy_(source)


def _regions(count: int, numel: int, device: str) -> tuple[list[Tensor], list[Tensor]]:
    buffer = torch.zeros(count * numel, device=device)
    return list(buffer.split(numel)), [torch.zeros(numel, device=device) for _ in range(count)]


def _launches(copy: Callable[..., None], regions: tuple[list[Tensor], list[Tensor]]) -> int:
    with LaunchCounter() as counter, phase("pack", "sweep"):
        copy(*regions)
    return counter.counts.launches


def _time(regions: tuple[list[Tensor], list[Tensor]], turns: int) -> tuple[list[float], list[float]]:
    """Times in µs of a call of each way, in turns whose order is reversed each time; short ones as means of a block."""
    ways = (copy_each, batched_copy_)
    calls = max(1, round(_BLOCK_S / min(_seconds(way, regions, 3) for way in ways)))
    times: tuple[list[float], list[float]] = ([], [])
    collecting = gc.isenabled()
    gc.disable()
    try:
        for turn in range(turns):
            for way in (0, 1) if turn % 2 else (1, 0):
                times[way].append(1e6 * _seconds(ways[way], regions, calls))
    finally:
        if collecting:
            gc.enable()
    return times


def _seconds(copy: Callable[..., None], regions: tuple[list[Tensor], list[Tensor]], calls: int) -> float:
    on_gpu = regions[0][0].is_cuda
    start = time.perf_counter()
    for _ in range(calls):
        copy(*regions)
    if on_gpu:
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / calls
