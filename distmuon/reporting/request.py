"""What is asked for: a notebook, and a value for each of its parameters. Checked before a kernel starts.

Names and types are those of the cell tagged ``parameters``. What else a notebook can refuse by itself, a workload that
does not exist or ranks that do not fit, it checks in a cell tagged ``check``, which makes of the parameters whatever
checks them. That cell is run here first, so that a wrong value costs no kernel and no ranks, and then in the notebook
like any other.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat

from distmuon.folders import RUNS, fresh
from distmuon.reporting.parameters import (
    FOLDER_PARAMETER,
    declared_parameters,
    default_parameters,
    resolve,
    tagged_source,
)


@dataclass(frozen=True)
class Request:
    """A notebook with checked parameters.

    Attributes:
        notebook: its path.
        given: the values that were given, as their declared types.
        parameters: the values of all parameters but the folder for files.
        key: 8 hexadecimal digits that stand for the notebook's cells and ``parameters``.
    """

    notebook: Path
    given: Mapping[str, Any]
    parameters: Mapping[str, Any]
    key: str

    @classmethod
    def of(cls, notebook: Path, given: Mapping[str, object] | None = None) -> Request:
        """Check what is given, values or texts for the declared types to read.

        Raises:
            FileNotFoundError: there is no such notebook.
            ValueError: an unknown parameter, a value that its type cannot read, or one that the notebook refuses.
        """
        content = nbformat.read(notebook, as_version=4)
        declared = declared_parameters(content)
        values = resolve(declared, given or {})
        parameters = default_parameters(content) | values
        _check(notebook, tagged_source(content, "check"), parameters)
        parameters.pop(FOLDER_PARAMETER, None)
        text = [[cell.cell_type, cell.source] for cell in content.cells]
        digest = hashlib.sha256(json.dumps([text, sorted(parameters.items())]).encode()).hexdigest()
        return cls(notebook, values, parameters, digest[:8])

    @property
    def name(self) -> str:
        """``<notebook>-<key>``."""
        return f"{self.notebook.stem}-{self.key}"

    @property
    def takes_folder(self) -> bool:
        """Whether the notebook has a parameter for the folder of its files."""
        return FOLDER_PARAMETER in declared_parameters(nbformat.read(self.notebook, as_version=4))

    def fresh_folder(self, under: Path = RUNS) -> Path:
        """``runs/<UTC>-<notebook>-<key>``, not made yet."""
        return fresh(self.name, under)


def _check(notebook: Path, source: str, parameters: Mapping[str, object]) -> None:
    """Run the cell that checks, where the notebook's kernel would run it."""
    with contextlib.chdir(notebook.resolve().parent):
        try:
            exec(compile(source, f"{notebook.name}, cell tagged check", "exec"), {"__name__": "check", **parameters})
        except Exception as error:
            kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
            raise ValueError(f"{notebook.name} refuses its parameters: {kind}{error}") from error
