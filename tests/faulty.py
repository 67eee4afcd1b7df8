"""What the ranks of test_faults.py run: two steps of DistMuon, in the second of which something happens to one rank."""

from __future__ import annotations

import os
import resource
import signal
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from distmuon import DistMuon
from distmuon.profiling.launch import run_as_rank

TIME_OUT_S = 5.0
SIGNALS = {"die": signal.SIGKILL, "stop": signal.SIGSTOP}


class InNewtonSchulz(TorchDispatchMode):
    """Sends this process a signal at the first matrix product."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__()
        self.number = number

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.bmm):
            os.kill(os.getpid(), self.number)
        return func(*args, **(kwargs or {}))


def main() -> None:
    deed, bad = sys.argv[1], int(sys.argv[2])
    rank = int(os.environ["RANK"])
    print(f"rank {rank} has process id {os.getpid()}")
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIME_OUT_S))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    weights = [torch.ones(640, 512), torch.ones(512, 640)]
    named = [
        (name, nn.Parameter(distribute_tensor(weight, mesh, [Shard(0)], src_data_rank=None)))
        for name, weight in zip(("first", "second"), weights, strict=True)
    ]
    policy = "skip" if deed == "leave" else "error"
    optimizer = DistMuon(named, buckets=[("first",), ("second",)], missing_gradients=policy)
    for step in range(2):
        for _, parameter in named:
            parameter.grad = torch.ones_like(parameter)
        print(f"rank {rank} is about to take step {step}")
        if step == 0 or rank != bad:
            optimizer.step()
        elif deed == "leave":
            os._exit(3)
        elif deed == "exhaust":
            with open("/proc/self/statm") as file:
                held = int(file.read().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (held, resource.RLIM_INFINITY))
            optimizer.step()
        else:
            with InNewtonSchulz(SIGNALS[deed]):
                optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    run_as_rank(main)
