"""Transfers between virtual ranks: their parts, and the values that a delivery moves.

A *part* is one rank's share of a transfer: the tensors that it gives, and those that it gets. A
transfer is matched when every rank has issued its part. For a message these are both ends (a send
is a rendezvous: nothing is buffered), for a collective all ranks of the group. Delivery moves the
values at once for all; the network decides the virtual time at which that is complete.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ..observe.log import P2P, signature
from ..observe.operators import Sending
from .flight import hold
from .fold import Fold
from .gloo_refusals import other_strides
from .internals import Unseen
from .moves import MOVE, copy, own_parts
from .network import Network
from .order import IssueOrder, is_first
from .part import Part
from .scheduler import Scheduler, VirtualRank
from .shadows import shadow
from .shards import wholes_of


class Mismatched(Exception):
    """Two parts that cannot be one transfer."""

    def __init__(self, message: str, first: Part, second: Part) -> None:
        super().__init__(message)
        self.message, self.first, self.second = message, first, second


@dataclass(eq=False, slots=True)
class Transfer:
    """Parts that belong together; implements the scheduler's ``Pending``."""

    transfers: Transfers
    needed: int
    parts: list[Part] = field(default_factory=list)
    waiters: list[VirtualRank] = field(default_factory=list)
    ready_at: float = 0.0
    matched: bool = False  # all ranks have issued it, and no transfer that must come before is open
    delivered: bool = False

    @property
    def all_wait(self) -> bool:
        """Whether all ranks wait for it."""
        return len(self.waiters) == self.needed

    @property
    def turn(self) -> tuple[int, ...]:
        """By the numbers of the parts on their ranks, then by the first rank: equal for ranks of
        one role."""
        numbers = [part.number for part in self.parts]
        return max(numbers), min(numbers), min(part.rank.index for part in self.parts)

    def join(self, part: Part) -> None:
        """Add a rank's part; the last one hands the transfer to the scheduler."""
        part.transfer = self
        parts = self.parts
        parts.append(part)
        if part.posted > self.ready_at:
            self.ready_at = part.posted
        if len(parts) == self.needed:
            self.transfers.complete(self)

    def reserve(self) -> None:
        """Occupy links; fixes every part's ``finish``."""
        self.transfers.network.reserve(self.parts, self.ready_at)

    def deliver(self) -> None:
        """Move the values, complete the parts, and wake the waiting ranks."""
        self.delivered = True
        parts = self.parts
        if parts[0].op in P2P:
            send, receive = parts if parts[0].op == "send" else parts[::-1]
            if self.transfers.modelled or parts[0].entry is not None:
                with Unseen():
                    copy(receive.gets[0], send.gives[0])
            else:
                copy(receive.gets[0], send.gives[0])
        elif not self.transfers.modelled or any(map(_known, parts)):
            with Unseen():
                MOVE[parts[0].op](self.transfers.of_all(parts))
        for part in parts:
            part.done, part.transfer = True, None  # no cycle is left behind
            if part.entry is not None and part.rank.waiting is not part:
                hold(part)
        self.parts = []  # the scheduler may still list this transfer: it keeps no buffer alive
        self.transfers.scheduler.wake(self)
        self.transfers.leave(parts)


def _known(part: Part) -> bool:
    """Whether a part has values to move: unknown values of meta tensors don't count."""
    tensors = (*wholes_of(part.gives), *wholes_of(part.gets))
    return any(shadow(tensor) is not None for tensor in tensors)


class Transfers:
    """All open transfers of one run."""

    def __init__(self, scheduler: Scheduler, network: Network, modelled: bool, fold: Fold) -> None:
        self.scheduler, self.network, self.order = scheduler, network, IssueOrder()
        self.modelled, self.fold = modelled, fold
        self.needed: dict[Any, int] = {}  # members of the group of a channel that run
        self.sends: dict[Any, deque[Part]] = defaultdict(deque)  # by (group, from, to, tag)
        self.receives: dict[Any, deque[Part]] = defaultdict(deque)  # by (group, to, tag)
        self.issued: Counter[Any] = Counter()
        self.open: dict[Any, Transfer] = {}
        self.lost: set[int] = set()

    def post(self, part: Part, channel: Any) -> Part:
        """Issue a part on the group ``channel`` and match it. Raises Mismatched."""
        if part.op in P2P:
            self.fold.refuse_absent(part.rank.index, part.peer)
        if part.entry is not None:
            self.order.enter(part, channel)
        if part.op in P2P and part.peer in self.lost:
            self._break(part)
        elif part.op == "send":
            self._send(part, channel)
        elif part.op == "recv":
            self._receive(part, channel)
        else:
            self._collective(part, channel)
        return part

    def of_all(self, parts: list[Part]) -> list[Part]:
        """The parts in the order of the group. A rank that does not run has the part of the one
        that runs in its place."""
        of_rank = {part.rank.index: part for part in parts}
        return [of_rank[role] for role in self.fold.roles(parts[0].group)]

    def complete(self, transfer: Transfer) -> None:
        """All ranks have issued it: it can be delivered as soon as its parts are first."""
        if all(map(is_first, transfer.parts)):
            transfer.matched = True
            self.scheduler.add(transfer)

    def leave(self, parts: list[Part]) -> None:
        """Parts are complete: parts issued after them may come now."""
        for part in parts:
            for following in self.order.leave(part):
                transfer = following.transfer
                if transfer is None or transfer.matched or len(transfer.parts) < transfer.needed:
                    continue
                transfer.ready_at = max(transfer.ready_at, part.finish)
                self.complete(transfer)

    def lose(self, rank: int) -> None:
        """``rank`` is gone: its messages that are not matched yet will never be."""
        self.lost.add(rank)
        for queue in (*self.sends.values(), *self.receives.values()):
            for part in [p for p in queue if rank in (p.peer, p.rank.index)]:
                queue.remove(part)
                self._break(part)

    def _break(self, part: Part) -> None:
        part.broken = part.done = True
        part.finish = part.posted
        transfer, part.transfer = part.transfer, None
        if transfer is not None:
            self.scheduler.wake(transfer)
        self.leave([part])

    def _send(self, part: Part, channel: Any) -> None:
        if part.event is not None:
            with Unseen():
                part.sending = Sending(part.gives[0])
        me = part.rank.index
        waiting = self.receives.get((channel, part.peer, part.tag))
        if waiting:  # receives that the peer has posted
            receive = next((r for r in waiting if r.peer == me or r.peer is None), None)
            if receive is not None:
                waiting.remove(receive)
                self._pair(part, receive)
                return
        Transfer(self, 2).join(part)
        self.sends[channel, me, part.peer, part.tag].append(part)

    def _receive(self, part: Part, channel: Any) -> None:
        me = part.rank.index
        if part.peer is None:
            queue = self._from_any(part, channel)
        else:
            queue = self.sends.get((channel, part.peer, me, part.tag))
        if queue:
            self._pair(queue.popleft(), part)
        else:
            Transfer(self, 2).join(part)
            self.receives[channel, me, part.tag].append(part)

    def _from_any(self, part: Part, channel: Any) -> deque[Part] | None:
        """The sends of one rank that has sent to this one: the earliest, or a random one."""
        me, tag = part.rank.index, part.tag
        found = [s for r in part.group if (s := self.sends.get((channel, r, me, tag)))]
        if not found:
            return None
        chance = self.scheduler.random
        return chance.choice(found) if chance else min(found, key=lambda q: q[0].posted)

    def _pair(self, send: Part, receive: Part) -> None:
        a, b = send.gives[0], receive.gets[0]
        if a.numel() != b.numel() or a.dtype != b.dtype:
            raise Mismatched(
                f"rank {send.rank.index} sends {_size(a)} to rank {receive.rank.index}, "
                f"which receives {_size(b)}",
                send,
                receive,
            )
        receive.peer = send.rank.index
        first, second = (send, receive) if send.transfer else (receive, send)
        first.transfer.join(second)

    def _collective(self, part: Part, channel: Any) -> None:
        position = self.issued[channel, part.rank.index]
        self.issued[channel, part.rank.index] += 1
        key = channel, position
        transfer = self.open.get(key)
        if transfer is None:
            needed = self.needed.get(channel)
            if needed is None:
                needed = self.needed[channel] = self.fold.running(part.group)
            transfer = self.open[key] = Transfer(self, needed)
        if transfer.parts:
            self._compare(transfer.parts[0], part)
        if len(transfer.parts) + 1 == transfer.needed:
            del self.open[key]
            if part.op == "all_to_all":
                _check_splits(self.of_all([*transfer.parts, part]))
        transfer.join(part)

    def _compare(self, first: Part, part: Part) -> None:
        mine, theirs = part.describe(), first.describe()
        if signature(mine) != signature(theirs):
            raise Mismatched("ranks are in different collectives", first, part)
        if part.reduce_op is not None and part.reduce_op != first.reduce_op:
            raise Mismatched("ranks reduce with different operators", first, part)
        strides = other_strides(first, part) if part.entry is None else ""
        if strides:
            raise Mismatched(strides, first, part)

    def unmatched(self) -> list[Part]:
        """Messages of which only one end was ever issued."""
        queues = [*self.sends.values(), *self.receives.values()]
        return [part for queue in queues for part in queue]


def _check_splits(parts: list[Part]) -> None:
    """Fail unless each rank gives every other rank as much as that rank expects."""
    for position, part in own_parts(parts):
        for giver, got in zip(parts, part.gets, strict=True):
            given = giver.gives[position]
            if given.numel() != got.numel():
                raise Mismatched(
                    f"in all_to_all rank {giver.rank.index} gives rank {part.rank.index} "
                    f"{_size(given)}, which expects {_size(got)}",
                    giver,
                    part,
                )


def _size(tensor: Tensor) -> str:
    return f"{tensor.numel()} {str(tensor.dtype).removeprefix('torch.')} elements"
