"""Gradients that are missing or not finite: what a step does about them, on real ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from muon_cases import Case, place, values
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils._python_dispatch import TorchDispatchMode

from distmuon import DistMuon

RANKS = 4
#: Rank 3 holds rows of "wide" and "tall" alone, so has the gradient of "two rows" without owning anything of it.
SHAPES = {"wide": (32, 64), "two rows": (2, 16), "tall": (96, 40), "experts": (4, 24, 16)}
BAD = {"nan": torch.nan, "inf": torch.inf, "-inf": -torch.inf}


def made(ranks: int, **options: Any) -> tuple[Case, dict[str, nn.Parameter], DistMuon]:
    """Parameters with gradients, and an optimizer that has taken one step, so that its momentum is not zero."""
    case = Case(SHAPES, (ranks,), (Shard(0),))
    mesh = init_device_mesh("cpu", case.mesh)
    parameters = {name: nn.Parameter(place(case, tensor, mesh)) for name, tensor in values(case, -1).items()}
    optimizer = DistMuon(parameters.items(), lr=0.02, **options)
    give(case, parameters, 0)
    optimizer.step()
    give(case, parameters, 1)
    return case, parameters, optimizer


def give(case: Case, parameters: dict[str, nn.Parameter], step: int) -> None:
    for name, gradient in values(case, step).items():
        parameters[name].grad = place(case, gradient, next(iter(parameters.values())).device_mesh)


def held(optimizer: DistMuon, parameters: dict[str, nn.Parameter]) -> dict[str, list[Tensor]]:
    """Weight and momentum of each parameter, as this rank stores them."""
    return {
        name: [
            parameter.detach().to_local().clone(),
            optimizer.state[parameter]["momentum_buffer"].to_local().clone(),
        ]
        for name, parameter in parameters.items()
    }


def changed(optimizer: DistMuon, parameters: dict[str, nn.Parameter], before: dict[str, list[Tensor]]) -> list[str]:
    """Parameters of which this rank holds a part, whose weight or momentum is another than before."""
    now = held(optimizer, parameters)
    return [
        name
        for name, old in before.items()
        if not all(torch.equal(a.nan_to_num(7e7), b.nan_to_num(7e7)) for a, b in zip(old, now[name], strict=True))
    ]


def outcome(optimizer: DistMuon, parameters: dict[str, nn.Parameter]) -> tuple[str, list[str]]:
    """What a step says, and what it changed."""
    before = held(optimizer, parameters)
    try:
        optimizer.step()
    except ValueError as error:
        return str(error), changed(optimizer, parameters, before)
    return "", changed(optimizer, parameters, before)


# Missing


def missing(rank: int, ranks: int, name: str, on: list[int], options: dict[str, Any]) -> tuple[str, list[str]]:
    _, parameters, optimizer = made(ranks, **options)
    if rank in on:
        parameters[name].grad = None
    said, different = outcome(optimizer, parameters)
    if said:  # the ranks are still in step with each other
        give(Case(SHAPES, (ranks,), (Shard(0),)), parameters, 2)
        optimizer.step()
    return said, different


@pytest.mark.parametrize("variant", ["baseline", "batched", "fused"])
@pytest.mark.parametrize("name", ["wide", "two rows", "experts"])
def test_a_gradient_absent_on_all_ranks_leaves_its_parameter_alone(pool, name, variant):
    options = {"missing_gradients": "skip", "variant": variant}
    results = pool.run(RANKS, missing, name, list(range(RANKS)), options)
    assert [said for said, _ in results] == [""] * RANKS
    for rank, (_, different) in enumerate(results):
        holding = [each for each in SHAPES if each != "two rows" or rank < 2]
        assert different == [each for each in holding if each != name]


@pytest.mark.parametrize(("name", "on"), [("wide", [1]), ("two rows", [3]), ("tall", [0, 1, 2])])
def test_a_gradient_absent_on_some_ranks_is_an_error_on_all_and_changes_nothing(pool, name, on):
    """ "two rows" has no rows on rank 3."""
    results = pool.run(RANKS, missing, name, on, {"missing_gradients": "skip"})
    said = {said for said, _ in results}
    assert len(said) == 1
    (message,) = said
    without = f"rank {on[0]}" if len(on) == 1 else "ranks 0, 1, 2"
    assert message.startswith(f"parameter '{name}' has a gradient on ")
    assert f"but none on {without}: " in message
    assert [different for _, different in results] == [[]] * RANKS


def others_as_without(rank: int, ranks: int) -> list[str]:
    """What has gradients moves as in torch.optim.Muon, which passes over what has none."""
    case = Case(SHAPES, (ranks,), (Shard(0),))
    mesh = init_device_mesh("cpu", case.mesh)
    parameters = {name: nn.Parameter(place(case, tensor, mesh)) for name, tensor in values(case, -1).items()}
    whole = {name: nn.Parameter(tensor) for name, tensor in values(case, -1).items() if tensor.ndim == 2}
    ours, truth = DistMuon(parameters.items(), missing_gradients="skip"), torch.optim.Muon(whole.values())
    for step in range(4):
        for name, gradient in values(case, step).items():
            absent = step in (1, 2) and name in ("wide", "experts")
            parameters[name].grad = None if absent else place(case, gradient, mesh)
            if name in whole:
                whole[name].grad = None if absent else gradient
        ours.step()
        truth.step()
    return [name for name in whole if not torch.equal(parameters[name].full_tensor(), whole[name])]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_skipping_has_the_bits_of_muon(pool, ranks):
    assert pool.run(ranks, others_as_without) == [[]] * ranks


def no_gradient_at_all(rank: int, ranks: int) -> list[str]:
    _, parameters, optimizer = made(ranks, missing_gradients="skip")
    optimizer.zero_grad(set_to_none=True)
    return outcome(optimizer, parameters)[1]


def test_a_step_without_any_gradient_changes_nothing(pool):
    assert pool.run(2, no_gradient_at_all) == [[]] * 2


def absent_on_one_mesh(rank: int, ranks: int) -> tuple[str, list[str]]:
    """Experts of one expert-parallel rank see no token: their gradient is zero, but a plain parameter has none."""
    mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("a", "b"))
    case = Case({"w": (8, 6), "plain": (4, 4)}, (2, 2), (Shard(0), Replicate()))
    parameters = {"w": nn.Parameter(place(case, values(case, -1)["w"], mesh)), "plain": nn.Parameter(torch.ones(4, 4))}
    optimizer = DistMuon(parameters.items(), missing_gradients="skip")
    parameters["w"].grad = place(case, values(case, 0)["w"], mesh)
    if rank:
        parameters["plain"].grad = torch.eye(4)
    optimizer.step()
    return [name for name, p in parameters.items() if isinstance(p, DTensor) or not torch.equal(p, torch.ones(4, 4))]


def test_a_plain_parameter_is_its_ranks_own_affair(pool):
    assert pool.run(4, absent_on_one_mesh) == [["w"]] + [["w", "plain"]] * 3


def replicas(rank: int, ranks: int, absent_on: list[int]) -> tuple[str, bool]:
    """Plain tensors that are replicas, as DDP has them, share their work over a process group."""
    parameter, always = nn.Parameter(torch.eye(24, 32)), nn.Parameter(torch.eye(24, 32))
    optimizer = DistMuon(
        [("w", parameter), ("always", always)],
        process_group=dist.group.WORLD,
        share_replicas=True,
        missing_gradients="skip",
    )
    always.grad = torch.ones(24, 32)
    if rank not in absent_on:
        parameter.grad = torch.ones(24, 32)
    try:
        optimizer.step()
    except ValueError as error:
        assert torch.equal(always, torch.eye(24, 32))
        return str(error), torch.equal(parameter, torch.eye(24, 32))
    assert not torch.equal(always, torch.eye(24, 32))
    return "", torch.equal(parameter, torch.eye(24, 32))


def test_replicas_agree_on_what_is_missing(pool):
    assert pool.run(3, replicas, []) == [("", False)] * 3
    assert pool.run(3, replicas, [0, 1, 2]) == [("", True)] * 3
    for said, unchanged in pool.run(3, replicas, [1]):
        assert said.startswith("parameter 'w' has a gradient on ranks 0, 2, but none on rank 1: ")
        assert unchanged


def alone_among_ranks(rank: int, ranks: int) -> int:
    """Whoever shares nothing steps without the others, as the default policies let it."""
    parameter = nn.Parameter(torch.eye(4))
    optimizer = DistMuon([("w", parameter)], missing_gradients="skip", non_finite="skip")
    for _ in range(rank):
        parameter.grad = torch.ones(4, 4)
        optimizer.step()
    parameter.grad = torch.full((4, 4), torch.nan)
    optimizer.step()
    return optimizer.skipped_steps


def test_plain_parameters_need_no_other_rank(pool):
    assert pool.run(3, alone_among_ranks) == [1] * 3


def test_without_a_process_group_it_skips_likewise():
    case = Case({"a": (8, 6), "b": (5, 7)})
    parameters = {name: nn.Parameter(tensor) for name, tensor in values(case, -1).items()}
    optimizer = DistMuon(parameters.items(), missing_gradients="skip")
    before = parameters["a"].detach().clone()
    parameters["b"].grad = torch.ones(5, 7)
    optimizer.step()
    assert torch.equal(parameters["a"], before)
    assert optimizer.state[parameters["b"]]["momentum_buffer"].count_nonzero() == 35


def refused_alone(rank: int, ranks: int) -> tuple[str, list[str]]:
    """With agreement even an error of one rank by itself is raised on all."""
    _, parameters, optimizer = made(ranks, non_finite="skip")
    if rank == 1:
        parameters["tall"].grad = None
    return outcome(optimizer, parameters)


def test_where_ranks_agree_an_error_of_one_is_raised_on_all(pool):
    results = pool.run(3, refused_alone)
    assert [different for _, different in results] == [[]] * 3
    own = results[1][0]
    assert own.startswith("parameter 'tall' has no gradient on this rank")
    assert results[0][0] == results[2][0] == f"rank 1 can't take the step, so no rank does: ValueError: {own}"


# Not finite


def bad(rank: int, ranks: int, name: str, value: float, on: list[int], policy: str) -> tuple[str, list[str], int]:
    case, parameters, optimizer = made(ranks, non_finite=policy)
    if rank in on and parameters[name].grad.to_local().numel():
        parameters[name].grad.to_local().view(-1)[0] = value
    said, different = outcome(optimizer, parameters)
    skipped = optimizer.skipped_steps
    give(case, parameters, 2)
    optimizer.step()
    assert optimizer.skipped_steps == skipped
    return said, different, skipped


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("on", [[0, 1, 2, 3], [2]], ids=["all", "one"])
def test_a_step_is_skipped_on_all_ranks_for_a_bad_gradient_on_any(pool, on, value):
    assert pool.run(RANKS, bad, "tall", BAD[value], on, "skip") == [("", [], 1)] * RANKS


@pytest.mark.parametrize("on", [[0, 1, 2, 3], [2]], ids=["all", "one"])
def test_a_bad_gradient_is_an_error_on_all_ranks(pool, on):
    results = pool.run(RANKS, bad, "tall", torch.nan, on, "error")
    where = "ranks 0, 1, 2, 3" if len(on) > 1 else "rank 2"
    assert results == [(f"gradients are not finite: 'tall' on {where}. Nothing was updated", [], 0)] * RANKS


@pytest.mark.parametrize("policy", ["skip", "error"])
def test_a_rank_that_owns_nothing_has_no_bad_gradient(pool, policy):
    """Only rank 3 is told to spoil "two rows", and it has none of them."""
    results = pool.run(RANKS, bad, "two rows", torch.nan, [3], policy)
    assert [(said, skipped) for said, _, skipped in results] == [("", 0)] * RANKS


def carried(rank: int, ranks: int) -> dict[str, bool]:
    _, parameters, optimizer = made(ranks)
    if rank == 2:
        parameters["tall"].grad.to_local()[0, 0] = torch.nan
    optimizer.step()
    return {name: bool(p.full_tensor().isfinite().all()) for name, p in parameters.items()}


def test_by_default_a_bad_gradient_spoils_its_matrix_and_no_other(pool):
    assert pool.run(RANKS, carried) == [{"wide": True, "two rows": True, "tall": False, "experts": True}] * RANKS


def missing_and_bad(rank: int, ranks: int) -> tuple[str, list[str], int]:
    _, parameters, optimizer = made(ranks, missing_gradients="skip", non_finite="skip")
    parameters["wide"].grad = None
    if rank == 0:
        parameters["experts"].grad.to_local()[0, 0, 0] = torch.inf
    return *outcome(optimizer, parameters), optimizer.skipped_steps


def test_a_step_with_a_missing_and_a_bad_gradient_is_skipped(pool):
    assert pool.run(RANKS, missing_and_bad) == [("", [], 1)] * RANKS


class Collectives(TorchDispatchMode):
    """Counts collectives by name."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.names.append(func._opname)
        return func(*args, **(kwargs or {}))


def collectives(rank: int, ranks: int, options: dict[str, Any]) -> tuple[int, list[str]]:
    _, _, optimizer = made(ranks, **options)
    with Collectives() as counted:
        optimizer.step()
    exchanges = 2 * sum(stage.exchange is not None for stage in optimizer.plan.stages)
    assert counted.names.count("alltoall_base_") == exchanges > 0
    return [name for name in counted.names if name != "alltoall_base_"]


@pytest.mark.parametrize(
    ("options", "extra"),
    [
        ({}, []),
        ({"missing_gradients": "skip"}, ["allreduce_"]),
        ({"non_finite": "skip"}, ["allreduce_"]),
        ({"missing_gradients": "skip", "non_finite": "error"}, ["allreduce_"]),
    ],
)
def test_policies_cost_one_collective_a_step_and_the_defaults_none(pool, options, extra):
    assert pool.run(2, collectives, options) == [extra] * 2


def other_policies(rank: int, ranks: int) -> str:
    try:
        made(ranks, missing_gradients="skip" if rank else "error")
    except ValueError as error:
        return str(error)
    return ""


def test_ranks_with_other_policies_are_refused(pool):
    messages = pool.run(2, other_policies)
    assert messages[0] == messages[1]
    assert "disagree on missing_gradients or non_finite" in messages[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"missing_gradients": "skp"}, "unknown missing_gradients 'skp'; did you mean 'skip'"),
        ({"non_finite": "raise"}, "unknown non_finite 'raise'; did you mean"),
        ({"momentum_dtype": torch.int8}, "momentum_dtype is torch.int8: choose None, torch.bfloat16, "),
        ({"capturable": True, "lr": torch.tensor(0.1), "non_finite": "skip"}, "capturable=True reads nothing"),
    ],
)
def test_policies_that_do_not_exist_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        DistMuon([nn.Parameter(torch.zeros(4, 4))], **options)
