"""Run a program on a cluster on this machine: one torchrun agent per node, as on a real one."""

from __future__ import annotations

import json
import os
import re
import selectors
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..course.catalogue import root
from .network import Network, node_environment

PORT = 29500  # of the rendezvous; every cluster has a network, hence ports, of its own
PATIENCE = 3.0  # seconds that the other nodes' agents may take when one has failed
LINE = re.compile(rb"[^\r\n]*(?:\r\n|\r|\n)")
Write = Callable[[str, bytes], object]  # (stream, text)


@dataclass(frozen=True)
class Run:
    """How a program ended: its exit status, the output of all nodes, and the bytes that
    each sent on its link."""

    status: int
    stdout: str
    stderr: str
    sent: list[int]

    @property
    def result(self) -> Any:
        """The last line of standard output that is JSON: a program reports by printing it."""
        for line in reversed(self.stdout.splitlines()):
            try:
                return json.loads(line)
            except ValueError:
                continue
        raise ValueError(f"the program (status {self.status}) printed no JSON:\n{self.stderr}")


@dataclass
class _Agent:
    """One node's torchrun, and its last printed line as long as no newline ends it."""

    node: int
    process: subprocess.Popen[bytes]
    partial: dict[str, bytes] = field(default_factory=lambda: {"stdout": b"", "stderr": b""})

    def lines(self, stream: str, data: bytes) -> list[bytes]:
        """The lines that ``data`` completes; a carriage return ends one, too (progress bars)."""
        text = self.partial[stream] + data
        found = LINE.findall(text)
        self.partial[stream] = text[sum(map(len, found)) :]
        return found


def torchrun(command: Sequence[str], counts: Sequence[int], node: int, master: str) -> list[str]:
    """The agent's command line on ``node``; ``command`` as one would type it, ``counts`` of ranks.

    ``python`` is the Python that runs this, which has torch; a script may stand without it.
    """
    head, *rest = command
    if head in ("python", "python3"):
        program = [sys.executable, *rest]
    else:
        program = [sys.executable, *command] if head.endswith(".py") else [*command]
    nodes = len(counts)
    return [
        *(sys.executable, "-m", "distlab.netcluster.agent"),
        *map(str, (nodes, node, master, PORT)),
        *(f"--nnodes={nodes}", f"--node-rank={node}", f"--nproc-per-node={counts[node]}"),
        *(f"--master-addr={master}", f"--master-port={PORT}", "--no-python"),
        *program,
    ]


def run_cluster(
    command: Sequence[str],
    *,
    nodes: int = 2,
    ranks_per_node: int | Sequence[int] = 2,
    rate: str | None = None,
    delay: str | None = None,
    write: Write | None = None,
    timeout: float | None = None,
) -> Run:
    """Run ``command`` with torchrun on ``nodes`` nodes, to its end; nothing of it is left
    afterwards.

    ``ranks_per_node``: a number, or one per node. ``rate``, ``delay``: those of each node's link
    (see ``Network``). ``write``: called with every line at once. The status is that of the first
    agent that failed. The others are ended a few seconds later. Raises ValueError for bad
    arguments, ClusterUnavailable where the machine can't, TimeoutError after ``timeout`` seconds.
    """
    counts = [ranks_per_node] * nodes if isinstance(ranks_per_node, int) else [*ranks_per_node]
    if len(counts) != nodes:
        raise ValueError(f"ranks per node are given for {len(counts)} nodes, there are {nodes}")
    if min(counts, default=1) < 1:
        raise ValueError(f"a node has at least 1 rank, not {min(counts)}")
    if not command or command in (["python"], ["python3"]):
        raise ValueError("there is nothing to run: give a command, as in -- python -m my.module")
    with Network(nodes, rate=rate, delay=delay) as network:
        return _Job(network, command, counts, write, timeout).run()


class _Job:
    """The agents of one run, and their output."""

    def __init__(
        self,
        network: Network,
        command: Sequence[str],
        counts: list[int],
        write: Write | None,
        timeout: float | None,
    ) -> None:
        self.network, self.write = network, write
        self.deadline = float("inf") if timeout is None else time.monotonic() + timeout
        self.timeout = timeout
        self.printed: dict[str, list[bytes]] = {"stdout": [], "stderr": []}
        self.selector = selectors.DefaultSelector()
        self.agents = [self._start(node, command, counts) for node in range(len(counts))]

    def _start(self, node: int, command: Sequence[str], counts: list[int]) -> _Agent:
        argv = torchrun(command, counts, node, self.network.addresses[0])
        entered, fds = self.network.command(node, argv)
        environment = {"OMP_NUM_THREADS": "1", **os.environ, **node_environment()}
        paths = [str(root()), *filter(None, [os.environ.get("PYTHONPATH")])]
        process = subprocess.Popen(
            entered,
            env=environment | {"PYTHONUNBUFFERED": "1", "PYTHONPATH": os.pathsep.join(paths)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=fds,
            start_new_session=True,
        )
        agent = _Agent(node, process)
        for stream in ("stdout", "stderr"):
            pipe = getattr(process, stream)
            os.set_blocking(pipe.fileno(), False)
            self.selector.register(pipe, selectors.EVENT_READ, (agent, stream))
        return agent

    def run(self) -> Run:
        """Pass on the agents' output until all of them have ended."""
        status, patience = 0, float("inf")
        try:
            while any(agent.process.poll() is None for agent in self.agents):
                self._relay(0.1)
                failed = [code for agent in self.agents if (code := agent.process.poll())]
                if failed and not status:
                    status, patience = failed[0], time.monotonic() + PATIENCE
                now = time.monotonic()
                if now > self.deadline:
                    raise TimeoutError(f"still running after {self.timeout:g} s{self._tail()}")
                if now > patience:
                    break
            sent = self.network.bytes_sent()
        except BaseException:
            self.write = None  # the last words of an agent that is ended are of no use
            raise
        finally:
            self._end()
        status = status or next((a.process.returncode for a in self.agents), 0)
        out, err = (b"".join(self.printed[s]).decode(errors="replace") for s in self.printed)
        return Run(status if status >= 0 else 128 - status, out, err, sent)

    def _relay(self, wait: float) -> bool:
        """Pass on the output that has come; returns whether there was any."""
        ready = self.selector.select(wait)
        for key, _ in ready:
            agent, stream = key.data
            data = os.read(key.fd, 1 << 16)
            if not data:
                self.selector.unregister(key.fileobj)
                data = b"\n" if agent.partial[stream] else b""
            for line in agent.lines(stream, data):
                self._print(agent, stream, line)
        return bool(ready)

    def _print(self, agent: _Agent, stream: str, line: bytes) -> None:
        self.printed[stream].append(line)
        if self.write is not None:
            prefix = f"node{agent.node} | ".encode() if len(self.agents) > 1 else b""
            self.write(stream, prefix + line)

    def _tail(self) -> str:
        last = b"".join([*self.printed["stdout"][-5:], *self.printed["stderr"][-15:]])
        return ":\n" + last.decode(errors="replace") if last else ", nothing was printed"

    def _end(self) -> None:
        """End all processes of the cluster and take in their last output."""
        self.network.close()
        for agent in self.agents:
            agent.process.wait()
        while self._relay(0.0):
            pass
        for agent in self.agents:
            for pipe in (agent.process.stdout, agent.process.stderr):
                assert pipe is not None
                pipe.close()
        self.selector.close()
