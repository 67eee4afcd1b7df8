"""Many runs of notebooks over a grid of parameters, each in a folder of its own.

A grid is a YAML file, one block or a list of them::

    notebook: ../01_published_profile.ipynb  # relative to the file
    parameters:  # of every run
      workload: tiny
    grid:  # every combination of these
      tokens: [16, 32]
      variants: [[baseline, batched], [baseline, fused]]

A run that is complete is not repeated: it is known by its key, which stands for the notebook's cells and all parameters
(:class:`~distmuon.reporting.request.Request`). While a run lasts its key is locked, so that batches that run at once
share the work instead of doing it twice. The lock is the operating system's and goes with the process that has it.
"""

from __future__ import annotations

import fcntl
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from distmuon.folders import RUNS
from distmuon.names import choose
from distmuon.reporting.execution import execute
from distmuon.reporting.index import write_index
from distmuon.reporting.parameters import read_yaml
from distmuon.reporting.records import COMPLETE, RUNNING, Record, mark_failed
from distmuon.reporting.rendering import render
from distmuon.reporting.request import Request

_BLOCK = ("notebook", "parameters", "grid")


@dataclass(frozen=True)
class Result:
    """One run of a batch.

    Attributes:
        request: what was asked for.
        record: how it ended.
        made: False for a run that was there already, or that another batch has made meanwhile.
    """

    request: Request
    record: Record
    made: bool


def read_grid(path: Path) -> list[Request]:
    """The runs of a grid, in order, all checked.

    Raises:
        OSError: there is no such file or notebook.
        ValueError: an unknown name, a value that is refused, or the same run twice.
    """
    content = read_yaml(path)
    requests: list[Request] = []
    for block in content if isinstance(content, list) else [content]:
        requests += _read_block(path, block)
    keys = [request.key for request in requests]
    for number, key in enumerate(keys):
        if key in keys[:number]:
            first = keys.index(key)
            shown = ", ".join(f"{name}={value}" for name, value in requests[number].given.items())
            raise ValueError(f"{path}: runs {first + 1} and {number + 1} are the same ({shown}): leave one out")
    return requests


def run_batch(
    requests: Sequence[Request],
    *,
    under: Path = RUNS,
    command: str = "",
    cell_timeout: int | None = None,
    again: bool = False,
    report: Callable[[Result], None] = lambda result: None,
) -> list[Result]:
    """Run what has not run to its end before; a failed run does not keep the others from running.

    Args:
        requests: the runs.
        under: the folder that holds the folders of runs; its ``index.html`` is written after each.
        command: what the user typed, for the provenance.
        cell_timeout: seconds that one cell may take; None for no limit.
        again: repeat complete runs, too.
        report: called with each result as it comes.

    Returns:
        The results in the order of ``requests``.

    Raises:
        KeyboardInterrupt: interrupted; the run under way has ended, and says so.
    """
    started = time.time()
    results: dict[str, Result] = {}

    def settle(request: Request, wait: bool) -> bool:
        """Have the run made, unless another batch is at it and we are not to wait for it."""
        with _locked(under, request, wait) as ours:
            if not ours:
                return False
            # What another batch finished while this one waited counts, even if it failed.
            done = find_run(request, under, since=started if wait else None)
            made = done is None or (again and not wait)
            record = done if done and not made else _run(request, under, command, cell_timeout)
        results[request.key] = Result(request, record, made)
        write_index(under)
        report(results[request.key])
        return True

    postponed = [request for request in requests if not settle(request, wait=False)]
    for request in postponed:
        settle(request, wait=True)
    return [results[request.key] for request in requests]


def find_run(request: Request, under: Path = RUNS, *, since: float | None = None) -> Record | None:
    """The latest complete run of a request; or of those that were begun after ``since`` the latest that has ended."""
    for path in sorted(under.glob(f"*-{request.name}/run.json"), reverse=True):
        record = Record.read(path.parent)
        if dict(record.parameters) != dict(request.parameters):
            continue
        ended = since is not None and record.status != RUNNING and path.stat().st_mtime >= since
        if (record.status == COMPLETE and record.page.exists()) or ended:
            return record
    return None


def _run(request: Request, under: Path, command: str, cell_timeout: int | None) -> Record:
    folder = request.fresh_folder(under)
    while folder.exists():  # a failed run of the same second
        time.sleep(0.1)
        folder = request.fresh_folder(under)
    try:
        execute(request, folder, command=command, cell_timeout=cell_timeout)
    finally:  # an interrupted run has a page as well
        if (executed := folder / request.notebook.name).exists():
            try:
                render(executed)
            except ValueError as error:
                mark_failed(folder, "the page", str(error))
            write_index(under)
    return Record.read(folder)


@contextmanager
def _locked(under: Path, request: Request, wait: bool) -> Iterator[bool]:
    """Hold the lock of a request; False if another process has it and we are not to wait."""
    path = under / ".locks" / request.name
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
        else:
            yield True


def _read_block(path: Path, block: object) -> Iterator[Request]:
    if not isinstance(block, dict) or not isinstance(block.get("notebook"), str):
        raise ValueError(f"{path}: a block maps {', '.join(_BLOCK)} to values, and notebook is the path of one")
    for name in block:
        choose(f"entry of {path}", name, _BLOCK)
    fixed, grid = block.get("parameters") or {}, block.get("grid") or {}
    for name, values in (("parameters", fixed), ("grid", grid)):
        if not isinstance(values, dict):
            raise ValueError(f"{path}: {name} must map the names of parameters to values")
    for name, values in grid.items():
        if not isinstance(values, list) or not values:
            raise ValueError(f"{path}: grid entry {name!r} needs a list of values to try, not {values!r}")
        if name in fixed:
            raise ValueError(f"{path}: {name!r} is under parameters and under grid: leave one out")
    notebook = path.parent / block["notebook"]
    if not notebook.is_file():
        raise FileNotFoundError(f"{path}: there is no notebook {notebook}: its path is relative to the grid's folder")
    for point in itertools.product(*grid.values()):
        yield Request.of(notebook, fixed | dict(zip(grid, point, strict=True)))
