"""Checkpoints: a run that resumes is the run that never stopped, whatever the number of ranks."""

from __future__ import annotations

import resource
import signal
import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from pool import RankError
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
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


def told(action: Callable[..., None], folder: Path, made: Made) -> str:
    try:
        action(folder, *made)
    except (ValueError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def trouble_on_one(rank: int, ranks: int, folder: Path) -> list[str]:
    """One rank finds a folder that is taken, can't name one that is written, or doesn't find one to read."""
    made = make(ranks)
    taken = folder / "taken"
    if rank == 1:
        taken.mkdir()
    said = [told(checkpoint.save, taken if rank == 1 else folder / "new", made)]
    rename = Path.rename
    try:
        if rank == 0:
            Path.rename = lambda path, to: rename(path, folder / "no" / "where" if to.name == "written" else to)
        said.append(told(checkpoint.save, folder / "written", made))
    finally:
        Path.rename = rename
    checkpoint.save(folder / "good", *made)
    said.append(told(checkpoint.load, folder / ("gone" if rank == 1 else "good"), made))
    checkpoint.load(folder / "good", *made)
    return said


def test_trouble_that_one_rank_has_with_a_checkpoint_is_raised_on_all(pool, tmp_path):
    results = pool.run(2, trouble_on_one, tmp_path)
    assert results[1][0] == f"ValueError: {tmp_path / 'taken'} exists: give each checkpoint a folder of its own"
    assert results[0][1].startswith("FileNotFoundError: ")
    assert results[1][2].startswith("FileNotFoundError: ")
    for number, own in enumerate((1, 0, 1)):
        other = f"ValueError: rank {own} can't handle the checkpoint, so no rank does: {results[own][number]}"
        assert results[1 - own][number] == other


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
