# Names agreed on by gossip, beats in one table, an elected author; for: 4.5

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import signal
import sys
import threading
import time
import traceback
import uuid
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from given.process_group import join_group

from .elastic import adapt
from .resume import Position

EXIT_HUNG = 70
EXIT_PREEMPTED = 75
ROW = 16384  # bytes of a rank in the table


def fresh_store(store, rank, world_size, timeout=300.0):
    """Everybody tells whom it has seen; done when all have seen the same."""
    store.set(f"i/{rank}", uuid.uuid4().hex)
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        keys = [f"i/{r}" for r in range(world_size)]
        if all(store.check([key]) for key in keys):
            names = b"".join(store.get(key) for key in keys)
            mine = hashlib.sha256(names).hexdigest().encode()
            store.set(f"saw/{rank}", mine)
            told = [f"saw/{r}" for r in range(world_size)]
            if all(store.check([key]) and store.get(key) == mine for key in told):
                return dist.PrefixStore(mine.decode(), store), mine.decode()
        time.sleep(0.01)
    raise TimeoutError(f"{world_size} ranks are not complete after {timeout} s")


def join(backend="gloo", timeout=timedelta(minutes=10)):
    store, rank, world_size = next(dist.rendezvous("env://", timeout=timeout))
    store, name = fresh_store(store, rank, world_size, timeout.total_seconds())
    join_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    return name


@dataclasses.dataclass
class Beat:
    attempt: str
    pid: int
    count: int
    step: int
    place: str
    status: str
    note: str


class Heartbeat:
    """A row of a table for every rank."""

    def __init__(self, folder, rank, world_size, attempt=""):
        if rank not in range(world_size):
            raise ValueError(f"no rank {rank} of {world_size}")
        self.folder, self.rank, self.world_size = Path(folder), rank, world_size
        self.folder.mkdir(parents=True, exist_ok=True)
        self.table = os.open(self.folder / "table", os.O_RDWR | os.O_CREAT, 0o600)
        self.latest = Beat(attempt, os.getpid(), 0, -1, "beginning", "running", "")

    def beat(self, step, place):
        old = self.latest
        self.latest = Beat(old.attempt, old.pid, old.count + 1, step, place, "running", "")

    def end(self, status, note=""):
        old = self.latest
        note = note[-4000:]
        self.latest = Beat(old.attempt, old.pid, old.count, old.step, old.place, status, note)
        self.publish()

    def publish(self):
        row = json.dumps(dataclasses.asdict(self.latest)).encode().ljust(ROW)
        os.pwrite(self.table, row, self.rank * ROW)

    def read(self):
        beats = []
        for rank in range(self.world_size):
            row = os.pread(self.table, ROW, rank * ROW).strip(b"\0 ")
            beat = Beat(**json.loads(row)) if row else None
            beats.append(beat if beat and beat.attempt == self.latest.attempt else None)
        return beats


class Watchdog:
    """Watches counts only; the first rank that is not blamed writes the report."""

    def __init__(self, heartbeat, timeout, interval=None):
        if not timeout > 0:
            raise ValueError(f"a timeout of {timeout} s")
        self.heartbeat, self.timeout = heartbeat, timeout
        self.interval = interval or min(1.0, timeout / 10)
        self.over = False
        self.thread = threading.Thread(target=self.watch, daemon=True)

    def __enter__(self):
        self.main = threading.get_ident()
        self.heartbeat.publish()
        self.thread.start()
        return self

    def __exit__(self, kind, error, trace):
        self.over = True
        self.thread.join()
        if error is None or (kind is SystemExit and error.code in (0, None, EXIT_PREEMPTED)):
            self.heartbeat.end("done")
            return
        text = "".join(traceback.format_exception(kind, error, trace))
        self.heartbeat.end("failed", text)
        beats = enumerate(self.heartbeat.read())
        first = next(rank for rank, beat in beats if beat and beat.status == "failed")
        if first == self.heartbeat.rank:
            self.write(f"rank {first} raised {kind.__name__}", [first])

    def watch(self):
        seen = {}
        begun = looked = time.monotonic()
        while not self.over:
            time.sleep(self.interval)
            self.heartbeat.publish()
            beats = self.heartbeat.read()
            now = time.monotonic()
            if now - looked > self.timeout / 2:  # this process was stopped
                seen, begun = {}, now
            looked = now
            for rank, beat in enumerate(beats):
                count = beat.count if beat else None
                if rank not in seen or seen[rank][0] != count:
                    seen[rank] = count, now if rank in seen else begun
            failed = [r for r, b in enumerate(beats) if b and b.status == "failed"]
            if failed:
                self.quit(f"rank {failed[0]} failed", failed[:1], failed[0])
            alive = [r for r, b in enumerate(beats) if b is None or b.status == "running"]
            late = [r for r in alive if now - seen[r][1] > self.timeout]
            if late:
                places = {r: beats[r].count if beats[r] else -1 for r in alive}
                least = min(places.values())
                blamed = sorted(r for r in alive if places[r] == least)
                others = [r for r in alive if r not in blamed] or blamed
                names = ", ".join(f"rank {r}" for r in blamed)
                self.quit(f"hung: {names}", blamed, others[0])

    def quit(self, what, blamed, author):
        rank = self.heartbeat.rank
        stack = traceback.format_stack(sys._current_frames()[self.main])
        (self.heartbeat.folder / f"stack{rank}").write_text("".join(stack))
        if rank == author:
            time.sleep(8 * self.interval)
            self.write(what, blamed)
        else:
            end = time.monotonic() + 8 * self.interval
            while time.monotonic() < end and not self.path().exists():
                time.sleep(0.02)
        os._exit(EXIT_HUNG)

    def path(self):
        return self.heartbeat.folder / f"report-{self.heartbeat.latest.attempt}.txt"

    def write(self, what, blamed):
        beats = self.heartbeat.read()
        lines = [what]
        for rank, beat in enumerate(beats):
            known = f"step {beat.step}, {beat.place}" if beat else "never seen"
            lines.append(f"  {rank}: {known}")
        for rank in blamed:
            stack = self.heartbeat.folder / f"stack{rank}"
            note = beats[rank].note if beats[rank] else ""
            found = note or (stack.read_text() if stack.exists() else "no answer")
            lines.append(f"stack of {rank}:\n{found}")
        (self.heartbeat.folder / "unfinished").write_text("\n".join(lines))
        os.replace(self.heartbeat.folder / "unfinished", self.path())
        for rank in blamed:
            if beats[rank] and beats[rank].pid != os.getpid():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(beats[rank].pid, signal.SIGKILL)


class PreemptionGuard:
    """A list that a handler appends to."""

    def __init__(self, signals=(signal.SIGTERM, signal.SIGUSR1), group=None, device="cpu"):
        self.group, self.device = group, device
        self.requested = False
        self.stack = contextlib.ExitStack()
        self.signals = signals

    def __enter__(self):
        for number in self.signals:
            old = signal.signal(number, lambda *_: setattr(self, "requested", True))
            self.stack.callback(signal.signal, number, old)
        return self

    def __exit__(self, *error):
        self.stack.close()

    def agreed(self):
        count = torch.zeros(1, dtype=torch.int32, device=self.device)
        count += int(self.requested)
        if dist.is_initialized():
            dist.all_reduce(count, group=self.group)
        return count.item() > 0


def train(
    train_step, loader, *, epochs, save_every, store, state, guard, heartbeat, seed=0, group=None
):
    """Epoch by epoch, with iterators of its own."""
    if save_every <= 0:
        raise ValueError(f"save every {save_every} steps?")
    found = store.load()
    at = Position()
    if found:
        at = state.restore(adapt(found, dist.get_world_size(group), seed))
    saved = at.step
    while at.epoch < epochs:
        loader.batch_sampler.set_epoch(at.epoch)
        for batch in loader:
            at.step, at.batch = at.step + 1, at.batch + 1
            heartbeat.beat(at.step, "training")
            train_step(batch, at)
            leave = guard.agreed()
            if leave or not at.step % save_every:
                heartbeat.beat(at.step, "saving")
                store.save(at.step, *state.capture(at))
                saved = at.step
            if leave:
                return False
        at.epoch, at.batch = at.epoch + 1, 0
    if saved != at.step:
        store.save(at.step, *state.capture(at))
    return True
