"""Draw the guidelines' diagrams: ``python -m scripts.diagrams [--place | --check]``.

Without an option all are written to ``docs/diagrams``. ``--place`` puts them into the guidelines,
as ``docs/diagrams/placed.toml`` says. ``--check`` writes nothing, and names what is not in step.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from . import DRAWINGS, FOLDER, ROOT, draw, placed
from .placing import place_all


def out_of_step(folder: Path = FOLDER) -> list[str]:
    """What ``--check`` names: files that differ from their specification, or have none."""
    wanted = {f"{each.name}.svg": draw(each) for each in placed()}
    there = {path.name: path.read_text(encoding="utf-8") for path in folder.glob("*.svg")}
    undrawn = [f"{name} has no entry in placed.toml" for name in sorted({*DRAWINGS} - names())]
    return undrawn + [
        f"{name} {'differs from its specification' if name in there else 'is missing'}"
        if name in wanted
        else f"{name} has no specification"
        for name in sorted({*wanted, *there})
        if wanted.get(name) != there.get(name)
    ]


def names() -> set[str]:
    """The diagrams that have a place."""
    return {each.name for each in placed()}


def write(folder: Path = FOLDER) -> int:
    """Write all diagrams; gives back how many."""
    entries = placed()
    for each in entries:
        (folder / f"{each.name}.svg").write_text(draw(each), encoding="utf-8", newline="\n")
    return len(entries)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.diagrams", description=__doc__)
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--place", dest="put", action="store_true", help="put them into the guidelines"
    )
    what.add_argument("--check", action="store_true", help="compare files with specifications")
    parser.add_argument("--root", type=Path, default=ROOT, help="where the guidelines are")
    options = parser.parse_args(arguments)
    if options.put:
        try:
            changed = place_all(options.root)
        except ValueError as error:
            print(f"Nothing was placed: {error}", file=sys.stderr)
            return 1
        print("\n".join(f"placed in {path}" for path in changed) or "all diagrams are in place")
        return 0
    if options.check:
        problems = out_of_step()
        print(
            "\n".join([*problems, "run: python -m scripts.diagrams"] if problems else ["in step"])
        )
        return bool(problems)
    print(f"{write()} diagrams in {FOLDER.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
