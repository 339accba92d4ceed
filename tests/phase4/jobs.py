"""Jobs for the checks of exercise 4.5: torchrun's agent, whose workers are forked, and a program.

The agent is the real one (rendezvous, restarts); forked workers have torch already, so a job with a
restart takes a second. What is killed is killed: processes, by signals.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

STEPS, SAVE_EVERY = 12, 4
FOREVER = 600.0


class Toy:
    """A state of one vector and its momentum; steps give the same bits on every world size."""

    def __init__(self) -> None:
        self.weight = torch.ones(6, dtype=torch.float64)
        self.momentum = torch.zeros(6, dtype=torch.float64)

    def step(self, k: int) -> None:
        gradient = torch.arange(6, dtype=torch.float64) + k
        if dist.is_initialized():
            dist.all_reduce(gradient)  # of equal integers: exact
            gradient /= dist.get_world_size()
        self.momentum.mul_(0.9).add_(gradient)
        self.weight.mul_(0.99).sub_(self.momentum, alpha=0.01)

    def capture(self, position: int):
        return {"weight": self.weight, "momentum": self.momentum, "position": position}, {}

    def restore(self, saved) -> None:
        self.weight = saved.shared["weight"].clone()
        self.momentum = saved.shared["momentum"].clone()


def uninterrupted() -> list[float]:
    """The weights after STEPS steps of one process."""
    toy = Toy()
    for k in range(STEPS):
        toy.step(k)
    return toy.weight.tolist()


def note(folder: Path, **fields: object) -> None:
    """Append a line to the job's log; lines of several processes don't mix."""
    number = os.open(folder / "log", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(number, (json.dumps(fields) + "\n").encode())
    os.close(number)


def notes(folder: Path, kind: str) -> list[dict]:
    """The log's lines of one kind, in the order of time."""
    lines = (folder / "log").read_text().splitlines() if (folder / "log").exists() else []
    return [entry for entry in map(json.loads, lines) if entry["kind"] == kind]


def once(folder: Path, name: str) -> bool:
    """True the first time only, over all processes of a job."""
    try:
        os.close(os.open(folder / name, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def oversleep() -> None:
    """Where a rank hangs: its report should show this function."""
    time.sleep(FOREVER)


FAULTS: dict[str, Callable[[], object]] = {
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stopped": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "sleeps": oversleep,
    "told": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "raises": lambda: 1 // 0,
}


def kill_in_save(number: int) -> None:
    """From now on the ``number``-th flush to the disk kills this process before it is done."""
    real, left = os.fsync, [number]

    def fsync(file) -> None:
        left[0] -= 1
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)
        real(file)

    os.fsync = fsync


def worker(impl, folder: Path, faults: dict[tuple[int, int], str], timeout: float) -> None:
    """The program of one worker; ``faults``: what happens, once, before a step on a rank."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a forked worker has its agent's handler
    name = impl.join()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    beats = impl.Heartbeat(folder / "beats", rank, world_size, name)
    toy = Toy()

    def step(k: int) -> None:
        fault = faults.get((rank, k))
        if fault and once(folder, f"fault-{rank}-{k}"):
            note(folder, kind="fault", rank=rank, step=k, what=fault, at=time.time())
            if fault.startswith("killed in save"):
                kill_in_save(int(fault.rpartition(" ")[2]))
            else:
                FAULTS[fault]()
        beats.beat(k, "communicate")
        toy.step(k)
        fields = {"kind": "step", "attempt": name, "rank": rank, "step": k}
        note(folder, **fields, world_size=world_size, pid=os.getpid())

    store = impl.module("fault_tolerance").CheckpointStore(folder / "checkpoints")
    with impl.Watchdog(beats, timeout), impl.PreemptionGuard() as guard:
        done = impl.train(
            step,
            steps=STEPS,
            save_every=SAVE_EVERY,
            store=store,
            state=toy,
            guard=guard,
            heartbeat=beats,
        )
    fields = {"rank": rank, "attempt": name, "done": done, "weight": toy.weight.tolist()}
    note(folder, kind="end", **fields)
    dist.destroy_process_group()
    if done < STEPS:
        os._exit(impl.EXIT_PREEMPTED)


def agent(
    impl,
    folder: Path,
    ranks: int,
    faults: dict[tuple[int, int], str],
    *,
    timeout: float = 30.0,
    restarts: int = 2,
    nodes: tuple[int, int] = (1, 1),
    endpoint: str = "localhost:0",
) -> SimpleNamespace:
    """Run the program under an agent in this process; its log, and whether it ended well."""
    config = LaunchConfig(
        min_nodes=nodes[0],
        max_nodes=nodes[1],
        nproc_per_node=ranks,
        run_id="job",
        rdzv_backend="c10d",
        rdzv_endpoint=endpoint,
        rdzv_configs={
            "keep_alive_interval": 1,
            "keep_alive_max_attempt": 2,
            "last_call_timeout": 1,
        },
        local_addr="localhost",
        max_restarts=restarts,
        monitor_interval=0.05,
        start_method="fork",
        logs_specs=DefaultLogsSpecs(log_dir=str(folder)),
    )
    try:
        elastic_launch(config, worker)(impl, folder, faults, timeout)
    except ChildFailedError:
        return log_of(folder, ended=False)
    return log_of(folder, ended=True)


def log_of(folder: Path, ended: bool) -> SimpleNamespace:
    """What a job wrote: plain data."""
    steps = notes(folder, "step")
    attempts = list(dict.fromkeys(entry["attempt"] for entry in steps))
    reports = sorted((folder / "beats").glob("report*.txt"))
    return SimpleNamespace(
        ended=ended,
        steps=steps,
        ends=notes(folder, "end"),
        faults=notes(folder, "fault"),
        attempts=[[e for e in steps if e["attempt"] == a] for a in attempts],
        reports=[path.read_text() for path in reports],
    )
