"""Profile a workload: one call that starts the ranks, or joins those that are there, and returns the results."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import TextIO

from distmuon.folders import claim, fresh
from distmuon.profiling.devices import refuse_absent_gpus, refuse_too_large
from distmuon.profiling.launch import launch
from distmuon.profiling.results import Run
from distmuon.profiling.session import Settings, profile_rank


def profile(
    settings: Settings,
    out: Path | str | None = None,
    *,
    silence_s: float = 300.0,
    progress: TextIO | None = None,
    command: str | None = None,
) -> Run | None:
    """Profile, and write ``summary.json``, ``events.parquet``, ``rank{r}.trace.json.gz`` and ``rank{r}.log``.

    Where ``RANK`` is set, as torchrun and Slurm scripts do, this process is that rank; otherwise all ranks are started
    here.

    Args:
        settings: what to profile.
        out: folder for the files; None for a fresh one under ``runs/``.
        silence_s: how long no rank may write to its log before the run is taken to hang.
        progress: where rank 0's progress goes; None for standard error.
        command: what the user called, for the provenance; None for this process's command line.

    Returns:
        The results; None on a rank other than 0 of a run that was joined.

    Raises:
        ValueError: GPUs are asked for and there are too few, or the workload is too large for this machine.
        FileExistsError: ``out`` already holds files.
        RankFailure: a rank died or hung; no process is left.
    """
    # Before there is a folder, or a rank that dies of it.
    refuse_absent_gpus(settings.device, settings.ranks)
    refuse_too_large(settings.workload, settings.device, settings.ranks)
    command = command or shlex.join(["python", *sys.argv])
    folder = Path(out) if out else fresh(f"profile-{settings.workload.replace('/', '-by-')}")
    rank = int(os.environ.get("RANK", 0))
    if rank == 0:
        claim(folder)
    if "RANK" in os.environ:
        profile_rank(settings, folder, command, own_log=True)
    else:
        arguments = [settings.to_json(), str(folder), command]
        progress = progress or sys.stderr
        launch(
            "distmuon.profiling.session",
            arguments,
            ranks=settings.ranks,
            folder=folder,
            silence_s=silence_s,
            progress=progress,
        )
    return Run.read(folder) if rank == 0 else None
