"""Variants: which way a step packs. ``baseline`` and ``batched`` are the two of the published profile."""

from __future__ import annotations

from dataclasses import dataclass

from distmuon.names import choose

PACKINGS = ("region", "parameter")


@dataclass(frozen=True)
class Variant:
    """The switches of a step, each usable alone.

    Args:
        packing: ``"region"`` copies each region with a ``copy_`` of its own, ``"parameter"`` the regions of a parameter
            with one :func:`~distmuon.packing.batched_copy_` a phase.
    """

    packing: str = "parameter"

    def __post_init__(self) -> None:
        choose("packing", self.packing, PACKINGS)


VARIANTS = {
    "baseline": Variant(packing="region"),
    "batched": Variant(packing="parameter"),
}


def get_variant(variant: str | Variant) -> Variant:
    """The variant of that name; a :class:`Variant` is returned as it is.

    Raises:
        ValueError: no variant has that name; the message gives the nearest.
    """
    if isinstance(variant, Variant):
        return variant
    return VARIANTS[choose("variant", variant, VARIANTS)]
