"""Plan a job of any size with no process group and no weights: bytes, balance, buffers, launches, modelled step time.

    python scripts/plan_scale.py --workload kimi-k2 --ranks 1024 --ep 64 --format json
    python scripts/plan_scale.py --workload kimi-k2 --curve

One rank is planned in full, the others are added up. ``plan_seconds`` is the CPU time of the one thread that plans;
``peak_rss_mib`` the most memory that the process held, less what a fresh process holds that only imports torch. The
modelled time follows from the assumptions, which are options; their defaults are those of an NVIDIA DGX H100. --curve
plans 8 to 4,096 ranks, each in a process of its own.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from distmuon.commandline import Parser, checked, one_of, run
from distmuon.modelling import Assumptions
from distmuon.profiling.memory import torch_rss_bytes
from distmuon.studies.scale import Job, curve, growth, plan_each, plan_job
from distmuon.variants import VARIANTS
from distmuon.workloads import get_workload
from distmuon.workloads.storage import BUCKETS

CURVE = tuple(2**power for power in range(3, 13))
SHARE = {"auto": None, "yes": True, "no": False}


def main() -> None:
    """Plan and print."""
    parser = Parser(__doc__)
    parser.add_argument("--workload", type=checked(lambda name: get_workload(name).name), default="kimi-k2")
    parser.add_argument("--ranks", type=int, help="default: the workload's own")
    parser.add_argument("--ep", type=int, help="expert-parallel degree; default: the workload's own")
    parser.add_argument("--rank", type=int, default=0, help="which is planned in full")
    parser.add_argument("--replicas", type=int, default=1, help="copies of the model (HSDP)")
    parser.add_argument("--share-replicas", type=one_of("share-replicas", SHARE), default="auto", help="auto, yes, no")
    parser.add_argument("--buckets", type=one_of("buckets", BUCKETS), default="published")
    parser.add_argument("--variant", type=one_of("variant", VARIANTS), default="fused")
    parser.add_argument("--curve", action="store_true", help=f"plan {CURVE[0]} to {CURVE[-1]:,} ranks instead")
    parser.add_argument("--format", type=one_of("format", ("table", "json")), default="table")
    assumed = parser.add_argument_group("assumptions")
    for field in fields(Assumptions):
        option = f"--{field.name.replace('_', '-')}"
        kind = int if field.type == "int" else float
        assumed.add_argument(option, type=kind, default=field.default, help=f"default: {field.default:g}")
    arguments = parser.parse_args()
    if arguments.curve and (arguments.ranks is not None or arguments.rank):
        parser.error("--curve has ranks of its own, and plans the first: leave out --ranks and --rank")
    try:
        job = read_job(arguments)
    except ValueError as error:
        parser.error(str(error))
    if arguments.curve:
        rows = []
        for row in plan_each(curve(job, CURVE)):
            rows.append(row)
            if arguments.format == "table":
                print((curve_lines([row]) if len(rows) > 1 else curve_lines([row], header=True)), flush=True)
        print(json.dumps(rows, indent=1) if arguments.format == "json" else growth_line(rows))
        return
    found = plan_job(job).to_dict(torch_rss_bytes())
    print(json.dumps(found, indent=1) if arguments.format == "json" else table(found))


def read_job(arguments: argparse.Namespace) -> Job:
    """The job that the command line asks for."""
    workload = get_workload(arguments.workload)
    return Job(
        workload.name,
        workload.default_ranks if arguments.ranks is None else arguments.ranks,
        workload.default_ep if arguments.ep is None else arguments.ep,
        arguments.rank,
        arguments.replicas,
        SHARE[arguments.share_replicas],
        arguments.buckets,
        arguments.variant,
        Assumptions(**{field.name: getattr(arguments, field.name) for field in fields(Assumptions)}),
    )


def table(found: dict[str, Any]) -> str:
    """The answer as aligned text."""
    sent, by_bucket = found["wire_bytes"], found["ns_flops_imbalance_by_bucket"]
    lines = [
        f"{found['workload']}, {found['ranks']:,} ranks, EP {found['ep']}; rank {found['rank']} in full",
        "",
        f"planning                  {found['plan_seconds']:>10.2f} s",
        f"memory above torch's      {found['peak_rss_mib']:>10.1f} MiB",
        f"bytes sent a rank         {sent['mean'] / 2**20:>10.1f} MiB, at most {sent['max'] / 2**20:.1f}",
        f"GEMM FLOPs, max / mean    {found['ns_flops_imbalance']:>10.3f}",
        f"a bucket's / its bound    {by_bucket['mean']:>10.3f}, at most {by_bucket['max']:.3f}",
        f"peak buffers of the rank  {found['buffer_bytes'] / 2**20:>10.1f} MiB",
        f"launches of the rank      {found['launches']:>10,}",
        f"modelled step             {found['modelled_step_ms']:>10.2f} ms, assuming",
    ]
    lines += [f"    {name.replace('_', ' '):<22}{value:>10.4g}" for name, value in found["assumptions"].items()]
    return "\n".join(lines)


def curve_lines(rows: Sequence[dict[str, Any]], *, header: bool = False) -> str:
    """A line a number of ranks."""
    titles = ("ranks", "EP", "planning (s)", "memory (MiB)", "sent a rank (MiB)", "max / mean FLOPs", "step (ms)")
    lines = ["".join(f"{title:>18}" for title in titles)] if header else []
    for row in rows:
        values = (
            f"{row['ranks']:,}",
            f"{row['ep']}",
            f"{row['plan_seconds']:.2f}",
            f"{row['peak_rss_mib']:.1f}",
            f"{row['wire_bytes']['mean'] / 2**20:.1f}",
            f"{row['ns_flops_imbalance']:.3f}",
            f"{row['modelled_step_ms']:.1f}",
        )
        lines.append("".join(f"{value:>18}" for value in values))
    return "\n".join(lines)


def growth_line(rows: Sequence[dict[str, Any]]) -> str:
    """How planning grows."""
    power = growth([row["ranks"] for row in rows], [row["plan_seconds"] for row in rows])
    return f"planning time grows as ranks^{power:.2f}"


if __name__ == "__main__":
    run(main)
