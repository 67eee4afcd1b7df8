"""DistMuon and AdamW as one optimizer: the steps of the two, and an ordinary optimizer to all that handles one."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Optimizer, lr_scheduler

from distmuon import DistMuon, checkpoint, muon_with_adamw, split_parameters
from distmuon.combined import MuonWithAdamW

WORDS, WIDTH = 30, 12


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * 9)
        self.down = nn.Linear(9, WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        gate, up = self.up(self.norm(self.table(tokens))).chunk(2, -1)
        return self.head(self.down(gate.sigmoid() * up))


def decoder(ranks: int = 1, seed: int = 0) -> Decoder:
    torch.manual_seed(seed)
    model = Decoder()
    if dist.is_initialized():
        fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)))
    return model


def backward(model: nn.Module, step: int, rank: int = 0) -> Tensor:
    torch.manual_seed(100 * step + rank)
    tokens = torch.randint(WORDS, (20,))
    loss = nn.functional.cross_entropy(model(tokens[:-1]), tokens[1:])
    loss.backward()
    return loss.detach()


def train(model: nn.Module, optimizers: Sequence[Optimizer], steps: Sequence[int], rank: int = 0) -> None:
    for step in steps:
        backward(model, step, rank)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def contents(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """All parameters and state, whole."""
    found = dict(model.named_parameters())
    for name, parameter in list(found.items()):
        found |= {f"{key} of {name}": value for key, value in optimizer.state[parameter].items()}
    return {
        name: (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()
        for name, tensor in found.items()
    }


def differing(found: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    assert found.keys() == expected.keys()
    return [name for name, tensor in expected.items() if not torch.equal(tensor, found[name])]


SCHEDULES: dict[str, Callable[[Optimizer], Any]] = {
    "none": lambda _: None,
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.5**step),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=6, cycle_momentum=False),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0, factor=0.5),
    "cosine, after a warm-up": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=2), lr_scheduler.CosineAnnealingLR(o, 4)], [2]
    ),
}


def beside_two(rank: int, ranks: int, schedule: str) -> list[str]:
    """What differs between the one optimizer and a DistMuon and an AdamW, each with a schedule of its own."""
    models = [decoder(ranks), decoder(ranks)]
    one = [muon_with_adamw(models[0], 0.02, row_blocks={"up.weight": 9}, adamw_options={"betas": (0.9, 0.95)})]
    split = split_parameters(models[1], row_blocks={"up.weight": 9})
    two: list[Optimizer] = [
        DistMuon(split.muon, 0.02, adjust_lr_fn="match_rms_adamw"),
        AdamW(split.adamw, 0.02, weight_decay=0.1, betas=(0.9, 0.95)),
    ]
    rates = set()
    for model, optimizers in zip(models, (one, two), strict=True):
        schedules = [SCHEDULES[schedule](optimizer) for optimizer in optimizers]
        for step in range(4):
            train(model, optimizers, [step], rank)
            for each in schedules:
                if each:
                    each.step(*([1.0] * (schedule == "plateau")))
            rates.add(optimizers[0].param_groups[0]["lr"])
    assert len(rates) > 1 or schedule == "none"
    return differing(*(dict(model.named_parameters()) for model in models))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_one_optimizer_steps_as_the_two_do_under_any_schedule(pool, schedule):
    assert pool.run(4, beside_two, schedule) == [[]] * 4


def test_a_schedule_cycles_the_momentum_of_muon():
    model = decoder()
    optimizer = muon_with_adamw(model)
    lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=6, max_momentum=0.9)
    assert optimizer.muon.param_groups[0]["momentum"] == 0.9
    assert optimizer.adamw.param_groups[0]["betas"] == (0.9, 0.999)
    train(model, [optimizer], [0])


# Checkpoints


def save_and_load(form: str, folder: Path, model: nn.Module, optimizer: Optimizer, load: bool) -> None:
    if form == "distmuon":
        return (checkpoint.load if load else checkpoint.save)(folder, model, [optimizer])
    options = StateDictOptions(flatten_optimizer_state_dict=form == "flattened")
    of_model, of_optimizer = get_state_dict(model, optimizer, options=options)
    state = {"model": of_model, "optimizer": of_optimizer}
    if not load:
        dcp.save(state, checkpoint_id=folder)
        return None
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"], options=options
    )
    return None


def resumed(rank: int, ranks: int, folder: Path, form: str) -> list[str]:
    """What differs between a run that never stopped and one that was saved and loaded into a fresh optimizer."""
    model = decoder(ranks)
    optimizer = muon_with_adamw(model, 0.02, row_blocks={"up.weight": 9})
    train(model, [optimizer], range(3), rank)
    save_and_load(form, folder, model, optimizer, load=False)
    train(model, [optimizer], range(3, 6), rank)
    fresh = decoder(ranks, seed=1)
    other = muon_with_adamw(fresh, 0.5, row_blocks={"up.weight": 9})
    save_and_load(form, folder, fresh, other, load=True)
    assert [group["lr"] for group in other.muon.param_groups + other.adamw.param_groups] == [0.02, 0.02]
    train(fresh, [other], range(3, 6), rank)
    return differing(contents(fresh, other), contents(model, optimizer))


@pytest.mark.parametrize("form", ["nested", "flattened", "distmuon"])
def test_a_resumed_run_is_the_run_that_never_stopped(pool, tmp_path, form):
    assert pool.run(4, resumed, tmp_path / "checkpoint", form) == [[]] * 4


@pytest.mark.parametrize("options", [{}, {"amsgrad": True}, {"fused": True}], ids=str)
def test_state_exists_from_construction_as_adamw_would_make_it(options):
    models = [decoder(), decoder()]
    optimizer = muon_with_adamw(models[0], adamw_options=options)
    theirs = AdamW(models[1].parameters(), **options)
    train(models[1], [theirs], [0])
    for ours, parameter in zip(models[0].parameters(), models[1].parameters(), strict=True):
        state = optimizer.state[ours]
        if "momentum_buffer" in state:
            continue
        expected = theirs.state[parameter]
        assert {key: (value.dtype, value.shape) for key, value in state.items()} == {
            key: (value.dtype, value.shape) for key, value in expected.items()
        }
        assert not any(value.any() for value in state.values())


def test_state_is_loaded_by_name_and_other_parameters_are_refused():
    model = decoder()
    optimizer = muon_with_adamw(model, 0.02)
    train(model, [optimizer], range(2))
    saved = copy.deepcopy(optimizer.state_dict())
    group = saved["param_groups"][1]
    group["params"].reverse()
    group["param_names"].reverse()
    same = copy.deepcopy(model)
    other = muon_with_adamw(same, 0.5)
    other.load_state_dict(saved)
    for each, optimizer_ in ((model, optimizer), (same, other)):
        train(each, [optimizer_], [2])
    assert not differing(contents(same, other), contents(model, optimizer))
    before = contents(same, other)
    group["param_names"][0] = "else"
    with pytest.raises(ValueError, match=r"of other parameters: 1 \(head\.weight\) missing in it, 1 \(else\) extra"):
        other.load_state_dict(saved)
    other_shape = copy.deepcopy(optimizer.state_dict())
    other_shape["state"][2]["exp_avg"] = torch.zeros(3, 3)
    with pytest.raises(ValueError, match=r"exp_avg of parameter '.*' in the state dict has shape \(3, 3\), but"):
        other.load_state_dict(other_shape)
    with pytest.raises(ValueError, match=r"has groups of \[2\] parameters, this optimizer of \[2, 5\]"):
        other.load_state_dict({"state": {}, "param_groups": saved["param_groups"][:1]})
    assert not differing(contents(same, other), before)


def test_it_stays_one_when_a_part_is_loaded_and_when_it_is_copied():
    model = decoder()
    optimizer = muon_with_adamw(model, 0.02)
    train(model, [optimizer], [0])
    theirs = torch.optim.Muon([model.up.weight, model.down.weight], 0.05)
    train(model, [theirs], [1])
    model.zero_grad()
    optimizer.muon.load_state_dict(theirs.state_dict())
    assert optimizer.param_groups[0] is optimizer.muon.param_groups[0]
    assert optimizer.param_groups[0]["lr"] == 0.05
    copied, same = copy.deepcopy((model, optimizer))
    for each, one in ((model, optimizer), (copied, same)):
        for group in one.param_groups:
            group["lr"] = 0.1
        train(each, [one], [2])
    assert not differing(contents(copied, same), contents(model, optimizer))
    assert same.state[copied.table.weight]["step"] == 2


# What a training loop does


def test_it_is_an_optimizer_to_hooks_closures_and_zero_grad():
    model = decoder()
    optimizer = muon_with_adamw(model)
    assert isinstance(optimizer, Optimizer)
    assert {p for group in optimizer.param_groups for p in group["params"]} == set(model.parameters())
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    optimizer.register_state_dict_post_hook(lambda _, state: seen.append(f"{len(state['state'])} saved"))
    optimizer.register_load_state_dict_pre_hook(lambda *_: seen.append("loading"))
    optimizer.register_load_state_dict_post_hook(lambda *_: seen.append("loaded"))
    assert optimizer.step(lambda: backward(model, 0)) == backward(decoder(), 0)
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen == ["before", "after", "7 saved", "loading", "loaded"]
    optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in model.parameters())


def scaled(rank: int, ranks: int) -> list[bool]:
    """Whether a step with a GradScaler changed anything: with finite gradients, and with a bad one on rank 1."""
    model = decoder(ranks)
    optimizer = muon_with_adamw(model, 0.02)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    changed = []
    for bad in (False, True):
        before = contents(model, optimizer)
        with torch.enable_grad():
            scaler.scale(model(torch.arange(5)).square().mean()).backward()
        if bad and rank == 1:
            model.up.weight.grad.to_local().fill_(torch.inf)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        changed.append(bool(differing(contents(model, optimizer), before)))
    return changed


def test_a_grad_scaler_skips_the_step_of_both(pool):
    assert pool.run(2, scaled) == [[True, False]] * 2


def test_a_step_that_is_refused_leaves_everything_as_it_was():
    model = decoder()
    optimizer = muon_with_adamw(model, 0.02)
    before = contents(model, optimizer)
    backward(model, 0)
    model.up.weight.grad = None
    with pytest.raises(ValueError, match=r"'up\.weight' has no gradient"):
        optimizer.step()
    assert not differing(contents(model, optimizer), before)


def test_groups_are_added_to_one_of_the_two():
    model = decoder()
    optimizer = muon_with_adamw(model, 0.02)
    matrix, vector = nn.Parameter(torch.eye(4)), nn.Parameter(torch.ones(4))
    with pytest.raises(TypeError, match="Muon or AdamW"):
        optimizer.add_param_group({"params": [matrix]})
    assert len(optimizer.param_groups) == 2
    optimizer.muon.add_param_group({"params": [("matrix", matrix)], "lr": 0.5})
    optimizer.adamw.add_param_group({"params": [("vector", vector)]})
    assert [group["param_names"][-1] for group in optimizer.param_groups][1::2] == ["matrix", "vector"]
    assert set(optimizer.state[vector]) == {"step", "exp_avg", "exp_avg_sq"}
    assert torch.equal(optimizer.state[matrix]["momentum_buffer"], torch.zeros(4, 4))
    schedule = lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    matrix.grad, vector.grad = torch.ones(4, 4), torch.ones(4)
    train(model, [optimizer], [0])
    assert not torch.equal(matrix, torch.eye(4))
    assert not torch.equal(vector, torch.ones(4))
    schedule.step()
    assert [group["lr"] for group in optimizer.muon.param_groups] == [0.01, 0.25]
    other = copy.deepcopy(optimizer)
    other.load_state_dict(optimizer.state_dict())
    assert [group["lr"] for group in other.param_groups] == [0.01, 0.25, 0.01, 0.01]


def test_groups_and_state_are_those_of_the_two():
    model = decoder()
    optimizer = muon_with_adamw(model, 0.02)
    for parameter, own in ((model.up.weight, optimizer.muon), (model.head.weight, optimizer.adamw)):
        assert optimizer.state[parameter] is own.state[parameter]
        optimizer.state[parameter] = {"mine": 1}
        assert own.state[parameter] == {"mine": 1}
        del optimizer.state[parameter]
        assert parameter not in own.state
    assert list(optimizer.state) == [*optimizer.muon.state, *optimizer.adamw.state]
    assert len(optimizer.state) == len(list(model.parameters())) - 1  # AdamW's is made anew when it is asked for
    with pytest.raises(KeyError):
        optimizer.state[nn.Parameter(torch.zeros(1))]
    for group, own in zip(optimizer.param_groups, (optimizer.muon, optimizer.adamw), strict=True):
        assert group is own.param_groups[0]


def test_patterns_options_and_a_model_of_matrices_alone():
    optimizer = muon_with_adamw(decoder(), muon=["head.*"], adamw=["down.*"], muon_options={"lr": 0.5, "ns_steps": 3})
    assert optimizer.param_groups[0]["param_names"] == ["up.weight", "head.weight"]
    assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["ns_steps"]) == (0.5, 3)
    assert optimizer.table["head.weight"].reason == "asked for by 'head.*'"
    model = nn.Linear(4, 3, bias=False)
    alone: MuonWithAdamW = muon_with_adamw(model)
    assert alone.adamw is None
    model(torch.ones(4)).sum().backward()
    alone.step()
    with pytest.raises(ValueError, match=r"leave nothing to Muon: take torch\.optim\.AdamW"):
        muon_with_adamw(model, adamw=["weight"])
