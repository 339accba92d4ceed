"""Failures of runs in which all ranks may have returned: those that ranks noticed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from ..observe.lines import names, source_line
from .member import Member
from .options import RunOptions
from .report import rank_reports
from .results import RankFailure


@contextlib.contextmanager
def notices_named(members: list[Member], options: RunOptions) -> Iterator[None]:
    """Fail a run in which a rank took a shortcut, or left torch's default dtype or device changed.

    Any other failure inside is told as a consequence. A blank or broken file keeps its own verdict.
    """
    try:
        yield
    except RankFailure as failure:
        changed = _shortcut(members, options) or _changed_default(members, options)
        if changed is None or failure.kind in ("blank", "error"):
            raise
        if changed.cause == "shortcut":
            raise changed from None
        what = failure.message
        if failure.kind == "mismatch":
            what = what.partition("\n")[2]  # the ranks' calls, without its guess at the reason
        changed.message += f"\nwhat followed: {what.strip()}"
        changed.kind = failure.kind
        raise changed from None
    changed = _shortcut(members, options) or _changed_default(members, options)
    if changed is not None:
        raise changed


def _shortcut(members: list[Member], options: RunOptions) -> RankFailure | None:
    """The first rank that took its answer from elsewhere."""
    for member in members:
        if "shortcut" in member.notices:
            _, what, line = member.notices["shortcut"]
            return RankFailure(
                f"rank {member.rank} {what}",
                kind="exception",
                cause="shortcut",
                rank=member.rank,
                line=source_line(line),
                reports=rank_reports(members, options),
            )
    return None


def _changed_default(members: list[Member], options: RunOptions) -> RankFailure | None:
    """The change that a rank reports and has not set back."""
    for what in ("dtype", "device"):
        changed = [m for m in members if what in m.notices]
        if changed:
            before, now, line = changed[0].notices[what]
            return RankFailure(
                f"{names([m.rank for m in changed])} changed torch's default {what} from {before} "
                f"to {now} and did not set it back: from then on every tensor that is made without "
                f"a {what}, the caller's as well, is {'on ' * (what == 'device')}{now}",
                kind="exception",
                cause="changed-default",
                rank=changed[0].rank,
                line=source_line(line),
                reports=rank_reports(members, options),
            )
    return None
