"""DistMuon has the bits of ``torch.optim.Muon`` on whole matrices, however the matrices are stored."""

from __future__ import annotations

import itertools
import random
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from muon_cases import Case, differing_on_rank, distmuon, muon_on_whole_matrices, values
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from distmuon import DistMuon, Variant
from distmuon.variants import SWITCHES, get_variant

#: Wide, tall, square; fewer rows than ranks; short sides below 8; shapes that once differed in one matrix of sixty.
SHAPES = {
    "wide": (32, 64),
    "tall": (160, 96),
    "square": (48, 48),
    "uneven": (18, 64),
    "uneven again": (18, 64),
    "few rows": (3, 7),
    "two rows": (2, 16),
    "one row": (1, 5),
    "column": (5, 1),
    "gate": (8, 40),
    "small": (5, 4),
    "experts": (6, 24, 16),
}
SETTINGS = [
    {"lr": 0.02, "nesterov": nesterov, "adjust_lr_fn": adjust, "weight_decay": decay}
    for nesterov, adjust, decay in itertools.product((True, False), (None, "original", "match_rms_adamw"), (0.0, 0.1))
]
VARIANTS = ("baseline", "batched", "fused")


def fsdp(ranks: int, **changes: Any) -> Case:
    return replace(Case(SHAPES, mesh=(ranks,), placements=(Shard(0),)), **changes)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_sharded_rows_have_the_bits_of_muon(pool, ranks, variant):
    cases = [fsdp(ranks, settings=settings) for settings in SETTINGS]
    assert pool.run(ranks, differing_on_rank, cases, {"variant": variant}) == [[]] * ranks


def test_eight_ranks_of_which_some_hold_no_rows(pool):
    cases = [fsdp(8, shapes={"a": (18, 64), "b": (18, 64), "c": (2, 16)}, settings={"lr": 0.02})]
    assert pool.run(8, differing_on_rank, cases, {}) == [[]] * 8


def test_plain_tensors_need_no_process_group():
    case = Case(SHAPES, settings={"lr": 0.02})
    ours, truth = distmuon(case), muon_on_whole_matrices(case)
    assert all(torch.equal(ours[name], truth[name]) for name in SHAPES)


def test_replicated_tensors_are_updated_on_every_rank(pool):
    cases = [fsdp(2, placements=(Replicate(),), settings={"lr": 0.02})]
    assert pool.run(2, differing_on_rank, cases, {}) == [[]] * 2


HEADS = {"wq": (36, 24), "wkv": (64, 16), "fused": (16, 24), "stack": (4, 32, 12)}
BLOCKS = {"wq": 12, "wkv": 8, "fused": (8, 4, 4), "stack": 16}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_row_blocks_are_matrices_of_their_own(pool, ranks, variant):
    """Heads that end inside a shard, more heads than ranks, unequal segments, and stacks of fused projections."""
    cases = [fsdp(ranks, shapes=HEADS, row_blocks=BLOCKS, settings=settings) for settings in SETTINGS]
    assert pool.run(ranks, differing_on_rank, cases, {"variant": variant}) == [[]] * ranks


def test_only_the_split_head_travels(pool):
    rows = pool.run(2, plan_rows)[0]
    assert [row["matrices"] for row in rows] == [2, 1]
    assert sum(row["sent_bytes"] for row in rows) == 2 * (2 * 6) * 4  # half a head of 4 x 6 floats, out and back


def plan_rows(rank: int, ranks: int) -> list[dict[str, object]]:
    parameter = nn.Parameter(torch_distribute(torch.randn(12, 6), ranks))
    return DistMuon([("w", parameter)], row_blocks={"w": 4}, variant="batched").plan.report()


def torch_distribute(tensor: torch.Tensor, ranks: int) -> torch.Tensor:
    return distribute_tensor(tensor, init_device_mesh("cpu", (ranks,)), [Shard(0)], src_data_rank=None)


EXPERTS = {"w1": (8, 16, 24), "w2": (8, 24, 16), "w3": (8, 16, 16)}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(
    "placements",
    [(_StridedShard(0, split_factor=2), Shard(0)), (Shard(1), Shard(0)), (Shard(2), Shard(0))],
    ids=["whole experts", "rows over efsdp", "columns over efsdp"],
)
def test_experts_over_fsdp_and_expert_parallelism(pool, placements, variant):
    cases = [Case(EXPERTS, (2, 2), placements, settings=settings, row_blocks={"w2": 12}) for settings in SETTINGS[::3]]
    assert pool.run(4, differing_on_rank, cases, {"variant": variant}) == [[]] * 4


def test_fewer_experts_than_ranks(pool):
    """3 experts over ep 2: one rank of the expert axis holds two, the other one, and rows are split over efsdp."""
    cases = [Case({"w": (3, 10, 6), "v": (1, 10, 6)}, (2, 2), (Shard(1), Shard(0)), settings={"lr": 0.02})]
    assert pool.run(4, differing_on_rank, cases, {}) == [[]] * 4


def order_of_exchanges(rank: int, ranks: int, variant: str) -> list[str]:
    """Between two buckets of all ranks one whose experts only half of them hold."""
    dense, expert = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
    torch.manual_seed(0)
    whole = {name: torch.randn(shape) for name, shape in {"a": (32, 64), "b": (1, 48, 32), "c": (64, 32)}.items()}
    placed = {
        "a": distribute_tensor(whole["a"], dense, [Shard(0)], src_data_rank=None),
        "b": distribute_tensor(whole["b"], expert, [Shard(1), Shard(0)], src_data_rank=None),
        "c": distribute_tensor(whole["c"], dense, [Shard(0)], src_data_rank=None),
    }
    parameters = {name: nn.Parameter(tensor) for name, tensor in placed.items()}
    truth = {name: nn.Parameter(tensor.clone()) for name, tensor in whole.items()}
    ours = DistMuon(parameters.items(), buckets=[("a",), ("b",), ("c",)], variant=variant)
    alone = DistMuon(truth.items())
    for name, parameter in parameters.items():
        parameter.grad = parameter.detach().clone()
        truth[name].grad = truth[name].detach().clone()
    ours.step()
    alone.step()
    return [name for name, parameter in parameters.items() if not torch.equal(parameter.full_tensor(), truth[name])]


@pytest.mark.parametrize("variant", VARIANTS)
def test_ranks_without_experts_keep_the_order_of_exchanges(pool, variant):
    """They once skipped the middle exchange, and so started the last one before the first had come back."""
    assert pool.run(4, order_of_exchanges, variant) == [[]] * 4


def test_non_contiguous_parameters_have_the_values_of_contiguous_ones():
    torch.manual_seed(0)
    start, gradients = torch.randn(6, 4), [torch.randn(6, 4) for _ in range(3)]
    results = []
    for stored in (torch.clone, lambda tensor: tensor.T.contiguous().T):
        for nesterov in (True, False):
            parameter = nn.Parameter(stored(start))
            optimizer = DistMuon([parameter], lr=0.1, nesterov=nesterov)
            for gradient in gradients:
                parameter.grad = stored(gradient)
                optimizer.step()
            results.append(parameter.detach())
    assert not results[2].is_contiguous()
    assert torch.equal(results[0], results[2])
    assert torch.equal(results[1], results[3])


# Parameters in bf16: `add_` on CPU rounds full blocks of 32 elements unlike the tail, so pieces that are multiples of
# 32 have the bits of torch.optim.Muon and others may be one rounding away.


def test_bf16_parameters_in_pieces_of_32_have_the_bits_of_muon(pool):
    shapes = {"wide": (32, 64), "tall": (64, 32), "square": (32, 32), "experts": (4, 32, 32)}
    cases = [
        fsdp(4, shapes=shapes, settings=settings, dtype=torch.bfloat16) for settings in SETTINGS if settings["nesterov"]
    ]
    assert pool.run(4, differing_on_rank, cases, {}) == [[]] * 4


def bf16_distance(rank: int, ranks: int, case: Case) -> float:
    """Largest difference after one step, in units of the last place of the largest of the values that were added."""
    start, ours, truth = values(case, -1), distmuon(case), muon_on_whole_matrices(case)
    worst = 0.0
    for name in case.shapes:
        before, a, b = (result[name].float() for result in (start, ours, truth))
        largest = torch.stack([before, a, b]).abs().amax(0)
        unit = torch.ldexp(torch.ones_like(a), torch.frexp(largest).exponent - 8)
        worst = max(worst, ((a - b).abs() / unit).max().item())
    return worst


def test_bf16_parameters_in_other_pieces_are_within_one_rounding(pool):
    case = fsdp(3, settings={"lr": 0.02}, dtype=torch.bfloat16, steps=1)
    assert max(pool.run(3, bf16_distance, case)) <= 1.0


def differing_between_variants(rank: int, ranks: int, cases: list[Case]) -> list[str]:
    found = []
    for case in cases:
        first, *others = (distmuon(case, variant=variant) for variant in VARIANTS)
        found += [
            f"{case.dtype} {name}" for name in case.shapes if any(not torch.equal(first[name], o[name]) for o in others)
        ]
    return found


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_all_variants_are_equal_in_every_dtype(pool, ranks):
    cases = [
        fsdp(ranks, shapes=SHAPES | HEADS, row_blocks=BLOCKS, settings=settings, dtype=dtype)
        for settings in SETTINGS[::5]
        for dtype in (torch.float32, torch.bfloat16)
    ]
    assert pool.run(ranks, differing_between_variants, cases) == [[]] * ranks


SINGLE_SWITCHES = [
    Variant(**{**asdict(get_variant("baseline")), switch: setting})
    for switch, settings in SWITCHES.items()
    for setting in settings[1:]
]


@pytest.mark.parametrize("variant", SINGLE_SWITCHES, ids=lambda variant: str(variant.__dict__))
def test_each_switch_alone_has_the_bits_of_muon(pool, variant):
    rows = fsdp(4, shapes=SHAPES | HEADS, row_blocks=BLOCKS, settings={"lr": 0.02})
    columns = Case(
        EXPERTS, (2, 2), (Shard(2), Shard(0)), settings={"lr": 0.02, "nesterov": False}, row_blocks={"w2": 12}
    )
    assert pool.run(4, differing_on_rank, [rows, columns], {"variant": variant}) == [[]] * 4


def differing_from_one_process(rank: int, ranks: int, case: Case, options: dict[str, Any]) -> list[str]:
    whole = replace(case, mesh=None, placements=())
    ours, alone = distmuon(case, **options), distmuon(whole, **options)
    return [name for name in case.shapes if not torch.equal(ours[name], alone[name])]


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_float32_newton_schulz_equals_one_process(pool, ranks):
    case = fsdp(ranks, shapes=SHAPES | HEADS, row_blocks=BLOCKS, settings={"lr": 0.02})
    assert pool.run(ranks, differing_from_one_process, case, {"ns_dtype": torch.float32}) == [[]] * ranks


def test_bf16_without_nesterov_keeps_its_momentum(pool):
    """torch.optim.Muon divides the momentum itself here, so one process of ours is the reference."""
    case = fsdp(4, shapes={"w": (32, 64)}, settings={"lr": 0.02, "nesterov": False}, dtype=torch.bfloat16)
    assert pool.run(4, differing_from_one_process, case, {}) == [[]] * 4
    parameter = nn.Parameter(torch.randn(8, 8, dtype=torch.bfloat16))
    optimizer = DistMuon([parameter], nesterov=False, momentum=0.5)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert torch.equal(optimizer.state[parameter]["momentum_buffer"], torch.full_like(parameter, 0.5))


def fully_sharded_model(rank: int, ranks: int) -> list[str]:
    """A real FSDP2 model, trained from a real loss, against its gathered gradients given to torch.optim.Muon."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 34, bias=False), nn.Tanh(), nn.Linear(34, 5, bias=False))
    whole = {name: nn.Parameter(parameter.detach().clone()) for name, parameter in model.named_parameters()}
    mesh = init_device_mesh("cpu", (ranks,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    ours = DistMuon(model.named_parameters(), lr=0.05)
    truth = torch.optim.Muon(whole.values(), lr=0.05)
    for step in range(3):
        torch.manual_seed(10 * step + rank)
        model(torch.randn(7, 12)).square().mean().backward()
        for name, parameter in model.named_parameters():
            whole[name].grad = parameter.grad.full_tensor()
        ours.step()
        truth.step()
        ours.zero_grad()
    return [name for name, p in model.named_parameters() if not torch.equal(p.full_tensor(), whole[name])]


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_fully_sharded_model_trains_with_the_bits_of_muon(pool, ranks):
    assert pool.run(ranks, fully_sharded_model) == [[]] * ranks


def random_case(seed: int, ranks: int) -> Case:
    """Shapes of all sorts, some alike, some cut into unequal blocks; half of them experts."""
    draw = random.Random(seed)
    shapes: dict[str, tuple[int, ...]] = {}
    blocks: dict[str, Any] = {}
    for number in range(12):
        rows, cols = (draw.choice([draw.randint(1, 20), draw.randint(17, 130)]) for _ in range(2))
        shape = draw.choice([(rows, cols), (draw.randint(1, 5), rows, cols), *list(shapes.values())[-2:]])
        shapes[f"p{number}"] = shape
        if draw.random() < 0.4 and shape[-2] > 2:
            cut = draw.randint(1, shape[-2] - 1)
            blocks[f"p{number}"] = (cut, shape[-2] - cut)
        elif shape[-2] % 4 == 0:
            blocks[f"p{number}"] = shape[-2] // 4
    settings = draw.choice(SETTINGS)
    return Case(shapes, (ranks,), (Shard(draw.choice([0, 0, 0, 1])),), row_blocks=blocks, settings=settings, steps=2)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_hundreds_of_random_matrices_have_the_bits_of_muon(pool, ranks):
    """Small tests pass by luck: where bits differ at all, it may be in one matrix of a hundred."""
    cases = [random_case(seed, ranks) for seed in range(20)]
    assert pool.run(ranks, differing_on_rank, cases, {}, timeout=300.0) == [[]] * ranks
