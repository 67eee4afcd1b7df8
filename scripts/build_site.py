#!/usr/bin/env python
"""Build a static folder from the latest run of each notebook: an index, the reports, their data.

    python scripts/build_site.py --out site
    python -m http.server --directory site

Exit code: 0 written, 2 there is nothing to write it from, or the folder is taken.
"""

from __future__ import annotations

from pathlib import Path

from distmuon.commandline import Parser, refuse, run
from distmuon.folders import RUNS
from distmuon.reporting.site import write_site

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"


def main() -> int:
    """Build what the command line asks for."""
    parser = Parser(__doc__)
    parser.add_argument("--out", type=Path, default=Path("site"), metavar="DIR", help="default: site")
    parser.add_argument("--runs", type=Path, default=RUNS, metavar="DIR", help="where the folders of runs lie")
    arguments = parser.parse_args()
    try:
        index = write_site(arguments.out, sorted(NOTEBOOKS.glob("*.ipynb")), arguments.runs)
    except (ValueError, FileExistsError) as error:
        return refuse(error)
    print(f"site: {index}")
    return 0


if __name__ == "__main__":
    run(main)
