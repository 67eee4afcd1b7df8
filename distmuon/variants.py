"""Variants: which way a step packs, batches and sends. ``baseline`` and ``batched`` are the two of the published
profile.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from distmuon.names import choose

#: For each switch of a step its settings, the published baseline's first.
SWITCHES = {
    "packing": ("region", "parameter", "bucket"),
    "elementwise": ("parameter", "bucket"),
    "ns_batching": ("parameter", "shape"),
    "wire_dtype": ("parameter", "newton_schulz"),
}


@dataclass(frozen=True)
class Variant:
    """The switches of a step. Each can be turned alone; none changes a bit of the result.

    Args:
        packing: ``"region"`` copies each region with a ``copy_`` of its own, ``"parameter"`` the regions of a parameter
            with one :func:`~distmuon.packing.batched_copy_` a phase, ``"bucket"`` all regions of a bucket with one. In
            the last way what a rank would send to itself goes straight to its place.
        elementwise: momentum, decay and update one ``"parameter"`` at a time, or with ``torch._foreach_*`` a
            ``"bucket"`` at a time.
        ns_batching: Newton-Schulz on the matrices of one ``"parameter"`` at a time, or on all matrices of one
            ``"shape"`` that are ready together.
        wire_dtype: what travels has the ``"parameter"``'s dtype, or that of ``"newton_schulz"`` where it is the
            narrower one, which loses nothing: the cast is made before the exchange instead of after it.
    """

    packing: str = "bucket"
    elementwise: str = "bucket"
    ns_batching: str = "shape"
    wire_dtype: str = "newton_schulz"

    def __post_init__(self) -> None:
        for switch in fields(self):
            choose(switch.name, getattr(self, switch.name), SWITCHES[switch.name])

    @property
    def name(self) -> str:
        """The name of the variant with these switches, or "custom"."""
        return next((name for name, variant in VARIANTS.items() if variant == self), "custom")


VARIANTS = {
    "baseline": Variant("region", "parameter", "parameter", "parameter"),
    "batched": Variant("parameter", "parameter", "parameter", "parameter"),
    "fused": Variant(),
}


def get_variant(variant: str | Variant) -> Variant:
    """The variant of that name; a :class:`Variant` is returned as it is.

    Raises:
        ValueError: no variant has that name; the message gives the nearest.
    """
    if isinstance(variant, Variant):
        return variant
    return VARIANTS[choose("variant", variant, VARIANTS)]
