"""Every layout on real ranks: tensor parallelism, replicas, pipeline stages, odd meshes, all with the bits of Muon."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from muon_cases import Case, differing_shards, muon_on_whole_matrices, values
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

from distmuon import DistMuon

VARIANTS = ("baseline", "batched", "fused")
SHAPES = {"square": (24, 24), "uneven": (18, 40), "odd": (6, 5), "few rows": (3, 7), "stack": (5, 12, 20)}
HEADS = {"wq": (36, 24), "fused": (16, 24)}
BLOCKS = {"wq": 12, "fused": (8, 4, 4)}
COLUMNS, ROWS = (_StridedShard(0, split_factor=2), Shard(0)), (Shard(0), Shard(1))


def on_four(placements: tuple[Any, ...], **changes: Any) -> Case:
    """2 x 2 ranks."""
    settings = {"shapes": SHAPES, "mesh": (2, 2), "settings": {"lr": 0.02}, "placements": placements}
    return Case(**settings | changes)


@pytest.mark.parametrize("variant", VARIANTS)
def test_fsdp_over_tensor_parallelism_puts_rows_by_global_index(pool, variant):
    cases = [on_four(COLUMNS), on_four(COLUMNS, shapes=HEADS, row_blocks=BLOCKS)]
    assert pool.run(4, differing_shards, cases, {"variant": variant}) == [[]] * 4


@pytest.mark.parametrize("variant", VARIANTS)
def test_row_parallel_weights_are_cut_both_ways(pool, variant):
    cases = [on_four(ROWS), on_four((Shard(1), Shard(0)), shapes=HEADS, row_blocks=BLOCKS)]
    assert pool.run(4, differing_shards, cases, {"variant": variant}) == [[]] * 4


def test_shards_of_shards(pool):
    """Uneven ones too, whose local tensors are as DTensor has them."""
    cases = [on_four((Shard(0), Shard(0))), on_four((Shard(1), Shard(1)))]
    assert pool.run(4, differing_shards, cases, {}) == [[]] * 4


@pytest.mark.parametrize("share_replicas", [None, True, False])
@pytest.mark.parametrize("variant", VARIANTS)
def test_hybrid_shards_have_the_bits_of_muon(pool, variant, share_replicas):
    cases = [
        on_four((Replicate(), Shard(0))),
        on_four((Shard(0), Replicate()), shapes=HEADS, row_blocks=BLOCKS),
        on_four((Replicate(), Shard(1)), settings={"lr": 0.02, "nesterov": False}),
        on_four((Replicate(), Replicate())),
    ]
    options = {"variant": variant, "share_replicas": share_replicas}
    assert pool.run(4, differing_shards, cases, options) == [[]] * 4


def work_of_replicas(rank: int, ranks: int, share_replicas: bool | None) -> tuple[int, list[dict[str, object]]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)))
    fully_shard(model, mesh=mesh)
    optimizer = DistMuon(model.named_parameters(), share_replicas=share_replicas)
    model(torch.full((2, 64), float(rank))).square().sum().backward()
    optimizer.step()
    rows = optimizer.plan.report([rank])
    local = torch.cat([parameter.to_local().flatten() for parameter in model.parameters()])
    replicas = [torch.empty_like(local) for _ in range(2)]
    dist.all_gather(replicas, local, group=mesh.get_group("replicate"))
    assert torch.equal(*replicas), "replicas stay equal to the bit"
    return sum(int(str(row["matrices"])) for row in rows), rows


def test_hybrid_shards_share_the_work(pool):
    """Four matrices on 2 x 2 ranks: one each if replicas share, two each if both do all."""
    assert [matrices for matrices, _ in pool.run(4, work_of_replicas, True)] == [1] * 4
    assert [matrices for matrices, _ in pool.run(4, work_of_replicas, False)] == [2] * 4
    shared, repeated = (
        [row for _, rows in pool.run(4, work_of_replicas, share) for row in rows] for share in (None, False)
    )
    assert {row["replicas"] for row in shared} == {"shared"}
    assert {row["replicas"] for row in repeated} == {"repeated"}
    for this, other in (("gemm_flops", "gemm_flops_otherwise"), ("sent_bytes", "sent_bytes_otherwise")):
        assert sum(row[other] for row in shared) == sum(row[this] for row in repeated)
        assert sum(row[other] for row in repeated) == sum(row[this] for row in shared)


def plain_replicas(rank: int, ranks: int, options: dict[str, Any]) -> tuple[list[str], int]:
    """Plain tensors, equal on every rank."""
    case = Case(SHAPES | HEADS, row_blocks=BLOCKS, settings={"lr": 0.02})
    parameters = {name: nn.Parameter(tensor) for name, tensor in values(case, -1).items()}
    group = dist.group.WORLD
    optimizer = DistMuon(parameters.items(), row_blocks=BLOCKS, process_group=group, **case.settings, **options)
    for step in range(case.steps):
        for name, gradient in values(case, step).items():
            parameters[name].grad = gradient
        optimizer.step()
    truth = muon_on_whole_matrices(case)
    done = sum(batch.matrices for stage in optimizer.plan.stages for batch in stage.batches)
    return [name for name, parameter in parameters.items() if not torch.equal(parameter, truth[name])], done


@pytest.mark.parametrize("variant", VARIANTS)
def test_plain_replicas_share_the_work_over_a_process_group(pool, variant):
    found = pool.run(3, plain_replicas, {"variant": variant, "share_replicas": True})
    assert [differing for differing, _ in found] == [[]] * 3
    assert sum(done for _, done in found) == 4 + 5 + 3 + 3  # each once
    repeated = pool.run(3, plain_replicas, {"variant": variant, "share_replicas": False})
    assert repeated == [([], 15)] * 3


def test_small_plain_replicas_repeat_the_work_unless_told_otherwise(pool):
    """Sending them costs more than the FLOPs that it saves."""
    assert pool.run(2, plain_replicas, {}) == [([], 15)] * 2


@pytest.mark.parametrize("axes", [None, ("a", "b", "c")], ids=["unnamed", "named"])
def test_meshes_of_three_axes(pool, axes):
    cases = [
        Case(SHAPES, (2, 2, 2), placements, axes=axes, settings={"lr": 0.02}, steps=2)
        for placements in [
            (Replicate(), _StridedShard(0, split_factor=2), Shard(0)),
            (Shard(1), Replicate(), Shard(0)),
            (Shard(0), Shard(1), Replicate()),
            (Shard(0), Shard(1), Shard(0)),
        ]
    ]
    assert pool.run(8, differing_shards, cases, {}) == [[]] * 8


def test_ranks_need_not_ascend_through_a_mesh_but_along_what_is_sharded(pool):
    cases = [
        on_four((Replicate(), Shard(0)), order=(2, 3, 0, 1)),
        on_four((Shard(0), Replicate()), order=(1, 0, 3, 2)),
        on_four(ROWS, order=(0, 2, 1, 3)),
    ]
    assert pool.run(4, differing_shards, cases, {}) == [[]] * 4


def stages_of_a_pipeline(rank: int, ranks: int) -> list[str]:
    """Ranks 0 and 1 hold the first three layers, 2 and 3 the last one; an embedding's projection is on all."""
    all_ranks = init_device_mesh("cpu", (4,))
    first, second = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3])
    own = first if rank < 2 else second
    shapes = {"projection": (20, 12)} | (
        {"0.w": (12, 20), "1.w": (12, 20), "2.w": (9, 9)} if rank < 2 else {"3.w": (16, 7)}
    )
    case = Case(shapes, settings={"lr": 0.02})
    meshes = {name: all_ranks if name == "projection" else own for name in shapes}
    parameters = {
        name: nn.Parameter(distribute_tensor(tensor, meshes[name], [Shard(0)], src_data_rank=None))
        for name, tensor in values(case, -1).items()
    }
    optimizer = DistMuon(parameters.items(), **case.settings)
    for step in range(case.steps):
        for name, gradient in values(case, step).items():
            parameters[name].grad = distribute_tensor(gradient, meshes[name], [Shard(0)], src_data_rank=None)
        optimizer.step()
    truth = muon_on_whole_matrices(case)
    return [name for name in shapes if not torch.equal(parameters[name].full_tensor(), truth[name])]


def test_pipeline_stages_own_their_layers_only(pool):
    assert pool.run(4, stages_of_a_pipeline) == [[]] * 4


class Block(nn.Module):
    """Two projections as tensor parallelism cuts them, and one that it leaves alone."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(12, 36, bias=False)
        self.down = nn.Linear(36, 12, bias=False)
        self.gate = nn.Linear(12, 12, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """(N, 12) to (N, 12)."""
        return hidden + self.down(torch.relu(self.up(hidden))) * torch.sigmoid(self.gate(hidden))


def tensor_parallel_model(rank: int, ranks: int) -> list[str]:
    """One optimizer for parameters on three kinds of placements of one mesh and its parts, as torch makes them."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(Block(), Block())

    model, whole = build(), build()
    for block in model:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    assert {parameter.placements for parameter in model.parameters()} == {
        (_StridedShard(0, split_factor=2), Shard(0)),
        (Shard(0), Shard(1)),
        (Shard(0),),
    }
    ours = DistMuon(model.named_parameters(), lr=0.02, row_blocks={"*.up.weight": 12})
    matrices = [(parameter, name) for name, parameter in whole.named_parameters()]
    cut = {name: [nn.Parameter(part.detach().clone()) for part in parameter.split(12)] for parameter, name in matrices}
    truth = torch.optim.Muon(
        [part for parameter, name in matrices for part in (cut[name] if "up" in name else [parameter])], lr=0.02
    )
    for step in range(3):
        for parameter, name in matrices:
            torch.manual_seed(step)
            gradient = torch.randn(parameter.shape)
            parameter.grad = gradient
            for part, rows in zip(cut[name], gradient.split(12), strict=True):
                part.grad = rows.clone()
            mine = model.get_parameter(name)
            mine.grad = distribute_tensor(gradient, mine.device_mesh, mine.placements, src_data_rank=None)
        ours.step()
        truth.step()
    found = []
    for parameter, name in matrices:
        expected = torch.cat(cut[name]) if "up" in name else parameter
        mine = model.get_parameter(name)
        placed = distribute_tensor(expected.detach(), mine.device_mesh, mine.placements, src_data_rank=None)
        if not torch.equal(mine.to_local(), placed.to_local()):
            found.append(name)
    return found


def test_a_model_under_fsdp_and_tensor_parallelism(pool):
    assert pool.run(4, tensor_parallel_model) == [[]] * 4


def wrong_whole_tensors(rank: int, ranks: int, mesh: tuple[int, ...], placements: tuple[Any, ...]) -> list[str]:
    """Which tensors torch puts together wrongly, on a mesh on which there is an optimizer.

    Nothing is put together before: torch keeps the way that it has found once.
    """
    devices = init_device_mesh("cpu", mesh, mesh_dim_names=("a", "b", "c")[: len(mesh)])
    tensors = {shape: torch.arange(float(math.prod(shape))).view(shape) for shape in ((5, 7), (5, 3, 7), (6, 5))}
    placed = {
        shape: nn.Parameter(distribute_tensor(whole, devices, placements, src_data_rank=None))
        for shape, whole in tensors.items()
    }
    optimizer = DistMuon(placed.values(), lr=0.0, share_replicas=False)
    for parameter in placed.values():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return [
        str(shape) for shape, parameter in placed.items() if not torch.equal(parameter.full_tensor(), tensors[shape])
    ]


@pytest.mark.parametrize(
    ("mesh", "placements"), [((2, 2), (Shard(0), Shard(0))), ((2, 2, 2), (Shard(0), Shard(0), Replicate()))]
)
def test_whole_tensors_on_a_mesh_are_as_if_there_were_no_optimizer(pool, mesh, placements):
    """A flattened mesh that torch knows of makes it gather uneven shards of shards as if they were even."""
    ranks = math.prod(mesh)
    assert pool.run(ranks, wrong_whole_tensors, mesh, placements) == [[]] * ranks


def process_groups(rank: int, ranks: int) -> list[int]:
    """How many there are before, after the first optimizer, and after the second and a copy of it."""
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("a", "b", "c"))
    placements = (Shard(0), Shard(1), Replicate())
    parameter = nn.Parameter(distribute_tensor(torch.randn(8, 8), mesh, placements, src_data_rank=None))
    counts = [dist.get_pg_count()]
    for _ in range(2):
        optimizer = DistMuon([("w", parameter)], share_replicas=False)
        counts.append(dist.get_pg_count())
    copy.deepcopy(optimizer)
    return [*counts, dist.get_pg_count()]


def test_optimizers_on_one_mesh_share_their_process_groups(pool):
    for before, *after in pool.run(8, process_groups):
        assert after == [before + 2] * 3, "one for each replica"


def refused(rank: int, ranks: int, what: str) -> str:
    """The message with which DistMuon refuses a parameter."""
    whole = init_device_mesh("cpu", (ranks,))
    local = torch.ones(4, 4)
    if what == "partial":
        parameter = nn.Parameter(DTensor.from_local(local, whole, [Partial()]))
    elif what == "another mesh":
        parameter = nn.Parameter(DTensor.from_local(local, DeviceMesh("cpu", [0]), [Shard(0)], run_check=False))
    elif what == "order":  # FSDP2 cuts by rank in the process group, DTensor by place in the mesh
        model = nn.Linear(7, 8, bias=False)
        fully_shard(model, mesh=DeviceMesh("cpu", [1, 0]))
        parameter = model.weight
    else:  # each rank believes that its rows are all there are
        shape = torch.Size((4 + rank, 4))
        sharded = DTensor.from_local(local, whole, [Shard(0)], run_check=False, shape=shape, stride=(4, 1))
        parameter = nn.Parameter(sharded)
    try:
        DistMuon([("layer.w", parameter)])
    except ValueError as error:
        return str(error)
    raise AssertionError("accepted")


def test_a_partial_placement_is_refused_by_name_on_every_rank(pool):
    for message in pool.run(2, refused, "partial"):
        assert "'layer.w': placement Partial(sum) can't be planned: use Shard or Replicate" in message


def test_a_mesh_without_this_rank_is_refused_by_name_on_every_rank(pool):
    for message in pool.run(2, refused, "another mesh"):
        assert "'layer.w' is on a mesh of ranks (0,), without rank 1" in message


def test_a_mesh_along_which_ranks_do_not_ascend_is_refused_by_name_on_every_rank(pool):
    for message in pool.run(2, refused, "order"):
        assert "'layer.w': it is sharded over axis 0 of mesh [1, 0], along which ranks do not ascend" in message


def test_global_shapes_that_differ_are_found_by_all(pool):
    for message in pool.run(2, refused, "shapes"):
        assert "disagree on parameter 0 there" in message
        assert "(4, 4)" in message
        assert "(5, 4)" in message
