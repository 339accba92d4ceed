"""The elastic program under the real torchrun: workers and a whole node are killed.

The node that stays is one of new processes, the others are forked.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend

from distlab.course.catalogue import root
from distlab.host.system import loopback, tells_of_processes
from distlab.reference.workloads import WORKLOADS, build_model, build_optimizer, digits, epoch_order
from tests.at_exit.expected import environment, no_threads_left
from tests.forked_agents import Child, processes_of, ranks_of, start

EPOCHS, BATCH, SAVE_EVERY = 2, 48, 10
LIMIT = 120.0  # seconds for a job, on a busy machine
needs_children = pytest.mark.skipif(
    not tells_of_processes(), reason="no /proc that lists an agent's ranks, which the test kills"
)


def uninterrupted() -> list[float]:
    """The losses of one process."""
    torch.set_num_threads(1)
    chosen, data = WORKLOADS["digits_mlp"], digits()
    model = build_model(chosen.model, chosen.seed)
    optimizer = build_optimizer(chosen, model)
    losses = []
    for epoch in range(EPOCHS):
        for batch in epoch_order(len(data), chosen.seed, epoch).split(BATCH):
            inputs, targets = data[batch]
            loss = F.cross_entropy(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


class Job:
    """Agents that train in one folder, the lines they log, and what is to be ended at the end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.agents: list[Child | subprocess.Popen[bytes]] = []

    def output(self, agent: int) -> Path:
        """The output of an agent and its workers."""
        return self.folder / f"output{agent}"

    def start(self, *options: str, forks: int = 0) -> Child | subprocess.Popen[bytes]:
        """One agent. It and up to ``forks`` workers are forked; without, they are all new."""
        program = ["-m", "solutions.phase4_production.train_elastic", "--folder", str(self.folder)]
        program += ["--epochs", str(EPOCHS), "--global-batch", str(BATCH)]
        program += ["--save-every", str(SAVE_EVERY), "--pause", "0.1"]
        logs = ["--log-dir", str(self.folder / "logs"), "--monitor-interval", "0.1"]
        command = [sys.executable, "-m", "torch.distributed.run", *logs, *options, *program]
        environ = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": loopback()}
        environ = {**os.environ, **environ, **environment(self.folder / "ends")}
        out = self.output(len(self.agents))
        if forks:
            self.agents.append(start(command, out, environ, forks))
        else:
            with open(out, "wb") as output:
                self.agents.append(
                    subprocess.Popen(command, cwd=root(), stdout=output, stderr=output, env=environ)
                )
        return self.agents[-1]

    def workers(self, agent: Child | subprocess.Popen[bytes]) -> list[int]:
        """The processes that an agent has started."""
        return ranks_of(agent.pid, self.output(self.agents.index(agent)))

    def lines(self) -> list[dict]:
        """The log so far."""
        path = self.folder / "log.jsonl"
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text.splitlines() if line.endswith("}")]

    def wait(self, happened: Callable[[], bool]) -> None:
        """Wait until something has happened; fail with the agents' output."""
        end = time.monotonic() + LIMIT
        while not happened():
            if time.monotonic() > end:
                said = [path.read_text()[-3000:] for path in sorted(self.folder.glob("output*"))]
                pytest.fail("nothing happens:\n" + "\n---\n".join(said))
            time.sleep(0.02)

    def end(self) -> None:
        """Leave nothing running."""
        for number, agent in enumerate(self.agents):
            agent.kill()
            agent.wait()
            for pid in processes_of(self.output(number)):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def kill_node(self, agent: Child | subprocess.Popen[bytes]) -> None:
        """End a node as a power failure does."""
        workers = self.workers(agent)
        agent.kill()
        for pid in workers:
            os.kill(pid, signal.SIGKILL)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    job = Job(tmp_path)
    try:
        yield job
    finally:
        job.end()


def expect_curve(lines: list[dict]) -> None:
    """Every step's last loss is that of the uninterrupted run."""
    losses = {line["step"]: line["loss"] for line in lines}
    want = uninterrupted()
    assert sorted(losses) == list(range(1, len(want) + 1))
    assert [losses[step] for step in sorted(losses)] == pytest.approx(want, rel=1e-3, abs=1e-4)


@needs_children
def test_worker_is_killed_under_torchrun(job: Job) -> None:
    agent = job.start("--standalone", "--nproc-per-node", "2", "--max-restarts", "2", forks=4)
    job.wait(lambda: len(job.lines()) > 14)
    os.kill(job.workers(agent)[1], signal.SIGKILL)
    job.wait(lambda: agent.poll() is not None)
    assert agent.returncode == 0
    no_threads_left(job.folder / "ends", 2)
    lines = job.lines()
    attempts = list(dict.fromkeys(line["attempt"] for line in lines))
    steps = [{line["step"] for line in lines if line["attempt"] == a} for a in attempts]
    assert len(steps) == 2
    assert len(steps[0] & steps[1]) <= SAVE_EVERY
    assert min(steps[1]) > SAVE_EVERY, "it began from scratch"
    expect_curve(lines)


def joined(store: dist.Store) -> int:
    """How many nodes have come to the meeting, as torch's agents write it into the store."""
    key, nobody = "torch.rendezvous.job", C10dRendezvousBackend._NULL_SENTINEL.encode()
    if not store.check([key]) or (state := store.get(key)) == nobody:
        return 0
    return len(pickle.loads(base64.b64decode(state)).participants)


@needs_children
def test_node_is_killed_and_the_other_goes_on(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two agents; one is killed together with its worker, the other goes on alone."""
    # nodes that share the agents' store meet at the address of the first meeting, whoever is left
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    options = ["--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "3"]
    options += ["--rdzv-id", "job", "--rdzv-backend", "c10d", "--local-addr", "localhost"]
    options += ["--rdzv-endpoint", f"localhost:{store.port}", "--rdzv-conf"]
    settings = "is_host=0,keep_alive_interval=1,keep_alive_max_attempt=6,last_call_timeout="
    # the first waits for the second as long as that takes; the second, left alone, for nobody
    first = job.start(*options, f"{settings}{LIMIT:.0f}", forks=1)
    job.wait(lambda: joined(store) > 0)
    second = job.start(*options, f"{settings}1")
    job.wait(lambda: sum(line["world_size"] == 2 for line in job.lines()) > 14)
    job.kill_node(first)
    job.wait(lambda: second.poll() is not None)
    assert second.returncode == 0
    assert job.lines()[-1]["world_size"] == 1
    expect_curve(job.lines())
