"""The pool of ranks that the other tests stand on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from pool import Pool, RankError
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor


def add_ranks(rank: int, ranks: int, offset: float) -> tuple[int, int, torch.Tensor]:
    total = torch.tensor([offset + rank])
    dist.all_reduce(total)
    return rank, dist.get_world_size(), total


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8, 2])
def test_results_come_by_rank_from_a_group_of_the_size_asked_for(pool: Pool, ranks: int) -> None:
    results = pool.run(ranks, add_ranks, 0.5)
    total = 0.5 * ranks + ranks * (ranks - 1) / 2
    assert results == [(rank, ranks, torch.tensor([total])) for rank in range(ranks)]


def process_id(rank: int, ranks: int) -> int:
    return os.getpid()


def test_workers_stay_from_job_to_job(pool: Pool) -> None:
    assert pool.run(2, process_id) == pool.run(3, process_id)[:2]


def raise_on(rank: int, ranks: int, bad: int) -> None:
    if rank == bad:
        raise ValueError(f"rank {rank} does not like this")
    dist.barrier()


def test_a_rank_that_raises_does_not_hang_the_others(pool: Pool) -> None:
    start = time.monotonic()
    with pytest.raises(RankError, match="rank 2 does not like this") as caught:
        pool.run(4, raise_on, 2)
    assert time.monotonic() - start < 10
    assert next(iter(caught.value.errors)) == 2, "the rank that failed first comes first"
    assert pool.run(4, add_ranks, 0.0)[0][1] == 4


def test_what_every_rank_raises_is_reported_for_every_rank(pool: Pool) -> None:
    workers = pool.run(2, process_id)
    with pytest.raises(RankError) as caught:
        pool.run(2, add_ranks, "not a number")
    assert sorted(caught.value.errors) == [0, 1]
    assert all("TypeError" in text for text in caught.value.errors.values())
    assert pool.run(2, process_id) == workers, "workers that answered need no replacing"


def hang_on(rank: int, ranks: int, bad: int) -> None:
    if rank == bad:
        time.sleep(60)


def test_a_rank_that_hangs_is_named_with_the_place(pool: Pool) -> None:
    with pytest.raises(RankError, match="no answer in 3 s") as caught:
        pool.run(3, hang_on, 1, timeout=3)
    assert list(caught.value.errors) == [1]
    assert "hang_on" in caught.value.errors[1]
    assert pool.run(3, add_ranks, 0.0)[0][1] == 3


def die_on(rank: int, ranks: int, bad: int) -> None:
    if rank == bad:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def test_a_rank_that_dies_is_named(pool: Pool) -> None:
    with pytest.raises(RankError, match="rank 0: died, exit code -9"):
        pool.run(2, die_on, 0)
    assert pool.run(2, add_ranks, 0.0)[0][1] == 2


def warn(rank: int, ranks: int) -> None:
    warnings.warn("this should have been dealt with", stacklevel=1)


def test_warnings_are_errors_in_the_workers_too(pool: Pool) -> None:
    with pytest.raises(RankError, match="this should have been dealt with"):
        pool.run(1, warn)


def gathered_sum(rank: int, ranks: int, shape: tuple[int, int], outer_first: bool) -> float:
    if outer_first:  # so that the groups of the meshes below go by other names than in the job before
        dist.new_group(list(range(ranks)))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("a", "b"))
    whole = torch.arange(64.0).view(8, 8)
    part = distribute_tensor(whole, mesh, [Shard(0), Shard(1)])
    return (part * 2).full_tensor().sum().item()


def test_meshes_of_one_job_do_not_reach_into_the_next(pool: Pool) -> None:
    for shape, outer_first in [((2, 2), False), ((2, 2), True), ((1, 4), False), ((2, 2), False)]:
        assert pool.run(4, gathered_sum, shape, outer_first) == [4032.0] * 4


_LIFE = """
import os, sys, time
from pool import Pool
import test_pool
if __name__ == "__main__":
    pool = Pool()
    print(*pool.run(2, test_pool.process_id), *set(pool.run(2, test_pool.parent_id)), flush=True)
    if sys.argv[1] == "hang":
        pool.run(2, test_pool.hang_on, 1)
"""


def parent_id(rank: int, ranks: int) -> int:
    return os.getppid()


def test_a_pool_that_is_closed_has_left_no_worker() -> None:
    pool = Pool()
    workers = pool.run(2, process_id)
    assert all(map(_alive, workers))
    pool.close()
    assert not any(map(_alive, workers))


@pytest.mark.slow
@pytest.mark.parametrize("end", ["return", "hang"])
def test_no_process_outlives_the_one_that_made_the_pool(tmp_path: Path, end: str) -> None:
    script = tmp_path / "life.py"
    script.write_text(_LIFE)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    command = [sys.executable, str(script), end]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        children = [int(word) for word in process.stdout.readline().split()]
        assert len(children) == 3
        if end == "hang":
            process.kill()
        process.wait(30)
    deadline = time.monotonic() + 10
    while any(_alive(child) for child in children) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(_alive(child) for child in children)


def _alive(process_id: int) -> bool:
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    return True
