"""The communication of ranks: events, their cost, and assertions that a learner can read.

One ``Event`` is one communication operator on one rank. Point-to-point bytes are exact. A
collective counts with the bytes that the bandwidth-optimal algorithm moves per rank (W ranks, N
bytes):

====================  ============================  =====================================
operator              sent per rank                 received per rank
====================  ============================  =====================================
all_reduce            2(W-1)/W N                    2(W-1)/W N
reduce_scatter        (W-1)/W N (N: whole input)    (W-1)/W N
all_to_all            (W-1)/W N (N: whole input)    (W-1)/W N
all_gather            (W-1) n (n: own shard)        (W-1) n
broadcast / scatter   root N / (W-1) n, others 0    root 0, others N / n
reduce / gather       root 0, others N / n          root N / (W-1) n, others 0
====================  ============================  =====================================

Sources: Patarasuk & Yuan 2009 (all-reduce bound); Thakur, Rabenseifner & Gropp 2005 (the others).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from .failure import CheckFailed

P2P = ("send", "recv")
CREATION = "creation"  # of a communicator: ``dtype`` has the words
SHARED_GPU = "shared-gpu"  # the cause of a failure that the program can't avoid


@dataclass
class Event:
    """One communication operator on one rank; bytes and seconds (CLOCK_MONOTONIC)."""

    op: str
    group: tuple[int, ...]
    peer: int | None
    numel: int
    dtype: str
    payload: int
    sent: int
    received: int
    start: float
    end: float | None = None
    line: str = ""
    region: str = ""
    phase: str = ""
    index: int = 0
    tag: int = 0
    overwritten: bool = False  # the send buffer was changed before the send was waited for
    group_name: str = ""  # each of two groups with the same ranks has a sequence of its own
    patience: float | None = None  # seconds after which a wait for it gives up by itself
    clock: str = "host"  # the clock of ``start`` and ``end``: host or GPU
    value: object = None  # what this rank passed in, where values are recorded

    def __str__(self) -> str:
        what = f"{self.op} of {self.numel} {self.dtype} element{'s' if self.numel != 1 else ''}"
        if self.op in ("barrier", CREATION):
            return "barrier" if self.op == "barrier" else self.dtype
        if self.op == "store":
            return f"the store for {self.dtype}"
        if self.peer is None:
            return f"recv from any rank ({self.numel} {self.dtype})" if self.op == "recv" else what
        link = {"send": "to rank", "recv": "from rank"}.get(self.op, "with root")
        return f"{what} {link} {self.peer}"


def traffic(op: str, world_size: int, payload: int, is_root: bool) -> tuple[int, int]:
    """Bytes (sent, received) by one rank of ``world_size`` that passes ``payload`` bytes to ``op``.

    See the module's table. ``is_root`` matters for rooted operators only.
    """
    w, n = world_size, payload
    if op == "send":
        return n, 0
    if op == "recv":
        return 0, n
    if w <= 1 or op == "barrier":
        return 0, 0
    symmetric = {
        "all_reduce": 2 * (w - 1) * n // w,
        "reduce_scatter": (w - 1) * n // w,
        "all_to_all": (w - 1) * n // w,
        "all_gather": (w - 1) * n,
    }
    if op in symmetric:
        return symmetric[op], symmetric[op]
    at_root = (w - 1) * n if op in ("scatter", "gather") else n
    outward = op in ("broadcast", "scatter")
    if is_root:
        return (at_root, 0) if outward else (0, at_root)
    return (0, n) if outward else (n, 0)


def readable(nbytes: float) -> str:
    """``"1,536 B"``, ``"2.50 MB"``: bytes as a learner reads them."""
    return f"{nbytes:,.0f} B" if nbytes < 1e5 else f"{nbytes / 1e6:,.2f} MB"


def sent_from_shared_gpu(op: str) -> CheckFailed:
    """The failure of a rank that has no GPU of its own and passes a message of one."""
    return CheckFailed(
        f"{op} of a tensor on a GPU that several ranks share: gloo passes messages between CPUs "
        "only, and NCCL takes one rank per GPU",
        cause=SHARED_GPU,
    )


def waited_twice(event: Event, rank: int, line: str) -> CheckFailed:
    """The failure of a rank that waits again for a message that it has waited for."""
    return CheckFailed(
        f"rank {rank} waits a second time for its {event}: gloo's handle of a message knows one "
        "completion, and that one is used up, so the second wait() never ends",
        cause="waited-twice",
        rank=rank,
        line=line,
    )


def two_in_one_buffer(event: Event, source: str, rank: int, line: str) -> CheckFailed:
    """The failure of a rank that receives into memory into which it receives already."""
    return CheckFailed(
        f"rank {rank} receives from {source} into a buffer into which another message is under way "
        f"({event}): wait for the one before you start the other, or give each its own buffer",
        cause="two-in-one-buffer",
        rank=rank,
        line=line,
    )


@dataclass
class Log:
    """The communication of one rank, in order of issue, and its compute ``spans``.

    ``spans`` are (name, start, end) with name forward, backward, optimizer, data or other;
    timelines begin at ``picture_from``.
    """

    rank: int
    events: list[Event]
    spans: list[tuple[str, float, float]]
    picture_from: float = 0.0
    on_gpu: frozenset[int] = frozenset()  # spans with times of the GPU's clock

    def select(self, op: str | None = None, region: str | None = None) -> Log:
        """The part of the log that is ``op`` and was issued in ``region``."""
        events = [
            e
            for e in self.events
            if (op is None or e.op == op) and (region is None or e.region == region)
        ]
        return Log(self.rank, events, self.spans)

    def ops(self) -> Counter[str]:
        """How often each operator was issued."""
        return Counter(e.op for e in self.events)

    @property
    def sent(self) -> int:
        """Bytes this rank sent."""
        return sum(e.sent for e in self.events)

    @property
    def received(self) -> int:
        """Bytes this rank received."""
        return sum(e.received for e in self.events)

    @property
    def messages(self) -> int:
        """Messages this rank issued: sends, and each collective once; barriers and receives not."""
        return sum(e.op not in ("recv", "barrier") for e in self.events)

    @property
    def unwaited(self) -> list[Event]:
        """Asynchronous operations whose handle was never waited for."""
        return [e for e in self.events if e.end is None]

    def forbid(self, *ops: str, why: str = "") -> None:
        """Fail if one of ``ops`` was used, whichever Python name it was called by."""
        for event in self.events:
            if event.op in ops:
                reason = f": {why}" if why else ""
                raise CheckFailed(
                    f"rank {self.rank} used {event.op}, which this exercise forbids{reason}",
                    cause="forbidden-operator",
                    rank=self.rank,
                    line=event.line,
                )

    def sent_at_most(self, nbytes: float, formula: str = "") -> None:
        """Fail if this rank sent more than ``nbytes`` (the value of ``formula``)."""
        if self.sent > nbytes:
            self._budget("too many bytes", "at most", nbytes, formula, "too-many-bytes")

    def sent_at_least(self, nbytes: float, formula: str = "") -> None:
        """Fail if this rank sent less than ``nbytes``: then the result came from elsewhere."""
        if self.sent < nbytes:
            self._budget("too few bytes", "at least", nbytes, formula, "too-few-bytes")

    def _budget(self, what: str, bound: str, nbytes: float, formula: str, cause: str) -> None:
        by = f" = {formula}" if formula else ""
        ops = ", ".join(f"{n}x {op}" for op, n in self.ops().items()) or "no communication"
        largest = max(self.events, key=lambda e: e.sent, default=None)
        raise CheckFailed(
            f"rank {self.rank} sent {what}: {readable(self.sent)}, "
            f"expected {bound} {readable(nbytes)}{by} ({ops})",
            cause=cause,
            rank=self.rank,
            line=largest.line if largest else "",
        )

    def all_waited(self) -> None:
        """Fail if an asynchronous operation was never waited for, or its buffer was reused."""
        for event in self.events:
            if event.overwritten:
                raise CheckFailed(
                    f"rank {self.rank} changed the buffer of {event} while it was in flight: "
                    "wait for the handle before you write to what you send",
                    cause="overwritten-in-flight",
                    rank=self.rank,
                    line=event.line,
                )
        for event in self.unwaited:
            raise CheckFailed(
                f"rank {self.rank} started {event} and never waited for its handle: "
                "the data may be used or overwritten before it has moved",
                cause="never-waited",
                rank=self.rank,
                line=event.line,
            )


# Operators whose element count must agree on all ranks of the group.
SIZED = {"all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter", "gather", "scatter"}


def signature(event: Event) -> tuple[object, ...]:
    """The values that must be equal on every rank that takes part in this collective."""
    if event.op in SIZED:
        return event.op, event.numel, event.dtype, event.peer
    return (event.op,)


def channel_of(event: Event) -> tuple[object, ...]:
    """The sequence that this event belongs to, on its rank."""
    group = event.group, event.group_name
    if event.op in P2P:
        return event.op, event.peer, event.tag, *group
    if event.op == CREATION:
        return event.op, event.dtype, *group
    return "collective", *group


Mismatch = tuple[int, int, Event, Event]


class SequenceCheck:
    """Compares the k-th collective of a group on all its ranks, as the events come in."""

    def __init__(self) -> None:
        self.issued: Counter[tuple[int, tuple[object, ...]]] = Counter()
        self.first: dict[tuple[tuple[object, ...], int], tuple[int, Event]] = {}

    def add(self, rank: int, event: Event) -> Mismatch | None:
        """Note an event of ``rank``; (rank a, rank b, a's event, b's event) if they disagree."""
        if event.op in P2P:
            return None
        channel = channel_of(event)
        position = self.issued[rank, channel]
        self.issued[rank, channel] += 1
        other, theirs = self.first.setdefault((channel, position), (rank, event))
        if signature(event) != signature(theirs):
            return other, rank, theirs, event
        return None


def expect_same_sequence(logs: Sequence[Log]) -> None:
    """Fail unless all ranks issued the same collectives in the same order and number."""
    check = SequenceCheck()
    found = (check.add(log.rank, event) for log in logs for event in log.events)
    for rank_a, rank_b, a, b in filter(None, found):
        raise CheckFailed(
            f"ranks are in different collectives: rank {rank_a} calls {a}, rank {rank_b} calls {b}",
            cause="mismatch",
            rank=rank_b,
            line=b.line,
        )
    counts = [Counter(e.op for e in log.events if e.op not in P2P) for log in logs]
    for log, count in zip(logs, counts, strict=True):
        if count != counts[0]:
            raise CheckFailed(
                f"rank {log.rank} issued {dict(count)}, rank {logs[0].rank} {dict(counts[0])}: "
                "every rank must issue the same collectives",
                cause="mismatch",
                rank=log.rank,
            )
