"""NCCL's order of issue: operations of a rank on one communicator run one after the other.

A *communicator* has a queue on each rank. An entry of it is one operation, or a batch whose parts
are issued at once and may be complete in any order. A transfer can be delivered only while each of
its parts is in the first entry of its rank's queue (``rules.py`` has the sources).
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import Any

from ..observe.lines import source_line
from .part import Part


@dataclass(eq=False, slots=True)
class Entry:
    """Parts that a rank issues at once; ``left``: how many of them are not complete."""

    left: int = 1
    parts: list[Part] = field(default_factory=list)
    queue: deque[Entry] = field(default_factory=deque)


class IssueOrder:
    """The queues of all ranks."""

    def __init__(self) -> None:
        self.queues: dict[tuple[Any, int], deque[Entry]] = defaultdict(deque)

    def enter(self, part: Part, communicator: Any) -> None:
        """The rank issues ``part``, alone or with the others of its batch."""
        entry = part.entry
        if not entry.parts:
            entry.queue = self.queues[communicator, part.rank.index]
            entry.queue.append(entry)
        entry.parts.append(part)

    def leave(self, part: Part) -> list[Part]:
        """``part`` is complete; returns the parts that are first now and were not before."""
        entry = part.entry
        if entry is None:
            return []
        entry.left -= 1
        queue = entry.queue
        if entry.left or queue[0] is not entry:
            return []
        while queue and not queue[0].left:
            queue.popleft()
        return list(queue[0].parts) if queue else []

    def told(self) -> str:
        """Why NCCL can't deliver a transfer that gloo would deliver now; empty if there is none."""
        pairs = []
        for _, queue in sorted(self.queues.items(), key=lambda item: item[0][1]):  # by rank
            held = [p for e in list(queue)[1:] for p in e.parts if _is_held(p)]
            for part in sorted(held, key=self._awaited, reverse=True)[:1]:
                first = next(p for p in queue[0].parts if not p.done)
                pairs.append((part, first))
        circle = [pair for pair in pairs if self._awaited(pair[0])] or pairs
        lines = [
            f"  rank {first.rank.index}: {_shown(part)} is behind {_shown(first)}"
            for part, first in circle
        ]
        if not lines:
            return ""
        return (
            "gloo forgives this order, for it matches each message by itself. NCCL runs the "
            "operations of a group in the order in which each rank issued them:\n"
            + "\n".join(lines)
            + "\nissue them in one order on all ranks, or messages together by batch_isend_irecv"
        )

    def _awaited(self, part: Part) -> bool:
        """Whether the first operation of another rank waits for it."""
        return any(other is not part and is_first(other) for other in part.transfer.parts)


def is_first(part: Part) -> bool:
    """Whether no earlier operation of the rank is still under way on the communicator."""
    return part.entry is None or part.entry.queue[0] is part.entry


def _is_held(part: Part) -> bool:
    """All ranks have issued its transfer: without an order it would be delivered."""
    transfer = part.transfer
    return transfer is not None and len(transfer.parts) == transfer.needed


def _shown(part: Part) -> str:
    event = part.describe()
    return f"{event} ({source_line(event.line)})" if event.line else str(event)
