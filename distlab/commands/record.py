"""``distlab record``: reference runs of this machine, written with hashes to ``references/``.

Without ``--all`` one process trains each canonical workload in float64: the yardstick of the
checks. With it the solutions train each workload on one device and on all, in float32 (without
TF32) and in bfloat16. Where there are GPUs, everything of ``distlab doctor --cuda`` follows. Under
SLURM with several nodes the trainings on all devices run over all nodes of the job.
"""

from __future__ import annotations

import argparse
import itertools
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console

from ..course.catalogue import root
from ..host.terminal import say, short
from ..reference import sealed, shelf
from ..reference.compare import record as yardstick
from ..reference.compare import reference_path
from ..reference.workloads import WORKLOADS
from .gpu_run import Part, run, run_parts
from .machine_torch import usable_gpus

PRECISIONS = ("float32", "bfloat16")
MOST_ON_CPU = 4  # ranks, where there is no GPU
LIMIT = 1800.0  # seconds of one training
PORTS = 20_000  # the first of the ports at which nodes of a SLURM job meet


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("--all", action="store_true", help="on one device and on all; GPU checks")
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    parser.add_argument("--workload", help=f"one of {', '.join(sorted(WORKLOADS))}; default: all")
    parser.add_argument("--out", type=Path, help="folder; default: references")


def main(options: argparse.Namespace, out: Console) -> int:
    """Record the runs that the options ask for; returns 0 if all of them passed."""
    if int(os.environ.get("RANK", "0")):
        return 0  # under torchrun one process records, and it starts ranks itself
    if options.workload and options.workload not in WORKLOADS:
        known = ", ".join(sorted(WORKLOADS))
        raise ValueError(f"no workload {options.workload!r}: there are {known}")
    names, obstacle = usable_gpus() if options.device != "cpu" else ([], "")
    if options.device == "cuda" and not names:
        raise ValueError(f"this machine has no CUDA device ({obstacle}); use --device cpu")
    device = "cuda" if names else "cpu"
    folder = options.out or root() / "references"
    chosen = [options.workload] if options.workload else sorted(WORKLOADS)
    for name in chosen:
        _one_process(name, device, folder, out)
    if not options.all:
        return 0
    devices = len(names) or min(MOST_ON_CPU, os.cpu_count() or 1)
    failed = _trainings(trainings(chosen, device, devices, os.environ), device, folder, out)
    if names and not options.workload:
        # another look for GPUs would fork a process that has begun to use CUDA
        return max(failed, run_parts(names, folder, None, out))
    if not names:
        say(out, "the checks of the tier cuda and the bandwidth of NCCL need a GPU: not recorded")
    return failed


def _one_process(name: str, device: str, folder: Path, out: Console) -> None:
    torch.set_num_threads(1)
    data = yardstick(WORKLOADS[name], device)
    path = reference_path(device, name, folder)
    sealed.write(path, data)
    say(out, f"{short(path)}: {len(data['losses'])} steps, last loss {data['losses'][-1]:.4f}")


def _trainings(every: list[Training], device: str, folder: Path, out: Console) -> int:
    """Run the trainings; each record is written when its training ends. Returns 1
    if one failed, else 0."""
    failed = 0
    for training in every:
        with out.status(training.part.name):
            found = run(training.part)
        data = found["result"].get("training")
        if data is None or found["status"] != "passed":
            failed = 1
            say(out, f"{training.part.name}: {found['message']}", "bold red", label="NO  ")
            continue
        name, precision = training.workload, training.precision
        path = shelf.training_path(device, name, precision, data["ranks"], folder)
        sealed.write(path, data)
        say(out, f"{short(path)}: {found['message']}", label="ok  ")
    return failed


class Training(NamedTuple):
    """One training of the solutions, and the program that runs it."""

    workload: str
    precision: str
    part: Part


def trainings(
    workloads: Sequence[str], device: str, devices: int, environment: Mapping[str, str]
) -> list[Training]:
    """Every workload in every precision, on one device and on all devices.

    ``devices``: those of this node. ``environment`` says how many nodes SLURM has given the job.
    """
    nodes = int(environment.get("SLURM_JOB_NUM_NODES", "1"))
    where = [(1, 1)] + ([(devices, nodes)] if devices * nodes > 1 else [])
    found = []
    for each, over in where:
        count = f"{each * over} {'GPU' if device == 'cuda' else 'rank'}{'s' * (each * over > 1)}"
        prefix, launch = launcher(each, over, environment)
        for name, precision in itertools.product(workloads, PRECISIONS):
            program = ("benchmarks.training", name, "--precision", precision, "--device", device)
            command, title = (*launch, *program), f"{name} in {precision} on {count}"
            found.append(
                Training(name, precision, Part(title, device, command, LIMIT, prefix=prefix))
            )
    return found


def launcher(
    ranks: int, nodes: int, environment: Mapping[str, str]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The command that starts ``ranks`` ranks on each of ``nodes`` nodes: a prefix,
    and torchrun's options."""
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", str(ranks))
    if nodes == 1:
        return (), (*torchrun, "--standalone", "-m")
    head = environment.get("SLURMD_NODENAME", platform.node())  # this process is on the first one
    port = PORTS + int(environment["SLURM_JOB_ID"]) % 10_000
    meeting = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{head}:{port}")
    options = ("--nnodes", str(nodes), *meeting, "--rdzv-id", environment["SLURM_JOB_ID"], "-m")
    return ("srun", "--ntasks-per-node=1"), (*torchrun, *options)
