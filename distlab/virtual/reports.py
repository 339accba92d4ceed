"""The reports of the child of a virtual run: read as they come, made into results or a failure."""

from __future__ import annotations

import contextlib
import json
import os
import select
from collections.abc import Callable
from typing import Any, NamedTuple

from ..host.processes import is_ending
from ..host.program_clock import EVERY, ProgramClock
from ..observe.log import Log
from ..ranks import report as rank_report
from ..ranks.content import unpacked
from ..ranks.member import KEPT_OUTPUT, Member, Wait
from ..ranks.noticed import notices_named
from ..ranks.results import RankFailure, RankResults, garbled
from .child import TIME_IS_UP
from .options import VirtualOptions
from .rules import rules_named

GRACE = 5.0  # seconds on its clock that the child may take to report after its time is up


class HostRead(NamedTuple):
    """A rank's host waited for its GPU: by which operator, at which line, in which region of
    ``RankContext``. It looked at values, copied some there in the blocking way (like
    ``torch.tensor(…, device=…)``), or synchronised."""

    what: str
    line: str
    region: str


class VirtualResults(RankResults):
    """The W return values with ``logs`` and ``output``, and the numbers of clocks and links.

    ``clocks``: virtual seconds at which each rank was done. ``traffic``: bytes by kind of link.
    ``unmodelled``: operators without a rule of their own in the compute model, and how often.
    ``peaks``: most bytes of tensors alive on each rank (with a compute model). ``host_reads``: for
    each rank the times that its host waited for its GPU (under NCCL's rules).
    """

    def __init__(
        self, values: list[Any], logs: list[Log], output: list[str], more: dict[str, Any]
    ) -> None:
        super().__init__(values, logs, output)
        self.clocks: list[float] = more["clocks"]
        self.traffic: dict[str, int] = more["traffic"]
        self.unmodelled: dict[str, int] = more["unmodelled"]
        self.peaks: list[int] = more["peaks"]
        self.flops: list[float] = more["flops"]
        self.host_reads: list[list[HostRead]] = more["host_reads"]

    @property
    def clock(self) -> float:
        """Virtual seconds until the last rank was done."""
        return max(self.clocks)


Frames = list[tuple[bytes, bytes]]


class Reports(list[Frames]):
    """One list of frames per world, the output, and how the child ended if worlds are missing.

    ``ending``: "silent" (too long), "garbled", "died", or "lives on" (without its pipe).
    ``limit``: the seconds that count, those of one interleaving or those of all.
    """

    ending = ""

    def __init__(self, limit: float) -> None:
        super().__init__()
        self.limit, self.printed = limit, bytearray()

    def keep(self, data: bytes) -> bool:
        """Add to what was printed, up to a limit; False at its end."""
        self.printed += data[: KEPT_OUTPUT - len(self.printed)]
        return bool(data)


def read_reports(
    pid: int, pipes: tuple[int, int], worlds: int, options: VirtualOptions, begun: Callable[[], int]
) -> Reports:
    """Read the child's reports until it has sent all or ends.

    ``pipes``: for reports, and for what is printed. ``begun``: how many interleavings have begun;
    with each one its limit begins anew.
    """
    clock, reports = ProgramClock([pid]), Reports(min(options.each, options.timeout))
    reader, frames = Member(0, 0, -1, -1), Frames()
    fd, printed = sources = [*pipes]
    end, seen, told = options.each, 0, False
    while len(reports) < worlds:
        now = clock.read()
        if begun() != seen and not told:
            end, seen = now + options.each, begun()
        left = min(end, options.timeout) - now
        if left <= 0 and not told:
            told = True
            reports.limit = options.each if end < options.timeout else options.timeout
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, TIME_IS_UP)  # it tells where it is
        if left <= -GRACE:
            reports.ending = "silent"
            break
        soon = left if left > 0 else left + GRACE
        ready = select.select(sources, [], [], min(max(soon, EVERY), 0.5))[0]
        if printed in ready and not reports.keep(os.read(printed, 1 << 16)):
            sources.remove(printed)  # closed by the learner's code
        if fd not in ready:
            continue
        data = os.read(fd, 1 << 20)
        if not data:
            reports.ending = "died" if is_ending(pid) else "lives on"
            break
        reader.buffer += data
        try:
            for frame in reader.frames():
                frames.append(frame)
                if frame[0] == b"F":
                    reports.append(frames)
                    frames = Frames()
        except RankFailure:
            reports.ending = "garbled"
            break
    while select.select([printed], [], [], 0)[0] and len(reports.printed) < KEPT_OUTPUT:
        if not reports.keep(os.read(printed, KEPT_OUTPUT)):
            break
    return reports


def results_of(
    frames: Frames, members: list[Member], options: VirtualOptions, printed: str
) -> VirtualResults:
    """The results of one world; raises RankFailure if a rank failed there."""
    values: list[Any] = [None] * len(members)
    summary: dict[str, Any] = {}
    reads: list[list[HostRead]] = [[] for _ in members]
    for kind, content in frames:
        if kind == b"F":
            summary = json.loads(content)
        elif kind == b"R":
            rank = int.from_bytes(content[:4], "little")
            members[rank].result = content
            try:
                values[rank] = unpacked(content[4:])
            except ValueError:
                raise garbled(rank) from None
        else:
            data = json.loads(content)
            _load(members, data)
            reads[data["rank"]] = [HostRead(*each) for each in data["reads"]]
    members[0].head += printed.encode()
    try:
        with notices_named(members, options):
            _raise_if_failed(summary, members, options)
    except RankFailure as failure:
        failure.interleaving = summary.get("seed")
        first = options.seed
        if None not in (failure.interleaving, first) and failure.interleaving != first:
            failure.message += "\n(not in every order of the ranks: other interleavings went well)"
        if rules_named(options.rules)[0].nccl:
            failure.message += f"\n(simulated by NCCL's rules, {summary.get('rules')})"
        raise
    output, more = [m.output for m in members], summary | {"host_reads": reads}
    return VirtualResults(values, [m.log() for m in members], output, more)


def _load(members: list[Member], data: dict[str, Any]) -> None:
    """Take in the record of one rank."""
    member = members[data["rank"]]
    groups = [tuple(group) for group in data["groups"]]
    for event in data["events"]:
        member.began(event | {"group": groups[event["group"]]})
    member.error = data["error"]
    member.notices = data["notices"]
    member.spans = {"spans": data["spans"], "picture_from": data["picture_from"]}
    member.head += data["output"].encode(errors="backslashreplace")
    if data["waiting"] is not None:
        member.waits[0] = Wait(member.events[data["waiting"]], data["line"], None)


def _raise_if_failed(
    summary: dict[str, Any], members: list[Member], options: VirtualOptions
) -> None:
    verdict = summary["verdict"]
    if verdict == "mismatch":
        first, second = ((r, members[r].events[i]) for r, i in summary["parts"])
        found = (first[0], second[0], first[1], second[1])
        raise rank_report.mismatch(members, found, options, summary["message"])
    for member in members if options.survivable else ():
        if member.error is not None and member.error["type"] == "lost rank":
            member.error = None
    if any(m.error is not None for m in members):
        raise rank_report.failure(members, options)
    if verdict != "done":
        stacks = {int(rank): text for rank, text in summary["stacks"].items()}
        loops = {int(rank): line for rank, line in summary["loops"].items()}
        for member in members:
            member.loop = loops.get(member.rank, "")
            member.idle = member.rank not in stacks
        proven, why = verdict == "deadlock", summary.get("forgiven", "")
        raise rank_report.hang(members, stacks, options, proven, why)
