"""The ``distlab`` command: map, watch, hint, solution, trace, simulate, cluster and others."""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from . import progress, templates
from .course import Course, Exercise, load_course, regions_of, root
from .processes import TERMINATED, Terminated, terminable
from .words import command, say


def console() -> Console:
    """A console that is plain when its output is not a terminal."""
    out = Console()
    return out if out.is_terminal else Console(width=100, color_system=None)


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
            table.add_row(f"  {e.id}", e.title, Text(verdict, style), f"{points}/{e.points}", hints)
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
        say(out, f"{_short(todo.guidelines_path)}, section {todo.id}", label="read   ", indent="  ")
        command(out, "  edit   ", _short(todo.template_path))
        command(out, "  grade  ", f"python test_phase{todo.phase.number}.py {todo.id}")
        command(out, "  watch  ", f"distlab watch {todo.id}")
        say(out, "(grades at every save)", "dim", indent="         ")
    return 0


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")


def _short(path: Path) -> str:
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


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
    """Make the exercise's file blank again; the learner's goes to a dated copy.

    Says first which exercises that are; ``ask``: whether the learner agrees.
    """
    path = exercise.template_path
    text = templates.template_of(exercise)
    now = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    same = [e for e in exercise.phase.exercises if e.file == exercise.file]
    if now == text:
        say(out, f"{_short(path)} is blank already")
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
            say(out, f"your file is kept as {_short(copy)}")
        path.write_text(text, encoding="utf-8")
        say(out, f"{_short(path)} is blank again (exercises {', '.join(e.id for e in same)})")
    for warning in progress.blanked(e.id for e in same):
        say(out, warning, "yellow")
    return 0


def _what_reset_blanks(exercise: Exercise, same: list[Exercise], now: str, blank: str) -> str:
    """The exercises that the learner has begun in the file, with what they have reached."""
    entries, _ = progress.load()

    def state(e: Exercise) -> str:
        place = f'NotImplementedError("exercise {e.id}")'
        if now.count(place) >= blank.count(place):
            return f"{e.id} (blank as it is)"
        return f"{e.id} ({entries.get(e.id, {}).get('verdict', 'not graded yet')})"

    others = [state(e) for e in same if e.id != exercise.id]
    along = f"; with it, in the same file: {', '.join(others)}" if others else ""
    return f"reset makes {_short(exercise.template_path)} blank: {state(exercise)}{along}"


def _yes() -> bool:
    """Whether the learner says yes; the end of input is a no."""
    try:
        return input().strip().lower() in ("y", "yes")
    except EOFError:
        return False


def solution(exercise: Exercise, give_up: bool, out: Console) -> int:
    """The solution's regions, once the exercise passed or was given up."""
    mine = progress.entry(exercise.id)
    if give_up:
        for warning in progress.update(exercise.id, gave_up=True):
            say(out, warning, "yellow")
    elif not (mine.get("passed_once") or mine.get("gave_up")):
        raise ValueError(
            f"{exercise.id} has not passed yet: `distlab hint {exercise.id}` helps, "
            f"`distlab solution {exercise.id} --give-up` shows the solution all the same"
        )
    lines = exercise.solution_path.read_text(encoding="utf-8").splitlines()
    text = "\n".join(lines)
    for region in regions_of(text):
        if region.exercise == exercise.id:
            body = "\n".join(lines[region.start : region.end - 1])
            out.print(Text(f"{_short(exercise.solution_path)}, line {region.start + 1}", "dim"))
            syntax = Syntax(body, "python", background_color="default")
            out.print(syntax if out.is_terminal else body, highlight=False, markup=False)
    return 0


def trace(exercise: Exercise, impl: str, folder: Path, out: Console) -> int:
    """Run the exercise's scenario on 4 ranks and write picture and Chrome trace."""
    from .grading.implementation import Implementation, find_source, protect_this_process
    from .ranks import RankFailure, run_ranks
    from .timeline import chrome_trace, draw, draw_pipeline, spans_of

    protect_this_process()
    source = find_source(impl, exercise.phase)
    passes = set(progress.known_passes(exercise.phase)) | {exercise.id}
    others = [e for e in exercise.phase.exercises if e.id not in passes]
    replaced = others if impl == "templates" else []
    scenario = _scenario(exercise)
    body = scenario(Implementation(source, exercise.file, replaced))
    try:
        results = run_ranks(body, 4, timeout=60, learner_files=source.files())
    except RankFailure as failure:
        where = f"\n  your line: {failure.line}" if failure.line else ""
        raise ValueError(f"the run of {exercise.id} failed: {failure.message}{where}") from None
    folder.mkdir(parents=True, exist_ok=True)
    spans = spans_of(results.logs)
    name = f"trace-{exercise.id}"
    target, title = folder / f"{name}.png", f"{exercise.id} {exercise.title}: {impl}"
    if scenario.bubble is None:
        picture = draw(spans, target, title)
    else:
        picture = draw_pipeline(spans, target, title, scenario.bubble)
    chrome = chrome_trace(spans, folder / f"{name}.json")
    out.print(f"{_short(picture)}  (picture)", highlight=False, soft_wrap=True)
    out.print(f"{_short(chrome)}  (for Perfetto)", highlight=False, soft_wrap=True)
    return 0


def _scenario(exercise: Exercise) -> Any:
    """The function marked ``@trace(id)`` in the exercise's check files."""
    for path in sorted(root().glob(exercise.checks_glob)):
        if str(path.parent) not in sys.path:
            sys.path.append(str(path.parent))  # what the phase's checks share lies beside them
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        for value in vars(module).values():
            if exercise.id in getattr(value, "trace_of", ()):
                return value
    raise ValueError(f"exercise {exercise.id} has no scenario to trace")


def make_templates(course: Course, write: bool, force: bool, out: Console) -> int:
    """Check that the templates are in step with the solutions, or write them."""
    if write:
        for path in templates.write(course, force):
            out.print(f"wrote {_short(path)}", highlight=False)
    problems = templates.check(course)
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="distlab", description="The course at a glance.")
    commands = parser.add_subparsers(dest="command", title="commands")
    one = argparse.ArgumentParser(add_help=False)
    one.add_argument("exercise", help="for example 1.4")
    watch = commands.add_parser("watch", help="grade at every save")
    watch.add_argument("exercise", nargs="?", help="default: the first that does not pass")
    commands.add_parser("hint", parents=[one], help="the next of three hints")
    again = commands.add_parser("reset", parents=[one], help="make a file blank, keeping a copy")
    again.add_argument("--yes", action="store_true", help="without asking")
    shown = commands.add_parser("solution", parents=[one], help="show the solution")
    shown.add_argument("--give-up", action="store_true", help="before it passes, too")
    traced = commands.add_parser("trace", parents=[one], help="draw what your ranks do")
    traced.add_argument("--impl", default="templates", help="templates, solutions or a folder")
    traced.add_argument("--out", type=Path, default=Path(".distlab"), help="folder for the files")
    _add_simulate(commands)
    _add_cluster(commands)
    made = commands.add_parser("templates", help="for contributors: templates from solutions")
    made.add_argument("--write", action="store_true")
    made.add_argument("--check", action="store_true", help="(the default)")
    made.add_argument("--force", action="store_true", help="overwrite edited templates")
    return parser


def _add_simulate(commands: Any) -> None:
    simulated = commands.add_parser("simulate", help="predict how training scales on a cluster")
    simulated.add_argument("--cluster", help="name in clusters/ or a YAML file (dgx-h100)")
    simulated.add_argument("--gpus", type=int, nargs="+", metavar="N", help="1 2 4 8 16")
    simulated.add_argument("--model", help="resnet50, vit_b16, gpt-1b, gpt-7b or mlp")
    simulated.add_argument("--strategy", help="ddp; phase 3: bucketed, ring, zero1, fsdp …")
    simulated.add_argument("--impl", help="solutions, mine or torch")
    simulated.add_argument("--collective", help="backend, ring, tree or hierarchical")
    simulated.add_argument("--bucket-mb", type=float, help="of a bucket (25)")
    simulated.add_argument("--every", type=int, metavar="H", help="steps in local-sgd's round (8)")
    simulated.add_argument("--servers", type=int, help="of parameter-server (1)")
    simulated.add_argument(
        "--staleness", type=float, metavar="S", help="parameter-server without rounds; or inf"
    )
    simulated.add_argument(
        "--two-ranks",
        action="store_true",
        default=None,
        help="run the first and the last GPU only, where all do the same: much faster",
    )
    simulated.add_argument("--tensor", type=int, help="GPUs that share every layer (1)")
    simulated.add_argument("--pipeline", type=int, help="GPUs that share the layers (1)")
    simulated.add_argument("--sequence-parallel", action="store_true", default=None)
    simulated.add_argument("--schedule", help="gpipe, 1f1b, interleaved or zero-bubble (1f1b)")
    simulated.add_argument("--chunks", type=int, help="stages per GPU, interleaved (1)")
    simulated.add_argument("--micro-batches", type=int, help="per step (up to 4 per stage)")
    simulated.add_argument("--batch", type=int, help="samples per GPU")
    simulated.add_argument("--dtype", help="of weights and activations")
    simulated.add_argument("--config", type=Path, help="a YAML file with these options")
    simulated.add_argument("--out", type=Path, default=Path(".distlab/simulate"), help="folder")


def _add_cluster(commands: Any) -> None:
    cluster = commands.add_parser("cluster", help="several nodes on this machine (Linux)")
    actions = cluster.add_subparsers(dest="action", required=True)
    started = actions.add_parser(
        "run",
        help="run a program under torchrun on nodes with links of a chosen speed",
        usage="distlab cluster run [options] -- python -m my.module [arguments]",
    )
    started.add_argument("--nodes", type=int, default=2)
    started.add_argument("--ranks-per-node", default="2", help="2, or one number per node: 3,1")
    started.add_argument("--rate", help="of each node's link, 200mbit; default: no limit")
    started.add_argument("--delay", help="of each node's link, 1ms (the kernel must have netem)")
    started.add_argument("program", nargs=argparse.REMAINDER, metavar="-- command")


def cluster(options: argparse.Namespace, out: Console) -> int:
    """Run a program on a cluster on this machine; its exit status."""
    from .netcluster import run_cluster

    def write(stream: str, text: bytes) -> None:
        file = getattr(sys, stream)
        file.buffer.write(text)
        file.flush()

    try:
        counts = [int(count) for count in options.ranks_per_node.split(",")]
    except ValueError:
        raise ValueError(f"--ranks-per-node: 2 or 3,1, not {options.ranks_per_node!r}") from None
    try:
        done = run_cluster(
            options.program[1:] if options.program[:1] == ["--"] else options.program,
            nodes=options.nodes,
            ranks_per_node=counts if len(counts) > 1 else counts[0],
            rate=options.rate,
            delay=options.delay,
            write=write,
        )
    except KeyboardInterrupt as end:
        print("distlab: interrupted, everything on the nodes has ended", file=sys.stderr)
        return TERMINATED if isinstance(end, Terminated) else 130
    sent = ", ".join(f"node{node} {count / 1e6:.1f} MB" for node, count in enumerate(done.sent))
    print(f"distlab: sent between nodes: {sent}", file=sys.stderr)
    return done.status


def simulate(options: argparse.Namespace, out: Console) -> int:
    """Predict step time, efficiency and memory for several numbers of GPUs."""
    from .virtual.show import load_plan, run

    names = ("cluster", "gpus", "model", "strategy", "impl", "collective")
    names += ("bucket_mb", "batch", "dtype", "tensor", "pipeline", "sequence_parallel")
    names += ("schedule", "chunks", "micro_batches", "every", "servers", "staleness", "two_ranks")
    plan = load_plan(options.config, {name: getattr(options, name) for name in names})
    return run(plan, options.out, out)


def run(options: argparse.Namespace, out: Console) -> int:
    """Do what the command line asks for; the exit status."""
    course = load_course()
    if options.command is None:
        return show_map(course, out)
    if options.command == "templates":
        return make_templates(course, options.write, options.force, out)
    if options.command == "simulate":
        return simulate(options, out)
    if options.command == "cluster":
        return cluster(options, out)
    if options.command == "watch":
        from .watch import watch

        return watch(course, options.exercise, out)
    exercise = course.exercise(options.exercise)
    if options.command == "hint":
        return hint(exercise, out)
    if options.command == "reset":
        asks = out.is_terminal and sys.stdin.isatty() and not options.yes
        return reset(exercise, out, _yes if asks else None)
    if options.command == "solution":
        return solution(exercise, options.give_up, out)
    return trace(exercise, options.impl, options.out, out)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry of the ``distlab`` command: 0 done, 1 not in order, 2 a wrong call; 130 after Ctrl-C,
    143 after SIGTERM."""
    options = _parser().parse_args(argv)
    sys.path.insert(0, str(root()))  # the solutions, also for the installed command
    try:
        with terminable():
            return run(options, console())
    except (ValueError, OSError) as error:
        print(f"distlab: {error}", file=sys.stderr)
        return 2
    except Terminated:
        print("distlab: ended by SIGTERM", file=sys.stderr)
        return TERMINATED
    except KeyboardInterrupt:
        return 130
