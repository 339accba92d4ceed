"""The report in the terminal: one line per exercise, then each failure with the
facts that a learner needs."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..course.catalogue import Phase
from ..host.terminal import command, say
from ..observe.lines import names
from ..observe.raised import printable
from ..reference import gpu_record
from .verdicts import SHOWN_TIER, TIERS, CheckResult, ExerciseResult, Report

STYLE = {
    "pass": "bold green",
    "fail": "bold red",
    "error": "bold red",
    "hang": "bold magenta",
    "crash": "bold magenta",
    "blank": "dim",
    "blocked": "yellow",
    "needs": "cyan",
}

# the usual reason behind a cause that has no formula
LIKELY = {
    "hang": "ranks must issue matching communication in the same order: look for a collective "
    "behind `if rank == …`, a loop of different length per rank, all ranks sending first, or one "
    "rank that raises or returns alone",
    "endless-loop": "nothing in the loop ever makes its condition false, or its iterator has no "
    "end; a loop with far too much work for so small a case looks the same",
    "running": "the work is far too much for so small a case, something sleeps, or an iterator "
    "never stops giving values",
    "mismatch": "every rank of the group must call the same collectives in the same order, with "
    "the same shape and dtype",
    "crash": "the process of the rank ended by itself: an exit call, a kill, or out of memory",
    "never-waited": "an asynchronous call returns a handle; its data is valid after handle.wait()",
    "too-many-bytes": "some data need not be sent: frozen or tied parameters, whole tensors where "
    "a part would do, or the same data twice",
    "too-few-bytes": "the data never crossed the network: a shard was skipped, or each rank used "
    "its own",
    "forbidden-operator": "write it from the primitives that the exercise allows",
    "graph-cut": "autograd's graph ends on the way back. Collectives and receives of "
    "torch.distributed record nothing: wrap them in a torch.autograd.Function whose "
    "backward is their counterpart, or call requires_grad_() on the tensor that "
    "arrives. Operators under no_grad, on detach() or on .data record nothing either",
    "changed-default": "name the dtype or the device where you make the tensor, as in "
    "torch.zeros(3, dtype=…, device=…); a default that must change for a moment is set back in a "
    "finally block",
    "unchanged": "the result must be written into the caller's tensor (copy_, add_, …), not bound "
    "to a new one",
}
WIDE = 80  # terminals with so many columns show the tiers as well
OUTPUT_LINES = 8
OUTPUT_WIDTH = 160
NOT_RUN = ("needs", "blocked", "blank")


def print_report(report: Report, phase: Phase, out: Console) -> None:
    """Print the table, the failures and the next step."""
    out.print(Text(f"Phase {phase.number}: {phase.title}", "bold"))
    known = (
        f"device: {report.device}   seed: {report.seed}   course version {report.course_version}"
    )
    say(out, f"implementation: {report.impl}   {known}")
    tiers = [t for t in TIERS if t not in SHOWN_TIER or _ran(report, t)]
    out.print(_table(report, tiers if out.width >= WIDE else ()))
    for note in report.notes:
        say(out, note, "yellow")
    for exercise in report.exercises:
        if exercise.verdict not in ("pass", "blank", "needs", "blocked"):
            _print_failure(exercise, out)
        elif exercise.verdict == "blocked" and exercise.decisive is not None:
            say(out, f"{exercise.id} is blocked: {exercise.decisive.message}", STYLE["blocked"])
    _print_needs(report, out)
    out.print(Text(f"score: {report.score} of {report.max_score} points", "bold"))
    _print_next(report, out)


def _table(report: Report, tiers: Sequence[str]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("", no_wrap=True)
    table.add_column("exercise")  # it wraps where the terminal is narrow, like the notes
    table.add_column("verdict", no_wrap=True)
    for name in ("points", *(SHOWN_TIER.get(t, t) for t in tiers), "seconds"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("")
    for e in report.exercises:
        ran = any(c.verdict not in NOT_RUN for c in e.checks)
        note = f"with the solution of {', '.join(e.used_solution_of)}" if _shows(e) else ""
        table.add_row(
            e.id,
            e.title,
            Text(e.verdict, STYLE[e.verdict]),
            f"{e.points}/{e.max_points}",
            *(_on_tier(e, tier) for tier in tiers),
            f"{e.seconds:.1f}" if ran else "–",
            Text(note, "dim"),
        )
    return table


def _ran(report: Report, tier: str) -> bool:
    return any(check.tier == tier for e in report.exercises for check in e.checks)


def _on_tier(e: ExerciseResult, tier: str) -> Text:
    """How many checks of this tier passed; or the reason why none ran."""
    checks = [c for c in e.checks if c.tier == tier]
    ran = [c for c in checks if c.verdict not in NOT_RUN]
    if ran:
        passed = sum(c.verdict == "pass" for c in ran)
        return Text(f"{passed}/{len(checks)}", "" if passed == len(checks) else "bold red")
    word = "needs" if any(c.verdict == "needs" for c in checks) else "–"
    return Text(word, STYLE["needs"] if word == "needs" else "dim")


def _shows(e: ExerciseResult) -> bool:
    return bool(e.used_solution_of) and e.verdict not in ("blank", "blocked", "error")


def _print_failure(exercise: ExerciseResult, out: Console) -> None:
    check = exercise.decisive
    assert check is not None
    head = Text.assemble(
        (f"{exercise.id} {exercise.title}: ", "bold"),
        (check.verdict, STYLE[check.verdict]),
    )
    out.print()
    out.print(head)
    if check.title and check.verdict != "error":
        _field(out, "check: ", _title(check))
    _field(out, "", check.message)
    if check.cause in LIKELY:
        _field(out, "likely cause: ", LIKELY[check.cause])
    if check.rank is not None:
        _field(out, "rank: ", str(check.rank))
    if check.line:
        _field(out, "your line: ", check.line)
    for who, text in printed_by(check):
        _field(out, f"{who} printed: ", text)
    others = dict.fromkeys(_title(c) for c in exercise.failing if c is not check)
    for title in others:
        _field(out, "also fails: ", title)
    command(out, "  hint: ", f"distlab hint {exercise.id}")


def printed_by(check: CheckResult) -> list[tuple[str, str]]:
    """The last lines printed by the failing rank, or by each rank that printed."""
    texts: dict[str, list[int]] = {}
    known = check.rank in check.printed  # not where one process checks the values of all ranks
    for rank, text in check.printed.items():
        if text.strip() and (rank == check.rank or not known):
            texts.setdefault(text.strip(), []).append(rank)
    room = max(OUTPUT_LINES // max(len(texts), 1), 2)
    found = []
    for text, ranks in list(texts.items())[:OUTPUT_LINES]:
        lines = [printable(line[:OUTPUT_WIDTH]) for line in text.splitlines()]
        dots = ["…"] if len(lines) > room else []
        found.append((names(ranks), "\n".join(dots + lines[-room:])))
    return found


def _title(check: CheckResult) -> str:
    """The title of the check, and its kind of ranks if these are not ordinary ones."""
    where = {"virtual": "virtual ranks", "nccl": "nccl rules, simulated", "cuda": "GPU"}
    return check.title + (f" ({where[check.tier]})" if check.tier in where else "")


def _field(out: Console, name: str, text: str) -> None:
    say(out, text, label=name, indent="  ")


def _print_needs(report: Report, out: Console) -> None:
    absent: dict[str, int] = {}
    for exercise in report.exercises:
        for check in exercise.checks:
            if check.verdict == "needs":
                absent[check.message] = absent.get(check.message, 0) + 1
    for what, count in absent.items():
        text = f"needs {what}: {count} check{'s' if count > 1 else ''} did not run"
        say(out, f"{text} (not counted as passed)", STYLE["needs"])
    tiers = {check.tier for exercise in report.exercises for check in exercise.checks}
    if tiers - {"virtual", "gloo"}:
        say(out, f"the course's own solutions (not yours): {gpu_record.words()}", "dim")
    for name, made in report.references.items():
        say(out, f"compared with the reference run of {name}: {made}", "dim")
    if absent:
        say(out, "distlab doctor says what this machine lacks, and how to get it", "dim")


def _print_next(report: Report, out: Console) -> None:
    """The learner's next step."""
    todo = next((e for e in report.exercises if e.verdict != "pass"), None)
    if todo is None:
        if report.exercises:
            out.print(Text("everything asked for passed", STYLE["pass"]))
            if report.impl == "templates":
                out.print(Text("distlab says what is next", "dim"))
        return
    verb = "write" if todo.verdict == "blank" else "look at"
    say(out, f"next: {verb} exercise {todo.id} ({todo.title}) in {todo.file}")
    again = "" if report.impl == "templates" else f" --impl {shlex.quote(report.impl)}"
    command(out, "      then: ", f"python test_phase{report.phase}.py {todo.id}{again}")
