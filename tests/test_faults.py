"""A rank that dies, stops, runs out of memory or was given something else: the run ends within the time-out, names
rank, bucket and collective, and leaves no process.
"""

from __future__ import annotations

import re
import resource
import sys
import time
from pathlib import Path

import pytest
import torch
from faulty import TIME_OUT_S
from test_launch import living, process_ids
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from distmuon import DistMuon
from distmuon.profiling.launch import RankFailure, launch

RANKS = 3
ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="limits memory as Linux does")


@pytest.fixture(autouse=True)
def tests_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=":")


EXCHANGE = r"on rank {rank} the all_to_all of bucket '(0 first|1 second)', on its way (out|back), among ranks 0, 1, 2"


@pytest.mark.parametrize(
    ("deed", "messages"),
    [
        ("die", [r"^rank 1 was killed by SIGKILL\n", EXCHANGE.format(rank=0), EXCHANGE.format(rank=2)]),
        pytest.param(
            *("stop", [EXCHANGE.format(rank="(0|2)"), "rank 1 is in no known place: no answer"]),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "exhaust",
            [r"^rank 1 ended with exit code 1\n", EXCHANGE.format(rank=0), r"rank1\.log(?s:.)*can't allocate memory"],
            marks=ON_LINUX,
        ),
        (
            "leave",
            [
                r"^rank 1 ended with exit code 3\n",
                "on rank 0 the all_reduce that agrees on gradients among ranks 0, 1, 2",
            ],
        ),
    ],
    ids=["killed", "stopped for longer than the time-out", "out of memory in a step", "gone before the agreement"],
)
def test_what_happens_to_one_rank_in_a_step_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deed: str, messages: list[str]
) -> None:
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")  # memory that was freed before is gone
    with pytest.raises(RankFailure) as failure:
        launch("faulty", [deed, "1"], ranks=RANKS, folder=tmp_path, silence_s=120)
    took = time.time() - (tmp_path / "rank1.log").stat().st_mtime  # since it last wrote
    for message in messages:
        assert re.search(message, str(failure.value)), f"{message}\n\n{failure.value}"
    steps = [(tmp_path / f"rank{rank}.log").read_text().count("is about to take step") for rank in range(RANKS)]
    assert steps == [2] * RANKS, "it happens in the second step"
    assert took < TIME_OUT_S + 30, "within the time-out, and what it takes to say so on a busy machine"
    assert len(process_ids(tmp_path)) == RANKS
    assert not any(living(process) for process in process_ids(tmp_path))


def within(limit_bytes: int | None) -> None:
    """Let this process take so many bytes more; None lifts the limit."""
    held = 0
    if limit_bytes is not None:
        held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limit = resource.RLIM_INFINITY if limit_bytes is None else held + limit_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))


def no_room(rank: int, ranks: int, room: int) -> tuple[str, bool]:
    """256 MiB of parameters, so 128 MiB of momentum; in fp32 the holder's buffer takes as much again.

    Up to 64 MiB may come from what an earlier test gave back.
    """
    mesh = init_device_mesh("cpu", (ranks,))
    DistMuon([("small", nn.Parameter(distribute_tensor(torch.ones(8, 8), mesh, [Shard(0)], src_data_rank=None)))])
    big = nn.Parameter(distribute_tensor(torch.ones(16384, 4096), mesh, [Shard(0)], src_data_rank=None))
    if rank == 1:
        within(room)
    try:
        DistMuon([("big", big)], buckets=[("big",)], ns_dtype=torch.float32)
    except (RuntimeError, ValueError) as error:
        message = str(error)
    else:
        message = ""
    within(None)
    # The ranks are in step with each other still.
    return message, DistMuon([("big", big)]).plan.rank == rank


@ON_LINUX
@pytest.mark.parametrize(
    ("room_mib", "said"),
    [
        (160, "no room for the (work|holder|owner) buffer of bucket '0 big', [0-9]+ bytes"),
        (8, "memory"),
    ],
    ids=["for its buffers", "for its momentum"],
)
def test_a_rank_without_room_is_named_on_all(pool, room_mib, said):
    results = pool.run(2, no_room, room_mib << 20)
    assert [alive for _, alive in results] == [True] * 2
    assert re.search(said, results[1][0])
    assert results[0][0] == f"rank 1 could not set up DistMuon, so no rank can: RuntimeError: {results[1][0]}"


def given(rank: int, ranks: int, what: str) -> str:
    """The ranks build the same optimizer but for one thing, and find out before any exchange."""
    mesh = init_device_mesh("cpu", (ranks,))
    named = [
        (name, nn.Parameter(distribute_tensor(torch.ones(12, 8), mesh, [Shard(0)], src_data_rank=None)))
        for name in "abc"
    ]
    odd = rank == 2
    if what == "order" and odd:
        named.reverse()
    groups = [{"params": named[:2]}, {"params": named[2:], "momentum": 0.5 if what == "settings" and odd else 0.9}]
    buckets = [("a",), ("b", "c")] if what == "buckets" and odd else [("a", "b"), ("c",)]
    try:
        DistMuon(groups, buckets=buckets)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("order", ["parameter 0 there", "ranks 0, 1: 'a' of shape (12, 8)", "rank 2: 'c' of shape (12, 8)"]),
        ("settings", ["disagree on momentum of the group of 'c'", "ranks 0, 1: 0.9; rank 2: 0.5"]),
        ("buckets", ["disagree on buckets", "ranks 0, 1: [('a', 'b'), ('c',)]; rank 2: [('a',), ('b', 'c')]"]),
    ],
)
def test_ranks_that_were_given_something_else_say_so(pool, what, said):
    messages = pool.run(3, given, what, timeout=30.0)
    assert len(set(messages)) == 1
    assert messages[0].startswith("the ranks of mesh (0, 1, 2) disagree on ")
    assert all(words in messages[0] for words in said), messages[0]
