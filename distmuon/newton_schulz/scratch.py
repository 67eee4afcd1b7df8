"""Scratch: tensors for results on the way, which a batch writes to again and again."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor


class Results:
    """Results by name. The first of a name is made, and later ones are written into it.

    A caller gives two names to results that must not overwrite one another, and one name only to results that are
    alike.
    """

    def __init__(self) -> None:
        self._made: dict[str, Tensor] = {}
        self._transposed: dict[str, Tensor] = {}

    def __call__(self, name: str, operator: Callable[..., Tensor], *args: Any, **options: Any) -> Tensor:
        """``operator(*args, **options)``, of an operator that takes ``out``."""
        made = self._made.get(name)
        if made is None:
            made = self._made[name] = operator(*args, **options)
            return made
        return operator(*args, **options, out=made)

    def transposed(self, name: str) -> Tensor:
        """The transpose of the last result of that name."""
        view = self._transposed.get(name)
        if view is None:
            view = self._transposed[name] = self._made[name].mT
        return view

    def empty(self, name: str, like: Tensor, size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor to write to, on the device of ``like``."""
        made = self._made.get(name)
        if made is None:
            made = self._made[name] = torch.empty(size, dtype=dtype, device=like.device)
        return made


class Scratch:
    """Results for any number of batches.

    Args:
        keep: False lets each batch have results of its own; True keeps them for the next batch of its kind, as a step
            needs that must not make storage.
    """

    def __init__(self, keep: bool = False) -> None:
        self._keep = keep
        self._results: dict[Hashable, Results] = {}

    def results(self, *kind: Hashable) -> Results:
        """For one batch of that kind: results of the same names are alike."""
        return self._results.setdefault(kind, Results()) if self._keep else Results()
