"""How much memory a process has taken, and how much there is."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path


def peak_rss_bytes() -> int:
    """The most memory that this process ever held.

    ``VmHWM`` where there is one: on Linux a process inherits the peak that ``getrusage`` gives from its parent.
    """
    status = Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def machine_bytes() -> int:
    """The memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def torch_rss_bytes() -> int:
    """The most memory that a fresh process holds which does nothing but import torch."""
    code = f"import runpy, torch; print(runpy.run_path({__file__!r})['peak_rss_bytes']())"
    return int(subprocess.check_output([sys.executable, "-c", code], text=True))
