"""``distlab contract 1.4``: the promises of an exercise, and the checks that assert them."""

from __future__ import annotations

import json
import textwrap

from rich.console import Console

from ..course.catalogue import Exercise, features_for
from ..grading.contract import AXES, Contract, contract, sentences


def show(exercise: Exercise, out: Console) -> int:
    """Print the contract; exit status 1 if a part of it has no check."""
    found = contract(exercise)
    lines = [f"{exercise.id} {exercise.title}", *_promises(found), "", "  axes"]
    for axis, meaning in AXES.items():
        lines.append(f"    {axis}: {meaning}")
        if axis in found.asserted:
            lines.append(_checks("checks", found.asserted[axis]))
        else:
            lines.append(_checks("does not apply", [found.excluded.get(axis, "")]))
    features = ", ".join(feature.name for feature in features_for(exercise))
    lines += ["", _filled(f"counts as a shortcut: PyTorch's own {features}", 2, 4)]
    lines += [f"  missing: {problem}" for problem in found.problems]
    out.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)
    return 1 if found.problems else 0


def _promises(found: Contract) -> list[str]:
    lines, function = [], ""
    for promise in found.promises:
        if promise.function != function:
            function = promise.function
            lines += ["", f"  {function}"]
        lines.append(_filled(promise.sentence, 4, 4))
        lines += [_checks(key, found.asserted.get(key, ["no check"])) for key in promise.keys]
    return lines


def _checks(key: str, checks: list[str]) -> str:
    return _filled(f"{key}: {', '.join(checks)}", 8, 10)


def _filled(text: str, first: int, others: int) -> str:
    return textwrap.fill(text, 100, initial_indent=" " * first, subsequent_indent=" " * others)


def draft(exercise: Exercise, out: Console) -> int:
    """Print an entry for the contract file: every sentence, without keys."""
    functions: dict[str, list[str]] = {}
    for function, sentence in sentences(exercise):
        functions.setdefault(function, []).append(sentence)
    for function, every in functions.items():
        lines = [f'["{exercise.id}".promises."{function}"]']
        lines += [f'{json.dumps(_begin(s, every), ensure_ascii=False)} = ""' for s in every]
        out.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)
    out.print(f'["{exercise.id}".excluded]', markup=False, highlight=False)
    return 0


def _begin(sentence: str, every: list[str]) -> str:
    """The shortest beginning of a sentence that no other sentence has: five words at least."""
    words = sentence.split()
    for count in range(min(5, len(words)), len(words)):
        start = " ".join(words[:count])
        if sum(other.startswith(start) for other in every) == 1:
            return start
    return sentence
