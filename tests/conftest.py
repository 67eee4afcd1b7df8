"""What all tests share: the pool of ranks, and the executed notebooks."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import cache

import pytest
from executed import Executed, execute_small
from pool import Pool

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
