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

from .elastic import adapt
from .fault_tolerance import CheckpointStore
from .resume import Position, TrainingState, batches

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
    # --- exercise 4.5: start
    # Step 1: a number of restarts is no name: agents count only those that they began themselves.
    #         Every rank says hello with a name that it has never used
    # Step 2: rank 0 repeats the names that it has read, until every rank has answered with rank
    #         0's name. An old message can't have this attempt's names in it
    # Step 3: a rank answers when it finds its own name repeated, and goes on when all have answered
    me = uuid.uuid4().hex
    store.set(f"hello/{rank}", me)
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if rank == 0:
            store.set("call", json.dumps(_written(store, "hello", world_size)))
            if _written(store, "answer", world_size)[1:] == [me] * (world_size - 1):
                store.set(f"complete/{me}", "")
                return dist.PrefixStore(me, store), me
        elif store.check(["call"]):
            hellos = json.loads(store.get("call"))
            if len(hellos) == world_size and hellos[rank] == me:
                store.set(f"answer/{rank}", hellos[0])
                if store.check([f"complete/{hellos[0]}"]):
                    return dist.PrefixStore(hellos[0], store), hellos[0]
        time.sleep(0.02)
    raise TimeoutError(f"rank {rank}: not all of {world_size} ranks have come in {timeout:.0f} s")
    # --- exercise 4.5: end


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
        # --- exercise 4.5: start
        # Step 4: one assignment, so that the publishing thread finds the old or the new one
        self.latest = replace(self.latest, count=self.latest.count + 1, step=step, place=place)
        # --- exercise 4.5: end

    def end(self, status: str, note: str = "") -> None:
        """This rank is ``done`` or has ``failed``: published at once."""
        self.latest = replace(self.latest, status=status, note=note)
        self.publish()

    def publish(self) -> None:
        """Write the latest beat where the others read it."""
        # --- exercise 4.5: start
        # Step 5: aside and renamed: nobody reads half a beat
        path = self.folder / f"beat{self.rank}.json"
        aside = path.with_suffix(f".{threading.get_ident()}")
        aside.write_text(json.dumps(asdict(self.latest)), encoding="utf-8")
        aside.replace(path)
        # --- exercise 4.5: end

    def read(self) -> list[Beat | None]:
        """The latest published beat of each rank; None before its first one in this attempt."""
        # --- exercise 4.5: start
        # Step 6: what an earlier attempt has left there is nobody's beat
        found: list[Beat | None] = []
        for rank in range(self.world_size):
            path = self.folder / f"beat{rank}.json"
            beat = Beat(**json.loads(path.read_text(encoding="utf-8"))) if path.exists() else None
            found.append(beat if beat and beat.attempt == self.latest.attempt else None)
        return found
        # --- exercise 4.5: end


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
        # --- exercise 4.5: start
        # Step 7: stop watching before the others stop beating; a failure is told and reported by
        #         the rank that failed, because its agent ends the others as soon as it is gone
        self._stop.set()
        self._thread.join()
        leaves = isinstance(error, SystemExit) and error.code in (None, 0, EXIT_PREEMPTED)
        failed = error is not None and not leaves
        if not failed:
            self.heartbeat.end("done")
            return
        note = "".join(traceback.format_exception(kind, error, trace))
        self.heartbeat.end("failed", note)
        self._report(f"rank {self.heartbeat.rank} failed", [self.heartbeat.rank], {})
        # --- exercise 4.5: end

    def _watch(self) -> None:
        """Publish, read, judge; until the block is left."""
        # --- exercise 4.5: start
        # Step 8: this thread publishes what the main thread did last: it never beats itself
        # Step 9: a beat is new when it differs from the one before; when that was seen counts, by
        #         this rank's clock. Who was stopped for a while has seen nothing and begins anew
        last: list[Beat | None] = [None] * self.heartbeat.world_size
        since = [time.monotonic()] * self.heartbeat.world_size
        awake = time.monotonic()
        while not self._stop.wait(self.interval):
            try:
                self.heartbeat.publish()
                beats, now = self.heartbeat.read(), time.monotonic()
            except OSError:  # a disk that is full or away for a moment: the next round will tell
                continue
            for rank, beat in enumerate(beats):
                if beat != last[rank] or now - awake > self.timeout / 2:
                    last[rank], since[rank] = beat, now
            awake = now
            silent = {rank: now - then for rank, then in enumerate(since)}
            self._judge(beats, silent)
        # --- exercise 4.5: end

    def _judge(self, beats: Sequence[Beat | None], silent: dict[int, float]) -> None:
        """End the process if a rank failed, or one that is not done is silent for too long."""
        # --- exercise 4.5: start
        # Step 10: a failed rank first: who waits for it in vain does not hang by itself
        # Step 11: to blame is who passed the fewest places; who never began has passed none
        failed = [rank for rank, beat in enumerate(beats) if beat and beat.status == "failed"]
        if failed:
            self._end(f"rank {failed[0]} failed", failed, silent)
        counts = {
            r: b.count if b else -1 for r, b in enumerate(beats) if not b or b.status != "done"
        }
        if any(silent[rank] > self.timeout for rank in counts):
            fewest = min(counts.values())
            blamed = [rank for rank, count in counts.items() if count == fewest]
            names = " and ".join(f"rank {rank}" for rank in blamed)
            self._end(f"{names} did not get on for {self.timeout:g} s", blamed, silent)
        # --- exercise 4.5: end

    def _end(self, what: str, blamed: list[int], silent: dict[int, float]) -> None:
        """Stacks, report, and the end of this process."""
        # --- exercise 4.5: start
        # Step 12: every rank that can writes its stacks, one writes the report, the others wait for
        #          it: the agent ends everybody when the first one is gone
        # Step 13: os._exit, because the main thread will never come to an exception
        self._write_stack()
        self._report(what, blamed, silent)
        sys.stderr.flush()
        os._exit(EXIT_HUNG)
        # --- exercise 4.5: end

    def _write_stack(self) -> None:
        """What every thread of this process does now."""
        # --- exercise 4.5: start
        # Step 14: faulthandler writes the stacks of all threads, whatever they wait in
        with open(self._stack_file(self.heartbeat.rank), "w", encoding="utf-8") as file:
            faulthandler.dump_traceback(file, all_threads=True)
            file.write("\n")
        # --- exercise 4.5: end

    def _stack_file(self, rank: int) -> Path:
        return self.heartbeat.folder / f"stack{rank}-{self.heartbeat.latest.attempt}.txt"

    def _report(self, what: str, blamed: list[int], silent: dict[int, float]) -> None:
        """Return when the report is written, by this rank if it is the first to come."""
        # --- exercise 4.5: start
        # Step 15: only one can make the file with O_EXCL; it waits for stacks that others write
        # Step 16: a process that is stopped by SIGSTOP or holds the interpreter's lock is killed
        folder, attempt = self.heartbeat.folder, self.heartbeat.latest.attempt
        path = folder / f"report-{attempt}.txt"
        patience = time.monotonic() + 8 * self.interval
        try:
            os.close(os.open(path.with_suffix(".author"), os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            while not path.exists() and time.monotonic() < patience + self.interval:
                time.sleep(0.01)
            return
        beats = self.heartbeat.read()
        running = [r for r, beat in enumerate(beats) if beat and beat.status == "running"]
        while time.monotonic() < patience and not all(
            self._stack_file(rank).exists() for rank in running
        ):
            time.sleep(0.01)
        text = self._text(what, blamed, silent, beats)
        aside = path.with_suffix(".partial")
        aside.write_text(text, encoding="utf-8")
        aside.replace(path)
        print(text, file=sys.stderr, flush=True)
        for rank in blamed:
            beat, mine = beats[rank], self.heartbeat.latest
            if beat and beat.host == mine.host and beat.pid != mine.pid:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(beat.pid, signal.SIGKILL)
        # --- exercise 4.5: end

    def _text(
        self,
        what: str,
        blamed: list[int],
        silent: dict[int, float],
        beats: Sequence[Beat | None],
    ) -> str:
        """The report: ``what`` happened, where every rank was since when, stacks of the blamed."""
        # --- exercise 4.5: start
        # Step 17: one line per rank, the blamed ones marked; then stacks, or why there is none
        lines = [what]
        for rank, beat in enumerate(beats):
            where = f"rank {rank}{' (this one)' if rank in blamed else ''}: "
            if beat is None:
                lines.append(where + "has not begun")
                continue
            ago = f", {silent[rank]:.1f} s ago" if rank in silent else ""
            where += f"step {beat.step}, {beat.place} (place {beat.count}){ago}, {beat.status}"
            lines.append(f"{where}, process {beat.pid} on {beat.host.partition(' ')[0]}")
        for rank in blamed:
            beat, file = beats[rank], self._stack_file(rank)
            stack = beat.note if beat else ""
            if not stack and file.exists():
                stack = file.read_text(encoding="utf-8")
            lines.append(f"\nstack of rank {rank}:\n{stack or 'none: it does not answer'}")
        return "\n".join(lines) + "\n"
        # --- exercise 4.5: end


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
        # --- exercise 4.5: start
        # Step 18: take over, and remember what was there
        for number in self.signals:
            self._before[number] = signal.signal(number, self._note)
        return self
        # --- exercise 4.5: end

    def __exit__(self, *error: object) -> None:
        # --- exercise 4.5: start
        # Step 19: give back
        for number, handler in self._before.items():
            signal.signal(number, handler)
        # --- exercise 4.5: end

    def _note(self, number: int, frame: FrameType | None) -> None:
        """The signal's handler: it may run between any two lines."""
        # --- exercise 4.5: start
        # Step 20: only a flag: a save that begins here would be in the middle of a step
        self.requested = True
        # --- exercise 4.5: end

    def agreed(self) -> bool:
        """Whether any rank is to leave; the same answer on all ranks. One all-reduce of 4 bytes."""
        # --- exercise 4.5: start
        # Step 21: signals reach ranks at different times, or only some: the maximum decides
        flag = torch.tensor(self.requested, dtype=torch.int32, device=self.device)
        if dist.is_initialized():
            dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self.group)
        return bool(flag)
        # --- exercise 4.5: end


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
    # --- exercise 4.5: start
    # Step 22: begin with the newest checkpoint, cut for this many ranks
    # Step 23: agree on leaving before it is decided whether to save: all ranks save, then all leave
    # Step 24: the end is saved as well, and a job that was done finds nothing to do
    world_size = dist.get_world_size(group) if dist.is_initialized() else 1
    saved = store.load()
    position, kept = Position(), 0
    if saved is not None:
        position = state.restore(adapt(saved, world_size, seed))
        kept = position.step

    def save() -> None:
        heartbeat.beat(position.step, "save")
        store.save(position.step, *state.capture(position))

    for batch in batches(loader, position, epochs):
        heartbeat.beat(position.step, "step")
        train_step(batch, position)
        leaving = guard.agreed()
        if leaving or position.step % save_every == 0:
            save()
            kept = position.step
        if leaving:
            return False
    if kept < position.step:
        save()
    return True
    # --- exercise 4.5: end
