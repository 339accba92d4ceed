# Exercises 4.5: replace every `raise NotImplementedError` by your code.
# The docstrings say what is asked for. Test with: python test_phase4.py 4.5
"""Noticing that a rank is gone, hangs, failed or will be taken away, and going on by itself.

torchrun's agent starts the workers of a node again when one of them ends with a status other than
0, up to ``--max-restarts`` times, and when nodes come or go (``--nnodes 1:4``). It can't know
whether a worker that runs still gets anywhere, and it does not know where to go on. So:

    killed           agent: all start again         loop: from the newest checkpoint
    hangs            watchdog: all end, with a report, then as above
    fails            the rank tells the others' watchdogs, which end theirs; then as above
    taken away       SIGTERM: all save at the same step, then leave with a status that restarts

*Heartbeat.* The main thread of every rank counts the places that it passes (step 7, backward; step
7, optimizer …); a thread of its own writes the newest count to a shared folder and reads those of
the others. A collective stops all ranks, so all hearts stop when one rank hangs; the one to blame
is the one that passed the fewest places. Times are taken by the reader's clock alone.

With a checkpoint every k steps that takes s seconds, a step of t seconds and a failure every F
seconds on average: at most k steps are done again, k/2 on average, and the overhead
s/(k·t) + k·t/(2F) is smallest for k·t = sqrt(2·s·F).

Messages: in the loop one all-reduce of 4 bytes per step (``PreemptionGuard.agreed``); heartbeats
are files. Invariant: whatever ends, interrupted and resumed training is the uninterrupted one.

Sources: Young 1974, "A first order approximation to the optimum checkpoint interval" (CACM 17);
Jiang et al. 2024 (MegaScale, arXiv 2402.15627), section 4; torchrun's manual, "Elastic Launch"; for
the store that a restart finds full of old keys: pytorch/pytorch issue 135712.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from given.agreement import Group
from given.process_group import join_group

from .template_elastic import adapt
from .template_fault_tolerance import CheckpointStore
from .template_resume import Position, TrainingState, batches

EXIT_HUNG = 70  # a watchdog ended the job
EXIT_PREEMPTED = 75  # saved, and to be started again (EX_TEMPFAIL)


# -- joining --------------------------------------------------------------------------------------
def fresh_store(
    store: dist.Store, rank: int, world_size: int, timeout: float = 300.0
) -> tuple[dist.Store, str]:
    """A part of ``store`` that nobody has written to, and its name; the same on all ranks.

    The agent's store outlives its workers, so after a restart it holds the addresses of dead
    processes. ``store`` may hold anything that earlier calls have left, also unfinished ones and of
    another world size. Raises TimeoutError after ``timeout`` seconds.
    """
    # Step 1: a number of restarts is no name: agents count only those that they began themselves.
    #         Every rank says hello with a name that it has never used
    # Step 2: rank 0 repeats the names that it has read, until every rank has answered with rank
    #         0's name. An old message can't have this attempt's names in it
    # Step 3: a rank answers when it finds its own name repeated, and goes on when all have answered
    raise NotImplementedError("exercise 4.5")


def _written(store: dist.Store, key: str, world_size: int) -> list[str]:
    """What each rank wrote under ``key``; "" where there is nothing."""
    keys = [f"{key}/{rank}" for rank in range(world_size)]
    return [store.get(k).decode() if store.check([k]) else "" for k in keys]


def join(backend: str = "gloo", timeout: timedelta = timedelta(minutes=10)) -> str:
    """``join_group`` as torchrun's environment says, safe after a restart.

    Returns this attempt's name, the same on all ranks. Enter ``leaving_group`` next.
    """
    store, rank, world_size = next(dist.rendezvous("env://", timeout=timeout))
    fresh, name = fresh_store(store, rank, world_size, timeout.total_seconds())
    join_group(backend, store=fresh, rank=rank, world_size=world_size, timeout=timeout)
    return name


# -- noticing -------------------------------------------------------------------------------------
def pid_space() -> str:
    """Host name, and what tells apart hosts and containers of the same name: there a process id
    means another process."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):  # not on Linux
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip())
        parts.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(parts)


@dataclass(frozen=True, kw_only=True)
class Beat:
    """What a rank tells of itself: how many places it has passed, and which one was the last.

    ``status``: ``running``, ``done`` or ``failed`` (``note`` says why).
    """

    attempt: str
    host: str
    pid: int
    count: int = 0
    step: int = -1
    place: str = "start"
    status: str = "running"
    note: str = ""


class Heartbeat:
    """This rank's beats, and those of all ranks of ``attempt``, as files in a shared ``folder``.

    Raises ValueError for a rank outside 0 … world_size-1.
    """

    def __init__(self, folder: str | Path, rank: int, world_size: int, attempt: str = "") -> None:
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} is not in 0 … {world_size - 1}")
        self.folder, self.rank, self.world_size = Path(folder), rank, world_size
        self.folder.mkdir(parents=True, exist_ok=True)
        self.latest = Beat(attempt=attempt, host=pid_space(), pid=os.getpid())

    def beat(self, step: int, place: str) -> None:
        """The main thread begins ``place`` of ``step``. Every rank passes the same places.

        Costs a few microseconds: nothing is written.
        """
        # Step 4: one assignment, so that the publishing thread finds the old or the new one
        raise NotImplementedError("exercise 4.5")

    def end(self, status: str, note: str = "") -> None:
        """This rank is ``done`` or has ``failed``: published at once."""
        self.latest = replace(self.latest, status=status, note=note)
        self.publish()

    def publish(self) -> None:
        """Write the latest beat where the others read it."""
        # Step 5: aside and renamed: nobody reads half a beat
        raise NotImplementedError("exercise 4.5")

    def read(self) -> list[Beat | None]:
        """The latest published beat of each rank; None before its first one in this attempt."""
        # Step 6: what an earlier attempt has left there is nobody's beat
        raise NotImplementedError("exercise 4.5")


class Watchdog:
    """Ends this process, with a report, when any rank of the job hangs or has failed.

    ``with Watchdog(heartbeat, timeout=60): train()``. Every ``interval`` seconds (default: 1, or an
    eighth of ``timeout``) it publishes this rank's beat and reads everybody's, W small files. A
    rank hangs that passes no place for ``timeout`` seconds (so it must be longer than the longest
    place takes), or that does not begin to beat. To blame are the ranks that passed the fewest
    places. Then every rank writes the stacks of its threads; one of them writes the report
    (``report-ATTEMPT.txt`` in the heartbeat's folder, and on standard error) and kills ranks to
    blame that are processes of its own host (a stopped one would not follow SIGTERM); and all end
    with status EXIT_HUNG. The report's first line names the ranks to blame and no other; then come
    each rank's step and place (of a stopped rank, as they were up to ``interval`` seconds before)
    and the stacks of those to blame.

    A folder that can't be written to for a moment ends neither the process nor the watching. Who
    was stopped and goes on (a laptop's lid) blames nobody for that time: it has seen nothing.

    Leaving the block normally, or by ``sys.exit`` with 0 or EXIT_PREEMPTED: this rank is done, and
    nobody waits for its beats. By any other exception: it has failed, the report says with what,
    and the others end.
    """

    def __init__(self, heartbeat: Heartbeat, timeout: float, interval: float | None = None) -> None:
        if timeout <= 0:
            raise ValueError(f"timeout must be positive, got {timeout}")
        self.heartbeat, self.timeout = heartbeat, timeout
        self.interval = min(timeout / 8, 1.0) if interval is None else interval
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        self.heartbeat.publish()
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # Step 7: stop watching before the others stop beating; a failure is told and reported by
        #         the rank that failed, because its agent ends the others as soon as it is gone
        raise NotImplementedError("exercise 4.5")

    def _watch(self) -> None:
        """Publish, read, judge; until the block is left."""
        # Step 8: this thread publishes what the main thread did last: it never beats itself
        # Step 9: a beat is new when it differs from the one before; when that was seen counts, by
        #         this rank's clock. Who was stopped for a while has seen nothing and begins anew
        raise NotImplementedError("exercise 4.5")

    def _judge(self, beats: Sequence[Beat | None], silent: dict[int, float]) -> None:
        """End the process if a rank failed, or one that is not done is silent for too long."""
        # Step 10: a failed rank first: who waits for it in vain does not hang by itself
        # Step 11: to blame is who passed the fewest places; who never began has passed none
        raise NotImplementedError("exercise 4.5")

    def _end(self, what: str, blamed: list[int], silent: dict[int, float]) -> None:
        """Stacks, report, and the end of this process."""
        # Step 12: every rank that can writes its stacks, one writes the report, the others wait for
        #          it: the agent ends everybody when the first one is gone
        # Step 13: os._exit, because the main thread will never come to an exception
        raise NotImplementedError("exercise 4.5")

    def _write_stack(self) -> None:
        """What every thread of this process does now."""
        # Step 14: faulthandler writes the stacks of all threads, whatever they wait in
        raise NotImplementedError("exercise 4.5")

    def _stack_file(self, rank: int) -> Path:
        return self.heartbeat.folder / f"stack{rank}-{self.heartbeat.latest.attempt}.txt"

    def _report(self, what: str, blamed: list[int], silent: dict[int, float]) -> None:
        """Return when the report is written, by this rank if it is the first to come."""
        # Step 15: only one can make the file with O_EXCL; it waits for stacks that others write
        # Step 16: a process that is stopped by SIGSTOP or holds the interpreter's lock is killed
        raise NotImplementedError("exercise 4.5")

    def _text(
        self,
        what: str,
        blamed: list[int],
        silent: dict[int, float],
        beats: Sequence[Beat | None],
    ) -> str:
        """The report: ``what`` happened, where every rank was since when, stacks of the blamed."""
        # Step 17: one line per rank, the blamed ones marked; then stacks, or why there is none
        raise NotImplementedError("exercise 4.5")


# -- leaving and going on -------------------------------------------------------------------------
class PreemptionGuard:
    """Notes that this process is to end soon, and lets all ranks leave at the same step.

    ``with PreemptionGuard() as guard:`` takes over ``signals`` until the block is left; SIGTERM is
    what schedulers and agents send before they kill (30 s later, by default), SIGUSR1 what SLURM is
    asked to send. ``requested``: this rank has received one.
    """

    def __init__(
        self,
        signals: Sequence[signal.Signals] = (signal.SIGTERM, signal.SIGUSR1),
        group: Group = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.signals, self.group, self.device = signals, group, device
        self.requested = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> PreemptionGuard:
        # Step 18: take over, and remember what was there
        raise NotImplementedError("exercise 4.5")

    def __exit__(self, *error: object) -> None:
        # Step 19: give back
        raise NotImplementedError("exercise 4.5")

    def _note(self, number: int, frame: FrameType | None) -> None:
        """The signal's handler: it may run between any two lines."""
        # Step 20: only a flag: a save that begins here would be in the middle of a step
        raise NotImplementedError("exercise 4.5")

    def agreed(self) -> bool:
        """Whether any rank is to leave; the same answer on all ranks. One all-reduce of 4 bytes."""
        # Step 21: signals reach ranks at different times, or only some: the maximum decides
        raise NotImplementedError("exercise 4.5")


def train(
    train_step: Callable[[Any, Position], object],
    loader: DataLoader[Any],
    *,
    epochs: int,
    save_every: int,
    store: CheckpointStore,
    state: TrainingState,
    guard: PreemptionGuard,
    heartbeat: Heartbeat,
    seed: int = 0,
    group: Group = None,
) -> bool:
    """Train to the end of epoch ``epochs`` - 1, from the newest checkpoint if there is one.

    Calls ``train_step(batch, position)`` for each of ``batches`` (exercise 4.2). The checkpoint may
    be of any number of ranks. It is saved whenever the number of steps since the run's very
    beginning divides by ``save_every``, at the end, and when a rank is to leave. Then it returns
    False, and the caller is to exit with EXIT_PREEMPTED; True if training is done. Beats before
    each step and each save. Collective. Raises ValueError if ``save_every`` is not positive.
    """
    if save_every < 1:
        raise ValueError(f"save_every must be positive, got {save_every}")
    # Step 22: begin with the newest checkpoint, cut for this many ranks
    # Step 23: agree on leaving before it is decided whether to save: all ranks save, then all leave
    # Step 24: the end is saved as well, and a job that was done finds nothing to do
    raise NotImplementedError("exercise 4.5")
