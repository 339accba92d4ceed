"""Processes that are really killed in the middle of a save, and power failures; for 4.1 and 4.15.

Whatever was killed when, loading must give a whole checkpoint: the one being saved, or the one
before. And what ``save`` has returned from must be there.
"""

from __future__ import annotations

import mmap
import os
import random
import signal
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from distlab.grading import fail
from tests.phase4.disk import Disk, in_child, without_waiting

SIZE = 270_000  # elements: more than one write per file
KILLS = 70  # per way of dying


def state(number: int) -> dict:
    """A state in which every part says which one it is."""
    return {"number": number, "w": torch.full((SIZE,), float(number)), "few": torch.tensor(number)}


def number_of(tree: dict) -> int | str:
    """Which state it is; a sentence if it is none."""
    number = tree["number"]
    whole = bool((tree["w"] == number).all()) and tree["few"] == number
    return number if whole else f"parts of several states: {number}, {tree['few']}, {tree['w']}"


def found(store) -> list:
    """[cause, sentence] if loading fails, else ["", number or None]."""
    try:
        saved = store.load()
    except Exception as error:
        return ["unloadable", f"load raised {type(error).__name__}: {error}"]
    if saved is None:
        return ["", None]
    trees = [saved.shared, *(saved.own(r) for r in range(saved.world_size))]
    numbers = {number_of(tree) for tree in trees} | {saved.step}
    if len(numbers) > 1:
        return ["mixed", f"what was loaded is no state as a whole: {numbers}"]
    return ["", numbers.pop()]


def judge(got: list, allowed: set, when: str) -> list | None:
    """[cause, sentence] if what was found is not allowed."""
    if got[0]:
        return [got[0], f"{when}: {got[1]}"]
    if got[1] in allowed:
        return None
    cause = "lost" if got[1] is None else "old"
    return [cause, f"{when}: found state {got[1]}, expected one of {sorted(allowed, key=str)}"]


class Told:
    """Two numbers that a process still tells after its death: which save it began, and ended."""

    def __init__(self) -> None:
        self.numbers = memoryview(mmap.mmap(-1, mmap.PAGESIZE)).cast("q")

    def save(self, store, number: int) -> None:
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


def leftovers(folder, when: str) -> list | None:
    """[cause, sentence] if more than one checkpoint lies there."""
    names = sorted(os.listdir(folder))
    if len(names) > 1:
        return ["leftovers", f"{when}: {names} are left (keep=1), the disk fills up"]
    return None


def killed_at_every_operation(impl, folder, power: str) -> list | None:
    """Kill save after save at its 1st, 2nd, 3rd … operation on the disk, in one folder; with
    ``power`` (see ``Disk``) "torn" until one has returned, for it adds little to "off"."""
    store = impl.module("fault_tolerance").CheckpointStore(folder, keep=1, keep_best=0)
    current, at, told = None, 1, Told()
    for number in range(1, KILLS + 1):

        def work(number=number, at=at):
            disk = Disk(folder, at, power)
            told.save(store, number)
            disk.end()

        in_child(work)
        returned = told.ended == number
        how = "killed" if power == "on" else "ended by a power failure"
        when = f"save of state {number} (before: {current}) {how} at its operation {at}"
        if returned:
            when = f"save of state {number} returned, then the process was {how}"
        got = found(store)
        wrong = judge(got, {number} if returned else {current, number}, when)
        if wrong:
            return wrong
        current, at = got[1], 1 if returned else at + 1
        if returned:
            wrong = leftovers(folder, f"after state {number}")
            if wrong:
                return wrong
            if power == "torn":
                return None
    return None


def killed_at_random_times(impl, folder, seed: int) -> list | None:
    """Kill a process that saves again and again after a random time."""
    store = impl.module("fault_tolerance").CheckpointStore(folder, keep=1, keep_best=0)
    draw, told, number, current = random.Random(seed), Told(), 0, None
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
        when = f"killed while state {told.begun} was saved, {told.ended} was the last to return"
        got = found(store)
        wrong = judge(got, {told.begun, told.ended if told.ended > number else current}, when)
        if wrong:
            return wrong
        number, current = told.begun, got[1]
    in_child(lambda: told.save(store, number + 1))
    return leftovers(folder, "after the last save")


def one_rank_killed(impl, folder, seed: int) -> list | None:
    """Two ranks save again and again, one of them is killed after a random time."""
    store = impl.module("fault_tolerance").CheckpointStore(folder, keep=1, keep_best=0)
    draw, told, number, current = random.Random(seed), [Told(), Told()], 0, None
    for trial in range(8):

        def rank_main(rank: int, trial=trial, number=number) -> None:
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
        when = f"rank {victim} killed while state {begun} was saved, the last to return was {ended}"
        got = found(store)
        wrong = judge(got, {begun, ended if ended > number else current}, when)
        if wrong:
            return wrong
        number, current = begun, got[1]
    return None


def in_rank(main, rank: int) -> None:
    """The life of a forked rank: it ends with an error of the other's death, or is killed."""
    try:
        main(rank)
    finally:
        os._exit(1)


def expect_nothing_wrong(results) -> None:
    [wrong] = results
    if wrong is not None:
        fail(wrong[1], cause=wrong[0])
