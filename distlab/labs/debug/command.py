"""``distlab lab debug``: make a lab, run its program again, grade it."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ...course.catalogue import load_course
from ...host.terminal import command, say, short
from ..frame import dealt, may_see, need_release, results, seed_of_this_folder, told
from .chosen import DebugLab, all_labs, lab_called
from .folder import REPORT, write_lab
from .graded import graded, read_mark
from .observed import observe, rounded


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("what", nargs="?", help="an exercise (3.10) or a lab (D3.02)")
    parser.add_argument("--phase", type=int, help="a lab of this phase")
    parser.add_argument("--level", type=int, choices=(1, 2, 3, 4), help="a lab of this level")
    parser.add_argument("--seed", type=int, help="the same seed gives the same lab")
    parser.add_argument("--out", type=Path, help="folder to make (default: labs-own/ID)")
    parser.add_argument("--spoil", action="store_true", help="also where the exercise is not done")
    parser.add_argument("--list", action="store_true", help="the labs there are, with your points")
    parser.add_argument("--again", type=Path, metavar="FOLDER", help="run its program again")
    parser.add_argument("--grade", type=Path, metavar="FOLDER", help="grade answer and program")
    parser.add_argument("--json", type=Path, metavar="FILE", help="the result, for programs")


def main(options: argparse.Namespace, out: Console) -> int:
    """Do what the options ask for; the exit status."""
    if options.list:
        return _list(out)
    if options.again:
        return _again(options.again, out)
    if options.grade:
        lab, seed, parts = graded(options.grade)
        return told(lab.id, parts, out, options.json, {"kind": lab.kind, "seed": seed})
    seed = seed_of_this_folder() if options.seed is None else options.seed
    lab = _chosen(options, seed)
    need_release(lab.exercise, lab.id, options.spoil)
    folder = options.out or Path("labs-own") / lab.id
    write_lab(lab, seed, folder)
    say(out, f"lab {lab.id}: {lab.title} (level {lab.level}, {lab.points} points)")
    command(out, "  read   ", short(folder / REPORT))
    command(out, "  answer ", short(folder / "answer.toml"))
    command(out, "  mend   ", short(folder / lab.file))
    command(out, "  grade  ", f"distlab lab debug --grade {short(folder)}")
    return 0


def _chosen(options: argparse.Namespace, seed: int) -> DebugLab:
    """The lab that is asked for, or dealt by the seed among those that fit."""
    if options.what and options.what[:1] in "Dd":
        return lab_called(options.what.upper())
    exercise = load_course().exercise(options.what) if options.what else None
    phase = load_course().phase(options.phase) if options.phase is not None else None
    fitting = [
        lab
        for lab in all_labs()
        if (exercise is None or lab.exercise == exercise.id)
        and (phase is None or lab.about.phase == phase)
        and options.level in (None, lab.level)
    ]
    open_ = [lab for lab in fitting if options.spoil or may_see(lab.exercise)]
    if fitting and not open_:
        need_release(fitting[0].exercise, fitting[0].id, False)
    return dealt(seed, "debugging lab that fits", open_)


def _list(out: Console) -> int:
    known = results()
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("lab", "phase", "level", "points", "title"):
        table.add_column(name)
    for lab in all_labs():
        mine = known.get(lab.id, {}).get("points", 0)
        cells = (lab.id, str(lab.about.phase.number), str(lab.level), f"{mine:g}/{lab.points}")
        table.add_row(*cells, lab.title)
    out.print(table)
    return 0


def _again(folder: Path, out: Console) -> int:
    """Show what the program gives with the file as it is now."""
    lab, seed = read_mark(folder)
    seen = observe(lab, (folder / lab.file).read_text(encoding="utf-8"), seed)
    if seen.failure:
        for line in (seen.failure, *seen.at_the_end):
            say(out, line)
        return 1
    for rank, values in enumerate(seen.values):
        for name, value in values.items():
            out.print(f"rank {rank}  {name}: {rounded(value)}", highlight=False, markup=False)
    return 0
