"""Names of the profiler ranges inside a step.

Each piece of a step runs under ``distmuon/<phase>/<bucket>``. The profiler shows these ranges in a trace, and the
launch counter reads the same ranges to say where a launch comes from, so a phase is named in one place only.

A range costs the host as much as two small operators even where nobody looks, so it is opened only under a profiler
(``torch.profiler``, ``emit_nvtx`` and all others that PyTorch starts) or a dispatch mode, as the counter is.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch.autograd import profiler
from torch.profiler import record_function
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

PREFIX = "distmuon"

#: In the order in which a bucket passes through them. ``all_to_all`` is the issue of an exchange (both ways), ``wait``
#: the wait for its end; the transfer itself runs beside the others.
PHASES = (
    "momentum",
    "pack",
    "all_to_all",
    "wait",
    "unpack",
    "newton_schulz",
    "repack",
    "return_unpack",
    "apply",
)


_NOTHING = nullcontext()


def phase(name: str, bucket: str) -> AbstractContextManager[object]:
    """A profiler range for one phase of one bucket, to be used as a context manager."""
    if profiler._is_profiler_enabled or is_in_torch_dispatch_mode():
        return record_function(f"{PREFIX}/{name}/{bucket}")
    return _NOTHING


def parse(range_name: str) -> tuple[str, str] | None:
    """``(phase, bucket)`` of a range name, or None for a range that is not one of ours."""
    prefix, _, rest = range_name.partition("/")
    name, _, bucket = rest.partition("/")
    return (name, bucket) if prefix == PREFIX and name in PHASES else None
