"""Several hosts: a launcher a host that meet by rendezvous, as under Slurm. Here both hosts are this machine."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from distmuon.profiling.results import Run
from distmuon.traces.ranks import RankTraces

ROOT = Path(__file__).parents[1]
HOSTS, RANKS_PER_HOST = 2, 2

# What the script asks of Slurm: names of hosts, and a task on each of them.
SCONTROL = "#!/bin/sh\nfor host in 1 2; do echo localhost; done\n"
SRUN = '#!/bin/sh\nshift\n"$@" & first=$!\n"$@" || code=$?\nwait $first || code=$?\nexit ${code:-0}\n'


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run_script(folder: Path, *options: str) -> subprocess.CompletedProcess:
    for name, text in (("scontrol", SCONTROL), ("srun", SRUN)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{folder}:{os.environ['PATH']}",
        "PYTHON": sys.executable,
        "PYTHONPATH": str(ROOT),
        "PORT": str(free_port()),
        "RANKS_PER_NODE": str(RANKS_PER_HOST),
        "SLURM_JOB_ID": "1",
        "SLURM_JOB_NODELIST": "localhost",
        "SLURM_JOB_NUM_NODES": str(HOSTS),
    }
    script = [str(ROOT / "scripts" / "profile_slurm.sh"), "--workload", "tiny", "--tokens", "16", *options]
    return subprocess.run(script, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
def test_two_launchers_profile_as_one_run(tmp_path: Path) -> None:
    out = tmp_path / "run"
    done = run_script(tmp_path, "--ep", "2", "--steps", "1", "--repeats", "1", "--variant", "fused", "--out", str(out))
    assert done.returncode == 0, done.stderr
    run = Run.read(out)
    assert run.variants == ["fused"]
    assert [row["rank"] for row in run.of("fused")["per_rank"]] == list(range(HOSTS * RANKS_PER_HOST))
    assert [trace.rank for trace in RankTraces(out).traces] == list(range(HOSTS * RANKS_PER_HOST))
    for rank in range(HOSTS * RANKS_PER_HOST):
        assert "done" in (out / f"rank{rank}.log").read_text()
    neighbours = done.stderr.count(f"GPUs for {RANKS_PER_HOST} ranks")
    assert neighbours == HOSTS * RANKS_PER_HOST, "each rank has those of its own host for neighbours"


@pytest.mark.slow
def test_a_mistake_in_the_request_ends_the_launchers_of_all_hosts(tmp_path: Path) -> None:
    done = run_script(tmp_path, "--ep", "3", "--variant", "fused", "--out", str(tmp_path / "run"))
    assert done.returncode != 0
    assert "error: " in done.stderr
    assert not (tmp_path / "run").exists()
