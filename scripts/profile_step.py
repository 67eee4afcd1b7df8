#!/usr/bin/env python
"""Train a workload for real and profile its optimizer's steps, variant beside variant.

    python scripts/profile_step.py --workload kimi-debug --ranks 4 --ep 2 --variant baseline --variant batched --steps 5
    python scripts/profile_step.py --variant fused --variant fused+wire_dtype=parameter --set buckets=auto

Starts its own ranks (gloo on CPU, NCCL or RCCL where there is a GPU a rank); under torchrun it joins those that are
there. Writes summary.json, events.parquet, rank{r}.trace.json.gz and rank{r}.log.

Exit code: 0 complete, 1 a rank died or hung (its name and last log lines are shown), 2 a mistake in the request.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from pathlib import Path

from distmuon.commandline import Parser, checked, one_of, refuse, run
from distmuon.counting.contestants import Contestant, add_set_option
from distmuon.newton_schulz import NS_ALGORITHMS
from distmuon.profiling.devices import DEVICES, NS_DTYPES
from distmuon.profiling.launch import RankFailure
from distmuon.profiling.run import profile
from distmuon.profiling.session import Settings
from distmuon.studies.profile_tables import profile_table
from distmuon.workloads import get_workload
from distmuon.workloads.storage import BUCKETS


def main() -> int:
    """Profile what the command line asks for."""
    arguments = parse_arguments()
    names = vars(Settings()).keys() - {"variants"}
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that a stopped run ends its ranks, too
    try:
        chosen = {name: getattr(arguments, name) for name in names}
        contestants = arguments.variants or map(Contestant, Settings().variants)
        turned = [contestant.turned(*arguments.settings).text for contestant in contestants]
        settings = Settings(variants=tuple(turned), **chosen)
        result = profile(settings, arguments.out, silence_s=arguments.time_limit)
    except (ValueError, FileExistsError) as error:
        return refuse(error)
    except RankFailure as failure:
        print(f"error: {failure}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted: all ranks have been ended", file=sys.stderr)
        return 130
    if result:
        print(
            json.dumps(result.summary, indent=2)
            if arguments.format == "json"
            else profile_table(result).to_string(index=False, na_rep="n/a")
        )
        print(f"results: {result.folder}", file=sys.stderr)
    return 0


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    default = Settings()
    unset = "of variants that do not set it"
    parser = Parser(__doc__)
    parser.add_argument("--workload", type=checked(lambda name: get_workload(name).name), default=default.workload)
    parser.add_argument("--ranks", type=int, default=default.ranks)
    parser.add_argument("--ep", type=int, default=default.ep, help="expert-parallel degree")
    parser.add_argument(
        "--variant",
        dest="variants",
        action="append",
        type=checked(Contestant),
        metavar="VARIANT[+SWITCH=VALUE...]",
        help="may be given several times; the others are compared with the first",
    )
    add_set_option(parser)
    parser.add_argument("--steps", type=int, default=default.steps, help="profiled steps of a repeat")
    parser.add_argument("--repeats", type=int, default=default.repeats)
    parser.add_argument("--warmup", type=int, default=default.warmup, help="steps before, not recorded")
    parser.add_argument("--tokens", type=int, default=default.tokens, help="of a rank and step")
    parser.add_argument("--seed", type=int, default=default.seed)
    parser.add_argument("--device", type=one_of("device", DEVICES), default=default.device)
    parser.add_argument("--ns-dtype", type=one_of("ns-dtype", NS_DTYPES), default=default.ns_dtype)
    parser.add_argument(
        "--ns-algorithm", type=one_of("ns_algorithm", NS_ALGORITHMS), default=default.ns_algorithm, help=unset
    )
    parser.add_argument("--buckets", type=one_of("buckets", BUCKETS), default=default.buckets, help=unset)
    parser.add_argument("--out", type=Path, metavar="DIR", help="default: a fresh folder under runs/")
    parser.add_argument(
        "--time-limit", type=float, default=300.0, metavar="SECONDS", help="a run hangs when no rank writes for so long"
    )
    parser.add_argument("--format", type=one_of("format", ("table", "json")), default="table")
    return parser.parse_args()


if __name__ == "__main__":
    run(main)
