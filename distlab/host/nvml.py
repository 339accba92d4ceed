"""The GPUs of this machine, as the driver's library (NVML) lists them.

NVML makes no CUDA context and starts no thread. So a process that asks it can still fork ranks that
use CUDA.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

try:
    import pynvml
except ImportError:
    pynvml = None


@dataclass(frozen=True)
class Gpu:
    """One GPU; ``memory`` in bytes, ``nvlinks`` is how many of its NVLink connections are up."""

    name: str
    memory: int
    nvlinks: int = 0


@dataclass(frozen=True)
class Driver:
    """The driver's answer; ``obstacle`` says why there is none."""

    version: str = ""
    gpus: tuple[Gpu, ...] = ()
    obstacle: str = ""


def driver() -> Driver:
    """The driver and all GPUs of this machine, whatever CUDA_VISIBLE_DEVICES says."""
    if pynvml is None:
        return Driver(obstacle="the package nvidia-ml-py is not installed")
    try:
        with _library():
            version = _text(pynvml.nvmlSystemGetDriverVersion())
            count = pynvml.nvmlDeviceGetCount()
            return Driver(version, tuple(_gpu(index) for index in range(count)))
    except pynvml.NVMLError_LibraryNotFound:
        return Driver(obstacle="no NVIDIA driver is installed")
    except pynvml.NVMLError as error:
        return Driver(obstacle=f"the NVIDIA driver does not answer: {error}")


@contextlib.contextmanager
def _library() -> Iterator[None]:
    pynvml.nvmlInit()
    try:
        yield
    finally:
        pynvml.nvmlShutdown()


def _gpu(index: int) -> Gpu:
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle).total
    return Gpu(_text(pynvml.nvmlDeviceGetName(handle)), int(memory), _nvlinks(handle))


def _nvlinks(handle: Any) -> int:
    """NVLink connections that are up; a GPU without NVLink does not know the question."""
    up = 0
    for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
        try:
            up += pynvml.nvmlDeviceGetNvLinkState(handle, link) == pynvml.NVML_FEATURE_ENABLED
        except pynvml.NVMLError:
            break
    return up


def _text(value: str | bytes) -> str:
    """The text of an answer: older versions of the library's package give bytes."""
    return value.decode() if isinstance(value, bytes) else value
