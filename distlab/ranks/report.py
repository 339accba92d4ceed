"""Turn the parent's knowledge of a failed run into one readable RankFailure."""

from __future__ import annotations

import os
import re
import signal

from ..observe.lines import names, source_line
from ..observe.log import Event, Mismatch, channel_of
from ..observe.raised import printable
from .member import Member
from .options import RunOptions
from .results import PIPE_LOST, RankFailure, RankReport

BROKEN_LINK = re.compile(r"(?i)connection (closed|reset)|broken pipe|socket (timeout|closed)")
BLANK = re.compile(r"exercise (\d+\.\d+)")
# autograd's words for a graph that ends before the tensors whose gradient is asked for
DETACHED = re.compile(r"element 0 of tensors does not require|One of the differentiated Tensors")


def failure(members: list[Member], options: RunOptions) -> RankFailure:
    """A rank raised or died: the one whose failure explains the others'."""
    dead = [m for m in members if m.closed and m.result is None and m.error is None]
    if dead:
        return _crash(dead[0], members, options)
    raised = [m for m in members if m.error is not None]
    first = min(raised, key=_not_the_cause)
    error = first.error
    assert error is not None
    same = [m.rank for m in raised if m.error and _what(m.error) == _what(error)]
    line = error["own_line"] or source_line(error["line"])
    blank = BLANK.search(error["message"]) if error["type"] == "NotImplementedError" else None
    reports = rank_reports(members, options)
    if blank:
        return RankFailure(
            f"exercise {blank[1]} is still blank",
            kind="blank",
            rank=first.rank,
            line=line,
            reports=reports,
        )
    if error["type"] == "SystemExit":
        message = f"{names(same)} left the program with sys.exit({error['code']})"
        return RankFailure(message, kind="crash", rank=first.rank, line=line, reports=reports)
    if error["cause"]:
        rank = first.rank
        return RankFailure(
            error["message"],
            kind=error["kind"] or "exception",
            cause=error["cause"],
            rank=rank,
            line=line,
            reports=reports,
        )
    kind = "error" if error["is_import"] else "exception"
    detached = kind == "exception" and DETACHED.search(str(error["message"]))
    return RankFailure(
        f"{names(same)} raised {_what(error)}",
        kind=kind,
        cause="graph-cut" if detached else kind,
        rank=first.rank,
        line=line,
        reports=reports,
    )


def cause_known(members: list[Member]) -> bool:
    """Whether a rank has died, or has raised anything other than a broken connection."""
    return error_known(members) or any(m.closed and not (m.error or m.result) for m in members)


def error_known(members: list[Member]) -> bool:
    """Whether a rank has raised anything other than a broken connection."""
    errors = (str(m.error["message"]) for m in members if m.error)
    return any(not BROKEN_LINK.search(message) for message in errors)


def _what(error: dict[str, object]) -> str:
    message = str(error["message"]).strip() or "(no message)"
    return f"{error['type']}: {message}"


def _not_the_cause(member: Member) -> tuple[bool, bool, int]:
    """Sort key: an error of the learner's own before a broken connection that followed it."""
    assert member.error is not None
    broken = bool(BROKEN_LINK.search(str(member.error["message"])))
    return broken, not member.error["in_learner_code"], member.rank


def _crash(member: Member, members: list[Member], options: RunOptions) -> RankFailure:
    status = member.status
    if status is None or status == PIPE_LOST << 8:
        how = (
            "can't report any more: it closed a file descriptor that it had not opened "
            "(os.close, os.closerange, os.dup2), or became another program (os.exec…)"
        )
    elif os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        how = f"was killed by signal {number} ({signal.Signals(number).name})"
    else:
        how = f"ended its process with exit status {os.WEXITSTATUS(status)}"
    last = member.waiting or (member.events[-1] if member.events else None)
    where = f"; its last communication was {last}" if last else ""
    return RankFailure(
        f"rank {member.rank} {how}{where}",
        kind="crash",
        rank=member.rank,
        line=source_line(last.line) if last else "",
        reports=rank_reports(members, options),
    )


def mismatch(
    members: list[Member],
    found: Mismatch,
    options: RunOptions,
    head: str = "ranks are in different collectives",
) -> RankFailure:
    """Two ranks entered communication that cannot belong together."""
    rank_a, rank_b, a, b = found
    return RankFailure(
        f"{head}:\n"
        + _bullet(rank_a, f"calls {a}", a.line)
        + "\n"
        + _bullet(rank_b, f"calls {b}", b.line),
        kind="mismatch",
        rank=rank_b,
        line=source_line(b.line),
        reports=rank_reports(members, options),
    )


def invented(
    member: Member, told: int, counted: int, members: list[Member], options: RunOptions
) -> RankFailure:
    """A rank's record of its communication differs from the traffic of its connections."""
    return RankFailure(
        f"rank {member.rank} has a record of {told:,} bytes received, but the kernel counted "
        f"{counted:,} on its connections: the record was not made by communication",
        kind="exception",
        cause="invented-communication",
        rank=member.rank,
        reports=rank_reports(members, options),
    )


def hang(
    members: list[Member],
    stacks: dict[int, str],
    options: RunOptions,
    proven: bool = False,
    why: str = "",
) -> RankFailure:
    """No rank can go on, or the time is up: tells the call in which each rank waits, and the ranks
    that never came.

    The cause is an endless loop where a rank is in one: other ranks then wait without a fault of
    the communication. The cause is ``running`` where ranks run, in no known loop, and none waits.
    ``why``: a known reason, told in place of the ranks that never came.
    """
    where = {m.rank: _where(m, stacks, options) for m in members if not m.finished}
    looping = [m for m in members if m.loop and not m.finished]
    back = {m.rank for m in members if _is_back(m, where.get(m.rank, ""), options)}
    waiting = [m for m in members if m.waiting and not m.finished]
    waiting.sort(key=lambda m: m.rank in back)
    running = sorted((m for m in members if not m.finished), key=lambda m: m.idle)
    first = (looping or waiting or running)[0]
    head = "deadlock: every rank that has not returned waits for another"
    if not proven:
        head = f"no result after {options.timeout:g} s"
    if looping:
        are = "is" if len(looping) == 1 else "are"
        head = f"{names([m.rank for m in looping])} {are} in a loop that does not end ({head})"
    lines = [head]
    if not looping or len(members) > 1:
        lines[0] += ":"
        lines += [
            f"  rank {m.rank} has come back from your code: the check's barrier holds it"
            if m.rank in back
            else _bullet(m.rank, _doing(m), where.get(m.rank, ""))
            for m in members
        ]
    missing = why or (_missing(members, waiting[0]) if waiting else "")
    return RankFailure(
        "\n".join(lines) + (f"\n{missing}" if missing else ""),
        kind="hang",
        cause="endless-loop" if looping else "hang" if waiting else "running",
        rank=first.rank,
        line=source_line(where[first.rank]),
        reports=rank_reports(members, options),
    )


def _is_back(member: Member, where: str, options: RunOptions) -> bool:
    """The rank waits in a barrier that is not the learner's."""
    event = None if member.finished or member.loop else member.waiting
    if event is None or event.op != "barrier":
        return False
    return where.rpartition(":")[0] not in options.learner_files


def _doing(member: Member) -> str:
    if member.finished:
        return "has already returned"
    if member.loop:
        return "is in a loop that does not end"
    if member.waiting:
        return f"waits in {member.waiting}"
    return "waits for its turn to run" if member.idle else "is still running"


def _where(member: Member, stacks: dict[int, str], options: RunOptions) -> str:
    """The position of a rank that has not finished."""
    if member.loop:
        return member.loop
    if member.waiting:
        return member.waiting_line or member.waiting.line
    return _stack_line(stacks.get(member.rank, ""), options.learner_files)


def _missing(members: list[Member], first: Member) -> str:
    """The ranks that never entered the communication in which ``first`` waits."""
    event = first.waiting
    if event is None:
        return ""
    position = first.positions[event.index]
    if event.op in ("send", "recv"):
        if event.peer is None:
            return ""
        return f"rank {event.peer} never posted the matching {_partner(event)}"
    absent = [r for r in event.group if members[r].issued[channel_of(event)] <= position]
    return f"{names(absent)} never came to this {event.op}" if absent else ""


def _partner(event: Event) -> str:
    return "receive" if event.op == "send" else "send"


def _stack_line(stack: str, learner_files: tuple[str, ...]) -> str:
    """The innermost learner frame of a dumped stack; the innermost frame else."""
    frames = re.findall(r'File "([^"]+)", line (\d+)', stack)
    for path, number in frames:
        if path in learner_files:
            return f"{path}:{number}"
    return f"{frames[0][0]}:{frames[0][1]}" if frames else ""


def _bullet(rank: int, what: str, line: str) -> str:
    return f"  rank {rank} {what}" + (f"   at {source_line(line)}" if line else "")


def rank_reports(members: list[Member], options: RunOptions) -> list[RankReport]:
    """The report on each rank beside the failure itself."""
    reports = []
    for m in members:
        state = "returned" if m.result is not None else "raised" if m.error else "died"
        if not m.finished:
            state = "waits" if m.waiting else "runs"
        line = m.waiting_line or (m.error or {}).get("line", "")
        output = printable(m.output)
        reports.append(RankReport(m.rank, state, source_line(line), output, m.error or {}))
    return reports
