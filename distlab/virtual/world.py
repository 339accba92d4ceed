"""Each virtual rank's own state: groups, random state, environment, clock, output.

Only one rank runs at a time, so global state can be swapped when the baton changes hands.
``install`` puts a rank's own state in place, and ``remove`` takes it away again. Clocks and
standard output are used all the time, so they look up the current rank instead (``isolation.py``).
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from ..observe.failure import CheckFailed
from ..observe.lines import learner_line, source_line
from ..observe.log import P2P
from . import internals
from .flight import Flight
from .fold import Fold
from .group import VirtualGroup
from .internals import cpu_time
from .nccl_group import NcclGroup
from .network import Network
from .options import VirtualOptions
from .part import Part
from .rules import GLOO, Rules
from .scheduler import Scheduler, VirtualRank
from .state import Channel, RankState
from .store import VirtualStore
from .transport import Mismatched, Transfers
from .work import VirtualWork

BOTH = "cpu:gloo,cuda:nccl"
_torch_random = torch.default_generator
_torch_dtype = torch.get_default_dtype()
_set_dtype = torch.set_default_dtype  # the one that tells nobody


class RankLost(Exception):
    """The run was asked to lose this rank here."""


class World:
    """One run's ranks with their state; the process group's methods end here.

    ``note``: called with the rank that runs, each time.
    """

    def __init__(
        self,
        world_size: int,
        options: VirtualOptions,
        seed: int | None = None,
        note: Callable[[int], None] = lambda rank: None,
        rules: Rules = GLOO,
    ) -> None:
        self.fold = Fold(options.roles or range(world_size))
        machine = options.machine()
        self.network = Network(machine, self.fold, options.algorithm, options.slow_links)
        self.record, self.values, self.rules = options.ledger, options.values, rules
        self.measured, self.modelled = options.compute == "measured", options.modelled
        self.kernels = options.kernels()
        swap, runs = (self.install, self.remove), self.fold.runs
        self.scheduler = Scheduler(world_size, seed, *swap, runs, rules.nccl, options.modelled)
        self.transfers = Transfers(self.scheduler, self.network, self.modelled, self.fold)
        self.channels: dict[Any, Channel] = {}
        self.named: dict[tuple[int, str], tuple[int, ...]] = {}  # ranks of the groups made so far
        self.store = VirtualStore(self.scheduler)
        self.learner_files, self.lose = frozenset(options.learner_files), options.lose
        self.note, self.patience = note, options.patience
        self.slow_ranks = options.slow_ranks
        self.overhead = (0.0, 0.0) if self.measured else machine.overheads  # it is in CPU time
        self.size, self.crowding = world_size, machine.crowding(world_size)
        self.mismatch: Mismatched | None = None
        self.states = {r.index: self._state(r, options.base_seed) for r in self.scheduler.runs}

    def _state(self, rank: VirtualRank, base_seed: int) -> RankState:
        own_seed = base_seed * 1_000_003 + rank.index  # ranks that don't synchronise must differ
        local = self.network.cluster.gpus_per_node
        environ = {
            "RANK": rank.index,
            "LOCAL_RANK": rank.index % local,
            "WORLD_SIZE": self.size,
            "LOCAL_WORLD_SIZE": min(local, self.size),
            "GROUP_RANK": rank.index // local,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": 29500,
        }
        encode = os.environ.encodekey
        own = {encode(k): os.environ.encodevalue(str(v)) for k, v in environ.items()}
        return RankState(
            rank=rank,
            environ={**os.environ._data, **own},  # type: ignore[attr-defined]
            torch_state=torch.Generator().manual_seed(own_seed).get_state(),
            numpy_state=np.random.MT19937(own_seed % 2**32),
            random=random.Random(own_seed),
        )

    def create_group(self, options: Any) -> VirtualGroup:
        """The group that ``new_group`` makes on the calling rank.

        torch numbers groups in a rank's order, and the store mixes up two groups of one number.
        Raises CheckFailed if another rank has made another group at this point.
        """
        ranks = tuple(options.global_ranks_in_group) or tuple(range(self.size))
        state = self.mine
        state.inits += not state.groups.pg_map
        theirs = self.named.setdefault((state.inits, options.group_id), ranks)
        if theirs != ranks:
            raise CheckFailed(
                f"rank {state.rank.index} makes a group of ranks {list(ranks)} where others make "
                f"one of ranks {list(theirs)}: every rank must make all groups in the same order, "
                "those that it is not in as well",
                cause="mismatch",
                rank=state.rank.index,
            )
        ranks = theirs  # one tuple for all members
        key = options.group_id, ranks, state.inits if self.rules.nccl else 0
        channel = self.channels.setdefault(key, Channel(options.group_id))
        by_gloo = VirtualGroup(self, ranks, channel, options.group_rank)
        if not self.rules.nccl or state.backend == "gloo":
            return by_gloo
        rules, device = self.rules, state.device
        if device is not None:
            rules = replace(rules, bound=True, eager=True, pairs=False)
        made = rules.bound and state.groups.default_pg is not None
        host = by_gloo if state.backend == BOTH else None
        return NcclGroup(self, ranks, channel, options.group_rank, rules, made, device, host)

    def making(self, backend: str, ranks: Sequence[int], device: torch.device | None) -> str:
        """The calling rank is about to make a group, or to learn that it is not in it.

        ``ranks``: none for the default group. ``device``: the one that torch shall bind. Returns
        the name of the backend that makes it.
        """
        state, kept = self.mine, internals.NAME
        parent = state.groups.default_pg
        if ranks and backend == kept:  # no other was asked for: that of the default group
            backend = state.default_backend
        state.backend = backend
        if not ranks:
            state.device, state.default_backend = device, backend
        elif isinstance(parent, NcclGroup) and parent.splits_for(backend, ranks):
            parent.split()
        stands_for = ("gloo", "nccl", BOTH) if self.rules.nccl else ("gloo",)
        return kept if backend in stands_for else backend

    def flight(self, state: RankState) -> Flight:
        """The operations under way on the rank."""
        return Flight(state.rank.index, state.works, self.learner_files)

    def read(self, state: RankState, what: str) -> None:
        """The rank's host waits for its GPU."""
        line = source_line(learner_line(sys._getframe(1), self.learner_files))
        state.reads.append((what, line, state.ledger.region))

    @property
    def mine(self) -> RankState:
        """The state of the rank whose thread this is."""
        return self.states[self.scheduler.me.index]

    # -- swapping what is global ------------------------------------------------------------------
    def install(self, rank: VirtualRank) -> None:
        """``rank`` has got the baton."""
        state = self.states[rank.index]
        self.note(rank.index)
        internals.use_groups(state.groups)
        os.environ._data = state.environ  # type: ignore[attr-defined]
        _torch_random.set_state(state.torch_state)
        np.random.set_bit_generator(state.numpy_state)
        if torch.get_default_dtype() != state.dtype:
            _set_dtype(state.dtype)
        if self.measured:
            state.compute_since = cpu_time()
        if state.expecting:
            for work in [w for w in state.expecting if w.part.done_by(rank.clock)]:
                self.settle(work)

    def remove(self, rank: VirtualRank) -> None:
        """``rank`` gives the baton away."""
        state = self.states[rank.index]
        state.torch_state = _torch_random.get_state()
        state.dtype = torch.get_default_dtype()
        if state.dtype != _torch_dtype:
            _set_dtype(_torch_dtype)

    def charge(self, state: RankState) -> None:
        """Put the compute time since the last call on the rank's clock, where it is measured."""
        if self.measured:
            now = cpu_time()
            self.compute(state, now - state.compute_since)
            state.compute_since = now

    def compute(self, state: RankState, seconds: float, name: str = "") -> None:
        """The rank computes for ``seconds``."""
        rank = state.rank
        seconds *= 1.0 if name == "sleep" else self.crowding
        seconds *= self.slow_ranks.get(rank.index, 1.0)
        start, rank.clock = rank.clock, rank.clock + seconds
        if self.record and seconds:
            spans = state.ledger.raw_spans
            name = state.ledger.named or name or self.phase(state) or "other"
            if spans and spans[-1][0] == name and spans[-1][2] == start:
                spans[-1] = name, spans[-1][1], rank.clock
            else:
                spans.append((name, start, rank.clock))

    def phase(self, state: RankState) -> str:
        """The phase of a training step that runs now."""
        return "backward" if internals.in_backward() else state.ledger.phase

    # -- what the process group calls --------------------------------------------------------------
    def post(self, part: Part, channel: Any) -> None:
        """Issue a part; a mismatch ends the run."""
        rank = part.rank
        state = self.states[rank.index]
        if self.measured:
            self.charge(state)
        state.communications += 1
        if self.lose is not None:
            self._maybe_lose(state)
        if self.scheduler.random is not None:
            self.scheduler.pause(rank)
        if overhead := self.overhead[part.op in P2P]:
            self.compute(state, overhead, "other")
        part.posted = rank.clock
        part.number = state.communications
        if self.record:
            where = learner_line(sys._getframe(1), self.learner_files)
            part.event = part.describe(where, self.values)
            part.event.region, part.event.phase = state.ledger.region, self.phase(state)
            part.event.index = len(state.ledger.events)
            state.ledger.events.append(part.event)
        if state.journal is not None:
            state.journal.posted(part, channel)
        try:
            self.transfers.post(part, channel)
        except Mismatched as found:
            self.mismatch = found
            self.scheduler.abort()
        state.compute_since = cpu_time() if self.measured else 0.0

    def _maybe_lose(self, state: RankState) -> None:
        """A lost rank sends nothing more, not even if it catches the exception."""
        assert self.lose is not None
        rank, number = self.lose
        if rank == state.rank.index and state.communications >= number:
            self.transfers.lose(rank)
            raise RankLost(f"was lost at its communication {number}, as asked for")

    def expect(self, work: VirtualWork) -> None:
        """Fulfil the handle's future on its own rank as soon as the operation is complete."""
        if work.part.done_by(self.mine.rank.clock):
            self.settle(work)
        else:
            self.mine.expecting.append(work)

    def fulfil(self, future: torch.futures.Future[Any]) -> None:
        """Wait for operations in flight until ``future`` is done."""
        expecting = self.mine.expecting
        while expecting and not future.done():
            expecting[0].complete()

    def settle(self, work: VirtualWork) -> None:
        """The operation is complete: forget the handle, fulfil its future."""
        state = self.states[work.part.rank.index]
        if self.measured:
            state.compute_since = cpu_time()
        state.works.pop(id(work), None)
        if state.journal is not None:
            state.journal.waited(work.part)
        if work.future is not None and not work.future.done():
            if work in state.expecting:
                state.expecting.remove(work)
            work.part.acknowledge()
            now, state.rank.clock = state.rank.clock, work.part.finish
            work.future.set_result(list(work.outputs))  # callbacks run when it is complete
            state.rank.clock = max(now, state.rank.clock)

    def finish(self, state: RankState) -> None:
        """The rank's body has returned: nothing may be in flight. Raises CheckFailed."""
        self.charge(state)
        for work in state.works.values():
            if work.part.waited or work.part.broken:  # no data move to a lost rank
                continue
            event = work.part.describe()
            raise CheckFailed(
                f"rank {state.rank.index} started {event} and never waited for its handle: "
                "the data may be used or overwritten before it has moved",
                cause="never-waited",
                rank=state.rank.index,
                line=source_line(event.line),
            )
