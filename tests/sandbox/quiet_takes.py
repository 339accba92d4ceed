"""A submission that takes more than its share.

Written as ``quiet_reads`` is.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

PLACES: dict[str, Any] = {}
PROBES: dict[str, Callable[[], object]] = {}
MIB = 1 << 20


def probe(name: str) -> Callable[[Callable[[], object]], Callable[[], object]]:
    def add(function: Callable[[], object]) -> Callable[[], object]:
        PROBES[name] = function
        return function

    return add


def filled(folder: str, most: int) -> int:
    """Bytes that could be written into files of 16 MiB, up to ``most``."""
    block, paths, total = bytes(MIB), [], 0
    with contextlib.suppress(OSError):
        while total < most:
            paths.append(f"{folder}/fill{len(paths)}")
            with open(paths[-1], "xb", buffering=0) as file:
                for _ in range(16):
                    total += file.write(block)
    for path in paths:
        with contextlib.suppress(OSError):
            os.unlink(path)
    return total


@probe("files that fill /tmp")
def _() -> object:
    return filled("/tmp", 2 * PLACES["tmp"]) > PLACES["tmp"]


@probe("files that fill /dev/shm")
def _() -> object:
    return filled("/dev/shm", 2 * PLACES["tmp"]) > PLACES["tmp"]


@probe("one large file")
def _() -> object:
    with open("/tmp/large", "xb") as file:
        os.unlink("/tmp/large")
        file.truncate(4 * PLACES["file"])
        return file.tell() or os.fstat(file.fileno()).st_size


@probe("memory of one process")
def _() -> object:
    try:
        return len(bytearray(PLACES["memory"]))
    except MemoryError:
        return None


def stopped(every: list[int]) -> None:
    for pid in every:
        os.kill(pid, 9)
        os.waitpid(pid, 0)


@contextlib.contextmanager
def children(most: int) -> Iterator[list[int]]:
    """As many sleeping children as can be had, up to ``most``."""
    found: list[int] = []
    try:
        with contextlib.suppress(OSError):
            while len(found) < most:
                pid = os.fork()
                if pid == 0:
                    while True:
                        signal.pause()
                found.append(pid)
        yield found
    finally:
        stopped(found)


@probe("processes")
def _() -> object:
    with children(2 * PLACES["processes"]) as found:
        return len(found) >= PLACES["processes"] and len(found)


@probe("threads")
def _() -> object:
    end, found = threading.Event(), 0
    try:
        while found < 2 * PLACES["processes"]:
            threading.Thread(target=end.wait, daemon=True).start()
            found += 1
    except RuntimeError:
        pass
    end.set()
    return found >= PLACES["processes"] and found


@probe("open files")
def _() -> object:
    found = []
    with contextlib.suppress(OSError):
        while len(found) < PLACES["open"]:
            found.append(os.open("/dev/null", os.O_RDONLY))
    for fd in found:
        os.close(fd)
    return len(found) >= PLACES["open"]


@probe("core dump")
def _() -> object:
    return resource.getrlimit(resource.RLIMIT_CORE)[1]
