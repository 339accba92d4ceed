"""A submission that reaches for other processes and for the network.

Written as ``quiet_reads`` is.
"""

from __future__ import annotations

import ctypes
import os
import socket
from collections.abc import Callable
from typing import Any

PLACES: dict[str, Any] = {}
PROBES: dict[str, Callable[[], object]] = {}
LIBC = ctypes.CDLL(None, use_errno=True)
JUDGES = ("global_gradients", "own_gradients", "wrong_divisor", "check_average")


def probe(name: str) -> Callable[[Callable[[], object]], Callable[[], object]]:
    def add(function: Callable[[], object]) -> Callable[[], object]:
        PROBES[name] = function
        return function

    return add


def read(path: str) -> bytes:
    with open(path, "rb", buffering=0) as file:
        return file.read(64)


def call(number: int, *args: object) -> int:
    """A system call by its number on x86-64; OSError where it is refused."""
    if os.uname().machine != "x86_64":
        raise OSError("the numbers are those of x86-64")
    result: int = LIBC.syscall(number, *args)
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def processes() -> list[int]:
    return [
        int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()
    ]


def first(try_one: Callable[[Any], object], every: Any) -> object:
    """What the first of them gives that gives anything."""
    for each in every:
        try:
            got = try_one(each)
        except OSError:
            continue
        if got:
            return each, got
    return None


# -- other processes ------------------------------------------------------------------------------
@probe("parent's memory")
def _() -> object:
    with open(f"/proc/{os.getppid()}/maps") as file:
        start = next(int(line.split("-")[0], 16) for line in file if " rw-p " in line)
    with open(f"/proc/{os.getppid()}/mem", "rb", buffering=0) as memory:
        memory.seek(start)
        return memory.read(16)


@probe("parent's memory, to write")
def _() -> object:
    return os.open(f"/proc/{os.getppid()}/mem", os.O_RDWR)


@probe("memory of any process")
def _() -> object:
    class Vector(ctypes.Structure):
        _fields_ = [("base", ctypes.c_void_p), ("size", ctypes.c_size_t)]

    buffer = ctypes.create_string_buffer(8)
    mine, theirs = Vector(ctypes.addressof(buffer), 8), Vector(id(object), 8)
    local, remote = ctypes.byref(mine), ctypes.byref(theirs)
    return first(lambda pid: call(310, pid, local, 1, remote, 1, 0), [os.getppid(), 1])


@probe("trace the parent")
def _() -> object:
    attached = call(101, 0x4206, os.getppid(), 0, 0) == 0  # PTRACE_SEIZE stops nobody
    call(101, 17, os.getppid(), 0, 0)
    return attached


@probe("parent's environment")
def _() -> object:
    return first(lambda pid: read(f"/proc/{pid}/environ"), [os.getppid()])


@probe("canary in an environment")
def _() -> object:
    def look(pid: int) -> bool:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return b"COURSE_CANARY" in file.read()

    return "COURSE_CANARY" in os.environ or first(look, processes())


@probe("grader among the processes")
def _() -> object:
    def look(pid: int) -> bool:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            command = file.read()
            return b"pytest" in command and b"bwrap" not in command

    return first(look, processes())


@probe("parent's descriptors")
def _() -> object:
    return os.listdir(f"/proc/{os.getppid()}/fd")


@probe("parent's descriptors, taken")
def _() -> object:
    pidfd = os.pidfd_open(os.getppid())
    return first(lambda fd: call(438, pidfd, fd, 0), range(20))


@probe("inherited descriptors")
def _() -> object:
    def look(fd: str) -> bool:
        held = os.readlink(f"/proc/self/fd/{fd}")
        return held.startswith(PLACES["outside"]) or (
            PLACES["alone"] and held.startswith("socket:")
        )

    return first(look, os.listdir("/proc/self/fd"))


# -- the network ----------------------------------------------------------------------------------
def connects(family: int, kind: int, address: Any) -> object:
    with socket.socket(family, kind) as wire:
        wire.settimeout(1.0)
        wire.connect(address)
        return address


@probe("port of the host's loopback")
def _() -> object:
    return connects(socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", PLACES["port"]))


@probe("abstract socket")
def _() -> object:
    return connects(socket.AF_UNIX, socket.SOCK_STREAM, "\0" + PLACES["name"])


@probe("socket in a file")
def _() -> object:
    return connects(socket.AF_UNIX, socket.SOCK_STREAM, PLACES["outside"] + "/socket")


@probe("network outside")
def _() -> object:
    return connects(socket.AF_INET, socket.SOCK_STREAM, ("192.0.2.1", 80))


@probe("name server")
def _() -> object:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as wire:
        return wire.sendto(bytes(12), ("192.0.2.1", 53))


@probe("IPv6 outside")
def _() -> object:
    with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as wire:
        return wire.sendto(bytes(12), ("2001:db8::1", 53))


@probe("multicast")
def _() -> object:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as wire:
        return wire.sendto(b"x", ("224.0.0.251", 5353))


@probe("raw packets")
def _() -> object:
    return socket.socket(socket.AF_PACKET, socket.SOCK_RAW).fileno()


@probe("host of a virtual machine")
def _() -> object:
    return socket.socket(40, socket.SOCK_STREAM).fileno()


@probe("the kernel's cipher sockets")
def _() -> object:
    return socket.socket(38, socket.SOCK_SEQPACKET).fileno()


@probe("other network devices")
def _() -> object:
    return [name for _, name in socket.if_nameindex() if name not in ("lo", "tunl0", "sit0")]
