"""What a plan is asked for, and what follows for a single parameter: what travels, and over which mesh axes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from distmuon.checks import check_choice, check_patterns, check_whole
from distmuon.names import choose
from distmuon.newton_schulz.costs import MAX_BATCH_BYTES, NS_ALGORITHMS, batch_bytes
from distmuon.planning.placement import ParameterSpec, Storage
from distmuon.variants import Variant

#: Name patterns of the parameters of each bucket.
Patterns = Sequence[Sequence[str]]

NS_DTYPES = (torch.bfloat16, torch.float32)
MOMENTUM_DTYPES = (None, torch.bfloat16, torch.float32, torch.float64)


class ExchangeKind(NamedTuple):
    """What parameters must share to be exchanged together: mesh, exchange axes and dtype."""

    mesh_shape: tuple[int, ...]
    ranks: tuple[int, ...]
    axes: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class PlanOptions:
    """What a plan is asked for, beside the parameters; names and meaning are those of ``DistMuon``.

    ``sharing`` is what became of ``share_replicas=None``: where parameters lie whose replicas share. None until
    :func:`distmuon.planning.sharing.settled` has looked at them.
    """

    buckets: Patterns | None = None
    variant: Variant = field(default_factory=Variant)
    ns_dtype: torch.dtype = torch.bfloat16
    ns_algorithm: str = "standard"
    max_batch_bytes: int = MAX_BATCH_BYTES
    share_replicas: bool | None = None
    capturable: bool = False
    momentum_dtype: torch.dtype | None = None
    scale_free: bool = False
    sharing: frozenset[Storage] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.buckets is not None:
            if isinstance(self.buckets, str) or not isinstance(self.buckets, Sequence):
                raise TypeError(f"buckets is {self.buckets!r}: give a list of tuples of name patterns")
            for number, bucket in enumerate(self.buckets):
                check_patterns(f"buckets[{number}]", bucket)
        if not isinstance(self.variant, Variant):
            raise TypeError(f"variant is {self.variant!r}: give a Variant")
        for name in ("capturable", "scale_free"):
            check_choice(name, getattr(self, name), (True, False))
        if self.capturable and self.variant.elementwise != "bucket":
            raise ValueError("capturable=True needs a variant with elementwise='bucket', as 'fused' is")
        choose("ns_algorithm", self.ns_algorithm, NS_ALGORITHMS)
        check_choice("ns_dtype", self.ns_dtype, NS_DTYPES)
        check_choice("momentum_dtype", self.momentum_dtype, MOMENTUM_DTYPES)
        check_whole("max_batch_bytes", self.max_batch_bytes, 1)
        check_choice("share_replicas", self.share_replicas, (None, True, False))

    @property
    def by_shape(self) -> bool:
        """Whether all matrices of one shape are batched together."""
        return self.variant.ns_batching == "shape"

    def batch_bytes(self, rows: int, cols: int) -> int:
        """Bytes that one matrix takes in a Newton-Schulz batch: its place in the stack, scratch, fp32 staging."""
        return batch_bytes(rows, cols, self.ns_dtype.itemsize, self.ns_algorithm)

    def wire_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """What travels for parameters of ``dtype``."""
        narrower = self.variant.wire_dtype == "newton_schulz" and self.ns_dtype.itemsize < dtype.itemsize
        return self.ns_dtype if narrower else dtype

    def shares(self, spec: ParameterSpec) -> bool:
        """Whether the replicas of a parameter share its matrices, each orthogonalised once over all of them.

        Raises:
            ValueError: that is left to the plan, and was not settled (:func:`distmuon.planning.sharing.settled`).
        """
        if not spec.replica_axes:
            return False
        if self.share_replicas is not None:
            return self.share_replicas
        if self.sharing is None:
            raise ValueError("share_replicas is None: settle first, for all parameters, which replicas share")
        return spec.storage in self.sharing

    def exchange_axes(self, spec: ParameterSpec) -> tuple[int, ...]:
        """The mesh axes along which its matrices are exchanged: those that cut some of them, and those that share."""
        cut = {axis for axes in spec.cut_axes for axis in axes}
        return tuple(sorted(cut.union(spec.replica_axes if self.shares(spec) else ())))

    def exchange_kind(self, spec: ParameterSpec) -> ExchangeKind | None:
        """With what a parameter can share an exchange; None if it needs none."""
        axes = self.exchange_axes(spec)
        if not axes or spec.storage is None:
            return None
        return ExchangeKind(spec.storage.mesh_shape, spec.storage.ranks, axes, spec.dtype)

    def exchanged(self, spec: ParameterSpec) -> tuple[bool, ...]:
        """Which matrices of a slice take part in the exchange; the others are orthogonalised where they lie."""
        return tuple(self.shares(spec) or bool(axes) for axes in spec.cut_axes)
