"""One grading run: which exercises, in which order, on which implementation, with which results."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from ..course.catalogue import Course, Exercise, has_solutions, load_course
from ..host import gpus
from ..host.system import fork_obstacle
from ..host.terminal import short
from ..sandbox import Limits
from .implementation import Implementation
from .live import View
from .obstacles import at_import, comes_back
from .runners import HERE, BriefNcclRunner, NcclRunner, Place, Runner, VirtualRunner
from .sources import Source, find_source, in_the_file
from .verdicts import TIERS, CheckResult, ExerciseResult, NotRun


@dataclass(frozen=True, kw_only=True)
class Request:
    """What to grade. ``trusted``: every other exercise counts as passed (wrong implementations
    are graded by one check at a time), and a file that can't be imported fails its first check.
    ``first``: checks that run before others. ``brief``: no check runs after one has failed.
    ``partial``: a share of the points for a share of the checks. ``guarded``: answers taken
    from elsewhere fail; a right alternative to one exercise may take the rest from the
    solution. ``once``: each check runs on the first of its tiers only. ``jobs``: checks at a
    time. ``sandbox``: ranks run in a sandbox, within these limits."""

    impl: str = "solutions"
    device: str = "auto"
    seed: int | None = None
    exercises: tuple[str, ...] = ()
    checks: tuple[str, ...] = ()
    known: frozenset[str] = frozenset()
    trusted: bool = False
    tier: str = ""
    first: tuple[str, ...] = ()
    brief: bool = False
    partial: bool = False
    guarded: bool = True
    once: bool = False
    jobs: int = 1
    sandbox: Limits | None = None


@dataclass
class Session:
    """The state of a run. The pytest plugin asks it before each check and tells it the
    result after the check."""

    request: Request
    course: Course = field(default_factory=load_course)
    results: dict[str, ExerciseResult] = field(default_factory=dict)
    not_run: dict[str, NotRun | None] = field(default_factory=dict)
    imports: dict[tuple[int, str], NotRun | None] = field(default_factory=dict)
    view: View | None = None
    place: Place = HERE
    sources: dict[int, Source] = field(default_factory=dict)
    files: dict[int, list[Path]] = field(default_factory=dict)  # at the beginning
    references: dict[str, str] = field(default_factory=dict)  # recorded runs used by checks

    def __post_init__(self) -> None:
        chosen = self.request.seed
        self.seed = random.randrange(1, 1_000_000) if chosen is None else chosen
        self.tiers: tuple[str, ...] = TIERS[:-1] if self.request.device == "cpu" else TIERS
        if self.request.tier:
            self.tiers = (self.request.tier,)

    def source(self, exercise: Exercise) -> Source:
        """Where the implementation of the exercise's phase is."""
        phase = exercise.phase
        if phase.number not in self.sources:
            found = find_source(self.request.impl, phase)
            there = [Path(name) for name in found.files()]
            self.files[phase.number] = [p for p in there if p.is_file() and p.name[0] != "."]
            self.sources[phase.number] = found
        return self.sources[phase.number]

    def result(self, exercise: Exercise) -> ExerciseResult:
        """The (so far) result of an exercise."""
        return self.results.setdefault(
            exercise.id,
            ExerciseResult(
                exercise.id,
                exercise.title,
                exercise.points,
                short(self.source(exercise).path(exercise.file)),
                partial=self.request.partial,
            ),
        )

    def assumed(self, exercise_id: str) -> bool:
        """Whether an exercise counts as right without being graded in this run."""
        return self.request.trusted or exercise_id in self.request.known

    def passed(self, exercise_id: str) -> bool:
        """Whether an earlier exercise is known to be right."""
        if self.assumed(exercise_id):
            return True
        return exercise_id in self.results and self.results[exercise_id].verdict == "pass"

    def substitutes(self, exercise: Exercise) -> list[Exercise]:
        """The exercises that are taken from the solution while this one is graded. Without
        solutions there are none: then only the learner's own code is there."""
        if not has_solutions():
            return []
        found = {e.id: e for e in self.built_on(exercise)}
        before = self.course.prerequisites([exercise.id])
        for other in exercise.phase.exercises:  # imported along, so it must not break the import
            # whether it has passed by now depends on the order in which exercises end
            apart = other.file != exercise.file and other.id not in before
            if apart and not self.assumed(other.id):
                found[other.id] = other
        return list(found.values())

    def built_on(self, exercise: Exercise) -> list[Exercise]:
        """Those substitutes whose functions the exercise calls. The report names them."""
        found: dict[str, Exercise] = {}
        for other in map(self.course.exercise, (*exercise.uses, *exercise.requires)):
            if not self.passed(other.id):
                found[other.id] = other
            found.update({e.id: e for e in self.built_on(other)})
        return [found[i] for i in sorted(found)]

    def prepare(self, exercise: Exercise, tier: str) -> None:
        """Raise NotRun if the exercise's checks can't or need not run on this tier."""
        if exercise.id not in self.not_run:
            self.not_run[exercise.id] = self._obstacle(exercise)
            used = self.built_on(exercise) if has_solutions() else []
            self.result(exercise).used_solution_of = [e.id for e in used]
        obstacle = self.not_run[exercise.id] or self.deleted(exercise)
        if obstacle is not None:
            raise obstacle
        failed = [c for c in self.result(exercise).checks if c.tier == "virtual" and _counts(c)]
        if self.request.brief and any(map(_counts, self.result(exercise).checks)):
            raise NotRun("blocked", "not run: another check failed")
        if tier != "virtual" and failed:
            raise NotRun("blocked", f"not run: {failed[0].title} fails on virtual ranks")

    def deleted(self, exercise: Exercise, trouble: str = "") -> NotRun | None:
        """The verdict if the exercise's file, or another file that ``trouble`` names, is gone but
        was there at the beginning.

        An editor may be replacing it: the file has a moment to come back.
        """
        own = self.source(exercise).path(exercise.file)
        for path in self.files[exercise.phase.number]:
            concerned = path == own or path.stem.removeprefix("template_") == exercise.file
            if (concerned or path.stem in trouble) and not comes_back(path):
                mine = concerned and self.request.impl == "templates"
                again = f": `distlab reset {exercise.id}` makes a new one" if mine else ""
                message = f"{path.name} was deleted while it was graded{again}"
                found = NotRun("error", message, cause="deleted")
                self.not_run[exercise.id] = found
                return found
        return None

    def _obstacle(self, exercise: Exercise) -> NotRun | None:
        source = self.source(exercise)
        found = in_the_file(source, exercise)
        if found is not None:
            return found
        failing = [e for e in exercise.requires if not self.passed(e)]
        if failing:
            return NotRun("blocked", f"comes after {' and '.join(failing)}: solve that first")
        unsolved = [] if has_solutions() else [e.id for e in self.built_on(exercise)]
        if unsolved:
            do = "does" if len(unsolved) == 1 else "do"
            message = f"needs your own {' and '.join(unsolved)}, which {do} not pass yet"
            return NotRun("blocked", message)
        if self.request.trusted:
            return None
        key = exercise.phase.number, exercise.file
        if key not in self.imports:
            self.imports[key] = at_import(
                source, exercise, self.implementation(exercise), self.place
            )
        return self.imports[key]

    def implementation(self, exercise: Exercise) -> Implementation:
        """The module under test, with solutions for what is not there yet."""
        source, substitutes = self.source(exercise), self.substitutes(exercise)
        guarded = self.request.guarded
        return Implementation(source, exercise.file, substitutes, exercise, guarded)

    def hides(self, exercise: Exercise) -> bool:
        """Whether the output of ranks is hidden: they could print a solution that they run with."""
        return self.request.sandbox is not None and bool(self.substitutes(exercise))

    def runner(self, exercise: Exercise, tier: str) -> Runner:
        """The runner of a check's ranks on its tier."""
        if tier == "cuda" and not gpus.count():
            raise NotRun("needs", "a CUDA GPU")
        if tier == "cuda" and self.request.sandbox:
            raise NotRun("needs", "a CUDA GPU, which a sandbox doesn't have")
        if tier in ("virtual", "nccl") and fork_obstacle():
            raise NotRun("needs", f"forked processes: {fork_obstacle()}")
        files = self.source(exercise).files()
        nccl = NcclRunner if self.request.tier else BriefNcclRunner
        kind = {"virtual": VirtualRunner, "nccl": nccl}.get(tier, Runner)
        return kind(files, self.seed, "cuda" if tier == "cuda" else "cpu", self.place)

    def record(self, exercise: Exercise, check: CheckResult) -> None:
        """Note a check's result; after a hang the exercise's other checks are not run."""
        result = self.result(exercise)
        result.checks.append(check)
        result.seconds += check.seconds
        if self.view is not None:
            self.view.ended(exercise, result, check)
        if check.verdict == "hang" and self.not_run.get(exercise.id) is None:
            self.not_run[exercise.id] = NotRun("blocked", f"not run: {check.title} hangs")


def _counts(check: CheckResult) -> bool:
    return check.verdict not in ("pass", "needs", "blocked")


SESSION = pytest.StashKey[Session]()  # where the configuration of pytest holds it
