"""What the ranks of test_launch.py run: each does what the command line says, then meets the others in a barrier."""

from __future__ import annotations

import os
import signal
import sys
import time

import torch.distributed as dist

from distmuon.profiling.launch import run_as_rank


def main() -> None:
    deed, bad = sys.argv[1], int(sys.argv[2])
    rank = int(os.environ["RANK"])
    print(f"rank {rank} has process id {os.getpid()}")
    dist.init_process_group("gloo")
    dist.barrier()
    print(f"rank {rank} is about to {deed}")
    if rank == bad and deed == "raise":
        raise ValueError("the reason is in the log")
    if rank == bad and deed == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == bad and deed == "hang":
        time.sleep(100)
    if rank == bad and deed == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    run_as_rank(main)
