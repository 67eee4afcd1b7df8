"""Measure each arithmetic of Newton-Schulz: error, orthogonality, FLOPs, launches, and the loss that it trains to.

    python scripts/measure_newton_schulz.py
    python scripts/measure_newton_schulz.py --train 200 --format json > data/newton_schulz.json

Errors are those of the bf16 iteration against the standard one in float64, means over a few random matrices; launches
those of one batch on a GPU, counted without one. data/README.md says what each field is.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator
from typing import Any

import torch

from distmuon.commandline import Parser, one_of
from distmuon.newton_schulz import NS_ALGORITHMS
from distmuon.newton_schulz.coefficients import NAMED
from distmuon.profiling.orthogonality import SPECTRA, accuracy, batch_counts
from distmuon.provenance import provenance
from distmuon.workloads import WORKLOADS, get_workload
from distmuon.workloads.training import Trainer

#: Square, nearly so, wide, much wider; tall.
SHAPES = ((128, 128), (96, 128), (128, 256), (128, 1024), (256, 128))
#: The batches of a rank of kimi-debug, most matrices first.
BATCHES = ((30, 256, 256), (24, 192, 256), (24, 256, 512), (2, 256, 2048), (2, 576, 256))
NS_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
SEQUENCES = 4
LAST = 10


def main() -> None:
    """Measure and print."""
    parser = Parser(__doc__)
    parser.add_argument("--train", type=int, default=0, metavar="STEPS", help="train for so many steps, too")
    parser.add_argument("--workload", type=one_of("workload", WORKLOADS), default="tiny", help="to train")
    parser.add_argument("--ns-dtype", type=one_of("ns-dtype", NS_DTYPES), default="bfloat16", help="to train in")
    parser.add_argument("--seeds", type=int, default=2, help="trainings of each kind")
    parser.add_argument("--format", type=one_of("format", ("table", "json")), default="table")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # the matrices are small, and the order of sums does not depend on the machine then
    report: dict[str, Any] = {
        "command": shlex.join(["python", *sys.argv]),
        "provenance": provenance(),
        "accuracy": list(accuracies()),
        "batches": list(batches()),
    }
    if arguments.train:
        report["training"] = list(
            trainings(arguments.workload, arguments.train, NS_DTYPES[arguments.ns_dtype], arguments.seeds)
        )
    if arguments.format == "json":
        sys.stdout.write(as_json(report))
    else:
        sys.stdout.write("\n".join(table(rows) for rows in report.values() if isinstance(rows, list)))


def accuracies() -> Iterator[dict[str, Any]]:
    """A row for each algorithm, coefficient set, shape and spectrum."""
    for algorithm in NS_ALGORITHMS:
        for coefficients in NAMED:
            for rows, cols in SHAPES:
                for spectrum in SPECTRA:
                    question = {"ns_algorithm": algorithm, "coefficients": coefficients, "shape": f"{rows}x{cols}"}
                    found = accuracy(algorithm, coefficients, spectrum, rows, cols)
                    yield {**question, "spectrum": spectrum, **found}


def batches() -> Iterator[dict[str, Any]]:
    """A row for each algorithm and batch."""
    for algorithm in NS_ALGORITHMS:
        for matrices, rows, cols in BATCHES:
            question = {"ns_algorithm": algorithm, "batch": f"{matrices}x{rows}x{cols}"}
            yield question | batch_counts(algorithm, matrices, rows, cols)


def trainings(workload: str, steps: int, ns_dtype: torch.dtype, seeds: int) -> Iterator[dict[str, Any]]:
    """A row for each algorithm, coefficient set and seed, trained in one process."""
    for algorithm in NS_ALGORITHMS:
        for coefficients in NAMED:
            for seed in range(seeds):
                trainer = Trainer(
                    get_workload(workload),
                    ranks=1,
                    ep=1,
                    rank=0,
                    sequences=SEQUENCES,
                    seed=seed,
                    ns_algorithm=algorithm,
                    ns_coefficients=coefficients,
                    ns_dtype=ns_dtype,
                )
                losses = [trainer.train_step(step).loss for step in range(steps)]
                last = losses[-LAST:]
                print(f"{workload}, {algorithm}, {coefficients}, seed {seed}: {losses[-1]:.4f}", file=sys.stderr)
                yield {
                    "ns_algorithm": algorithm,
                    "coefficients": coefficients,
                    "workload": workload,
                    "ns_dtype": str(ns_dtype).removeprefix("torch."),
                    "seed": seed,
                    "steps": steps,
                    "first_loss": losses[0],
                    "last_loss": sum(last) / len(last),
                }


def as_json(report: dict[str, Any]) -> str:
    """The report with a row a line, its figures to four digits; losses to six."""
    parts = []
    for name, value in report.items():
        if isinstance(value, list):
            rows = ",\n  ".join(json.dumps({key: rounded(key, item) for key, item in row.items()}) for row in value)
            parts.append(f' "{name}": [\n  {rows}\n ]')
        else:
            parts.append(f' "{name}": {json.dumps(value)}')
    return "{\n" + ",\n".join(parts) + "\n}\n"


def rounded(name: str, value: Any) -> Any:
    """A figure with as many digits as mean something."""
    return float(f"{value:.{6 if 'loss' in name else 4}g}") if isinstance(value, float) else value


def table(rows: list[dict[str, Any]]) -> str:
    """Rows as aligned text."""
    cells = [list(rows[0]), *([str(rounded(name, value)) for name, value in row.items()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
