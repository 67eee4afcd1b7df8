"""Gradients that are missing or not finite: what a step does about them, and how the ranks agree on it.

By default nothing is agreed: a missing gradient is an error of the rank that misses it, and what is not finite is
carried through. The other policies need one small all-reduce a step, on the CPU, before anything is updated or
exchanged.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from distmuon.agreement import collective_failure, gather, raise_first, told
from distmuon.checks import check_choice
from distmuon.names import choose
from distmuon.planning.placement import ParameterSpec

MISSING_GRADIENTS = ("error", "skip")
NON_FINITE = ("carry", "skip", "error")

#: A parameter among those of all ranks: the ranks that share it, () for a plain tensor, and its name.
_Key = tuple[tuple[int, ...], str]
_T = TypeVar("_T")


@dataclass(frozen=True)
class GradientPolicy:
    """What a step does about gradients that are missing or not finite; names and meaning are those of ``DistMuon``."""

    missing_gradients: str = "error"
    non_finite: str = "carry"
    capturable: bool = False

    def __post_init__(self) -> None:
        choose("missing_gradients", self.missing_gradients, MISSING_GRADIENTS)
        choose("non_finite", self.non_finite, NON_FINITE)
        check_choice("capturable", self.capturable, (True, False))
        if self.capturable and self.needs_agreement:
            raise ValueError(
                "capturable=True reads nothing on the host, so no rank can tell the others about its gradients: leave "
                "missing_gradients='error' and non_finite='carry'"
            )

    @property
    def needs_agreement(self) -> bool:
        """Whether the ranks agree in every step."""
        return (self.missing_gradients, self.non_finite) != ("error", "carry")


def checked_gradient(name: str, parameter: Tensor, dtype: torch.dtype | None, policy: GradientPolicy) -> Tensor | None:
    """The gradient of a parameter; None if it has none and the policy is to skip it.

    Args:
        name: of the parameter.
        parameter: with its gradient.
        dtype: that the gradient must have; None if it will be cast.
        policy: for a missing one.

    Raises:
        ValueError: the gradient is missing, sparse, or placed or typed unlike it must be.
    """
    gradient = parameter.grad
    if gradient is None:
        if policy.missing_gradients == "skip":
            return None
        raise ValueError(
            f"parameter {name!r} has no gradient on this rank: each step needs one on every rank. Give it a zero "
            "gradient, or let missing_gradients='skip' leave it alone where no rank has one"
        )
    if isinstance(parameter, DTensor) and (
        not isinstance(gradient, DTensor) or gradient.placements != parameter.placements
    ):
        placed = gradient.placements if isinstance(gradient, DTensor) else "a plain tensor"
        raise ValueError(f"parameter {name!r} is placed {parameter.placements}, but its gradient {placed}")
    if gradient.is_sparse:
        raise ValueError(f"parameter {name!r} has a sparse gradient: Muon needs a dense one")
    if dtype not in (None, gradient.dtype):
        raise ValueError(
            f"parameter {name!r} has a gradient of {gradient.dtype}, but momentum of {dtype}: give momentum_dtype, "
            f"{gradient.dtype} to be as torch.optim.Muon"
        )
    return gradient


class GradientAgreement:
    """Agrees, step by step, on what becomes of the gradients. Collective over the group, from construction.

    Args:
        policy: one that needs agreement, the same on all ranks.
        parameters: of this rank.
        group: of all ranks, on the CPU; None if this rank is alone.
        watched_are_shared: whether this rank shares parameters with others that are only watched.
    """

    def __init__(
        self,
        policy: GradientPolicy,
        parameters: Sequence[ParameterSpec],
        group: dist.ProcessGroup | None,
        watched_are_shared: bool = False,
    ) -> None:
        self._policy = policy
        self._rank = dist.get_rank(group) if group else 0
        self._group = group
        self._mine: list[_Key] = [(spec.storage.ranks if spec.storage else (), spec.name) for spec in parameters]
        by_mesh: dict[tuple[int, ...], list[str]] = {}  # on a thousand ranks it matters that each mesh is sent once
        for ranks, name in self._mine:
            by_mesh.setdefault(ranks, []).append(name)
        everyone = gather("says who has which gradients", (by_mesh, watched_are_shared), group)
        self._keys = sorted({(ranks, name) for meshes, _ in everyone for ranks, its in meshes.items() for name in its})
        # Where no rank shares anything each goes its own way.
        if not any(ranks for ranks, _ in self._keys) and not any(shared for _, shared in everyone):
            self._group = None
        self._index = {key: index for index, key in enumerate(self._keys)}

    def take_step(
        self, gradients: Sequence[Tensor | None], watched: Mapping[str, Tensor], error: Exception | None = None
    ) -> bool:
        """Whether the step is to be taken; the same on all ranks.

        Args:
            gradients: this rank's part of each parameter's gradient, None where there is none. Not looked at if there
                is an ``error``.
            watched: by name, of other parameters, which may be missing, but as finite as these; likewise.
            error: what this rank found wrong by itself.

        Raises:
            ValueError: on every rank the same: some but not all of the ranks that share a parameter have a gradient, or
                the policy refuses what is not finite. Names parameters and ranks.
            Exception: ``error`` itself, and on the other ranks a ``ValueError`` that names it.
        """
        missing, bad, bad_watched = ([], [], []) if error else self._judge(gradients, watched)
        # By parameter on how many ranks it has no gradient, on how many a bad one; then on how many a watched one is
        # bad; at last, how many have an error.
        counts = torch.zeros(2 * len(self._keys) + 2, dtype=torch.int32)
        for offset, keys in ((0, missing), (len(self._keys), bad)):
            for key in keys:
                counts[offset + self._index[key]] = 1
        counts[-2], counts[-1] = bool(bad_watched), error is not None
        if self._group is not None:
            try:
                dist.all_reduce(counts, group=self._group)
            except RuntimeError as failed:
                raise collective_failure("the all_reduce that agrees on gradients", self._group, failed) from failed
        absent, not_finite, errors = counts.split([len(self._keys), len(self._keys) + 1, 1])
        uneven = any(0 < count < len(ranks) for count, (ranks, _) in zip(absent.tolist(), self._keys, strict=True))
        any_bad = bool(not_finite.any())
        if errors.item() or uneven or (any_bad and self._policy.non_finite == "error"):
            self._raise(missing, [name for _, name in bad] + bad_watched, error)
        return not any_bad

    def _judge(
        self, gradients: Sequence[Tensor | None], watched: Mapping[str, Tensor]
    ) -> tuple[list[_Key], list[_Key], list[str]]:
        """The parameters without a gradient here, those with one that is not finite, and such ones of the watched."""
        missing = [key for key, gradient in zip(self._mine, gradients, strict=True) if gradient is None]
        if self._policy.non_finite == "carry":
            return missing, [], []
        present = {key: g for key, g in zip(self._mine, gradients, strict=True) if g is not None}
        return missing, _not_finite(present), _not_finite(watched)

    def _raise(self, missing: list[_Key], bad: list[str], error: Exception | None) -> None:
        everything = gather("finds which gradients are at fault", (missing, bad, told(error)), self._group)
        raise_first(error, [message for *_, message in everything], "can't take the step, so no rank does")
        for ranks, name in self._keys:
            without = [rank for rank in ranks if (ranks, name) in everything[rank][0]]
            if 0 < len(without) < len(ranks):
                having = [rank for rank in ranks if rank not in without]
                raise ValueError(
                    f"parameter {name!r} has a gradient on {_ranks(having)}, but none on {_ranks(without)}: it needs "
                    "one on all ranks that share it, or on none. Nothing was updated. Give it a zero gradient there"
                )
        found: dict[str, list[int]] = {}
        for rank, (_, theirs, _) in enumerate(everything):
            for name in theirs:
                found.setdefault(name, []).append(rank if self._group else self._rank)
        shown = ", ".join(f"{name!r} on {_ranks(ranks)}" for name, ranks in found.items())
        raise ValueError(f"gradients are not finite: {shown}. Nothing was updated")


def _not_finite(gradients: Mapping[_T, Tensor]) -> list[_T]:
    """Keys of the gradients in which an element is infinite or NaN."""
    by_device: dict[torch.device, dict[_T, Tensor]] = {}
    for key, gradient in gradients.items():
        elements = gradient.coalesce().values() if gradient.is_sparse else gradient
        if elements.numel():
            by_device.setdefault(elements.device, {})[key] = elements
    found: list[_T] = []
    for its in by_device.values():
        # The largest element is finite if and only if all are; only these are read to the host, all at once.
        largest = torch.stack([norm.double() for norm in torch._foreach_norm(list(its.values()), torch.inf)])
        found += [key for key, finite in zip(its, largest.isfinite().tolist(), strict=True) if not finite]
    return found


def _ranks(ranks: Iterable[int]) -> str:
    """As messages name them."""
    listed = list(ranks)
    return f"rank{'s' * (len(listed) > 1)} {', '.join(map(str, listed))}"
