"""Checks of exercise 4.1: a process is really killed in the middle of a save, or power fails."""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Callable
from typing import Any

from distlab.grading import exercise, expect_equal, fail
from tests.phase4.disk import Disk, in_child, without_waiting
from tests.phase4.kills import (
    expect_kept_at_every_operation,
    expect_kept_at_random_times,
    killed_at_every_operation,
    killed_at_random_times,
)


@exercise("4.1", "gloo", asserts="whole clears")
def test_killed_at_every_operation(impl, run, seed, folder):
    """SIGKILL at every operation on the disk, writes half done: the old state or the new, whole."""

    def body(ctx):
        return killed_at_every_operation(impl, folder / "store", "on")

    [notes] = run(body, 1, process_group=False, timeout=55)
    expect_kept_at_every_operation(notes, "on")


@exercise("4.1", "gloo", asserts="whole on-disk parents")
def test_power_fails_at_every_operation(impl, run, seed, folder):
    """The same, and unflushed data are lost, or on the disk before data that should come first."""

    def body(ctx):
        return [killed_at_every_operation(impl, folder / how, how) for how in ("off", "torn")]

    [[off, torn]] = run(body, 1, process_group=False, timeout=55)
    expect_kept_at_every_operation(off, "off")
    expect_kept_at_every_operation(torn, "torn")


@exercise("4.1", "gloo", asserts="whole clears")
def test_killed_at_random_times(impl, run, seed, folder):
    """SIGKILL after random times, again and again: the old state or the new, and no leftovers."""

    def body(ctx):
        return killed_at_random_times(impl, folder / "store", seed)

    [[notes, names]] = run(body, 1, process_group=False, timeout=55)
    expect_kept_at_random_times(notes, names)


FILES = {"a.bin", "b.bin"}
DELETIONS = 12  # operations of the disk after which a prune is killed, at most


class MarkerLast:
    """The result of ``os.scandir`` where a file system lists the marker after the other files."""

    def __init__(self, real: Callable[..., Any], *args: Any) -> None:
        with real(*args) as entries:
            found = sorted(entries, key=lambda entry: (entry.name == "COMPLETE", entry.name))
        self.left = iter(found)

    def __iter__(self) -> MarkerLast:
        return self

    def __next__(self) -> Any:
        return next(self.left)

    def __enter__(self) -> MarkerLast:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    close = __exit__


@exercise("4.1", "gloo", asserts="half-deleted clears")
def test_killed_while_old_ones_are_deleted(impl, run, seed, folder):
    """SIGKILL at every operation of prune: a checkpoint that lost a file does not
    count, and begin clears it."""

    def body(ctx):
        without_waiting()
        root = folder / "store"
        files = impl.CheckpointFolder(root)
        notes = []
        for at in range(DELETIONS):
            name = files.begin(at)
            cleared = sorted(os.listdir(root))
            entries = {}
            for file in FILES:
                (root / f"{name}.partial" / file).write_bytes(b"")
                entries[file] = {"bytes": 0, "sha256": ""}
            files.finish(name, {"step": at, "score": None, "files": entries})

            def work(at: int = at) -> None:
                os.scandir = functools.partial(MarkerLast, os.scandir)
                Disk(root, die_at=at)
                files.prune(1, 0)

            status = in_child(work)
            left = {entry: sorted(os.listdir(root / entry)) for entry in sorted(os.listdir(root))}
            notes.append((name, status, cleared, left))
            if status == 0 and at > 1:  # the first one has nothing to delete
                break
        return notes

    [notes] = run(body, 1, process_group=False)
    whole = {*FILES, "manifest.json", "COMPLETE"}
    before: dict[str, list[str]] = {}
    for at, (name, status, cleared, left) in enumerate(notes):
        when = f"prune killed at its operation {at}"
        if status not in (0, signal.SIGKILL):
            fail(f"{when}: it raised (see what was printed)", cause="exception", rank=0)
        stay = [n for n, names in before.items() if "COMPLETE" in names and len(n) == len(name)]
        want = sorted([*stay, f"{name}.partial"])
        expect_equal(cleared, want, what=f"{when} before: after the next begin", cause="leftovers")
        for entry, names in left.items():
            if len(entry) == len(name) and "COMPLETE" in names and not whole <= {*names}:
                lost = sorted(whole - {*names})
                fail(f"{when}: {entry} has lost {lost}, and still counts", cause="half-deleted")
        if not whole <= {*left.get(name, [])}:
            fail(f"{when}: the newest one, {name}, is gone or has lost files", cause="lost")
        before = left
    if notes[-1][1] != 0:
        fail(f"prune has not ended after {len(notes)} operations on the disk", cause="endless")
