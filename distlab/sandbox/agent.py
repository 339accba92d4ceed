"""The process inside a sandbox that runs ranks: it gets requests, and answers with plain data.

Ranks are forked from it. They run untrusted code as the same user, so this process is closed to
them. They can't look into its memory and descriptors (PR_SET_DUMPABLE), and they don't inherit the
socket. After each run every other process of the sandbox is killed, and its files are removed.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import pickle
import shutil
import signal
import socket
import stat
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from ..host.forking import prepare_to_fork
from ..host.processes import become_subreaper, die_with_parent, not_for_children
from ..host.system import no_capabilities, prctl
from ..ranks.results import RankFailure, RankResults
from ..ranks.run import run_ranks
from ..virtual import reap_children, run_worlds
from . import files, wire
from .limits import Limits, become
from .walls import HOSTNAME

SET_DUMPABLE, NO_NEW_PRIVS = 4, 38
FIRST = 1  # its number in the sandbox: the kernel drops signals from inside to the first process
Body = Callable[..., Any]


def main(text: str) -> None:
    """Answer requests until nobody can ask any more."""
    task = json.loads(text)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python's own handler would be called
    limits = Limits(**task["limits"])
    walled = (os.getpid(), socket.gethostname()) == (FIRST, HOSTNAME)
    if task["user"] is not None and (walled or limits.container):
        become(task["user"])
    if not (_alone() if limits.container else walled):
        sys.exit("the agent kills all processes that it can: it runs in a sandbox only")
    no_capabilities()
    if limits.container:
        prctl(NO_NEW_PRIVS, 1)
    else:
        die_with_parent(0)  # the parent is outside; the kernel forgets it when ids change
    limits.hold()
    os.register_at_fork(after_in_child=lambda: _as_rank(limits))
    become_subreaper()
    prctl(SET_DUMPABLE, 0)
    private = task["private"]
    own = set(_files(private))
    os.chdir(private[0])  # of ranks, which may write there
    import torch

    torch.set_num_threads(1)  # a process forked from this one would wait for its lost threads
    for name in task["modules"]:
        importlib.import_module(name)
    prepare_to_fork()
    null = os.open(os.devnull, os.O_RDWR)
    for each in (0, 1, 2):
        os.dup2(null, each)
    os.close(null)
    with socket.socket(fileno=task["socket"]) as asked:
        wire.send(asked, b"ready")
        while request := wire.receive(asked):
            not_for_children.append(asked.fileno())
            answer = _answered(request)
            not_for_children.remove(asked.fileno())
            clean = _clean(private, own)
            wire.send(asked, bytes([clean]) + answer)
            if not clean:
                break


def _alone() -> bool:
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


def _as_rank(limits: Limits) -> None:
    """Set up each process that is forked here."""
    prctl(SET_DUMPABLE, 1)  # the parent looks at what its ranks wait for
    limits.hold_rank()


def _answered(request: bytes) -> bytes:
    """The answer to a request: the run's outcome, after the files that the run has left."""
    name, rest = wire.parted(request)
    given, asked = wire.parted(rest)
    folder = Path(os.fsdecode(name)) if name else None
    left, went_well = b"", False
    try:
        if folder is not None:
            files.unpacked(given, folder)
        modules, kind, body, sizes, args, options = pickle.loads(asked)
        for module in modules:
            with contextlib.suppress(ImportError):  # of one kind of machine only
                importlib.import_module(module)
        answer = wire.packed(_run(kind, body, sizes, args, options))
        went_well = True
    except RankFailure as failure:
        answer = wire.packed_failure(failure)
    except BaseException as error:
        answer = wire.packed_error(error)
    _end_others()
    if folder is not None:
        try:
            left = files.packed(folder)
        except (files.TooMuch, OSError) as error:
            lost = RankFailure(f"the run left files that can't be read: {error}", kind="crash")
            answer = wire.packed_failure(lost) if went_well else answer
    return wire.joined(left, answer)


def _run(
    kind: str, body: Body, sizes: Sequence[int], args: tuple[Any, ...], options: dict[str, Any]
) -> Sequence[RankResults]:
    if kind == "ranks":
        return [run_ranks(body, sizes[0], *args, **options)]
    return run_worlds(body, sizes, *args, **options)


# -- between two runs -----------------------------------------------------------------------------
def _end_others() -> None:
    """Kill every other process inside."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)
    reap_children()
    with contextlib.suppress(ChildProcessError):
        while True:
            os.waitpid(-1, 0)


def _clean(private: Sequence[str], own: set[str]) -> bool:
    """Remove every file that was not there at first; returns whether none is left."""
    left = [path for path in _files(private, own) if path not in own]
    for path in left:
        with contextlib.suppress(OSError, RecursionError):
            if os.path.isdir(path) and not os.path.islink(path):
                _open_folders(path)
                shutil.rmtree(path, ignore_errors=True)
            else:
                os.unlink(path)
    return not any(os.path.lexists(path) for path in left)


def _open_folders(path: str) -> None:
    """Open folders so that they can be emptied."""
    os.chmod(path, 0o700)
    for folder, names, _ in os.walk(path):
        for name in names:
            if not os.path.islink(os.path.join(folder, name)):
                os.chmod(os.path.join(folder, name), 0o700)


def _files(private: Sequence[str], own: Collection[str] | None = None) -> list[str]:
    """The files where this user may write, also in folders that were there before (``own``, first
    all), which lead to the files shown inside. In a container other users have files there, too."""
    found = []
    todo = list(private)
    while todo:
        folder = todo.pop()
        for path, status, is_mount in _entries(folder):
            if own is not None and status.st_uid != os.getuid():
                continue
            found.append(path)
            if (own is None or path in own) and stat.S_ISDIR(status.st_mode) and not is_mount:
                todo.append(path)
    return found


def _entries(folder: str) -> Iterator[tuple[str, os.stat_result, bool]]:
    """The entries of a folder, each with whether it is a mount. Other users' folders are closed,
    and their files come and go."""
    with contextlib.suppress(OSError):
        device = os.stat(folder).st_dev
        for name in os.listdir(folder):
            path = os.path.join(folder, name)
            with contextlib.suppress(FileNotFoundError):
                status = os.lstat(path)
                yield path, status, status.st_dev != device


if __name__ == "__main__":
    main(sys.argv[1])
