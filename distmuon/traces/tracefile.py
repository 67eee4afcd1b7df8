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
    """The rank that wrote a trace, and the number of ranks.

    Raises:
        TraceError: it tells them as something else than numbers.
    """
    told = document.get("distributedInfo") or {}
    in_name = re.search(r"rank[-_]?(\d+)", path.name)
    rank, ranks = told.get("rank", in_name and in_name[1]), told.get("world_size")
    return _whole(rank, "rank", path), _whole(ranks, "world_size", path)


def base_ns_of(document: dict[str, Any], path: Path) -> int:
    """What to add to a trace's times for nanoseconds since the epoch; 0 where it does not tell.

    Raises:
        TraceError: it tells something else than a number.
    """
    return _whole(document.get("baseTimeNanoseconds"), "baseTimeNanoseconds", path) or 0


def _whole(value: Any, name: str, path: Path) -> int | None:
    try:
        return None if value is None else int(value)
    except (TypeError, ValueError):
        raise TraceError(f"{path}: not a trace: its {name} is {value!r}, no whole number") from None
