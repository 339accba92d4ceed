"""Processes that are really killed in the middle of a save, and power failures; for 4.1 and 4.15.

Whatever was killed when, loading must give a whole checkpoint: the one being saved, or the one
before. And what ``save`` has returned from must be there. Ranks kill, and note what was found
after each time; the parent judges the notes.
"""

from __future__ import annotations

import mmap
import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from distlab.grading import fail
from tests.phase4.disk import Disk, in_child, without_waiting

SIZE = 270_000  # elements: more than one write per file
KILLS = 70  # per way of dying

# what `load` gave: an error's sentence; nothing; or the step, and what the parts of each tree say
Found = str | tuple[int, list[list[Any]]] | None


# -- what ranks run -------------------------------------------------------------------------------
def state(number: int) -> dict[str, Any]:
    """A state in which every part says which one it is."""
    return {"number": number, "w": torch.full((SIZE,), float(number)), "few": torch.tensor(number)}


def parts_of(tree: dict[str, Any]) -> list[Any]:
    """Which state each part of a tree says it is; of the large one the least and the most."""
    least, most = torch.aminmax(tree["w"])
    return [tree["number"], tree["few"].item(), least.item(), most.item()]


def found(store: Any) -> Found:
    """What ``load`` gives."""
    try:
        saved = store.load()
        if saved is None:
            return None
        trees = [saved.shared, *(saved.own(r) for r in range(saved.world_size))]
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return saved.step, [parts_of(tree) for tree in trees]


def names_in(folder: Path) -> list[str]:
    """What lies in the folder."""
    return sorted(os.listdir(folder)) if folder.is_dir() else []


class Told:
    """Two numbers that a process still tells after its death: which save it began, and ended."""

    def __init__(self) -> None:
        self.numbers = memoryview(mmap.mmap(-1, mmap.PAGESIZE)).cast("q")

    def save(self, store: Any, number: int) -> None:
        """Save state ``number``, and tell."""
        self.numbers[0] = number
        store.save(number, state(number), state(number))
        self.numbers[1] = number

    @property
    def begun(self) -> int:
        return self.numbers[0]

    @property
    def ended(self) -> int:
        return self.numbers[1]


def killed_at_every_operation(
    impl: Any, folder: Path, power: str
) -> list[tuple[int, bool, Found, list[str]]]:
    """Kill save after save at its 1st, 2nd, 3rd … operation on the disk, in one store, whose folder
    the first one has to make; with ``power`` (see ``Disk``) "torn" until one has returned, for it
    adds little to "off".

    Of each save: the operation, whether it returned before, what was found, which names are left.
    """
    folder.mkdir()
    path = folder / "runs" / "store"
    store = impl.module("fault_tolerance").CheckpointStore(path, keep=1, keep_best=0)
    at, told, notes = 1, Told(), []
    for number in range(1, KILLS + 1):

        def work(number: int = number, at: int = at) -> None:
            disk = Disk(folder, at, power)
            told.save(store, number)
            disk.end()

        in_child(work)
        returned = told.ended == number
        notes.append((at, returned, found(store), names_in(path)))
        if isinstance(notes[-1][2], str) or (returned and power == "torn"):
            break  # nothing can be loaded any more, or enough was seen
        at = 1 if returned else at + 1
    return notes


def killed_at_random_times(
    impl: Any, folder: Path, seed: int
) -> tuple[list[tuple[int, int, Found]], list[str]]:
    """Kill a process that saves again and again after a random time.

    After each kill: the save that was begun last, the one that returned last, what was found; at
    the end, after one more save, the names that are left.
    """
    store = impl.module("fault_tolerance").CheckpointStore(folder, keep=1, keep_best=0)
    draw, told, number, notes = random.Random(seed), Told(), 0, []
    for _ in range(KILLS):
        pid = os.fork()
        if pid == 0:
            without_waiting()
            while True:
                number += 1
                told.save(store, number)
        time.sleep(draw.uniform(0.0, 0.02))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        notes.append((told.begun, told.ended, found(store)))
        if isinstance(notes[-1][2], str):
            break
        number = told.begun
    in_child(lambda: told.save(store, number + 1))
    return notes, names_in(folder)


def one_rank_killed(impl: Any, folder: Path, seed: int) -> list[tuple[int, int, int, Found]]:
    """Two ranks save again and again, one of them is killed after a random time.

    After each kill: whom it met, the save begun last, the one that returned last, what was found.
    """
    store = impl.module("fault_tolerance").CheckpointStore(folder, keep=1, keep_best=0)
    draw, told, number, notes = random.Random(seed), [Told(), Told()], 0, []
    for trial in range(8):

        def rank_main(rank: int, trial: int = trial, number: int = number) -> None:
            without_waiting()
            meeting = dist.FileStore(str(folder.parent / f"{folder.name}-{trial}"), 2)
            dist.init_process_group(
                "gloo", store=meeting, rank=rank, world_size=2, timeout=timedelta(seconds=9)
            )
            while True:
                number += 1
                told[rank].save(store, number)

        pids = [os.fork(), 0]
        if pids[0] == 0:
            in_rank(rank_main, 0)
        pids[1] = os.fork()
        if pids[1] == 0:
            in_rank(rank_main, 1)
        waited = time.monotonic()
        while min(t.ended for t in told) <= number and time.monotonic() < waited + 5:
            time.sleep(0.001)
        time.sleep(draw.uniform(0.0, 0.02))
        victim = draw.randrange(2)
        os.kill(pids[victim], signal.SIGKILL)
        time.sleep(0.01)  # the other one notices, or goes on as far as it can
        os.kill(pids[1 - victim], signal.SIGKILL)
        for pid in pids:
            os.waitpid(pid, 0)
        begun, ended = max(t.begun for t in told), max(t.ended for t in told)
        notes.append((victim, begun, ended, found(store)))
        if isinstance(notes[-1][3], str):
            break
        number = begun
    return notes


def in_rank(main: Callable[[int], None], rank: int) -> None:
    """The life of a forked rank: it ends with an error of the other's death, or is killed."""
    try:
        main(rank)
    finally:
        os._exit(1)


# -- what the parent judges -----------------------------------------------------------------------
def number_of(parts: list[Any]) -> int | str:
    """Which state a tree is; a sentence if it is none."""
    number, few, least, most = parts
    if number == few == least == most:
        return int(number)
    return f"parts of several states: {number}, {few}, {least:g} to {most:g}"


def expect_one_of(seen: Found, allowed: set[int | None], when: str) -> int | None:
    """The number of the state found: a whole one, and one of those allowed."""
    if isinstance(seen, str):
        fail(f"{when}: load raised {seen}", cause="unloadable")
    number: int | None = None
    if seen is not None:
        step, trees = seen
        numbers = {number_of(parts) for parts in trees} | {step}
        if len(numbers) > 1:
            fail(f"{when}: what was loaded is no state as a whole: {numbers}", cause="mixed")
        number = step
    if number not in allowed:
        cause = "lost" if number is None else "old"
        wanted = sorted(allowed, key=str)
        fail(f"{when}: found state {number}, expected one of {wanted}", cause=cause)
    return number


def expect_no_leftovers(names: Sequence[str], when: str) -> None:
    """No more than one checkpoint lies there."""
    if len(names) > 1:
        fail(f"{when}: {names} are left (keep=1), the disk fills up", cause="leftovers")


def expect_kept_at_every_operation(
    notes: Sequence[tuple[int, bool, Found, list[str]]], power: str
) -> None:
    """The state being saved or the one before, whole; what has returned, and no leftovers then."""
    current: int | None = None
    how = "killed" if power == "on" else "ended by a power failure"
    for number, (at, returned, seen, names) in enumerate(notes, 1):
        when = f"save of state {number} (before: {current}) {how} at its operation {at}"
        if returned:
            when = f"save of state {number} returned, then the process was {how}"
        current = expect_one_of(seen, {number} if returned else {current, number}, when)
        if returned:
            expect_no_leftovers(names, f"after state {number}")


def expect_kept(
    begun: int, ended: int, before: tuple[int, int | None], seen: Found, when: str
) -> int | None:
    """The number found: that of the save begun last, or of the last one to return.

    ``before``: the save begun last by the processes before, and what was found then.
    """
    last_begun, current = before
    return expect_one_of(seen, {begun, ended if ended > last_begun else current}, when)


def expect_kept_at_random_times(
    notes: Sequence[tuple[int, int, Found]], names: Sequence[str]
) -> None:
    """After each kill a whole state that may be there, and no leftovers at the end."""
    before: tuple[int, int | None] = (0, None)
    for begun, ended, seen in notes:
        when = f"killed while state {begun} was saved, {ended} was the last to return"
        before = begun, expect_kept(begun, ended, before, seen, when)
    expect_no_leftovers(names, "after the last save")


def expect_kept_by_both(notes: Sequence[tuple[int, int, int, Found]]) -> None:
    """After each kill a whole state that may be there."""
    before: tuple[int, int | None] = (0, None)
    for victim, begun, ended, seen in notes:
        when = f"rank {victim} killed while state {begun} was saved, the last to return was {ended}"
        before = begun, expect_kept(begun, ended, before, seen, when)
