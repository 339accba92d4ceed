"""The process inside a sandbox that runs ranks: it gets requests, and answers with plain data.

Ranks are forked from it. They run untrusted code as the same user, so this process is closed to
them: its memory and descriptors can't be looked into (PR_SET_DUMPABLE), they don't inherit the
socket, and after each run every other process of the sandbox is killed and its files are removed.
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
import sys
from collections.abc import Callable, Collection, Sequence
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

SET_DUMPABLE = 4
FIRST = 1  # its number in the sandbox: the kernel drops signals from inside to the first process
Body = Callable[..., Any]


def main(text: str) -> None:
    """Answer requests until nobody can ask any more."""
    task = json.loads(text)
    if (os.getpid(), socket.gethostname()) != (FIRST, HOSTNAME):
        sys.exit("the agent kills all processes that it can: it runs in a sandbox only")
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python's own handler would be called
    if task["user"] is not None:
        become(task["user"])
    no_capabilities()
    die_with_parent(0)  # who is outside; the kernel forgets it when ids change
    limits = Limits(**task["limits"])
    limits.hold()
    os.register_at_fork(after_in_child=lambda: _as_rank(limits))
    become_subreaper()
    prctl(SET_DUMPABLE, 0)
    private = task["private"]
    own = set(_files(private))
    os.chdir(private[0])  # of ranks: they may write there
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


def _as_rank(limits: Limits) -> None:
    """In each process that is forked here."""
    prctl(SET_DUMPABLE, 1)  # the parent looks at what its ranks wait for
    limits.hold_rank()


def _answered(request: bytes) -> bytes:
    """What came of it, after the files that the run has left."""
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
    """Remove every file that was not there at first; whether none is left."""
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
    """So that they can be emptied."""
    os.chmod(path, 0o700)
    for folder, names, _ in os.walk(path):
        for name in names:
            if not os.path.islink(os.path.join(folder, name)):
                os.chmod(os.path.join(folder, name), 0o700)


def _files(private: Sequence[str], own: Collection[str] | None = None) -> list[str]:
    """What lies where this user may write: also in folders that were there before (``own``, first
    all), which lead to what is shown inside."""
    found = []
    todo = list(private)
    while todo:
        folder = todo.pop()
        device = os.stat(folder).st_dev
        with os.scandir(folder) as entries:
            for entry in entries:
                found.append(entry.path)
                old = own is None or entry.path in own
                if old and entry.is_dir(follow_symlinks=False):
                    todo += [entry.path] if entry.stat().st_dev == device else []
    return found


if __name__ == "__main__":
    main(sys.argv[1])
