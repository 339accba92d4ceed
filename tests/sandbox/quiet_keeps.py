"""A submission that keeps something for its next run, and looks for it then.

Written as ``quiet_reads`` is; ``PLACES["looks"]`` says which of the two. (A run may have code of a
solution beside it, which a later run is asked to write.)
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any

PLACES: dict[str, Any] = {}
PROBES: dict[str, Callable[[], object]] = {}
LIBC = ctypes.CDLL(None, use_errno=True)
FOLDERS = ("/tmp", "/dev/shm", "/var/tmp", "/run", "/", "/dev", "/dev/mqueue", os.getcwd())
MARK = "kept-for-the-next-run"


def both(name: str) -> Callable[[Callable[[], object]], Callable[[], object]]:
    """Registers a function that keeps, or a pair of it and one that looks."""

    def add(function: Callable[[], object]) -> Callable[[], object]:
        looks = name.startswith("look: ")
        if looks == bool(PLACES.get("looks")):
            PROBES[name] = function
        return function

    return add


def detached(do: Callable[[], object]) -> None:
    """A daemon that goes on."""
    pid = os.fork()
    if pid == 0:
        os.setsid()
        if os.fork() == 0:
            for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
                signal.signal(number, signal.SIG_IGN)
            do()
        os._exit(0)
    os.waitpid(pid, 0)


@both("files")
def _() -> object:
    for folder in FOLDERS:
        try:
            os.makedirs(f"{folder}/.{MARK}/{MARK}", exist_ok=True)
            with open(f"{folder}/{MARK}", "w") as file:
                file.write(MARK)
        except OSError:
            continue
    return None


@both("look: files")
def _() -> object:
    return [f"{f}/{n}" for f in FOLDERS if os.path.isdir(f) for n in os.listdir(f) if MARK in n]


@both("shared memory")
def _() -> object:
    segment = LIBC.shmget(0x5EC0DE, 4096, 0o1666)
    return segment < 0


@both("look: shared memory")
def _() -> object:
    return LIBC.shmget(0x5EC0DE, 0, 0) >= 0


@both("semaphores")
def _() -> object:
    return LIBC.semget(0x5EC0DE, 1, 0o1666) < 0


@both("look: semaphores")
def _() -> object:
    return LIBC.semget(0x5EC0DE, 0, 0) >= 0


@both("messages")
def _() -> object:
    return LIBC.msgget(0x5EC0DE, 0o1666) < 0


@both("look: messages")
def _() -> object:
    return LIBC.msgget(0x5EC0DE, 0) >= 0


@both("daemon")
def _() -> object:
    def listen() -> None:
        wire = socket.socket(socket.AF_UNIX)
        wire.bind("\0" + MARK)
        port = socket.create_server(("127.0.0.1", 18423))
        wire.listen()
        while wire and port:
            signal.pause()

    detached(listen)
    return None


@both("look: daemon")
def _() -> object:
    with socket.socket(socket.AF_UNIX) as wire:
        wire.connect("\0" + MARK)
        return "abstract socket"


@both("look: daemon's port")
def _() -> object:
    with socket.create_connection(("127.0.0.1", 18423), 1.0):
        return "port"


@both("look: processes")
def _() -> object:
    mine, found = {os.getpid(), os.getppid(), 1}, []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with open(f"/proc/{name}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
        if int(name) not in mine and int(fields[1]) not in mine and fields[0] not in "ZX":
            found.append(name)
    return found


@both("modules")
def _() -> object:
    sys.modules[MARK] = sys
    os.environ[MARK] = MARK
    return None


@both("look: modules")
def _() -> object:
    return MARK in sys.modules or MARK in os.environ


@both("look: working folder")
def _() -> object:
    return [name for name in os.listdir(".") if MARK in name]
