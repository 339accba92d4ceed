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

from .commands import (
    classes,
    cluster,
    doctor,
    handout,
    measure,
    references,
    tracks,
    upgrade,
)
from .commands.learn import hint, map_as_json, reset, show_map, solution, yes
from .commands.templates import make_templates
from .commands.trace import trace
from .commands.watch import watch
from .course.catalogue import load_course, root
from .course.version import course_version
from .host.processes import TERMINATED, Terminated, terminable
from .host.terminal import console

# commands with ``add_arguments`` and ``main`` of their own
PLAIN: dict[str, tuple[str, ModuleType]] = {
    "track": ("choose a way through the course", tracks),
    "cluster": ("several nodes on this machine (Linux)", cluster),
    "doctor": ("what this machine can run", doctor),
    "measure": ("one number of an exercise, on this machine", measure),
    "references": ("reference runs there are; two side by side", references),
    "upgrade": ("a new version of the course, with your work", upgrade),
    "handout": ("for instructors: a folder for learners", handout),
    "class": ("for instructors: grade a class", classes),
}
# the same, whose modules import torch or jinja2: start-up time
LATE = {
    "certificate": "a page that says that a phase is done",
    "calibrate": "measure this machine, for simulate",
    "simulate": "predict how training scales on a cluster",
    "plan": "which layout for a training, its days and GPU hours",
    "lab": "labs: find the bug in a program, and mend it",
    "predict": "predict numbers of a run, then run it",
    "contribute": "what your tests have found, as a patch",
    "bundle": "a verdict in one file, to be looked at elsewhere",
    "diff": "where two recorded runs first differ",
    "record": "record reference runs of this machine",
}


def _parser(command: str) -> argparse.ArgumentParser:
    """The options of all commands."""
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
    for name, (about, module) in PLAIN.items():
        module.add_arguments(commands.add_parser(name, help=about))
    for name, about in LATE.items():
        own = commands.add_parser(name, help=about)
        if command == name:
            _late(name).add_arguments(own)
    promised = commands.add_parser(
        "contract", parents=[one], help="what an exercise promises, and which check asserts it"
    )
    promised.add_argument("--draft", action="store_true", help="an entry of the contract file")
    made = commands.add_parser("templates", help="for contributors: templates from solutions")
    made.add_argument("--write", action="store_true")
    made.add_argument("--check", action="store_true", help="(the default)")
    made.add_argument("--force", action="store_true", help="overwrite edited templates")
    return parser


def _late(command: str) -> ModuleType:
    """The module of a command that takes long to import: other commands need not wait for it."""
    return importlib.import_module(f".commands.{command}", __package__)


def run(options: argparse.Namespace, out: Console) -> int:
    """Do what the command line asks for; returns the exit status."""
    if options.command in (*PLAIN, *LATE):
        late = options.command in LATE
        module = _late(options.command) if late else PLAIN[options.command][1]
        return int(module.main(options, out))
    course = load_course()
    if options.command is None:
        if options.map_json:
            text = json.dumps(map_as_json(course), indent=2)
            options.map_json.write_text(text + "\n", encoding="utf-8")
        return show_map(course, out, options.all)
    if options.command == "templates":
        return make_templates(course, options.write, options.force, out)
    if options.command == "watch":
        return watch(course, options.exercise, out)
    exercise = course.exercise(options.exercise)
    if options.command == "contract":
        contract = _late("contract")
        return int((contract.draft if options.draft else contract.show)(exercise, out))
    if options.command == "hint":
        return hint(exercise, out)
    if options.command == "reset":
        asks = out.is_terminal and sys.stdin.isatty() and not options.yes
        return reset(exercise, out, yes if asks else None)
    if options.command == "solution":
        return solution(exercise, options.give_up, out)
    return trace(exercise, options.impl, options.out, out, options.open, options.record)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry of the ``distlab`` command. Exit status: 0 done, 1 not in order, 2 a wrong call, 130
    after Ctrl-C, 143 after SIGTERM."""
    given = list(sys.argv[1:] if argv is None else argv)
    options = _parser(given[0] if given else "").parse_args(given)
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
