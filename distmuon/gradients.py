"""Gradients that are missing or not finite: what a step does about them, and how the ranks agree on it.

By default nothing is agreed: a missing gradient is an error of the rank that misses it, and what is not finite is
carried through. The other policies need one small all-reduce a step, on the CPU, before anything is updated or
exchanged.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from distmuon.agreement import collective_failure, gather
from distmuon.checks import check_choice
from distmuon.names import choose
from distmuon.placement import ParameterSpec

MISSING_GRADIENTS = ("error", "skip")
NON_FINITE = ("carry", "skip", "error")

#: A parameter among those of all ranks: the ranks that share it, () for a plain tensor, and its name.
_Key = tuple[tuple[int, ...], str]


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
        rank: this rank.
        group: of all ranks, on the CPU; None if this rank is alone.
    """

    def __init__(
        self, policy: GradientPolicy, parameters: Sequence[ParameterSpec], rank: int, group: dist.ProcessGroup | None
    ) -> None:
        self._policy = policy
        self._rank = rank
        self._group = group
        self._mine: list[_Key] = [(spec.storage.ranks if spec.storage else (), spec.name) for spec in parameters]
        by_mesh: dict[tuple[int, ...], list[str]] = {}  # on a thousand ranks it matters that each mesh is sent once
        for ranks, name in self._mine:
            by_mesh.setdefault(ranks, []).append(name)
        everyone = gather("says who has which gradients", by_mesh, group)
        self._keys = sorted({(ranks, name) for meshes in everyone for ranks, names in meshes.items() for name in names})
        if not any(ranks for ranks, _ in self._keys):  # no rank shares anything, so each goes its own way
            self._group = None
        self._index = {key: index for index, key in enumerate(self._keys)}

    def take_step(self, gradients: Sequence[Tensor | None], error: Exception | None = None) -> bool:
        """Whether the step is to be taken; the same on all ranks.

        Args:
            gradients: this rank's part of each parameter's gradient, None where there is none. Not looked at if there
                is an ``error``.
            error: what this rank found wrong by itself.

        Raises:
            ValueError: on every rank the same: some but not all of the ranks that share a parameter have a gradient, or
                the policy refuses what is not finite. Names parameters and ranks.
            Exception: ``error`` itself, and on the other ranks a ``ValueError`` that names it.
        """
        missing, bad = ([], []) if error else self._judge(gradients)
        # By parameter on how many ranks it has no gradient, on how many a bad one; at last, how many have an error.
        counts = torch.zeros(2 * len(self._keys) + 1, dtype=torch.int32)
        for offset, keys in ((0, missing), (len(self._keys), bad)):
            for key in keys:
                counts[offset + self._index[key]] = 1
        counts[-1] = error is not None
        if self._group is not None:
            try:
                dist.all_reduce(counts, group=self._group)
            except RuntimeError as failed:
                raise collective_failure("the all_reduce that agrees on gradients", self._group, failed) from failed
        absent, not_finite, errors = counts.split([len(self._keys), len(self._keys), 1])
        uneven = any(0 < count < len(ranks) for count, (ranks, _) in zip(absent.tolist(), self._keys, strict=True))
        any_bad = bool(not_finite.any())
        if errors.item() or uneven or (any_bad and self._policy.non_finite == "error"):
            self._raise(missing, bad, error)
        return not any_bad

    def _judge(self, gradients: Sequence[Tensor | None]) -> tuple[list[_Key], list[_Key]]:
        """The parameters without a gradient here, and those with one that is not finite."""
        missing = [key for key, gradient in zip(self._mine, gradients, strict=True) if gradient is None]
        if self._policy.non_finite == "carry":
            return missing, []
        filled = {key: g for key, g in zip(self._mine, gradients, strict=True) if g is not None and g.numel()}
        if not filled:
            return missing, []
        # The largest element is finite if and only if all are; only these are read to the host, all at once.
        largest = torch.stack([norm.double() for norm in torch._foreach_norm(list(filled.values()), torch.inf)])
        finite = largest.isfinite().tolist()
        return missing, [key for key, is_finite in zip(filled, finite, strict=True) if not is_finite]

    def _raise(self, missing: list[_Key], bad: list[_Key], error: Exception | None) -> None:
        message = error and f"{type(error).__name__}: {error}"
        everything = gather("finds which gradients are at fault", (missing, bad, message), self._group)
        if error:
            raise error
        for rank, (_, _, message) in enumerate(everything):
            if message:
                raise ValueError(f"rank {rank} can't take the step, so no rank does: {message}")
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
            for _, name in theirs:
                found.setdefault(name, []).append(rank if self._group else self._rank)
        shown = ", ".join(f"{name!r} on {_ranks(ranks)}" for name, ranks in found.items())
        raise ValueError(f"gradients are not finite: {shown}. Nothing was updated")


def _ranks(ranks: Iterable[int]) -> str:
    """As messages name them."""
    listed = list(ranks)
    return f"rank{'s' * (len(listed) > 1)} {', '.join(map(str, listed))}"
