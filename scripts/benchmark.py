"""Time what should be quick: planning a rank, and counting a step. Prints a table; a benchmark, not a test.

    python scripts/benchmark.py

Planning is the best of several runs with nothing cached; counting includes making every rank's optimizer on meta
tensors. Memory is the peak of the whole process, importing torch included.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable
from functools import partial

from distmuon.commandline import Parser
from distmuon.placement import cut_blocks, dim_segments
from distmuon.plan import plan_step
from distmuon.profiling.counting import count_launches
from distmuon.workloads import get_workload
from distmuon.workloads.storage import PUBLISHED_BUCKETS, muon_parameters

REPEATS = 5


def seconds(call: Callable[[], object]) -> float:
    """Wall time of one call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def planning_seconds(name: str) -> float:
    """Best time of planning rank 0 of a workload on its own number of ranks."""
    workload = get_workload(name)
    specs = muon_parameters(workload, ranks=workload.default_ranks, ep=workload.default_ep)

    def plan_from_nothing() -> None:
        for cached in (dim_segments, cut_blocks):
            cached.cache_clear()
        plan_step(specs, 0, PUBLISHED_BUCKETS[name])

    return min(seconds(plan_from_nothing) for _ in range(REPEATS))


def main() -> None:
    """Measure and print."""
    Parser(__doc__).parse_args()
    lines = [f"{'what':<52}{'measured':>12}"]
    for name in ("kimi-debug", "moonlight-16b"):
        ranks = get_workload(name).default_ranks
        lines.append(f"{f'plan one rank of {name} on {ranks}':<52}{planning_seconds(name) * 1e3:>9.1f} ms")
    for name in ("kimi-debug", "moonlight-16b"):
        ranks = get_workload(name).default_ranks
        took = seconds(partial(count_launches, name))
        lines.append(f"{f'count a step of {name} on {ranks} ranks':<52}{took:>9.1f} s")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)
    lines.append(f"{'peak memory':<52}{peak:>9.0f} MiB")
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
