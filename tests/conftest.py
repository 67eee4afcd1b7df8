"""What all tests share: the pool of ranks, the executed notebooks, and the page of one made to show everything."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
from executed import Executed, execute_small
from pages import write_notebook
from pool import Pool
from sample import SAMPLE

from distmuon.reporting.execution import Run, execute
from distmuon.reporting.rendering import render
from distmuon.reporting.request import Request

# Ranks look up the names of their peers, also of those on this machine. Where the name server does not answer, each
# waits a second for it, not ten.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")


@pytest.fixture(scope="session")
def pool(pytestconfig: pytest.Config) -> Iterator[Pool]:
    """Worker processes for ``pool.run(ranks, function, *args)``; see pool.py. Warnings count there as they do here."""
    pool = Pool(["error", *pytestconfig.getini("filterwarnings")])
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def executed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Executed]:
    """``executed("00_tour")``: that notebook's run with the smallest parameters, executed when first asked for."""
    folder = tmp_path_factory.mktemp("notebooks")
    once = cache(lambda name: execute_small(name, folder / name))

    def complete(name: str) -> Executed:
        found = once(name)
        assert found.run.failure is None, found.run.failure
        return found

    return complete


@pytest.fixture(scope="session")
def sample(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, str]:
    """A complete run of the sample notebook with its page, and what was shown while it ran."""
    folder = tmp_path_factory.mktemp("sample")
    notebook = write_notebook(folder / "sample.ipynb", SAMPLE)
    shown = io.StringIO()
    given = {"workload": "12e3", "variants": "baseline, fused"}
    run = execute(Request.of(notebook, given), folder / "run", command="make sample", progress=shown)
    render(run.notebook)
    return run, shown.getvalue()


@pytest.fixture(scope="session")
def page(sample: tuple[Run, str]) -> Path:
    """The page of that run."""
    return sample[0].notebook.with_suffix(".html")
