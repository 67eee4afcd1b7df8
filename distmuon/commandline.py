"""The command line of every script: unknown options and values are refused with the nearest valid one, a mistake in
what is asked for is one line, and tables are plain text.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn, TypeVar

from distmuon.names import choose, shorten

T = TypeVar("T")


class Parser(argparse.ArgumentParser):
    """An argument parser whose help is the script's docstring, and which takes no abbreviations."""

    def __init__(self, description: str | None) -> None:
        super().__init__(
            description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
        )

    def parse_args(  # type: ignore[override]  # argparse's own is overloaded by the namespace's class
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        """Parse, or exit with code 2 and say which option is nearest to an unknown one, or which is given twice."""
        args = sys.argv[1:] if args is None else args
        parsed, unknown = self.parse_known_args(args, namespace)
        for option, times in Counter(text.partition("=")[0] for text in args).items():
            action = self._option_string_actions.get(option)
            if times > 1 and isinstance(action, argparse._StoreAction):
                self.error(f"{option} is given {times} times: give it once")
        for option in (text.partition("=")[0] for text in unknown if text.startswith("-")):
            try:
                choose("option", option, self._option_string_actions)
            except ValueError as error:
                self.error(str(error))
        if unknown:
            self.error(f"arguments too many: {' '.join(unknown)}")
        return parsed


def checked(read: Callable[[str], T]) -> Callable[[str], T]:
    """An argparse ``type`` that shows the message of the ``ValueError`` with which ``read`` refuses a text."""

    def convert(text: str) -> T:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert


def one_of(kind: str, options: Iterable[str]) -> Callable[[str], str]:
    """An argparse ``type`` that takes one of ``options`` and names the nearest for any other text."""
    valid = list(options)
    return checked(lambda text: choose(kind, text, valid))


def refuse(error: Exception) -> int:
    """Say on standard error what is wrong with what was asked for; the exit code of that, 2."""
    if isinstance(error, OSError) and error.filename is not None:
        said = f"{error.filename}: {error.strerror}"
    else:
        said = str(error)
    print(f"error: {said}", file=sys.stderr)
    return 2


def run(main: Callable[[], int | None]) -> NoReturn:
    """Run a script and exit with its code; quietly where the reader of its output has gone, as ``head`` does."""
    try:
        code = main()
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what Python flushes when it ends
        code = 1
    raise SystemExit(code)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Rows as aligned text: numbers to the right, "n/a" for what cannot be told; "none" where there are none."""
    if not rows:
        return "none"
    cells = [list(rows[0]), *([_written(value) for value in row.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    numeric = [not isinstance(value, str) for value in rows[0].values()]
    return "\n".join(
        "  ".join(
            text.rjust(width) if right else text.ljust(width)
            for text, width, right in zip(line, widths, numeric, strict=True)
        ).rstrip()
        for line in cells
    )


def _written(value: Any) -> str:
    """A value of a table as text."""
    if value is None:
        return "n/a"
    if isinstance(value, dict):
        return ", ".join(f"{count} {name}" for name, count in value.items()) or "0"
    return f"{value:.4f}" if isinstance(value, float) else shorten(str(value), 80)
