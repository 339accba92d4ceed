"""What is handed in is read whatever its shape, and whatever somebody has put into it."""

from __future__ import annotations

import datetime
import io
import os
import stat
import subprocess
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from distlab.classes.config import Caps, ClassConfig
from distlab.classes.submissions import Entry, Submission, find_entries, unpack
from scripts import made_class

PHASE = "phase1_data_parallel"
FILE = f"{PHASE}/template_trainer.py"
TEXT = b"x = 1\n"
RULES = ClassConfig(caps=Caps(unpacked_mb=1, files=50))


def read(path: Path, rules: ClassConfig = RULES) -> Submission:
    found = unpack(Entry("ada", path), path.parent.parent / "unpacked", rules)
    assert "\n" not in found.problem
    return found


def files_of(found: Submission) -> dict[str, bytes]:
    there = (path for path in found.folder.rglob("*") if path.is_file())
    return {path.relative_to(found.folder).as_posix(): path.read_bytes() for path in there}


@pytest.fixture
def entries(tmp_path: Path) -> Path:
    (tmp_path / "entries").mkdir()
    return tmp_path / "entries"


def zipped(
    path: Path, files: dict[str, bytes], when: tuple[int, ...] = (2026, 3, 2, 8, 0, 0)
) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(zipfile.ZipInfo(name, when), data, zipfile.ZIP_DEFLATED)  # type: ignore[arg-type]
    return path


def tarred(path: Path, *members: tuple[tarfile.TarInfo, bytes]) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for info, data in members:
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


def foldered(path: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(data)
    return path


def git(folder: Path, *arguments: str) -> None:
    who = ("-c", "user.name=Ada", "-c", "user.email=ada@example.org")
    clean = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_COMMITTER_DATE": "2026-03-02T08:00:00+01:00"}
    command = ["git", "-C", str(folder), *who, *arguments]
    subprocess.run(command, check=True, capture_output=True, env=os.environ | clean)


def repository(path: Path, files: dict[str, bytes]) -> Path:
    foldered(path, files)
    git(path, "init", "-q", "-b", "main")
    git(path, "add", "-A")
    git(path, "commit", "-q", "-m", "done")
    return path


def test_every_shape_gives_the_same_files(entries: Path) -> None:
    """A class of all shapes: what comes out has the same hash as the same files in a folder."""
    made = made_class.made_class(entries / "class", 10, 6, exercises=["1.3"], kinds=["right"])
    assert {m.shape for m in made} == {*made_class.SHAPES}
    folder = entries / "class" / "submissions"
    found = [read(folder / m.entry, ClassConfig()) for m in made]
    assert [f.problem for f in found] == [""] * 10
    assert len({f.digest for f in found}) == 1
    assert {f.phases for f in found} == {(1,)}
    told = [f.submitted and f.submitted.replace(second=0) for f in found]  # a zip's are even
    dates = [datetime.datetime.fromisoformat(m.submitted).replace(second=0) for m in made]
    assert told == dates


def test_the_same_seed_makes_the_same_class(tmp_path: Path) -> None:
    for name in "ab":
        made_class.made_class(tmp_path / name, 4, 3, exercises=["1.7"], shapes=["zip", "tar"])
    files = [sorted(p for p in (tmp_path / n).rglob("*") if p.is_file()) for n in "ab"]
    assert len(files[0]) == 6
    assert [p.read_bytes() for p in files[0]] == [p.read_bytes() for p in files[1]]


DEPTHS = {
    "flat": ({"template_trainer.py": TEXT}, "lies in no phase's folder"),
    "at the top": ({FILE: TEXT}, ""),
    "four deep": ({f"a/b/c/{FILE}": TEXT}, ""),
    "with a Mac's shadow": ({FILE: TEXT, f"__MACOSX/{PHASE}/._template_trainer.py": b"\0"}, ""),
    "with the whole course": (
        {f"course/{FILE}": TEXT, f"course/solutions/{PHASE}/trainer.py": b"the answer"},
        "",
    ),
    "with an older copy inside": ({FILE: TEXT, f"old/{FILE}": b"older"}, ""),
}


@pytest.mark.parametrize(("files", "note"), DEPTHS.values(), ids=DEPTHS)
def test_files_are_found_where_they_lie(entries: Path, files: dict[str, bytes], note: str) -> None:
    for found in (
        read(zipped(entries / "ada.zip", files)),
        read(foldered(entries / "ada", files)),
    ):
        assert found.problem == ""
        assert files_of(found) == {FILE: TEXT}
        assert note in "".join(found.notes)
        assert bool(note) == bool(found.notes)


WRONG = {
    "too deep": ({f"a/b/c/d/{FILE}": TEXT}, "lies more than 4 folders deep"),
    "twice": ({f"a/{FILE}": TEXT, f"b/{FILE}": TEXT}, "there are several phase1_data_parallel"),
    "nothing of the course": ({"essay.txt": b"hello"}, "no Python file of the course"),
    "empty": ({}, "no Python file of the course"),
    "a giant": ({FILE: b"#" * (5 << 20)}, "unpacks to more than 1 MB|more than 4 MB"),
    "many files": ({f"{PHASE}/f{i}.py": b"" for i in range(60)}, "more than 50 files"),
    "not clear which": (
        {"a/template_trainer.py": TEXT, "b/template_trainer.py": TEXT},
        "not clear which file counts: a/template_trainer.py and b/template_trainer.py",
    ),
}


@pytest.mark.parametrize(("files", "problem"), WRONG.values(), ids=WRONG)
def test_what_can_not_be_graded_is_told_in_a_line(
    entries: Path, files: dict[str, bytes], problem: str
) -> None:
    (entries / "ada").mkdir()
    members = [(tarfile.TarInfo(name), data) for name, data in files.items()]
    for path in (
        zipped(entries / "ada.zip", files),
        tarred(entries / "ada.tar.gz", *members),
        foldered(entries / "ada", files),
    ):
        found = read(path)
        assert any(part in found.problem for part in problem.split("|")), found.problem
        assert files_of(found) == {}


def bomb(path: Path) -> Path:
    """A few kilobytes that unpack to 8 MB."""
    info = zipfile.ZipInfo("zeros")
    info.compress_type = zipfile.ZIP_DEFLATED
    with zipfile.ZipFile(path, "w") as archive, archive.open(info, "w") as file:
        for _ in range(8):
            file.write(bytes(1 << 20))
    assert path.stat().st_size < 100_000
    return path


def lying_bomb(path: Path) -> Path:
    """It says that its file is small."""
    zipped(path, {FILE: bytes(5 << 20)})
    data = path.read_bytes()
    path.write_bytes(data.replace((5 << 20).to_bytes(4, "little"), (10).to_bytes(4, "little")))
    return path


def tar_link(path: Path, kind: bytes, target: str) -> Path:
    info = tarfile.TarInfo(FILE)
    info.type, info.linkname = kind, target
    return tarred(path, (info, b""))


def zip_link(path: Path) -> Path:
    info = zipfile.ZipInfo(FILE)
    info.external_attr = (stat.S_IFLNK | 0o777) << 16
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(info, "/etc/passwd")
    return path


def folder_link(path: Path, target: Path) -> Path:
    foldered(path, {f"{PHASE}/template_evaluation.py": TEXT})
    (path / FILE).symlink_to(target)
    return path


def spoiled(path: Path, spoil: Callable[[Path], object]) -> Path:
    spoil(repository(path, {FILE: TEXT}))
    return path


def alternates(path: Path) -> None:
    (path / ".git" / "objects" / "info" / "alternates").write_text("/somebody/else/objects\n")


def elsewhere(path: Path) -> None:
    (path / ".git").rename(path.parent.parent / "moved")
    (path / ".git").symlink_to(path.parent.parent / "moved")


def committed_link(path: Path) -> None:
    (path / FILE).unlink()
    (path / FILE).symlink_to("/etc/passwd")
    git(path, "commit", "-q", "-am", "a link")


def pipe(path: Path) -> Path:
    foldered(path, {f"{PHASE}/x.py": TEXT})
    os.mkfifo(path / FILE)
    return path


def written(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def no_commit(path: Path) -> Path:
    path.mkdir()
    git(path, "init", "-q")
    return path


def cut(path: Path, count: int) -> Path:
    return written(path, path.read_bytes()[:-count])


def tar_of(path: Path, name: str, data: bytes = TEXT) -> Path:
    return tarred(path, (tarfile.TarInfo(name), data))


Make = Callable[[Path], Path]
HOSTILE: dict[str, tuple[str, Make, str]] = {
    "bomb": ("a.zip", bomb, "unpacks to more than 1 MB"),
    "lying bomb": ("a.zip", lying_bomb, "a.zip can't be read"),
    "tar bomb": (
        "a.tgz",
        lambda p: tar_of(p, "zeros", bytes(8 << 20)),
        "unpacks to more than 1 MB",
    ),
    "name out of a zip": ("a.zip", lambda p: zipped(p, {f"../{FILE}": TEXT}), "a name that leaves"),
    "name out of a tar": ("a.tgz", lambda p: tar_of(p, f"/{FILE}"), "a name that leaves"),
    "link in a zip": ("a.zip", zip_link, "is a link"),
    "link in a tar": ("a.tar", lambda p: tar_link(p, tarfile.SYMTYPE, "/etc/passwd"), "is a link"),
    "hard link": ("a.tar", lambda p: tar_link(p, tarfile.LNKTYPE, "x.py"), "is a link"),
    "device": ("a.tar", lambda p: tar_link(p, tarfile.CHRTYPE, ""), "no Python file"),
    "link out": ("a", lambda p: folder_link(p, Path("/etc/passwd")), "leaves the folder"),
    "neighbour": ("a", lambda p: folder_link(p, Path("../../b/x.py")), "leaves the folder"),
    "pipe": ("a", pipe, "is no file"),
    "no zip": ("a.zip", lambda p: written(p, b"hello"), "can't be read"),
    "cut zip": ("a.zip", lambda p: cut(zipped(p, {FILE: TEXT}), 30), "can't be read"),
    "cut tar": ("a.tgz", lambda p: cut(tar_of(p, FILE, os.urandom(9000)), 5000), "can't be read"),
    "other archive": ("a.rar", lambda p: written(p, b"Rar!"), "a folder, .zip"),
    "no commit": ("a", no_commit, "has no commit"),
    "objects of others": ("a", lambda p: spoiled(p, alternates), "from elsewhere"),
    "repository elsewhere": ("a", lambda p: spoiled(p, elsewhere), "elsewhere"),
    "committed link": ("a", lambda p: spoiled(p, committed_link), "is a link"),
}


@pytest.mark.parametrize(("name", "make", "problem"), HOSTILE.values(), ids=HOSTILE)
def test_what_is_hostile_is_told_in_a_line(
    entries: Path, name: str, make: Make, problem: str
) -> None:
    found = read(make(entries / name))
    assert problem in found.problem
    assert files_of(found) == {}


def test_a_repository_runs_none_of_its_programs(entries: Path) -> None:
    """Its settings name some for every occasion; its attributes ask for a filter."""
    path = repository(
        entries / "ada", {FILE: TEXT, ".gitattributes": b"*.py filter=evil diff=evil"}
    )
    ran = entries.parent / "ran"
    program = f"touch {ran}"
    keys = "core.fsmonitor core.pager core.sshCommand gpg.program diff.external diff.evil.textconv"
    for key in (*keys.split(), "filter.evil.smudge", "filter.evil.clean", "alias.cat-file"):
        git(path, "config", key, program)
    git(path, "config", "log.showSignature", "true")
    found = read(path)
    assert files_of(found) == {FILE: TEXT}
    assert found.submitted == datetime.datetime(2026, 3, 2, 7, tzinfo=datetime.timezone.utc)
    assert not ran.exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root can read everything")
@pytest.mark.parametrize("name", [FILE, PHASE])
def test_what_can_not_be_read_is_told(entries: Path, name: str) -> None:
    path = foldered(entries / "ada", {FILE: TEXT})
    (path / name).chmod(0)
    found = read(path)
    (path / name).chmod(0o700)
    assert found.problem == f"{name} can't be read: Permission denied"


CONTENTS = {
    "BOM": b"\xef\xbb\xbfx = 1\r\n",
    "latin-1": "# -*- coding: latin-1 -*-\nname = 'Müller'\n".encode("latin-1"),
    "NUL": b"x = 1\0\n",
    "UTF-16": "x = 1\n".encode("utf-16"),
}


@pytest.mark.parametrize("data", CONTENTS.values(), ids=CONTENTS)
def test_contents_are_taken_as_they_are(entries: Path, data: bytes) -> None:
    assert files_of(read(zipped(entries / "ada.zip", {FILE: data}))) == {FILE: data}


def test_odd_names_around_the_files_do_not_matter(entries: Path) -> None:
    path = zipped(entries / "ada.zip", {f"Uebung/{FILE}": TEXT, "Uebung/no module!.py": TEXT})
    path.write_bytes(path.read_bytes().replace(b"Uebung", b"\x9abung\xff"))  # cp437, no UTF-8
    assert files_of(read(path)) == {FILE: TEXT}
    name = os.fsdecode(b"M\xfcller\xff")
    assert files_of(read(foldered(entries / name, {f"{name}/{FILE}": TEXT}))) == {FILE: TEXT}


def test_when_it_was_handed_in(entries: Path) -> None:
    rules = ClassConfig(time_zone="UTC")
    newest = zipped(entries / "a.zip", {FILE: TEXT})
    assert read(newest, rules).submitted == datetime.datetime(
        2026, 3, 2, 8, tzinfo=datetime.timezone.utc
    )
    unknown = zipped(entries / "b.zip", {FILE: TEXT}, (1980, 1, 1, 0, 0, 0))
    assert read(unknown, rules).submitted is None
    folder = foldered(entries / "c", {FILE: TEXT, "essay.txt": TEXT})
    os.utime(folder / FILE, (1e9, 1e9))
    when = read(folder, rules).submitted
    assert when is not None
    assert when.timestamp() == 1e9, "of the graded files alone"


def test_a_hand_out_tells_its_version(entries: Path) -> None:
    manifest = b'{"course_version": "0.1.0", "files": {}}'
    files = {f"course/{FILE}": TEXT, "course/handout.json": manifest}
    assert read(zipped(entries / "a.zip", files)).version == "0.1.0"
    assert read(zipped(entries / "b.zip", files | {"course/handout.json": b"["})).version is None


def test_whose_they_are(entries: Path) -> None:
    """By name, by attempt, by a pattern, by the table; what is none is left out."""
    for name in ("ada.zip", "ada--2.zip", "grace.tar.gz", "=cmd.zip"):
        (entries / name).touch()
    (entries / "notes.txt").touch()
    (entries / ".hidden").mkdir()
    foldered(entries / "bob", {"1/a.zip": b"", "2/a.zip": b""})  # attempts, as a grade book exports
    foldered(entries / "team x", {FILE: TEXT})
    (entries / "submissions.csv").write_text(
        "\ufeffEntry,Student,submitted\ngrace.tar.gz,g.hopper,2026-03-16T20:00Z\nnone.zip,dan,\n"
    )
    found = [(e.student, e.label) for e in find_entries(entries, RULES)]
    odd = [student for student, place in found if place == "=cmd.zip"]
    assert odd[0].startswith("_cmd-")
    assert [f for f in found if f[1] != "=cmd.zip"] == [
        ("ada", "ada--2.zip"),
        ("ada", "ada.zip"),
        ("bob", "bob/1/a.zip"),
        ("bob", "bob/2/a.zip"),
        ("team x", "team x"),
        ("g.hopper", "grace.tar.gz"),
        ("dan", "none.zip"),
    ]
    by_pattern = ClassConfig(pattern="(?P<student>[a-z]).*")
    assert find_entries(entries, by_pattern)[-3].student == "t"
    assert read(find_entries(entries, RULES)[-1].path).problem == "none.zip is not there"


TABLES = {
    "student,submitted\n": "needs a column entry",
    "entry,submitted\nada.zip,yesterday\n": "line 2: submitted is 'yesterday'",
}


@pytest.mark.parametrize(("text", "message"), TABLES.items())
def test_a_wrong_table_is_told(entries: Path, text: str, message: str) -> None:
    (entries / "ada.zip").touch()
    (entries / "submissions.csv").write_text(text)
    with pytest.raises(ValueError, match=message):
        find_entries(entries, RULES)


def test_an_empty_folder_is_told(entries: Path) -> None:
    with pytest.raises(ValueError, match="there is no submission in it"):
        find_entries(entries, RULES)
    with pytest.raises(ValueError, match="no such folder"):
        find_entries(entries / "none", RULES)
