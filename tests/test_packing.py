"""The batched copy: each row of its published semantics is a test here."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from distmuon import batched_copy_
from distmuon.packing import group_copies
from distmuon.planning.places import Place, rectangle
from distmuon.planning.schedule import Copy


class Dispatched(TorchDispatchMode):
    """The operators that are dispatched, views aside."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func.is_view:
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def dispatched(destinations: list[Tensor], sources: list[Tensor]) -> list[str]:
    with Dispatched() as watch:
        batched_copy_(destinations, sources)
    return watch.names


def test_lists_of_different_length_are_refused_before_anything_is_copied():
    destination = torch.zeros(2)
    with pytest.raises(ValueError, match="must be of equal length, got 1 and 2"):
        batched_copy_([destination], [torch.ones(2), torch.ones(2)])
    assert torch.equal(destination, torch.zeros(2))


def test_empty_lists_call_no_operator():
    assert dispatched([], []) == []


def test_one_pair_is_a_plain_copy():
    destination = torch.zeros(2, 3)
    assert dispatched([destination], [torch.ones(2, 3)]) == ["aten.copy_.default"]
    assert torch.equal(destination, torch.ones(2, 3))


@pytest.mark.parametrize("pairs", [2, 3, 70])
def test_more_pairs_are_exactly_one_foreach_copy(pairs):
    destinations = [torch.zeros(4) for _ in range(pairs)]
    sources = [torch.full((4,), float(index)) for index in range(pairs)]
    assert dispatched(destinations, sources) == ["aten._foreach_copy_.default"]
    assert all(map(torch.equal, destinations, sources))


def test_sizes_may_differ_and_views_are_written_through():
    grid, line = torch.zeros(4, 6), torch.zeros(10)
    sources = [torch.randn(4, 2), torch.randn(3, 4).T, torch.randn(5)]
    destinations = [grid[:, 1:3], grid[:, 3:], line[::2]]
    assert dispatched(destinations, [sources[0], sources[1][:, :3], sources[2]]) == ["aten._foreach_copy_.default"]
    assert torch.equal(grid[:, 1:3], sources[0])
    assert torch.equal(grid[:, 3:], sources[1][:, :3])
    assert torch.equal(line[::2], sources[2])
    assert not line[1::2].any()
    assert not grid[:, 0].any()


@pytest.mark.parametrize("pairs", [1, 2])
def test_another_dtype_is_cast_to_the_destinations(pairs):
    destinations = [torch.zeros(3, dtype=torch.bfloat16) for _ in range(pairs)]
    sources = [torch.tensor([1.0, 1.001, 3.3]) for _ in range(pairs)]
    assert len(dispatched(destinations, sources)) == 1
    assert all(torch.equal(to, source.bfloat16()) for to, source in zip(destinations, sources, strict=True))


@pytest.mark.parametrize("pairs", [1, 3])
def test_a_pair_of_different_shapes_is_named_before_anything_is_copied(pairs):
    """The operator itself would broadcast (1,) over (4,), or stop half way."""
    destinations = [torch.zeros(4) for _ in range(pairs)]
    sources = [torch.ones(4) for _ in range(pairs - 1)] + [torch.ones(1)]
    with pytest.raises(ValueError, match=rf"pair {pairs - 1} differs in shape: destination \(4,\), source \(1,\)"):
        batched_copy_(destinations, sources)
    assert not any(destination.any() for destination in destinations)


def copies(*places: tuple[int, Place, Place]) -> list[Copy]:
    return [Copy(*place) for place in places]


TWO_PARAMETERS = copies(
    (0, rectangle(2, 4, 4, 0), rectangle(2, 4, 4, 0)),
    (1, rectangle(3, 4, 4, 0), rectangle(3, 4, 4, 8)),
    (0, rectangle(1, 4, 4, 12), rectangle(1, 4, 4, 20)),
)


def test_region_packing_copies_each_region_by_itself():
    assert group_copies("region", TWO_PARAMETERS) == [[copy] for copy in TWO_PARAMETERS]


def test_parameter_packing_makes_one_call_a_parameter():
    first, second, third = TWO_PARAMETERS
    assert group_copies("parameter", TWO_PARAMETERS) == [[first, third], [second]]


def test_bucket_packing_makes_one_call_of_all_and_joins_what_is_contiguous():
    follow = copies(
        (0, rectangle(2, 4, 4, 0), rectangle(2, 4, 4, 40)), (0, rectangle(1, 4, 4, 8), rectangle(1, 4, 4, 48))
    )
    (group,) = group_copies("bucket", [*TWO_PARAMETERS, *follow])
    assert [copy.place.size for copy in group] == [(8,), (12,), (4,), (12,)]


def test_column_blocks_of_several_matrices_are_one_strided_copy():
    """Column blocks of 5 matrices from 3 holders: 15 regions that no fused copy takes, and one copy that does it."""
    rows, cols, matrices, holders = 6, 12, 5, 3
    width = cols // holders
    regions = [
        (0, rectangle(rows, width, cols, matrix * rows * cols + holder * width), rectangle(rows, width, width, offset))
        for holder in range(holders)
        for matrix, offset in enumerate(range(holder * matrices * rows * width, 10**6, rows * width))
        if matrix < matrices
    ]
    ((copy,),) = group_copies("bucket", copies(*regions))
    work, packed = torch.zeros(matrices * rows * cols), torch.arange(float(matrices * rows * cols))
    copy.place.of(work).copy_(copy.packed.of(packed))
    expected = torch.zeros(matrices * rows * cols)
    for _, place, source in regions:
        place.of(expected).copy_(source.of(packed))
    assert torch.equal(work, expected)
    assert sorted(work.tolist()) == packed.tolist()
