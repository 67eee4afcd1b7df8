"""Names: one error message for every unknown one, and long ones made short."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def choose(kind: str, value: str, options: Iterable[str]) -> str:
    """Return ``value`` if it is one of ``options``.

    Args:
        kind: what is being chosen, for the message ("variant", "workload", ...).
        value: the name that was given.
        options: the valid names, at least one.

    Raises:
        ValueError: the name is unknown; the message gives the nearest valid name and all of them.
    """
    valid = list(options)
    if value in valid:
        return value
    abbreviated = [name for name in valid if name == _initials(str(value)) or _initials(name) == value]
    nearest = (abbreviated or difflib.get_close_matches(str(value), valid, n=1, cutoff=0.0))[0]
    raise ValueError(f"unknown {kind} {value!r}; did you mean {nearest!r}? Valid: {', '.join(valid)}")


def shorten(name: str, width: int) -> str:
    """``name`` in at most ``width`` characters, with an ellipsis for its middle if it is longer."""
    if len(name) <= width:
        return name
    head = 2 * (width - 1) // 3
    return f"{name[:head]}…{name[len(name) - (width - 1 - head) :]}"


def _initials(name: str) -> str:
    """``"lr"`` of ``"learning_rate"``."""
    return "".join(word[:1] for word in name.split("_"))
