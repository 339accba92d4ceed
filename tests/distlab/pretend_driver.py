"""Stand-ins for what a machine with GPUs says, and what commands print."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

from rich.console import Console

GIB = 2**30
NAME = "NVIDIA H100 80GB HBM3"
GPUS = [NAME, NAME]


def text_of(call: Any, *arguments: Any) -> tuple[int, str]:
    """The status of a command, and what it printed."""
    out = io.StringIO()
    status = call(*arguments, Console(file=out, width=100, color_system=None))
    return status, out.getvalue()


class Nvml:
    """The driver's library of a machine with these GPUs; ``links``: NVLinks that are up on each."""

    NVML_NVLINK_MAX_LINKS, NVML_FEATURE_ENABLED = 18, 1

    class NVMLError(Exception):
        pass

    class NVMLError_LibraryNotFound(NVMLError):
        pass

    def __init__(self, names: list[str | bytes], links: int = 0, down: bool = False) -> None:
        self.names, self.links, self.down, self.open = names, links, down, 0

    def nvmlInit(self) -> None:
        if self.down:
            raise self.NVMLError("Driver/library version mismatch")
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlSystemGetDriverVersion(self) -> bytes:
        return b"570.86.15"

    def nvmlDeviceGetCount(self) -> int:
        return len(self.names)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetName(self, handle: int) -> str | bytes:
        return self.names[handle]

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(total=80 * GIB)

    def nvmlDeviceGetNvLinkState(self, handle: int, link: int) -> int:
        if not self.links:
            raise self.NVMLError("Not Supported")
        return int(link < self.links)
