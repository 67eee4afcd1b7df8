"""Count what one optimizer step launches on a GPU, with no GPU, no weights and no other process.

    python scripts/count_launches.py --workload kimi-debug --ranks 4 --ep 2 --variant baseline
    python scripts/count_launches.py --variant baseline --set packing=bucket --set elementwise=bucket

Means over the ranks: async copies (memcpys), launches (all device activity but collectives), collectives, and bytes
sent to other ranks; each source of launches; and the fused copies of more than one pair, summed over ranks.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace

from distmuon.commandline import Parser, checked, one_of, run
from distmuon.counting.contestants import Contestant, add_set_option
from distmuon.counting.launches import LaunchCounts, count_launches
from distmuon.counting.rules import TOOLCHAINS
from distmuon.newton_schulz import NS_ALGORITHMS
from distmuon.workloads import get_workload
from distmuon.workloads.storage import BUCKETS


def main() -> None:
    """Count and print."""
    parser = Parser(__doc__)
    parser.add_argument("--workload", type=checked(lambda name: get_workload(name).name), default="kimi-debug")
    parser.add_argument("--ranks", type=int, help="default: the workload's own")
    parser.add_argument("--ep", type=int, help="expert-parallel degree; default: the workload's own")
    parser.add_argument("--variant", type=checked(Contestant), default="fused", metavar="VARIANT[+SWITCH=VALUE...]")
    add_set_option(parser)
    parser.add_argument("--ns-algorithm", type=one_of("ns_algorithm", NS_ALGORITHMS), default="standard")
    parser.add_argument("--buckets", type=one_of("buckets", BUCKETS), default="published")
    parser.add_argument("--toolchain", type=one_of("toolchain", TOOLCHAINS), default="rocm", help="limits of a launch")
    parser.add_argument("--format", type=one_of("format", ("table", "json")), default="table")
    arguments = parser.parse_args()
    contestant = arguments.variant.turned(*arguments.settings)
    options = contestant.options(ns_algorithm=arguments.ns_algorithm, buckets=arguments.buckets)
    question = arguments.workload, arguments.ranks, arguments.ep
    try:
        counts = count_launches(*question, **options, toolchain=arguments.toolchain)
    except ValueError as error:
        parser.error(str(error))
    counts = replace(counts, question=counts.question | {"variant": contestant.text})
    sys.stdout.write(json.dumps(counts.to_dict(), indent=1) + "\n" if arguments.format == "json" else table(counts))


def table(counts: LaunchCounts) -> str:
    """The counts as aligned text."""
    report = counts.to_dict()
    title = (
        "{workload}, {ranks} ranks, EP {ep}, {variant}, {ns_algorithm} Newton-Schulz, {buckets} buckets; means over "
        "the ranks"
    ).format(**report)
    lines = [title, "", f"{'source':<16}{'async copies':>14}{'launches':>12}"]
    lines += [
        f"{row['source']:<16}{row['async_copies']:>14,.2f}{row['launches']:>12,.2f}" for row in report["by_source"]
    ]
    mean = report["mean"]
    lines += [f"{'total':<16}{mean['async_copies']:>14,.2f}{mean['launches']:>12,.2f}", ""]
    lines += [f"collectives {mean['collectives']:g}, bytes sent to other ranks {mean['wire_bytes']:,.0f}"]
    by_pairs = ", ".join(f"{calls} of {pairs} pairs" for pairs, calls in report["batched_copies"]["by_pairs"].items())
    lines += [f"batched copies of more than one pair, over all ranks: {by_pairs or 'none'}"]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    run(main)
