"""Spans that were read, beside the true ones."""

from __future__ import annotations

import dataclasses

from distlab.grading import expect_equal, fail
from given.profile_files import Span
from tests.phase4.planted_profiles import Profile


def plain(found):
    """Dataclasses as tuples, in lists."""
    return [dataclasses.astuple(each) for each in found]


def expect_spans(got: list[tuple], profile: Profile, what: str) -> None:
    """Fail unless the spans are the true ones, in any order."""
    key = lambda s: (s[3], s[4], s[0], s[1])
    missing = sorted({*profile.spans} - {*got}, key=key)
    more = sorted({*got} - {*profile.spans}, key=key)
    for kept, word in ((missing, "is missing"), (more, "should not be there")):
        if kept:
            span = Span(*kept[0])
            near = [Span(*s) for s in (more if kept is missing else missing)]
            same = [s for s in near if (s.name, s.begin) == (span.name, span.begin)]
            if same:
                names = [f.name for f in dataclasses.fields(Span)]
                apart = [n for n in names if getattr(span, n) != getattr(same[0], n)]
                fail(
                    f"{what}: {apart[0]} of {span.name} is wrong: {same[0]}, expected {span}"
                    if kept is missing
                    else f"{what}: {span}",
                    cause=f"span-{apart[0]}",
                )
            fail(f"{what}: {span} {word} ({len(kept)} of them)", cause=f"span-{word.split()[0]}")
    expect_equal(len(got), len(profile.spans), what=f"{what}: number of spans", cause="span-twice")
