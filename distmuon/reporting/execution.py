"""Run a notebook with checked parameters in a folder of its own, and say honestly how it ended."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import nbformat
import papermill
from papermill.exceptions import PapermillExecutionError

from distmuon.folders import claim, fresh
from distmuon.provenance import provenance
from distmuon.reporting.outcome import Failure, Mark, find_failure, find_mark, record_failure
from distmuon.reporting.parameters import FOLDER_PARAMETER, actual_parameters, declared_parameters, resolve


@dataclass(frozen=True)
class Run:
    """One run of a notebook.

    Attributes:
        notebook: the executed notebook, inside the run's folder.
        failure: why the run is not complete; None if it is.
        mark: the completion mark; None if it is not complete.
    """

    notebook: Path
    failure: Failure | None
    mark: Mark | None


def execute(
    notebook: Path,
    folder: Path,
    parameters: Mapping[str, object] | None = None,
    *,
    command: str = "",
    cell_timeout: int | None = None,
    progress: TextIO | None = None,
) -> Run:
    """Run a notebook with papermill; its working folder is the notebook's own, as in JupyterLab.

    The folder then holds the executed notebook and ``run.json`` (parameters, status, conclusion, provenance). A failing
    notebook does not raise: see ``Run.failure``.

    Args:
        notebook: the notebook; it is not changed.
        folder: the run's folder. It must be new or empty.
        parameters: values, or texts for the declared types to read.
        command: what the user typed, for the provenance.
        cell_timeout: seconds that one cell may take; None for no limit.
        progress: where the cells' output is shown while they run; None for the process's stderr.

    Raises:
        FileNotFoundError: there is no such notebook.
        ValueError: an unknown parameter, or a value that its type cannot read; nothing was written or started.
        FileExistsError: the folder already holds something.
    """
    source = nbformat.read(notebook, as_version=4)
    declared = declared_parameters(source)
    values = resolve(declared, parameters or {})
    if FOLDER_PARAMETER in declared and values.get(FOLDER_PARAMETER) is None:
        values[FOLDER_PARAMETER] = os.path.relpath(folder / "files", notebook.parent)
    claim(folder)
    executed = folder / notebook.name
    shown = progress or sys.stderr
    # The environment's own kernel comes before one of the same name in the user's home; its debugger keeps quiet.
    os.environ |= {"JUPYTER_PREFER_ENV_PATH": "1", "PYDEVD_DISABLE_FILE_VALIDATION": "1"}
    # papermill doubts parameters declared with "| None", asyncio reports the cell of an interrupted run once more.
    for name in ("papermill", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    error: BaseException | None = None
    try:
        papermill.execute_notebook(
            str(notebook),
            str(executed),
            parameters=values,
            kernel_name="python3",
            language="python",
            progress_bar=False,
            stdout_file=shown,
            stderr_file=shown,
            cwd=str(notebook.resolve().parent),
            execution_timeout=cell_timeout,
            extra_arguments=["--log-level=ERROR"],  # of the kernel, which else warns of its loopback connection
        )
    except PapermillExecutionError:
        pass  # a cell raised: the notebook holds the error
    except (Exception, KeyboardInterrupt) as caught:
        error = caught
    result = nbformat.read(executed if executed.exists() else notebook, as_version=4)
    if error is not None:
        what = "the run was interrupted" if isinstance(error, KeyboardInterrupt) else str(error).strip()
        record_failure(result, f"{type(error).__name__}: {what}")
    result.metadata.setdefault("distmuon", {})["provenance"] = provenance() | {"command": command}
    nbformat.write(result, executed)
    run = Run(executed, find_failure(result), find_mark(result))
    _write_summary(run, result)
    if isinstance(error, KeyboardInterrupt):
        raise error
    return run


def default_folder(notebook: Path, parameters: Mapping[str, object]) -> Path:
    """``runs/<UTC>-<notebook>-<hash>``, the hash of what is asked for: the notebook's text and the parameters."""
    request = json.dumps([notebook.read_text(), sorted(parameters.items())], default=str)
    return fresh(f"{notebook.stem}-{hashlib.sha256(request.encode()).hexdigest()[:8]}")


def _write_summary(run: Run, notebook: nbformat.NotebookNode) -> None:
    summary = {
        "notebook": run.notebook.name,
        "status": "failed" if run.failure else "complete",
        "failure": run.failure and {"where": run.failure.where, "error": run.failure.error},
        "conclusion": run.mark and run.mark["conclusion"],
        "parameters": actual_parameters(notebook),
        "seconds": notebook.metadata.get("papermill", {}).get("duration"),
        "provenance": notebook.metadata["distmuon"]["provenance"],
    }
    (run.notebook.parent / "run.json").write_text(json.dumps(summary, indent=2) + "\n")
