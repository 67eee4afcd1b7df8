"""Packing: copying the regions of tensors to and from the buffers around an all-to-all.

A step copies at four places: into the send buffer (pack), out of the receive buffer into whole matrices on their owner
(unpack), and the same two on the way back (repack, return unpack). The published change made each of these one
``torch._foreach_copy_`` a parameter, :func:`batched_copy_`, instead of one ``copy_`` a region. All that tells the ways
of packing apart is which copies share a call: :func:`group_copies`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from distmuon.planning.places import Pair, join
from distmuon.planning.schedule import Copy


def batched_copy_(destinations: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source into its destination.

    That is ``copy_`` for one pair, one ``torch._foreach_copy_`` for more, and nothing for none. Pairs may differ in
    size and need not be contiguous; a source of another dtype is cast. Destinations must not overlap.

    On a GPU ``_foreach_copy_`` is one kernel only if the tensors of each pair are dense and have equal strides, and all
    destinations, and all sources, are of one dtype; otherwise it is one copy a pair.

    Args:
        destinations: tensors to write to, through their strides.
        sources: as many tensors, each of its destination's shape.

    Raises:
        ValueError: the lists are not of equal length, or a pair differs in shape. Nothing has been copied then; the
            operator itself would broadcast, or stop half way.
    """
    if len(destinations) != len(sources):
        raise ValueError(
            f"destinations and sources must be of equal length, got {len(destinations)} and {len(sources)}"
        )
    for index, (destination, source) in enumerate(zip(destinations, sources, strict=True)):
        if destination.shape != source.shape:
            raise ValueError(
                f"pair {index} differs in shape: destination {tuple(destination.shape)}, source {tuple(source.shape)}"
            )
    if len(destinations) == 1:
        destinations[0].copy_(sources[0])
    elif destinations:
        torch._foreach_copy_(list(destinations), list(sources))


def copy_group_(packing: str, destinations: list[Tensor], sources: list[Tensor]) -> None:
    """Copy what :func:`group_copies` put together.

    That is :func:`batched_copy_` without its checks, as pairs fit by the plan; and where a ``"bucket"`` shares a call
    even one pair is a ``torch._foreach_copy_``: a kernel beside the others, and no memcpy, whatever the plan.
    """
    if len(destinations) > 1 or packing == "bucket":
        torch._foreach_copy_(destinations, sources)
    else:
        destinations[0].copy_(sources[0])


def group_copies(packing: str, copies: Sequence[Copy]) -> list[list[Copy]]:
    """Which copies of one phase of a bucket share a :func:`batched_copy_`.

    Args:
        packing: ``"region"``, each has its own; ``"parameter"``, those of one parameter share one; ``"bucket"``, all
            share one, except strided ones, which no fused copy takes: each has its own, of as many regions as one
            strided copy can hold.
        copies: of one phase, between two buffers or between updates and a buffer.
    """
    if packing == "region":
        return [[copy] for copy in copies]
    if packing == "parameter":
        groups: dict[int, list[Copy]] = {}
        for copy in copies:
            groups.setdefault(copy.parameter, []).append(copy)
        return list(groups.values())
    pairs = join([Pair(copy.parameter, copy.place, None, copy.packed) for copy in copies])
    joined = [Copy(pair.left_key, pair.left, pair.right) for pair in pairs]  # type: ignore[arg-type]
    dense = [copy for copy, pair in zip(joined, pairs, strict=True) if pair.dense]
    strided = [[copy] for copy, pair in zip(joined, pairs, strict=True) if not pair.dense]
    return [dense, *strided] if dense else strided
