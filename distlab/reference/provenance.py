"""The machine and the versions with which a record was made."""

from __future__ import annotations

import datetime
import os
import platform
import resource
import subprocess
from pathlib import Path
from typing import Any

import torch


def provenance(device: str) -> dict[str, Any]:
    """The device and its driver, cores, versions, and the day."""
    on_gpu = device == "cuda"
    return {
        "device": device,
        "device_name": torch.cuda.get_device_name() if on_gpu else cpu_name(),
        "cores": os.cpu_count(),
        "driver": _driver() if on_gpu else None,
        "torch": torch.__version__,
        "cuda": torch.version.cuda if on_gpu else None,
        "python": platform.python_version(),
        "date": datetime.date.today().isoformat(),
    }


def peak_memory(device: str) -> int:
    """Peak bytes: of tensors on the GPU, or of all the memory of this process."""
    if device == "cuda":
        return int(torch.cuda.max_memory_allocated())
    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return kilobytes if platform.system() == "Darwin" else kilobytes * 1024


def cpu_name() -> str:
    """The processor as the system calls it."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in text.splitlines() if "model name" in line]
    return names[0] if names else platform.machine()


def _driver() -> str | None:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        found = subprocess.run(query, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return found.stdout.split()[0]
