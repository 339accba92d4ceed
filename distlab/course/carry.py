"""Carry a learner's work over to new templates, region by region.

Changes of the learner's around the regions are merged by ``git merge-file``. Code that can't be
carried over is a conflict: the new template stands, and old, own and new text are told.
"""

from __future__ import annotations

import ast
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .frames import Gap, Opened, framed, functions, gaps, mark_of, opened
from .regions import functions_in


@dataclass(frozen=True)
class Conflict:
    """Code that could not be carried over: the texts of the old template, the
    learner and the new template."""

    where: str
    why: str
    old: str
    own: str
    new: str


@dataclass
class Carried:
    """A new file with the learner's work in it, and notes for the learner."""

    text: str
    kept: list[str] = field(default_factory=list)  # exercises
    conflicts: list[Conflict] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    used: set[tuple[str, tuple[str, int]]] = field(default_factory=set)  # file and key of regions


@dataclass(frozen=True)
class Old:
    """An old template and the learner's file that was made from it."""

    name: str
    blank: str
    mine: str


def carry(name: str, blank: str, olds: Mapping[str, Old], was: Mapping[str, str]) -> Carried:
    """The new file ``name``, whose template is ``blank``, with the learner's work of ``olds``.

    ``olds``: the files of the phase by name. ``was``: for an exercise of the new course, the
    exercise that it was a part of, or its old name.
    """
    taken = {each: opened(old.blank, old.mine) for each, old in olds.items()}
    source = _source(name, blank, olds, was)
    merged = Carried("")
    new = gaps(blank)
    lines = _merged_frame(name, blank, olds.get(source), taken.get(source), merged)
    for gap in new:
        alone = sum(other.exercise == gap.exercise for other in new) == 1
        where = _where(gap, source, olds, was, alone)
        text = list(gap.text)
        if where is not None:
            file, before = where
            merged.used.add((file, before.key))
            text = _filled(gap, blank, olds[file], before, taken[file], merged)
        at = lines.index(mark_of(gap))
        lines[at : at + 1] = text
    merged.text = "\n".join(lines) + "\n"
    return merged


def _source(name: str, blank: str, olds: Mapping[str, Old], was: Mapping[str, str]) -> str:
    """The old file that the new one continues: it has the same name, or it was renamed."""
    if name in olds:
        return name
    for gap in gaps(blank):
        found = _where(gap, "", olds, was, alone=False)
        if found is not None:
            return found[0]
    return ""


def _where(
    gap: Gap, source: str, olds: Mapping[str, Old], was: Mapping[str, str], alone: bool
) -> tuple[str, Gap] | None:
    """The old file and region that a new region continues.

    ``alone``: the region is the only one of its exercise, so its function may have another name.
    """
    ids = {gap.exercise, was.get(gap.exercise, gap.exercise)}
    named = sorted(olds, key=lambda each: each != source)
    every = [(each, p) for each in named for p in gaps(olds[each].blank)]
    same = [(each, p) for each, p in every if p.key == gap.key]
    for each, p in same:
        if p.exercise in ids or each == source:
            return each, p
    of_it = [(each, p) for each, p in every if p.exercise == gap.exercise]
    return of_it[0] if alone and len(of_it) == 1 else None


def _filled(
    gap: Gap, blank: str, old: Old, before: Gap, taken: Opened, merged: Carried
) -> list[str]:
    """The text of a new region: the learner's, or the template's where the
    learner's does not fit."""
    where = f"exercise {gap.exercise}, {gap.function}"
    for name, was, own in taken.closed:
        if name == before.function:
            why = f"{name} was changed around its region" if own else f"{name} is not in your file"
            shown = [] if not own else [Conflict(where, why, was, own, _function(blank, gap))]
            merged.conflicts += [c for c in shown if c not in merged.conflicts]
            return list(gap.text)
    own_text = taken.own[before.key]
    if _bare(own_text) == _bare(before.text):
        return list(gap.text)
    if _signature(old.blank, before.function) != _signature(blank, gap.function):
        own_function = _function(old.mine, before)
        why = "its signature or the name of the function changed"
        was_text, new_text = _function(old.blank, before), _function(blank, gap)
        merged.conflicts.append(Conflict(where, why, was_text, own_function, new_text))
        return list(gap.text)
    if gap.exercise not in merged.kept:
        merged.kept.append(gap.exercise)
    if _bare(before.text) != _bare(gap.text):
        merged.notes.append(f"{where}: the steps changed, your code is kept")
    if _docstring(old.blank, before.function) != _docstring(blank, gap.function):
        merged.notes.append(f"{where}: the docstring changed, your code is kept: read it again")
    return list(own_text)


def _bare(lines: Sequence[str]) -> list[str]:
    """Lines without spaces at their ends, blank ones left out."""
    return [line.rstrip() for line in lines if line.strip()]


def _function(text: str, gap: Gap) -> str:
    lines = text.splitlines()
    found = functions(lines).get(gap.function)
    return _joined(lines[found.first : found.end]) if found else ""


def _node(blank: str, function: str) -> ast.FunctionDef:
    return dict(functions_in(ast.parse(blank)))[function]


def _signature(blank: str, function: str) -> tuple[str, str, str]:
    node = _node(blank, function)
    returns = ast.unparse(node.returns) if node.returns else ""
    return function, ast.unparse(node.args), returns


def _docstring(blank: str, function: str) -> str:
    return " ".join((ast.get_docstring(_node(blank, function)) or "").split())


def _joined(lines: Sequence[str]) -> str:
    return "\n".join(lines)


# -- around the regions ---------------------------------------------------------------------------
def _merged_frame(
    name: str, blank: str, old: Old | None, taken: Opened | None, merged: Carried
) -> list[str]:
    """The new template around its regions, with the learner's changes there."""
    new = framed(blank)
    if old is None or taken is None:
        return new
    before = framed(old.blank)
    if taken.closed:
        taken = Opened(taken.own, _without_changes(before, taken), taken.closed)
    if taken.frame == before:
        return new
    lines = _three_way(name, before, taken.frame, new, merged)
    if all(lines.count(mark_of(gap)) == 1 for gap in gaps(blank)):
        return lines
    why = "what you changed around the regions does not fit the new file"
    merged.conflicts.append(Conflict(name, why, *map(_joined, (before, taken.frame, new))))
    return new


def _without_changes(before: list[str], taken: Opened) -> list[str]:
    """The learner's text around the regions. Functions that are told as
    conflicts stay as they were."""
    frame, old = list(taken.frame), functions(before)
    for name, _, own in taken.closed:
        there = functions(frame).get(name)
        if own and there is not None:
            frame[there.first : there.end] = before[old[name].first : old[name].end]
    return frame


def _three_way(
    name: str, old: list[str], own: list[str], new: list[str], merged: Carried
) -> list[str]:
    """``git merge-file`` of three texts. Where both sides changed, the new text stands,
    and a conflict is told."""
    with tempfile.TemporaryDirectory() as folder:
        paths = []
        for part, lines in (("own", own), ("old", old), ("new", new)):
            path = Path(folder, part)
            path.write_text(_joined(lines) + "\n", encoding="utf-8")
            paths.append(str(path))
        command = ["git", "merge-file", "-p", "--diff3", "--marker-size=37", *paths]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except OSError:
            raise ValueError("distlab upgrade needs git: install it, nothing was changed") from None
    if done.returncode not in range(128):
        raise ValueError(f"git merge-file failed: {done.stderr.strip()}")
    return _settled(name, done.stdout.splitlines(), merged)


def _settled(name: str, lines: list[str], merged: Carried) -> list[str]:
    """The merged text without git's marks."""
    out: list[str] = []
    parts: dict[str, list[str]] | None = None
    part = ""
    marks = {"<" * 37: "own", "|" * 37: "old", "=" * 37: "new"}
    for line in lines:
        if line[:37] in marks:
            part = marks[line[:37]]
            parts = {"own": [], "old": [], "new": []} if part == "own" else parts
        elif line[:37] == ">" * 37 and parts is not None:
            out += parts["new"]
            if not any(each.strip() for each in parts["old"]):  # both added: neither is lost
                out += parts["own"]
            else:
                texts = (_joined(parts[each]) for each in ("old", "own", "new"))
                why = "you and the course changed the same lines"
                merged.conflicts.append(Conflict(name, why, *texts))
            parts = None
        elif parts is not None:
            parts[part].append(line)
        else:
            out.append(line)
    return out
