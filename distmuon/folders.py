"""Folders of runs: a fresh one each time, and never one that already holds something."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path


def fresh(name: str) -> Path:
    """``runs/<UTC>-<name>`` under the working folder: sorted by time. The folder is not made yet."""
    return Path("runs", f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{name}")


def claim(folder: Path) -> None:
    """Make a folder for one run.

    Raises:
        FileExistsError: it already holds something.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise FileExistsError(f"{folder} already holds a run: name another folder, or none for a fresh one under runs/")
