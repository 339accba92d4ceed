"""The parent's knowledge of one rank, from the rank's reports."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from ..observe.gpu_clock import GPU
from ..observe.log import Event, Log, channel_of
from ..observe.notices import Notice, note
from .process import MAX_FRAME
from .results import garbled

KEPT_OUTPUT = 64 * 1024
KINDS = b"EFRSVX"


@dataclass
class Wait:
    """A wait of a rank's thread: for which communication, at which line, for
    how many seconds at most."""

    event: Event
    line: str
    patience: float | None


@dataclass
class Member:
    """The parent's knowledge of one rank."""

    rank: int
    pid: int
    pipe: int
    output_fd: int
    stack_fd: int = -1
    looks_fd: int = -1
    process: subprocess.Popen[bytes] | None = None
    buffer: bytearray = field(default_factory=bytearray)
    head: bytearray = field(default_factory=bytearray)
    tail: bytearray = field(default_factory=bytearray)
    events: list[Event] = field(default_factory=list)
    issued: Counter[tuple[object, ...]] = field(default_factory=Counter)
    positions: list[int] = field(default_factory=list)
    spans: dict[str, Any] = field(default_factory=dict)
    waits: dict[int, Wait] = field(default_factory=dict)  # by thread, 0 is the main one
    threads: dict[int, int | None] = field(default_factory=dict)  # others that run, and their ids
    has_closed: bool = False  # a group, or all of them
    loop: str = ""
    ready: bool = False  # its group is made, the body begins
    idle: bool = False  # a virtual rank that can go on, while another runs
    result: bytes | None = None
    error: dict[str, Any] | None = None
    status: int | None = None
    notices: dict[str, Notice] = field(default_factory=dict)
    closed: bool = False

    @property
    def files(self) -> tuple[int, ...]:
        """The parent's ends of the pipes and files that it shares with the rank."""
        return self.pipe, self.output_fd, self.stack_fd, self.looks_fd

    @property
    def finished(self) -> bool:
        """Whether the rank has returned, raised or died."""
        return self.result is not None or self.error is not None or self.closed

    @property
    def waiting(self) -> Event | None:
        """The waits of the rank, its main thread first."""
        return self.waits[min(self.waits)].event if self.waits else None

    @property
    def waiting_line(self) -> str:
        """The line of that wait."""
        return self.waits[min(self.waits)].line if self.waits else ""

    @property
    def output(self) -> str:
        """The rank's output; of a long output the beginning and the end."""
        text = bytes(self.head).decode(errors="replace")
        if self.tail:
            text += "\n[…]\n" + bytes(self.tail).decode(errors="replace")
        return text

    def printed(self, data: bytes) -> None:
        """Keep the first and the last part of the rank's output."""
        room = KEPT_OUTPUT - len(self.head)
        self.head += data[:room]
        self.tail += data[room:] if room < len(data) else b""
        del self.tail[:-KEPT_OUTPUT]

    def frames(self) -> Iterator[tuple[bytes, bytes]]:
        """The complete frames received so far."""
        while len(self.buffer) >= 5:
            size = int.from_bytes(self.buffer[:4], "little")
            if size >= MAX_FRAME or self.buffer[4] not in KINDS:
                raise garbled(self.rank)
            if len(self.buffer) < size + 5:
                return
            kind, content = bytes(self.buffer[4:5]), bytes(self.buffer[5 : 5 + size])
            del self.buffer[: size + 5]
            yield kind, content

    def take(self, kind: bytes, content: bytes) -> Event | None:
        """Note one frame; the event if one began."""
        if kind == b"R":
            self.result = content
            return None
        data = json.loads(content)
        if kind == b"X":
            self.error = data
        elif kind == b"S":
            self.spans = data
        elif data[0] == "begin":
            return self.began(data[1])
        elif data[0] == "notice":
            note(self.notices, data[1]["what"], tuple(data[1]["notice"]))
        else:
            self._note(data[0], data[1])
        return None

    def _note(self, kind: str, fields: dict[str, Any]) -> None:
        if kind == "wait":
            event = self.events[fields["index"]]
            self.waits[fields["thread"]] = Wait(event, fields["line"], fields["patience"])
        elif kind == "end":
            event = self.events[fields["index"]]
            event.end, event.overwritten = fields["end"], fields["overwritten"]
            self.waits = {t: w for t, w in self.waits.items() if w.event is not event}
        elif kind == "thread":
            self.threads[fields["number"]] = fields["id"]
        elif kind == "thread end":
            del self.threads[fields["number"]]
        elif kind == "ready":
            self.ready = True
        else:
            self.has_closed = True

    def began(self, fields: dict[str, Any]) -> Event:
        """Note a communication that the rank has issued."""
        event = Event(**fields | {"group": tuple(fields["group"])})
        self.events.append(event)
        self.positions.append(self.issued[channel_of(event)])
        self.issued[channel_of(event)] += 1
        return event

    def log(self) -> Log:
        """The rank's communication and compute, by the GPU's clock where that is known."""
        spans = [(name, start, end) for name, start, end in self.spans.get("spans", [])]
        gpu = self.spans.get("gpu", {"events": {}, "spans": {}})
        for index, (start, end) in gpu["spans"].items():
            spans[int(index)] = (spans[int(index)][0], start, end)
        events = [*self.events]
        for index, (start, end) in gpu["events"].items():
            event = events[int(index)]
            if event.end is not None:
                events[int(index)] = replace(event, start=start, end=end, clock=GPU)
        begin = self.spans.get("picture_from", 0.0)
        return Log(self.rank, events, spans, begin, frozenset(map(int, gpu["spans"])))
