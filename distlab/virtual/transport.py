"""Transfers between virtual ranks: who takes part, and what moves when one is delivered.

A *part* is what one rank contributes to a transfer: the tensors it gives, those it gets. A transfer
is matched when every rank has issued its part: for a message when both ends have (a send is a
rendezvous: nothing is buffered), for a collective when every rank of the group has. Delivery moves
the values at once for all; the network decides the virtual time at which that is complete.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from ..ledger import P2P, Event, signature, traffic
from .cluster import Network
from .internals import Unseen
from .scheduler import Scheduler, VirtualRank
from .shadows import set_shadow, shadow

COMBINE: list[tuple[Any, Callable[[Tensor, Tensor], Tensor]]] = [
    (ReduceOp.SUM, torch.Tensor.add_),
    (ReduceOp.AVG, torch.Tensor.add_),
    (ReduceOp.PRODUCT, torch.Tensor.mul_),
    (ReduceOp.MIN, lambda a, b: torch.minimum(a, b, out=a)),
    (ReduceOp.MAX, lambda a, b: torch.maximum(a, b, out=a)),
    (ReduceOp.BAND, torch.Tensor.bitwise_and_),
    (ReduceOp.BOR, torch.Tensor.bitwise_or_),
    (ReduceOp.BXOR, torch.Tensor.bitwise_xor_),
]


@dataclass(eq=False, slots=True)
class Part:
    """One rank's share of a transfer; ``gives`` is read and ``gets`` written at delivery."""

    rank: VirtualRank
    op: str
    group: tuple[int, ...]
    gives: Sequence[Tensor] = ()
    gets: Sequence[Tensor] = ()
    peer: int | None = None  # global rank
    tag: int = 0
    reduce_op: Any = None
    payload: Sequence[Tensor] = ()
    posted: float = 0.0
    finish: float = 0.0
    done: bool = False
    waited: bool = False
    transfer: Any = None
    event: Event | None = None
    version: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes that this rank passes in."""
        return sum(t.nbytes for t in self.payload)

    def describe(self, line: str = "") -> Event:
        """This part as an event of the ledger."""
        if self.event is not None:
            return self.event
        payload = 0 if self.op == "barrier" else self.nbytes
        me = self.rank.index
        sent, received = traffic(self.op, len(self.group), payload, is_root=self.peer == me)
        return Event(
            op=self.op,
            group=self.group,
            peer=self.peer,
            numel=sum(t.numel() for t in self.payload),
            dtype=str(self.payload[0].dtype).removeprefix("torch.") if self.payload else "",
            payload=payload,
            sent=sent,
            received=received,
            start=self.posted,
            line=line,
            tag=self.tag,
        )

    def acknowledge(self) -> None:
        """The rank has waited for it: only now may it use what it got and change what it gave."""
        self.waited = True
        event = self.event
        if event is not None and event.end is None:
            event.end = self.finish
            event.overwritten = self.op == "send" and self.gives[0]._version != self.version


class Mismatched(Exception):
    """Two parts that cannot be one transfer."""

    def __init__(self, message: str, first: Part, second: Part) -> None:
        super().__init__(message)
        self.message, self.first, self.second = message, first, second


@dataclass(eq=False, slots=True)
class Transfer:
    """Parts that belong together; implements the scheduler's ``Pending``."""

    exchange: Exchange
    needed: int
    parts: list[Part] = field(default_factory=list)
    waiters: list[VirtualRank] = field(default_factory=list)
    ready_at: float = 0.0
    matched: bool = False  # all ranks have issued it
    delivered: bool = False

    @property
    def all_wait(self) -> bool:
        """Whether all ranks wait for it."""
        return len(self.waiters) == self.needed

    def join(self, part: Part) -> None:
        """Add a rank's part; the last one hands the transfer to the scheduler."""
        part.transfer = self
        parts = self.parts
        parts.append(part)
        if part.posted > self.ready_at:
            self.ready_at = part.posted
        if len(parts) == self.needed:
            self.matched = True
            self.exchange.scheduler.add(self)

    def reserve(self) -> None:
        """Occupy links; fixes every part's ``finish``."""
        self.exchange.network.reserve(self.parts, self.ready_at)

    def deliver(self) -> None:
        """Move the values, complete the parts, wake who waits."""
        self.delivered = True
        parts = self.parts
        if parts[0].op in P2P:
            send, receive = parts if parts[0].op == "send" else parts[::-1]
            if self.exchange.modelled:
                with Unseen():
                    _copy(receive.gets[0], send.gives[0])
            else:
                _copy(receive.gets[0], send.gives[0])
        else:
            place = {rank: number for number, rank in enumerate(parts[0].group)}
            parts = sorted(parts, key=lambda part: place[part.rank.index])
            with Unseen():
                MOVE[parts[0].op](parts)
        for part in parts:
            part.done, part.transfer = True, None  # no cycle is left behind
        self.exchange.scheduler.wake(self)


class Exchange:
    """All open transfers of one run."""

    def __init__(self, scheduler: Scheduler, network: Network, modelled: bool) -> None:
        self.scheduler, self.network = scheduler, network
        self.modelled = modelled
        self.sends: dict[Any, deque[Part]] = defaultdict(deque)  # by (group, from, to, tag)
        self.receives: dict[Any, deque[Part]] = defaultdict(deque)  # by (group, to, tag)
        self.issued: Counter[Any] = Counter()
        self.open: dict[Any, Transfer] = {}

    def post(self, part: Part, channel: Any) -> Part:
        """Issue a part on the group ``channel`` and match it. Raises Mismatched."""
        if part.op == "send":
            self._send(part, channel)
        elif part.op == "recv":
            self._receive(part, channel)
        else:
            self._collective(part, channel)
        return part

    def _send(self, part: Part, channel: Any) -> None:
        part.version = part.gives[0]._version
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
        place = self.issued[channel, part.rank.index]
        self.issued[channel, part.rank.index] += 1
        key = channel, place
        transfer = self.open.setdefault(key, Transfer(self, len(part.group)))
        if transfer.parts:
            self._compare(transfer.parts[0], part)
        if len(transfer.parts) + 1 == transfer.needed:
            del self.open[key]
            if part.op == "all_to_all":
                _check_splits([*transfer.parts, part])
        transfer.join(part)

    def _compare(self, first: Part, part: Part) -> None:
        mine, theirs = part.describe(), first.describe()
        if signature(mine) != signature(theirs):
            raise Mismatched("ranks are in different collectives", first, part)
        if part.reduce_op is not None and part.reduce_op != first.reduce_op:
            raise Mismatched("ranks reduce with different operators", first, part)

    def unmatched(self) -> list[Part]:
        """Messages of which only one end was ever issued."""
        queues = [*self.sends.values(), *self.receives.values()]
        return [part for queue in queues for part in queue]


def _check_splits(parts: list[Part]) -> None:
    """What each rank gives another must be what that one expects."""
    parts = sorted(parts, key=lambda part: part.group.index(part.rank.index))
    for place, part in enumerate(parts):
        for giver, got in zip(parts, part.gets, strict=True):
            given = giver.gives[place]
            if given.numel() != got.numel():
                raise Mismatched(
                    f"in all_to_all rank {giver.rank.index} gives rank {part.rank.index} "
                    f"{_size(given)}, which expects {_size(got)}",
                    giver,
                    part,
                )


def _size(tensor: Tensor) -> str:
    return f"{tensor.numel()} {str(tensor.dtype).removeprefix('torch.')} elements"


# -- what delivery does to the values; parts are in the order of the group -----------------------
def _copy(target: Tensor, source: Tensor) -> None:
    if target is source:
        return
    if target.is_meta:
        values = shadow(source)
        set_shadow(target, values if values is None else values.reshape(target.shape))
        return
    source = source.data
    target.data.copy_(source if source.shape == target.shape else source.view(target.shape))


def _barrier(parts: list[Part]) -> None:
    pass


def _root(parts: list[Part]) -> int:
    return parts[0].group.index(parts[0].peer)  # type: ignore[arg-type]


def _combined(tensors: Sequence[Tensor], reduce_op: Any) -> Tensor:
    """The reduction in the order of the ranks."""
    values = [shadow(tensor) for tensor in tensors]
    if values[0] is None or any(value is None for value in values):
        return tensors[0]
    total = values[0].detach().clone()
    combine = next((call for op, call in COMBINE if reduce_op == op), None)
    if combine is None:
        raise ValueError(f"virtual ranks have no reduction {reduce_op}")
    for value in values[1:]:
        combine(total, value.detach())  # type: ignore[union-attr]
    return total.div_(len(tensors)) if reduce_op == ReduceOp.AVG else total


def _all_reduce(parts: list[Part]) -> None:
    for place in range(len(parts[0].gives)):
        total = _combined([part.gives[place] for part in parts], parts[0].reduce_op)
        for part in parts:
            _copy(part.gets[place], total)


def _reduce(parts: list[Part]) -> None:
    total = _combined([part.gives[0] for part in parts], parts[0].reduce_op)
    _copy(parts[_root(parts)].gets[0], total)


def _broadcast(parts: list[Part]) -> None:
    source = parts[_root(parts)]
    for part in parts:
        for target, tensor in zip(part.gets, source.gives, strict=True):
            _copy(target, tensor)


def _all_gather(parts: list[Part]) -> None:
    """``gets`` holds, for each tensor given, one output per rank."""
    count = len(parts[0].gives)
    for part in parts:
        for k in range(count):
            for place, source in enumerate(parts):
                _copy(part.gets[k * len(parts) + place], source.gives[k])


def _reduce_scatter(parts: list[Part]) -> None:
    """``gives`` holds, for each tensor got, one input per rank."""
    for k in range(len(parts[0].gets)):
        for place, part in enumerate(parts):
            at = k * len(parts) + place
            _copy(part.gets[k], _combined([p.gives[at] for p in parts], part.reduce_op))


def _all_to_all(parts: list[Part]) -> None:
    moved = [
        (got, giver.gives[place].detach().clone())
        for place, part in enumerate(parts)
        for giver, got in zip(parts, part.gets, strict=True)
    ]
    for got, given in moved:
        _copy(got, given)


def _gather(parts: list[Part]) -> None:
    for target, part in zip(parts[_root(parts)].gets, parts, strict=True):
        _copy(target, part.gives[0])


def _scatter(parts: list[Part]) -> None:
    for part, source in zip(parts, parts[_root(parts)].gives, strict=True):
        _copy(part.gets[0], source)


MOVE: dict[str, Callable[[list[Part]], None]] = {
    "barrier": _barrier,
    "all_reduce": _all_reduce,
    "reduce": _reduce,
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "gather": _gather,
    "scatter": _scatter,
}
