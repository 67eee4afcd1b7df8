"""The device of a rank, what fits on it, and what Newton-Schulz runs in on it."""

from __future__ import annotations

import os

import torch

from distmuon.profiling.memory import machine_bytes
from distmuon.workloads import get_workload
from distmuon.workloads.model import build_model

DEVICES = ("auto", "cpu", "cuda")
NS_DTYPES = ("auto", "bfloat16", "float32")


def local_ranks(ranks: int) -> int:
    """Ranks on this machine, of ``ranks`` in all."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", ranks))


def refuse_absent_gpus(device: str, ranks: int) -> None:
    """Refuse ``device="cuda"`` where a rank would have no GPU of its own.

    Raises:
        ValueError: saying how many there are.
    """
    if device == "cuda" and not _enough_gpus(ranks):
        count = torch.cuda.device_count()
        raise ValueError(f"device 'cuda' needs a GPU a rank: {local_ranks(ranks)}, and there are {count}")


def refuse_too_large(workload: str, device: str, ranks: int) -> None:
    """Refuse a workload whose weights alone are more than this machine has room for.

    Every rank makes the whole model before it keeps its part, so all ranks of a machine hold it at once.

    Raises:
        ValueError: saying how much that is, and how much there is.
    """
    weights = sum(4 * parameter.numel() for parameter in build_model(get_workload(workload), "meta").parameters())
    if device == "cpu" or not _enough_gpus(ranks):
        copies, memory, there = local_ranks(ranks), "memory", machine_bytes()
    else:
        copies, memory, there = 1, "a GPU's memory", torch.cuda.get_device_properties(0).total_memory
    if copies * weights > there:
        needed, held = (f"{value / 2**30:,.0f} GiB" for value in (copies * weights, there))
        raise ValueError(
            f"workload {workload!r} needs {needed} of {memory} for its weights alone, which each rank makes whole, and "
            f"there are {held}: divide its sizes, as in {workload.partition('/')[0] + '/16'!r}, or take fewer ranks"
        )


def rank_device(device: str, ranks: int) -> torch.device:
    """The device of this rank (``LOCAL_RANK``); "auto" takes a GPU a rank where there are so many, else the CPU.

    Raises:
        ValueError: "cuda", and there are too few.
    """
    refuse_absent_gpus(device, ranks)
    if device == "cpu" or not _enough_gpus(ranks):
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ["LOCAL_RANK"]))


def use_gpu(device: torch.device) -> None:
    """Make a GPU this process's own, under settings with which it gives the same bits each time.

    What PyTorch has no deterministic algorithm for warns. New tensors are not filled, which would be launches.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS is first used
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # a module's property
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.benchmark = False
    torch.cuda.set_device(device)


def newton_schulz_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype of that name; "auto" is bfloat16 on a GPU and float32 on a CPU, which may lack units for the other."""
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return getattr(torch, name)


def _enough_gpus(ranks: int) -> bool:
    return torch.cuda.is_available() and torch.cuda.device_count() >= local_ranks(ranks)
