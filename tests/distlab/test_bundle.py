"""``distlab bundle``: a verdict packed here is the same elsewhere, and nothing else goes along."""

from __future__ import annotations

import getpass
import json
import os
import shutil
import sys
import zipfile
from pathlib import Path

import forked_commands
import pytest

from distlab.classes import bundle
from distlab.course import templates
from distlab.course.catalogue import load_course, root
from distlab.host import zips

EXERCISE = load_course().exercise("1.4")
WRONG = "print('at', __file__)\n    raise ValueError(__file__)"


def command(*arguments: str | Path) -> tuple[int, str, str]:
    """Exit status, output and errors of ``distlab bundle …``."""
    line = [sys.executable, "-m", "distlab", "bundle", *map(str, arguments)]
    done = forked_commands.run(line)
    return done.returncode, done.stdout, done.stderr


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundle of a wrong exercise, in a home whose name tells of its user."""
    home = tmp_path_factory.mktemp("homes") / f"home-of-{getpass.getuser()}" / getpass.getuser()
    work = home / "course"
    work.mkdir(parents=True)
    for exercise in templates.files_of(load_course()):
        if exercise.phase.number == 1:
            text = templates.template_of(exercise)
            text = text.replace('raise NotImplementedError("exercise 1.4")', WRONG)
            (work / exercise.template_path.name).write_text(text)
    to = work / "b.zip"
    status, out, errors = command("1.4", "--impl", work, "--seed", "77", "--out", to)
    assert status == 0, errors
    assert "1.4 Gradient averaging: fail, seed 77" in out
    return to


def test_a_bundle_holds_the_work_and_no_answer(packed: Path) -> None:
    found = bundle.opened(packed)
    assert found.manifest["request"]["seed"] == found.report["seed"] == 77
    assert found.manifest["verdict"] == "fail"
    assert {*found.files} == {
        f"{e.phase.folder}/{e.template_path.name}"
        for e in templates.files_of(load_course())
        if e.phase.number == 1
    }
    text = b"\n".join(zips.read(packed, 1 << 20).values()).decode()
    solution, shown = EXERCISE.solution_path.read_text("utf-8"), templates.template_of(EXERCISE)
    answers = {*map(str.strip, solution.splitlines())} - {*map(str.strip, shown.splitlines())}
    assert [line for line in answers if len(line) > 30], "there are lines to look for"
    assert not [line for line in answers if len(line) > 30 and line in text]


def test_a_bundle_tells_nothing_of_the_machine(packed: Path) -> None:
    inside = zips.read(packed, 1 << 20)
    told = "\n".join(inside[n].decode() for n in ("manifest.json", "report.json", "report.txt"))
    assert "ValueError" in told, "the learner's own message, which names the file"
    for secret in (str(packed.parent), str(root()), str(Path.home()), sys.prefix):
        assert secret not in told
    assert f"/{getpass.getuser()}/" not in told


def test_opened_elsewhere_it_has_the_same_verdict(packed: Path, tmp_path: Path) -> None:
    """And another one if the file is another, told check by check."""
    elsewhere = shutil.copy(packed, tmp_path / "elsewhere.zip")
    status, out, errors = command("--open", elsewhere, "--unsafe")
    assert status == 0, out + errors
    assert "the same verdict: fail, check by check" in out
    data = json.loads(zips.read(packed, 1 << 20)["report.json"])
    data["exercises"][0]["checks"][0]["verdict"] = "pass"
    name = data["exercises"][0]["checks"][0]["name"]
    rewritten(packed, elsewhere, {"report.json": json.dumps(data).encode()})
    found = bundle.opened(elsewhere)
    here = json.loads(zips.read(packed, 1 << 20)["report.json"])
    assert bundle.differences(found.report, here) == [f"{name}: pass there, fail here"]
    data["exercises"][0]["checks"][0]["verdict"] = "needs"
    assert not bundle.differences(data, here), "what one machine lacks is no difference"


def rewritten(old: Path, new: Path, files: dict[str, bytes]) -> None:
    zips.write(new, zips.read(old, 1 << 20) | files)


DAMAGES = {
    "not a zip": (None, "no whole zip file"),
    "changed": ({"phase1_data_parallel/template_trainer.py": b"x = 1\n"}, "was changed after"),
    "a stranger": ({"../evil.py": b""}, "does not belong into a bundle"),
    "no manifest": ({"manifest.json": b"[]"}, "is no bundle"),
    "newer": ({"manifest.json": b'{"schema": 2}'}, "its schema is 2"),
    "a bomb": ({"report.txt": bytes(bundle.MOST + 1)}, "bytes are packed in it"),
}


@pytest.mark.parametrize(("files", "said"), DAMAGES.values(), ids=DAMAGES)
def test_what_is_no_bundle_gets_one_line(
    packed: Path, tmp_path: Path, files: dict[str, bytes] | None, said: str
) -> None:
    path = tmp_path / "odd.zip"
    if files is None:
        path.write_bytes(packed.read_bytes()[:-30])
    else:
        rewritten(packed, path, files)
    with pytest.raises(ValueError, match=said) as caught:
        bundle.opened(path)
    assert "\n" not in str(caught.value)


def test_a_manifest_can_not_name_files_elsewhere(packed: Path, tmp_path: Path) -> None:
    manifest = json.loads(zips.read(packed, 1 << 20)["manifest.json"])
    manifest["files"] = {"/etc/evil.py": "00"}
    odd = {"manifest.json": json.dumps(manifest).encode(), "/etc/evil.py": b""}
    rewritten(packed, tmp_path / "odd.zip", odd)
    with pytest.raises(ValueError, match="does not belong into a bundle"):
        bundle.opened(tmp_path / "odd.zip")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "bundle which exercise?"),
        (["1.4", "--impl", "solutions"], "a bundle holds a learner's work"),
        (["--open", "nowhere.zip"], "nowhere.zip"),
    ],
)
def test_bad_calls_get_one_line(arguments: list[str], said: str) -> None:
    status, _, errors = command(*arguments)
    assert (status, len(errors.strip().splitlines())) == (2, 1), errors
    assert said in errors
    assert not Path("bundle-1.4.zip").exists()


def test_a_zip_is_the_same_bytes_and_never_half(tmp_path: Path) -> None:
    first, second = tmp_path / "1.zip", tmp_path / "2.zip"
    zips.write(first, {"b": b"2", "run": b"1"}, ["run"])
    zips.write(second, {"run": b"1", "b": b"2"}, ["run"])
    assert first.read_bytes() == second.read_bytes()
    modes = {i.filename: i.external_attr >> 16 for i in zipfile.ZipFile(first).infolist()}
    assert modes == {"b": 0o644, "run": 0o755}
    with pytest.raises(TypeError):
        zips.write(first, {"b": b"3", "a": None})  # type: ignore[dict-item]
    assert zips.read(first, 99) == {"b": b"2", "run": b"1"}
    assert sorted(os.listdir(tmp_path)) == ["1.zip", "2.zip"]
    with pytest.raises(ValueError, match="does not exist"):
        zips.write(tmp_path / "none" / "3.zip", {})
