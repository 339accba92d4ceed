"""The container as the sandbox: where namespaces are not allowed, ranks run as another user.

Most containers of a class's platform allow no namespaces, and are thrown away after a grading. Root
grades in them. Ranks run with an unused user id, so file modes and the kernel's rules for signals
and memory are the walls. The network, /proc and world-writable folders are shared with the grader.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import stat
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from .limits import IDS, Limits, become, nobody
from .place import Sandbox
from .process import Agent
from .walls import PARTS, PRIVATE, settings

ANSWERS = ("solutions", "tests", "references", ".git")  # of the course


class OtherUser(Agent):
    """The agent without namespaces, as a user that has nothing else."""

    writable = (*PRIVATE, "/var/tmp", "/run/lock")

    def __init__(
        self,
        course: Path,
        shown: Sequence[tuple[Path, Path]],
        private: Sequence[Path],
        limits: Limits,
        modules: Sequence[str],
    ) -> None:
        self.lent = tuple(private)
        super().__init__(course, shown, private, limits, modules)

    def user(self) -> int:
        """No sandbox made of namespaces has this id, because all processes of the id
        are killed after a run."""
        return user()

    def walls(
        self,
        course: Path,
        shown: Sequence[tuple[Path, Path]],
        private: Sequence[Path],
        filter_fd: int | None,
    ) -> tuple[list[str], dict[str, Any]]:
        """None: the agent begins as root, in a folder where only root writes."""
        return [], {"env": settings(course), "cwd": course}

    def end(self) -> None:
        """Kill the agent and all that its user runs."""
        super().end()
        _kill_all(self.user())

    def answer(self, request: bytes, seconds: float) -> bytes:
        """Ask the agent; meanwhile the user owns the private folders."""
        with contextlib.ExitStack() as stack:
            for folder in self.lent:
                stack.enter_context(lent(self.user(), folder))
            try:
                return super().answer(request, seconds)
            except BaseException:
                _kill_all(self.user())  # before the folders belong to the grader again
                raise


class Container(Sandbox):
    """The same place for ranks, without namespaces: this machine is a container,
    and this process is root."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._open = contextlib.ExitStack()  # the paths that the other user may read

    def __exit__(self, *exc: object) -> None:
        super().__exit__(*exc)
        self._open.close()

    def _copies(self, to: Path) -> Iterator[tuple[Path, Path]]:
        for copy, folder in super()._copies(to):
            self._open.enter_context(open_to(user(), folder))
            yield copy, folder

    def _new(self) -> Agent:
        own = [] if self.shared is None else [self.shared]
        return OtherUser(self.course, self._shown, own, self.limits, self.modules)


def obstacle(course: Path) -> str:
    """Why ranks can't run as another user here, in one line; "" if they can."""
    if nobody() is None:
        return "only root with ids of other users can run code as another user"
    said = next(filter(None, (is_open(course / name) for name in ANSWERS)), "")
    if said:
        return said
    needed = [*(course / name for name in PARTS), Path(sys.executable).resolve(), Path(sys.prefix)]
    for path in dict.fromkeys(each for name in needed for each in (name, *name.parents)):
        if not stat.S_IMODE(path.stat().st_mode) & (0o001 if path.is_dir() else 0o004):
            return f"other users may not use {path}: `chmod go+rX {path}`"
    return ""


def is_open(path: Path) -> str:
    """One line if other users may read the file or folder; "" if not."""
    if path.exists() and stat.S_IMODE(path.stat().st_mode) & 0o007:
        return f"every user may read {path}: `chmod -R go-rwx {path}`"
    return ""


def user() -> int:
    """An id that no user has, and no sandbox that root makes of namespaces.
    Each grader has its own."""
    unused = nobody()
    if unused is None:
        raise ValueError("only root with ids of other users can run code as another user")
    return unused - IDS


@contextlib.contextmanager
def open_to(user: int, folder: Path) -> Iterator[None]:
    """Let the user, and nobody else, read the contents of ``folder``. The user may
    pass the folders above it."""
    own = [folder, *folder.rglob("*")]
    for path in own:
        _hand(path, user, 0o750 if path.is_dir() else 0o640)
    _let_pass(folder)
    try:
        yield
    finally:
        for path in own:
            if os.path.lexists(path):
                _hand(path, 0, 0o700 if path.is_dir() else 0o600)


@contextlib.contextmanager
def lent(user: int, folder: Path) -> Iterator[None]:
    """Give the user an empty folder of this name; afterwards it is again as it was.

    Meanwhile no file of the grader lies where the user may write. Files that ranks leave there come
    out as data.
    """
    kept = folder.with_name(f"{folder.name}-kept")
    folder.rename(kept)
    folder.mkdir(mode=0o700)
    os.chown(folder, user, user)
    _let_pass(folder)
    try:
        yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        kept.rename(folder)


def _hand(path: Path, group: int, mode: int) -> None:
    """Links stay as they are: ``Sandbox`` has refused those that leave the submission."""
    if not path.is_symlink():
        os.chown(path, 0, group)
        path.chmod(mode)


def _let_pass(folder: Path) -> None:
    for above in folder.parents:
        mode = stat.S_IMODE(above.stat().st_mode)
        if not mode & 0o001:
            above.chmod(mode | 0o001)


def _kill_all(user: int) -> None:
    """End all processes of the user, also hidden ones."""
    pid = os.fork()
    if pid == 0:
        try:
            become(user)
            os.kill(-1, signal.SIGKILL)
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
