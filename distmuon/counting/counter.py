"""The launch counter: watches the operators that a program dispatches and applies the rules of what each launches on a
GPU.

It runs on meta tensors under a fake process group, or on real tensors beside a real run; what it sees is the code that
trains.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from distmuon.counting.rules import TOOLCHAINS, Activity, activity_of
from distmuon.names import choose
from distmuon.ranges import parse

#: Where launches come from, in the order of a step.
SOURCES = (
    "momentum",
    "nesterov",
    "pack",
    "unpack",
    "ns_cast",
    "ns_norm",
    "gemm",
    "gemm_bias",
    "ns_diagonal",
    "transpose",
    "repack",
    "return_unpack",
    "decay",
    "update",
)

#: (phase of a step, part of an operator's activity) -> source.
_SOURCE_OF = {
    ("momentum", "lerp_"): "momentum",
    ("momentum", "lerp"): "nesterov",
    ("momentum", "copy"): "nesterov",  # without Nesterov, a momentum that is not contiguous
    ("pack", "copy"): "pack",
    ("unpack", "copy"): "unpack",
    ("newton_schulz", "copy"): "ns_cast",
    ("newton_schulz", "norm"): "ns_norm",
    ("newton_schulz", "gemm"): "gemm",
    ("newton_schulz", "gemm_bias"): "gemm_bias",
    ("newton_schulz", "diagonal"): "ns_diagonal",
    ("newton_schulz", "transpose"): "transpose",
    ("repack", "copy"): "repack",
    ("return_unpack", "copy"): "return_unpack",
    ("apply", "mul_"): "decay",
    ("apply", "add_"): "update",
    ("apply", "scalar"): "decay",
    ("momentum", "add_"): "nesterov",
}


@dataclass
class Counts:
    """What one rank's step launches.

    Attributes:
        by_source: activity of each source that has any.
        collectives: number of collectives.
        wire_bytes: bytes sent to other ranks.
        batched_copies: fused copies of more than one pair: (number of pairs, all pairs of one size?) -> calls.
        launches_in: of each (phase, bucket) of a step, collectives aside.
        operators_in: ATen operators dispatched in each, views among them.
    """

    by_source: dict[str, Activity] = field(default_factory=dict)
    collectives: int = 0
    wire_bytes: int = 0
    batched_copies: Counter[tuple[int, bool]] = field(default_factory=Counter)
    launches_in: Counter[tuple[str, str]] = field(default_factory=Counter)
    operators_in: Counter[tuple[str, str]] = field(default_factory=Counter)

    @property
    def async_copies(self) -> int:
        """Memcpys; memsets are not among them."""
        return sum(activity.memcpys for activity in self.by_source.values())

    @property
    def launches(self) -> int:
        """All device activity but collectives."""
        return sum(activity.launches for activity in self.by_source.values())


class LaunchCounter(TorchDispatchMode):
    """Counts while it is entered; the profiler ranges of a step (:mod:`distmuon.ranges`) say where a launch comes from.

    Args:
        toolchain: "rocm", "cuda12" or "cuda13", whose limits a fused launch has.

    Attributes:
        counts: what was counted so far.

    Raises:
        NotImplementedError: an operator without a rule is dispatched, or a launch in a place that has no source.
    """

    def __init__(self, toolchain: str = "rocm") -> None:
        super().__init__()
        self._toolchain = TOOLCHAINS[choose("toolchain", toolchain, TOOLCHAINS)]
        self._ranges: list[str] = []
        self.counts = Counts()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        keywords = kwargs or {}
        result = func(*args, **keywords)
        if func is torch.ops.profiler._record_function_enter_new.default:
            self._ranges.append(args[0])
        elif func is torch.ops.profiler._record_function_exit._RecordFunction:
            self._ranges.pop()
        else:
            for part, activity in activity_of(func, args, keywords, result, self._toolchain):
                self._add(func, part, activity)
            self._note(func, args)
            self.counts.operators_in[self.place] += func.namespace == "aten"
        return result

    def _add(self, func: Any, part: str, activity: Activity) -> None:
        if activity.collectives:
            self.counts.collectives += activity.collectives
            return
        source = self._source(func, part)
        before = self.counts.by_source.get(source, Activity())
        self.counts.by_source[source] = Activity(*(a + b for a, b in zip(before, activity, strict=True)))
        self.counts.launches_in[self.place] += activity.launches

    def _note(self, func: Any, args: tuple[Any, ...]) -> None:
        """What is counted beside device activity."""
        if func is torch.ops.aten._foreach_copy_.default:
            sizes = [tensor.numel() for tensor in args[0]]
            if len(sizes) > 1:
                self.counts.batched_copies[len(sizes), len(set(sizes)) == 1] += 1
        elif func is torch.ops.c10d.alltoall_base_.default:
            _, source, group, _, splits, *_ = args
            own = splits[dist.ProcessGroup.unbox(group).rank()]
            self.counts.wire_bytes += (sum(splits) - own) * source.dtype.itemsize

    @property
    def place(self) -> tuple[str, str]:
        """The phase and the bucket that are under way; blank outside of a step."""
        return next((found for name in reversed(self._ranges) if (found := parse(name))), ("", ""))

    def _source(self, func: Any, part: str) -> str:
        phase, _ = self.place
        if (phase, part) not in _SOURCE_OF:
            raise NotImplementedError(
                f"{func} launches in phase {phase!r} of a step: no source is named for {part!r} there"
            )
        return _SOURCE_OF[phase, part]
