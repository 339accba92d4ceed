"""No file of the course is opened by a grading that its verdict's digest leaves out."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NoReturn

import pytest

from distlab.course.catalogue import load_course, root
from distlab.grading.wrong import all_mutants, run_mutant
from tests.verdicts.digests import MUTANTS, verdicts
from tests.verdicts.opened import sources_of
from tests.verdicts.sources import IN_PARTS, Sources


def noted(mutant_id: str, folder: Path, note: Path) -> NoReturn:
    """Grade a wrong implementation, and write down which files are opened: a hook stays for good,
    and so do this process and those that it starts by forks."""
    home, writes = str(root()) + os.sep, os.O_WRONLY | os.O_CREAT | os.O_APPEND

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        name = arguments[0] if event == "open" else ""
        if isinstance(name, str) and name.startswith(home):
            number = os.open(note, writes)  # anew: a grader closes what it has inherited
            os.write(number, name.encode() + b"\n")
            os.close(number)

    status = 1
    try:
        sys.addaudithook(hook)
        (mutant,) = [m for m in all_mutants() if m.id == mutant_id]
        result = run_mutant(mutant, folder)
        status = int(result is None or result.verdict == "pass")
    finally:
        os._exit(status)


@pytest.mark.parametrize("mutant_id", ["root-adds-as-they-come"])
def test_a_grading_opens_what_its_digest_has(mutant_id: str, tmp_path: Path) -> None:
    note, folder = tmp_path / "note", tmp_path / "implementation"
    folder.mkdir()
    pid = os.fork()
    if pid == 0:
        noted(mutant_id, folder, note)
    assert os.waitpid(pid, 0)[1] == 0
    (mutant,) = [m for m in all_mutants() if m.id == mutant_id]
    exercise = load_course().exercise(mutant.exercise)
    every = verdicts(Sources(root()))
    (verdict,) = [v for v in every if v.key == (MUTANTS, mutant.exercise)]
    opened = sources_of(note.read_text().splitlines())
    assert exercise.solution_path in opened
    looked_at = {*root().glob(exercise.checks_glob)}  # for checks of the exercise
    of_mutants = {*(root() / "tests" / "mutants").glob("phase*_*.py")}  # for those of the exercise
    in_parts = {root() / name for name in IN_PARTS} | looked_at | of_mutants
    assert sorted(opened - verdict.paths - in_parts) == []
