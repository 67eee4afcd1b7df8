"""Checkpoints: a run that resumes is the run that never stopped, whatever the number of ranks."""

from __future__ import annotations

import copy
import pickle
import resource
import signal
import sys
import warnings
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from muon_cases import Case, place, values
from pool import RankError
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.optim import AdamW, Optimizer

from distmuon import DistMuon, checkpoint, split_parameters
from distmuon.workloads import get_workload
from distmuon.workloads.training import Trainer

WIDTH = 20


class Mixer(nn.Module):
    """A router over stacked experts: matrices of 2-D and 3-D for DistMuon, a norm, a bias and a table for AdamW."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.fused = nn.Linear(WIDTH, 2 * 14)
        self.experts = nn.Parameter(torch.randn(3, 14, WIDTH) / 4)
        self.unused = nn.Linear(WIDTH, 6, bias=False)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(self.table(tokens))
        gate, up = self.fused(x).chunk(2, -1)
        return torch.einsum("tf,efd->td", gate.sigmoid() * up, self.experts).tanh()


Made = tuple[Mixer, list[Optimizer]]


def make(ranks: int, seed: int = 0, *, dtype: torch.dtype = torch.float32, **options: Any) -> Made:
    torch.manual_seed(seed)
    model = Mixer().to(dtype)
    if dist.is_initialized():
        fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)))
    split = split_parameters(model, row_blocks={"fused.weight": 14}, muon=["unused.weight"])
    muon = DistMuon(split.muon, lr=0.02, missing_gradients="skip", **options)
    return model, [muon, AdamW(split.adamw, lr=0.01)]


def train(made: Made, steps: Sequence[int], rank: int) -> None:
    """With a real loss on tokens of this rank."""
    model, optimizers = made
    for step in steps:
        torch.manual_seed(100 * step + rank)
        model(torch.randint(16, (9,))).square().mean().backward()
        model.seen += 1
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)


def follow(made: Made, steps: Sequence[int]) -> None:
    """With gradients that are the same on any number of ranks."""
    model, optimizers = made
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for parameter in model.parameters():
            gradient = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
            if isinstance(parameter, DTensor):
                mesh, placements = parameter.device_mesh, parameter.placements
                gradient = distribute_tensor(gradient, mesh, placements, src_data_rank=None)
            parameter.grad = gradient
        for optimizer in optimizers:
            optimizer.step()


def contents(made: Made) -> dict[str, Tensor]:
    """All of a run's parameters, buffers and state, whole."""
    model, optimizers = made
    found = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    names = {parameter: name for name, parameter in model.named_parameters()}
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            found |= {f"{key} of {names[parameter]}": value for key, value in state.items()}
    return {
        name: (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()
        for name, tensor in found.items()
    }


def differing(found: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    assert found.keys() == expected.keys()
    return [n for n, tensor in expected.items() if tensor.dtype != found[n].dtype or not torch.equal(tensor, found[n])]


# Three ways to write a checkpoint: torch's own, nested and flattened, and ours


def _save_by_torch(flat: bool, folder: Path, model: nn.Module, optimizers: list[Optimizer]) -> None:
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    of_model, of_optimizers = get_state_dict(model, optimizers, options=options)
    dcp.save({"model": of_model, "optimizers": of_optimizers}, checkpoint_id=folder)


def _load_by_torch(flat: bool, folder: Path, model: nn.Module, optimizers: list[Optimizer]) -> None:
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    of_model, of_optimizers = get_state_dict(model, optimizers, options=options)
    state = {"model": of_model, "optimizers": of_optimizers}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(
        model, optimizers, model_state_dict=state["model"], optim_state_dict=state["optimizers"], options=options
    )


def save(form: str, folder: Path, made: Made) -> None:
    checkpoint.save(folder, *made) if form == "distmuon" else _save_by_torch(form == "flattened", folder, *made)


def load(form: str, folder: Path, made: Made) -> None:
    checkpoint.load(folder, *made) if form == "distmuon" else _load_by_torch(form == "flattened", folder, *made)


FORMS = ["nested", "flattened", "distmuon"]


def resumed_or_not(rank: int, ranks: int, form: str, folder: Path) -> list[str]:
    straight = make(ranks)
    train(straight, range(5), rank)

    stopped = make(ranks)
    train(stopped, range(3), rank)
    save(form, folder, stopped)
    train(stopped, [7], rank)  # what happens after the save is not in it
    again = make(ranks, seed=1)
    load(form, folder, again)
    train(again, range(3, 5), rank)
    return differing(contents(again), contents(straight))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_resumed_run_is_the_run_that_never_stopped(pool, tmp_path, ranks, form):
    assert pool.run(ranks, resumed_or_not, form, tmp_path / "checkpoint") == [[]] * ranks


def followed(rank: int, ranks: int, steps: Sequence[int], form: str, source: Path | None, target: Path | None) -> Any:
    made = make(ranks, seed=0 if source is None else 1, dtype=torch.bfloat16, momentum_dtype=torch.float32)
    if source:
        load(form, source, made)
    follow(made, steps)
    if target:
        save(form, target, made)
    return contents(made)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 4), (3, 1)])
def test_a_run_resumes_on_another_number_of_ranks(pool, tmp_path, before, after, form):
    """In bf16 with fp32 momentum, pieces of which are not multiples of 32: so compared with the same ranks."""
    folder = tmp_path / "checkpoint"
    saved = pool.run(before, followed, range(3), form, None, folder)[0]
    assert differing(pool.run(after, followed, [], form, folder, None)[0], saved) == []
    resumed = pool.run(after, followed, [3, 4], form, folder, None)
    same_ranks = pool.run(before, followed, [3, 4], form, folder, None)[0]
    momenta = {name for name in saved if name.startswith("momentum_buffer")}
    assert len(momenta) == 3
    for found in resumed:
        assert differing(found, resumed[0]) == []
        assert not momenta & set(differing(found, same_ranks))
        assert all(found[name].dtype == torch.float32 for name in momenta)


def followed_fp32(rank: int, ranks: int, steps: Sequence[int], source: Path | None, target: Path | None) -> Any:
    made = make(ranks, seed=0 if source is None else 1)
    if source:
        checkpoint.load(source, *made)
    follow(made, steps)
    if target:
        checkpoint.save(target, *made)
    return contents(made)


@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 4), (4, 3)])
def test_resharded_steps_have_the_bits_of_a_run_that_never_stopped(pool, tmp_path, before, after):
    folder = tmp_path / "checkpoint"
    straight = pool.run(before, followed_fp32, range(5), None, None)[0]
    pool.run(before, followed_fp32, range(3), None, folder)
    for found in pool.run(after, followed_fp32, range(3, 5), folder, None):
        assert differing(found, straight) == []


def trained_workload(
    rank: int, ranks: int, ep: int, steps: Sequence[int], source: Path | None, target: Path | None
) -> list[float]:
    trainer = Trainer(
        get_workload("tiny"), ranks=ranks, ep=ep, rank=rank, tokens=32, sequences=4, seed=0 if source is None else 1
    )
    optimizers = [trainer.muon, trainer.adamw]
    if source:
        checkpoint.load(source, trainer.model, optimizers)
    losses = [trainer.train_step(step).loss for step in steps]
    if target:
        checkpoint.save(target, trainer.model, optimizers)
    return losses


def test_experts_resume_on_other_meshes(pool, tmp_path):
    """Saved where FSDP cuts experts that expert parallelism has split; read with other degrees of both."""
    folder = tmp_path / "checkpoint"
    straight = pool.run(4, trained_workload, 2, range(4), None, None)[0]
    assert pool.run(4, trained_workload, 2, range(2), None, folder)[0] == straight[:2]
    assert pool.run(4, trained_workload, 2, range(2, 4), folder, None)[0] == straight[2:]
    for ranks, ep in ((2, 2), (4, 4), (2, 1)):
        losses = pool.run(ranks, trained_workload, ep, range(2, 4), folder, None)[0]
        assert losses == pytest.approx(straight[2:], rel=1e-4)


def one_process_reads(folder: Path) -> dict[str, Tensor]:
    made = make(1, seed=1)
    checkpoint.load(folder, *made)
    return contents(made)


def test_one_process_without_a_process_group_reads_it(pool, tmp_path):
    folder = tmp_path / "checkpoint"
    saved = pool.run(2, followed_fp32, range(2), None, folder)[0]
    assert differing(one_process_reads(folder), saved) == []


def frozen_on_the_way(rank: int, ranks: int, form: str, folder: Path) -> list[str]:
    """torch.distributed.checkpoint loads no state for what requires no gradient."""
    runs = []
    for stops in (False, True):
        made = make(ranks)
        follow(made, range(2))
        model, _ = made
        model.fused.weight.requires_grad_(False)
        if stops:
            save(form, folder, made)
            made = make(ranks, seed=1)
            model, _ = made
            model.fused.weight.requires_grad_(False)
            load(form, folder, made)
        model.fused.weight.requires_grad_(True)
        follow(made, range(2, 4))
        runs.append(contents(made))
    return differing(*runs)


@pytest.mark.parametrize("form", FORMS)
def test_a_frozen_layer_keeps_its_momentum(pool, tmp_path, form):
    assert pool.run(2, frozen_on_the_way, form, tmp_path / "checkpoint") == [[]] * 2


def with_schedulers(rank: int, ranks: int, folder: Path) -> list[str]:
    def run(made: Made, scheduler: Any, steps: Sequence[int]) -> None:
        for step in steps:
            follow(made, [step])
            scheduler.step()

    straight, stopped, again = make(ranks), make(ranks), make(ranks, seed=1)
    schedulers = [
        torch.optim.lr_scheduler.OneCycleLR(made[1][0], max_lr=0.1, total_steps=9)
        for made in (straight, stopped, again)
    ]
    run(straight, schedulers[0], range(6))
    run(stopped, schedulers[1], range(3))
    checkpoint.save(folder, *stopped, scheduler=schedulers[1])
    checkpoint.load(folder, *again, scheduler=schedulers[2])
    run(again, schedulers[2], range(3, 6))
    assert straight[1][0].param_groups[0]["momentum"] == again[1][0].param_groups[0]["momentum"] != 0.95
    return differing(contents(again), contents(straight))


def test_schedulers_resume_with_them(pool, tmp_path):
    assert pool.run(2, with_schedulers, tmp_path / "checkpoint") == [[]] * 2


def from_construction(rank: int, ranks: int, folder: Path) -> list[str]:
    """No step has been taken, and one layer is never used."""
    made, other = make(ranks), make(ranks, seed=1)
    checkpoint.save(folder, *made)
    checkpoint.load(folder, *other)
    train(other, [0], rank)
    checkpoint.save(folder.with_name("later"), *other)
    checkpoint.load(folder.with_name("later"), *made)
    return differing(contents(made), contents(other))


def test_state_exists_from_construction(pool, tmp_path):
    assert pool.run(2, from_construction, tmp_path / "checkpoint") == [[]] * 2


def read_into_another_model(rank: int, ranks: int, folder: Path) -> str:
    made = make(ranks)
    checkpoint.save(folder, *made)
    model = nn.Sequential(OrderedDict(fused=nn.Linear(WIDTH, 28), more=nn.Linear(28, 4, bias=False)))
    fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)))
    with pytest.raises(ValueError) as caught:
        checkpoint.load(folder, model, [DistMuon([("more.weight", model.more.weight)])])
    return str(caught.value)


def test_a_checkpoint_of_other_parameters_says_what_is_missing_and_what_is_extra(pool, tmp_path):
    messages = pool.run(2, read_into_another_model, tmp_path / "checkpoint")
    assert messages[0] == messages[1]
    assert "2 (model.more.weight, optimizers.state.more.weight.momentum_buffer) missing in it" in messages[0]
    assert "21 (model.experts, model.norm.bias, model.norm.weight, model.seen, ...) extra in it" in messages[0]


def saved_twice(rank: int, ranks: int, folder: Path) -> str:
    made = make(ranks)
    checkpoint.save(folder, *made)
    with pytest.raises(ValueError) as caught:
        checkpoint.save(folder, *made)
    return str(caught.value)


def test_a_folder_that_is_taken_is_refused(pool, tmp_path):
    folder = tmp_path / "checkpoint"
    assert pool.run(2, saved_twice, folder) == [f"{folder} exists: give each checkpoint a folder of its own"] * 2


# A save that is cut off


def cut_off(rank: int, ranks: int, folder: Path) -> None:
    """The kernel ends rank 1 in the middle of a write, when its file becomes larger than it may be."""
    made = make(ranks)
    follow(made, range(2))
    checkpoint.save(folder / "first", *made)
    follow(made, [2])
    if rank == 1:
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2048, resource.RLIM_INFINITY))
    checkpoint.save(folder / "second", *made)


def saved_after(rank: int, ranks: int, folder: Path) -> tuple[list[str], list[str], str]:
    """Resume from the latest, and save anew under the name of what was cut off."""
    expected, found = make(ranks), make(ranks, seed=1)
    follow(expected, range(2))
    checkpoint.load(checkpoint.latest(folder), *found)
    first = differing(contents(found), contents(expected))
    follow(expected, [2])
    follow(found, [2])
    dist.barrier()
    checkpoint.save(folder / "second", *found)
    again = make(ranks, seed=2)
    checkpoint.load(folder / "second", *again)
    return first, differing(contents(again), contents(expected)), checkpoint.latest(folder).name


@pytest.mark.skipif(sys.platform != "linux", reason="limits the size of files as Linux does")
def test_a_save_that_is_cut_off_leaves_the_previous_one(pool, tmp_path):
    with pytest.raises(RankError, match=f"rank 1: died, exit code -{signal.SIGXFSZ.value}"):
        pool.run(2, cut_off, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first", "second.unfinished"]
    assert checkpoint.latest(tmp_path) == tmp_path / "first"
    assert pool.run(2, saved_after, tmp_path) == [([], [], "second")] * 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first", "second"]


def test_there_is_no_latest_in_an_empty_folder(tmp_path):
    assert checkpoint.latest(tmp_path) is None


# State dicts by themselves

SHAPES = {"a": (8, 6), "b": (6, 8), "c": (9, 4)}


def whole(names: str = "abc", **options: Any) -> tuple[dict[str, nn.Parameter], DistMuon]:
    start = values(Case(SHAPES), -1)
    parameters = {name: nn.Parameter(start[name]) for name in names}
    return parameters, DistMuon(parameters.items(), **options)


def steps(parameters: dict[str, nn.Parameter], optimizer: Optimizer, numbers: Sequence[int]) -> None:
    for step in numbers:
        for name, gradient in values(Case(SHAPES), step).items():
            if name in parameters:
                parameters[name].grad = gradient
        optimizer.step()


def copy_weights(source: dict[str, nn.Parameter], target: dict[str, nn.Parameter]) -> None:
    with torch.no_grad():
        for name, parameter in target.items():
            parameter.copy_(source[name])


def test_state_is_loaded_by_name_where_orders_and_groups_differ():
    parameters, optimizer = whole()
    steps(parameters, optimizer, range(2))
    other = {name: nn.Parameter(torch.zeros(SHAPES[name])) for name in "cab"}
    regrouped = DistMuon(
        [
            {"params": [("module._orig_mod.c".removeprefix("module."), other["c"])]},
            {"params": [("b", other["b"]), ("a", other["a"])]},
        ]
    )
    regrouped.load_state_dict(optimizer.state_dict())
    copy_weights(parameters, other)
    for each, opt in ((parameters, optimizer), (other, regrouped)):
        steps(each, opt, range(2, 4))
    assert all(torch.equal(parameters[name], other[name]) for name in SHAPES)


def test_state_of_other_parameters_says_what_is_missing_and_what_is_extra():
    state = whole("ab")[1].state_dict()
    parameters, optimizer = whole("bc")
    steps(parameters, optimizer, [0])
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(
        ValueError, match=r"the state dict is of other parameters: 1 \(c\) missing in it, 1 \(a\) extra"
    ):
        optimizer.load_state_dict(state)
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    assert all(
        torch.equal(after["state"][k]["momentum_buffer"], v["momentum_buffer"]) for k, v in before["state"].items()
    )


def test_settings_of_several_groups_cannot_come_together_in_one():
    start = {name: nn.Parameter(torch.zeros(SHAPES[name])) for name in "ab"}
    groups = [
        {"params": [(name, parameter)], "lr": lr}
        for (name, parameter), lr in zip(start.items(), (0.1, 0.2), strict=True)
    ]
    with pytest.raises(ValueError, match="parameters 'a' and 'b' are in one group, but were saved with different"):
        DistMuon(start.items()).load_state_dict(DistMuon(groups).state_dict())


def test_state_without_names_is_loaded_by_position_and_refused_where_sizes_differ():
    parameters, _ = whole()
    unnamed = torch.optim.Muon(parameters.values())
    with pytest.raises(ValueError, match=r"the state dict has groups of \[3\] parameters, this optimizer of \[2\]"):
        whole("ab")[1].load_state_dict(unnamed.state_dict())


def test_state_of_another_shape_or_optimizer_is_refused():
    start = {name: nn.Parameter(torch.zeros(SHAPES["a"])) for name in "abc"}
    parameters, optimizer = whole()
    with pytest.raises(ValueError, match=r"momentum of parameter 'b' in the state dict has shape \(8, 6\), but"):
        optimizer.load_state_dict(DistMuon(start.items()).state_dict())
    adamw = AdamW(parameters.items())
    steps(parameters, adamw, [0])
    with pytest.raises(ValueError, match=r"parameter 'a' has \['exp_avg', 'exp_avg_sq', 'step'\] in the state dict"):
        optimizer.load_state_dict(adamw.state_dict())


def test_other_matrices_are_refused():
    saved = whole(row_blocks={"a": 4})[1].state_dict()
    for blocks in (None, {"a": 2}):
        with pytest.raises(
            ValueError, match=r"parameter 'a' is matrices of .* rows, but was saved as matrices of \(4, 4\)"
        ):
            whole(row_blocks=blocks)[1].load_state_dict(saved)
    same, optimizer = whole(row_blocks={"[a]": (4, 4)})
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["row_blocks"] == {"[a]": (4, 4)}
    steps(same, optimizer, [0])


@pytest.mark.parametrize("taken", [0, 2])
@pytest.mark.parametrize("named", [True, False])
def test_the_state_of_torch_muon_loads_into_distmuon_and_back(taken, named):
    start = {name: nn.Parameter(tensor) for name, tensor in values(Case(SHAPES), -1).items()}
    there = torch.optim.Muon(start.items() if named else start.values(), lr=0.05)
    steps(start, there, range(taken))
    parameters, ours = whole(row_blocks={"c": 9})
    steps(parameters, ours, [9])  # which the state dict replaces
    copy_weights(start, parameters)
    ours.load_state_dict(there.state_dict())
    assert ours.param_groups[0]["lr"] == 0.05
    back = {name: nn.Parameter(torch.zeros_like(parameter)) for name, parameter in start.items()}
    for each, optimizer in ((start, there), (parameters, ours)):
        steps(each, optimizer, range(taken, taken + 2))
    again = torch.optim.Muon(back.items() if named else back.values())
    again.load_state_dict(copy.deepcopy(ours.state_dict()))  # torch's own keeps the tensors it is given
    copy_weights(parameters, back)
    for each, optimizer in ((start, there), (parameters, ours), (back, again)):
        steps(each, optimizer, [7, 8])
    for name in SHAPES:
        assert torch.equal(start[name], parameters[name])
        assert torch.equal(start[name], back[name])


def muon_state_into_shards(rank: int, ranks: int, state: dict[str, Any]) -> list[str]:
    mesh = init_device_mesh("cpu", (ranks,))
    case = Case(SHAPES, (ranks,), (Shard(0),))
    parameters = {name: nn.Parameter(place(case, tensor, mesh)) for name, tensor in values(case, -1).items()}
    optimizer = DistMuon(parameters.items())
    optimizer.load_state_dict(state)
    momenta = [optimizer.state[parameter]["momentum_buffer"].full_tensor() for parameter in parameters.values()]
    saved = [state["state"][index]["momentum_buffer"] for index in range(len(momenta))]
    return [name for name, a, b in zip(SHAPES, momenta, saved, strict=True) if not torch.equal(a, b)]


def test_the_state_of_one_process_loads_into_shards(pool):
    start = {name: nn.Parameter(tensor) for name, tensor in values(Case(SHAPES), -1).items()}
    there = torch.optim.Muon(start.items())
    steps(start, there, range(2))
    assert pool.run(3, muon_state_into_shards, there.state_dict()) == [[]] * 3


def test_momenta_are_loaded_in_place_and_hooks_see_all_of_a_state():
    saved_parameters, saved = whole(momentum_dtype=torch.float64)
    steps(saved_parameters, saved, range(2))
    parameters, optimizer = whole(momentum_dtype=torch.float64)
    before = [optimizer.state[parameter]["momentum_buffer"] for parameter in parameters.values()]
    seen = []
    optimizer.register_load_state_dict_pre_hook(lambda _, state: seen.append(len(state["state"])))
    optimizer.register_load_state_dict_post_hook(lambda loaded: seen.append(len(loaded.state)))
    optimizer.load_state_dict(saved.state_dict())
    assert seen == [3, 3]
    for buffer, parameter, other in zip(before, parameters.values(), saved_parameters.values(), strict=True):
        assert optimizer.state[parameter]["momentum_buffer"] is buffer
        assert torch.equal(buffer, saved.state[other]["momentum_buffer"])
        assert buffer.dtype == torch.float64


def by_deepcopy(value: Any) -> Any:
    return copy.deepcopy(value)


def by_pickle(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


@pytest.mark.parametrize("copied", [by_deepcopy, by_pickle])
def test_a_copy_with_its_parameters_goes_on_alike(copied: Callable[[Any], Any]):
    parameters, optimizer = whole(lr=torch.tensor(0.03), row_blocks={"a": 4}, non_finite="skip")
    steps(parameters, optimizer, range(2))
    others, other = copied((parameters, optimizer))
    for each, opt in ((parameters, optimizer), (others, other)):
        steps(each, opt, range(2, 4))
    assert all(parameters[name] is not others[name] for name in SHAPES)
    assert all(torch.equal(parameters[name], others[name]) for name in SHAPES)
    assert other.plan == optimizer.plan


def copied_shards(rank: int, ranks: int) -> list[str]:
    case = Case(SHAPES, (ranks,), (Shard(0),))
    mesh = init_device_mesh("cpu", (ranks,))
    parameters = {name: nn.Parameter(place(case, tensor, mesh)) for name, tensor in values(case, -1).items()}
    optimizer = DistMuon(parameters.items())
    others, other = copy.deepcopy((parameters, optimizer))
    for each, opt in ((parameters, optimizer), (others, other)):
        for step in range(2):
            for name, gradient in values(case, step).items():
                each[name].grad = place(case, gradient, mesh)
            opt.step()
    return [name for name in SHAPES if not torch.equal(parameters[name].full_tensor(), others[name].full_tensor())]


def test_a_copy_of_shards_goes_on_alike(pool):
    assert pool.run(2, copied_shards) == [[]] * 2


def copied_replicas(rank: int, ranks: int) -> None:
    optimizer = DistMuon([nn.Parameter(torch.eye(4))], process_group=dist.group.WORLD)
    with pytest.raises(TypeError, match=r"process_group can't be copied: .* load a state_dict into it"):
        copy.deepcopy(optimizer)


def test_a_process_group_is_not_copied(pool):
    pool.run(2, copied_replicas)


def test_torch_save_and_load_keep_a_state_dict(tmp_path):
    parameters, optimizer = whole(row_blocks={"a": (2, 6)})
    steps(parameters, optimizer, range(2))
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    _, other = whole(row_blocks={"a": (2, 6)})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    for a, b in zip(optimizer.state.values(), other.state.values(), strict=True):
        assert torch.equal(a["momentum_buffer"], b["momentum_buffer"])
