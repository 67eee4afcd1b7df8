"""Where figures come from: versions, commit, device and time, as they are in the process that asks."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path

import torch

_PACKAGES = ("torch", "numpy", "pandas")


def provenance() -> dict[str, str]:
    """What a reader needs to judge or repeat the figures of this process, by label, ready to print."""
    return {
        "distmuon": _version("distmuon"),
        "commit": _commit(),
        "python": f"{platform.python_version()} on {platform.system()} {platform.machine()}",
        "packages": ", ".join(f"{package} {_version(package)}" for package in _PACKAGES),
        "device": _device(),
        "processor": f"{_processor()}, {_cores()} cores to use",
        "written": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _commit() -> str:
    """The commit of the source tree that is running, and whether it was edited since."""
    try:
        _git("ls-files", "--error-unmatch", Path(__file__).name)  # installed inside another project, it is not tracked
        commit, edited = _git("rev-parse", "--short=12", "HEAD"), _git("status", "--porcelain")
    except (OSError, subprocess.CalledProcessError):
        return "unknown (not a git checkout)"
    return f"{commit}, with uncommitted changes" if edited else commit


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(Path(__file__).parent), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def _device() -> str:
    if not torch.cuda.is_available():
        return "CPU"
    runtime = f"ROCm {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}"
    return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}, {runtime}"


def _processor() -> str:
    """The processor's name as Linux tells it, with torch's instruction set; elsewhere what Python knows."""
    name = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), name)
    return f"{name} ({torch.backends.cpu.get_cpu_capability()})"


def _cores() -> int:
    """Cores that this process may use, where the system tells; else those there are."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
