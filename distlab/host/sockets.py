"""The kernel's own record of a process's TCP connections: the process can't falsify it.

Linux tells it through ``NETLINK_SOCK_DIAG`` (sock_diag(7)): every socket of this network namespace
with its ``struct tcp_info``. ``/proc/PID/fd`` says which process has which sockets.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Iterable, Iterator

NETLINK_SOCK_DIAG, SOCK_DIAG_BY_FAMILY, TCP_INFO = 4, 20, 2  # linux/sock_diag.h, inet_diag.h
REQUEST_DUMP, DONE, ERROR = 0x301, 3, 2
HEADER, MESSAGE = 16, 72  # bytes of struct nlmsghdr and struct inet_diag_msg
INODE = 68  # offset in inet_diag_msg
BYTES_RECEIVED = 128  # offset in tcp_info, since Linux 4.1


def received_by(pids: Iterable[int]) -> dict[int, int] | None:
    """Bytes that the open TCP connections of each process have received; None where unknown."""
    owner = {inode: pid for pid in pids for inode in _sockets_of(pid)}
    total = dict.fromkeys(pids, 0)
    try:
        for inode, nbytes in _connections():
            if inode in owner:
                total[owner[inode]] += nbytes
    except (OSError, AttributeError):  # no Linux, or a sandbox without netlink
        return None
    return total


def _sockets_of(pid: int) -> list[int]:
    found = []
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                link = os.readlink(f"/proc/{pid}/fd/{name}")
                if link.startswith("socket:["):
                    found.append(int(link[8:-1]))
    return found


def _connections() -> Iterator[tuple[int, int]]:
    """(inode, bytes received) of every TCP connection."""
    for family in (socket.AF_INET, socket.AF_INET6):
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_SOCK_DIAG) as asked:
            asked.settimeout(5.0)
            wanted = 1 << (TCP_INFO - 1)
            body = struct.pack("=BBBxI48x", family, socket.IPPROTO_TCP, wanted, 0xFFF)
            size = HEADER + len(body)
            asked.send(struct.pack("=IHHII", size, SOCK_DIAG_BY_FAMILY, REQUEST_DUMP, 1, 0) + body)
            yield from _parsed(asked)


def _parsed(asked: socket.socket) -> Iterator[tuple[int, int]]:
    while True:
        data = asked.recv(1 << 17)
        while data:
            length, kind = struct.unpack_from("=IH", data)
            if kind == DONE:
                return
            if kind == ERROR:
                raise OSError("the kernel refuses to list sockets")
            (inode,) = struct.unpack_from("=I", data, HEADER + INODE)
            yield inode, _bytes_received(data[HEADER + MESSAGE : length])
            data = data[(length + 3) & ~3 :]


def _bytes_received(attributes: bytes) -> int:
    while len(attributes) >= 4:
        length, kind = struct.unpack_from("=HH", attributes)
        if kind == TCP_INFO and length >= 4 + BYTES_RECEIVED + 8:
            return int(struct.unpack_from("=Q", attributes, 4 + BYTES_RECEIVED)[0])
        attributes = attributes[max((length + 3) & ~3, 4) :]
    return 0
