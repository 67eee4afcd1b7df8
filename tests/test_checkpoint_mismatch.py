"""A checkpoint that does not fit is refused before anything is loaded, and the same on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from distmuon import DistMuon, checkpoint, muon_with_adamw

Rows = Mapping[str, int | tuple[int, ...]] | None
Made = tuple[nn.Module, Optimizer]


def of_muon(rows: Rows, outputs: int = 12) -> Made:
    return _made(rows, outputs, lambda model: DistMuon([("0.weight", model[0].weight)], row_blocks=rows))


def of_both(rows: Rows, outputs: int = 12) -> Made:
    return _made(rows, outputs, lambda model: muon_with_adamw(model, row_blocks=rows))


def _made(rows: Rows, outputs: int, optimizer_of: Callable[[Any], Optimizer]) -> Made:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, outputs, bias=False), nn.LayerNorm(outputs))
    if dist.is_initialized():
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = optimizer_of(model)
    model(torch.ones(2, 5)).square().sum().backward()
    optimizer.step()
    return model, optimizer


def held(made: Made) -> list[Tensor]:
    model, optimizer = made
    local = [each.to_local() if hasattr(each, "to_local") else each for each in model.parameters()]
    momenta = [state["momentum_buffer"] for state in optimizer.state.values() if "momentum_buffer" in state]
    return [each.detach().clone() for each in local + [m.to_local() if hasattr(m, "to_local") else m for m in momenta]]


def saved_and_loaded(rank: int, ranks: int, folder: Path, make: Callable[..., Made], saved: Rows, own: Rows) -> str:
    model, optimizer = make(saved)
    checkpoint.save(folder, model, optimizer)
    model, optimizer = make(own)
    with torch.no_grad():
        model[0].weight.mul_(2)  # so that what is loaded can be told from what is there
    before, plan = held((model, optimizer)), repr(optimizer.param_groups[0]["row_blocks"])
    try:
        checkpoint.load(folder, model, optimizer)
        message = ""
    except ValueError as error:
        message = str(error)
    unchanged = all(map(torch.equal, before, held((model, optimizer))))
    assert unchanged == bool(message)
    assert repr(optimizer.param_groups[0]["row_blocks"]) == plan
    return message


@pytest.mark.parametrize("make", [of_muon, of_both])
@pytest.mark.parametrize(
    "saved, own",
    [
        ({"0.weight": 4}, {"0.weight": 6}),
        ({"0.weight": 4}, None),
        (None, {"*.weight": 4}),
        ({"0.weight": (4, 8)}, {"0.weight": (8, 4)}),
    ],
)
def test_other_matrices_are_refused_and_nothing_is_loaded(pool, tmp_path, make, saved, own):
    messages = pool.run(2, saved_and_loaded, tmp_path / "checkpoint", make, saved, own)
    assert all("parameter '0.weight' is matrices of" in message for message in messages)


@pytest.mark.parametrize("make", [of_muon, of_both])
def test_equal_matrices_are_loaded_however_they_were_asked_for(pool, tmp_path, make):
    folder = tmp_path / "checkpoint"
    assert pool.run(2, saved_and_loaded, folder, make, {"0.weight": 4}, {"*0.w*": (4, 4, 4)}) == ["", ""]


def other_shape(rank: int, ranks: int, folder: Path) -> str:
    checkpoint.save(folder, *of_muon(None))
    with pytest.raises(ValueError) as caught:
        checkpoint.load(folder, *of_muon(None, 14))
    return str(caught.value)


def test_other_shapes_are_refused_by_name(pool, tmp_path):
    messages = pool.run(2, other_shape, tmp_path / "checkpoint")
    assert messages[0] == messages[1]
    assert "model.0.weight has shape (12, 5) in checkpoint" in messages[0] and "but (14, 5) here" in messages[0]


def without_scheduler(rank: int, ranks: int, folder: Path) -> str:
    model, optimizer = of_muon(None)
    checkpoint.save(folder, model, optimizer)
    with pytest.raises(ValueError) as caught:
        checkpoint.load(folder, model, optimizer, scheduler=LambdaLR(optimizer, lambda step: 1.0))
    return str(caught.value)


def test_what_was_not_saved_is_named(pool, tmp_path):
    assert all(
        "has nothing for 'scheduler'" in each for each in pool.run(2, without_scheduler, tmp_path / "checkpoint")
    )


def wrong_on_one(rank: int, ranks: int, folder: Path) -> list[str]:
    model, optimizer = of_muon(None)
    _, of_another_model = of_muon(None)
    schedulers = [LambdaLR(optimizer, lambda step: 0.1)]
    messages = []
    for call in (
        lambda: checkpoint.save(folder, model, optimizer if rank else [model]),
        lambda: checkpoint.load(checkpoint.latest(folder), model, optimizer),
        lambda: checkpoint.save(folder, model, of_another_model),
        lambda: checkpoint.save(folder, model, optimizer, scheduler=schedulers if rank else schedulers[0]),
    ):
        with pytest.raises((TypeError, ValueError)) as caught:
            call()
        messages.append(str(caught.value))
    return messages


def test_what_does_not_belong_into_a_checkpoint_and_what_is_none_are_refused_on_all(pool, tmp_path):
    (wrong, none, other, told_of), (told, none_either, _, listed) = pool.run(2, wrong_on_one, tmp_path / "checkpoint")
    assert wrong == "optimizers has a FSDPSequential: give an optimizer, or a list of them" and wrong in told
    assert "there is no checkpoint" in none and none == none_either
    assert other.startswith("DistMuon has a parameter of shape (12, 5) that the model has not: give the model")
    assert listed.startswith("scheduler is a list, which has no state_dict") and listed in told_of


def wrong_with_plain_tensors(rank: int, ranks: int, folder: Path) -> str:
    model = nn.Linear(2, 2)
    optimizer = DistMuon([model.weight])
    with pytest.raises((TypeError, ValueError)) as caught:
        checkpoint.save(folder, model, optimizer if rank else [model])
    return str(caught.value)


def test_ranks_agree_also_where_the_default_group_serves_gpus_alone(pool, tmp_path):
    """As NCCL does: what ranks tell one another is on the host, which such a group does not take."""
    wrong, told = pool.run(2, wrong_with_plain_tensors, tmp_path / "checkpoint", backend="cuda:gloo")
    assert told == f"rank 0 can't handle the checkpoint, so no rank does: TypeError: {wrong}"
