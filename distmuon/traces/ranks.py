"""The traces of the ranks of one run: found in a folder, checked to be all there, and laid on one clock."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from distmuon.traces.trace import Trace
from distmuon.traces.tracefile import TraceError

_JSON = re.compile(r"\.json(\.gz)?$")
_OF_A_RANK = re.compile(r"rank[-_]?\d+")
_EPOCH_US = 1e15  # a clock that counts microseconds since the epoch has been beyond this since 2001


def trace_files(path: Path | str) -> list[Path]:
    """The trace files at ``path``: the file itself, or those of the ranks in a folder, in order of their names.

    In a folder these are the JSON files, gzipped or not, with "rank" and a number in their names, else those with
    "trace".

    Raises:
        TraceError: there is none.
    """
    path = Path(path)
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise TraceError(f"{path}: there is no such file or folder")
    files = sorted(file for file in path.iterdir() if _JSON.search(file.name))
    found = [file for file in files if _OF_A_RANK.search(file.name)] or [file for file in files if "trace" in file.name]
    if not found:
        raise TraceError(f"{path}: no traces: none of its files is named like rank0.trace.json or rank0.trace.json.gz")
    return found


def missing_ranks(traces: Sequence[Trace]) -> list[int]:
    """The ranks of the run that ``traces`` lack; of a run that does not tell its size, those below the highest.

    Raises:
        TraceError: two are of one rank, one does not tell its rank, or they are of runs of different sizes.
    """
    by_rank: dict[int, Trace] = {}
    for trace in traces:
        if trace.rank is None:
            raise TraceError(f"{trace.path}: does not tell its rank, neither inside nor in its name")
        if trace.rank in by_rank:
            raise TraceError(f"{trace.path}: rank {trace.rank} is there twice, in {by_rank[trace.rank].path.name} too")
        by_rank[trace.rank] = trace
    sizes = {trace.ranks for trace in traces}
    if len(sizes) > 1:
        told = ", ".join(f"{trace.path.name} of {trace.ranks or 'an unknown number'}" for trace in traces)
        raise TraceError(f"{traces[0].path.parent}: not the ranks of one run: {told}")
    size = sizes.pop() or max(by_rank) + 1
    return [rank for rank in range(size) if rank not in by_rank]


class RankTraces:
    """The traces of the ranks of one run.

    Args:
        path: one rank's trace, or a folder with those of all.
        partial: take a folder in which ranks are missing for what it is, as one host's part of a run.

    Attributes:
        traces: by rank, in order.
        missing: ranks of the run that are not there.
        clock_shifts_us: what to add to each trace's times for those on a common clock, which is that of the earliest
            trace; None where a trace does not tell what its clock counts from.

    Raises:
        TraceError: a file is not a trace, or is cut off; a rank is there twice, or missing.
    """

    def __init__(self, path: Path | str, *, partial: bool = False) -> None:
        self.path = Path(path)
        self.traces = [Trace(file) for file in trace_files(path)]
        self.missing: list[int] = []
        if self.path.is_dir():
            self.missing = missing_ranks(self.traces)
            self.traces.sort(key=lambda trace: trace.rank or 0)
            if self.missing and not partial:
                missing = shown_ranks(self.missing)
                raise TraceError(
                    f"{self.path}: ranks are missing: {missing}; partial=True (--partial) takes the others"
                )
        self.clock_shifts_us = _clock_shifts_us(self.traces)

    @property
    def has_device(self) -> bool:
        """Whether every rank recorded a device."""
        return all(trace.has_device for trace in self.traces)


def shown_ranks(ranks: Sequence[int]) -> str:
    """Ranks as text, runs of them shortened: "0-3, 7"."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _clock_shifts_us(traces: Sequence[Trace]) -> list[float] | None:
    bases = [trace.base_ns for trace in traces]
    if not all(bases) and (any(bases) or min(trace.start_us for trace in traces) < _EPOCH_US):
        return None
    return [(base - min(bases)) / 1e3 for base in bases]
