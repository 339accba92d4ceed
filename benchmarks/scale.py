"""The cost of simulating 64 to 16,384 GPUs, by whole commands: equal GPUs are run once."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

from .common import Table

GPUS = (64, 256, 1024, 4096, 16_384)
RUNS = {
    "GPT-7B, FSDP": ("--model", "gpt-7b", "--strategy", "fsdp"),
    "GPT-175B, tensor 8 x pipeline 8": ("--model", "gpt-175b", "--tensor", "8", "--pipeline", "8"),
}


def cost(arguments: Sequence[str]) -> tuple[float, float, float]:
    """Wall-clock seconds, CPU seconds and peak MB of ``distlab simulate`` with ``arguments``."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "distlab", "simulate", *arguments, "--out", folder]
        begun = time.perf_counter()
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        _, status, used = os.wait4(process.pid, 0)
        took = time.perf_counter() - begun
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return took, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024


def measure(gpus: Sequence[int] = GPUS) -> Table:
    """One run of each."""
    rows = []
    for name, arguments in RUNS.items():
        for count in gpus:
            wall, cpu, peak = cost([*arguments, "--gpus", str(count)])
            rows.append([name, f"{count:,}", f"{wall:.0f}", f"{cpu:.1f}", f"{peak:,.0f}"])
    return Table(
        "Virtual ranks: scale",
        ["what", "GPUs", "wall clock, s", "CPU, s", "memory, MB"],
        rows,
        "One step with `distlab simulate`, the whole command with its start. GPUs of one role are "
        "run once. CPU is that of all its processes, user and system. Memory is that of the "
        "process with most. Goals for 16,384 GPUs: 20 CPU seconds and 2 GB.",
    )


if __name__ == "__main__":
    print(measure().markdown())
