#!/usr/bin/env python
"""Read PyTorch profiler traces, CUDA, ROCm or CPU: what a named range did, two traces side by side, ranks as one.

    python scripts/read_trace.py trace.json.gz                                      # the ranges there are
    python scripts/read_trace.py trace.json.gz --range 'Optimizer.step#NorMuon.step' --format json
    python scripts/read_trace.py before.json.gz after.json.gz --compare --range 'ProfilerStep#*'
    python scripts/read_trace.py runs/some-profile --merge merged.trace.json.gz     # for ui.perfetto.dev

A range may be a pattern; 'outer > inner' is a range inside another, as in
'distmuon.profile/fused/* > Optimizer.step#DistMuon.step'. A folder stands for the traces of its ranks.
What a trace cannot tell is "n/a", in JSON null. Exit code: 0, or 2 for a mistake in the request or in a trace.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from distmuon.commandline import Parser, one_of, refuse, run, table
from distmuon.traces.merge import merge_traces
from distmuon.traces.ranks import RankTraces, missing_ranks, shown_ranks
from distmuon.traces.trace import Trace
from distmuon.traces.tracefile import TraceError


def main() -> int:
    """Do what the command line asks for."""
    arguments = parse_arguments()
    try:
        if arguments.merge:
            merge(arguments)
        elif arguments.compare:
            show_side_by_side(arguments)
        else:
            read(arguments)
    except BrokenPipeError:  # of the output, no mistake in a trace
        raise
    except (TraceError, OSError) as error:
        return refuse(error)
    return 0


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = Parser(__doc__)
    parser.add_argument("traces", nargs="+", type=Path, metavar="FILE", help="a trace, or a folder of ranks")
    parser.add_argument("--range", metavar="NAME", help="default: list the ranges there are")
    parser.add_argument("--compare", action="store_true", help="two traces, or two folders of ranks, side by side")
    parser.add_argument("--merge", type=Path, metavar="FILE", help="write the ranks of a folder as one trace")
    parser.add_argument("--partial", action="store_true", help="take a folder in which ranks are missing as it is")
    parser.add_argument("--format", type=one_of("format", ("table", "json")), default="table")
    arguments = parser.parse_args()
    if arguments.compare and len(arguments.traces) != 2:
        parser.error(f"--compare takes two traces or folders, not {len(arguments.traces)}")
    if arguments.merge and (len(arguments.traces) != 1 or arguments.compare or arguments.range):
        parser.error("--merge takes one folder, and neither --compare nor --range")
    return arguments


def read(arguments: argparse.Namespace) -> None:
    """Show the ranges of each trace, or each occurrence of one of them."""
    traces = [trace for path in arguments.traces for trace in RankTraces(path, partial=arguments.partial).traces]
    if arguments.range:
        found: list[dict[str, Any]] = [
            {
                "trace": trace.path.name,
                "range": arguments.range,
                "occurrences": occurrences(trace, arguments.range),
            }
            for trace in traces
        ]
        rows = "occurrences"
    else:
        found = [
            {
                "trace": trace.path.name,
                "ranges": [{"range": name, "occurrences": count} for name, count in trace.range_names().items()],
            }
            for trace in traces
        ]
        rows = "ranges"
    if arguments.format == "json":
        print(json.dumps(found[0] if len(found) == 1 else found, indent=1))
    else:
        print("\n\n".join(f"{each['trace']}  {each.get('range', rows)}\n{table(each[rows])}" for each in found))
    note_what_is_missing(traces, arguments.range)


def occurrences(trace: Trace, range_name: str) -> list[dict[str, Any]]:
    """What each occurrence did; with its own name where a pattern matches several ranges, which may lie in another."""
    names = [event.name for event in trace.ranges(range_name)]
    found = [each.to_dict() for each in trace.occurrences(range_name)]
    if len(set(names)) == 1:
        return found
    return [{"range": name} | each for name, each in zip(names, found, strict=True)]


def show_side_by_side(arguments: argparse.Namespace) -> None:
    """Show two traces, or the ranks of two runs, side by side."""
    from distmuon.studies import comparison_tables  # needs pandas, which reading does not
    from distmuon.traces.comparison import compare

    if arguments.range:
        frames = comparison_tables.tables(compare(*arguments.traces, arguments.range, partial=arguments.partial))
    else:
        runs = [RankTraces(path, partial=arguments.partial) for path in arguments.traces]
        frames = {"ranges": comparison_tables.ranges_table(*runs)}
    found = {name: json.loads(frame.to_json(orient="records", double_precision=4)) for name, frame in frames.items()}
    if arguments.format == "json":
        question = {"a": str(arguments.traces[0]), "b": str(arguments.traces[1]), "range": arguments.range}
        print(json.dumps(question | found, indent=1))
    else:
        print("\n\n".join(f"{name.upper()}\n{table(rows)}" for name, rows in found.items()))


def merge(arguments: argparse.Namespace) -> None:
    """Write one trace of all ranks."""
    (folder,) = arguments.traces
    if folder.is_file():
        raise TraceError(f"--merge takes a folder of ranks, and {folder} is a file")
    run = RankTraces(folder, partial=arguments.partial)
    merge_traces(run, arguments.merge)
    shown = shown_ranks([trace.rank or 0 for trace in run.traces])
    print(f"{arguments.merge}: ranks {shown}, a process each; open it in ui.perfetto.dev", file=sys.stderr)


def note_what_is_missing(traces: Sequence[Trace], range_name: str | None) -> None:
    """Say on standard error what the traces lack, and what is n/a for that reason."""
    if len({trace.path.parent for trace in traces}) == 1 and len(traces) > 1:
        try:
            if missing := missing_ranks(traces):
                print(f"note: ranks {shown_ranks(missing)} of this run are not among these traces", file=sys.stderr)
        except TraceError as error:
            print(f"note: {error}", file=sys.stderr)
    for trace in traces if range_name else ():
        for number, event in enumerate(trace.ranges(range_name), start=1):
            reasons = []
            if lost := trace.lost_in(event):
                reasons.append(f"the trace ends before {lost} kernels of occurrence {number} ran")
            if shared := trace.shared_in(event):
                reasons.append(f"{shared} correlation ids of occurrence {number} launched something elsewhere, too")
            for reason in reasons:
                print(f"note: {trace.path.name}: {reason}, so its device figures are n/a", file=sys.stderr)


if __name__ == "__main__":
    run(main)
