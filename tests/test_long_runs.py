"""Two hundred steps: nothing grows, no rank drifts, nothing is compiled or connected anew."""

from __future__ import annotations

import gc
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _world
from torch.distributed.tensor import DTensor

from distmuon.workloads import get_workload
from distmuon.workloads.training import Trainer

TINY = get_workload("tiny")
STEPS = 200
GROWTH_MIB = 16  # of a process in all: the allocator's own; a step that kept its gradients would add 300 KiB each time

pytestmark = pytest.mark.slow


class Held(NamedTuple):
    """What a process holds: tensors, the bytes of their storages, process groups, graphs that were compiled."""

    tensors: int
    storage_bytes: int
    groups: int
    graphs: int


def held() -> Held:
    gc.collect()
    tensors = [_local(each) for each in gc.get_objects() if type(each) in (Tensor, nn.Parameter, DTensor)]
    storages = {each.untyped_storage()._cdata: each.untyped_storage().nbytes() for each in tensors}
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    return Held(len(tensors), sum(storages.values()), len(_world.pg_map), graphs)


def _local(tensor: Any) -> Tensor:
    data = tensor.data if isinstance(tensor, nn.Parameter) else tensor
    return data.to_local() if isinstance(data, DTensor) else data


def resident_mib() -> float | None:
    statistics = Path("/proc/self/status")
    if not statistics.exists():
        return None
    return int(statistics.read_text().partition("VmRSS:")[2].split()[0]) / 1024


def trained(rank: int, ranks: int) -> dict[str, Any]:
    trainer = Trainer(TINY, ranks=ranks, ep=2, rank=rank, tokens=32, ns_dtype=torch.float32)
    records = [trainer.train_step(step) for step in range(3)]
    after_three, resident = held(), resident_mib()
    records += [trainer.train_step(step) for step in range(3, STEPS)]
    grown = None if resident is None else resident_mib() - resident
    return {"records": records, "before": after_three, "after": held(), "grown_mib": grown}


def test_memory_is_flat_after_the_third_step_and_ranks_stay_together(pool):
    results = pool.run(4, trained, timeout=600)
    for result in results:
        assert result["records"] == results[0]["records"]  # loss and gradient norm of every step, to the last bit
        assert result["after"] == result["before"]
        assert result["grown_mib"] is None or result["grown_mib"] < GROWTH_MIB
    losses = [record.loss for record in results[0]["records"]]
    assert sum(losses[-10:]) / 10 < 0.75 * losses[0]


def replicated(rank: int, ranks: int) -> tuple[str, Held, Held]:
    """Digest of this rank's shards after training two replicas of a model whose layers are compiled."""
    warnings.simplefilter("ignore")  # torch warns of what it itself uses
    dense = replace(TINY, layers=2, dense_layers=2)
    trainer = Trainer(dense, ranks=ranks, ep=1, replicas=2, rank=rank, tokens=32, ns_dtype=torch.float32)
    for layer in trainer.model.layers:
        layer.compile(backend="eager")  # traced, and run without a compiler, as there may be none
    for step in range(3):
        trainer.train_step(step)
    before = held()
    for step in range(3, STEPS):
        trainer.train_step(step)
    return trainer.digest(), before, held()


def test_replicas_stay_bit_equal_and_nothing_is_compiled_or_connected_anew(pool):
    digests, before, after = zip(*pool.run(4, replicated, timeout=600), strict=True)
    assert digests[0] == digests[2] != digests[1] == digests[3]  # rank 2 replicates rank 0, and 3 replicates 1
    assert before == after
    assert before[0].graphs > 0
