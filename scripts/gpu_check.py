#!/usr/bin/env python
"""Check a GPU against what is counted and promised, with one process that stands for each rank in turn.

    python scripts/gpu_check.py --out runs/gpu-check
    python scripts/gpu_check.py --device cpu --workload tiny         # all but what only a device can tell

Says for each contestant: what the counter and the profiler have for a step, with every operator in which they differ;
CPU and GPU span, of a captured graph too; how fast packing is beside a plain copy of as many bytes; and whether the
updated parameters have the same bits. Writes check.json and the traces. Needs torch and nothing else.

Exit code: 0, 1 if counter and profiler differ somewhere, 2 for a mistake in the request.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from distmuon.commandline import Parser, checked, one_of, table
from distmuon.counting.contestants import Contestant
from distmuon.folders import claim, fresh
from distmuon.profiling.device_check import CONTESTANTS, Checked, check_rank, summary, whole_digests
from distmuon.profiling.devices import use_gpu
from distmuon.provenance import provenance
from distmuon.workloads import get_workload


def main() -> int:
    """Check what the command line asks for."""
    parser = Parser(__doc__)
    parser.add_argument("--workload", type=checked(lambda name: get_workload(name).name), default="kimi-debug")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--ep", type=int, default=2, help="expert-parallel degree")
    parser.add_argument(
        "--variant",
        dest="contestants",
        action="append",
        type=checked(lambda text: Contestant(text).text),
        metavar="VARIANT[+SWITCH=VALUE...]",
        help=f"may be given several times; default: {', '.join(CONTESTANTS)}",
    )
    parser.add_argument("--steps", type=int, default=5, help="profiled steps of each contestant")
    parser.add_argument("--device", type=one_of("device", ("auto", "cpu", "cuda")), default="auto")
    parser.add_argument("--out", type=Path, metavar="DIR", help="default: a fresh folder under runs/")
    arguments = parser.parse_args()
    device = arguments.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    folder = arguments.out or fresh("gpu-check")
    if device == "cuda" and not torch.cuda.is_available():
        parser.error(
            "device 'cuda': there is no GPU here that this build of torch can use; 'cpu' checks all but a device"
        )
    if arguments.steps < 1:
        parser.error(f"steps is {arguments.steps}: profile at least one")
    try:
        workload = get_workload(arguments.workload)
        workload.layout(arguments.ranks, arguments.ep)
        claim(folder)
    except (ValueError, FileExistsError) as error:
        parser.error(str(error))
    if device == "cuda":
        use_gpu(torch.device("cuda", 0))
    question: dict[str, Any] = {"ranks": arguments.ranks, "ep": arguments.ep, "device": device}
    contestants = arguments.contestants or CONTESTANTS
    found: list[Checked] = []
    for rank in range(arguments.ranks):
        print(f"standing for rank {rank} of {arguments.ranks} on {device}", file=sys.stderr)
        found += check_rank(workload, rank, contestants, **question, folder=folder, steps=arguments.steps)
    rows = summary(found, whole_digests(workload, contestants, device=device))
    differences = [f"rank {each.rank}, {each.contestant}: {text}" for each in found for text in each.differences]
    profiled = any(each.profiled for each in found)
    verdict = "counter and profiler agree in every operator" if profiled else "counter against profiler: n/a, no device"
    report = {
        "provenance": provenance(),
        "question": question | {"workload": workload.name, "steps": arguments.steps},
        "contestants": rows,
        "differences": differences if profiled else None,
        "ranks": [each.to_dict() for each in found],
    }
    (folder / "check.json").write_text(json.dumps(report, indent=1) + "\n")
    print(table(rows), "", *(differences or [verdict]), sep="\n")
    print(f"results: {folder}", file=sys.stderr)
    return 1 if differences else 0


if __name__ == "__main__":
    raise SystemExit(main())
