"""What all tests share: the pool of ranks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pool import Pool


@pytest.fixture(scope="session")
def pool(pytestconfig: pytest.Config) -> Iterator[Pool]:
    """Worker processes for ``pool.run(ranks, function, *args)``; see pool.py. Warnings count there as they do here."""
    pool = Pool(["error", *pytestconfig.getini("filterwarnings")])
    yield pool
    pool.close()
