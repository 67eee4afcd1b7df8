"""Packing: copying the regions of tensors to and from the buffers around an all-to-all.

A step copies at four places: into the send buffer (pack), out of the receive buffer into whole matrices on their owner
(unpack), and the same two on the way back (repack, return unpack). The published change made each of these one
``torch._foreach_copy_`` a parameter, :func:`batched_copy_`, instead of one ``copy_`` a region.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

#: For each parameter that takes part in a phase: destinations and sources, region by region.
Copies = Iterable[tuple[Sequence[Tensor], Sequence[Tensor]]]


def batched_copy_(destinations: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source into its destination: ``copy_`` for one pair, one ``torch._foreach_copy_`` for more, nothing for
    none.

    Pairs may differ in size and need not be contiguous; a source of another dtype is cast. Destinations must not
    overlap.

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


def copy_regions_(packing: str, copies: Copies) -> None:
    """Copy the regions of one phase of a bucket, the way ``packing`` says.

    Args:
        packing: ``"region"``, one ``copy_`` a region, or ``"parameter"``, one :func:`batched_copy_` a parameter.
        copies: destinations and sources of each parameter.
    """
    for destinations, sources in copies:
        if packing == "region":
            for destination, source in zip(destinations, sources, strict=True):
                destination.copy_(source)
        else:
            batched_copy_(destinations, sources)
