"""Groups that join later: planned with those there are, or refused on all ranks, which then go on as before."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_groups import Parameters, both, differing, give
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from distmuon import DistMuon


def grown(rank: int, ranks: int) -> list[str]:
    """Parameters that join later, one in a group of its own, one with a policy already in force."""
    sharded, whole = both(ranks)
    ours = DistMuon([("a", sharded["a"])], missing_gradients="skip")
    truth = torch.optim.Muon([("a", whole["a"])])
    for step, name in enumerate("bcd"):
        give(sharded, whole, step)
        ours.step()
        truth.step()
        ours.add_param_group({"params": [(name, sharded[name])], "lr": 0.1 * step})
        truth.add_param_group({"params": [(name, whole[name])], "lr": 0.1 * step})
    give(sharded, whole, 3)
    sharded["c"].grad = whole["c"].grad = None
    ours.step()
    truth.step()
    assert sum(row["matrices"] for row in ours.plan.report()) == 4
    return differing(sharded, whole)


def test_a_group_that_is_added_later_is_planned_with_the_others(pool):
    assert pool.run(3, grown) == [[]] * 3


def added_on_one(rank: int, ranks: int) -> str:
    sharded, _ = both(ranks)
    optimizer = DistMuon([("a", sharded["a"])])
    try:
        optimizer.add_param_group({"params": [("b", sharded["b"])], "lr": 0.1 + rank})
    except ValueError as error:
        return str(error)
    return ""


def test_groups_that_differ_when_they_are_added_are_refused(pool):
    messages = pool.run(2, added_on_one)
    assert messages[0] == messages[1]
    assert "disagree on lr of the group of 'b'. rank 0: 0.1; rank 1: 1.1" in messages[0]


def test_a_row_blocks_argument_holds_for_groups_that_are_added():
    optimizer = DistMuon([("a", nn.Parameter(torch.zeros(8, 4)))], row_blocks={"a": 4})
    optimizer.add_param_group({"params": [("b", nn.Parameter(torch.zeros(6, 4)))]})
    assert [spec.matrix_rows for spec in optimizer.plan.parameters] == [(4, 4), (6,)]


def uneven(rank: int, parameters: Parameters) -> nn.Parameter:
    """A DTensor that ranks take for one of other shapes, as its local tensor has 3 and 2 rows."""
    local = torch.zeros(3 - rank, 3)
    return nn.Parameter(DTensor.from_local(local, parameters["a"].device_mesh, [Shard(0)], run_check=False))


#: On rank 1, if not on all: what is wrong with the group.
REFUSED: dict[str, Callable[[int, Parameters], Any]] = {
    "unknown setting of a parameter group 'learning_rate'": lambda rank, its: {
        "params": [("b", its["b"])],
        "learning_rate" if rank else "lr": 0.1,
    },
    "some parameters appear in more than one parameter group": lambda rank, its: {
        "params": [("b", its["a" if rank else "b"])]
    },
    "parameter 'twice' is 'b' once more": lambda rank, its: {
        "params": [("b", its["b"]), ("twice", its["b" if rank else "d"])]
    },
    "parameter 'b' has shape (4,)": lambda rank, its: {
        "params": [("b", nn.Parameter(torch.zeros(4)) if rank else its["b"])]
    },
    "disagree on parameter 2 there": lambda rank, its: {"params": [("b", uneven(rank, its))]},
    "row_blocks['b'] = 7 does not add up": lambda rank, its: {
        "params": [("b", its["b"])],
        "row_blocks": {"b": 7 if rank else 12},
    },
    "param_group must be a dict": lambda rank, its: [("b", its["b"])] if rank else {"params": [("b", its["b"])]},
    "can only optimize Tensors": lambda rank, its: {"params": [("b", 0.5 if rank else its["b"])]},
}


def refused(rank: int, ranks: int, why: str) -> tuple[str, list[str]]:
    """What is said of a group, and what differs from a run in which it was never given."""
    warnings.filterwarnings("ignore", message="optimizer contains a parameter group with duplicate parameters")
    sharded, whole = both(ranks)
    ours, truth = (
        DistMuon([{"params": [("a", its["a"]), ("c", its["c"])], "lr": 0.05, "row_blocks": {"a": 16}}])
        for its in (sharded, whole)
    )
    give(sharded, whole, 0)
    ours.step()
    truth.step()
    before = ours.plan, [dict(group) for group in ours.param_groups], list(ours.state)
    group = REFUSED[why](rank, sharded)
    given = group.copy()
    said = ""
    try:
        ours.add_param_group(group)
    except (ValueError, TypeError) as error:
        said = str(error)
    assert group == given
    assert ours.plan is before[0]
    assert ours.param_groups == before[1]
    assert list(ours.state) == before[2]
    for step in (1, 2):
        give(sharded, whole, step)
        ours.step()
        truth.step()
    for optimizer, parameters in ((ours, sharded), (truth, whole)):  # one that is right is taken
        optimizer.add_param_group({"params": [("b", parameters["b"])], "lr": 0.1})
    give(sharded, whole, 3)
    ours.step()
    truth.step()
    return said, differing(sharded, whole)


@pytest.mark.parametrize("why", REFUSED)
def test_a_group_that_one_rank_refuses_changes_nothing_on_any(pool, why):
    results = pool.run(2, refused, why)
    assert [different for _, different in results] == [[]] * 2
    assert all(why in said for said, _ in results), results


def no_room(rank: int, ranks: int) -> list[str]:
    """Out of memory on one rank, for the momentum of what joins."""
    sharded, whole = both(ranks)
    ours, truth = DistMuon([("a", sharded["a"])]), torch.optim.Muon([("a", whole["a"])])
    zeros_like = torch.zeros_like
    if rank == 1:
        torch.zeros_like = lambda *_, **__: 1 / 0
    try:
        with pytest.raises((ValueError, ZeroDivisionError), match="division by zero"):
            ours.add_param_group({"params": [("b", sharded["b"])]})
    finally:
        torch.zeros_like = zeros_like
    assert list(ours.state) == [sharded["a"]]
    give(sharded, whole, 0)
    ours.step()
    truth.step()
    return differing(sharded, whole)


def test_a_rank_without_room_for_a_group_leaves_all_as_they_were(pool):
    assert pool.run(2, no_room) == [[]] * 2
