"""``distlab calibrate``: this machine as a cluster's file for ``distlab simulate``."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

DEFAULT = Path(".distlab/this-machine.yaml")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument(
        "--out", type=Path, default=DEFAULT, metavar="FILE", help=f"the file to write ({DEFAULT})"
    )
    parser.add_argument("--quick", action="store_true", help="a few sizes of each kind: a trial")


def main(options: argparse.Namespace, out: Console) -> int:
    """Measure, write the file, show what was measured and the next command."""
    if options.out.suffix not in (".yaml", ".yml"):
        raise ValueError(f"--out {options.out}: the file's name must end in .yaml")
    # start-up time: they import torch, and a wrong option need not wait for that
    from ..simulate.calibrate import calibrate
    from ..simulate.calibrate_table import summary

    cluster, kernels = calibrate(
        options.out, options.quick, lambda line: out.print(f"measuring {line}", highlight=False)
    )
    out.print(summary(cluster, kernels))
    out.print(f"{options.out}, {kernels.name}.yaml beside it", highlight=False, soft_wrap=True)
    ranks = " ".join(str(count) for count in sorted({1, cluster.gpus_per_node}))
    command = f"distlab simulate --cluster {options.out} --model mlp --gpus {ranks}"
    out.print(f"next: {command}", highlight=False, soft_wrap=True)
    return 0
