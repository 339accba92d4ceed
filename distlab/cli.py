"""The ``distlab`` command: map, watch, hint, solution, trace, simulate, class and others."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from rich.console import Console

from .course.catalogue import Course, load_course, root
from .course.version import course_version
from .host.processes import TERMINATED, Terminated, terminable
from .host.terminal import console

# commands with ``add_arguments`` and ``main`` in a module of their own. It is imported only if the
# command is called: all of them together take longer than a hint
COMMANDS: dict[str, tuple[str, str]] = {
    "track": ("tracks", "choose a way through the course"),
    "cluster": ("cluster", "several nodes on this machine (Linux)"),
    "doctor": ("doctor", "what this machine can run"),
    "measure": ("measure", "one number of an exercise, on this machine"),
    "references": ("references", "reference runs there are; two side by side"),
    "upgrade": ("upgrade", "a new version of the course, with your work"),
    "handout": ("handout", "for instructors: a folder for learners"),
    "class": ("classes", "for instructors: grade a class"),
    "certificate": ("certificate", "a page that says that a phase is done"),
    "calibrate": ("calibrate", "measure this machine, for simulate"),
    "simulate": ("simulate", "predict how training scales on a cluster"),
    "plan": ("plan", "which layout for a training, its days and GPU hours"),
    "lab": ("lab", "labs: find the bug in a program, and mend it"),
    "predict": ("predict", "predict numbers of a run, then run it"),
    "contribute": ("contribute", "what your tests have found, as a patch"),
    "bundle": ("bundle", "a verdict in one file, to be looked at elsewhere"),
    "diff": ("diff", "where two recorded runs first differ"),
    "record": ("record", "record reference runs of this machine"),
}


def _parser(given: Sequence[str]) -> argparse.ArgumentParser:
    """All commands, and the options of those that are in the words ``given``."""
    parser = argparse.ArgumentParser(prog="distlab", description="The course at a glance.")
    parser.add_argument("--version", action="version", version=f"distlab {course_version()}")
    parser.add_argument("--all", action="store_true", help="the map with every exercise in it")
    parser.add_argument("--json", dest="map_json", metavar="FILE", type=Path, help="the map")
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
    traced.add_argument("--record", type=Path, metavar="FILE", help="a run for distlab diff")
    traced.add_argument("--open", action="store_true", help="play it step by step in the browser")
    for name, (module, about) in COMMANDS.items():
        own = commands.add_parser(name, help=about)
        if name in given:
            _module(module).add_arguments(own)
    promised = commands.add_parser(
        "contract", parents=[one], help="what an exercise promises, and which check asserts it"
    )
    promised.add_argument("--draft", action="store_true", help="an entry of the contract file")
    made = commands.add_parser("templates", help="for contributors: templates from solutions")
    made.add_argument("--write", action="store_true")
    made.add_argument("--check", action="store_true", help="(the default)")
    made.add_argument("--force", action="store_true", help="overwrite edited templates")
    for each in commands.choices.values():
        each.set_defaults(asked=each)
    return parser


def _parsed(given: Sequence[str]) -> argparse.Namespace:
    """The options in ``given``. A wrong one is refused with the usage of its command."""
    parser = _parser(given)
    options, unknown = parser.parse_known_args(given)
    asked = vars(options).pop("asked", parser)
    if unknown:
        asked.error(f"unrecognized arguments: {' '.join(unknown)}")
    return options


def _module(name: str) -> ModuleType:
    """The module ``name`` of the commands."""
    return importlib.import_module(f".commands.{name}", __package__)


def run(options: argparse.Namespace, out: Console) -> int:
    """Do what the command line asks for; returns the exit status."""
    if options.command in COMMANDS:
        return int(_module(COMMANDS[options.command][0]).main(options, out))
    course = load_course()
    if options.command == "templates":
        made = _module("templates").make_templates
        return int(made(course, options.write, options.force, out))
    if options.command == "watch":
        return int(_module("watch").watch(course, options.exercise, out))
    if options.command in (None, "hint", "reset", "solution"):
        return _learn(options, course, out)
    exercise = course.exercise(options.exercise)
    if options.command == "contract":
        contract = _module("contract")
        return int((contract.draft if options.draft else contract.show)(exercise, out))
    trace = _module("trace").trace
    return int(trace(exercise, options.impl, options.out, out, options.open, options.record))


def _learn(options: argparse.Namespace, course: Course, out: Console) -> int:
    """The map, and the commands that a learner calls between two tries."""
    learn = _module("learn")
    if options.command is None:
        if options.map_json:
            text = json.dumps(learn.map_as_json(course), indent=2)
            options.map_json.write_text(text + "\n", encoding="utf-8")
        return int(learn.show_map(course, out, options.all))
    exercise = course.exercise(options.exercise)
    if options.command == "hint":
        return int(learn.hint(exercise, out))
    if options.command == "solution":
        return int(learn.solution(exercise, options.give_up, out))
    asks = out.is_terminal and sys.stdin.isatty() and not options.yes
    return int(learn.reset(exercise, out, learn.yes if asks else None))


def main(argv: Sequence[str] | None = None) -> int:
    """Entry of the ``distlab`` command. Exit status: 0 done, 1 not in order, 2 a wrong call, 130
    after Ctrl-C, 143 after SIGTERM."""
    given = list(sys.argv[1:] if argv is None else argv)
    options = _parsed(given)
    sys.path.insert(0, str(root()))  # the solutions can be imported by the installed command, too
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
