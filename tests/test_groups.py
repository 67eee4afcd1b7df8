"""What a training loop does with an optimizer: groups, schedules, hooks, closures, accumulation, clipping, wrappers."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from muon_cases import Case, place, values
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.optim import lr_scheduler

from distmuon import DistMuon, clip_grad_norm_, split_parameters
from distmuon.profiling.host import OperatorCounter

SHAPES = {"a": (32, 24), "b": (24, 40), "c": (18, 64), "d": (32, 24)}
Parameters = dict[str, nn.Parameter]


def both(ranks: int, names: str = "abcd") -> tuple[Parameters, Parameters]:
    """The same parameters sharded and whole."""
    case = Case(SHAPES, (ranks,), (Shard(0),))
    mesh = init_device_mesh("cpu", (ranks,))
    start = values(case, -1)
    return (
        {name: nn.Parameter(place(case, start[name], mesh)) for name in names},
        {name: nn.Parameter(start[name]) for name in names},
    )


def give(sharded: Parameters, whole: Parameters, step: int, scale: float = 1.0) -> None:
    case = Case(SHAPES, (1,), (Shard(0),))
    for name, gradient in values(case, step).items():
        if name in sharded:
            sharded[name].grad = place(case, gradient * scale, sharded[name].device_mesh)
            whole[name].grad = gradient * scale


def differing(sharded: Parameters, whole: Parameters) -> list[str]:
    return [name for name in sharded if not torch.equal(sharded[name].full_tensor(), whole[name])]


def groups_of(parameters: Parameters) -> list[dict[str, Any]]:
    """Two shapes alike in two groups: they must not be batched together."""
    return [
        {"params": [("a", parameters["a"]), ("c", parameters["c"])], "lr": 0.1, "weight_decay": 0.0},
        {"params": [("b", parameters["b"])], "momentum": 0.5, "nesterov": False, "ns_steps": 3},
        {"params": [("d", parameters["d"])], "adjust_lr_fn": "match_rms_adamw", "eps": 1e-3, "lr": 0.02},
    ]


Schedule = Callable[[torch.optim.Optimizer], Any]
SCHEDULES: dict[str, Schedule] = {
    "none": lambda _: None,
    "lambda": lambda o: lr_scheduler.LambdaLR(
        o, [lambda step: 1.0, lambda step: 0.5**step, lambda step: 1 / (1 + step)]
    ),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=5),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=[0.1, 0.05, 0.2], total_steps=6),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0, factor=0.5),
    "warm-up, then decay": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=2), lr_scheduler.ExponentialLR(o, 0.7)], [2]
    ),
}


def scheduled(rank: int, ranks: int, schedule: str, as_tensor: bool, variant: str) -> list[str]:
    sharded, whole = both(ranks)
    pair = []
    for parameters, optimizer in ((sharded, DistMuon), (whole, torch.optim.Muon)):
        groups = groups_of(parameters)
        if as_tensor:
            groups = [group | {"lr": torch.tensor(group.get("lr", 1e-3))} for group in groups]
        pair.append(optimizer(groups, **({"variant": variant} if optimizer is DistMuon else {})))
    schedules = [SCHEDULES[schedule](optimizer) for optimizer in pair]
    rates = set()
    for step in range(5):
        give(sharded, whole, step)
        for optimizer, each in zip(pair, schedules, strict=True):
            optimizer.step()
            if schedule == "plateau":
                each.step(1.0)
            elif each:
                each.step()
        rates.add(float(pair[0].param_groups[1]["lr"]))
        assert [float(g["lr"]) for g in pair[0].param_groups] == [float(g["lr"]) for g in pair[1].param_groups]
    assert len(rates) > 1 or schedule == "none"
    return differing(sharded, whole)


@pytest.mark.parametrize("as_tensor", [False, True], ids=["float", "tensor"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_groups_keep_their_own_settings_under_any_schedule(pool, schedule, as_tensor):
    assert pool.run(2, scheduled, schedule, as_tensor, "fused") == [[]] * 2


@pytest.mark.parametrize("variant", ["baseline", "batched"])
def test_groups_keep_their_own_settings_in_every_variant(pool, variant):
    assert pool.run(4, scheduled, "one cycle", False, variant) == [[]] * 4


# Hooks, closures, skipped steps


def hooked(rank: int, ranks: int) -> tuple[list[str], list[str]]:
    sharded, whole = both(ranks)
    ours, truth = DistMuon(sharded.items()), torch.optim.Muon(whole.values())
    calls: list[str] = []

    def halve(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if optimizer is ours:
            calls.append("before")
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad.mul_(0.5)

    handles = [optimizer.register_step_pre_hook(halve) for optimizer in (ours, truth)]
    ours.register_step_post_hook(lambda *_: calls.append("after"))

    def closure() -> float:
        assert torch.is_grad_enabled()
        ours.zero_grad(set_to_none=True)
        give(sharded, whole, 0)
        calls.append("closure")
        return 0.25

    give(sharded, whole, 1)
    ours.step()
    truth.step()
    assert calls == ["before", "after"]
    for handle in handles:
        handle.remove()
    assert ours.step(closure) == 0.25
    truth.step()
    return differing(sharded, whole), calls


def test_hooks_and_closures(pool):
    assert pool.run(2, hooked) == [([], ["before", "after", "closure", "after"])] * 2


def skipped(rank: int, ranks: int) -> tuple[list[str], float]:
    """As GradScaler does: gradients that overflowed on one rank, unscaled, are not stepped with on any."""
    sharded, whole = both(ranks)
    ours, truth = DistMuon(sharded.items()), torch.optim.Muon(whole.values())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(4):
        give(sharded, whole, step, scale=scaler.scale(torch.ones(())).item())
        for name, gradient in values(Case(SHAPES), step).items():
            whole[name].grad = gradient
        if step == 2 and rank == 0:
            sharded["a"].grad.to_local()[0, 0] = torch.inf
        before = {name: p.full_tensor().clone() for name, p in sharded.items()}
        scaler.step(ours)
        scaler.update()
        if step != 2:
            truth.step()
        elif any(not torch.equal(before[name], p.full_tensor()) for name, p in sharded.items()):
            return ["a step with inf was taken"], 0.0
    return differing(sharded, whole), scaler.get_scale()


def test_a_grad_scaler_skips_the_step_on_all_ranks(pool):
    assert pool.run(2, skipped) == [([], 512.0)] * 2


# Gradients: accumulation, clipping


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(12, 34)
        self.down = nn.Linear(34, 12)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).tanh())


def model(ranks: int, wrap: Callable[[nn.Module], nn.Module] | None = None, **policies: Any) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [Layers() if wrap is None else wrap(Layers()) for _ in range(2)]
    for layer in layers:
        fully_shard(layer, mesh=init_device_mesh("cpu", (ranks,)), **policies)
    return fully_shard(nn.Sequential(*layers), mesh=init_device_mesh("cpu", (ranks,)), **policies)


def matrices(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, parameter) for name, parameter in module.named_parameters() if parameter.ndim == 2]


def train(module: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: Sequence[int], micro: int = 1) -> None:
    for step in steps:
        for each in range(micro):
            torch.manual_seed(1000 * step + 10 * each + rank)
            module(torch.randn(5, 12)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def accumulated(rank: int, ranks: int, micro: int) -> int:
    module = model(ranks)
    optimizer = DistMuon(matrices(module))
    train(module, optimizer, rank, [0], micro)
    for each in range(micro):
        torch.manual_seed(each + rank)
        module(torch.randn(5, 12)).square().mean().backward()
    with OperatorCounter() as counter:
        optimizer.step()
    products = (torch.ops.aten.addmm, torch.ops.aten.baddbmm)
    return sum(count for operator, count in counter.operators.items() if operator.overloadpacket in products)


def test_newton_schulz_is_run_once_a_step_however_many_micro_batches(pool):
    once = pool.run(2, accumulated, 1)
    assert pool.run(2, accumulated, 4) == once
    # Four matrices of two shapes over two ranks: each rank has some, one call or one each, two products an iteration.
    assert all(0 < products <= 4 * 5 * 2 for products in once)


def clipped(rank: int, ranks: int) -> list[str]:
    """Over two meshes, before the step."""
    line, square = init_device_mesh("cpu", (ranks,)), init_device_mesh("cpu", (2, ranks // 2))
    cases = {"a": (line, (Shard(0),)), "b": (square, (Shard(1), Shard(0)))}
    start, sharded, whole = values(Case(SHAPES), -1), {}, {}
    for name, (mesh, placements) in cases.items():
        sharded[name] = nn.Parameter(place(Case(SHAPES, placements=placements), start[name], mesh))
        whole[name] = nn.Parameter(start[name])
    ours, truth = DistMuon(sharded.items()), torch.optim.Muon(whole.values())
    for step in range(3):
        for name, (mesh, placements) in cases.items():
            gradient = values(Case(SHAPES), step)[name]
            sharded[name].grad = place(Case(SHAPES, placements=placements), gradient, mesh)
            whole[name].grad = gradient.clone()
        ours_norm = clip_grad_norm_(sharded.values(), 0.5)
        norm = clip_grad_norm_(whole.values(), 0.5)
        assert ours_norm.item() == pytest.approx(norm.item(), rel=1e-6)
        ours.step()
        truth.step()
    return [n for n in cases if (sharded[n].full_tensor() - whole[n]).abs().max() > 1e-4]


def test_gradients_of_several_meshes_are_clipped_before_the_step(pool):
    assert pool.run(4, clipped) == [[]] * 4


# FSDP2's policies, wrappers, frozen layers


def against_torch(
    rank: int, ranks: int, policy: str, wrap: Callable[[nn.Module], nn.Module] | None = None, **options: Any
) -> list[str]:
    """A model that trains, its gathered gradients given to torch.optim.Muon."""
    policies = {
        "none": {},
        "mixed": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)},
        "offload": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
    }[policy]
    module = model(ranks, wrap, **policies)
    whole = {name: nn.Parameter(p.full_tensor().detach().clone()) for name, p in matrices(module)}
    ours, truth = DistMuon(matrices(module), lr=0.05), torch.optim.Muon(whole.values(), lr=0.05)
    for step in range(3):
        torch.manual_seed(10 * step + rank)
        module(torch.randn(7, 12)).float().square().mean().backward()
        for name, parameter in matrices(module):
            assert parameter.grad.dtype == torch.float32
            whole[name].grad = parameter.grad.full_tensor()
        ours.step()
        truth.step()
        ours.zero_grad(set_to_none=True)
    return [name for name, p in matrices(module) if not torch.equal(p.full_tensor(), whole[name])]


@pytest.mark.parametrize("policy", ["mixed", "offload"])
def test_policies_of_fully_shard(pool, policy):
    assert pool.run(2, against_torch, policy) == [[]] * 2


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.compile's own
@pytest.mark.parametrize("wrap", [checkpoint_wrapper, torch.compile], ids=["activation checkpoint", "compile"])
def test_names_come_without_the_prefixes_of_wrappers(wrap):
    """Names are all that is asked for: what ``torch.compile`` wraps it compiles at the first call."""
    plain, wrapped = nn.Sequential(Layers(), Layers()), nn.Sequential(wrap(Layers()), wrap(Layers()))
    blocks = {"0.up.weight": 17, "*.down.weight": 4}
    names = [name for name, _ in matrices(plain)]
    assert [name for name, _ in matrices(wrapped)] != names
    plans = []
    for module in (plain, wrapped):
        optimizer = DistMuon(matrices(module), row_blocks=blocks, buckets=[("*.up.*",), ("*.down.*",)])
        plans.append(optimizer.plan)
        for _, parameter in matrices(module):
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        state = optimizer.state_dict()
    assert plans[0] == plans[1]
    assert [spec.name for spec in plans[1].parameters] == names
    other = DistMuon(matrices(plain)[::-1], row_blocks=blocks)
    other.load_state_dict(state)  # by name, from the wrapped model to the plain one in reverse
    assert [row.optimizer for row in split_parameters(wrapped).table.rows] == [
        row.optimizer for row in split_parameters(plain).table.rows
    ]


def checkpointed(rank: int, ranks: int) -> list[str]:
    return against_torch(rank, ranks, "none", checkpoint_wrapper)


def test_a_model_with_activation_checkpoints_trains(pool):
    assert pool.run(2, checkpointed) == [[]] * 2


def frozen_on_the_way(rank: int, ranks: int) -> tuple[list[str], list[str]]:
    """The first layer takes part in steps 0, 3 and 4; in between no rank has a gradient for it."""
    module = model(ranks)
    whole = {name: nn.Parameter(p.full_tensor().detach().clone()) for name, p in matrices(module)}
    ours = DistMuon(matrices(module), lr=0.05, missing_gradients="skip")
    truth = torch.optim.Muon(whole.values(), lr=0.05)
    moved = []
    for step in range(5):
        for parameter in module[0].parameters():
            parameter.requires_grad_(step not in (1, 2))
        before = [p.full_tensor().clone() for _, p in matrices(module[0])]
        torch.manual_seed(10 * step + rank)
        module(torch.randn(7, 12)).square().mean().backward()
        for name, parameter in matrices(module):
            whole[name].grad = None if parameter.grad is None else parameter.grad.full_tensor()
        ours.step()
        truth.step()
        ours.zero_grad(set_to_none=True)
        if any(not torch.equal(a, p.full_tensor()) for a, (_, p) in zip(before, matrices(module[0]), strict=True)):
            moved.append(str(step))
    return moved, [name for name, p in matrices(module) if not torch.equal(p.full_tensor(), whole[name])]


def test_a_layer_is_frozen_and_unfrozen_on_the_way(pool):
    assert pool.run(2, frozen_on_the_way) == [(["0", "3", "4"], [])] * 2


def test_zeroed_gradients_are_no_missing_gradients():
    parameter = nn.Parameter(torch.eye(4))
    optimizer = DistMuon([parameter], lr=0.1, weight_decay=0.0, momentum=0.0)
    parameter.grad = torch.ones(4, 4)
    optimizer.zero_grad(set_to_none=False)
    optimizer.step()
    assert torch.equal(parameter, torch.eye(4))
    optimizer.zero_grad(set_to_none=True)
    with pytest.raises(ValueError, match=r"has no gradient on this rank: .*missing_gradients='skip'"):
        optimizer.step()


def compiled(rank: int, ranks: int) -> Any:
    """Traced, and run without a compiler, as there may be none; torch warns of what it itself uses."""
    warnings.simplefilter("ignore")
    return against_torch(rank, ranks, "none", lambda layer: torch.compile(layer, backend="eager"))


def test_a_compiled_model_trains(pool):
    assert pool.run(2, compiled) == [[]] * 2
