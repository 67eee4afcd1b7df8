"""A script called in this process: what it does with its words, without three seconds for importing torch each time."""

from __future__ import annotations

import importlib.util
import io
import signal
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]


class Ended(NamedTuple):
    """How a script ended."""

    code: int
    output: str
    errors: str


def call(script: str, *words: object) -> Ended:
    """Call ``scripts/{script}.py`` with these words."""
    path = ROOT / "scripts" / f"{script}.py"
    spec = importlib.util.spec_from_file_location(script, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    output, errors = io.StringIO(), io.StringIO()
    argv, on_sigterm = sys.argv, signal.getsignal(signal.SIGTERM)
    sys.argv = [str(path), *map(str, words)]
    try:
        with redirect_stdout(output), redirect_stderr(errors):
            code = module.main()
    except SystemExit as ended:
        code = ended.code
    finally:
        sys.argv = argv
        signal.signal(signal.SIGTERM, on_sigterm)
    return Ended(code or 0, output.getvalue(), errors.getvalue())
