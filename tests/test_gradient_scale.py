"""Zero, tiny and huge gradients, and momentum in a dtype of its own: what a step makes of them, on real ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from muon_cases import Case, differing_on_rank, distmuon, place, values
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from distmuon import DistMuon, Variant

SHAPES = {"wide": (32, 64), "two rows": (2, 16), "tall": (96, 40), "experts": (4, 24, 16)}
VARIANTS = ["baseline", "fused", Variant(wire_dtype="parameter")]
ALGORITHMS = ["standard", "copy_free", "gram"]


# Zero, tiny, huge


def zeros(rank: int, ranks: int, options: dict[str, Any]) -> bool:
    case = Case(SHAPES, (ranks,), (Shard(0),))
    mesh = init_device_mesh("cpu", case.mesh)
    parameters = {name: nn.Parameter(place(case, tensor, mesh)) for name, tensor in values(case, -1).items()}
    optimizer = DistMuon(parameters.items(), weight_decay=0.0, **options)
    for parameter in parameters.values():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    return all(torch.equal(parameters[n].full_tensor(), tensor) for n, tensor in values(case, -1).items())


@pytest.mark.parametrize("scale_free", [False, True])
@pytest.mark.parametrize("ns_algorithm", ALGORITHMS)
def test_zero_gradients_give_zero_updates(pool, ns_algorithm, scale_free):
    assert all(pool.run(2, zeros, {"ns_algorithm": ns_algorithm, "scale_free": scale_free}))


def moved(case: Case, **options: Any) -> dict[str, Tensor]:
    """What the steps changed, without weight decay."""
    start, end = values(case, -1), distmuon(case, **options)
    return {name: end[name] - start[name] for name in case.shapes}


def same_at_all_scales(rank: int, ranks: int, dtype: torch.dtype, options: dict[str, Any]) -> list[str]:
    wrong = []
    results = {}
    for exponent in (-100, 0, 100):
        case = Case(SHAPES, (ranks,), (Shard(0),), settings={"weight_decay": 0.0}, dtype=dtype, scale=2.0**exponent)
        results[exponent] = moved(case, scale_free=True, **options)
    plain = moved(Case(SHAPES, (ranks,), (Shard(0),), settings={"weight_decay": 0.0}, dtype=dtype), **options)
    for name in SHAPES:
        if not plain[name].any() or not torch.equal(results[0][name], plain[name]):
            wrong.append(f"{name} at 1")
        wrong += [f"{name} at 2^{e}" for e in (-100, 100) if not torch.equal(results[e][name], plain[name])]
    return wrong


@pytest.mark.parametrize("ns_algorithm", ALGORITHMS)
@pytest.mark.parametrize("ns_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_scale_free_steps_have_the_default_bits_at_all_powers_of_two(pool, dtype, ns_dtype, ns_algorithm):
    """2^-100 is 8e-31, and 2^100 is 1.3e30: the same update to the last bit, and that of the default at 1."""
    options = {"ns_algorithm": ns_algorithm, "ns_dtype": ns_dtype}
    assert pool.run(2, same_at_all_scales, dtype, options) == [[]] * 2


def distance_of_scales(rank: int, ranks: int, scale: float, ns_dtype: torch.dtype) -> float:
    settings = {"weight_decay": 0.0, "lr": 1.0}
    cases = [Case(SHAPES, (ranks,), (Shard(0),), settings=settings, scale=s, steps=1) for s in (1.0, scale)]
    one, other = (moved(case, scale_free=True, ns_dtype=ns_dtype) for case in cases)
    return max((one[name] - other[name]).abs().max().item() / one[name].abs().max().item() for name in SHAPES)


@pytest.mark.parametrize(("ns_dtype", "rounding"), [(torch.float32, 1e-5), (torch.bfloat16, 0.15)])
@pytest.mark.parametrize("scale", [1e-30, 1e-12, 0.7, 1e20, 1e30])
def test_scale_free_updates_are_the_same_but_for_rounding_from_1e_30_to_1e30(pool, scale, ns_dtype, rounding):
    """These are no powers of two, so that already the gradients are rounded."""
    assert 0 < max(pool.run(2, distance_of_scales, scale, ns_dtype)) < rounding


@pytest.mark.parametrize("scale", [1e-12, 1e30])
def test_by_default_updates_vanish_far_from_1(scale):
    """As in torch.optim.Muon: below ``eps`` a matrix is not brought to norm 1, and above 1e19 its norm overflows."""
    case = Case({"w": (32, 64)}, settings={"weight_decay": 0.0, "lr": 1.0}, scale=scale, steps=1)
    usual = Case({"w": (32, 64)}, settings={"weight_decay": 0.0, "lr": 1.0}, steps=1)
    assert moved(case)["w"].norm() < 0.01 * moved(usual)["w"].norm()


# The momentum's dtype


def beside_bf16(rank: int, ranks: int, options: dict[str, Any]) -> list[str]:
    """fp32 momentum beside bf16 parameters: what a rank holds alone is what torch computes with it."""
    case = Case({**SHAPES, "square": (32, 32)}, (ranks,), (Shard(0),), dtype=torch.bfloat16)
    mesh = init_device_mesh("cpu", case.mesh)
    start = values(case, -1)
    parameters = {name: nn.Parameter(place(case, tensor, mesh)) for name, tensor in start.items()}
    whole = {name: nn.Parameter(tensor.clone()) for name, tensor in start.items()}
    ours = DistMuon(parameters.items(), momentum_dtype=torch.float32, **options)
    alone = DistMuon(whole.items(), momentum_dtype=torch.float32, **options)
    momentum = {name: torch.zeros_like(tensor, dtype=torch.float32) for name, tensor in start.items()}
    for step in range(3):
        for name, gradient in values(case, step).items():
            parameters[name].grad, whole[name].grad = place(case, gradient, mesh), gradient
            momentum[name].lerp_(gradient.float(), 1 - 0.95)
        ours.step()
        alone.step()
    wrong = [f"weight of {n}" for n in start if not torch.equal(parameters[n].full_tensor(), whole[n])]
    wrong += [
        f"momentum of {n}"
        for n, p in parameters.items()
        if not torch.equal(ours.state[p]["momentum_buffer"].full_tensor(), momentum[n])
    ]
    return wrong


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("ns_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("variant", VARIANTS, ids=["baseline", "fused", "parameter on the wire"])
def test_fp32_momentum_beside_bf16_parameters(pool, variant, ns_dtype, nesterov):
    options = {"variant": variant, "ns_dtype": ns_dtype, "nesterov": nesterov}
    assert pool.run(2, beside_bf16, options) == [[]] * 2


def test_a_momentum_dtype_that_is_the_parameters_changes_no_bit(pool):
    case = Case(SHAPES, (2,), (Shard(0),), settings={"lr": 0.02})
    assert pool.run(2, differing_on_rank, [case], {"momentum_dtype": torch.float32}) == [[]] * 2


def test_narrow_momentum_leaves_wide_parameters_their_digits():
    parameter = nn.Parameter(torch.full((4, 4), 3.0, dtype=torch.float64))
    optimizer = DistMuon([parameter], lr=0.1, weight_decay=0.1, momentum_dtype=torch.float32)
    parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert torch.equal(parameter, torch.full((4, 4), 3.0, dtype=torch.float64) * (1 - 0.1 * 0.1))


def test_a_gradient_of_another_dtype_says_what_to_choose():
    parameter = nn.Parameter(torch.zeros(4, 4, dtype=torch.bfloat16))
    parameter.grad_dtype = torch.float32
    parameter.grad = torch.ones(4, 4)
    optimizer = DistMuon([("w", parameter)])
    with pytest.raises(
        ValueError, match=r"gradient of torch.float32, but momentum of torch.bfloat16: give momentum_dtype"
    ):
        optimizer.step()
    optimizer = DistMuon([("w", parameter)], momentum_dtype=torch.float32)
    optimizer.step()
    assert parameter.count_nonzero() == 16


def test_fp32_momentum_in_a_capturable_step():
    results = []
    for capturable in (False, True):
        parameter = nn.Parameter(torch.ones(8, 32, dtype=torch.bfloat16))
        optimizer = DistMuon([parameter], lr=torch.tensor(0.1), capturable=capturable, momentum_dtype=torch.float32)
        for seed in range(3):
            torch.manual_seed(seed)
            parameter.grad = torch.randn(8, 32).bfloat16()
            optimizer.step()
        results.append(optimizer.state[parameter]["momentum_buffer"])
    assert results[0].dtype == torch.float32
    assert torch.equal(*results)
