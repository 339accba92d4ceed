"""A disk that can be watched, fill up and lose its cache; for processes of one's own (ranks)."""

from __future__ import annotations

import builtins
import errno
import functools
import io
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

MOVING = ("rename", "replace", "link")
CHANGING = ("mkdir", *MOVING, "unlink", "remove", "rmdir", "truncate")
WRITING = os.O_WRONLY | os.O_RDWR


class Disk:
    """Takes the place of this process's file functions, for good: every change is an operation.

    ``die_at=k``: the process is killed (SIGKILL) at the k-th operation; a write is half done then.
    ``power``: "on", or "off": when the process dies the disk loses, in addition, whatever was not
    flushed: files are cut in half, and names that were made or changed in a folder since its last
    ``fsync`` are as before; or "torn": so they are, but for the last one in each folder, which the
    disk had written first. ``operations`` counts. Nothing really waits for the disk.
    """

    def __init__(self, root: Path, die_at: int = 0, power: str = "on") -> None:
        self.root, self.die_at, self.power, self.operations = root, die_at, power, 0
        self.flushed: dict[int, tuple[int, int]] = {}  # inode -> size and time when flushed
        self.names: dict[int, dict[str, int]] = {}  # a folder's inode -> its entries when flushed
        self.latest: dict[str, str] = {}  # folder -> the entry that was made last
        for where, _, _ in os.walk(root):  # what is there before is on the disk
            self._note(where)
            for entry in os.scandir(where):
                self._note(entry.path)
        for name in CHANGING:
            setattr(os, name, self._counted(getattr(os, name)))
        os.write = self._torn(os.write)
        os.fsync = os.fdatasync = self._flush
        os.open = self._counted(os.open, lambda path, flags, *_: flags & WRITING)
        self._open, builtins.open, io.open = open, self._opened, self._opened

    def _note(self, file: Any) -> None:
        found = os.stat(file)
        if os.path.isdir(file):
            self.names[found.st_ino] = {e.name: e.inode() for e in os.scandir(file)}
        else:
            self.flushed[found.st_ino] = found.st_size, found.st_mtime_ns

    def _flush(self, file: Any) -> None:
        self.operation()
        self._note(file if isinstance(file, int) else file.fileno())

    def operation(self, last_words: Callable[[], object] = lambda: None) -> None:
        """Count one more; die if it is its turn."""
        self.operations += 1
        if self.operations == self.die_at:
            last_words()
            self.end()

    def end(self) -> NoReturn:
        """The process is killed now."""
        if self.power != "on" and self.root.exists():
            self.die_at = 0
            self._lose(str(self.root))
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError

    def _lose(self, where: str) -> None:
        known = self.names.get(os.stat(where).st_ino, {})
        now = {e.name: e.inode() for e in os.scandir(where)}
        new = [name for name in now if name not in known]
        if self.power == "torn" and self.latest.get(where) in new:
            new.remove(self.latest[where])
        for name, inode in now.items():
            path = os.path.join(where, name)
            if name in new:
                before = [n for n, i in known.items() if i == inode and n not in now]
                if before:
                    path = os.path.join(where, before[0])
                    os.rename(os.path.join(where, name), path)
                elif os.path.isdir(path):
                    shutil.rmtree(path)
                    continue
                else:
                    os.unlink(path)
                    continue
            if os.path.isdir(path):
                self._lose(path)
                continue
            found = os.stat(path)
            if self.flushed.get(inode) != (found.st_size, found.st_mtime_ns):
                os.truncate(path, found.st_size // 2)

    def _counted(
        self, real: Callable[..., Any], applies: Callable[..., Any] = lambda *_: True
    ) -> Callable[..., Any]:
        @functools.wraps(real)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not applies(*args):
                return real(*args, **kwargs)
            self.operation()
            result = real(*args, **kwargs)
            self._made(args[1] if real.__name__ in MOVING else args[0])
            if real.__name__ == "mkdir":  # its inode may have been that of a deleted folder
                self.names.pop(os.stat(args[0]).st_ino, None)
            return result

        return call

    def _made(self, path: Any) -> None:
        where, name = os.path.split(os.fspath(path))
        self.latest[where] = name

    def _torn(self, real: Callable[[int, Any], int]) -> Callable[[int, Any], int]:
        def write(file: int, data: Any) -> int:
            if file > 2:
                self.operation(lambda: real(file, bytes(data)[: len(data) // 2]))
            return real(file, data)

        return write

    def _opened(self, file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        plain = mode.replace("b", "").replace("t", "")
        if plain == "r" or isinstance(file, int):
            return self._open(file, mode, *args, **kwargs)
        self.operation()
        raw = _Raw(self, file, plain)
        self._made(file)
        buffered = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
        return buffered if "b" in mode else io.TextIOWrapper(buffered, encoding="utf-8")


class _Raw(io.FileIO):
    """A file whose writes are operations of the disk."""

    def __init__(self, disk: Disk, *args: Any) -> None:
        self.disk = disk
        super().__init__(*args)

    def write(self, data: Any) -> int | None:
        half = bytes(data)[: len(data) // 2]
        self.disk.operation(lambda: io.FileIO.write(self, half))
        return super().write(data)


def without_waiting() -> None:
    """From now on this process never waits for the disk."""
    os.fsync = os.fdatasync = lambda file: None


def full_for(concerned: Callable[[], bool]) -> None:
    """From now on the disk is full for whoever is concerned: nothing can be flushed any more."""

    def fsync(file: Any) -> None:
        if concerned():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    os.fsync = os.fdatasync = fsync


def slow(seconds: Callable[[], float]) -> None:
    """From now on whatever changes the disk takes so many seconds more."""

    def slowed(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            time.sleep(seconds())
            return real(*args, **kwargs)

        return call

    for name in ("mkdir", "rename", "replace"):
        setattr(os, name, slowed(getattr(os, name)))
    os.fsync = slowed(lambda file: None)


def in_child(work: Callable[[], object]) -> int:
    """Run ``work`` in a forked process; its wait status: 0, or what it died of."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        except BaseException as error:
            os.write(2, f"{type(error).__name__}: {error}\n".encode())
            os._exit(1)
        os._exit(0)
    return os.waitpid(pid, 0)[1]
