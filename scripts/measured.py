"""The line "On your machine" of each section of the guidelines: the number of ``distlab measure``.

    python -m scripts.measured --write

The line is made from the exercise's scenario and from the number in the scenario's mark.
"""

from __future__ import annotations

import argparse
import re
import sys
import textwrap

from distlab.commands.scenario import scenario_of
from distlab.course.catalogue import Exercise, Phase, load_course
from distlab.picture.measured import QUANTITIES

HEAD = "**On your machine.**"
BEFORE = ("**Small case", "**Questions.**", "**Read.**")
WIDTH = 108


def line(exercise: Exercise) -> str:
    """The paragraph of an exercise."""
    scenario = scenario_of(exercise)
    run = (scenario.__doc__ or "").split("\n")[0].rstrip(".")
    tells = QUANTITIES[scenario.trace_of[exercise.id]].tells
    if not run[1].isupper():  # "ZB-V" stays
        run = run[0].lower() + run[1:]
    text = f"{HEAD} `distlab measure {exercise.id}` tells {tells}. The run: {run}."
    return textwrap.fill(text, WIDTH, break_long_words=False, break_on_hyphens=False)


def filled(text: str, phase: Phase) -> str:
    """The guidelines of a phase with the paragraph in each section, once."""
    parts = re.split(r"(?m)^(?=## )", text)
    lines = {each.id: line(each) for each in phase.exercises}
    for number, part in enumerate(parts):
        found = re.match(r"## (\d+\.\d+) ", part)
        if found and found.group(1) in lines:
            parts[number] = _placed(part, lines[found.group(1)])
    return "".join(parts)


def _placed(section: str, paragraph: str) -> str:
    without = re.sub(rf"(?ms)^{re.escape(HEAD)}.*?\n\n", "", section)
    where = next((without.find(f"\n{mark}") for mark in BEFORE if f"\n{mark}" in without), -1)
    if where < 0:
        raise ValueError(f"{section.splitlines()[0]}: no {' or '.join(BEFORE)}")
    return f"{without[: where + 1]}{paragraph}\n\n{without[where + 1 :]}"


def main() -> int:
    """Write the lines, or tell which guidelines lack them; returns 1 if some do."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true", help="default: only tell what differs")
    options = parser.parse_args()
    differ = 0
    for phase in load_course().phases:
        path = phase.exercises[0].guidelines_path
        old = path.read_text(encoding="utf-8")
        new = filled(old, phase)
        if new != old and options.write:
            path.write_text(new, encoding="utf-8")
        elif new != old:
            differ = 1
            print(f"{path.name} of phase {phase.number} differs: --write", file=sys.stderr)
    return differ


if __name__ == "__main__":
    sys.exit(main())
