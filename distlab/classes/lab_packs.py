"""Hand out labs: for each student a folder and a zip of it, to be unpacked in the course's folder.

A program with a bug and a change to be reviewed show nearly a whole solution. So they are made
where the solutions are, only of exercises that the rules call released, and nothing is written if
anything of another exercise is shown. Causes, answers and wrong implementations stay behind.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path

from ..course.catalogue import load_course
from ..course.handout import files_in, need_new
from ..course.leaks import leaks
from ..host import zips
from ..labs.debug.chosen import lab_called
from ..labs.debug.folder import write_lab
from ..labs.index import KINDS, Listed
from ..labs.predict.sheets import sheet_of
from ..labs.review.change import hunks
from ..labs.review.chosen import review_called
from ..labs.review.command import write_review
from ..labs.written.look import begin
from .archives import LABS
from .config import ClassConfig
from .lab_grading import file_of
from .lab_rules import labs_for, seed_of

README = """# Your labs

Unpack this folder in the folder of the course. Fill in the files below, and hand in `{labs}` with
your other files. Your instructor grades them. Your seed is {seed}.

| lab | points | what to do | answer in |
|---|---|---|---|
{rows}
"""


def owners(config: ClassConfig) -> list[str]:
    """Who gets labs: teams, and students without one. ValueError if the rules name nobody."""
    found = sorted({*config.teams, *map(config.team_of, config.students)})
    if not found:
        raise ValueError("nobody is named to get labs: name them in [students] ids or in [teams]")
    return found


def write_packs(config: ClassConfig, out: Path) -> list[Path]:
    """Write all packs into the new folder ``out``; the zips. Nothing is left behind if it fails."""
    if not config.labs:
        raise ValueError("no labs count: name them in [labs] points")
    need_new(out)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".labs-") as temporary:
        made = Path(temporary) / out.name
        packed = []
        for owner in owners(config):
            folder = made / owner
            _write(config, owner, folder / LABS)
            found = leaks(load_course(), folder, config.released)
            if found:
                raise ValueError(f"{owner}/{found[0]}: nothing was handed out")
            inside = {path.relative_to(folder).as_posix(): path for path in files_in(folder)}
            packed.append(f"{owner}.zip")
            contents = {name: path.read_bytes() for name, path in inside.items()}
            zips.write(made / packed[-1], contents)
        made.rename(out)
    return [out / name for name in packed]


def _write(config: ClassConfig, owner: str, home: Path) -> None:
    """All labs of a student or a team."""
    home.mkdir(parents=True)
    labs = labs_for(config.labs, config.released, config.seed, owner)
    seed = seed_of(config.seed, owner)
    for lab in labs.values():
        _write_lab(lab, seed, home, config)
    rows = _rows(config.labs, labs)
    text = README.format(labs=LABS, seed=seed, rows=rows)
    (home / "README.md").write_text(text, encoding="utf-8")


def _write_lab(lab: Listed, seed: int, home: Path, config: ClassConfig) -> None:
    file = home / file_of(lab)
    if lab.kind == "debug":
        write_lab(lab_called(lab.id), seed, file.parent)
    elif lab.kind == "review":
        review = review_called(lab.id)
        secret = {*review.spoils} - {*config.released}
        write_review(review, hunks(*review.texts()), file.parent, secret)
    elif lab.kind == "tests":
        begin(load_course().exercise(lab.exercise), file)
    else:
        file.write_text(sheet_of(lab.id, seed), encoding="utf-8")


def _rows(points: Mapping[str, float], labs: Mapping[str, Listed]) -> str:
    """A row for each lab."""
    return "\n".join(
        f"| {lab.id} {lab.title} | {points[name]:g} | {KINDS[lab.kind][0]} | `{file_of(lab)}` |"
        for name, lab in labs.items()
    )
