# for: 4.5
"""Written differently: beats are written under a lock, and silence is counted in looks."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType

EXIT_HUNG = 70
EXIT_PREEMPTED = 75


def pid_space() -> str:
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip())
        parts.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(parts)


@dataclass(frozen=True, kw_only=True)
class Beat:
    attempt: str
    host: str
    pid: int
    count: int = 0
    step: int = -1
    place: str = "start"
    status: str = "running"
    note: str = ""


class Heartbeat:
    def __init__(self, folder: str | Path, rank: int, world_size: int, attempt: str = "") -> None:
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} is not in 0 … {world_size - 1}")
        self.folder, self.rank, self.world_size = (Path(folder), rank, world_size)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.latest = Beat(attempt=attempt, host=pid_space(), pid=os.getpid())

    def beat(self, step: int, place: str) -> None:
        self.latest = replace(self.latest, step=step, place=place, count=self.latest.count + 1)

    def end(self, status: str, note: str = "") -> None:
        self.latest = replace(self.latest, status=status, note=note)
        self.publish()

    def publish(self) -> None:
        with PUBLISHING:
            content = json.dumps(asdict(self.latest)).encode()
            number, aside = (os.open, str(self.folder / f".beat-{self.rank}"))
            file = number(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 420)
            try:
                try:
                    view = memoryview(content)
                    while view:
                        view = view[os.write(file, view) :]
                finally:
                    os.close(file)
                os.rename(aside, self.folder / f"beat-{self.rank}")
            except OSError:
                with contextlib.suppress(OSError):
                    os.unlink(aside)
                raise

    def read(self) -> list[Beat | None]:
        return [self._read_one(rank) for rank in range(self.world_size)]


class Watchdog:
    def __init__(self, heartbeat: Heartbeat, timeout: float, interval: float | None = None) -> None:
        if timeout <= 0:
            raise ValueError(f"timeout must be positive, got {timeout}")
        self.heartbeat, self.timeout = (heartbeat, timeout)
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
        self._stop.set()
        self._thread.join()
        heartbeat = self.heartbeat
        code = error.code if isinstance(error, SystemExit) else 1
        if error is None or code is None or code in (0, EXIT_PREEMPTED):
            status, note = ("done", "")
        else:
            status, note = ("failed", "".join(traceback.format_exception(kind, error, trace)))
            note = note if len(note) < 30000 else f"…{note[-30000:]}"
            heartbeat.latest = replace(heartbeat.latest, status=status, note=note)
            for action in (
                self._write_stack,
                lambda: self._report(f"rank {heartbeat.rank} failed", [heartbeat.rank], {}),
            ):
                with contextlib.suppress(Exception):
                    action()
        patience = time.monotonic() + self.timeout
        while True:
            with contextlib.suppress(OSError):
                heartbeat.end(status, note)
                break
            if time.monotonic() > patience:
                break
            time.sleep(0.1)

    def _watch(self) -> None:
        heartbeat = self.heartbeat
        known: dict[int, Beat] = {}
        silent = dict.fromkeys(range(heartbeat.world_size), 0.0)
        while True:
            before = time.monotonic()
            if self._stop.wait(self.interval):
                return
            waited = time.monotonic() - before
            try:
                heartbeat.publish()
                found = heartbeat.read()
            except Exception:
                continue
            for rank, beat in enumerate(found):
                if beat is not None and known.get(rank) != beat:
                    known[rank], silent[rank] = (beat, 0.0)
                else:
                    silent[rank] += min(waited, 1.5 * self.interval)
            self._judge([known.get(rank) for rank in silent], dict(silent))

    def _judge(self, beats: Sequence[Beat | None], silent: dict[int, float]) -> None:
        state = {r: ("none", 0) if b is None else (b.status, b.count) for r, b in enumerate(beats)}
        blamed = [r for r, (status, _) in state.items() if status == "failed"]
        if blamed:
            what = " and ".join(f"rank {r}" for r in blamed)
            return self._end(f"failure: {what}", blamed, silent)
        open_ones = [r for r, (status, _) in state.items() if status != "done"]
        if max((silent[r] for r in open_ones), default=0.0) <= self.timeout:
            return None
        least = min(state[r][1] for r in open_ones)
        blamed = [r for r in open_ones if state[r][1] == least]
        what = " and ".join(f"rank {r}" for r in blamed)
        self._end(f"time-out of {self.timeout} s, to blame: {what}", blamed, silent)
        return None

    def _end(self, what: str, blamed: list[int], silent: dict[int, float]) -> None:
        with contextlib.suppress(Exception):
            self._write_stack()
        try:
            self._report(what, blamed, silent)
        except Exception:
            pass
        finally:
            os._exit(EXIT_HUNG)

    def _write_stack(self) -> None:
        target = self._stack_file(self.heartbeat.rank)
        with tempfile.TemporaryFile() as file:
            faulthandler.dump_traceback(file.fileno(), all_threads=True)
            file.seek(0)
            content = file.read()
        aside = target.with_suffix(".part")
        aside.write_bytes(content)
        aside.rename(target)

    def _stack_file(self, rank: int) -> Path:
        return self.heartbeat.folder / f"stack{rank}-{self.heartbeat.latest.attempt}.txt"

    def _report(self, what: str, blamed: list[int], silent: dict[int, float]) -> None:
        heartbeat, me = (self.heartbeat, self.heartbeat.rank)
        path = heartbeat.folder / f"report-{heartbeat.latest.attempt}.txt"
        file = None
        try:
            file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        except FileExistsError:
            for _ in range(int((3 * self.interval + 8) / 0.05)):
                if path.read_text(encoding="utf-8").endswith("\n"):
                    time.sleep(0.3)
                    break
                time.sleep(0.05)
            return
        except OSError:
            pass
        try:
            beats = heartbeat.read()
        except Exception:
            beats = [None] * heartbeat.world_size
        beats[me] = heartbeat.latest
        missing = {r for r in blamed if r != me and beats[r] is not None and (not beats[r].note)}
        for _ in range(int((3 * self.interval + 2) / 0.05)):
            missing = {r for r in missing if not self._stack_file(r).exists()}
            if not missing:
                break
            time.sleep(0.05)
        text = self._text(what, blamed, silent, beats)
        if file is not None:
            with os.fdopen(file, "w", encoding="utf-8") as file:
                file.write(text)
        with contextlib.suppress(Exception):
            sys.stderr.write(text)
            sys.stderr.flush()
        here = pid_space()
        for beat in (beats[r] for r in blamed if r != me):
            if beat is not None and beat.host == here and (beat.pid != os.getpid()):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(beat.pid, signal.SIGKILL)

    def _text(
        self, what: str, blamed: list[int], silent: dict[int, float], beats: Sequence[Beat | None]
    ) -> str:
        lines = [what]
        for rank, beat in enumerate(beats):
            where = f"rank {rank}{(' (this one)' if rank in blamed else '')}: "
            if beat is None:
                lines.append(where + "has not begun")
                continue
            ago = f", {silent[rank]:.1f} s ago" if rank in silent else ""
            where += f"step {beat.step}, {beat.place} (point {beat.count}){ago}, {beat.status}"
            lines.append(f"{where}, process {beat.pid} on {beat.host.partition(' ')[0]}")
        for rank in blamed:
            beat, file = (beats[rank], self._stack_file(rank))
            stack = beat.note if beat else ""
            if not stack and file.exists():
                stack = file.read_text(encoding="utf-8")
            lines.append(f"\nstack of rank {rank}:\n{stack or 'none: it does not answer'}")
        return "\n".join(lines) + "\n"


PUBLISHING = threading.RLock()


def _read_one(self: Heartbeat, rank: int) -> Beat | None:
    try:
        with open(self.folder / f"beat-{rank}", "rb") as file:
            beat = Beat(**json.loads(file.read()))
    except (FileNotFoundError, ValueError, TypeError):
        return None
    return beat if beat.attempt == self.latest.attempt else None


Heartbeat._read_one = _read_one
