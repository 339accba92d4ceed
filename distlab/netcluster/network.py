"""Nodes on one machine: network namespaces joined by links of a chosen rate and latency.

Every node has a network of its own (``link0`` with an address, a loopback) and a host name
(``node0``, ``node1`` …); a switch joins the nodes. Both directions of each node's link pass a token
bucket (``tc`` kind tbf). So messages between nodes take as long as on a wire of that rate, while
ranks of one node talk over the loopback at memory speed. This needs Linux, and root or a kernel
that lets users make namespaces.
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from ..host import system

MOST_NODES = 64
INTERFACE = "link0"  # machines have no such name, so nobody counts the wrong interface
PACKAGES = {
    "ip": "iproute2",
    "tc": "iproute2",
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "mount": "mount",
}
RATE = re.compile(r"[1-9]\d*(\.\d+)?(kbit|mbit|gbit)")
DELAY = re.compile(r"\d+(\.\d+)?(us|ms|s)")
BURST = "128kb"  # passes at once after a pause; the kernel hands over up to 64 kB in one piece
QUEUE = "100ms"  # longest wait in the bucket's queue before packets are dropped


class ClusterUnavailable(OSError):
    """Raised if this machine can't make the cluster; the message says why."""


def shaping(rate: str | None, delay: str | None) -> tuple[list[str], list[str]]:
    """The ``tc`` commands for (the node's end, the switch's end) of a link, with ``{dev}`` open.

    The rate holds in both directions, and each way takes ``delay`` longer. Raises ValueError if a
    value is not of the form 200mbit, or 1ms.
    """
    if rate is not None and not RATE.fullmatch(rate):
        raise ValueError(f"the rate must be like 200mbit, 1gbit or 512kbit, not {rate!r}")
    if delay is not None and not DELAY.fullmatch(delay):
        raise ValueError(f"the delay must be like 1ms, 500us or 0.1s, not {delay!r}")
    bucket = f"tbf rate {rate} burst {BURST} latency {QUEUE}"
    add = "tc qdisc add dev {dev}"
    ingress = [f"{add} root {bucket}"] if rate else []
    if delay is None:
        return ingress, ingress
    egress = [f"{add} root handle 1: netem delay {delay} limit 100000"]
    return egress + ([f"{add} parent 1:1 handle 10: {bucket}"] if rate else []), ingress


def bytes_sent() -> int:
    """Bytes that the calling process's node has put on its link so far, headers included."""
    with open("/proc/self/net/dev") as file:
        for line in file:
            name, _, rest = line.partition(":")
            if name.strip() == INTERFACE:
                return int(rest.split()[8])
    raise ClusterUnavailable(f"there is no {INTERFACE}: this process is on no node of a cluster")


class Network:
    """``with Network(2, rate="200mbit") as net``: nodes, until the block ends or this process dies.

    ``rate`` and ``delay`` are those of each node's link, None for as fast as the machine is.
    Processes started through ``command`` end with the nodes. Raises ValueError for bad arguments,
    ClusterUnavailable with the reason where the machine can't make it.
    """

    def __init__(self, nodes: int, *, rate: str | None = None, delay: str | None = None) -> None:
        if not 1 <= nodes <= MOST_NODES:
            raise ValueError(f"a cluster has 1 to {MOST_NODES} nodes, not {nodes}")
        self.addresses = [f"10.77.0.{k + 1}" for k in range(nodes)]
        self.egress, self.ingress = shaping(rate, delay)
        self.fds: list[int] = []

    def __enter__(self) -> Network:
        flags = _privilege()
        self.own_user = bool(flags)
        self.channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        options = {
            "channel": theirs.fileno(),
            "interface": INTERFACE,
            "addresses": self.addresses,
            "egress": self.egress,
            "ingress": self.ingress,
        }
        init = [sys.executable, "-I", "-S", str(Path(__file__).with_name("switch.py"))]
        kinds = ["--net", "--uts", "--mount", "--pid", "--fork", "--mount-proc"]
        self.process = subprocess.Popen(
            [_tool("unshare"), *flags, *kinds, *init, json.dumps(options)],
            env=_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            pass_fds=[theirs.fileno()],
            start_new_session=True,  # Ctrl-C reaches this process, which then ends the cluster
        )
        theirs.close()
        try:
            answer, self.fds, _, _ = socket.recv_fds(
                self.channel, 1 << 16, 3 + 2 * MOST_NODES, socket.MSG_CMSG_CLOEXEC
            )
            if not answer:
                raise ClusterUnavailable(_reason(self._last_words()))
            if b"error" in answer:
                raise ClusterUnavailable(_reason(json.loads(answer)["error"]))
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _last_words(self) -> str:
        assert self.process.stderr is not None
        said = self.process.stderr.read().decode(errors="replace").strip().splitlines()
        return said[-1] if said else "the cluster's first process ended without a word"

    def close(self) -> None:
        """End all processes on the nodes, and the nodes; takes a second if a process
        does not end by itself."""
        self.channel.close()
        for fd in self.fds:
            os.close(fd)
        self.fds = []
        self.process.wait()
        assert self.process.stderr is not None
        self.process.stderr.close()

    def bytes_sent(self) -> list[int]:
        """Bytes that each node has put on its link so far, headers included."""
        self.channel.send(b"?")
        told = json.loads(self.channel.recv(1 << 16))
        return [told[f"port{node}"] for node in range(len(self.addresses))]

    def command(self, node: int, command: Sequence[str]) -> tuple[list[str], tuple[int, ...]]:
        """The command line that runs ``command`` on ``node``, and the descriptors to pass on."""
        user, mount, pid, *nodes = self.fds
        net, uts = nodes[2 * node : 2 * node + 2]
        fds = {"mount": mount, "pid": pid, "net": net, "uts": uts}
        enter = [f"--{kind}=/proc/self/fd/{fd}" for kind, fd in fds.items()]
        if self.own_user:
            enter += ["--preserve-credentials", f"--user=/proc/self/fd/{user}"]
        there = ["sh", "-c", 'cd "$0" && exec "$@"', os.getcwd()]  # a new mount namespace is at /
        return [_tool("nsenter"), *enter, "--", *there, *command], (user, *fds.values())

    def placement(self, nodes: Sequence[int]) -> Callable[[int], None]:
        """For ``run_ranks(…, enter=…)``: forked rank r moves to node ``nodes[r]``.

        Each gets the environment that a launcher would give it there.
        """

        def enter(rank: int) -> None:
            node = nodes[rank]
            self._move_here(node)
            os.environ.update(
                node_environment(),
                GROUP_RANK=str(node),
                GROUP_WORLD_SIZE=str(len(set(nodes))),
                LOCAL_RANK=str(Counter(nodes[:rank])[node]),
                LOCAL_WORLD_SIZE=str(Counter(nodes)[node]),
            )

        return enter

    def _move_here(self, node: int) -> None:
        """Move the calling process, which must have one thread only, to ``node``."""
        libc = ctypes.CDLL(None, use_errno=True)
        user = self.fds[:1] if self.own_user else []
        for fd in [*user, *self.fds[3 + 2 * node : 5 + 2 * node]]:
            if libc.setns(fd, 0):
                code = ctypes.get_errno()
                raise ClusterUnavailable(code, f"can't move to node {node}: {os.strerror(code)}")


def node_environment() -> dict[str, str]:
    """The settings that make gloo, NCCL and RPC talk over the node's link."""
    return {
        "GLOO_SOCKET_IFNAME": INTERFACE,
        "TP_SOCKET_IFNAME": INTERFACE,
        "NCCL_SOCKET_IFNAME": INTERFACE,
        "NCCL_IB_DISABLE": "1",
    }


def _environment() -> dict[str, str]:
    """The environment, with the folders in which distributions put ``ip`` and ``tc``."""
    return {**os.environ, "PATH": os.environ.get("PATH", "") + ":/usr/sbin:/sbin"}


def missing_tools() -> dict[str, str]:
    """The programs that a cluster needs and this machine lacks, each with its package."""
    path = _environment()["PATH"]
    return {name: of for name, of in PACKAGES.items() if shutil.which(name, path=path) is None}


def _tool(name: str) -> str:
    found = shutil.which(name, path=_environment()["PATH"])
    if found is None:
        raise ClusterUnavailable(f"`{name}` is not installed (package {PACKAGES[name]})")
    return found


@functools.cache
def _privilege() -> tuple[str, ...]:
    """The options of ``unshare`` with which this process may make namespaces."""
    if not (system.PROC / "self" / "ns" / "net").exists():
        raise ClusterUnavailable("a cluster on one machine needs network namespaces (Linux's)")
    for name in PACKAGES:
        _tool(name)
    said = ""
    for flags in ((), ("--user", "--map-root-user")):
        command = [_tool("unshare"), *flags, "--net", "--pid", "--fork", "--mount-proc", "true"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode == 0:
            return flags
        said = done.stderr.strip()
    raise ClusterUnavailable(
        f"no permission to make network namespaces ({said}): it takes root, or a kernel that lets "
        "users make namespaces"
    )


def _reason(said: str) -> str:
    """The message for a command's own error text."""
    if "netem" in said:
        return f"this kernel has no netem, which a delay needs ({said})"
    return f"this machine can't make a cluster: {said}"


@functools.cache
def cluster_obstacle(*, delay: bool = False) -> str | None:
    """Why this machine can't make a cluster (one line), or None. To find out, it makes one.

    ``delay``: whether links with latency are wanted; not every kernel has them.
    """
    try:
        with Network(2, rate="1gbit", delay="1ms" if delay else None):
            return None
    except ClusterUnavailable as obstacle:
        return str(obstacle)
