"""Labs of a class: which ones a student gets, what is handed out, and how answers are graded."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from distlab.classes import lab_grading, lab_packs, lab_rules
from distlab.classes.autograder import pack
from distlab.classes.config import ClassConfig, load_class
from distlab.classes.lab_rules import LabResult, labs_for, seed_of
from distlab.classes.submissions import Entry, Submission, unpack
from distlab.cli import main
from distlab.grading.wrong import all_mutants
from distlab.labs.review.chosen import all_reviews
from distlab.sandbox import Limits, obstacle

RULES = """
[labs]
points = { "D1 level 1" = 10, "R1.02" = 10, "T1.6" = 15, "P1.4" = 5, "PM01" = 5 }
released = ["1.3", "1.4", "1.5", "1.7"]

[students]
ids = ["ada"]
"""
LOOKS = """
import os, socket
def seen():
    try:
        socket.create_connection(("192.0.2.1", 80), 1)
    except OSError as error:
        return f"{os.path.exists(SECRET)} {error.strerror} {os.getuid() == 0}"
def test_it(impl, run):
    pass
raise RuntimeError(seen())
"""


def rules(folder: Path, text: str = RULES) -> ClassConfig:
    path = folder / "class.toml"
    path.write_text(text, encoding="utf-8")
    return load_class(path)


@pytest.fixture(scope="module")
def packs(tmp_path_factory: pytest.TempPathFactory) -> tuple[ClassConfig, Path]:
    """The rules, and the labs of ada."""
    home = tmp_path_factory.mktemp("class")
    config = rules(home)
    lab_packs.write_packs(config, home / "packs")
    return config, home / "packs"


# -- the rules ------------------------------------------------------------------------------------
def test_a_seed_deals_labs_of_one_difficulty(tmp_path: Path) -> None:
    config = rules(tmp_path)
    names = [f"student {n}" for n in range(20)]
    dealt = [labs_for(config.labs, config.released, config.seed, name) for name in names]
    got = [labs["D1 level 1"] for labs in dealt]
    assert len({lab.id for lab in got}) > 1
    assert {(lab.kind, lab.phase, lab.level) for lab in got} == {("debug", 1, 1)}
    assert dealt == [labs_for(config.labs, config.released, config.seed, n) for n in names]
    assert len({seed_of(1, name) for name in names}) == 20
    for lab in got:
        assert lab_rules.shows(lab) <= {*config.released}


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('"R1.02"', '"R1.99"', "there is no lab 'R1.99': name one, or \"D1 level 2\""),
        ('"R1.02"', '"R3.02"', "its labs show solutions of 3."),
        ('"1.4", ', "", "D1 level 1: its labs show solutions of 1."),
        ('"1.4", ', '"1.44", ', "there is no exercise '1.44'"),
        ("[labs]", "[labs]\nseed = 3", "seed"),
        ("= 15", "= -1", "expected a number of at least 0"),
    ],
)
def test_wrong_rules_get_one_line(tmp_path: Path, old: str, new: str, said: str) -> None:
    with pytest.raises(ValueError, match=r"class\.toml") as caught:
        rules(tmp_path, RULES.replace(old, new).replace('"D1 level 1" = 10, ', "") if "R" in old
              else RULES.replace(old, new))  # fmt: skip
    assert said in str(caught.value)


def test_places_that_grade_no_labs_say_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rules(tmp_path)
    with pytest.raises(ValueError, match="Gradescope grades exercises alone"):
        pack(tmp_path / "zip.zip", tmp_path / "class.toml")
    path = tmp_path / "nobody.toml"
    path.write_text(RULES.partition("[students]")[0])
    assert main(["class", "labs", str(tmp_path / "new"), "--config", str(path)]) == 2
    assert "name them in [students] ids" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


# -- what is handed out ---------------------------------------------------------------------------
def test_a_pack_has_the_labs_and_no_answers(packs: tuple[ClassConfig, Path]) -> None:
    config, folder = packs
    home = folder / "ada" / "my_labs"
    with zipfile.ZipFile(folder / "ada.zip") as archive:
        names = archive.namelist()
    assert {"my_labs/README.md", "my_labs/tests_for_1_6.py", "my_labs/P1.4.toml"} <= {*names}
    own = labs_for(config.labs, config.released, config.seed, "ada")
    assert (home / own["D1 level 1"].id / "REPORT.md").is_file()
    assert f"Your seed is {seed_of(1, 'ada')}." in (home / "README.md").read_text()
    texts = [
        p.read_text() for p in home.rglob("*") if p.suffix not in (".png", ".zip") and p.is_file()
    ]
    for mutant in all_mutants():
        assert not any(mutant.mistake in text or mutant.id in text for text in texts), mutant.id
    assert "R1.02" in own
    why = next(review.why for review in all_reviews() if review.id == "R1.02")
    assert not any(why in text for text in texts)


def test_nothing_is_handed_out_if_another_solution_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lab that is dealt although its exercise is not released does not leave this machine."""
    config = rules(tmp_path, RULES.replace('"D1 level 1" = 10, ', ""))
    blind = ClassConfig(**vars(config) | {"released": (), "labs": {"R1.02": 10}})
    monkeypatch.setattr(lab_rules, "choices", lambda name, *_: lab_rules.fitting(name))
    with pytest.raises(
        ValueError, match=r"shows a part of exercise 1\.4: .*nothing was handed out"
    ):
        lab_packs.write_packs(blind, tmp_path / "packs")
    assert [p.name for p in tmp_path.iterdir()] == ["class.toml"]


# -- what is handed in ----------------------------------------------------------------------------
def handed_in(folder: Path, to: Path, config: ClassConfig) -> Submission:
    return unpack(Entry("ada", folder, None, "ada"), to, config)


def answers(packs: tuple[ClassConfig, Path]) -> tuple[Path, str, str]:
    """Ada's folder, with right answers; the lab that she had to debug, and its file."""
    config, folder = packs
    home = folder / "ada" / "my_labs"
    lab = lab_grading.debug.read_mark(
        home / labs_for(config.labs, config.released, 1, "ada")["D1 level 1"].id
    )[0]
    sources = lab_grading.debug.sources_of(lab)
    ranks = list(lab.ranks) or "all"
    (home / lab.id / "answer.toml").write_text(
        f'[[bug]]\nranks = {ranks!r}\nfile = "{lab.file}"\n'
        f'line = {sources.spots[0][0].first}\ncause = "{lab.causes[0]}"\n'
    )
    (home / lab.id / lab.file).write_text(sources.right)
    (home / "R1.02" / "answer.toml").write_text('verdict = "approve"\n')
    (home / "PM01.toml").write_text('answer = "maybe"\n')
    (home / "P1.4.toml").write_text('bytes = "1 kB"\n')
    return folder / "ada", lab.id, lab.file


def test_answers_are_graded_with_the_student_s_seed_in_a_sandbox(
    packs: tuple[ClassConfig, Path], tmp_path: Path
) -> None:
    if obstacle():
        pytest.skip(f"no sandbox here: {obstacle()}")
    config, (folder, lab, _) = packs[0], answers(packs)
    secret = tmp_path / "secret"
    secret.write_text("of another student")
    tests = folder / "my_labs" / "tests_for_1_6.py"
    tests.write_text(LOOKS.replace("SECRET", repr(str(secret))))
    submission = handed_in(folder, tmp_path / "1", config)
    assert submission.problem == ""
    assert submission.phases == (), "labs alone are a submission"
    found = {each.name: each for each in lab_grading.grade_labs(submission, config, Limits())}
    debug = found["D1 level 1"]
    assert (debug.lab, debug.problem) == (lab, "")
    assert debug.share == pytest.approx(1), debug.parts
    assert found["R1.02"].share == -1, "a defect was merged"
    assert found["P1.4"].share == 0
    assert found["P1.4"].parts[0].startswith("bytes 0 of 1: off by a factor of ")
    assert found["PM01"].problem == "PM01.toml: answer: answer yes or no, not 'maybe'"
    said = found["T1.6"].problem
    assert "can't be imported" in said
    assert "False Network is unreachable False" in said, "it sees no other files and no network"


def test_a_mended_program_that_reads_the_solution_gets_nothing(
    packs: tuple[ClassConfig, Path], tmp_path: Path
) -> None:
    """The lab of somebody else is refused, too, and what is missing is named."""
    if obstacle():
        pytest.skip(f"no sandbox here: {obstacle()}")
    config, (folder, lab, file) = packs[0], answers(packs)
    program = folder / "my_labs" / lab / file
    steals = "import solutions.phase1_data_parallel.trainer\n"
    text = program.read_text()
    program.write_text(text.replace("import torch\n", f"{steals}import torch\n", 1))
    submission = handed_in(folder, tmp_path / "1", config)
    (mine,) = [r for r in grade_one(submission, config, "D1 level 1") if r.lab == lab]
    assert mine.share == pytest.approx(0.6), mine.parts
    (folder / "my_labs" / lab / "lab.json").write_text('{"lab": "D1.04", "seed": 1}')
    submission = handed_in(folder, tmp_path / "2", config)
    (other,) = grade_one(submission, config, "D1 level 1")
    assert other.problem == f"my_labs/{lab} holds lab D1.04: hand in the lab you were given"
    (folder / "my_labs" / lab / "answer.toml").unlink()
    submission = handed_in(folder, tmp_path / "3", config)
    (gone,) = grade_one(submission, config, "D1 level 1")
    assert gone.problem == f"nothing was handed in: there is no my_labs/{lab}/answer.toml"


def grade_one(submission: Submission, config: ClassConfig, name: str) -> tuple[LabResult, ...]:
    one = ClassConfig(**vars(config) | {"labs": {name: config.labs[name]}})
    return lab_grading.grade_labs(submission, one, Limits())


def test_answers_lie_where_students_put_them(tmp_path: Path) -> None:
    """A file of tests anywhere; a folder of labs in a course; two answers are refused."""
    config = ClassConfig()
    there = tmp_path / "in"
    (there / "course" / "my_labs" / "R1.02").mkdir(parents=True)
    (there / "course" / "my_labs" / "R1.02" / "answer.toml").write_text("")
    (there / "course" / "my_labs" / "R1.02" / "trainer.py").write_text("")
    (there / "tests_for_3_3.py").write_text("")
    found = handed_in(there, tmp_path / "1", config)
    names = {
        p.relative_to(found.folder).as_posix() for p in found.folder.rglob("*.*") if p.is_file()
    }
    assert names == {
        "my_labs/R1.02/answer.toml", "my_labs/R1.02/trainer.py", "my_labs/tests_for_3_3.py"
    }  # fmt: skip
    (there / "course" / "my_labs" / "tests_for_3_3.py").write_text("")
    again = handed_in(there, tmp_path / "2", config)
    assert again.problem.startswith("it is not clear which answer counts: ")
