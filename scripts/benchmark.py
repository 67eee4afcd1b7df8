"""Time what should be quick, and compare variants where a GPU is not needed. A benchmark, not a test.

    python scripts/benchmark.py

Planning is the best of several runs with nothing cached; counting includes making every rank's optimizer on meta
tensors. Memory is the peak of the whole process, importing torch included. The host side of a step is that of rank 0
with every side of the matrices divided by 16, variants in turn; peak buffers are those of the rank with most, from the
plan: packed and work buffers, and the updates under way. Counts are means over the ranks of kimi-debug.

The time of a whole step is that of four real ranks, in a profile whose files stay under runs/; it takes minutes:

    python scripts/benchmark.py --step-time
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable
from functools import partial

from distmuon.buffers import peak_bytes
from distmuon.commandline import Parser
from distmuon.counting.contestants import Contestant
from distmuon.counting.launches import count_launches
from distmuon.planning.options import PlanOptions
from distmuon.planning.plan import plan_step
from distmuon.planning.runs import cut_blocks, dim_runs
from distmuon.profiling.host import measure_host
from distmuon.profiling.noise import Change, paired_change
from distmuon.profiling.run import profile
from distmuon.profiling.session import Settings
from distmuon.studies.profile_tables import change_of
from distmuon.workloads import get_workload
from distmuon.workloads.storage import PUBLISHED_BUCKETS, muon_parameters, plan_for

REPEATS = 5
CONTESTANTS = ("baseline", "batched", "fused", "fused+buckets=auto")  # the others are compared with the first

COUNTED = (*CONTESTANTS, "fused+ns_algorithm=copy_free", "fused+buckets=auto+ns_algorithm=copy_free")
COUNTS = {
    "async_copies": "async copies",
    "launches": "launches",
    "collectives": "collectives",
    "wire_bytes": "bytes sent",
}


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
        for cached in (dim_runs, cut_blocks):
            cached.cache_clear()
        plan_step(specs, 0, PlanOptions(PUBLISHED_BUCKETS[name]))

    return min(seconds(plan_from_nothing) for _ in range(REPEATS))


def peak_buffer_bytes(workload: str, contestant: str) -> int:
    """Of the rank that holds most."""
    options = Contestant(contestant).options(buckets="published")
    ranks = range(get_workload(workload).default_ranks)
    return max(peak_bytes(plan_for(workload, rank=rank, **options)) for rank in ranks)


def main() -> None:
    """Measure and print."""
    parser = Parser(__doc__)
    parser.add_argument("--step-time", action="store_true", help="time steps of kimi-debug on four real ranks, too")
    step_time = parser.parse_args().step_time

    def show(what: str, figure: float, unit: str, digits: int = 1) -> None:
        print(f"{what:<64}{figure:>10,.{digits}f} {unit}".rstrip(), flush=True)

    def show_change(what: str, change: Change) -> None:
        ends = f"times {CONTESTANTS[0]} ({1 + change.low:.2f} to {1 + change.high:.2f}): {change.verdict}"
        show(what, 1 + change.median, ends, 2)

    for name in ("kimi-debug", "moonlight-16b"):
        show(f"plan one rank of {name} on {get_workload(name).default_ranks}", planning_seconds(name) * 1e3, "ms")
    for name in ("kimi-debug", "moonlight-16b"):
        took = seconds(partial(count_launches, name))
        show(f"count a step of {name} on {get_workload(name).default_ranks} ranks", took, "s")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)
    show("peak memory", peak, "MiB", 0)

    baseline, *others = measure_host(CONTESTANTS)
    show(f"host side of a step, {baseline.contestant}", baseline.median_ms, "ms", 2)
    show("  operators dispatched (and views)", baseline.without_views, f"({baseline.views:,})", 0)
    for each in others:
        show_change(f"host side of a step, {each.contestant}", paired_change(baseline.times_ms, each.times_ms))
        show("  operators dispatched (and views)", each.without_views, f"({each.views:,})", 0)

    print(f"{'a step of kimi-debug':<54}" + "".join(f"{name:>14}" for name in COUNTS.values()))
    counts = {text: count_launches("kimi-debug", **Contestant(text).options()) for text in COUNTED}
    for text, counted in counts.items():
        figures = [f"{counted.mean(value):,.2f}" for value in COUNTS]
        print(f"  {text:<52}" + "".join(f"{figure:>14}" for figure in figures))
        if text != CONTESTANTS[0]:
            ratios = [counted.mean(value) / counts[CONTESTANTS[0]].mean(value) for value in COUNTS]
            print(f"{'times baseline':>54}" + "".join(f"{ratio:>14.3f}" for ratio in ratios), flush=True)

    for name in ("kimi-debug", "moonlight-16b"):
        peaks = {text: peak_buffer_bytes(name, text) for text in CONTESTANTS}
        for text, held in peaks.items():
            above = (held - peaks[CONTESTANTS[0]]) / 2**20
            show(f"peak buffers a rank of {name}, {text}", held / 2**20, f"MiB ({above:+,.1f})")

    if step_time and (run := profile(Settings(variants=CONTESTANTS, steps=4, repeats=3))):
        for text in CONTESTANTS[1:]:
            if change := change_of(run, text, "cpu_span_ms"):
                show_change(f"step on four ranks, {text}", change)


if __name__ == "__main__":
    main()
