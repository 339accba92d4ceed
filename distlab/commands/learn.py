"""What a learner asks for: the map, hints, a blank file, the solution."""

from __future__ import annotations

import datetime
import shutil
from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from ..course import ahead, progress, templates
from ..course.catalogue import Course, Exercise, need_solutions, root
from ..course.excerpts import excerpts
from ..course.tracks import Track
from ..course.version import course_version
from ..host.terminal import command, say, short
from . import lab_map

ESTIMATES = (("minutes", 80), ("difficulty", 100))  # columns from which the map shows them


def show_map(course: Course, out: Console, whole: bool = False) -> int:
    """The exercises of the learner's track with verdicts, and the next step.

    Of a phase in which nothing was done, and that is not the next one, one line; all of it if
    ``whole``.
    """
    entries, warnings = progress.load()
    track = ahead.chosen_track(course)
    exercises = ahead.exercises_of(course.exercises, track)
    todo = ahead.left(exercises, entries)
    following = todo[0] if todo else None
    for phase in course.phases:
        own = [e for e in exercises if e.phase == phase]
        if phase.ready and not own:
            continue
        out.print(Text(f"\nPhase {phase.number}: {phase.title}", "bold"))
        if not phase.ready:
            out.print(Text("  to come", "dim"))
        elif whole or following in own or any(e.id in entries for e in own):
            _show_exercises(own, entries, out)
            lab_map.show_sum(lab_map.labs_of(own), out)
        else:
            _show_sum(own, out)
    for warning in warnings:
        say(out, warning, "yellow")
    out.print()
    _show_track(track, exercises, entries, out)
    for phase in course.phases:
        if phase.exercises and not ahead.left(phase.exercises, entries):
            name = f'distlab certificate {phase.number} --name "…"'
            command(out, f"phase {phase.number} is done: ", name)
    if following:
        _show_next(following, exercises, out)
    lab_map.show_next(lab_map.next_lab(exercises, entries), out)
    say(out, ahead.where_to_ask(course), label="questions: ")
    return 0


def _show_sum(exercises: list[Exercise], out: Console) -> None:
    """A line for all of them."""
    points, minutes = (sum(getattr(e, of) for e in exercises) for of in ("points", "minutes"))
    text = f"{len(exercises)} exercises, {points} points, about {ahead.duration(minutes)}"
    say(out, f"{text} (distlab --all shows them)", "dim", indent="  ")


def _show_exercises(exercises: list[Exercise], entries: ahead.Entries, out: Console) -> None:
    """A line for each, and the points that they have together."""
    estimates = [name for name, least in ESTIMATES if out.width >= least]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.show_header = bool(estimates)
    table.add_column("")
    table.add_column("")
    for name in ("verdict", "points", *estimates, "hints"):
        table.add_column(name, no_wrap=True, justify="left" if name == "verdict" else "right")
    for e in exercises:
        mine = entries.get(e.id, {})
        verdict = mine.get("verdict", "not graded yet")
        style = {"pass": "bold green", "fail": "bold red"}.get(verdict, "dim")
        title = Text(e.title)
        if e.was_in:
            title.append(f" (was part of {e.was_in})", "dim")
        estimate = [str(getattr(e, name)) for name in estimates]
        hints = str(mine.get("hints") or "")
        points = f"{mine.get('points', 0)}/{e.points}"
        table.add_row(f"  {e.id}", title, Text(verdict, style), points, *estimate, hints)
    out.print(table)
    score = sum(entries.get(e.id, {}).get("points", 0) for e in exercises)
    out.print(f"  {score} of {sum(e.points for e in exercises)} points")


def _show_track(
    track: Track, exercises: list[Exercise], entries: ahead.Entries, out: Console
) -> None:
    """What is done of it, what is left, and the time that it took."""
    todo = ahead.left(exercises, entries)
    text = f"{track.name}, {len(exercises) - len(todo)} of {len(exercises)} exercises pass"
    if todo:
        text += f", about {ahead.duration(sum(e.minutes for e in todo))} left"
    say(out, text, label="track: ")
    seconds = progress.spent(entries, (e.id for e in exercises))
    if seconds >= 60:
        gap = round(progress.GAP / 60)
        text = f"at least {ahead.duration(seconds / 60)} between gradings, "
        say(out, f"{text}without breaks of more than {gap} minutes", label="spent: ")
    if track.name == "all":
        say(out, "(distlab track shows shorter ways)", "dim", indent="       ")


def _show_next(todo: Exercise, exercises: list[Exercise], out: Console) -> None:
    """The next exercise, why it is that one, and what to do."""
    say(out, f"next: {todo.id} {todo.title}")
    estimate = f"about {ahead.duration(todo.minutes)}, difficulty {todo.difficulty} of 5"
    say(out, f"{ahead.why(todo, exercises)}; {estimate}", label="why    ", indent="  ")
    say(out, f"{short(todo.guidelines_path)}, section {todo.id}", label="read   ", indent="  ")
    command(out, "  edit   ", short(todo.template_path))
    command(out, "  grade  ", f"python test_phase{todo.phase.number}.py {todo.id}")
    command(out, "  watch  ", f"distlab watch {todo.id}")
    say(out, "(grades at every save)", "dim", indent="         ")


def map_as_json(course: Course) -> dict[str, Any]:
    """What the map shows, for programs."""
    entries, warnings = progress.load()
    track = ahead.chosen_track(course)
    exercises = ahead.exercises_of(course.exercises, track)
    todo = ahead.left(exercises, entries)
    shown = ("verdict", "points", "hints", "seconds", "passed_on")
    following = lab_map.next_lab(exercises, entries)
    return {
        "course_version": course_version(),
        "track": track.name,
        "next": todo[0].id if todo else None,
        "why": ahead.why(todo[0], exercises) if todo else None,
        "minutes_left": sum(e.minutes for e in todo),
        "seconds_spent": progress.spent(entries, (e.id for e in exercises)),
        "questions": ahead.where_to_ask(course),
        "exercises": [
            {"id": e.id, "title": e.title, "minutes": e.minutes, "difficulty": e.difficulty}
            | {"max_points": e.points}
            | {key: value for key, value in entries.get(e.id, {}).items() if key in shown}
            for e in exercises
        ],
        "labs": lab_map.as_data(lab_map.labs_of(exercises)),
        "next_lab": following.id if following else None,
        "warnings": warnings,
    }


def hint(exercise: Exercise, out: Console) -> int:
    """The next of three hints; the earlier ones are shown again."""
    level = min(progress.hints_used(exercise.id) + 1, len(exercise.hints))
    warnings = progress.update(exercise.id, hints=level)
    for number, text in enumerate(exercise.hints[:level], 1):
        say(out, text, label=f"hint {number} of {len(exercise.hints)}: ")
    if level < len(exercise.hints):
        out.print(Text(f"(again: distlab hint {exercise.id})", "dim"))
    for warning in warnings:
        say(out, warning, "yellow")
    return 0


def reset(exercise: Exercise, out: Console, ask: Callable[[], bool] | None = None) -> int:
    """Make the exercise's file blank again; the learner's file is kept as a dated copy.

    Says first which exercises that are; ``ask``: whether the learner agrees.
    """
    path = exercise.template_path
    text = templates.template_of(exercise)
    now = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    same = [e for e in exercise.phase.exercises if e.file == exercise.file]
    if now == text:
        say(out, f"{short(path)} is blank already")
    else:
        say(out, _what_reset_blanks(exercise, same, now, text))
        if ask is not None:
            say(out, "a copy of your file is kept. Make it blank? (y/n)")
            if not ask():
                say(out, "nothing was changed")
                return 0
        if now:
            stamp = datetime.datetime.now().strftime("%Y-%m-%d-%H%M%S")
            copy = root() / ".distlab" / "kept" / f"{path.stem}-{stamp}.py"
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, copy)
            say(out, f"your file is kept as {short(copy)}")
        path.write_text(text, encoding="utf-8")
        say(out, f"{short(path)} is blank again (exercises {', '.join(e.id for e in same)})")
    for warning in progress.blanked(e.id for e in same):
        say(out, warning, "yellow")
    return 0


def _what_reset_blanks(exercise: Exercise, same: list[Exercise], now: str, blank: str) -> str:
    """The exercises that the learner has begun in the file, with what they have reached."""
    entries, _ = progress.load()

    def state(e: Exercise) -> str:
        mark = f'NotImplementedError("exercise {e.id}")'
        if now.count(mark) >= blank.count(mark):
            return f"{e.id} (blank as it is)"
        return f"{e.id} ({entries.get(e.id, {}).get('verdict', 'not graded yet')})"

    others = [state(e) for e in same if e.id != exercise.id]
    along = f"; with it, in the same file: {', '.join(others)}" if others else ""
    return f"reset makes {short(exercise.template_path)} blank: {state(exercise)}{along}"


def yes() -> bool:
    """Whether the learner says yes; the end of input is a no."""
    try:
        return input().strip().lower() in ("y", "yes")
    except EOFError:
        return False


def solution(exercise: Exercise, give_up: bool, out: Console) -> int:
    """The solution's functions, once the exercise passed or was given up."""
    need_solutions("distlab solution")
    if give_up:
        for warning in progress.update(exercise.id, gave_up=True):
            say(out, warning, "yellow")
    elif not _may_see(progress.entry(exercise.id)):
        raise ValueError(
            f"{exercise.id} has not passed yet: `distlab hint {exercise.id}` helps, "
            f"`distlab solution {exercise.id} --give-up` shows the solution all the same"
        )
    entries, _ = progress.load()
    secret = {e.id for e in exercise.phase.exercises if not _may_see(entries.get(e.id, {}))}
    path = short(exercise.solution_path)
    for each in excerpts(exercise, secret - {exercise.id}):
        out.print(Text(f"{path}, line {each.line}: {each.name}", "dim"), soft_wrap=True)
        syntax = Syntax(each.text, "python", background_color="default")
        out.print(syntax if out.is_terminal else each.text, highlight=False, markup=False)
        out.print()
    return 0


def _may_see(entry: Mapping[str, Any]) -> bool:
    """Whether the solution of an exercise spoils nothing any more."""
    return bool(entry.get("passed_once") or entry.get("gave_up"))
