#!/usr/bin/env python
"""Run a notebook over a grid of parameters: a folder a run under runs/, and runs/index.html to compare them.

    python scripts/run_batch.py notebooks/grids/packing.yaml

A failed run does not stop the others. Complete runs are not repeated when the batch is started again, and batches that
run at once share the work. The form of a grid is described in distmuon/reporting/batch.py.

Exit code: 0 all complete, 1 a run failed (its page says where), 2 a mistake in the grid (nothing was started).
"""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
from pathlib import Path

from distmuon.commandline import Parser, refuse, run
from distmuon.folders import RUNS
from distmuon.reporting.batch import Result, read_grid, run_batch
from distmuon.reporting.records import COMPLETE


def main() -> int:
    """Run the grid that the command line names."""
    arguments = parse_arguments()
    try:
        requests = read_grid(arguments.grid)
    except (OSError, ValueError) as error:
        return refuse(error)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that a stopped batch ends its kernel, too
    index = arguments.runs / "index.html"
    told = 0

    def tell(result: Result) -> None:
        nonlocal told
        told += 1
        print(f"[{told}/{len(requests)}] {describe(result)}", flush=True)

    try:
        results = run_batch(
            requests,
            under=arguments.runs,
            command=shlex.join(["python", *sys.argv]),
            cell_timeout=arguments.cell_timeout,
            again=arguments.again,
            report=tell,
        )
    except KeyboardInterrupt:
        print(f"\ninterrupted; start it again to go on. What there is: {index}", file=sys.stderr)
        return 130
    failed = sum(result.record.status != COMPLETE for result in results)
    print(f"\n{len(results)} runs, {failed} failed, {sum(not result.made for result in results)} were there already")
    print(f"index: {index}")
    return 1 if failed else 0


def describe(result: Result) -> str:
    """One line of one run."""
    given = ", ".join(f"{name}={value}" for name, value in result.request.given.items()) or "defaults"
    record = result.record
    how = record.status.upper() if record.status != COMPLETE else COMPLETE if result.made else "was complete"
    where = f"\n    in {record.failure['where']}: {record.failure['error'].splitlines()[0]}" if record.failure else ""
    return f"{how}: {record.notebook} {given} -> {record.page}{where}"


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = Parser(__doc__)
    parser.add_argument("grid", type=Path, metavar="GRID.yaml")
    parser.add_argument("--runs", type=Path, default=RUNS, metavar="DIR", help="where the folders of runs go")
    parser.add_argument("--cell-timeout", type=int, metavar="SECONDS", help="limit for each cell (default: none)")
    parser.add_argument("--again", action="store_true", help="repeat complete runs, too")
    return parser.parse_args()


if __name__ == "__main__":
    run(main)
