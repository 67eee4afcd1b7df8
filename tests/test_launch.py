"""Starting ranks: whatever happens to one of them, the run ends, says why, and leaves no process."""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from distmuon.profiling.launch import RankFailure, launch

RANKS = 2  # three of them: test_faults.py


@pytest.fixture(autouse=True)
def tests_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))


def process_ids(folder: Path) -> list[int]:
    found = [re.search(r"has process id (\d+)", log.read_text()) for log in folder.glob("rank*.log")]
    return [int(match[1]) for match in found if match]


def living(process_id: int) -> bool:
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    return True


def test_logs_and_progress_of_a_run_that_ends_well(tmp_path: Path) -> None:
    progress = io.StringIO()
    launch("launched", ["meet", "0"], ranks=RANKS, folder=tmp_path, progress=progress)
    for rank in range(RANKS):
        assert f"rank {rank} is about to meet" in (tmp_path / f"rank{rank}.log").read_text()
    assert progress.getvalue() == (tmp_path / "rank0.log").read_text()
    assert not any(living(process) for process in process_ids(tmp_path))


@pytest.mark.parametrize(
    ("deed", "message"),
    [
        ("raise", r"rank 1 ended with exit code 1(?s:.)*about to raise(?s:.)*the reason is in the log"),
        # Among the quick tests test_faults.py kills a rank.
        pytest.param("die", r"rank 1 was killed by SIGKILL(?s:.)*about to die", marks=pytest.mark.slow),
        (
            "hang",
            r"rank 1 hangs(?s:.)*rank 0 waits in barrier(?s:.)*rank 1 is in main \(launched.py(?s:.)*about to hang",
        ),
        pytest.param(
            *("stop", r"rank 1 hangs(?s:.)*rank 1 is in no known place: no answer(?s:.)*about to stop"),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["raise", "die", "hang", "stop"],
)
def test_a_rank_that_fails_is_named_and_ends_the_others(tmp_path: Path, deed: str, message: str) -> None:
    with pytest.raises(RankFailure, match=message) as failure:
        launch("launched", [deed, "1"], ranks=RANKS, folder=tmp_path, silence_s=3)
    assert failure.value.rank == 1
    assert len(process_ids(tmp_path)) == RANKS
    assert not any(living(process) for process in process_ids(tmp_path))


_LAUNCHER = """
import pathlib, signal, sys
from distmuon.profiling.launch import launch
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell lets its background jobs ignore it
launch("launched", ["hang", "1"], ranks=2, folder=pathlib.Path(sys.argv[1]))
"""


@pytest.mark.parametrize("how", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGKILL])
def test_ranks_go_when_their_launcher_goes(tmp_path: Path, how: signal.Signals) -> None:
    with subprocess.Popen([sys.executable, "-c", _LAUNCHER, str(tmp_path)], stderr=subprocess.DEVNULL) as launcher:
        deadline = time.monotonic() + 60
        while len(process_ids(tmp_path)) < RANKS and time.monotonic() < deadline:
            time.sleep(0.1)
        launcher.send_signal(how)
        assert launcher.wait(10) != 0
    processes = process_ids(tmp_path)
    assert len(processes) == RANKS
    deadline = time.monotonic() + 5
    while any(living(process) for process in processes) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(living(process) for process in processes)
