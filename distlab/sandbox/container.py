"""The container as the sandbox: where no namespaces can be had, ranks run as another user.

Most containers of a class's platform allow no namespaces, and are thrown away after a grading. Root
grades in them; ranks run with the id of a user that nobody has, so file modes and the kernel's
rules for signals and memory are the walls. The network, /proc and world-writable folders are shared
with the grader; SECURITY.md says what that means.
"""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

from .limits import IDS, nobody
from .walls import PARTS

ANSWERS = ("solutions", "tests", "references", ".git")  # of the course
PRIVATE = ("/var/tmp", "/run/lock")  # where anybody may write, beside /tmp and /dev/shm


def obstacle(course: Path) -> str:
    """Why ranks can't run as another user here, in one line; "" if they can."""
    if os.geteuid() != 0:
        return "only root can run code as another user"
    said = next(filter(None, (is_open(course / name) for name in ANSWERS)), "")
    if said:
        return said
    needed = [*(course / name for name in PARTS), Path(sys.executable).resolve(), Path(sys.prefix)]
    for path in dict.fromkeys(each for name in needed for each in (name, *name.parents)):
        if not stat.S_IMODE(path.stat().st_mode) & (0o001 if path.is_dir() else 0o004):
            return f"other users may not use {path}: `chmod go+rX {path}`"
    return ""


def user() -> int:
    """The id of ranks: no sandbox made of namespaces has it, because here all its processes are
    killed after a run. Each grader has its own."""
    unused = nobody()
    if unused is None:
        raise ValueError("only root can run code as another user")
    return unused - IDS


def is_open(path: Path) -> str:
    """That other users may read the file or folder, in one line; "" if not."""
    if path.exists() and stat.S_IMODE(path.stat().st_mode) & 0o007:
        return f"every user may read {path}: `chmod -R go-rwx {path}`"
    return ""


def alone() -> bool:
    """Whether this process is the only one of its user, and the user not root."""
    return os.getuid() != 0 and not any(map(_is_mine, filter(str.isdigit, os.listdir("/proc"))))


def _is_mine(number: str) -> bool:
    """Whether this is another process of the user that still lives."""
    try:
        status = Path(f"/proc/{number}/stat").read_text(encoding="utf-8", errors="replace")
        mine = os.stat(f"/proc/{number}").st_uid == os.getuid()
    except OSError:
        return False
    return mine and int(number) != os.getpid() and status.rpartition(")")[2].split()[0] not in "ZX"


@contextlib.contextmanager
def open_to(user: int, folder: Path) -> Iterator[None]:
    """The user may read what is in ``folder`` and nobody else; above it the user may pass."""
    own = [folder, *folder.rglob("*")]
    for path in own:
        _hand(path, user, 0o750 if path.is_dir() else 0o640)
    for above in folder.parents:
        mode = stat.S_IMODE(above.stat().st_mode)
        if not mode & 0o001:
            above.chmod(mode | 0o001)
    try:
        yield
    finally:
        for path in own:
            if os.path.lexists(path):
                _hand(path, 0, 0o700 if path.is_dir() else 0o600)


def _hand(path: Path, group: int, mode: int) -> None:
    """Links stay as they are: ``Sandbox`` has refused those that leave the folder."""
    if not path.is_symlink():
        os.chown(path, 0, group)
        path.chmod(mode)


def end(user: int) -> None:
    """Kill all processes of the user, however they have hidden."""
    pid = os.fork()
    if pid == 0:
        try:
            os.setresgid(user, user, user)
            os.setresuid(user, user, user)
            os.kill(-1, signal.SIGKILL)
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
