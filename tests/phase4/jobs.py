"""Jobs for the checks of exercises 4.5 and 4.14: torchrun's agent, forked workers, and a program.

The agent is the real one (rendezvous, restarts); forked workers have torch already, so a job with a
restart takes a second. What is killed is killed: processes, by signals.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import dynamic_rendezvous
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.multiprocessing import ProcessContext

from distlab.host.program_clock import ProgramClock

SIZE, BATCH, EPOCHS, SAVE_EVERY = 22, 4, 2, 4
STEPS = EPOCHS * 6  # the last batch of an epoch has 2 samples
FOREVER, PATIENCE, SLOW = 600.0, 4.0, 1.5  # seconds: a hang, watchdogs' timeout, a slow step
STILL = 3 * PATIENCE  # seconds: a job that does nothing for that long hangs, its watchdogs as well
KEPT = 2.0  # seconds: for less than that no busy machine makes a watchdog too late
SLOW_PACE = 5  # times as long
SEED = 5


class Toy:
    """A state of one vector and its momentum; steps give the same bits on every world size."""

    def __init__(self) -> None:
        self.weight = torch.ones(6, dtype=torch.float64)
        self.momentum = torch.zeros(6, dtype=torch.float64)

    def step(self, samples: list[int]) -> None:
        gradient = torch.arange(6, dtype=torch.float64) * sum(samples)
        if dist.is_initialized():
            dist.all_reduce(gradient)  # integers: exact in any order
        self.momentum.mul_(0.9).add_(gradient)
        self.weight.mul_(0.99).sub_(self.momentum, alpha=0.01)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"weight": self.weight, "momentum": self.momentum}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.weight, self.momentum = state["weight"].clone(), state["momentum"].clone()


def uninterrupted() -> tuple[list[list[int]], list[float]]:
    """The samples of each step, sorted, and the weights at the end, of one process."""
    toy, samples = Toy(), []
    for epoch in range(EPOCHS):
        generator = torch.Generator().manual_seed(SEED + epoch)
        for batch in torch.randperm(SIZE, generator=generator).split(BATCH):
            toy.step(batch.tolist())
            samples.append(sorted(batch.tolist()))
    return samples, toy.weight.tolist()


def note(folder: Path, **fields: object) -> None:
    """Append a line to the job's log; lines of several processes don't mix."""
    number = os.open(folder / "log", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(number, (json.dumps(fields) + "\n").encode())
    os.close(number)


def notes(folder: Path, kind: str) -> list[dict[str, Any]]:
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
    "slow": lambda: time.sleep(SLOW),  # for each PATIENCE of the time-out
}


def kill_in_save(number: int, tell: Callable[[], None]) -> None:
    """From now on the ``number``-th flush to the disk kills this process before it is done."""
    real, left = os.fsync, [number]

    def fsync(file: Any) -> None:
        left[0] -= 1
        if not left[0]:
            tell()
            os.kill(os.getpid(), signal.SIGKILL)
        real(file)

    os.fsync = fsync


def worker(impl: Any, folder: Path, faults: dict[tuple[int, int], str], timeout: float) -> None:
    """The program of one worker; ``faults``: what happens, once, before a step on a rank."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a forked worker has its agent's handler
    watchdog, recovery = impl.module("watchdog"), impl.module("recovery")
    name = impl.module("joining").join()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    note(folder, kind="begin", attempt=name, rank=rank)
    beats = watchdog.Heartbeat(folder / "beats", rank, world_size, name)
    elastic, resume = impl.module("elastic_sampler"), impl.module("resume")
    toy = Toy()
    sampler = elastic.ElasticSampler(
        SIZE, global_batch_size=BATCH, rank=rank, world_size=world_size, seed=SEED
    )
    loader = torch.utils.data.DataLoader(range(SIZE), batch_sampler=sampler, collate_fn=list)

    passed = [0]

    def step(batch: list[int], position: Any) -> None:
        number, beaten = position.step, beats.latest.count > passed[0]
        fault = faults.get((rank, number))
        if fault and once(folder, f"fault-{rank}-{number}"):
            tell = lambda: note(folder, kind="fault", rank=rank, step=number, what=fault)
            if fault.startswith("killed in save"):
                kill_in_save(int(fault.rpartition(" ")[2]), tell)
            else:
                tell()
                for _ in range(round(timeout / PATIENCE) if fault == "slow" else 1):
                    FAULTS[fault]()
        beats.beat(number, "communicate")
        passed[0] = beats.latest.count
        toy.step(batch)
        fields = {"kind": "step", "attempt": name, "rank": rank, "step": number, "beaten": beaten}
        note(folder, **fields, samples=batch, world_size=world_size)

    store = impl.module("fault_tolerance").CheckpointStore(folder / "checkpoints")
    with watchdog.Watchdog(beats, timeout), recovery.PreemptionGuard() as guard:
        done = recovery.train(
            step,
            loader,
            epochs=EPOCHS,
            save_every=SAVE_EVERY,
            store=store,
            state=resume.TrainingState(sampler=sampler, toy=toy),
            guard=guard,
            heartbeat=beats,
        )
    note(folder, kind="end", rank=rank, attempt=name, done=done, weight=toy.weight.tolist())
    dist.destroy_process_group()
    if not done:
        os._exit(watchdog.EXIT_PREEMPTED)


def agent(
    impl: Any,
    folder: Path,
    ranks: int,
    faults: dict[tuple[int, int], str],
    timeout: float,
    restarts: int,
) -> None:
    """Run the program under an agent in this process; ends it with status 0 or 1."""
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id="job",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=restarts,
        monitor_interval=0.05,
        start_method="fork",
        logs_specs=DefaultLogsSpecs(log_dir=str(folder)),
    )
    # torch names each step of the meeting after its whole stack, with sources: seconds under pytest
    dynamic_rendezvous.get_method_name = lambda depth=2: "agent"
    tempfile.tempdir = str(folder)  # torch leaves files of errors there
    # the agent would kill after 30 s who does not leave: then a job that hangs came to an end, too
    join = ProcessContext._join_procs_with_timeout
    ProcessContext._join_procs_with_timeout = lambda context, _: join(context, FOREVER)
    try:
        elastic_launch(config, worker)(impl, folder, faults, timeout)
    except ChildFailedError:
        os._exit(1)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def states(process: int) -> set[str]:
    """What the threads of a process and of its descendants do, in the letters of /proc."""
    found = set()
    for thread in Path(f"/proc/{process}/task").glob("*"):
        try:
            found.add((thread / "stat").read_text().rpartition(") ")[2][0])
            for child in (thread / "children").read_text().split():
                found |= states(int(child))
        except OSError:
            found.add("gone")  # just now; or this kernel tells of no children
    return found


class Stillness:
    """For how long a job has done nothing, by its log and its processes.

    Only seconds count in which all threads sleep or are stopped: a job that waits for a core or a
    disk of a busy machine is slow, it does not hang. Without /proc no second counts.
    """

    def __init__(self, agent: int, folder: Path) -> None:
        self.agent, self.log = agent, folder / "log"
        self.seconds, self.at, self.size = 0.0, time.monotonic(), 0

    def look(self) -> float:
        """The seconds so far; to be called often."""
        before, self.at = self.at, time.monotonic()
        size = self.log.stat().st_size if self.log.exists() else 0
        if size > self.size:
            self.size, self.seconds = size, 0.0
        elif {"S"} <= states(self.agent) <= {"S", "T", "Z"}:
            self.seconds += min(self.at - before, 0.2)
        return self.seconds


def job(
    impl: Any,
    faults: dict[tuple[int, int], str],
    *,
    ranks: int = 2,
    timeout: float = FOREVER,
    restarts: int = 2,
    limit: float = 50.0,
    pace: int = 1,
) -> dict[str, Any]:
    """What a job did, and left: plain data. ``ended``: well, badly, or not: it was still for
    STILL seconds, or went on for ``limit`` seconds of its own time. ``pace``: all of these, the
    time-out and a slow step take so many times as long. ``kept``: for how many seconds at most
    other programs had the processors that it was ready for."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pid = os.fork()
        if not pid:
            os.setsid()
            os.dup2(os.open(folder / "stderr", os.O_CREAT | os.O_WRONLY | os.O_APPEND), 2)
            sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
            agent(impl, folder, ranks, faults, timeout * pace, restarts)
        began, clock, stillness = time.monotonic(), ProgramClock([pid]), Stillness(pid, folder)
        ended = "not"
        while clock.read() < limit * pace and stillness.look() < STILL * pace:
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                ended = "badly" if status else "well"
                break
            time.sleep(0.05)
        kept = time.monotonic() - began - clock.read()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        if ended == "not":
            os.waitpid(pid, 0)
        steps = notes(folder, "step")
        attempts = dict.fromkeys(entry["attempt"] for entry in notes(folder, "begin"))
        told = (folder / "stderr").read_text(errors="replace")
        sys.stderr.write(told)  # where it would have gone
        reports = sorted((folder / "beats").glob("report*.txt"))
        return {
            "ended": ended,
            "kept": kept,
            "ends": notes(folder, "end"),
            "faults": notes(folder, "fault"),
            "attempts": [[e for e in steps if e["attempt"] == a] for a in attempts],
            "stderr": told,
            "reports": [path.read_text() for path in reports],
        }
