"""Scratch: tensors for results on the way, kept from one step to the next where a step must not make storage."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor


class Scratch:
    """Calls operators. The first result of a name and kind is kept, and later ones of the same are written into it.

    A caller gives two names to results that must not overwrite one another.

    Args:
        keep: False lets every result have storage of its own, and nothing is kept.
    """

    def __init__(self, keep: bool = False) -> None:
        self._keep = keep
        self._kept: dict[Hashable, Tensor] = {}

    def __call__(self, name: str, like: Tensor, operator: Callable[..., Tensor], *args: Any, **options: Any) -> Tensor:
        """``operator(*args, **options)``.

        Args:
            name: of the result, among those for tensors like ``like``.
            like: its shape and dtype tell kinds of results apart.
            operator: takes ``out``.
            args: of the operator.
            options: of the operator, ``out`` not among them.
        """
        key = (name, like.shape, like.dtype)
        if key in self._kept:
            return operator(*args, **options, out=self._kept[key])
        result = operator(*args, **options)
        if self._keep:
            self._kept[key] = result
        return result

    def empty(self, name: str, like: Tensor, size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor to write to."""
        key = (name, like.shape, like.dtype)
        if key in self._kept:
            return self._kept[key]
        result = torch.empty(size, dtype=dtype, device=like.device)
        if self._keep:
            self._kept[key] = result
        return result


#: Keeps nothing.
FRESH = Scratch()
