"""The inside of a virtual run: a forked process that runs worlds and reports each of them once."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import itertools
import json
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch

from ..host.processes import die_with_parent
from ..observe.raised import describe
from ..ranks.content import packed
from ..ranks.context import RankContext
from ..ranks.process import Pipe, keep_no_stacks
from ..ranks.results import PIPE_LOST
from . import internals
from .child_report import RankData, report
from .compute import ComputeModel
from .devices import DeviceModel
from .isolation import enter, entered
from .options import VirtualOptions
from .rules import rules_named
from .scheduler import VirtualRank
from .world import World

TIME_IS_UP = signal.SIGUSR1  # the parent's word
# bound before learner code runs, because that may replace them in their modules
_exit, _dumps = os._exit, json.dumps
STACK = 16 << 20  # bytes of (virtual) stack per rank


@dataclass
class Child:
    """One forked process. The parent sees in ``who`` the rank that runs, the index of its world,
    and how many interleavings have begun."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    options: VirtualOptions
    world_sizes: tuple[int, ...]
    pipe: Pipe
    who: memoryview

    def run(self, parent: int, output_fd: int) -> NoReturn:
        """Run the worlds one after the other, report each, and end this process."""
        try:
            self._run(parent, output_fd)
        except OSError:
            _exit(PIPE_LOST)
        finally:
            _exit(0)

    def _run(self, parent: int, output_fd: int) -> None:
        try:
            _detach(parent, output_fd)
            _stay_on_one_core()
            keep_no_stacks()
            gc.set_threshold(50_000, 20, 100)
            gc.freeze()  # what the parent made is not searched again, and its pages stay shared
            signal.signal(TIME_IS_UP, lambda *_: entered().scheduler.over.set())
            for index, world_size in enumerate(self.world_sizes):
                self.who[1] = index
                if not self._explore(world_size):
                    break
        except BaseException as error:
            said = describe(error, self.options.learner_files)
            state = RankData(rank=0, error=said)
            self.pipe.send(b"V", _dumps(vars(state)).encode())
            self.pipe.send(b"F", _dumps({"verdict": "failed"}).encode())

    def _explore(self, world_size: int) -> bool:
        """Run every interleaving. Report the first that fails, or else one
        with different results."""
        options = self.options
        first: list[Any] | None = None
        absent = {options.lose[0]} if options.lose and options.survivable else set()
        if options.roles:
            absent |= set(range(world_size)) - set(options.roles)
        every = [*itertools.product(rules_named(options.rules), range(options.seeds))]
        for rules, number in every:
            self.who[2] += 1
            seed = None if options.seed is None else options.seed + number
            world = World(world_size, options, seed, self._note, rules)
            enter(world)
            world.scheduler.run(partial(self._body, world), STACK)
            late = [rank for rank in world.scheduler.ranks if not rank.finished]  # they may go on
            values = [rank.value for rank in world.scheduler.ranks]
            first = first or values
            ended = [v for r, v in enumerate(values) if r not in absent]
            noticed = any(state.notices for state in world.states.values())
            failed = bool(late) or None in ended or noticed
            if failed or values != first or (rules, number) == every[-1]:
                report(world, self.pipe, seed, late)
                break
        return not failed

    def _note(self, rank: int) -> None:
        self.who[0] = rank

    def _body(self, world: World, rank: VirtualRank) -> bytes:
        """One rank: its group, its modules, its function; returns the packed result."""
        state, world_size = world.states[rank.index], world.size
        own = f"{world_size}_{world.scheduler.seed}_{rank.index}"  # the name of its modules
        threading.current_thread().virtual_rank = own  # type: ignore[attr-defined]
        torch.autograd.set_multithreading_enabled(False).__enter__()
        torch.set_num_threads(1)  # OpenMP counts per thread: this one would start more
        if world.rules.nccl and self.options.process_group:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        if self.options.process_group:
            internals.join_world(rank.index, world_size, world.store)
        device, model = torch.device("cpu"), None
        if world.rules.nccl:
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            model = DeviceModel(world.flight(state), partial(world.read, state))
        ctx = RankContext(rank.index, world_size, device, self.options.base_seed)
        ctx.ledger = state.ledger  # type: ignore[assignment]
        if world.modelled:
            state.model = ComputeModel(world, state)
        with state.model or model or contextlib.nullcontext():
            value = self.fn(ctx, *self.args)
        world.finish(state)
        return packed(value)


def _detach(parent: int, output_fd: int) -> None:
    """Give the child its own session and output; it ends with its parent."""
    os.setsid()
    die_with_parent(parent)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    null = os.open(os.devnull, os.O_RDONLY)
    for fd, target in ((null, 0), (output_fd, 1), (output_fd, 2)):
        os.dup2(fd, target)
    faulthandler.disable()


def _stay_on_one_core() -> None:
    """Keep to one core. One rank runs at a time, and within a core the baton passes in half the
    time.

    In a batch process a woken thread does not push aside the thread that woke it and that still
    holds Python's lock.
    """
    if hasattr(os, "SCHED_BATCH") and hasattr(os, "sched_setaffinity"):
        with contextlib.suppress(OSError), open("/proc/self/stat") as stat:
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
            os.sched_setaffinity(0, {int(stat.read().rpartition(")")[2].split()[36])})
