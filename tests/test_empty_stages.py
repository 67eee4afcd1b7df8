"""Pipeline stages without a parameter for Muon: they take part with nothing, and nobody hangs."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from muon_cases import Case, muon_on_whole_matrices, values
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from distmuon import DistMuon, checkpoint, muon_with_adamw, split_parameters

CASE = Case({"0.w": (12, 20), "1.w": (9, 9)}, settings={"lr": 0.02}, row_blocks={"0.*": 4})
STEPPING = [{}, {"missing_gradients": "skip", "non_finite": "skip"}, {"variant": "baseline"}]


def layers(mesh: DeviceMesh) -> dict[str, nn.Parameter]:
    return {
        name: nn.Parameter(distribute_tensor(tensor, mesh, [Shard(0)], src_data_rank=None))
        for name, tensor in values(CASE, -1).items()
    }


def give_gradients(parameters: dict[str, nn.Parameter], step: int) -> None:
    for name, gradient in values(CASE, step).items():
        mesh = parameters[name].device_mesh
        parameters[name].grad = distribute_tensor(gradient, mesh, [Shard(0)], src_data_rank=None)


def trained(rank: int, ranks: int, options: dict[str, Any]) -> list[str]:
    """Ranks 1 and 2 hold the layers, the others nothing; all are given the same arguments."""
    mesh = DeviceMesh("cpu", [1, 2])
    parameters = layers(mesh) if rank in (1, 2) else {}
    optimizer = DistMuon(
        parameters.items(), **CASE.settings, row_blocks=CASE.row_blocks, buckets=[("0.*",), ("1.*",)], **options
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    for step in range(CASE.steps):
        if parameters:
            give_gradients(parameters, step)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        scheduler.step()
        if step == 0:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert len(optimizer.plan.report([rank])) == (2 if parameters else 0)
    assert str(optimizer.plan)
    if not parameters:
        return []
    truth = muon_on_whole_matrices(CASE)
    return [name for name in truth if not torch.equal(parameters[name].full_tensor(), truth[name])]


@pytest.mark.parametrize("options", STEPPING)
def test_stages_without_parameters_leave_the_bits_of_the_others(pool, options):
    assert pool.run(4, trained, options) == [[]] * 4


def arguments_of(rank: int, ranks: int) -> int:
    """An empty generator, a group of none, a copy, and a group that is added later."""
    mesh = DeviceMesh("cpu", [0])
    own = [] if rank else [("a", nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])))]
    DistMuon(each for each in own)
    DistMuon([{"params": own}], ns_algorithm="gram")
    optimizer = copy.deepcopy(DistMuon(own))
    late = nn.Parameter(distribute_tensor(torch.ones(6, 4), DeviceMesh("cpu", [0, 1]), [Shard(0)], src_data_rank=None))
    optimizer.add_param_group({"params": [("late", late)]})
    for parameter in (each for group in optimizer.param_groups for each in group["params"]):
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return sum(len(stage.parameters) for stage in optimizer.plan.stages)


def test_nothing_may_be_given_in_any_form_and_added_to(pool):
    assert pool.run(2, arguments_of) == [2, 1]


def one_is_not_finite(rank: int, ranks: int) -> int:
    parameters = {} if rank else layers(DeviceMesh("cpu", [0]))
    optimizer = DistMuon(parameters.items(), non_finite="skip")
    for parameter in parameters.values():
        parameter.grad = torch.full_like(parameter, torch.nan)
    optimizer.step()
    return optimizer.skipped_steps


def test_a_stage_without_parameters_skips_the_steps_that_the_others_skip(pool):
    assert pool.run(2, one_is_not_finite) == [1, 1]


def nothing_anywhere(rank: int, ranks: int, given: list[Any]) -> str:
    try:
        DistMuon(given)
    except ValueError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("given", [[], [{"params": []}]])
def test_no_parameters_on_any_rank_are_an_error_on_all(pool, given):
    assert pool.run(2, nothing_anywhere, given) == ["there are no parameters on any rank: give at least one"] * 2


def no_list(rank: int, ranks: int) -> str:
    try:
        DistMuon(None if rank else layers(DeviceMesh("cpu", [0])).values())  # type: ignore[arg-type]
    except (ValueError, TypeError) as error:
        return str(error)
    return "no error"


def test_what_is_no_list_on_one_rank_is_refused_on_all(pool):
    messages = pool.run(2, no_list)
    assert messages[0] == f"rank 1 could not set up DistMuon, so no rank can: TypeError: {messages[1]}"


class Stage(nn.Module):
    """The first stage embeds, the second one has the matrices."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        if first:
            self.embedding = nn.Embedding(8, 12)
        else:
            self.linear = nn.Linear(12, 20)


def combined(rank: int, ranks: int) -> str:
    try:
        muon_with_adamw(Stage(first=rank == 0))
    except ValueError as error:
        return str(error)
    return "no error"


def test_both_as_one_refuse_a_stage_without_matrices_on_all_ranks(pool):
    messages = pool.run(2, combined)
    assert messages[0].startswith("nothing in the model is a matrix for Muon")
    assert messages[1].startswith("rank 0 could not set up DistMuon, so no rank can: ValueError: nothing in the model")


def stage_with_optimizers(rank: int, seed: int) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    """Ranks 0 and 1 embed, 2 and 3 have the matrix."""
    torch.manual_seed(seed)
    first = rank < 2
    meshes = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3])
    model = fully_shard(Stage(first), mesh=meshes[0 if first else 1])
    muon = [] if first else split_parameters(model).muon
    adamw = list(model.parameters()) if first else split_parameters(model).adamw
    return model, [DistMuon(muon), torch.optim.AdamW(adamw)]


def steps(made: tuple[nn.Module, list[torch.optim.Optimizer]], count: int) -> list[torch.Tensor]:
    model, optimizers = made
    for step in range(count):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 0.5 + step)
        for optimizer in optimizers:
            optimizer.step()
    return [parameter.full_tensor().detach().clone() for parameter in model.parameters()]


def resumed(rank: int, ranks: int, folder: Path) -> bool:
    made = stage_with_optimizers(rank, 0)
    steps(made, 2)
    checkpoint.save(folder, *made)
    wanted = steps(made, 2)
    dist.barrier()
    again = stage_with_optimizers(rank, 1)
    checkpoint.load(folder, *again)
    return all(map(torch.equal, wanted, steps(again, 2)))


def test_a_run_resumes_where_a_stage_has_no_matrices(pool, tmp_path):
    assert pool.run(4, resumed, tmp_path / "saved") == [True] * 4
