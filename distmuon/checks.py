"""Checks of what a caller gives: each error names what, what was given and what is accepted."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any


def check_choice(name: str, value: Any, choices: Sequence[Any]) -> None:
    """Refuse what is not one of ``choices``; of a type of its own, so that 0 is not False.

    Raises:
        ValueError: as said; a name among names is for :func:`distmuon.names.choose`, which knows the nearest.
    """
    if not any(type(value) is type(choice) and value == choice for choice in choices):
        shown = ", ".join(map(repr, choices[:-1]))
        raise ValueError(f"{name} is {value!r}: choose {shown} or {choices[-1]!r}")


def check_number(name: str, value: Any, *, positive: bool = False, also: str = "") -> None:
    """Refuse what is not a finite number that is not negative.

    Args:
        name: of what is checked.
        value: given.
        positive: 0 is refused, too.
        also: what else could have been given, for the message.

    Raises:
        TypeError: no number; True and False are none.
        ValueError: out of range.
    """
    wanted = "above 0" if positive else "that is not negative"
    if not isinstance(value, Real) or isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}: give a number {wanted}{also}")
    if not 0 <= float(value) < math.inf or (positive and value == 0):
        raise ValueError(f"{name} is {value!r}: give a finite number {wanted}")


def check_whole(name: str, value: Any, least: int = 0, most: int | None = None) -> None:
    """Refuse what is not a whole number of ``least`` to ``most``, or of at least ``least``.

    Raises:
        TypeError: no whole number; True and False are none.
        ValueError: out of range.
    """
    wanted = f"a whole number of at least {least}" if most is None else f"a whole number, {least} to {most}"
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}: give {wanted}")
    if value < least or (most is not None and value > most):
        raise ValueError(f"{name} is {value!r}: give {wanted}")


def check_patterns(name: str, patterns: Any) -> None:
    """Refuse what is not a sequence of name patterns; one string is none, though it is a sequence of its letters.

    Raises:
        TypeError: as said.
    """
    if isinstance(patterns, str) or not isinstance(patterns, Sequence) or not _all_text(patterns):
        example = f", as [{patterns!r}]" if isinstance(patterns, str) else ""
        raise TypeError(f"{name} is {patterns!r}: give a sequence of name patterns{example}")


def check_row_blocks(row_blocks: Any) -> None:
    """Refuse what is not a dict, name pattern -> rows, or a sequence of rows.

    Raises:
        TypeError: as said.
        ValueError: rows that are not positive, or none.
    """
    if not isinstance(row_blocks, Mapping) or not _all_text(row_blocks):
        raise TypeError(f"row_blocks is {row_blocks!r}: give a dict, name pattern -> rows of each matrix")
    for pattern, rows in row_blocks.items():
        many = isinstance(rows, tuple | list)
        each = rows if many else (rows,)
        whole = all(isinstance(size, int) and not isinstance(size, bool) for size in each)
        if not whole or not each or min(each) < 1:
            refused = ValueError if whole else TypeError
            raise refused(f"row_blocks[{pattern!r}] is {rows!r}: give positive rows, or a tuple of them")


def _all_text(values: Any) -> bool:
    return all(isinstance(value, str) for value in values)
