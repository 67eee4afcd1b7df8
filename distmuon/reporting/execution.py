"""Run a notebook with checked parameters in a folder of its own, and say honestly how it ended."""

from __future__ import annotations

import logging
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import nbformat
import papermill
from papermill.exceptions import PapermillExecutionError

from distmuon.folders import claim
from distmuon.provenance import provenance
from distmuon.reporting.outcome import Failure, Mark, find_failure, find_mark, record_failure
from distmuon.reporting.parameters import FOLDER_PARAMETER
from distmuon.reporting.records import write_results, write_start
from distmuon.reporting.request import Request


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
    request: Request,
    folder: Path,
    *,
    command: str = "",
    cell_timeout: int | None = None,
    progress: TextIO | None = None,
) -> Run:
    """Run a notebook with papermill; its working folder is the notebook's own, as in JupyterLab.

    The folder then holds the executed notebook and

    - ``parameters.json``: the resolved parameters, which ``run_notebook.py -f`` reads;
    - ``run.json``: status, conclusion, key figures, provenance, and the parameters again;
    - ``results.json`` and ``results.parquet``: the values of all tables that the notebook shows;
    - ``log.txt``: what its cells wrote;
    - ``files/``: what the notebook itself wrote, if it has a parameter for that folder.

    A failing notebook does not raise: see ``Run.failure``.

    Args:
        request: the notebook, which is not changed, and its parameters.
        folder: the run's folder. It must be new or empty.
        command: what the user typed, for the provenance.
        cell_timeout: seconds that one cell may take; None for no limit.
        progress: where the cells' output is shown while they run; None for the process's stderr.

    Raises:
        FileExistsError: the folder already holds something.
        KeyboardInterrupt: the run was interrupted; the folder says so.
    """
    notebook, values = request.notebook, dict(request.given)
    if request.takes_folder and values.get(FOLDER_PARAMETER) is None:
        values[FOLDER_PARAMETER] = os.path.relpath(folder / "files", notebook.parent)
    claim(folder)
    executed = folder / notebook.name
    write_start(folder, request)
    # The environment's own kernel comes before one of the same name in the user's home; its debugger keeps quiet.
    os.environ |= {"JUPYTER_PREFER_ENV_PATH": "1", "PYDEVD_DISABLE_FILE_VALIDATION": "1"}
    # papermill doubts parameters declared with "| None", asyncio reports the cell of an interrupted run once more.
    for name in ("papermill", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    error: BaseException | None = None
    with (folder / "log.txt").open("w", encoding="utf-8") as log:
        shown = _Both(progress or sys.stderr, log)
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
                extra_arguments=["--log-level=CRITICAL"],  # of the kernel: what matters is in its messages to us
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
    write_results(executed, result)
    if isinstance(error, KeyboardInterrupt):
        raise error
    return run


class _Both:
    """A stream that writes to two."""

    def __init__(self, *streams: TextIO) -> None:
        self._streams = streams

    def write(self, text: str) -> int:
        for stream in self._streams:
            stream.write(text)
        return len(text)

    def flush(self) -> None:
        for stream in self._streams:
            stream.flush()
