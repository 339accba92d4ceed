"""The pages about labs: what they quote of a solved lab is what the commands print."""

from __future__ import annotations

import dataclasses
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from distlab.course import progress
from distlab.course.catalogue import Phase, load_course, root
from distlab.grading.verdicts import CheckResult, ExerciseResult, Report
from distlab.labs import frame
from distlab.labs.debug.chosen import lab_called
from distlab.labs.debug.graded import graded
from distlab.labs.debug.observed import Seen, observe
from distlab.labs.debug.report import report
from distlab.labs.debug.sources import sources_of
from distlab.labs.index import SOLVED

PHASES = load_course().phases
SEED = 1  # of the pages


def page(phase: Phase) -> str:
    return (root() / phase.folder / "labs.md").read_text(encoding="utf-8")


def blocks(text: str, language: str) -> list[list[str]]:
    """The lines of each block of code in a language."""
    return [b.splitlines() for b in re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)]


def solved(phase: Phase) -> tuple[str, str]:
    """(the lab, its section)."""
    _, lab, text = re.split(r"^## Solved: (\S+)$", page(phase), flags=re.M)
    return lab, text


@pytest.fixture(scope="module")
def runs() -> dict[str, tuple[Seen, Seen]]:
    """The wrong and the right run of each solved lab."""
    found = {}
    for name in SOLVED:
        lab = lab_called(name)
        sources = sources_of(lab)
        found[name] = (observe(lab, sources.wrong, SEED), observe(lab, sources.right, SEED))
    return found


def test_each_page_solves_its_lab() -> None:
    assert tuple(solved(phase)[0] for phase in PHASES) == SOLVED
    for phase in PHASES:
        lab, text = solved(phase)
        assert [f"$ distlab lab debug {lab} --seed {SEED}"] in blocks(text, "text")


@pytest.mark.parametrize("phase", PHASES, ids=lambda phase: f"phase {phase.number}")
def test_what_a_page_quotes_stands_in_the_report(
    phase: Phase, runs: dict[str, tuple[Seen, Seen]]
) -> None:
    name, text = solved(phase)
    told = report(lab_called(name), *runs[name], []).splitlines()
    quoted = [b for b in blocks(text, "text") if not b[0].startswith("$")]
    assert quoted
    assert [line for block in quoted for line in block if line not in told] == []


@pytest.mark.parametrize("phase", PHASES, ids=lambda phase: f"phase {phase.number}")
def test_the_answer_of_a_page_is_right(phase: Phase) -> None:
    name, text = solved(phase)
    lab, (answer,) = lab_called(name), re.findall(r"\*\*The answer\.\*\*.*?(?=\n\n|\Z)", text, re.S)
    line = int(re.search(r"line is (\d+)", answer)[1])  # type: ignore[index]
    sources = sources_of(lab)
    assert any(spot.near(line) for spot in sources.spots[0])
    assert f"`{lab.causes[0]}`" in answer.replace("\n", " ")
    assert lab.ranks == ()
    assert '`ranks = "all"`' in answer.replace("\n", " ")
    wrong, right = sources.wrong.splitlines(), sources.right.splitlines()
    for changed in (row for block in blocks(text, "diff") for row in block):
        there, gone = (wrong, right) if changed[0] == "-" else (right, wrong)
        assert there.count(changed[1:]) > gone.count(changed[1:]), changed


def test_the_solved_hang_earns_all_points(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Graded as the page says; that the right program passes its checks is tested elsewhere."""
    monkeypatch.setattr(progress, "progress_file", lambda: tmp_path / "p" / "progress.json")
    lab, folder = lab_called("D1.07"), tmp_path / "D1.07"
    folder.mkdir()
    bug = f'[[bug]]\nranks = "all"\nfile = "{lab.file}"\nline = 130\ncause = "rank-alone"\n'
    (folder / "answer.toml").write_text(bug)
    (folder / "lab.json").write_text(json.dumps({"lab": lab.id, "seed": SEED}))
    (folder / lab.file).write_text(sources_of(lab).right)
    check = CheckResult("test_it[virtual]", "pass", title="It works", tier="virtual")
    passes = [ExerciseResult(e.id, e.title, e.points, "", checks=[check]) for e in lab.exercises]
    parts = graded(folder, lambda phase, request: Report(phase, "", 1, "cpu", passes))[2]
    file = io.StringIO()
    out = Console(file=file, width=100, color_system=None)
    assert frame.told(lab.id, parts, out, None, {}) == 0
    said = [line for line in file.getvalue().splitlines() if not line.startswith(" ")]
    (quoted,) = (b for b in blocks(page(PHASES[0]), "text") if "--grade" in b[0])
    assert quoted[1:] == said


def test_the_proofs_tell_right_from_wrong(runs: dict[str, tuple[Seen, Seen]]) -> None:
    """The functions of phase 3's page, on the runs of the lab that it solves."""
    names: dict[str, Any] = {}
    for block in blocks(page(PHASES[2]), "python"):
        exec("\n".join(block), names)
    wrong, right = runs["D3.02"]
    assert all(names["overlaps"](log, 5) for log in right.logs)
    assert not any(names["overlaps"](log, 5) for log in wrong.logs)
    assert names["same_order"](right.logs)
    short = dataclasses.replace(right.logs[-1], events=right.logs[-1].events[1:])
    assert not names["same_order"]([*right.logs[:-1], short])
