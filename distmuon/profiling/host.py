"""The host side of a step: how many operators it dispatches, and its time where arithmetic costs nearly nothing.

On a GPU a step is slow where the host can't launch fast enough. To see that part alone, contestants step matrices so
small that the time is that of Python and of dispatching; this process stands for one rank, and exchanges move nothing.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from distmuon.counting.contestants import Contestant
from distmuon.counting.standin import exchanges_move_nothing, make_optimizer, stand_for
from distmuon.optimizer import DistMuon
from distmuon.workloads.config import get_workload
from distmuon.workloads.storage import get_buckets, muon_parameters

#: The shapes of ``kimi-debug`` with every side divided by 16.
SMALL_WORKLOAD = "kimi-debug/16"

_WARMUP = 3


@dataclass(frozen=True)
class HostSide:
    """The host side of one contestant's step.

    Attributes:
        contestant: its text.
        operators: ATen operators dispatched, views among them.
        views: of these, those that only make a view of a tensor.
        times_ms: of each step; the k-th of one contestant is a neighbour in time of the k-th of the others.
    """

    contestant: str
    operators: int
    views: int
    times_ms: tuple[float, ...]

    @property
    def without_views(self) -> int:
        """Operators that are more than a view."""
        return self.operators - self.views

    @property
    def median_ms(self) -> float:
        """The middle one of its times."""
        return statistics.median(self.times_ms)


class OperatorCounter(TorchDispatchMode):
    """Counts the ATen operators that are dispatched while it is entered.

    Attributes:
        operators: by operator.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operators: Counter[Any] = Counter()

    @property
    def views(self) -> int:
        """How many of them only make a view."""
        return sum(count for operator, count in self.operators.items() if operator.is_view)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        self.operators[func] += func.namespace == "aten"
        return func(*args, **(kwargs or {}))


def measure_host(
    contestants: Sequence[str],
    workload: str = SMALL_WORKLOAD,
    *,
    ranks: int | None = None,
    ep: int | None = None,
    rank: int = 0,
    turns: int = 40,
) -> list[HostSide]:
    """Step each contestant on the CPU in fp32, on one thread, in turns whose order is reversed each time.

    Args:
        contestants: their texts; buckets are the workload's own unless set.
        workload: name of that whose matrices are stepped.
        ranks: of the job; default the workload's own.
        ep: expert-parallel degree; default the workload's own.
        rank: which to stand for.
        turns: timed steps of each.

    Raises:
        ValueError: an unknown workload or contestant, numbers that don't fit, or no turns.
        RuntimeError: a process group exists already.
    """
    if turns < 1:
        raise ValueError(f"turns is {turns}: time at least one step")
    model = get_workload(workload)
    ranks = model.default_ranks if ranks is None else ranks
    specs = muon_parameters(model, ranks=ranks, ep=model.default_ep if ep is None else ep)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with stand_for(rank, ranks), exchanges_move_nothing():
            optimizers = {}
            for text in contestants:
                options = Contestant(text).options(buckets="published")
                options["buckets"] = get_buckets(model, options["buckets"])
                optimizers[text] = make_optimizer(specs, rank, "cpu", ns_dtype=torch.float32, **options)
            counts = {text: _count(optimizer) for text, optimizer in optimizers.items()}
            times = _time(optimizers, turns)
    finally:
        torch.set_num_threads(threads)
    return [
        HostSide(text, counted.operators.total(), counted.views, tuple(times[text])) for text, counted in counts.items()
    ]


def _count(optimizer: DistMuon) -> OperatorCounter:
    with OperatorCounter() as counter:
        optimizer.step()
    return counter


def _time(optimizers: dict[str, DistMuon], turns: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {text: [] for text in optimizers}
    collecting = gc.isenabled()
    gc.disable()
    try:
        for turn in range(-_WARMUP, turns):
            for text in list(optimizers)[:: -1 if turn % 2 else 1]:
                start = time.perf_counter()
                optimizers[text].step()
                if turn >= 0:
                    times[text].append(1e3 * (time.perf_counter() - start))
    finally:
        if collecting:
            gc.enable()
    return times
