"""One rank's part of a transfer: the tensors that it gives, and those that it gets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..observe.log import Event, traffic
from ..observe.operators import Sending
from ..observe.values import passes_in, value_of
from .internals import Unseen
from .scheduler import VirtualRank


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
    number: int = 0  # of what its rank has issued so far
    posted: float = 0.0
    finish: float = 0.0
    done: bool = False
    waited: bool = False
    transfer: Any = None
    event: Event | None = None
    sending: Sending | None = None
    broken: bool = False  # the other end of the message is lost
    entry: Any = None  # of the rank's queue, where operations run in the order of issue
    arrived: Sequence[tuple[Tensor, Tensor]] = ()  # where what belongs, until it is waited for

    def done_by(self, clock: float) -> bool:
        """Whether it is complete at this virtual time."""
        return self.done and self.finish <= clock

    @property
    def nbytes(self) -> int:
        """Bytes that this rank passes in."""
        return sum(t.nbytes for t in self.payload)

    def describe(self, line: str = "", values: bool = False) -> Event:
        """This part as an event of the ledger; with ``values`` it keeps what is passed in."""
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
            value=self._value() if values and passes_in(self.op, self.peer, me) else None,
        )

    def _value(self) -> dict[str, Any] | None:
        with Unseen():
            return value_of(self.payload)

    def acknowledge(self) -> None:
        """The rank has waited for it: only now may it use received tensors and change sent ones."""
        self.waited = True
        if self.arrived:
            with Unseen():
                for target, values in self.arrived:
                    target.data.copy_(values)
            self.arrived = ()
        event = self.event
        if event is not None and event.end is None:
            event.end = self.finish
            if self.sending is not None:
                with Unseen():
                    event.overwritten = self.sending.overwritten()
                self.sending = None
