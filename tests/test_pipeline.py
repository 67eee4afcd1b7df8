"""The pipeline of a step: the next bucket's exchange flies while this one computes, in two slots of buffers."""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from distmuon import DistMuon
from distmuon.ranges import parse

BUCKETS = [("a*",), ("b*",), ("c*",), ("d*",)]


def profiled_step(
    rank: int, ranks: int
) -> tuple[list[tuple[str, str]], list[tuple[float, float]], list[tuple[float, float]]]:
    """The ranges of a step in order, and the (start, end) of its exchanges on the wire and of its Newton-Schulz."""
    mesh = init_device_mesh("cpu", (ranks,))
    named = []
    for bucket in "abcd":
        for index in range(4):
            whole = torch.randn(256, 256)
            parameter = nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None))
            parameter.grad = torch.ones_like(parameter)
            named.append((f"{bucket}{index}", parameter))
    optimizer = DistMuon(named, buckets=BUCKETS, ns_dtype=torch.float32)
    optimizer.step()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        optimizer.step()
    events = sorted(profiler.events(), key=lambda event: event.time_range.start)
    ranges = [found for event in events if (found := parse(event.name))]
    wire = [(event.time_range.start, event.time_range.end) for event in events if event.name == "gloo:all_to_all"]
    compute = [
        (event.time_range.start, event.time_range.end)
        for event in events
        if (found := parse(event.name)) and found[0] == "newton_schulz"
    ]
    return ranges, wire, compute


def test_the_next_exchange_starts_before_this_bucket_computes_and_flies_meanwhile(pool):
    for ranges, wire, compute in pool.run(4, profiled_step):
        order = [(phase, bucket[0]) for phase, bucket in ranges if phase in ("all_to_all", "newton_schulz", "apply")]
        for number in range(3):
            sent_next = order.index(("all_to_all", str(number + 1)))
            assert sent_next < order.index(("newton_schulz", str(number)))
        for number in range(2):  # its slot is free again before the exchange after the next begins
            assert order.index(("apply", str(number))) < order.index(("all_to_all", str(number + 2)))
        assert len(wire) == 8
        assert any(start < end and begin < stop for begin, end in wire for start, stop in compute)


class Seen(TorchDispatchMode):
    """The operators that are dispatched while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        self.operators.append(str(func))
        return func(*args, **(kwargs or {}))


def test_ranges_are_there_for_every_profiler_and_dispatch_mode():
    """They are opened only where someone looks."""
    weight = nn.Parameter(torch.randn(32, 32))
    optimizer = DistMuon([("a", weight)])
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    with profile(activities=[ProfilerActivity.CPU]) as new:
        optimizer.step()
    with torch.autograd.profiler.profile() as old:
        optimizer.step()
    for events in (new.events(), old.function_events):
        phases = [found[0] for event in events if (found := parse(event.name))]
        assert phases == ["momentum", "pack", "newton_schulz", "return_unpack", "apply"]
    with Seen() as seen:
        optimizer.step()
    assert seen.operators.count("profiler._record_function_enter_new.default") == len(phases) + 1  # and the step's own


def test_the_number_of_matrices_orthogonalised_is_known():
    """A silent fallback, to no orthogonalisation at all, would show here."""
    optimizer = DistMuon([("a", nn.Parameter(torch.randn(8, 4))), ("b", nn.Parameter(torch.randn(3, 4, 4)))])
    assert sum(row["matrices"] for row in optimizer.plan.report()) == 4


def tensor_bytes(rank: int, ranks: int) -> list[int]:
    """Bytes of all tensors that are alive after each of several steps."""
    mesh = init_device_mesh("cpu", (ranks,))
    parameter = nn.Parameter(distribute_tensor(torch.randn(64, 64), mesh, [Shard(0)], src_data_rank=None))
    optimizer = DistMuon([("a", parameter)])
    sizes = []
    for _ in range(20):
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        gc.collect()
        sizes.append(sum(thing.nbytes for thing in gc.get_objects() if isinstance(thing, torch.Tensor)))
    return sizes


def test_memory_is_flat_over_steps(pool):
    """By the least of several steps: a thread of the backend may still hold the tensors of an exchange that is over."""
    for sizes in pool.run(2, tensor_bytes):
        assert min(sizes[1:10]) == min(sizes[10:])
