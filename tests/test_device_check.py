"""The check of a device, with the CPU standing in for one: what only a device can tell is n/a, the rest must hold."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from traces import device, event, launch, texts, write

from distmuon.counting.counter import LaunchCounter
from distmuon.counting.launches import count_launches
from distmuon.counting.standin import exchanges_move_nothing, stand_for
from distmuon.profiling.device_check import (
    CONTESTANTS,
    check_rank,
    digest_after,
    profiled_counts,
    summary,
    toolchain,
    whole_digests,
)
from distmuon.profiling.devices import use_gpu
from distmuon.traces.trace import Trace
from distmuon.workloads import get_workload
from distmuon.workloads.storage import muon_parameters

ROOT = Path(__file__).parents[1]


def test_a_contestant_is_counted_and_timed(tmp_path: Path) -> None:
    tiny = get_workload("tiny")
    (found,) = check_rank(tiny, 1, ["fused"], ranks=4, ep=2, device="cpu", folder=tmp_path, steps=3)
    expected = count_launches("tiny", 4, 2, "fused").per_rank[1]
    assert sum(counts["memcpys"] for counts in found.counted.values()) == expected.async_copies
    assert sum(counts.total() for counts in found.counted.values()) == expected.launches
    assert len(found.cpu_span_ms) == 3
    assert min(found.cpu_span_ms) > 0
    assert found.profiled is found.gpu_span_ms is found.pack_us is None
    assert found.differences == []
    assert Trace(tmp_path / "rank1.fused.trace.json").range_names()["check"] == 3
    (row,) = summary([found], {"fused": "digest"})
    assert (row["copies counted"], row["copies profiled"], row["GPU span (ms)"]) == (expected.async_copies, None, None)


def test_contestants_of_one_arithmetic_have_the_same_bits(tmp_path: Path) -> None:
    digests = whole_digests(get_workload("tiny"), device="cpu")
    *standard, copy_free = digests.values()
    assert list(digests) == list(CONTESTANTS)
    assert len(set(standard)) == 1
    assert copy_free != standard[0]
    assert whole_digests(get_workload("tiny"), ["baseline"], device="cpu", seed=1)["baseline"] != standard[0]


def test_a_difference_in_bits_is_told(tmp_path: Path) -> None:
    (found,) = check_rank(get_workload("tiny"), 0, ["fused"], ranks=2, ep=2, device="cpu", folder=tmp_path, steps=1)
    graph = replace(found, contestant="fused (graph)", counted=None)
    graph = replace(graph, eager_digest=graph.digest)
    other = replace(graph, digest="other")
    digests = {"baseline": "a", "batched": "a", "fused": "b"}
    assert [row["bits"] for row in summary([found, graph], digests)] == [
        "DIFFER from baseline",
        "equal to its steps without a graph",
    ]
    assert summary([found, other], digests)[1]["bits"] == "DIFFER from its steps without a graph"


def test_a_gpu_is_used_with_settings_that_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    kept = torch.utils.deterministic.fill_uninitialized_memory
    try:
        use_gpu(torch.device("cuda", 1))
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.utils.deterministic.fill_uninitialized_memory, "which would be launches"
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = kept
    assert chosen == [torch.device("cuda", 1)]


def test_a_captured_step_is_held_against_steps_of_its_own_settings() -> None:
    """The rate of a graph is a tensor, which rounds otherwise than a number: the plain contestant has other bits."""
    specs, options = muon_parameters(get_workload("tiny"), ranks=2, ep=2), {"ns_dtype": torch.float32}
    held = options | {"capturable": True, "lr": torch.tensor(1e-3)}
    with stand_for(0, 2), exchanges_move_nothing():
        plain, first, again = (digest_after(3, specs, 0, "cpu", 0, each) for each in (options, held, held))
    assert first == again != plain


@pytest.mark.parametrize(
    ("version", "expected"), [(None, "rocm"), ("12.8", "cuda12"), ("13.0", "cuda13"), ("14.1", "cuda13")]
)
def test_launches_are_counted_with_the_limits_of_the_build(
    monkeypatch: pytest.MonkeyPatch, version: str | None, expected: str
) -> None:
    monkeypatch.setattr(torch.version, "cuda", version)
    assert toolchain() == expected
    assert LaunchCounter(expected).counts.launches == 0


# One step of a GPU: a bias copy inside a product, a cast inside a call that has no rule, and an exchange's stand-in.
STEP = [
    event("user_annotation", "check", 0, 100),
    event("cpu_op", "aten::addmm", 10, 20),
    event("cpu_op", "aten::copy_", 12, 5),
    event("cpu_op", "aten::to", 40, 10),
    event("cpu_op", "aten::_to_copy", 41, 8),
    event("cpu_op", "aten::copy_", 42, 5),
    event("cpu_op", "c10d::alltoall_base_", 60, 10),
    event("cpu_op", "aten::fill_", 61, 5),
    *(launch(id, start) for id, start in ((1, 13), (2, 25), (3, 43), (4, 62), (5, 80))),
    device("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 50, 5, 1),
    *(device("kernel", "k", 50 + 10 * id, 5, id) for id in (2, 3, 4, 5)),
]
EXPECTED = {
    "aten::addmm": Counter(memcpys=1, kernels=1),
    "aten::_to_copy": Counter(kernels=1),
    "no operator": Counter(kernels=1),
}


def test_activity_belongs_to_the_operator_that_the_counter_names(tmp_path: Path) -> None:
    trace = Trace(write(tmp_path, STEP))
    assert profiled_counts(trace, trace.ranges("check")[0]) == EXPECTED


def test_differences_are_listed_by_operator(tmp_path: Path) -> None:
    (found,) = check_rank(get_workload("tiny"), 0, ["fused"], ranks=2, ep=2, device="cpu", folder=tmp_path, steps=1)
    equal = replace(found, counted=EXPECTED, profiled=EXPECTED)
    assert equal.differences == []
    counted = EXPECTED | {"aten::addmm": Counter(kernels=1)}
    counted.pop("no operator")
    assert replace(equal, counted=counted).differences == [
        "aten::addmm: counted 1 kernels, profiled 1 kernels, 1 memcpys",
        "no operator: counted nothing, profiled 1 kernels",
    ]


@pytest.mark.slow
def test_the_script_needs_nothing_but_torch(tmp_path: Path) -> None:
    """Run with no other package to be found, as on a machine where nothing may be installed."""
    blocked = tmp_path / "blocked"
    for package in ("numpy", "pandas", "matplotlib", "pyarrow", "IPython", "papermill", "yaml"):
        (blocked / package).mkdir(parents=True)
        (blocked / package / "__init__.py").write_text("raise ModuleNotFoundError('not here')")
    script = [str(ROOT / "scripts" / "gpu_check.sh"), str(tmp_path / "out")]
    options = ["--workload", "tiny", "--ranks", "2", "--steps", "1", "--device", "cpu"]
    environment = {**os.environ, "PYTHON": sys.executable, "PYTHONPATH": str(blocked)}
    done = subprocess.run([*script, *options], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "counter against profiler: n/a, no device" in done.stdout
    assert "the published profile as it is: n/a" in done.stdout
    report = json.loads((tmp_path / "out" / "check" / "check.json").read_text())
    assert [row["contestant"] for row in report["contestants"]] == list(CONTESTANTS)
    assert report["differences"] is None
    assert not [text for text in texts(report) if "n/a" in text]
    assert {row["bits"] for row in report["contestants"]} == {"first of its arithmetic", "equal to baseline"}
