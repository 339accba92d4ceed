"""The ``distlab`` command: map, watch, hint, solution, trace, simulate, class and others."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from .commands import classes, cluster, doctor, simulate
from .commands.learn import hint, reset, show_map, solution, yes
from .commands.templates import make_templates
from .commands.trace import trace
from .commands.watch import watch
from .course.catalogue import load_course, root
from .course.version import course_version
from .host.processes import TERMINATED, Terminated, terminable
from .host.terminal import console


def _parser(command: str) -> argparse.ArgumentParser:
    """The options of all commands; those of ``simulate`` are asked for only if it is the one."""
    parser = argparse.ArgumentParser(prog="distlab", description="The course at a glance.")
    parser.add_argument("--version", action="version", version=f"distlab {course_version()}")
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
    predicted = commands.add_parser("simulate", help="predict how training scales on a cluster")
    if command == "simulate":
        simulate.add_arguments(predicted)
    nodes = commands.add_parser("cluster", help="several nodes on this machine (Linux)")
    cluster.add_arguments(nodes)
    classes.add_arguments(commands.add_parser("class", help="for instructors: grade a class"))
    doctor.add_arguments(commands.add_parser("doctor", help="what this machine can run"))
    promised = commands.add_parser(
        "contract", parents=[one], help="what an exercise promises, and which check asserts it"
    )
    promised.add_argument("--draft", action="store_true", help="an entry of the contract file")
    made = commands.add_parser("templates", help="for contributors: templates from solutions")
    made.add_argument("--write", action="store_true")
    made.add_argument("--check", action="store_true", help="(the default)")
    made.add_argument("--force", action="store_true", help="overwrite edited templates")
    return parser


def run(options: argparse.Namespace, out: Console) -> int:
    """Do what the command line asks for; the exit status."""
    if options.command == "doctor":
        return doctor.doctor(options, out)
    course = load_course()
    if options.command is None:
        return show_map(course, out)
    if options.command == "templates":
        return make_templates(course, options.write, options.force, out)
    if options.command == "simulate":
        return simulate.simulate(options, out)
    if options.command == "cluster":
        return cluster.cluster(options, out)
    if options.command == "class":
        return classes.class_(options, out)
    if options.command == "watch":
        return watch(course, options.exercise, out)
    exercise = course.exercise(options.exercise)
    if options.command == "contract":
        # start-up time: it imports torch, which other commands need not wait for
        from .commands import contract

        return (contract.draft if options.draft else contract.show)(exercise, out)
    if options.command == "hint":
        return hint(exercise, out)
    if options.command == "reset":
        asks = out.is_terminal and sys.stdin.isatty() and not options.yes
        return reset(exercise, out, yes if asks else None)
    if options.command == "solution":
        return solution(exercise, options.give_up, out)
    return trace(exercise, options.impl, options.out, out)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry of the ``distlab`` command: 0 done, 1 not in order, 2 a wrong call; 130 after Ctrl-C,
    143 after SIGTERM."""
    given = list(sys.argv[1:] if argv is None else argv)
    options = _parser(given[0] if given else "").parse_args(given)
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
