"""Bring a learner's folder to a new version of the course, with the work in its templates.

First the new texts are computed, then a copy is made, then files are written. So a refusal changes
nothing.
"""

from __future__ import annotations

import shutil
import zipfile
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from . import templates
from .carry import Carried, Conflict, Old, carry
from .catalogue import Course, Exercise, load_course
from .frames import gaps, opened
from .handout import MANIFEST, changed_in, digest, manifest_of
from .version import course_version

LARGEST = 200 * 2**20  # bytes of a hand-out


@dataclass
class Upgrade:
    """The result of an upgrade: new texts of templates by path, and code that fits no region."""

    old: str
    new: str
    files: dict[str, Carried] = field(default_factory=dict)
    gone: list[Conflict] = field(default_factory=list)

    @property
    def conflicts(self) -> list[Conflict]:
        """All code that could not be carried over."""
        return [c for carried in self.files.values() for c in carried.conflicts] + self.gone

    @property
    def kept(self) -> list[str]:
        """The exercises whose code was carried over."""
        found = {each for carried in self.files.values() for each in carried.kept}
        return sorted(found, key=lambda each: [int(part) for part in each.split(".")])

    @property
    def notes(self) -> list[str]:
        """Notes for the learner about code that was carried over."""
        return [note for carried in self.files.values() for note in carried.notes]


def worked_out(mine: Path, base: Path, new: Path) -> Upgrade:
    """Compute the learner's files in ``mine`` for the course in ``new``.

    ``base``: the course that they were made from.
    """
    ours, theirs = _course(base), _course(new)
    lacking = [p.number for p in ours.phases if p.number not in {q.number for q in theirs.phases}]
    if lacking:
        raise ValueError(
            f"{new.name} lacks phase {lacking[0]}, which you have: nothing was changed"
        )
    found = Upgrade(course_version(base), course_version(new))
    was = {e.id: e.was_in for e in theirs.exercises if e.was_in}
    for phase in theirs.phases:
        olds = {
            e.template_path.name: _old(e, mine)
            for e in templates.files_of(ours)
            if e.phase.number == phase.number
        }
        used = set()
        for exercise in templates.files_of(theirs):
            if exercise.phase.number == phase.number:
                carried = carry(exercise.template_path.name, _blank(exercise), olds, was)
                found.files[_name(exercise)] = carried
                used |= carried.used
        found.gone += [c for old in olds.values() for c in _without_place(old, used)]
    return found


def _course(folder: Path) -> Course:
    load_course.cache_clear()  # the course on disk may be another one now
    return load_course(folder)


def _old(exercise: Exercise, mine: Path) -> Old:
    """The learner's file; a deleted file counts as blank."""
    path, blank = mine / _name(exercise), _blank(exercise)
    try:
        written = path.read_text(encoding="utf-8") if path.is_file() else blank
    except UnicodeDecodeError:
        raise ValueError(
            f"{path} is no UTF-8 text: save it as UTF-8; nothing was changed"
        ) from None
    return Old(path.name, blank, written)


def _name(exercise: Exercise) -> str:
    return f"{exercise.phase.folder}/{exercise.template_path.name}"


def _blank(exercise: Exercise) -> str:
    """The course's own template. A hand-out keeps it beside the learner's."""
    kept = templates.handed_out(exercise)
    path = kept if kept.is_file() else exercise.template_path
    return path.read_text(encoding="utf-8")


def _without_place(old: Old, used: set[tuple[str, tuple[str, int]]]) -> list[Conflict]:
    """The learner's code for which the new version has no region."""
    taken = opened(old.blank, old.mine)
    found = []
    for gap in gaps(old.blank):
        text = taken.own.get(gap.key, gap.text)
        if (old.name, gap.key) not in used and text != gap.text:
            where = f"exercise {gap.exercise}, {gap.function} in {old.name}"
            why = "the new version has no such region"
            found.append(Conflict(where, why, "\n".join(gap.text), "\n".join(text), ""))
    return found


# -- a copy ---------------------------------------------------------------------------------------
def keep(mine: Path, base: Path, upgrade: Upgrade, others: list[str]) -> Path:
    """Copy the learner's templates, their blanks and ``others`` to a folder of its own; returns the
    folder.

    Conflicts are written beside them.
    """
    folder = mine / ".distlab" / f"before-upgrade-{upgrade.old}"
    number = 1
    while folder.exists():
        number += 1
        folder = folder.with_name(f"before-upgrade-{upgrade.old}-{number}")
    folder.mkdir(parents=True)
    for exercise in templates.files_of(_course(base)):
        blank = folder / templates.BLANK / _name(exercise)
        blank.parent.mkdir(parents=True, exist_ok=True)
        blank.write_text(_blank(exercise), encoding="utf-8")
        others = [*others, _name(exercise)]
    for name in others:
        if (mine / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(mine / name, folder / name)
    if upgrade.conflicts:
        page = "\n".join(map(page_of, upgrade.conflicts))
        (folder / "conflicts.md").write_text(page, encoding="utf-8")
    return folder


def page_of(conflict: Conflict) -> str:
    """A conflict as Markdown: old text, own text, new text."""
    shown = [f"## {conflict.where}\n\n{conflict.why}\n"]
    for title, text in (
        ("template before", conflict.old),
        ("yours", conflict.own),
        ("template now", conflict.new),
    ):
        shown.append(f"{title}:\n\n```python\n{text or '# nothing'}\n```\n")
    return "\n".join(shown)


# -- hand-outs ------------------------------------------------------------------------------------
def unpacked(new: Path, to: Path) -> Path:
    """The new hand-out, a folder or a zip, as a folder whose files are those of its manifest."""
    if zipfile.is_zipfile(new):
        new = _extracted(new, to)
    found = manifest_of(new)
    if found is None:
        raise ValueError(f"{new.name} is no hand-out: it has no {MANIFEST} that can be read")
    wrong = [name for name, known in found["files"].items() if digest(new / name) != known]
    unsafe = [name for name in found["files"] if not _inside(name)]
    if wrong or unsafe:
        name = (unsafe or wrong)[0]
        raise ValueError(f"{new.name} is damaged, get it again: {name} is not what was handed out")
    return new


def _inside(name: str) -> bool:
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts and path.parts[:1] != (".distlab",)


def _extracted(packed: Path, to: Path) -> Path:
    with zipfile.ZipFile(packed) as archive:
        entries = [entry for entry in archive.infolist() if not entry.is_dir()]
        if sum(entry.file_size for entry in entries) > LARGEST:
            raise ValueError(f"{packed.name} is no hand-out: it is larger than 200 MB")
        if not all(_inside(entry.filename) for entry in entries):
            raise ValueError(f"{packed.name} is no hand-out: its files lie outside of it")
        archive.extractall(to, entries)
    tops = {PurePosixPath(entry.filename).parts[0] for entry in entries}
    return to / tops.pop() if len(tops) == 1 else to


def replace_hand_out(mine: Path, new: Path) -> tuple[Upgrade, Path]:
    """Turn the hand-out in ``mine`` into the one in ``new``; returns what was done,
    and where the copy is."""
    before, after = manifest_of(mine), manifest_of(new)
    if before is None or after is None:
        raise ValueError(f"{mine} is no hand-out: {MANIFEST} can't be read")
    if before == after and not changed_in(mine):
        raise ValueError(
            f"you have version {before['course_version']} already: nothing was changed"
        )
    found = worked_out(mine, mine, new)
    own = [*found.files, *(n for n in changed_in(mine, ()) if n not in found.files)]
    own += [name for name in after["files"] if name not in before["files"]]
    copy = keep(mine, mine, found, own)
    for name in before["files"].keys() - after["files"].keys():
        (mine / name).unlink(missing_ok=True)
    for name in [*(n for n in after["files"] if n not in found.files), MANIFEST]:
        (mine / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(new / name, mine / name)
    write(mine, found)
    return found, copy


def write(mine: Path, upgrade: Upgrade) -> None:
    """Write the templates with the learner's work in them."""
    for name, carried in upgrade.files.items():
        (mine / name).parent.mkdir(parents=True, exist_ok=True)
        (mine / name).write_text(carried.text, encoding="utf-8")
