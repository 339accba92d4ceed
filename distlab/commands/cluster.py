"""distlab cluster run: a program on several nodes on this machine."""

from __future__ import annotations

import argparse
import sys

from rich.console import Console

from ..host.processes import TERMINATED, Terminated
from ..netcluster import run_cluster


def add_arguments(cluster: argparse.ArgumentParser) -> None:
    """The options of the command."""
    actions = cluster.add_subparsers(dest="action", required=True)
    started = actions.add_parser(
        "run",
        help="run a program under torchrun on nodes with links of a chosen speed",
        usage="distlab cluster run [options] -- python -m my.module [arguments]",
    )
    started.add_argument("--nodes", type=int, default=2)
    started.add_argument("--ranks-per-node", default="2", help="2, or one number per node: 3,1")
    started.add_argument("--rate", help="of each node's link, 200mbit; default: no limit")
    started.add_argument("--delay", help="of each node's link, 1ms (the kernel must have netem)")
    started.add_argument("program", nargs=argparse.REMAINDER, metavar="-- command")


def main(options: argparse.Namespace, out: Console) -> int:
    """Run a program on a cluster on this machine; its exit status."""

    def write(stream: str, text: bytes) -> None:
        file = getattr(sys, stream)
        file.buffer.write(text)
        file.flush()

    try:
        counts = [int(count) for count in options.ranks_per_node.split(",")]
    except ValueError:
        raise ValueError(f"--ranks-per-node: 2 or 3,1, not {options.ranks_per_node!r}") from None
    try:
        done = run_cluster(
            options.program[1:] if options.program[:1] == ["--"] else options.program,
            nodes=options.nodes,
            ranks_per_node=counts if len(counts) > 1 else counts[0],
            rate=options.rate,
            delay=options.delay,
            write=write,
        )
    except KeyboardInterrupt as end:
        print("distlab: interrupted, everything on the nodes has ended", file=sys.stderr)
        return TERMINATED if isinstance(end, Terminated) else 130
    sent = ", ".join(f"node{node} {count / 1e6:.1f} MB" for node, count in enumerate(done.sent))
    print(f"distlab: sent between nodes: {sent}", file=sys.stderr)
    return done.status
