"""Check a device against what is counted and promised, with one process that stands for each rank of a job in turn.

The ranks' real optimizers step on the device under torch's fake process group. What a profiler saw of a step is laid
beside what the launch counter says of it, operator by operator; spans and the time of packing are the device's. An
exchange brings ones (:func:`distmuon.counting.standin.exchanges_move_nothing`), so it costs one kernel that is left
out here (but not of a graph, whose kernels have no operator), and times hold no waiting for other ranks. Bits are
compared where one rank holds all matrices: contestants may choose other owners, and what others own is ones here. Needs
nothing but torch.
"""

from __future__ import annotations

import ctypes
import hashlib
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile, record_function

from distmuon.counting.contestants import Contestant
from distmuon.counting.counter import LaunchCounter
from distmuon.counting.rules import RULES
from distmuon.counting.standin import exchanges_move_nothing, make_optimizer, stand_for
from distmuon.optimizer import DistMuon
from distmuon.planning.placement import ParameterSpec
from distmuon.ranges import parse
from distmuon.traces.intervals import union
from distmuon.traces.trace import Activity, Event, Trace
from distmuon.workloads.config import Workload
from distmuon.workloads.storage import get_buckets, muon_parameters

#: What is checked unless asked otherwise; the first is what the others are compared with.
CONTESTANTS = ("baseline", "batched", "fused", "fused+buckets=auto", "fused+ns_algorithm=copy_free")

_EXCHANGE = "c10d::alltoall_base_"
_KNOWN = {operator._schema.name for operator in RULES}
_STEP = "check"
_GRAPH = " (graph)"
_COUNTS = ("memcpys", "memsets", "kernels")
_KINDS = {"memcpy": "memcpys", "memset": "memsets", "kernel": "kernels", "collective": "kernels"}


@dataclass(frozen=True)
class Checked:
    """What one contestant's step does on one rank.

    Attributes:
        contestant: its text, or that with " (graph)" for the replay of a captured step.
        rank: which was stood for.
        counted: by operator, "memcpys", "memsets" and "kernels" as the counter has them; None for a graph.
        profiled: the same as the profiler has them, without exchanges; None where there is no device.
        cpu_span_ms: of each profiled step.
        gpu_span_ms: of each, from its first activity to the end of its last; None where there is no device.
        pack_us: device time of all packing before an exchange, in the middle step; None where there is no device.
        plain_copy_us: of copies of as many elements, from and to the same dtypes, without regions.
        digest: of the rank's parameters after all steps.
        eager_digest: of a graph: the same after as many of the steps that it holds, one by one; None elsewhere.
    """

    contestant: str
    rank: int
    counted: dict[str, Counter[str]] | None
    profiled: dict[str, Counter[str]] | None
    cpu_span_ms: tuple[float, ...]
    gpu_span_ms: tuple[float, ...] | None
    pack_us: float | None
    plain_copy_us: float | None
    digest: str
    eager_digest: str | None = None

    @property
    def differences(self) -> list[str]:
        """Each operator whose counts differ, with both; empty where one of them is missing."""
        if self.counted is None or self.profiled is None:
            return []
        none: Counter[str] = Counter()
        found = []
        for operator in sorted(self.counted | self.profiled):
            counted, profiled = self.counted.get(operator, none), self.profiled.get(operator, none)
            if counted != profiled:
                found.append(f"{operator}: counted {_shown(counted)}, profiled {_shown(profiled)}")
        return found

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return vars(self) | {"differences": self.differences}


def check_rank(
    workload: Workload,
    rank: int,
    contestants: Sequence[str] = CONTESTANTS,
    *,
    ranks: int,
    ep: int,
    device: str,
    folder: Path,
    steps: int = 5,
    seed: int = 0,
) -> list[Checked]:
    """Stand for one rank, and check each contestant on it.

    Args:
        workload: whose matrices are stepped.
        rank: which to stand for.
        contestants: their texts.
        ranks: of the job.
        ep: expert-parallel degree.
        device: "cpu" or "cuda". On a CPU Newton-Schulz is in float32, which every CPU has units for.
        folder: for the traces, ``rank{r}.{contestant}.trace.json``. On a GPU each contestant's step is captured in a
            graph, too.
        steps: profiled steps of each, after two that are not.
        seed: of parameters and gradients.

    Raises:
        RuntimeError: a process group exists already.
    """
    specs = muon_parameters(workload, ranks=ranks, ep=ep)
    found = []
    for text in contestants:
        options = _options(workload, text, device)
        counted = _count(specs, rank, ranks, options)
        for name, captured in [(text, False), (text + _GRAPH, True)][: 2 if device == "cuda" else 1]:
            with stand_for(rank, ranks), exchanges_move_nothing():
                eager = None
                if captured:
                    options |= {"capturable": True, "lr": torch.tensor(1e-3, device=device)}
                    eager = digest_after(2 + steps, specs, rank, device, seed, options)
                optimizer = make_optimizer(specs, rank, device, **options)
                _randomize(optimizer, device, seed)
                path = folder / f"rank{rank}.{name.replace(' ', '')}.trace.json"
                _run(optimizer, path, device, steps, captured)
                plain_us = _plain_copy_us(optimizer, folder) if device == "cuda" and not captured else None
                read = _read(name, rank, Trace(path), optimizer, None if captured else counted, plain_us)
                found.append(replace(read, eager_digest=eager))
    return found


def digest_after(
    steps: int, specs: Sequence[ParameterSpec], rank: int, device: str, seed: int, options: Mapping[str, Any]
) -> str:
    """The digest of the parameters after ``steps`` of an optimizer of its own, from the seed on."""
    optimizer = make_optimizer(specs, rank, device, **options)
    _randomize(optimizer, device, seed)
    for _ in range(steps):
        optimizer.step()
    return _digest(optimizer)


def whole_digests(
    workload: Workload, contestants: Sequence[str] = CONTESTANTS, *, device: str, steps: int = 2, seed: int = 0
) -> dict[str, str]:
    """By contestant, the digest of all parameters after some steps of one rank that holds every matrix whole."""
    specs = muon_parameters(workload, ranks=1, ep=1)
    digests = {}
    for text in contestants:
        with stand_for(0, 1), exchanges_move_nothing():
            digests[text] = digest_after(steps, specs, 0, device, seed, _options(workload, text, device))
    return digests


def summary(found: Sequence[Checked], digests: Mapping[str, str]) -> list[dict[str, Any]]:
    """A row a contestant: means over the ranks, of times the median step's; None for what cannot be told.

    Args:
        found: of all ranks and contestants.
        digests: as of :func:`whole_digests`.
    """
    rows = []
    for name in dict.fromkeys(each.contestant for each in found):
        mine = [each for each in found if each.contestant == name]
        spans = [statistics.median(each.gpu_span_ms) if each.gpu_span_ms else None for each in mine]
        rows.append(
            {
                "contestant": name,
                "copies counted": _mean(_total(each.counted, "memcpys") for each in mine),
                "copies profiled": _mean(_total(each.profiled, "memcpys") for each in mine),
                "launches counted": _mean(_total(each.counted, *_COUNTS) for each in mine),
                "launches profiled": _mean(_total(each.profiled, *_COUNTS) for each in mine),
                "CPU span (ms)": _mean(statistics.median(each.cpu_span_ms) for each in mine),
                "GPU span (ms)": _mean(spans),
                "packing (us)": _mean(each.pack_us for each in mine),
                "plain copy (us)": _mean(each.plain_copy_us for each in mine),
                "bits": _bits(name, found, digests),
            }
        )
    return rows


def _bits(name: str, found: Sequence[Checked], digests: Mapping[str, str]) -> str:
    """Whether a contestant has the bits of the first with its arithmetic, or a graph those of the step it holds."""
    if name.endswith(_GRAPH):
        same = all(each.digest == each.eager_digest for each in found if each.contestant == name)
        return f"{'equal to' if same else 'DIFFER from'} its steps without a graph"
    first = next(other for other in digests if _algorithm(other) == _algorithm(name))
    if first == name:
        return "first of its arithmetic"
    return f"{'equal to' if digests[first] == digests[name] else 'DIFFER from'} {first}"


def _algorithm(contestant: str) -> str:
    return Contestant(contestant).options(ns_algorithm="standard")["ns_algorithm"]


def _options(workload: Workload, contestant: str, device: str) -> dict[str, Any]:
    options = Contestant(contestant).options(buckets="published")
    options["buckets"] = get_buckets(workload, options["buckets"])
    return options | ({"ns_dtype": torch.float32} if device == "cpu" else {})


def activity_by_operator(trace: Trace, event: Event) -> Iterator[tuple[str, Activity]]:
    """Each device activity of ``event`` with the operator that a counter of dispatched operators would name for it.

    That is the outermost operator around its launch that has a rule, since operators call others; where none has, the
    innermost; "no operator" where none ran, as for the kernels of a graph.
    """
    upcoming, running = trace.operators_in(event)[::-1], list[Event]()
    for start_us, started in trace.launches_in(event):
        while upcoming and upcoming[-1].start_us <= start_us:
            operator = upcoming.pop()
            while running and running[-1].end_us <= operator.start_us:
                running.pop()
            running.append(operator)
        around = [operator.name for operator in running if operator.end_us >= start_us]
        name = next((each for each in around if each in _KNOWN), around[-1] if around else "no operator")
        yield from ((name, item) for item in started)


def profiled_counts(trace: Trace, event: Event) -> dict[str, Counter[str]]:
    """Memcpys, memsets and kernels that ``event`` launched, by operator, without its exchanges."""
    found: dict[str, Counter[str]] = {}
    for name, item in activity_by_operator(trace, event):
        if name != _EXCHANGE:
            found.setdefault(name, Counter())[_KINDS[item.kind]] += 1
    return found


class _OperatorCounter(LaunchCounter):
    """A launch counter that keeps apart the operators, too."""

    def __init__(self, toolchain: str) -> None:
        super().__init__(toolchain)
        self.by_operator: dict[str, Counter[str]] = {}

    def _add(self, func: Any, part: str, activity: Any) -> None:
        super()._add(func, part, activity)
        counts = {kind: getattr(activity, kind) for kind in _COUNTS}
        if any(counts.values()):
            self.by_operator.setdefault(func._schema.name, Counter()).update(counts)


def _count(
    specs: Sequence[ParameterSpec], rank: int, ranks: int, options: Mapping[str, Any]
) -> dict[str, Counter[str]]:
    with stand_for(rank, ranks):
        optimizer = make_optimizer(specs, rank, "meta", **options)
        with _OperatorCounter(toolchain()) as counter:
            optimizer.step()
    return {name: +counts for name, counts in counter.by_operator.items()}


def toolchain() -> str:
    """The limits of launches that this build of torch has; those of ROCm where it is for CPUs alone."""
    if not torch.version.cuda:
        return "rocm"
    return "cuda13" if int(torch.version.cuda.split(".")[0]) >= 13 else "cuda12"


def _randomize(optimizer: DistMuon, device: str, seed: int) -> None:
    generator = torch.Generator(device).manual_seed(seed)
    for parameter in _parameters(optimizer):
        assert parameter.grad is not None
        for tensor in (parameter.detach(), parameter.grad):
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            local.copy_(torch.randn(local.shape, generator=generator, device=device))


def _parameters(optimizer: DistMuon) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _run(optimizer: DistMuon, path: Path, device: str, steps: int, captured: bool) -> None:
    """Two steps, then ``steps`` that are profiled into ``path``."""
    step: Callable[[], Any] = optimizer.step
    for _ in range(2):  # momenta exist then, and kernels are loaded
        step()
    if captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            optimizer.step()
        step = graph.replay
    with _profiled(path, device):
        for _ in range(steps):
            with record_function(_STEP):
                step()
            if device == "cuda":
                torch.cuda.synchronize()


@contextmanager
def _profiled(path: Path, device: str) -> Iterator[None]:
    kinds = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device == "cuda" else [])
    with profile(activities=kinds) as session:
        yield
    session.export_chrome_trace(str(path))


def _plain_copy_us(optimizer: DistMuon, folder: Path) -> float:
    """Device time of a plain copy a stage of what it packs, the shortest of ten."""
    path = folder / "plain_copy.trace.json"
    exchanges = [stage.exchange for stage in optimizer.plan.stages if stage.exchange]
    sizes = [(exchange.out.held_numel, exchange.dtype) for exchange in exchanges if exchange.out]
    pairs = [(torch.empty(size, device="cuda", dtype=dtype), torch.zeros(size, device="cuda")) for size, dtype in sizes]
    with _profiled(path, "cuda"):
        for _ in range(10):
            with record_function(_STEP):
                for there, here in pairs:
                    there.copy_(here)
        torch.cuda.synchronize()
    trace = Trace(path)
    return min(sum(item.duration_us for item in trace.launched_in(event)) for event in trace.ranges(_STEP))


def _read(
    name: str,
    rank: int,
    trace: Trace,
    optimizer: DistMuon,
    counted: dict[str, Counter[str]] | None,
    plain_copy_us: float | None,
) -> Checked:
    events = trace.ranges(_STEP)
    middle = events[len(events) // 2]
    by_operator = trace.has_device and counted is not None  # the kernels of a graph have no operators
    packs = [each for each in trace.annotations if (parse(each.name) or ("",))[0] == "pack" and middle.contains(each)]
    return Checked(
        name,
        rank,
        counted,
        profiled_counts(trace, middle) if by_operator else None,
        tuple(event.duration_us / 1e3 for event in events),
        _gpu_spans_ms(trace, events),
        sum(item.duration_us for each in packs for item in trace.launched_in(each)) if by_operator else None,
        plain_copy_us,
        _digest(optimizer),
    )


def _gpu_spans_ms(trace: Trace, events: Sequence[Event]) -> tuple[float, ...] | None:
    """None where the trace cannot tell them: it has no device, or lacks what one of the events launched."""
    spans = []
    for event in events:
        covered = union(item.interval for name, item in activity_by_operator(trace, event) if name != _EXCHANGE)
        if not covered or trace.lost_in(event):
            return None
        spans.append((covered[-1][1] - covered[0][0]) / 1e3)
    return tuple(spans)


def _digest(optimizer: DistMuon) -> str:
    digest = hashlib.sha256()
    for parameter in _parameters(optimizer):
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        held = local.detach().cpu().contiguous()
        digest.update(ctypes.string_at(held.data_ptr(), held.nbytes))  # as NumPy may not be there
    return digest.hexdigest()


def _total(counts: dict[str, Counter[str]] | None, *kinds: str) -> float | None:
    return None if counts is None else sum(of[kind] for of in counts.values() for kind in kinds)


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def _shown(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items())) or "nothing"
