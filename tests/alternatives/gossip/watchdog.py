# Beats in one table, an elected author; for: 4.5

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import sys
import threading
import time
import traceback
from pathlib import Path

EXIT_HUNG = 70
EXIT_PREEMPTED = 75
ROW = 16384  # bytes of a rank in the table


@dataclasses.dataclass
class Beat:
    attempt: str
    host: str
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
        host = os.uname().nodename
        self.latest = Beat(attempt, host, os.getpid(), 0, -1, "beginning", "running", "")

    def beat(self, step, place):
        count = self.latest.count + 1
        self.latest = dataclasses.replace(self.latest, count=count, step=step, place=place)

    def end(self, status, note=""):
        self.latest = dataclasses.replace(self.latest, status=status, note=note[-4000:])
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
        print("\n".join(lines), file=sys.stderr, flush=True)
        for rank in blamed:
            here = beats[rank] and beats[rank].host == self.heartbeat.latest.host
            if here and beats[rank].pid != os.getpid():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(beats[rank].pid, signal.SIGKILL)
