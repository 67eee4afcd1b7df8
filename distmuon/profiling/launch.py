"""Start the ranks of a run as processes on this machine, watch them, and leave none behind.

Each rank writes to a log of its own. The first that dies, or hangs while the others wait for it, ends them all, and
:class:`RankFailure` says which it was and what it last wrote. Ranks follow the launcher: when it goes, so do they.
"""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TextIO

_POLL_S = 0.05
_GRACE_S = 2.0  # for the ranks that notice that one has failed to say so: that names what they were in
_ANSWER_S = 3.0  # for ranks that are asked where they are
_TAIL_LINES = 20
_START_S = 120.0  # until every rank has written its first line: importing torch for the first time can take a minute
_ENVIRONMENT = {
    "PYTHONUNBUFFERED": "1",  # logs and progress are live
    "OMP_NUM_THREADS": "1",  # the ranks share the cores
    "KINETO_LOG_LEVEL": "99",  # the profiler's own lines do not belong in a log
    **({"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}),
}
# Where a rank is that waits for others; the last is where an optimizer step waits for its exchange.
_WAITING = ("/torch/distributed/", "/distmuon/exchange.py")


class RankFailure(RuntimeError):
    """A rank died, or hung.

    Attributes:
        rank: the rank that failed first.
    """

    def __init__(self, rank: int, reason: str, log: Path) -> None:
        self.rank = rank
        lines = _lines(log)[-_TAIL_LINES:]
        super().__init__(f"rank {rank} {reason}\nLast lines of {log}:\n" + "\n".join(f"  {line}" for line in lines))


def launch(
    module: str,
    arguments: Sequence[str],
    *,
    ranks: int,
    folder: Path,
    silence_s: float = 120.0,
    progress: TextIO | None = None,
) -> None:
    """Run ``python -m module arguments`` as every rank of a run, and return when all have ended well.

    The module finds the variables that ``init_process_group("env://")`` reads, and calls :func:`run_as_rank`.

    Args:
        module: name of a module that can be imported.
        arguments: its command line.
        ranks: number of processes.
        folder: where ``rank{r}.log`` go, standard output and error together.
        silence_s: a run hangs when for this long no rank has written to its log. Starting may take two minutes.
        progress: where rank 0's log is copied to as it grows.

    Raises:
        RankFailure: a rank died or hung. All others have been ended.
    """
    logs = [folder / f"rank{rank}.log" for rank in range(ranks)]
    shared = {**os.environ, **_ENVIRONMENT, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    shared |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    processes: list[subprocess.Popen] = []
    try:
        for rank, log in enumerate(logs):
            with log.open("wb") as output:
                process = subprocess.Popen(
                    [sys.executable, "-m", module, *arguments],
                    env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                    stdin=subprocess.PIPE,  # never written to: its end tells the rank that we have gone
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
            processes.append(process)
        _watch(processes, logs, silence_s, progress)
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()
            if process.stdin:
                process.stdin.close()


def run_as_rank(main: Callable[[], None]) -> None:
    """Run ``main`` in a process that :func:`launch` started.

    The process ends when its launcher has gone, shows where it is when asked, and ends at once when ``main`` raises,
    before the other ranks can notice: so the first to fail is seen to be the first. It ends at once, too, when ``main``
    returns.
    """
    faulthandler.register(signal.SIGUSR1, all_threads=False)
    threading.Thread(target=_follow_launcher, daemon=True).start()
    try:
        main()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    # All is written. On a busy machine threads of libraries may outlive the interpreter's end, and abort the process.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _follow_launcher() -> None:
    os.read(0, 1)  # returns when the other end is closed
    os._exit(1)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _watch(processes: list[subprocess.Popen], logs: list[Path], silence_s: float, progress: TextIO | None) -> None:
    shown = 0  # bytes of rank 0's log
    written: list[int] = []  # bytes in each log
    last_sign = time.monotonic()
    while True:
        codes = [process.poll() for process in processes]
        shown = _forward(logs[0], shown, progress, to_the_end=codes[0] is not None)
        if any(codes):
            deadline = time.monotonic() + _GRACE_S
            while time.monotonic() < deadline and any(process.poll() is None for process in processes):
                time.sleep(_POLL_S)
            failed = [rank for rank, process in enumerate(processes) if process.poll()]
            # A rank that raises writes its traceback before the others can learn of it; one that is killed writes
            # nothing.
            first = min(failed, key=lambda rank: logs[rank].stat().st_mtime_ns)
            _forward(logs[0], shown, progress, to_the_end=True)
            reason = "\n".join([_end_of(processes[first].returncode), *_others(first, processes, logs)])
            raise RankFailure(first, reason, logs[first])
        if all(code == 0 for code in codes):
            return
        sizes = [log.stat().st_size for log in logs]
        if sizes != written:
            written, last_sign = sizes, time.monotonic()
        limit_s = silence_s if all(sizes) else max(silence_s, _START_S)
        if time.monotonic() - last_sign > limit_s:
            rank, places = _find_hanging(processes, logs)
            raise RankFailure(rank, f"hangs: no rank has written for {limit_s:g} s.\n{places}", logs[rank])
        time.sleep(_POLL_S)


def _forward(log: Path, shown: int, progress: TextIO | None, to_the_end: bool) -> int:
    """Copy the lines of ``log`` from byte ``shown`` on; return how far they go."""
    if progress is None:
        return shown
    with log.open("rb") as file:
        file.seek(shown)
        text = file.read()
    if not to_the_end:
        text = text[: text.rfind(b"\n") + 1]
    if text:
        progress.write(text.decode(errors="replace"))
        progress.flush()
    return shown + len(text)


def _others(first: int, processes: list[subprocess.Popen], logs: list[Path]) -> list[str]:
    """What became of the ranks beside the one that failed first: their last word, or where they still are."""
    last = {
        rank: f"rank {rank} {_end_of(process.returncode)}: {(_lines(logs[rank]) or ['it has written nothing'])[-1]}"
        for rank, process in enumerate(processes)
        if rank != first and process.returncode
    }
    living = any(process.returncode is None for process in processes)
    return [*last.values(), *([_find_hanging(processes, logs)[1]] if living else [])]


def _lines(log: Path) -> list[str]:
    return log.read_text(errors="replace").splitlines()


def _end_of(code: int) -> str:
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def _find_hanging(processes: list[subprocess.Popen], logs: list[Path]) -> tuple[int, str]:
    """The rank that the others wait for, and where each of them is.

    That is one which does not say where it is, as it is stopped; else one which is somewhere else than in a wait.
    """
    sizes = [log.stat().st_size for log in logs]
    living = [rank for rank, process in enumerate(processes) if process.poll() is None]
    for rank in living:
        processes[rank].send_signal(signal.SIGUSR1)
    deadline = time.monotonic() + _ANSWER_S
    while time.monotonic() < deadline and any(logs[rank].stat().st_size == sizes[rank] for rank in living):
        time.sleep(_POLL_S)
    time.sleep(_POLL_S)  # for the end of an answer that has begun
    places, busy, silent = [], [], []
    for rank in living:
        stack = logs[rank].read_bytes()[sizes[rank] :].decode(errors="replace")
        frames = re.findall(r'File "(.+)", line (\d+) in (\S+)', stack)  # innermost first
        waits = any(part in path for path, _, _ in frames[:3] for part in _WAITING)
        if not stack:
            silent.append(rank)
        elif not waits:
            busy.append(rank)
        place = f"{frames[0][2]} ({Path(frames[0][0]).name}:{frames[0][1]})" if frames else "no known place: no answer"
        places.append(f"rank {rank} {'waits' if waits else 'is'} in {place}")
    return (silent or busy or living)[0], "\n".join(places)
