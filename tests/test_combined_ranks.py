"""DistMuon and AdamW as one optimizer on several ranks: what one rank finds holds for all, and for both."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from test_combined import backward, contents, decoder, differing, train
from torch import nn
from torch.optim import AdamW

from distmuon import DistMuon, muon_with_adamw


def spoiled(rank: int, ranks: int, name: str, policy: str) -> tuple[str, list[str], int]:
    """What a step says and changes if rank 1 alone has a gradient that is not finite; a good one is taken after it."""
    model = decoder(ranks)
    optimizer = muon_with_adamw(model, 0.02, muon_options={"non_finite": policy})
    train(model, [optimizer], [0], rank)
    before = contents(model, optimizer)
    backward(model, 1, rank)
    if rank == 1:
        model.get_parameter(name).grad.to_local().view(-1)[-1] = torch.nan
    said = ""
    try:
        optimizer.step()
    except ValueError as error:
        said = str(error)
    changed = differing(contents(model, optimizer), before)
    optimizer.zero_grad()
    train(model, [optimizer], [2], rank)
    assert differing(contents(model, optimizer), before)
    return said, changed, optimizer.muon.skipped_steps


@pytest.mark.parametrize("name", ["table.weight", "norm.bias", "up.weight"])
def test_a_bad_gradient_of_either_on_one_rank_is_a_step_that_neither_takes(pool, name):
    assert pool.run(3, spoiled, name, "skip") == [("", [], 1)] * 3
    message = f"gradients are not finite: '{name}' on rank 1. Nothing was updated"
    assert pool.run(3, spoiled, name, "error") == [(message, [], 0)] * 3


def copied(rank: int, ranks: int) -> tuple[int, bool]:
    optimizer = copy.deepcopy(muon_with_adamw(decoder(ranks), muon_options={"non_finite": "skip"}))
    table = optimizer.adamw.param_groups[0]["params"][0]
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    if rank == 1:
        table.grad.to_local().fill_(torch.inf)
    before = table.to_local().clone()
    optimizer.step()
    return optimizer.muon.skipped_steps, torch.equal(table.to_local(), before)


def test_a_copy_looks_at_the_gradients_of_both_too(pool):
    assert pool.run(2, copied) == [(1, True)] * 2


def watched(rank: int, ranks: int) -> tuple[int, list[str]]:
    """Two optimizers, as the first example of the README has them; Muon's parameters are each rank's own."""
    model = decoder(ranks)
    weight = nn.Parameter(torch.eye(4))
    optimizer, other = DistMuon([weight], non_finite="skip"), AdamW(model.parameters())
    optimizer.watch(other)
    before = contents(model, other)
    weight.grad = torch.ones(4, 4)
    backward(model, 0, rank)
    if rank == 2:
        model.table.weight.grad.to_local()[0, 0] = torch.inf
    optimizer.step()
    if not optimizer.skipped_steps:
        other.step()
    assert torch.equal(weight, torch.eye(4))
    return optimizer.skipped_steps, differing(contents(model, other), before)


def test_another_optimizer_is_watched(pool):
    assert pool.run(3, watched) == [(1, [])] * 3


def wrong_on_one(rank: int, ranks: int, arguments: dict[str, Any]) -> tuple[str, str]:
    try:
        muon_with_adamw(decoder(ranks), **(arguments if rank == 1 else {}))
    except (ValueError, TypeError) as error:
        return type(error).__name__, str(error)
    return "", ""


@pytest.mark.parametrize(
    ("arguments", "kind", "said"),
    [
        ({"row_blocks": {"nowhere": 3}}, "ValueError", "row_blocks pattern 'nowhere' matches no parameter"),
        ({"muon": ["nowhere"]}, "ValueError", "muon pattern 'nowhere' matches no parameter"),
        ({"adamw": ["*"]}, "ValueError", "leave nothing to Muon"),
        ({"muon_options": {"ns_step": 5}}, "TypeError", "unexpected keyword argument 'ns_step'"),
        ({"adamw_options": {"beta": 5}}, "TypeError", "unexpected keyword argument 'beta'"),
        ({"adamw_options": {"eps": -1.0}}, "ValueError", "Invalid epsilon value"),
        ({"muon_options": {"eps": -1.0}}, "ValueError", "eps is -1.0"),
    ],
    ids=str,
)
def test_what_one_rank_finds_wrong_is_refused_on_all(pool, arguments, kind, said):
    results = pool.run(3, wrong_on_one, arguments)
    assert results[1][0] == kind
    assert said in results[1][1]
    told = f"rank 1 could not set up DistMuon, so no rank can: {kind}: {results[1][1]}"
    assert results[0] == results[2] == ("ValueError", told)


def set_up(rank: int, ranks: int) -> str:
    try:
        muon_with_adamw(decoder(ranks), adamw_options={"betas": (0.9, 0.95 if rank == 1 else 0.999)})
    except ValueError as error:
        return str(error)
    return ""


def test_ranks_that_give_adamw_other_settings_are_told(pool):
    said = "the ranks of mesh (0, 1, 2) disagree on betas of AdamW. ranks 0, 2: (0.9, 0.999); rank 1: (0.9, 0.95)"
    assert pool.run(3, set_up) == [said] * 3
