"""The notebooks, each executed once in a session with the smallest parameters, for all tests that need one."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from html import unescape
from pathlib import Path
from typing import Any

import nbformat
import pandas as pd
from pages import Page

from distmuon.reporting.execution import Run, execute
from distmuon.reporting.outcome import Table
from distmuon.reporting.rendering import render
from distmuon.reporting.request import Request

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"

#: The smallest parameters of each notebook; "04_compare_traces" has by default a small profile to take.
SMALL: dict[str, dict[str, object]] = {
    "00_tour": {"ranks": 2, "tokens": 16},
    "01_published_profile": {"workload": "tiny", "ranks": 2, "steps": 2, "repeats": 1, "tokens": 16},
    "02_ablation": {
        "workload": "tiny",
        "timed": "tiny",
        "ranks": 2,
        "steps": 2,
        "tokens": 16,
        "turns": 3,
        "switches": "packing=parameter, ns_batching=shape, ns_algorithm=copy_free",
    },
    "03_scale": {
        "workload": "tiny",
        "ranks": 8,
        "ep": 4,
        "sizes": "4, 8",
        "layers": "1, 2",
        "checked": "tiny",
        "turns": 2,
        "dense": "qwen3-8b/32",
        "dense_sizes": "16, 32",
    },
    "04_compare_traces": {},
    "05_training": {"ranks": 2, "steps": 4, "tokens": 8, "every": 2},
}


@dataclass(frozen=True)
class Executed:
    """A run of a notebook, with its page.

    Attributes:
        folder: of the run.
        run: as ``execute`` returned it.
    """

    folder: Path
    run: Run

    @property
    def files(self) -> Path:
        """What the notebook itself wrote."""
        return self.folder / "files"

    @property
    def html(self) -> str:
        """The page as it is written."""
        return self.run.notebook.with_suffix(".html").read_text()

    @property
    def text(self) -> str:
        """The page with its characters unescaped."""
        return unescape(self.html)

    @cached_property
    def page(self) -> Page:
        return Page(self.run.notebook.with_suffix(".html"))

    @cached_property
    def parameters(self) -> dict[str, Any]:
        return json.loads((self.folder / "parameters.json").read_text())

    @cached_property
    def results(self) -> dict[str, Any]:
        return json.loads((self.folder / "results.json").read_text())

    @property
    def tables(self) -> list[Table]:
        """The stored tables, in order."""
        return self.results["tables"]

    def table(self, caption: str) -> pd.DataFrame:
        """The stored table in whose caption this stands."""
        (table,) = (each for each in self.tables if caption in each["caption"])
        return pd.DataFrame(table["rows"], columns=table["columns"])

    def read(self, name: str) -> pd.DataFrame:
        """A parquet file of the run."""
        return pd.read_parquet(self.files / f"{name}.parquet")

    def prose(self) -> Iterator[str]:
        """Every text that cells computed: captions, alt texts, sentences, conclusion; tables' cells apart."""
        for cell in nbformat.read(self.run.notebook, as_version=4).cells:
            for output in cell.get("outputs", []):
                data: Mapping[str, str] = output.get("data", {})
                yield data.get("text/markdown", "")
                page = re.sub(
                    r"<t(head|body)>.*?</t\1>|<details>.*?</details>|src=\"[^\"]*\"", "", data.get("text/html", "")
                )
                yield from re.findall(r'alt="([^"]*)"', page)
                yield re.sub(r"<[^>]*>", " ", page)


def execute_small(name: str, folder: Path) -> Executed:
    """Execute a notebook with its smallest parameters and render it."""
    run = execute(Request.of(NOTEBOOKS / f"{name}.ipynb", SMALL[name]), folder)
    render(run.notebook)
    return Executed(folder, run)
