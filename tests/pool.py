"""A pool of worker processes that tests use as the ranks of a process group (gloo over loopback).

Starting torch takes seconds, so the workers are forked from a server that has imported it, and stay for the whole
session. Each job gets a process group of its own, of exactly as many ranks as asked for, so that nothing is left over
from the test before.

    def totals(rank, ranks, scale):                # at module level: the workers import it by name
        ...
    def test_totals(pool):
        assert pool.run(4, totals, 2.0) == [...]   # results by rank
"""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing import connection
from typing import Any

import torch
import torch.distributed as dist
from _pytest.config import apply_warning_filters

_GRACE_S = 1.0  # what the other ranks are given, once one has raised, before they are ended
_PRELOAD = ["torch", "torch.distributed.fsdp", "torch.distributed.tensor.debug", "numpy", "_pytest.config"]


class RankError(RuntimeError):
    """Some ranks of a job raised, died or did not answer in time.

    Attributes:
        errors: what happened on each rank that did not return, the rank that failed first coming first.
    """

    def __init__(self, job: str, errors: dict[int, str]) -> None:
        self.errors = errors
        parts = [f"rank {rank}: {text.rstrip()}" for rank, text in errors.items()]
        super().__init__("\n\n".join([f"{job} failed on rank(s) {', '.join(map(str, errors))}", *parts]))


class Pool:
    """Workers that run one function as the ranks of a process group.

    Args:
        warning_filters: filters as in pytest's ``filterwarnings``, in force while a job runs.
    """

    def __init__(self, warning_filters: Sequence[str] = ("error",)) -> None:
        self._filters = list(warning_filters)
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(_PRELOAD)
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._workers: list[_Worker] = []
        self._jobs = 0

    def run(
        self,
        ranks: int,
        function: Callable[..., Any],
        *args: Any,
        timeout: float = 60.0,
        backend: str = "gloo",
        group_timeout: float | None = None,
    ) -> list[Any]:
        """Call ``function(rank, ranks, *args)`` on every rank and return the results by rank.

        Args:
            ranks: size of the default process group that the function finds.
            function: a module-level function; it, ``args`` and its results are pickled.
            timeout: seconds for the whole job.
            backend: of the default process group.
            group_timeout: its time-out, seconds; None: longer than the pool waits, so that the pool is the one to say
                who did not answer.

        Raises:
            RankError: a rank raised, died or did not answer in time. The others are ended, and replaced in the next
                job.
        """
        self._jobs += 1
        while len(self._workers) < ranks:
            self._workers.append(_Worker(self._context, self._store.port, self._filters))
        workers = self._workers[:ranks]
        for rank, worker in enumerate(workers):
            worker.send((self._jobs, rank, ranks, group_timeout or 2 * timeout + 10, backend, function, args))

        results: dict[int, Any] = {}
        failures: dict[int, tuple[float, str]] = {}  # rank -> when, what
        busy = set(range(ranks))
        deadline = time.monotonic() + timeout
        while busy and (left := deadline - time.monotonic()) > 0:
            ready = connection.wait([workers[rank].pipe for rank in busy], left)
            for rank in [rank for rank in busy if workers[rank].pipe in ready]:
                try:
                    kind, value = workers[rank].receive()
                except EOFError:
                    kind, value = "error", (time.monotonic(), f"died, exit code {workers[rank].exit_code()}")
                    busy.discard(rank)
                if kind == "result":
                    results[rank] = value
                elif kind == "error":
                    failures[rank] = value
                    deadline = min(deadline, time.monotonic() + _GRACE_S)
                else:
                    busy.discard(rank)

        for rank in busy:
            if rank not in failures and rank not in results:
                why = "ended while it waited for the others" if failures else f"no answer in {timeout:g} s"
                failures[rank] = (time.monotonic(), f"{why}; it was here:\n{workers[rank].stack()}")
        for worker in workers:
            if workers.index(worker) in busy or not worker.alive():
                worker.end()
                self._workers.remove(worker)
        if failures:
            in_order = sorted(failures, key=lambda rank: failures[rank][0])
            raise RankError(function.__name__, {rank: failures[rank][1] for rank in in_order})
        return [results[rank] for rank in range(ranks)]

    def close(self) -> None:
        """End every worker."""
        while self._workers:
            self._workers.pop().end()


class _Worker:
    """One worker process, as the pool sees it."""

    def __init__(self, context: Any, port: int, filters: list[str]) -> None:
        self.pipe, theirs = context.Pipe()
        self._stacks = tempfile.NamedTemporaryFile(prefix="rank-stack-")  # noqa: SIM115 - lives as long as the worker
        self._process = context.Process(target=_work, args=(theirs, port, filters, self._stacks.name), daemon=True)
        self._process.start()
        theirs.close()

    def send(self, job: Any) -> None:
        # Plain pickle: multiprocessing's own would pass tensors through shared memory, which dies with its sender.
        self.pipe.send_bytes(pickle.dumps(job))

    def receive(self) -> Any:
        return pickle.loads(self.pipe.recv_bytes())

    def alive(self) -> bool:
        return self._process.is_alive()

    def exit_code(self) -> int | None:
        self._process.join(_GRACE_S)
        return self._process.exitcode

    def stack(self) -> str:
        """Where the worker is now (most recent call first)."""
        os.kill(self._process.pid, signal.SIGUSR1)
        time.sleep(0.2)
        return self._stacks.read().decode()

    def end(self) -> None:
        self._process.kill()
        self._process.join()
        self.pipe.close()
        self._stacks.close()


def _work(pipe: Any, port: int, filters: list[str], stacks: str) -> None:
    """A worker's life: one job after the other until the pool is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is pytest's: it ends the workers
    threading.Thread(target=_follow_parent, daemon=True).start()
    faulthandler.register(signal.SIGUSR1, open(stacks, "w"), all_threads=False)  # noqa: SIM115 - lives as long as we
    if sys.platform == "linux":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    # One connection for all jobs: a store looks up its peer's name for each, and a name server may take its time.
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    gc.freeze()
    while True:
        try:
            job, rank, ranks, group_timeout, backend, function, args = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        except Exception:  # the job cannot be unpickled here: its module does not import, say
            pipe.send_bytes(pickle.dumps(("error", (time.monotonic(), traceback.format_exc()))))
            pipe.send_bytes(pickle.dumps(("idle", None)))
            continue
        try:
            own = dist.PrefixStore(str(job), store)
            limit = timedelta(seconds=group_timeout)
            dist.init_process_group(backend, store=own, rank=rank, world_size=ranks, timeout=limit)
            if own.add("connected", 1) == ranks:
                own.set("all connected", "")
            own.wait(["all connected"], limit)  # a rank that left before would fail those that still connect
            with warnings.catch_warnings():
                apply_warning_filters(filters, [])
                message = pickle.dumps(("result", function(rank, ranks, *args)))
        except BaseException:
            message = pickle.dumps(("error", (time.monotonic(), traceback.format_exc())))
        pipe.send_bytes(message)
        _leave_group()
        pipe.send_bytes(pickle.dumps(("idle", None)))


def _leave_group() -> None:
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    # DTensor caches results with their mesh; the next job's mesh is equal to it, but its groups are other groups.
    _clear_sharding_prop_cache()
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()


def _follow_parent() -> None:
    """End this worker when the process that made the pool has gone, however it went."""
    connection.wait([multiprocessing.parent_process().sentinel])
    os._exit(1)
