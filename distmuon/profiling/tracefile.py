"""The file of a profiler trace: read whole or refused by name, and which rank wrote it."""

from __future__ import annotations

import gzip
import json
import re
import zlib
from pathlib import Path
from typing import Any


class TraceError(ValueError):
    """A file is not a trace, is cut off, or lacks what was asked of it."""


def read_document(path: Path) -> dict[str, Any]:
    """The JSON of a trace, gzipped or not, whose "traceEvents" are a list of objects.

    Raises:
        TraceError: the file is cut off or not a trace.
    """
    raw = path.read_bytes()
    try:
        if raw[:2] == b"\x1f\x8b":
            raw = gzip.decompress(raw)
        # Names of kernels may hold bytes that are no UTF-8, and old profilers left control characters in them.
        document = json.loads(raw.decode(errors="replace"), strict=False)
    except (EOFError, OSError, zlib.error, ValueError) as error:
        raise TraceError(f"{path}: cut off, or not a trace ({error})") from None
    if isinstance(document, list):
        document = {"traceEvents": document}
    events = document.get("traceEvents") if isinstance(document, dict) else None
    if not isinstance(events, list) or not all(isinstance(event, dict) for event in events):
        raise TraceError(f"{path}: not a trace: it has no list of traceEvents")
    if not events:
        raise TraceError(f"{path}: an empty trace: it has no events")
    return document


def rank_of(document: dict[str, Any], path: Path) -> tuple[int | None, int | None]:
    """The rank that wrote a trace, and the number of ranks."""
    told = document.get("distributedInfo") or {}
    in_name = re.search(r"rank[-_]?(\d+)", path.name)
    rank = told.get("rank", int(in_name[1]) if in_name else None)
    return rank, told.get("world_size")
