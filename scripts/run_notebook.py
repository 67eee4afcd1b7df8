#!/usr/bin/env python
"""Run one notebook with parameters, and render it to one HTML page.

    python scripts/run_notebook.py notebooks/01_published_profile.ipynb -p workload tiny --html reports/tiny.html

Exit code: 0 complete, 1 the notebook failed (the page says where), 2 a mistake in the request (nothing was started).
"""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
from pathlib import Path

from distmuon.commandline import Parser, refuse, run
from distmuon.reporting.execution import execute
from distmuon.reporting.parameters import load_parameters
from distmuon.reporting.rendering import render
from distmuon.reporting.request import Request


def main() -> int:
    """Run the notebook that the command line names."""
    arguments = parse_arguments()
    try:
        parameters = load_parameters(arguments.file) if arguments.file else {}
        parameters |= {name: value for name, value in arguments.parameters}
        request = Request.of(arguments.notebook, parameters)
    except (OSError, ValueError) as error:
        return refuse(error)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that a stopped run ends its kernel, too
    folder = arguments.out or request.fresh_folder()
    command = shlex.join(["python", *sys.argv])
    try:
        done = execute(request, folder, command=command, cell_timeout=arguments.cell_timeout)
    except FileExistsError as error:
        return refuse(error)
    except KeyboardInterrupt:
        page = render(folder / arguments.notebook.name)
        print(f"\ninterrupted; what there is: {page}", file=sys.stderr)
        return 130
    try:
        page = render(done.notebook)
        if arguments.html:
            page = render(done.notebook, arguments.html, dict(arguments.links))
    except ValueError as error:  # the notebook ran, but shows what a page must not hold
        print(f"error: {error}", file=sys.stderr)
        return 1
    if done.mark and not done.failure:
        print(done.mark["headline"] or "", done.mark["conclusion"], sep="\n\n")
    if done.failure:
        print(f"FAILED in {done.failure.where}\n{done.failure.error}", file=sys.stderr)
    print(f"\nreport: {page}\nrun:    {folder}")
    return 1 if done.failure else 0


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = Parser(__doc__)
    parser.add_argument("notebook", type=Path)
    parser.add_argument(
        "-p",
        dest="parameters",
        nargs=2,
        action="append",
        default=[],
        metavar=("NAME", "VALUE"),
        help="set a parameter; lists as 'a, b'",
    )
    parser.add_argument("-f", "--file", type=Path, metavar="FILE.yaml", help="parameters; -p comes before them")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder of the run (default: a fresh one under runs/)")
    parser.add_argument("--html", type=Path, metavar="FILE", help="put a copy of the page here")
    parser.add_argument(
        "--link",
        dest="links",
        nargs=2,
        action="append",
        default=[],
        metavar=("LABEL", "PAGE"),
        help="link that copy to a page beside it, by its relative path; may be given several times",
    )
    parser.add_argument("--cell-timeout", type=int, metavar="SECONDS", help="limit for each cell (default: none)")
    return parser.parse_args()


if __name__ == "__main__":
    run(main)
