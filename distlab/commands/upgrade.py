"""``distlab upgrade``: a new version of the course, with the learner's work in it."""

from __future__ import annotations

import argparse
import re
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

from ..course.catalogue import root
from ..course.clones import merge_clone
from ..course.handout import MANIFEST
from ..course.upgrade import Upgrade, page_of, replace_hand_out, unpacked
from ..host.terminal import command, say, short


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument(
        "new",
        nargs="?",
        default="",
        metavar="NEW",
        help="a newer hand-out (folder or zip); in a clone a repository (default: its origin)",
    )


def main(options: argparse.Namespace, out: Console) -> int:
    """Bring this folder to the new version; returns 1 if something could not be carried over."""
    mine = root()
    requirements = _requirements(mine)
    with tempfile.TemporaryDirectory(prefix="distlab-upgrade-") as temporary:
        if (mine / MANIFEST).is_file():
            if not Path(options.new).exists() or not options.new:
                raise ValueError("name the newer hand-out: distlab upgrade FOLDER, or the zip")
            new = unpacked(Path(options.new).resolve(), Path(temporary))
            done, copy = replace_hand_out(mine, new)
        elif (mine / ".git").exists():
            done, copy = merge_clone(mine, options.new, Path(temporary))
        else:
            raise ValueError(
                f"{mine} is neither a hand-out nor a clone: there is nothing to upgrade"
            )
    _tell(done, copy, out)
    if _requirements(mine) != requirements:
        command(out, "requirements may have changed: ", "make env")
    return 1 if done.conflicts else 0


def _requirements(folder: Path) -> str:
    """The requirements of the environment, without the course's version."""
    text = (folder / "pyproject.toml").read_text(encoding="utf-8")
    return re.sub(r"^version = .*$", "", text, flags=re.MULTILINE)


def _tell(done: Upgrade, copy: Path, out: Console) -> None:
    """Print what was carried over, and each conflict with its three texts."""
    say(out, f"version {done.old} is now version {done.new}")
    say(out, f"your files as they were: {short(copy)}")
    if done.kept:
        say(out, f"carried over: {', '.join(done.kept)}")
    for note in done.notes:
        say(out, note, "yellow")
    for conflict in done.conflicts:
        out.print()
        out.print(Text(page_of(conflict)), highlight=False, soft_wrap=True)
    if done.conflicts:
        many = len(done.conflicts)
        what = "1 place needs" if many == 1 else f"{many} places need"
        say(out, f"{what} you: it is above, and in {short(copy / 'conflicts.md')}", "bold yellow")
