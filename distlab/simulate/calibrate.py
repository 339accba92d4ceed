"""``distlab calibrate``: measure this machine, and write it as a cluster that can be simulated.

A CPU is measured core by core: a rank is one core with one thread, and gloo moves the bytes. With
GPUs a rank is a GPU, and NCCL moves them; their kernels are timed by ``benchmarks/kernels.py``. The
parts are kernels, the host's own time for an operator, the loss by company, and links.
"""

from __future__ import annotations

import datetime
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..course.catalogue import root
from ..hardware.clusters import Cluster
from ..hardware.kernels import Kernels
from ..host import gpus
from ..host.system import cores
from ..ranks import RankContext
from ..reference import sealed
from ..reference.provenance import provenance
from . import calibrate_host, calibrate_kernels, calibrate_links
from .calibrate_file import Machine, Measured, write
from .calibrate_fit import constants
from .calibrate_kernels import Row
from .starts import STARTS, starts

Say = Callable[[str], None]
LIMIT = 600.0  # seconds of all kernels
QUICK_STEPS = 9  # of the program that tells the host's time


def calibrate(path: Path, quick: bool, say: Say) -> tuple[Cluster, Kernels]:
    """Measure this machine and write ``path``; ``say`` gets a word before each part.

    Raises ValueError if a GPU's kernels can't be measured.
    """
    found = gpus.count()
    measured = _gpu(found, say) if found else _cpu(quick, say)
    machine = measured.machine
    sizes = calibrate_links.SIZES[::3] if quick else calibrate_links.SIZES
    for ranks in counts(machine.units):
        say(f"messages and collectives of {ranks} ranks")
        device = "cuda" if machine.on_gpu else "cpu"
        measured.links += calibrate_links.rows(ranks, device, quick, sizes)
    return write(measured, path)


def counts(units: int) -> list[int]:
    """The numbers of ranks that collectives are measured with: 2, 4 … and all."""
    powers = (2**power for power in range(1, 8))
    return sorted({*(ranks for ranks in powers if ranks < units), units} - {1})


def _cpu(quick: bool, say: Say) -> Measured:
    """Kernels and host of a core, and what company costs. Ranks have one thread each."""
    told = provenance("cpu")
    units = cores()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    machine = Machine(
        processor=f"a core of {told['device_name']}",
        units=units,
        on_gpu=False,
        memory=float(memory // units),
        source=_source(told["device_name"], told["date"], told["torch"]),
    )
    say(f"kernels of {machine.processor}")
    count = 1 if quick else STARTS
    gpu, kernels = constants(starts(_rows, 1, quick, count=1, timeout=LIMIT)[0])
    measured = Measured(machine=machine, gpu=gpu, kernels=kernels)
    say("the host's time for an operator")
    with tempfile.TemporaryDirectory() as folder:
        bare = Path(folder) / "no-host.yaml"
        measured.host = dict.fromkeys(calibrate_host.PHASES, 0.0)
        write(measured, bare)
        steps = QUICK_STEPS if quick else calibrate_host.STEPS
        measured.host = calibrate_host.host_seconds(bare, steps, count)
    say("collectives of one rank")
    measured.alone = calibrate_links.alone(count)
    if machine.units > 1:
        say(f"{machine.units} ranks that compute at once")
        measured.company = calibrate_host.company(machine.units, count)
    return measured


def _rows(ctx: RankContext, quick: bool) -> list[Row]:
    return list(calibrate_kernels.rows(quick))


def _gpu(count: int, say: Say) -> Measured:
    """Kernels of a GPU, timed by another process: this one forks ranks, and must not use GPUs."""
    say("kernels of a GPU, by python -m benchmarks.kernels: about 5 minutes")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernels.json"
        command = [sys.executable, "-m", "benchmarks.kernels", "--no-steps", "--out", str(file)]
        done = subprocess.run(
            command, cwd=root(), env=gpus.environment(), capture_output=True, text=True
        )
        if done.returncode:
            last = done.stderr.strip().splitlines() or ["it said nothing"]
            raise ValueError(f"python -m benchmarks.kernels failed: {last[-1]}")
        record = sealed.read(file, "record of kernels", "distlab calibrate")
    return of_record(record, count)


def of_record(record: dict[str, Any], count: int) -> Measured:
    """The kernels of a GPU from a file of ``benchmarks.kernels``, on a machine with ``count``."""
    gpu, kernels = constants(record["kernels"], record["multiprocessors"])
    today = datetime.date.today().isoformat()
    machine = Machine(
        processor=record["gpu"],
        units=count,
        on_gpu=True,
        memory=float(record["memory_bytes"]),
        source=_source(record["gpu"], today, record["torch"]),
    )
    return Measured(machine=machine, gpu=gpu, kernels=kernels)


def _source(name: str, date: str, torch: str) -> str:
    return f"measured by distlab calibrate on {name}, {date}, torch {torch}"
