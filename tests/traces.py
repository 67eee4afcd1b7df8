"""Traces for tests: single events as the PyTorch profiler writes them, whole small traces, and real ranks' own."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

REAL = Path(__file__).parents[2] / "shared" / "traces"
needs_real_traces = pytest.mark.skipif(not REAL.is_dir(), reason=f"the real traces are not there: {REAL}")


def event(
    category: str, name: str, start: float, duration: float, tid: int = 1, pid: int = 1, **args: Any
) -> dict[str, Any]:
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "ts": start,
        "dur": duration,
        "pid": pid,
        "tid": tid,
        "args": args,
    }


def launch(
    correlation: int, start: float, tid: int = 1, category: str = "cuda_runtime", name: str = "cudaLaunchKernel"
) -> dict[str, Any]:
    return event(category, name, start, 1, tid=tid, correlation=correlation)


def device(
    category: str, name: str, start: float, duration: float, correlation: int, stream: int = 7
) -> dict[str, Any]:
    return event(category, name, start, duration, tid=stream, pid=0, correlation=correlation, stream=stream)


# A step of 100 us on thread 1 that launches five activities, and others that only look as if they were its own.
STEP = [
    event("user_annotation", "step", 0, 100),
    event("gpu_user_annotation", "step", 20, 100, tid=7, pid=0),
    launch(1, 10, name="cudaMemcpyAsync"),
    launch(2, 20, category="cuda_driver", name="cuLaunchKernel"),
    launch(3, 30),
    launch(4, 40, name="cudaMemsetAsync"),
    launch(5, 100),
    launch(6, 50, tid=2),  # another thread
    launch(7, 101),  # too late
    device("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 30, 10, 1),
    device("kernel", "gemm", 45, 5, 2),
    device("kernel", "ncclDevKernel_SendRecv", 48, 12, 3, stream=20),
    device("gpu_memset", "Memset (Device)", 55, 1, 4),
    device("kernel", "gemm", 120, 10, 5),  # runs after the range has ended on the host
    device("kernel", "gemm", 60, 10, 6),
    device("kernel", "gemm", 130, 10, 7),
]

#: What the step above comes to.
FIGURES = {
    "cpu_span_ms": 0.1,
    "gpu_span_ms": 0.1,
    "memcpy": {"DtoD": 1},
    "memset": 1,
    "kernels": 2,
    "collectives": 1,
    "exposed_collective_ms": 0.009,
}


def texts(document: Any) -> list[str]:
    """All texts among the values of a JSON document."""
    if isinstance(document, dict | list):
        values = document.values() if isinstance(document, dict) else document
        return [text for value in values for text in texts(value)]
    return [document] if isinstance(document, str) else []


def write(folder: Path, document: Any, name: str = "trace.json") -> Path:
    path = folder / name
    opened = gzip.open if name.endswith(".gz") else open
    with opened(path, "wt") as file:
        json.dump(document, file)
    return path


def write_rank(
    folder: Path, rank: int, ranks: int | None = None, events: list[dict[str, Any]] = STEP, base_ns: int = 10**18
) -> Path:
    """``rank{r}.trace.json`` of a run of ``ranks``, or of one that does not tell how many."""
    document: dict[str, Any] = {"baseTimeNanoseconds": base_ns, "traceEvents": events}
    if ranks is not None:
        document["distributedInfo"] = {"backend": "nccl", "rank": rank, "world_size": ranks}
    return write(folder, document, f"rank{rank}.trace.json")


def trace_exchanges(rank: int, ranks: int, folder: str, steps: int = 3) -> None:
    """A rank that computes and takes part in an all-to-all in each of some steps, and writes its trace."""
    own, theirs = torch.ones(ranks, 64), torch.empty(ranks, 64)
    with profile(activities=[ProfilerActivity.CPU]) as session:
        for step in range(steps):
            dist.barrier()
            with record_function(f"outer/{step}"), record_function("step"):
                with record_function("distmuon/pack/0 layers"):
                    own.copy_(own @ torch.eye(64))
                dist.all_to_all_single(theirs, own)
            with record_function("step"):
                own += 1
    session.export_chrome_trace(str(Path(folder, f"rank{rank}.trace.json.gz")))
