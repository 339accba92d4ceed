"""``distlab lab debug``: make a lab, run its program again, grade it."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ...host.terminal import command, say, short
from ..frame import (
    check_folder,
    dealt,
    fitting,
    may_see,
    need_release,
    need_solutions,
    results,
    seed_or_own,
    told,
)
from .chosen import DebugLab, all_labs, lab_called
from .folder import ANSWER, REPORT, run_again, write_lab
from .graded import graded, read_mark, read_own
from .hints import next_hint
from .observed import differing


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("what", nargs="?", help="an exercise (3.10) or a lab (D3.02)")
    parser.add_argument("--phase", type=int, help="a lab of this phase")
    parser.add_argument("--level", type=int, choices=(1, 2, 3, 4), help="a lab of this level")
    parser.add_argument("--seed", type=int, help="the same seed gives the same lab")
    parser.add_argument("--out", type=Path, help="folder to make (default: my_labs/ID)")
    parser.add_argument("--spoil", action="store_true", help="also where the exercise is not done")
    parser.add_argument("--list", action="store_true", help="the labs there are, with your points")
    parser.add_argument("--again", type=Path, metavar="FOLDER", help="run its program again")
    parser.add_argument("--ranks", type=int, help="with --again: on fewer ranks")
    parser.add_argument("--hint", type=Path, metavar="FOLDER", help="the next of three hints")
    parser.add_argument("--grade", type=Path, metavar="FOLDER", help="grade answer and program")
    parser.add_argument("--json", type=Path, metavar="FILE", help="the result, for programs")


def main(options: argparse.Namespace, out: Console) -> int:
    """Do what the options ask for; the exit status."""
    need_solutions("debugging labs")
    if options.ranks is not None and not options.again:
        raise ValueError("--ranks goes with --again FOLDER")
    if options.list:
        return _list(options.phase, out)
    if options.hint:
        return _hint(options.hint, out)
    if options.again:
        return _again(options.again, options.ranks, out)
    if options.grade:
        check_folder(options.json)
        lab, seed, parts = graded(options.grade)
        return told(lab.id, parts, out, options.json, {"kind": lab.kind, "seed": seed})
    seed = seed_or_own(options.seed)
    lab = _chosen(options, seed)
    for exercise_id in lab.spoils:
        need_release(exercise_id, lab.id, options.spoil)
    folder = options.out or Path("my_labs") / lab.id
    write_lab(lab, seed, folder)
    say(out, f"lab {lab.id}: {lab.title} (level {lab.level}, {lab.points} points)")
    command(out, "  read   ", short(folder / REPORT))
    command(out, "  answer ", short(folder / ANSWER))
    command(out, "  mend   ", short(folder / lab.file))
    for verb in ("again", "hint", "grade"):
        command(out, f"  {verb:<7}", f"distlab lab debug --{verb} {short(folder)}")
    return 0


def _chosen(options: argparse.Namespace, seed: int) -> DebugLab:
    """The lab that is asked for, or dealt by the seed among those that fit and are open.

    Without a level it is of the lowest one that has any: seeds deal labs of equal difficulty.
    Without a seed, labs that have points already are left out.
    """
    if options.what and options.what[:1] in "Dd":
        return lab_called(options.what.upper())
    found = fitting(all_labs(), options.what, options.phase, options.level)
    open_ = [lab for lab in found if options.spoil or all(map(may_see, lab.spoils))]
    if found and not open_:
        raise ValueError(
            "each lab that fits shows solutions that you have not written yet: pass the exercises "
            "or give them up first (instructors add --spoil)"
        )
    if options.seed is None:
        done = results()
        left = [lab for lab in open_ if not done.get(lab.id, {}).get("points")]
        if open_ and not left:
            raise ValueError("you have points for all labs that fit: --list shows them")
        open_ = left
    lowest = min((lab.level for lab in open_), default=0)
    return dealt(seed, "debugging lab that fits", [lab for lab in open_ if lab.level == lowest])


def _list(phase: int | None, out: Console) -> int:
    known = results()
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("lab", "phase", "level", "points", "hints", "title"):
        table.add_column(name)
    for lab in all_labs():
        number, mine = lab.about.phase.number, known.get(lab.id, {})
        if phase in (None, number):
            points = f"{format(mine['points'], 'g') if 'points' in mine else '–'}/{lab.points}"
            hints = str(mine.get("hints", ""))
            table.add_row(lab.id, str(number), str(lab.level), points, hints, lab.title)
    out.print(table)
    return 0


def _hint(folder: Path, out: Console) -> int:
    lab, seed = read_mark(folder)
    hints, warnings = next_hint(lab, seed)
    for k, text in hints.items():
        say(out, text, label=f"hint {k} of 3: ")
    for warning in warnings:
        say(out, warning, "yellow")
    return 0


def _again(folder: Path, ranks: int | None, out: Console) -> int:
    """Run the program with the file as it is now; 0 if nothing differs from what is expected."""
    lab, seed = read_mark(folder)
    if ranks is not None and not 1 <= ranks <= lab.world:
        raise ValueError(f"--ranks is a number from 1 to {lab.world}, not {ranks}")
    read_own(folder, lab)
    path, own, right = run_again(lab, seed, folder, ranks or lab.world)
    command(out, "report ", short(path))
    if own.failure:
        for line in (own.failure, *own.at_the_end):
            say(out, line)
        return 1
    wrong = differing(own, right, ranks or lab.world)
    numbers = ", ".join(map(str, wrong))
    if wrong:
        say(out, f"not as expected on ranks {numbers}")
        return 1
    say(out, "all is as expected in this run; --grade runs checks that ask for more")
    return 0
