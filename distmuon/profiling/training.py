"""Train with DistMuon and AdamW side by side, resume one from its checkpoint in new processes, and read back how it
went.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import pandas as pd

from distmuon.folders import claim, fresh
from distmuon.profiling.devices import refuse_absent_gpus, refuse_too_large
from distmuon.profiling.launch import launch
from distmuon.profiling.training_ranks import ADAMW, CHECKPOINT, DISTMUON, RESULTS, RESUMED, Settings
from distmuon.richtext import Shown

#: The frames of a :class:`Training`, and the parquet files that hold them.
FRAMES = ("steps", "looks", "spectra", "memory")

RUNS = (DISTMUON, ADAMW, RESUMED)
_TRAINED, _AGAIN = "trained", "resumed"  # folders of the two starts


class ResumeError(RuntimeError):
    """A run that resumed is not the run that never stopped."""


@dataclass(frozen=True, repr=False)
class Training(Shown):
    """What was trained. Prints as a table of the runs.

    Attributes:
        settings: what was asked for.
        ranks: by run (:data:`RUNS`), what each rank wrote down.
        origin: device and text.

    Raises:
        ResumeError: loss, gradient norm or parameters of the resumed run differ in a bit from those of DistMuon's.
    """

    settings: Settings
    ranks: dict[str, list[dict[str, Any]]]
    origin: dict[str, str]

    def __post_init__(self) -> None:
        kept = ("step", "loss", "grad_norm")
        for rank, (straight, again) in enumerate(zip(self.ranks[DISTMUON], self.ranks[RESUMED], strict=True)):
            pairs = zip(straight["steps"][self.settings.resume_at :], again["steps"], strict=True)
            for one, other in pairs:
                if [one[key] for key in kept] != [other[key] for key in kept]:
                    raise ResumeError(f"rank {rank} trained {one} without a stop and {other} after resuming")
            if straight["digest"] != again["digest"]:
                raise ResumeError(f"rank {rank} ended with other parameters after resuming")

    @classmethod
    def read(cls, folder: Path | str) -> Training:
        """Read what :func:`train` left in ``folder``."""
        folder = Path(folder)
        settings = Settings.from_json((folder / "settings.json").read_text())
        parts = [json.loads((folder / part / RESULTS).read_text()) for part in (_TRAINED, _AGAIN)]
        found = {name: [rank[name] for rank in part["ranks"]] for part in parts for name in part["ranks"][0]}
        return cls(settings, found, parts[0]["origin"])

    def steps(self) -> pd.DataFrame:
        """A row a run and step, from rank 0: ``run``, ``step``, ``loss``, ``grad_norm``, ``forward_ms``, ``step_ms``,
        and ``elapsed_s``, that run's own time from the end of its first step, which warms up, to the end of this one.
        """
        frame = self._frame("steps")
        spent_s = (frame["forward_ms"] + frame["step_ms"]) / 1e3
        by_run = spent_s.groupby(frame["run"])
        return frame.assign(elapsed_s=by_run.cumsum() - by_run.transform("first"))

    def looks(self) -> pd.DataFrame:
        """A row a run, watched weight and step that was looked at: ``departure`` and ``update_rms`` of the update,
        ``spectral_norm`` and ``rms`` of the weight after it.
        """
        return self._frame("looks")

    def spectra(self) -> pd.DataFrame:
        """A row a run, watched weight, time ("start", "end") and singular value: ``index`` from 0, ``value``."""
        return pd.DataFrame(
            {"run": run, "time": time, "weight": weight, "index": index, "value": value}
            for run in (DISTMUON, ADAMW)
            for time, weights in self.ranks[run][0]["spectra"].items()
            for weight, values in weights.items()
            for index, value in enumerate(values)
        )

    def memory(self) -> pd.DataFrame:
        """A row a run and rank: bytes by what they are for."""
        return pd.DataFrame(
            {"run": run, "rank": rank, **wrote["memory"]}
            for run in (DISTMUON, ADAMW)
            for rank, wrote in enumerate(self.ranks[run])
        )

    def _line(self) -> str:
        asked = self.settings
        return f"{asked.workload} on {asked.ranks} ranks, {asked.steps} steps each, resumed at {asked.resume_at}"

    def _table(self) -> tuple[Sequence[str], list[Sequence[object]]]:
        runs = [(run, mine) for run, mine in self.steps().groupby("run", sort=False)]
        header = ("run", "steps", "last loss (nats a token)", "optimizer step, median (ms)")
        rows = [(run, len(mine), mine["loss"].iloc[-1], mine["step_ms"].median()) for run, mine in runs]
        return header, [tuple(row) for row in rows]

    def write(self, folder: Path) -> None:
        """Write ``steps``, ``looks``, ``spectra`` and ``memory`` as parquet files."""
        for name in FRAMES:
            getattr(self, name)().to_parquet(folder / f"{name}.parquet", index=False)

    def _frame(self, what: str) -> pd.DataFrame:
        return pd.DataFrame({"run": run, **row} for run in RUNS for row in self.ranks[run][0][what])


def train(
    settings: Settings,
    out: Path | str | None = None,
    *,
    silence_s: float = 300.0,
    progress: TextIO | None = None,
) -> Training:
    """Start the ranks, train, start them anew, resume from the checkpoint that lies in the middle.

    Args:
        settings: what to train.
        out: folder for the files; None for a fresh one under ``runs/``.
        silence_s: how long no rank may write to its log before the run is taken to hang.
        progress: where rank 0's progress goes; None for standard error.

    Raises:
        ValueError: GPUs are asked for and there are too few, or the workload is too large for this machine.
        FileExistsError: ``out`` already holds files.
        RankFailure: a rank died or hung; no process is left.
        ResumeError: the resumed run differs.
    """
    refuse_absent_gpus(settings.device, settings.ranks)
    refuse_too_large(settings.workload, settings.device, settings.ranks)
    folder = Path(out) if out else fresh(f"training-{settings.workload.replace('/', '-by-')}")
    claim(folder)
    (folder / "settings.json").write_text(settings.to_json() + "\n")
    for part, more in ((_TRAINED, []), (_AGAIN, ["--resume", str(folder / _TRAINED / CHECKPOINT)])):
        (folder / part).mkdir()
        launch(
            "distmuon.profiling.training_ranks",
            [settings.to_json(), str(folder / part), *more],
            ranks=settings.ranks,
            folder=folder / part,
            silence_s=silence_s,
            progress=progress or sys.stderr,
        )
    found = Training.read(folder)
    found.write(folder)
    return found
