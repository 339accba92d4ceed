"""The first process of a cluster on one machine: it makes the nodes, and ends all processes in
them.

``Network`` starts it as process 1 of a PID namespace. It joins the nodes' network namespaces by a
switch (a Linux bridge), sends file descriptors of all namespaces to its parent and waits. When the
parent closes its end of the socket, on purpose or because it died, this process asks every process
of the cluster to end. When it ends itself a moment later, the kernel kills the rest, and the
namespaces vanish with their interfaces. Nothing has a name on the machine, so nothing collides or
stays.

It uses only the standard library and imports nothing of the course, because it runs before anything
else.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from typing import Any

CLONE_NEWUTS, CLONE_NEWNET = 0x04000000, 0x40000000
GRACE = 1.0  # seconds between SIGTERM and SIGKILL for processes that still run at the end
_libc = ctypes.CDLL(None, use_errno=True)


def sh(command: str, *, pass_fds: tuple[int, ...] = ()) -> None:
    """Run a command; OSError with its error text if it fails."""
    done = subprocess.run(command.split(), capture_output=True, text=True, pass_fds=pass_fds)
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise OSError(f"`{command}`: {said[0] if said else f'status {done.returncode}'}")


def call(name: str, *args: int) -> None:
    """A system call by its name; OSError if it fails."""
    if getattr(_libc, name)(*args):
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")


def namespace(kind: str) -> int:
    """A file descriptor of this process's namespace."""
    return os.open(f"/proc/self/ns/{kind}", os.O_RDONLY | os.O_CLOEXEC)


def name_hosts(addresses: list[str]) -> None:
    """Let every node find the others by name, through an /etc/hosts that only the cluster sees."""
    lines = ["127.0.0.1 localhost"]
    for node, address in enumerate(addresses):
        lines += [f"{address} node{node}", f"::ffff:{address} node{node}"]  # sockets of either kind
    with tempfile.NamedTemporaryFile("w", prefix="distlab-hosts-") as file:
        file.write("\n".join(lines) + "\n")
        file.flush()
        os.chmod(file.name, 0o644)
        sh(f"mount --bind {file.name} /etc/hosts")


def make_node(node: int, switch: int, options: dict[str, Any]) -> list[int]:
    """Node ``node`` with its link to the switch; its network and host name namespaces."""
    call("unshare", CLONE_NEWNET | CLONE_NEWUTS)
    socket.sethostname(f"node{node}")
    name, address = options["interface"], options["addresses"][node]
    sh(
        f"ip link add name {name} type veth peer name port{node} netns /proc/self/fd/{switch}",
        pass_fds=(switch,),
    )
    sh(f"ip address add {address}/24 dev {name}")
    sh("ip link set lo up")
    sh(f"ip link set {name} up")
    for command in options["egress"]:
        sh(command.format(dev=name))
    made = [namespace("net"), namespace("uts")]
    call("setns", switch, CLONE_NEWNET)
    sh(f"ip link set port{node} master switch up")
    for command in options["ingress"]:
        sh(command.format(dev=f"port{node}"))
    return made


def traffic() -> dict[str, int]:
    """Bytes that each node has put on its link so far, by the name of the switch's port."""
    with open("/proc/self/net/dev") as file:
        rows = [line.split(":") for line in file if ":" in line]
    return {name.strip(): int(rest.split()[0]) for name, rest in rows}


def end_all() -> None:
    """Ask all other processes of the cluster to end; the kernel kills those that don't."""
    deadline = time.monotonic() + GRACE
    try:
        os.kill(-1, signal.SIGTERM)
        while time.monotonic() < deadline:
            time.sleep(0.02)
            os.kill(-1, 0)
    except ProcessLookupError:
        pass


def main() -> None:
    """Make the cluster that the parent asks for, then answer until the parent has gone."""
    options = json.loads(sys.argv[1])
    channel = socket.socket(fileno=options["channel"])
    os.set_inheritable(channel.fileno(), False)
    try:
        name_hosts(options["addresses"])
        switch, fds = namespace("net"), [namespace("user"), namespace("mnt"), namespace("pid")]
        sh("ip link add name switch type bridge")
        sh("ip link set switch up")
        for node in range(len(options["addresses"])):
            fds += make_node(node, switch, options)
    except OSError as error:
        channel.send(json.dumps({"error": str(error)}).encode())
        return
    socket.send_fds(channel, [b"{}"], fds)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # orphans come to this process: none stays
    while channel.recv(1):
        channel.send(json.dumps(traffic()).encode())
    end_all()


if __name__ == "__main__":
    main()
