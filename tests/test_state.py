"""State dicts and copies: by name, from and into ``torch.optim.Muon``, in place, refused where they do not fit."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from muon_cases import Case, place, values
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.optim import AdamW, Optimizer

from distmuon import DistMuon

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
