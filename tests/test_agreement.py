"""What only the ranks together can see, or one of them alone: all that are concerned raise, before any exchange."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from pool import RankError
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from distmuon import DistMuon


def weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape))


def sharded(name: str, ranks: int, *shape: int) -> tuple[str, nn.Parameter]:
    mesh = init_device_mesh("cpu", (ranks,))
    return name, nn.Parameter(distribute_tensor(torch.zeros(shape), mesh, [Shard(0)], src_data_rank=None))


def message_of(build: Any) -> str:
    try:
        build()
    except ValueError as error:
        return str(error)
    return "no error"


def other_names(rank: int, ranks: int) -> str:
    return message_of(lambda: DistMuon([sharded("a" if rank else "b", ranks, 4, 4)]))


def other_order(rank: int, ranks: int) -> str:
    named = [sharded("a", ranks, 4, 4), sharded("b", ranks, 4, 4)]
    return message_of(lambda: DistMuon(named if rank else reversed(named)))


def other_shapes(rank: int, ranks: int) -> str:
    """``DTensor.from_local`` without a shape guesses it from the local tensor, here of 3 and of 2 rows."""
    mesh = init_device_mesh("cpu", (ranks,))
    local = DTensor.from_local(torch.zeros(3 - rank, 3), mesh, [Shard(0)], run_check=False)
    return message_of(lambda: DistMuon([("a", nn.Parameter(local))]))


def other_settings(rank: int, ranks: int) -> str:
    return message_of(lambda: DistMuon([sharded("a", ranks, 4, 4)], lr=0.1 + 0.1 * rank))


def other_groups(rank: int, ranks: int) -> str:
    """Of the same settings; but matrices of two groups are not orthogonalised in one batch."""
    a, b = sharded("a", ranks, 4, 4), sharded("b", ranks, 4, 4)
    return message_of(lambda: DistMuon([{"params": [a]}, {"params": [b]}] if rank else [a, b]))


def other_buckets(rank: int, ranks: int) -> str:
    named = [sharded("a", ranks, 4, 4), sharded("b", ranks, 4, 4)]
    return message_of(lambda: DistMuon(named, buckets=[("a",), ("b",)] if rank else [("a", "b")]))


def other_variant(rank: int, ranks: int) -> str:
    return message_of(lambda: DistMuon([sharded("a", ranks, 4, 4)], variant="baseline" if rank else "batched"))


def one_more(rank: int, ranks: int) -> str:
    return message_of(lambda: DistMuon([sharded(name, ranks, 4, 4) for name in "ab"[: 1 + rank]]))


@pytest.mark.parametrize(
    ("job", "said"),
    [
        (other_names, ["parameter 0", "rank 0: 'b'", "'a'"]),
        (other_order, ["parameter 0", "rank 0: 'b'", "'a'"]),
        (other_shapes, ["parameter 0", "rank 0: 'a' of shape (6, 3)", "rank 1: 'a' of shape (4, 3)"]),
        (other_settings, ["disagree on lr of the group of 'a'. rank 0: 0.1; rank 1: 0.2"]),
        (other_groups, ["parameter 1", "rank 0: 'b' of", "rows; rank 1: 'b' of", "rows, first of a parameter group"]),
        (other_buckets, ["on buckets", "[('a', 'b')]", "[('a',), ('b',)]"]),
        (other_variant, ["on variant", "packing='region'", "packing='parameter'"]),
        (one_more, ["'b'", "nothing"]),
    ],
)
def test_ranks_that_disagree_all_say_so(pool, job, said):
    messages = pool.run(2, job)
    assert messages[0] == messages[1]
    assert messages[0].startswith("the ranks of mesh (0, 1) disagree on ")
    assert all(words in messages[0] for words in said), messages[0]


def one_finds_an_error(rank: int, ranks: int) -> str:
    return message_of(lambda: DistMuon([sharded("wq", ranks, 8, 4)], row_blocks={"wq": 3 if rank == 1 else 4}))


def test_an_error_of_one_rank_is_raised_on_all(pool):
    messages = pool.run(3, one_finds_an_error)
    assert "does not add up" in messages[1]
    assert messages[0] == messages[2] == f"rank 1 could not set up DistMuon, so no rank can: ValueError: {messages[1]}"


def one_asks_for_an_unknown_variant(rank: int, ranks: int) -> str:
    variant = "batchd" if rank == 1 else "batched"
    return message_of(lambda: DistMuon([sharded("a", ranks, 4, 4)], variant=variant))


def test_an_unknown_variant_on_one_rank_is_refused_on_all(pool):
    messages = pool.run(2, one_asks_for_an_unknown_variant)
    assert "did you mean 'batched'" in messages[1]
    assert messages[0] == f"rank 1 could not set up DistMuon, so no rank can: ValueError: {messages[1]}"


def one_has_no_parameters(rank: int, ranks: int) -> str:
    return message_of(lambda: DistMuon([sharded("a", ranks, 4, 4)] if rank else []))


def test_an_empty_list_on_one_rank_of_a_mesh_is_refused_on_all(pool):
    (message,) = set(pool.run(3, one_has_no_parameters))
    said = "the ranks of mesh (0, 1, 2) disagree on parameter 0 there. rank 0: nothing; ranks 1, 2: 'a' of shape (4, 4)"
    assert message == said


def one_has_a_number(rank: int, ranks: int) -> str:
    try:
        DistMuon([sharded("a", ranks, 4, 4) if rank else ("a", 0.5)])
    except (ValueError, TypeError) as error:
        return str(error)
    return "no error"


def test_what_is_no_tensor_on_one_rank_is_refused_on_all(pool):
    messages = pool.run(3, one_has_a_number)
    assert messages[0] == "optimizer can only optimize Tensors, but one of the params is float"
    assert set(messages[1:]) == {f"rank 0 could not set up DistMuon, so no rank can: TypeError: {messages[0]}"}


def one_has_plain_tensors(rank: int, ranks: int) -> str:
    named = sharded("a", ranks, 4, 4)
    return message_of(lambda: DistMuon([named if rank else ("a", weight(4, 4))]))


def test_plain_tensors_on_one_rank_of_a_mesh_are_refused_on_all(pool):
    messages = pool.run(2, one_has_plain_tensors)
    assert messages[0] == messages[1]
    said = "the ranks of mesh (0, 1) disagree on parameter 0 there. rank 0: nothing; rank 1: 'a' of shape (4, 4)"
    assert messages[0] == said


def one_misspells_a_setting_of_plain_tensors(rank: int, ranks: int) -> str:
    group = {"params": [weight(4, 4)], "lr" if rank else "learning_rate": 0.1}
    return message_of(lambda: DistMuon([group]))


def test_an_error_of_one_rank_is_raised_on_all_with_plain_tensors_too(pool):
    messages = pool.run(2, one_misspells_a_setting_of_plain_tensors)
    assert "did you mean 'lr'" in messages[0]
    assert messages[1].endswith(messages[0])


def some_construct(rank: int, ranks: int, those: list[int]) -> tuple[str, float]:
    start = time.monotonic()
    try:
        if rank in those:
            DistMuon([weight(4, 4)])
    except RuntimeError as error:
        return str(error), time.monotonic() - start
    time.sleep(4.0)  # who is gone altogether would end the wait at once
    return "no error", 0.0


@pytest.mark.parametrize("backend", ["gloo", "cuda:gloo"], ids=["its own", "that of a group made for it"])
@pytest.mark.parametrize(
    ("those", "said"),
    [
        ([0], "Ranks 1, 2 failed to pass"),
        ([0, 2], "Ranks 1 failed to pass"),
        ([1, 2], "Rank 0 is missing, or raised the error that says who is"),
    ],
)
def test_ranks_that_do_not_construct_end_the_wait_of_the_others_within_the_time_out(pool, those, said, backend):
    """The default group's, of which a backend without the CPU, as NCCL, has none that takes host objects."""
    results = pool.run(3, some_construct, those, backend=backend, group_timeout=1.0)
    for rank, (message, seconds) in enumerate(results):
        if rank not in those:
            assert message == "no error"
            continue
        assert message.startswith("not all ranks set up DistMuon within the time-out, 0:00:01")
        assert seconds < 3.9
    if backend == "gloo":
        assert said in results[those[0]][0]


def missing_on_one(rank: int, ranks: int) -> None:
    named = [sharded("a", ranks, 4, 4), sharded("b", ranks, 4, 4)]
    optimizer = DistMuon(named)
    for name, parameter in named:
        if (rank, name) != (1, "b"):
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()


def test_a_missing_gradient_on_one_rank_is_raised_there_before_it_joins_an_exchange(pool):
    with pytest.raises(RankError, match="parameter 'b' has no gradient on this rank") as caught:
        pool.run(2, missing_on_one)
    assert next(iter(caught.value.errors)) == 1


def gradient_placed_otherwise(rank: int, ranks: int) -> str:
    name, parameter = sharded("a", ranks, 4, 4)
    optimizer = DistMuon([(name, parameter)])
    parameter.grad = torch.zeros_like(parameter).redistribute(placements=[Shard(1)])
    return message_of(optimizer.step)


def test_a_gradient_that_is_placed_otherwise_is_refused(pool):
    assert "but its gradient (Shard(dim=1),)" in pool.run(2, gradient_placed_otherwise)[0]
