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

from ..course import progress, templates
from ..course.catalogue import Course, Exercise, need_solutions, root
from ..course.excerpts import excerpts
from ..host.terminal import command, say, short


def show_map(course: Course, out: Console) -> int:
    """All phases and exercises with verdicts, and the next step."""
    entries, warnings = progress.load()
    todo: Exercise | None = None
    for phase in course.phases:
        out.print(Text(f"\nPhase {phase.number}: {phase.title}", "bold"))
        if not phase.ready:
            out.print(Text("  to come", "dim"))
            continue
        table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
        for name in ("id", "title", "verdict", "points", "hints"):
            table.add_column(name, no_wrap=name != "title")
        for e in phase.exercises:
            mine = entries.get(e.id, {})
            verdict = mine.get("verdict", "not graded yet")
            style = {"pass": "bold green", "fail": "bold red"}.get(verdict, "dim")
            points = mine.get("points", 0)
            hints = _count(mine["hints"], "hint") if mine.get("hints") else ""
            title = Text(e.title)
            if e.was_in:
                title.append(f" (was part of {e.was_in})", "dim")
            table.add_row(f"  {e.id}", title, Text(verdict, style), f"{points}/{e.points}", hints)
            if verdict != "pass" and todo is None:
                todo = e
        out.print(table)
        score = sum(entries.get(e.id, {}).get("points", 0) for e in phase.exercises)
        out.print(f"  {score} of {sum(e.points for e in phase.exercises)} points")
    for warning in warnings:
        say(out, warning, "yellow")
    if todo:
        out.print()
        say(out, f"next: {todo.id} {todo.title}")
        say(out, f"{short(todo.guidelines_path)}, section {todo.id}", label="read   ", indent="  ")
        command(out, "  edit   ", short(todo.template_path))
        command(out, "  grade  ", f"python test_phase{todo.phase.number}.py {todo.id}")
        command(out, "  watch  ", f"distlab watch {todo.id}")
        say(out, "(grades at every save)", "dim", indent="         ")
    return 0


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")


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
