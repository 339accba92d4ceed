"""One training per checkpoint folder: a second one is refused, and a dead one's lock is taken over.

Two trainings in one folder delete each other's checkpoints and go on from each other's weights. So
the rank that writes (rank 0) holds a lock: a file LOCK in the folder that names its holder. It is
written under another name and put in place by a hard link, which fails if the name is taken. Of two
processes that start at once exactly one wins, on NFS and Lustre as well.

A process that is killed leaves its lock. Whether the holder is alive

    same host and boot, same container     is seen at once: by process id and start time
    anywhere else                          is seen by renewal: it touches the file every RENEWAL
                                           seconds; who finds none for PATIENCE seconds takes over
    another node, the same SLURM job       needs no question: SLURM runs a job once at a time

No clocks are compared: the waiting process looks whether the file's time changes, by its own clock.

*Taking over.* To delete a dead lock and to make one's own are two steps. Between them another
process may do the same. So a successor is a file LOCK.<token of the dead lock>, which can be linked
once. The holder stands at the end of the chain that begins at LOCK. Then the successor renames its
file to LOCK, and drops the link. A process that linked to a chain that was shortened meanwhile is
not at the end, and looks again.

A holder that was stopped for longer than PATIENCE (a laptop's lid) finds that another process holds
the lock. It ends at once, because the folder now belongs to the other one.

Invariant: a process that is told that it holds the lock is the only one. That lasts until it
releases the lock or does not renew it for PATIENCE seconds.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import torch.distributed as dist

from .exit_codes import REFUSED
from .fault_tolerance import CheckpointError, values_of_all
from .lock_holder import Holder, is_alive, me, slurm_job
from .trainer_config import ConfigError
from .watchdog import pid_space

NAME = "LOCK"
RENEWAL = 5.0  # seconds
PATIENCE = 60.0  # seconds without a renewal after which a holder elsewhere counts as dead


class FolderInUseError(ConfigError):
    """Another training uses the folder: one line that names it."""


class FolderLock:
    """The lock of ``folder``, which is made if it isn't there; for one process, or rank 0 of many.

    ``acquire`` raises FolderInUseError if another process holds it and lives. If that takes time to
    find out, ``say`` is told. A thread calls ``lost`` when another process has taken over.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        say: Callable[[str], object] = lambda line: None,
        lost: Callable[[str], object] = lambda line: None,
        renewal: float = RENEWAL,
        patience: float = PATIENCE,
    ) -> None:
        self.folder, self.say, self.lost = Path(folder), say, lost
        self.renewal, self.patience = renewal, patience
        self.own: Holder | None = None  # while it is held
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    # -- taking ------------------------------------------------------------------------------------
    def acquire(self) -> None:
        """Hold the lock, or raise FolderInUseError."""
        self.folder.mkdir(parents=True, exist_ok=True)
        own = me()
        with self._written(own) as aside:
            while not self._try(own, aside):
                pass
        self.own = own
        self._stop.clear()
        self._thread = threading.Thread(target=self._renew, name="folder lock", daemon=True)
        self._thread.start()

    @contextlib.contextmanager
    def _written(self, own: Holder) -> Iterator[Path]:
        """The future lock, under another name."""
        aside = self.folder / f"{NAME}.{own.token}.partial"
        aside.write_text(json.dumps(asdict(own)), encoding="utf-8")
        try:
            yield aside
        finally:
            aside.unlink(missing_ok=True)

    def _try(self, own: Holder, aside: Path) -> bool:
        """Whether this process holds the lock now; False: look again."""
        end, holder = self._end()
        reason = "" if holder is None else self._why_dead(end, holder)
        if reason is None:  # it has changed meanwhile
            return False
        name = end if holder is None else self.folder / f"{NAME}.{holder.token}"
        if not put(aside, name) or self._end()[1] != own:
            with contextlib.suppress(OSError):
                if read(name) == own:  # at the end of a chain that was shortened
                    name.unlink()
            return False
        if holder is not None:
            self.say(f"took over {self.folder}: {holder} {reason}")
            self._shorten(own, aside)
        return True

    def _end(self) -> tuple[Path, Holder | None]:
        """The last file of the chain, and its writer; (LOCK, None) if there is none."""
        path = self.folder / NAME
        holder = read(path)
        while holder is not None:
            following = self.folder / f"{NAME}.{holder.token}"
            successor = read(following)
            if successor is None:
                break
            path, holder = following, successor
        return path, holder

    def _shorten(self, own: Holder, aside: Path) -> None:
        """Make this process's file the chain's first one, and drop the others."""
        chain: list[Path] = []
        holder = read(self.folder / NAME)
        while holder not in (None, own):
            chain.append(self.folder / f"{NAME}.{holder.token}")
            holder = read(chain[-1])
        os.replace(aside, self.folder / NAME)
        for path in chain:
            path.unlink(missing_ok=True)

    def _why_dead(self, path: Path, holder: Holder) -> str | None:
        """Why the holder counts as dead; None if there is another holder; FolderInUseError if it
        lives."""
        in_use = f"{self.folder} is in use by {holder}: wait for its end, or use another folder"
        if holder.host == pid_space():
            if is_alive(holder):
                raise FolderInUseError(in_use)
            return "has ended without releasing it"
        if holder.job and holder.job == slurm_job():
            return "was this job before it moved"
        self.say(f"{self.folder} was in use by {holder}: waiting up to {self.patience:g} s")
        first, deadline = time_of(path), time.monotonic() + self.patience
        while time.monotonic() < deadline:
            time.sleep(min(self.renewal / 5, 0.5))
            if self._end()[1] != holder:
                return None
            if time_of(path) != first:
                raise FolderInUseError(in_use)
        return f"has not renewed it for {self.patience:g} s"

    # -- keeping -----------------------------------------------------------------------------------
    def _renew(self) -> None:
        """Touch the file until the lock is released, or lost."""
        while not self._stop.wait(self.renewal):
            try:
                path, holder = self._end()
                if holder == self.own:
                    os.utime(path)
                elif holder is None:  # deleted by hand, or by a holder that had been stopped
                    assert self.own is not None  # or it were the holder's equal
                    with self._written(self.own) as aside:
                        put(aside, path)
                elif not self._stop.is_set():
                    self.lost(f"{self.folder} was taken over by {holder}")
                    return
            except OSError:  # a file system that is away for a moment
                continue

    def release(self) -> None:
        """Let the next process in; nothing if the lock is not held."""
        if self.own is None:
            return
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        with contextlib.suppress(OSError):
            path, holder = self._end()
            if holder == self.own:
                path.unlink()
        self.own = None


@contextlib.contextmanager
def locked(folder: str | Path, program: str) -> Iterator[None]:
    """Rank 0 holds the lock of ``folder`` while the block lasts. Collective where it begins.

    Raises FolderInUseError or OSError on all ranks. The lock is released when the block is left in
    order, or by an error that all ranks raise. After any other error a thread may still be writing:
    then the lock ends with the process. A line names ``program`` when the lock is lost, which ends
    it.
    """

    def lost(line: str) -> None:
        print(f"{program}: {line}", file=sys.stderr, flush=True)
        os._exit(REFUSED)

    lock = FolderLock(folder, say=lambda line: print(line, flush=True), lost=lost)
    refused, problem = False, ""
    if not dist.is_initialized() or dist.get_rank() == 0:
        try:
            lock.acquire()
        except (FolderInUseError, PermissionError, FileExistsError, NotADirectoryError) as error:
            refused, problem = True, str(error)
        except OSError as error:
            problem = str(error)
    refused, problem = values_of_all([refused, problem])[0]
    if problem:
        raise FolderInUseError(problem) if refused else OSError(problem)
    try:
        yield
    except (CheckpointError, ValueError):
        lock.release()
        raise
    lock.release()


def put(aside: Path, name: Path) -> bool:
    """Give the file ``aside`` the name ``name`` as well; whether that name was free."""
    try:
        os.link(aside, name)
    except FileExistsError:
        return False
    except FileNotFoundError:
        raise
    except OSError:  # a file system without hard links: the text comes a moment after the name
        try:
            number = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:
            return False
        with open(number, "wb") as file:
            file.write(aside.read_bytes())
    return True


def read(path: Path) -> Holder | None:
    """The writer of the lock ``path``; None if there is none."""
    deadline = time.monotonic() + 2 * RENEWAL
    while True:
        try:
            return Holder(**json.loads(path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return None
        except (ValueError, TypeError):  # being written, or torn
            if time.monotonic() > deadline:
                raise FolderInUseError(f"{path} can't be read; delete it if nothing runs") from None
            time.sleep(0.05)


def time_of(path: Path) -> int:
    """The time of the last renewal; opened, so that a network file system asks its server."""
    try:
        with open(path, "rb") as file:
            return os.fstat(file.fileno()).st_mtime_ns
    except FileNotFoundError:
        return -1
