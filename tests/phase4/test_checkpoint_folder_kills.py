"""Checks of exercise 4.1: a process is really killed in the middle of a save, or power fails."""

from __future__ import annotations

from distlab.grading import exercise
from tests.phase4.kills import (
    expect_kept_at_every_operation,
    expect_kept_at_random_times,
    killed_at_every_operation,
    killed_at_random_times,
)


@exercise("4.1", "gloo")
def test_killed_at_every_operation(impl, run, seed, folder):
    """SIGKILL at every operation on the disk, writes half done: the old state or the new, whole."""

    def body(ctx):
        return killed_at_every_operation(impl, folder / "store", "on")

    [notes] = run(body, 1, process_group=False, timeout=55)
    expect_kept_at_every_operation(notes, "on")


@exercise("4.1", "gloo")
def test_power_fails_at_every_operation(impl, run, seed, folder):
    """The same, and what was not flushed is lost, or there before what should come before it."""

    def body(ctx):
        return [killed_at_every_operation(impl, folder / how, how) for how in ("off", "torn")]

    [[off, torn]] = run(body, 1, process_group=False, timeout=55)
    expect_kept_at_every_operation(off, "off")
    expect_kept_at_every_operation(torn, "torn")


@exercise("4.1", "gloo")
def test_killed_at_random_times(impl, run, seed, folder):
    """SIGKILL after random times, again and again: the old state or the new, and no leftovers."""

    def body(ctx):
        return killed_at_random_times(impl, folder / "store", seed)

    [[notes, names]] = run(body, 1, process_group=False, timeout=55)
    expect_kept_at_random_times(notes, names)
