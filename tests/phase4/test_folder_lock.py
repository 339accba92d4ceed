"""One training per folder: which holds the lock, which is refused, and whose lock is taken over."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from distlab.ranks import RankContext, run_ranks
from solutions.phase4_production import folder_lock
from solutions.phase4_production.folder_lock import NAME, FolderInUseError, FolderLock, locked
from solutions.phase4_production.lock_holder import Holder, me, start_of

FOREVER = 600.0  # seconds: longer than any test
BRIEF = 0.05


@pytest.fixture
def lines() -> list[str]:
    return []


@pytest.fixture
def lock(tmp_path: Path, lines: list[str]) -> Iterator[FolderLock]:
    """A lock on a folder that isn't there yet; its messages go to ``lines``."""
    lock = FolderLock(tmp_path / "folder", say=lines.append, renewal=BRIEF, patience=FOREVER)
    try:
        yield lock
    finally:
        lock.release()


def dead_process() -> int:
    """The id of a process that has ended."""
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        pass
    return process.pid


def leave(folder: Path, name: str = NAME, **fields: object) -> Holder:
    """A lock that another process has left."""
    folder.mkdir(exist_ok=True)
    holder = replace(me(), **fields)
    (folder / name).write_text(json.dumps(asdict(holder)), encoding="utf-8")
    return holder


def holder_of(folder: Path) -> Holder:
    """The holder of the lock, by the only file that is there."""
    assert [path.name for path in folder.iterdir()] == [NAME]
    return Holder(**json.loads((folder / NAME).read_text(encoding="utf-8")))


def test_a_second_one_is_refused_in_a_line_that_names_the_first(lock: FolderLock) -> None:
    lock.acquire()
    second = FolderLock(lock.folder)
    with pytest.raises(FolderInUseError) as caught:
        second.acquire()
    assert lock.own is not None
    words = (f"process {os.getpid()} on ", f"since {lock.own.since}", str(lock.folder))
    assert all(word in str(caught.value) for word in words)
    assert "\n" not in str(caught.value)
    assert holder_of(lock.folder) == lock.own, "the refused one has changed nothing"
    second.release()
    assert holder_of(lock.folder) == lock.own, "only the holder releases"
    lock.release()
    assert list(lock.folder.iterdir()) == []
    second.acquire()
    second.release()


@pytest.mark.parametrize("dead", ["ended", "its id is another's now"])
def test_a_dead_process_is_taken_over_at_once(
    lock: FolderLock, lines: list[str], dead: str
) -> None:
    """By the process id, and by its start: ids are given again."""
    fields = {"pid": dead_process()} if dead == "ended" else {"started": "7"}
    was = leave(lock.folder, **fields)
    lock.acquire()
    assert holder_of(lock.folder) == lock.own
    assert lines == [f"took over {lock.folder}: {was} has ended without releasing it"]


def test_a_zombie_is_dead(lock: FolderLock) -> None:
    if not Path("/proc/self/stat").exists():
        pytest.skip("needs /proc")
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        started = start_of(process.pid)
        leave(lock.folder, pid=process.pid, started=started)
        with pytest.raises(FolderInUseError):
            lock.acquire()
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it ends, and is not collected
        lock.acquire()


def test_a_holder_elsewhere_that_renews_is_alive(lock: FolderLock, lines: list[str]) -> None:
    """However long its last renewal is ago by this machine's clock."""
    leave(lock.folder, host="elsewhere")
    stop = threading.Event()

    def renew() -> None:
        seconds = 1000
        while not stop.wait(BRIEF):
            seconds += 1
            os.utime(lock.folder / NAME, (seconds, seconds))

    thread = threading.Thread(target=renew)
    thread.start()
    try:
        with pytest.raises(FolderInUseError, match=r"in use by process \d+ on elsewhere"):
            lock.acquire()
    finally:
        stop.set()
        thread.join()
    assert "waiting up to 600 s" in lines[0]


def test_a_holder_elsewhere_that_does_not_renew_is_taken_over(
    lock: FolderLock, lines: list[str]
) -> None:
    leave(lock.folder, host="elsewhere")
    lock.patience = BRIEF
    lock.acquire()
    assert holder_of(lock.folder) == lock.own
    assert "has not renewed it for 0.05 s" in lines[-1]


def test_a_holder_elsewhere_that_leaves_is_followed(lock: FolderLock) -> None:
    """Long before its time is over."""
    leave(lock.folder, host="elsewhere")
    lock.say = lambda line: (lock.folder / NAME).unlink()
    lock.acquire()
    assert holder_of(lock.folder) == lock.own


def test_a_job_of_slurm_that_moved_goes_on_at_once(
    lock: FolderLock, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_CLUSTER_NAME", "alps")
    monkeypatch.setenv("SLURM_JOB_ID", "41")
    leave(lock.folder, host="elsewhere")
    lock.acquire()
    assert "SLURM job 41" in lines[-1]
    lock.release()
    leave(lock.folder, host="elsewhere", job="other 41")
    lock.patience = BRIEF
    lock.acquire()
    assert "has not renewed it" in lines[-1], "the same number on another cluster is another job"


def test_the_holder_renews_and_restores_its_lock(lock: FolderLock) -> None:
    lock.acquire()
    first = folder_lock.time_of(lock.folder / NAME)
    wait_for(lambda: folder_lock.time_of(lock.folder / NAME) > first)
    (lock.folder / NAME).unlink()
    wait_for(lambda: (lock.folder / NAME).exists())
    wait_for(lambda: len(list(lock.folder.iterdir())) == 1)
    assert holder_of(lock.folder) == lock.own


def test_a_holder_that_was_taken_over_is_told_and_leaves_the_other_one_alone(
    lock: FolderLock,
) -> None:
    told: list[str] = []
    lock.lost = told.append
    lock.acquire()
    other = leave(lock.folder, pid=1)
    wait_for(lambda: bool(told))
    assert f"was taken over by process 1 on {other.host.partition(' ')[0]}" in told[0]
    lock.release()
    assert holder_of(lock.folder) == other


def leave_state(folder: Path, state: str) -> None:
    """The folder that two starters find: no lock, a dead lock, or one whose
    successor died on the way."""
    folder.mkdir()
    if state != "nothing":
        dead = leave(folder, pid=dead_process())
        if state == "a dead successor":  # it had linked its file, and not yet put it in front
            leave(folder, f"{NAME}.{dead.token}", pid=dead_process())


def outcomes(locks: list[FolderLock], meanwhile=lambda: None) -> list[str]:
    """The outcome of locks that are acquired at once, each in a thread."""
    found = [""] * len(locks)

    def start(number: int) -> None:
        try:
            locks[number].acquire()
            found[number] = "won"
        except FolderInUseError:
            found[number] = "refused"

    threads = [threading.Thread(target=start, args=(k,)) for k in range(len(locks))]
    for thread in threads:
        thread.start()
    meanwhile()
    for thread in threads:
        thread.join(60)
    return found


STATES = ["nothing", "a dead lock", "a dead successor"]


@pytest.mark.parametrize("state", STATES)
def test_of_two_at_once_one_wins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    """Both have found the place free before either puts its file there."""
    folder = tmp_path / "folder"
    leave_state(folder, state)
    gate, put = threading.Barrier(2), folder_lock.put
    first = threading.local()

    def together(*paths: Path) -> bool:
        if not getattr(first, "passed", False):
            first.passed = True
            gate.wait(60)
        return put(*paths)

    monkeypatch.setattr(folder_lock, "put", together)
    locks = [FolderLock(folder), FolderLock(folder)]
    assert sorted(outcomes(locks)) == ["refused", "won"]
    (winner,) = [lock for lock in locks if lock.own]
    assert holder_of(folder) == winner.own
    winner.release()
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("state", STATES[1:])
def test_who_comes_too_late_does_not_take_over_the_winner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    """It has found the holder dead, and acts when another process has taken over completely."""
    folder = tmp_path / "folder"
    leave_state(folder, state)
    winner, late = FolderLock(folder), FolderLock(folder)
    judged, go_on, why_dead = threading.Event(), threading.Event(), late._why_dead

    def slowly(path: Path, holder: Holder) -> str | None:
        reason = why_dead(path, holder)
        judged.set()
        go_on.wait(60)
        return reason

    def win() -> None:
        judged.wait(60)
        winner.acquire()
        go_on.set()

    monkeypatch.setattr(late, "_why_dead", slowly)
    assert outcomes([late], win) == ["refused"]
    assert holder_of(folder) == winner.own
    winner.release()


def test_without_hard_links(lock: FolderLock, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(os, "link", refuse)
    leave(lock.folder, pid=dead_process())
    lock.acquire()
    assert holder_of(lock.folder) == lock.own
    with pytest.raises(FolderInUseError):
        FolderLock(lock.folder).acquire()


def test_ranks_are_refused_together(tmp_path: Path) -> None:
    """The first rank alone looks; an error that all ranks raise releases the lock,
    another error does not."""

    def body(ctx: RankContext) -> list[str]:
        def attempt(error: Exception | None) -> str:
            try:
                with locked(tmp_path, "test"):
                    if error:
                        raise error
            except Exception as caught:
                return f"{type(caught).__name__}: {caught}"
            return "held"

        return [attempt(e) for e in (None, ValueError("all"), KeyError("one"), None)]

    for found in run_ranks(body, 2, ledger=False):
        assert found[:3] == ["held", "ValueError: all", "KeyError: 'one'"]
        assert found[3].startswith(f"FolderInUseError: {tmp_path} is in use by process")
    assert holder_of(tmp_path).pid != os.getpid()


def wait_for(happened) -> None:
    end = time.monotonic() + 60
    while not happened():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)
