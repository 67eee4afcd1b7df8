"""Folders of runs: a fresh one each time, and never one that already holds something."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

#: Where runs go, under the working folder.
RUNS = Path("runs")


def fresh(name: str, under: Path = RUNS) -> Path:
    """``runs/<UTC>-<name>``: sorted by time. The folder is not made yet."""
    return under / f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{name}"


def claim(folder: Path) -> None:
    """Make a folder for one run.

    Raises:
        FileExistsError: it already holds something.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise FileExistsError(f"{folder} already holds a run: name another folder, or none for a fresh one under runs/")
