"""One grading run: which exercises, in which order, on which implementation, with which results."""

from __future__ import annotations

import os
import random
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from .. import gpus
from ..course import Course, Exercise, functions_of, load_course
from ..failure import CheckFailed
from ..ledger import SHARED_GPU
from ..program_clock import spent
from ..rank_report import source_line
from ..ranks import RankContext, RankFailure, RankResults, run_ranks
from ..system import fork_obstacle
from ..virtual import VirtualResults, run_worlds
from .implementation import Implementation, Source, blank_places, find_source
from .live import View
from .verdicts import TIERS, CheckResult, ExerciseResult

# seconds on a machine that does nothing else (``ProgramClock``)
CHECK_LIMIT = 60.0  # for all runs of one check
RUN_LIMIT = 10.0  # for one run of ranks, unless the check says otherwise
INTERLEAVINGS = 2  # explored by every run on virtual ranks
DELAYED = 8  # the same, where timing is what is checked


R = TypeVar("R", bound=RankResults)


class NotRun(Exception):
    """A check was not run, and why: its verdict is this one."""

    def __init__(self, verdict: str, message: str, line: str = "", cause: str = "") -> None:
        super().__init__(message)
        self.result = CheckResult("", verdict, message, cause or verdict, line=line)


@dataclass(frozen=True, kw_only=True)
class Request:
    """What to grade. ``trusted``: every other exercise counts as passed (wrong implementations
    are graded by one check at a time), and a file that can't be imported fails its first check."""

    impl: str = "solutions"
    device: str = "auto"
    seed: int | None = None
    exercises: tuple[str, ...] = ()
    checks: tuple[str, ...] = ()
    known: frozenset[str] = frozenset()
    trusted: bool = False
    tier: str = ""


@dataclass
class Session:
    """The state of a run; the pytest plugin asks it before and tells it after each check."""

    request: Request
    course: Course = field(default_factory=load_course)
    results: dict[str, ExerciseResult] = field(default_factory=dict)
    not_run: dict[str, NotRun | None] = field(default_factory=dict)
    imports: dict[tuple[int, str], NotRun | None] = field(default_factory=dict)
    view: View | None = None
    sources: dict[int, Source] = field(default_factory=dict)
    files: dict[int, list[Path]] = field(default_factory=dict)  # at the beginning

    def __post_init__(self) -> None:
        chosen = self.request.seed
        self.seed = random.randrange(1, 1_000_000) if chosen is None else chosen
        self.tiers = ("virtual", "gloo") if self.request.device == "cpu" else TIERS
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
                _shown(self.source(exercise).path(exercise.file)),
            ),
        )

    def passed(self, exercise_id: str) -> bool:
        """Whether an earlier exercise is known to be right."""
        if self.request.trusted or exercise_id in self.request.known:
            return True
        return exercise_id in self.results and self.results[exercise_id].verdict == "pass"

    def substitutes(self, exercise: Exercise) -> list[Exercise]:
        """The exercises that are taken from the solution while this one is graded."""
        found = {e.id: e for e in self.built_on(exercise)}
        for other in exercise.phase.exercises:  # imported along, so it must not break the import
            if other.file != exercise.file and not self.passed(other.id):
                found[other.id] = other
        return list(found.values())

    def built_on(self, exercise: Exercise) -> list[Exercise]:
        """Those of them whose functions the exercise calls: what the report names."""
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
            self.result(exercise).used_solution_of = [e.id for e in self.built_on(exercise)]
        obstacle = self.not_run[exercise.id] or self.deleted(exercise)
        if obstacle is not None:
            raise obstacle
        failed = [c for c in self.result(exercise).checks if c.tier == "virtual" and _counts(c)]
        if tier != "virtual" and failed:
            raise NotRun("blocked", f"not run: {failed[0].title} fails on virtual ranks")

    def deleted(self, exercise: Exercise, trouble: str = "") -> NotRun | None:
        """The verdict if the exercise's file is gone, or another one that ``trouble`` speaks of,
        though it was there at the beginning.

        An editor may be replacing it: the file has a moment to come back.
        """
        own = self.source(exercise).path(exercise.file)
        for path in self.files[exercise.phase.number]:
            concerned = path == own or path.stem.removeprefix("template_") == exercise.file
            if (concerned or path.stem in trouble) and not _comes_back(path):
                mine = concerned and self.request.impl == "templates"
                again = f": `distlab reset {exercise.id}` makes a new one" if mine else ""
                message = f"{path.name} was deleted while it was graded{again}"
                found = NotRun("error", message, cause="deleted")
                self.not_run[exercise.id] = found
                return found
        return None

    def _obstacle(self, exercise: Exercise) -> NotRun | None:
        path = self.source(exercise).path(exercise.file)
        name = path.name
        if not path.is_file():
            return NotRun("error", f"{name} does not exist: `distlab reset {exercise.id}` makes it")
        try:
            left = blank_places(path, exercise.id)
        except SyntaxError as error:
            text = (error.text or "").strip()
            line = f"{name}:{error.lineno}: {text}" if error.lineno else ""
            return NotRun("error", f"{name} is not valid Python: {error.msg}", line)
        except (OSError, ValueError) as error:
            return NotRun("error", f"{name} can't be read: {error}")
        except (RecursionError, MemoryError):
            return NotRun("error", f"{name} is nested too deeply for Python to read it")
        if left and self._regions(exercise) <= len(left):
            return NotRun("blank", f"still to be written, {name} line {left[0]}")
        failing = [e for e in exercise.requires if not self.passed(e)]
        if failing:
            return NotRun("blocked", f"comes after {' and '.join(failing)}: solve that first")
        return None if self.request.trusted else self._import_problem(exercise)

    def _regions(self, exercise: Exercise) -> int:
        text = exercise.solution_path.read_text(encoding="utf-8")
        return max(1, text.count(f"# --- exercise {exercise.id}: start"))

    def _import_problem(self, exercise: Exercise) -> NotRun | None:
        """Import the learner's file once, in a rank of its own, before any check needs it."""
        key = (exercise.phase.number, exercise.file)
        if key not in self.imports:
            source = self.source(exercise)
            impl = Implementation(source, exercise.file, self.substitutes(exercise))

            def body(ctx: RankContext) -> None:
                impl.module(exercise.file)

            self.imports[key] = None
            try:
                run_ranks(
                    body,
                    1,
                    timeout=RUN_LIMIT,
                    process_group=False,
                    ledger=False,
                    learner_files=source.files(),
                )
            except RankFailure as failure:
                verdict = failure.kind if failure.kind in ("hang", "crash") else "error"
                message = f"importing {source.path(exercise.file).name}: {failure.message}"
                told = verdict == "hang" or failure.cause == "changed-default"
                cause = failure.cause if told else ""
                self.imports[key] = NotRun(verdict, message, failure.line, cause)
        return self.imports[key]

    def runner(self, exercise: Exercise, tier: str) -> Runner:
        """What runs a check's ranks on its tier."""
        if tier == "cuda" and not gpus.count():
            raise NotRun("needs", "a CUDA GPU")
        if tier == "virtual" and fork_obstacle():
            raise NotRun("needs", f"forked processes: {fork_obstacle()}")
        files = self.source(exercise).files()
        kind = VirtualRunner if tier == "virtual" else Runner
        return kind(files, self.seed, "cuda" if tier == "cuda" else "cpu")

    def definition(self, exercise: Exercise, check: str, file: str) -> str:
        """Where the learner defines the function that the check is about: a wrong value has no
        line of its own. ``check``, ``file``: the source of the check, and of all its file, which
        counts where the check leaves the call to a helper."""

        words = re.findall(r"\w+", check)

        def relevance(name: str) -> int:
            head, _, method = name.partition(".")
            return 2 * (head in words) + (method in words)

        names = functions_of(exercise)
        name = max(names, key=relevance)
        if not relevance(name):
            name = max(names, key=lambda name: file.count(name.partition(".")[0]))
        owner, _, about = name.rpartition(".")
        path = self.source(exercise).path(exercise.file)
        found = not owner
        for number, line in enumerate(_lines(path), 1):
            found = found or re.match(rf"class {owner}\b", line) is not None
            if found and re.match(rf"\s*def {about}\(", line):
                return f"{path.name}:{number}: {line.strip()}"
        return ""

    def record(self, exercise: Exercise, check: CheckResult) -> None:
        """Note a check's result; after a hang the exercise's other checks are not run."""
        result = self.result(exercise)
        result.checks.append(check)
        result.seconds += check.seconds
        if self.view is not None:
            self.view.ended(exercise, check)
        if check.verdict == "hang" and self.not_run.get(exercise.id) is None:
            self.not_run[exercise.id] = NotRun("blocked", f"not run: {check.title} hangs")


def _lines(path: Path) -> list[str]:
    """The file's lines; none if it can't be read (any more)."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def _comes_back(path: Path) -> bool:
    """Whether the file is there, or is again soon."""
    for _ in range(10):
        if path.is_file():
            return True
        time.sleep(0.02)
    return False


class Runner:
    """``run(body, world_size, *args, timeout=…)`` for one check, on real ranks."""

    def __init__(self, files: tuple[str, ...], seed: int, device: str) -> None:
        self.files, self.seed, self.device = files, seed, device
        self.end = spent() + CHECK_LIMIT
        self.printed: list[str] = []  # by each rank of the run whose values were read last

    def note(self, results: R) -> R:
        """Remember what the ranks printed as soon as the check judges what they returned."""

        def read() -> None:
            self.printed = results.output

        results.on_read = read
        return results

    def limit(self, options: dict[str, Any]) -> float:
        """Seconds for the next run: what its options say, as far as the check has them left."""
        asked = options.pop("timeout", RUN_LIMIT)
        return round(min(asked, max(1.0, self.end - spent())), 1)

    def __call__(
        self, body: Callable[..., Any], world_size: int, *args: Any, **options: Any
    ) -> RankResults:
        """``run_ranks`` with the defaults of checks."""
        defaults = {"device": self.device, "seed": self.seed, "learner_files": self.files}
        limit = self.limit(options)
        try:
            results = run_ranks(body, world_size, *args, timeout=limit, **(defaults | options))
        except RankFailure as failure:
            if failure.cause == SHARED_GPU and self.device == "cuda" and gpus.count() < world_size:
                raise NotRun("needs", f"{world_size} GPUs: {failure.message}") from None
            raise
        return self.note(results)

    def worlds(
        self, body: Callable[..., Any], world_sizes: Sequence[int], *args: Any, **options: Any
    ) -> list[RankResults]:
        """The results for several world sizes."""
        return [self(body, w, *args, **options) for w in world_sizes]


class VirtualRunner(Runner):
    """The same on virtual ranks: several interleavings each time, several sizes in one process."""

    def __call__(
        self, body: Callable[..., Any], world_size: int, *args: Any, **options: Any
    ) -> RankResults:
        """``run_virtual`` with the defaults of checks."""
        return self.worlds(body, (world_size,), *args, **options)[0]

    def worlds(
        self, body: Callable[..., Any], world_sizes: Sequence[int], *args: Any, **options: Any
    ) -> list[RankResults]:
        """The results for several world sizes."""
        more = DELAYED if options.pop("delays", False) else INTERLEAVINGS
        return [*self._run(body, world_sizes, args, {"seed": self.seed, "seeds": more} | options)]

    def simulate(
        self, body: Callable[..., Any], world_size: int, *args: Any, **options: Any
    ) -> VirtualResults:
        """One run in the order of virtual time, for checks of the clock; see ``run_virtual``.

        Its ``clock`` and ``traffic`` are those of the ``cluster`` given. (Links that an adversarial
        order reserves too early would make it late.)
        """
        return self._run(body, (world_size,), args, options)[0]

    def _run(
        self,
        body: Callable[..., Any],
        world_sizes: Sequence[int],
        args: tuple[Any, ...],
        options: dict[str, Any],
    ) -> list[VirtualResults]:
        limit = self.limit(options)
        every = run_worlds(
            body,
            world_sizes,
            *args,
            base_seed=self.seed,
            timeout=limit,
            patience=limit,
            learner_files=self.files,
            **options,
        )
        return [self.note(results) for results in every]


def _counts(check: CheckResult) -> bool:
    return check.verdict not in ("pass", "needs", "blocked")


def _shown(path: Path) -> str:
    """The path as the learner types it."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def verdict_of(error: BaseException | None) -> CheckResult:
    """The verdict, message, cause, rank and line that an exception in a check stands for."""
    if error is None:
        return CheckResult("", "pass")
    if isinstance(error, NotRun):
        return CheckResult(**vars(error.result))
    if isinstance(error, RankFailure):
        verdict = error.kind if error.kind in ("hang", "crash", "blank", "error") else "fail"
        printed = {r.rank: r.output for r in error.reports}
        return CheckResult(
            "", verdict, error.message, error.cause, error.rank, error.line, printed=printed
        )
    if isinstance(error, CheckFailed):
        line = source_line(error.line) if os.path.isabs(error.line) else error.line
        return CheckResult("", "fail", error.message, error.cause, error.rank, line)
    message = str(error) or "the check failed"
    if not isinstance(error, AssertionError):
        message = f"the check could not use what came back: {type(error).__name__}: {message}"
    return CheckResult("", "fail", message, "unusable")
