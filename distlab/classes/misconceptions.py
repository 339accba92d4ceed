"""The misconceptions of a class: the causes that the grader told, counted and ranked.

A student counts once per exercise: for the check that decided the verdict, because the report told
this check in full. If a rule of ``distlab.explain`` told the same cause in several checks, that is
one misconception. Any other cause has a meaning only in its own check.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..course.catalogue import Course
from ..explain.causes import is_of_a_rule, what_they_do
from ..grading.wrong import Mutant
from .outcomes import Failed, Graded, Student

EXAMPLES = 2  # so many known mistakes are named for a misconception


@dataclass(frozen=True)
class Witness:
    """A student who was told this misconception, and the grader's words."""

    student: Student
    exercise: Graded
    failed: Failed


@dataclass(frozen=True)
class Misconception:
    """One cause in one exercise (and for most causes in one check), with all students concerned.

    ``beside``: how many more students fail in this way, but were told another cause first.
    ``builds_on_it``: the exercises of this class that build on this one. ``mistakes``: known
    mistakes that the grader tells in the same way.
    """

    exercise: str
    title: str
    points: float
    cause: str
    witnesses: tuple[Witness, ...]
    beside: int
    builds_on_it: tuple[str, ...]
    mistakes: tuple[str, ...]

    @property
    def count(self) -> int:
        """How many students have this misconception."""
        return len(self.witnesses)

    @property
    def weight(self) -> float:
        """How much a class gains by talking about it: students x points x (1 + later exercises
        that build on this one)."""
        return self.count * self.points * (1 + len(self.builds_on_it))

    @property
    def checks(self) -> list[str]:
        """Titles of the checks that told it, the most frequent first."""
        titles = [w.failed.title for w in self.witnesses]
        return sorted(dict.fromkeys(titles), key=lambda t: (-titles.count(t), t))

    def sentence(self, graded: int) -> str:
        """The misconception in words, such as "31 of 60 …"."""
        does, check = what_they_do(self.cause), self.checks[0]
        if does:
            verb = "is among those who" if self.count == 1 else ""
            where = "" if is_of_a_rule(self.cause) else f" (check: {check})"
            return " ".join(filter(None, [self._who(graded), verb, does])) + where
        verb = "breaks" if self.count == 1 else "break"
        return f"{self._who(graded)} {verb} this promise: {check}"

    def _who(self, graded: int) -> str:
        return f"{self.count} of {graded}"


def misconceptions(
    students: Iterable[Student], course: Course, mutants: Sequence[Mutant] = ()
) -> list[Misconception]:
    """All misconceptions, by weight. An exercise that the course does not know
    has no later exercises."""
    found: dict[tuple[str, str, str], list[Witness]] = {}
    also: dict[tuple[str, str, str], set[str]] = {}
    counted: set[str] = set()
    for student in students:
        for exercise in student.exercises:
            counted.add(exercise.id)
            for index, failed in enumerate(exercise.failed):
                key = _key(exercise, failed)
                if index == 0:
                    found.setdefault(key, []).append(Witness(student, exercise, failed))
                also.setdefault(key, set()).add(student.id)
    later = builders(course, counted)
    result = [
        Misconception(
            exercise=exercise,
            title=witnesses[0].exercise.title,
            points=witnesses[0].exercise.max_points,
            cause=cause,
            witnesses=tuple(witnesses),
            beside=len(also[exercise, cause, check] - {w.student.id for w in witnesses}),
            builds_on_it=later.get(exercise, ()),
            mistakes=_known(mutants, exercise, cause, check),
        )
        for (exercise, cause, check), witnesses in found.items()
    ]
    return sorted(result, key=lambda m: (-m.weight, -m.count, m.exercise, m.cause, m.checks))


def _key(exercise: Graded, failed: Failed) -> tuple[str, str, str]:
    return exercise.id, failed.cause, "" if is_of_a_rule(failed.cause) else failed.check


def builders(course: Course, counted: set[str]) -> dict[str, tuple[str, ...]]:
    """For each exercise those of ``counted`` that build on it, directly or
    through another exercise."""
    bases: dict[str, set[str]] = {}
    for exercise in course.exercises:  # what an exercise builds on stands before it
        direct = exercise.builds_on
        bases[exercise.id] = direct.union(*(bases.get(base, set()) for base in direct))
    return {
        base: tuple(e.id for e in course.exercises if e.id in counted and base in bases[e.id])
        for base in bases
    }


def _known(mutants: Sequence[Mutant], exercise: str, cause: str, check: str) -> tuple[str, ...]:
    """Mistakes of the course's wrong implementations that get this cause in this check."""
    return tuple(
        m.mistake
        for m in mutants
        if (m.exercise, m.tier) == (exercise, "")
        and cause in m.causes
        and check in ("", m.caught_by)
    )[:EXAMPLES]


def recurring(found: Iterable[Misconception]) -> list[tuple[str, int, list[str]]]:
    """Causes that rules tell in several exercises: cause, students, exercises."""
    where: dict[str, list[Misconception]] = {}
    for each in found:
        if is_of_a_rule(each.cause):
            where.setdefault(each.cause, []).append(each)
    rows = []
    for cause, found_in in where.items():
        ids = sorted({p.exercise for p in found_in}, key=in_order)
        who = {w.student.id for p in found_in for w in p.witnesses}
        if len(ids) > 1:
            rows.append((cause, len(who), ids))
    return sorted(rows, key=lambda row: (-row[1], row[0]))


def in_order(exercise: str) -> tuple[tuple[int, str], ...]:
    """A key by which 1.10 comes after 1.9, and an id that is no number comes last."""
    return tuple((int(p), "") if p.isdecimal() else (10**9, p) for p in exercise.split("."))
