"""Virtual ranks are threads. One of them runs at a time: it holds the baton until it has to wait.

There are two ways to choose the next rank when a rank waits:

- *by time* (no seed): the first on the virtual clock, either a rank that can run or a transfer
  whose turn it is. Links are handed out in the order of virtual time, so predictions are those of a
  discrete-event simulation, and the same program gives the same trace.
- *adversarial* (a seed): a random rank, and a rank may lose the baton at any communication. A
  transfer moves its data as late as a real network may: when all its ranks wait for it, or when no
  other rank can go on. So a buffer that is used too early or written too soon is always corrupt.

If no rank can run and no transfer can be delivered, that is a deadlock, known at once and exactly.
The baton costs one hand-over of a lock per wait, so the cost of a run grows with its messages.
"""

from __future__ import annotations

import heapq
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

SWAP_ODDS = 0.3  # how often an adversarial run takes the baton away at a communication
POLL = 1e-6  # virtual seconds that asking for completion takes
BREATH = 1e-3  # seconds between messages after the end: the thread that reports gets Python's lock


class Pending(Protocol):
    """The interface of a transfer between ranks for the scheduler."""

    ready_at: float  # when its last rank has issued it
    waiters: list[VirtualRank]
    delivered: bool

    @property
    def turn(self) -> tuple[int, ...]:
        """Its position among transfers that are ready at the same time, where the order in which
        the ranks ran must not decide."""

    @property
    def all_wait(self) -> bool:
        """Whether every rank that takes part waits for it."""

    def reserve(self) -> None:
        """Take the links it needs and fix when it is complete."""

    def deliver(self) -> None:
        """Move its data and let its ranks know."""


@dataclass(eq=False, slots=True)
class VirtualRank:
    """One rank: its clock in seconds, its baton (a lock), and what it waits for."""

    index: int
    clock: float = 0.0
    baton: threading.Lock = field(default_factory=threading.Lock)
    waiting: Any = None
    finished: bool = False
    error: BaseException | None = None
    value: Any = None
    thread: threading.Thread | None = None

    def __post_init__(self) -> None:
        self.baton.acquire()


class Stopped(RuntimeError):
    """A thread that is no virtual rank tried to communicate."""


class Scheduler:
    """Runs W bodies, one at a time; ``deadlocked`` tells how it ended.

    ``install(rank)`` is called whenever a rank gets the baton, ``remove(rank)`` when it loses it.
    ``runs``: the ranks that have a body, if not all have. ``ordered``: a transfer that nobody waits
    for may hold up another, so it is delivered when nothing else can be. ``by_turn``: transfers
    that are ready at the same time take links by their ``turn``, else as their ranks come to run.
    """

    def __init__(
        self,
        world_size: int,
        seed: int | None,
        install: Callable[[VirtualRank], None],
        remove: Callable[[VirtualRank], None],
        runs: tuple[int, ...] = (),
        ordered: bool = False,
        by_turn: bool = False,
    ) -> None:
        self.ranks = [VirtualRank(index) for index in range(world_size)]
        self.runs = [self.ranks[index] for index in runs] or self.ranks
        for rank in self.ranks:
            rank.finished = rank not in self.runs
        self.seed = seed
        self.random = None if seed is None else random.Random(seed)
        self.install, self.remove = install, remove
        self.ordered, self.by_turn = ordered, by_turn
        self.local = threading.local()
        self.over = threading.Event()
        self.deadlocked = False
        self.running: VirtualRank | None = None
        self._order = 0
        self._ready: list[Any] = []  # heap of (clock, order, rank), or plain list if adversarial
        self._matched: list[Any] = []  # heap of (ready_at, turn, order, transfer); adversarial: a
        # plain list of those that at least one rank waits for
        self._unwaited: list[Any] = []  # adversarial, where an earlier transfer must come first

    @property
    def me(self) -> VirtualRank:
        """The rank whose thread this is."""
        rank = getattr(self.local, "rank", None)
        if rank is None:
            raise Stopped(
                "a thread started inside a virtual rank tried to communicate: virtual ranks "
                "communicate from their main thread only"
            )
        return rank

    def run(self, body: Callable[[VirtualRank], Any], stack: int) -> None:
        """Run ``body(rank)`` for every rank until all returned or raised, or a deadlock."""
        before = threading.stack_size(stack)
        try:
            for rank in self.runs:
                rank.thread = threading.Thread(
                    target=self._main, args=(rank, body), name=f"rank{rank.index}", daemon=True
                )
                rank.thread.start()
                self.make_ready(rank)
        finally:
            threading.stack_size(before)
        first = self._next()
        assert first is not None  # all are ready
        first.baton.release()
        self.over.wait()

    def _main(self, rank: VirtualRank, body: Callable[[VirtualRank], Any]) -> None:
        self.local.rank = rank
        rank.baton.acquire()
        self._take(rank)
        try:
            rank.value = body(rank)
        except BaseException as error:
            rank.error = error
        rank.finished, self.running = True, None
        self.remove(rank)
        successor = self._next()
        if successor is not None:
            successor.baton.release()

    # -- what ranks and transfers call ----------------------------------------------------------
    def add(self, transfer: Pending) -> None:
        """All ranks of ``transfer`` have issued it."""
        if self.random is None:
            turn = transfer.turn if self.by_turn else ()
            entry = transfer.ready_at, turn, self._next_order(), transfer
            heapq.heappush(self._matched, entry)
            return
        transfer.reserve()
        if transfer.waiters:
            self._matched.append(transfer)
        elif self.ordered:
            self._unwaited.append(transfer)

    def wait(self, rank: VirtualRank, part: Any) -> None:
        """Block ``rank`` until ``part`` (of a transfer) is complete; its clock moves there."""
        if not part.done:
            rank.waiting = part
            transfer = part.transfer
            transfer.waiters.append(rank)
            if self.random is not None and transfer.matched:
                self._matched.append(transfer)
                if transfer.all_wait:
                    transfer.deliver()
            while not part.done:
                self._leave(rank)
            rank.waiting = None
        rank.clock = max(rank.clock, part.finish)

    def wake(self, transfer: Pending) -> None:
        """``transfer`` was delivered: ranks that wait for it can go on."""
        for rank in transfer.waiters:
            if rank is not self.running:
                self.make_ready(rank)
        transfer.waiters = []

    def sleep(self, rank: VirtualRank, waiting: Any) -> None:
        """Give the baton away until ``make_ready`` is called for ``rank``."""
        rank.waiting = waiting
        self._leave(rank)
        rank.waiting = None

    def abort(self) -> None:
        """End the run now; the calling thread does not go on."""
        self.over.set()
        self.me.baton.acquire()

    def poll(self, rank: VirtualRank, part: Any) -> bool:
        """Whether ``part`` is complete by now; asking costs a microsecond and lets others run."""
        rank.clock += POLL
        if part.done and part.finish <= rank.clock:
            return True
        if self.random is not None and part.transfer and part.transfer.matched:
            if self.random.random() < SWAP_ODDS:
                part.transfer.deliver()
        elif self._ready or self._deliverable():
            self.pause(rank, always=True)
        elif not part.done:
            self.wait(rank, part)  # no other rank can go on: such a loop would never end
        return bool(part.done and part.finish <= rank.clock)

    def pause(self, rank: VirtualRank, always: bool = False) -> None:
        """A point where another rank may run first."""
        if always or (self.random is not None and self.random.random() < SWAP_ODDS):
            self.make_ready(rank)
            self._leave(rank)

    # -- the baton ------------------------------------------------------------------------------
    def _leave(self, rank: VirtualRank) -> None:
        """Hand the baton on and come back when it is this rank's turn."""
        if self.over.is_set():
            threading.Event().wait(BREATH)
        self.running = None
        successor = self._next()
        if successor is rank:
            self.running = rank
            return
        self.remove(rank)
        if successor is not None:
            successor.baton.release()
        rank.baton.acquire()  # for ever if there was no successor: the run is over
        self._take(rank)

    def _take(self, rank: VirtualRank) -> None:
        self.running = rank
        self.install(rank)

    def _next(self) -> VirtualRank | None:
        """The rank that runs now; None if the run is over."""
        choose = self._by_time if self.random is None else self._by_chance
        while True:
            rank = choose()
            if rank is not None:
                return rank
            if not self._ready and not self._deliverable():
                self.deadlocked = not all(r.finished for r in self.ranks)
                self.over.set()
                return None

    def _by_time(self) -> VirtualRank | None:
        """The rank with the smallest clock, after all transfers that are due before it."""
        ready, matched = self._ready, self._matched
        while matched and (not ready or matched[0][0] <= ready[0][0]):
            if self.by_turn and ready and matched[0][0] == ready[0][0]:
                break  # this rank may issue another one for the same time
            transfer = heapq.heappop(matched)[3]
            transfer.reserve()
            transfer.deliver()
        return heapq.heappop(ready)[2] if ready else None

    def _by_chance(self) -> VirtualRank | None:
        """A random rank that can run; if there is none, one transfer is delivered."""
        if self._ready:
            return self._pick(self._ready)
        while self._matched or self._unwaited:
            transfer = self._pick(self._matched or self._unwaited)
            if not transfer.delivered:
                transfer.deliver()
                break
        return None

    def _deliverable(self) -> bool:
        if self.random is None:
            return bool(self._matched)
        return any(not t.delivered for t in (*self._matched, *self._unwaited))

    def _pick(self, items: list[Any]) -> Any:
        assert self.random is not None
        index = self.random.randrange(len(items))
        items[index], items[-1] = items[-1], items[index]
        return items.pop()

    def make_ready(self, rank: VirtualRank) -> None:
        """Let a rank that waits or sleeps go on."""
        if self.random is None:
            heapq.heappush(self._ready, (rank.clock, self._next_order(), rank))
        else:
            self._ready.append(rank)

    def _next_order(self) -> int:
        self._order += 1
        return self._order
