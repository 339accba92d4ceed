"""The machine of a measurement: what it is, and how busy other programs keep it."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from distlab.reference.provenance import cpu_name

BUSY = 0.1  # processors that other programs use on average, from which on a start does not count


def fingerprint() -> dict[str, str | int]:
    """What a time depends on: processor, cores, memory, GPU, kernel, Python and torch."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "cpu": cpu_name(),
        "generation": cpu_generation(),
        "cores": os.cpu_count() or 1,
        "memory_gib": round(memory),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU",
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def cpu_generation(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's numbers and the vector instructions that torch uses. A virtual machine may
    call processors of several generations by the same name; their times are not comparable."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    told = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    names = {"cpu family": "family", "model": "model", "CPU part": "part"}
    numbers = [f"{name} {told[key]}" for key, name in names.items() if key in told]
    return ", ".join([*numbers, torch.backends.cpu.get_cpu_capability()])


def name_of(machine: dict[str, str | int]) -> str:
    """Eight digits that are the same for the same fingerprint."""
    return hashlib.sha256(json.dumps(machine, sort_keys=True).encode()).hexdigest()[:8]


def described(machine: dict[str, str | int]) -> str:
    """The fingerprint in one line. Older ones do not have the generation."""
    generation = f" ({machine['generation']})" if "generation" in machine else ""
    return (
        f"{machine['cpu']}{generation}, {machine['cores']} cores, "
        f"{machine['memory_gib']} GiB memory, {machine['gpu']}. {machine['system']}, "
        f"Python {machine['python']}, torch {machine['torch']}, gloo over loopback"
    )


def _busy_seconds(stat: Path = Path("/proc/stat")) -> float:
    """Seconds that all processors together were not free since the machine started. A virtual
    machine's processor that waits for the host's ("steal") is not free: another machine has it.
    0 where the system can't tell."""
    try:
        counted, *_ = stat.read_text(encoding="ascii").splitlines()
    except OSError:
        return 0.0
    _, user, nice, system, _, _, irq, softirq, stolen, *_ = counted.split()
    ticks = sum(map(int, (user, nice, system, irq, softirq, stolen)))
    return ticks / os.sysconf("SC_CLK_TCK")


def _own_seconds() -> float:
    """Seconds that this process and its children that have ended have worked."""
    return sum(os.times()[:4])


@dataclass
class Load:
    """Around a measurement: the load before and after, and the processors that others used."""

    before: float = 0.0
    after: float = 0.0
    others: float = 0.0

    def __enter__(self) -> Load:
        self.before = os.getloadavg()[0]
        self._begun = time.monotonic(), _busy_seconds() - _own_seconds()
        return self

    def __exit__(self, *_: object) -> None:
        moment, busy = self._begun
        elapsed = max(time.monotonic() - moment, 1e-9)
        self.others = max(0.0, (_busy_seconds() - _own_seconds() - busy) / elapsed)
        self.after = os.getloadavg()[0]

    @property
    def alone(self) -> bool:
        """Whether other programs left the machine to the measurement."""
        return self.others <= BUSY
