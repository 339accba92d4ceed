"""Gradescope's autograder as Gradescope runs it: by its scripts, as root, on a submission."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import jsonschema
import pytest

from distlab.classes import autograder, gradescope
from distlab.course import templates
from distlab.course.catalogue import load_course
from distlab.sandbox import Limits, container
from distlab.sandbox.agent import main as agent

SCHEMA = json.loads((Path(__file__).parent / "gradescope.schema.json").read_text("utf-8"))
RULES = '[exercises]\nonly = ["1.4"]\n'
STUDENT = {"users": [{"email": "ada@example.com"}], "created_at": "2026-03-16T20:00:00+01:00"}
# another /root for these processes alone: where Python lies in it, no other user can start it
OPEN_ROOT = """
set -e
mkdir "$0/python"; mount --bind "$1" "$0/python"
mount -t tmpfs -o mode=755 none /root; mkdir -p "$1"; mount --bind "$0/python" "$1"
shift; exec "$@"
"""
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, as Gradescope gives it")


def closed_python() -> str:
    """The folder of Python in /root, where other users have no way; "" if it lies elsewhere."""
    home = Path(sys.base_prefix).resolve()
    return str(home) if home.is_relative_to("/root") else ""


@pytest.fixture
def base() -> Iterator[Path]:
    """/autograder of a container, after setup.sh: what that would install is here already."""
    folder = Path(tempfile.mkdtemp(prefix="autograder-", dir="/tmp"))
    folder.chmod(0o755)
    rules = folder / "class.toml"
    rules.write_text(RULES)
    autograder.pack(folder / "out.zip", rules)
    source, programs = folder / "source", folder / "programs"
    with zipfile.ZipFile(folder / "out.zip") as archive:
        for info in archive.infolist():
            Path(archive.extract(info, source)).chmod(info.external_attr >> 16)
    python = source / "course" / ".venv" / "bin" / "python"
    for path, text in (
        (python, f'exec {sys.executable} "$@"'),
        (programs / "apt-get", "exit 0"),
        (programs / "python3", "exit 0"),
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
    path = f"{programs}:{os.environ['PATH']}"
    subprocess.run(["bash", source / "setup.sh"], check=True, env={**os.environ, "PATH": path})
    shutil.copy(source / "run_autograder", folder / "run_autograder")
    (folder / "submission_metadata.json").write_text(json.dumps(STUDENT))
    yield folder
    shutil.rmtree(folder)


def hand_in(base: Path, code: str) -> None:
    """A submission: phase 1's templates, with ``code`` for exercise 1.4."""
    for exercise in templates.files_of(load_course()):
        if exercise.phase.number == 1:
            path = base / "submission" / exercise.template_path.name
            path.parent.mkdir(exist_ok=True)
            blank = 'raise NotImplementedError("exercise 1.4")'
            path.write_text(templates.template_of(exercise).replace(blank, code))


def run_autograder(base: Path) -> dict:
    """results.json; what it printed is shown if there is none."""
    command = [str(base / "run_autograder")]
    inside = closed_python()
    if inside:
        command = ["unshare", "--mount", "sh", "-c", OPEN_ROOT, str(base), inside, *command]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "unshare failed" in done.stderr or "permission denied" in done.stderr:
        pytest.skip("Python lies in /root, and no mount namespace can be had to show it")
    result = base / "results" / "results.json"
    assert result.is_file(), done.stdout + done.stderr
    assert stat.S_IMODE(result.stat().st_mode) == 0o600
    found = json.loads(result.read_text("utf-8"))
    jsonschema.Draft202012Validator(SCHEMA).validate(found)
    assert found["output"] != gradescope.BROKEN, done.stdout + done.stderr
    return found


# What a shell gets hold of: what Python opens, and programs that it names, are called a shortcut.
# It starts no program, because a check has 10 seconds.
LOOK = """
cd {base}
course=source/course
for name in source/class.toml source/run_autograder submission_metadata.json results/results.json \\
    $course/solutions/phase1_data_parallel/trainer.py $course/tests/phase1/test_trainer.py
do
    true 2> /dev/null < "$name" && echo "read $name"
    true 2> /dev/null >> "$name" && echo "write $name"
done
for folder in submission results source $course/solutions $course/tests; do
    for inside in "$folder"/*; do [ -e "$inside" ] && echo "list $inside"; done
    true 2> /dev/null > "$folder/mine" && echo "write in $folder"
done
echo looked
"""
ATTACK = """
    import os, subprocess
    open("/tmp/left-behind-{mark}", "w").write({look!r})
    asked = ["/bin/sh", "/tmp/left-behind-{mark}"]
    got = subprocess.run(asked, capture_output=True, text=True).stdout.splitlines()
    for number in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.stat("/proc/" + number).st_uid not in (os.getuid(), 0):
                continue
            mine = "Uid:\\t%d" % os.getuid() in open("/proc/" + number + "/status").read()
            if not mine:
                os.kill(int(number), 0)
                got.append("signal " + number)
        except OSError:
            pass
    try:
        os.unlink(__file__)
        got.append("remove the file")
    except OSError:
        pass
    subprocess.Popen(["sleep", "1000"], start_new_session=True)
    raise ValueError(f"nobody: {{os.getuid() > 10**6}}, got {{got}}")
"""


@needs_root
def test_learner_code_reads_and_writes_nothing_of_the_grader(base: Path) -> None:
    mark = base.name
    hand_in(base, ATTACK.format(look=LOOK.format(base=base), mark=mark).strip())
    found = run_autograder(base)
    (test,) = found["tests"]
    assert (test["number"], test["status"], found["score"]) == ("1.4", "failed", 0)
    assert "ValueError: nobody: True, got ['looked']" in test["output"], test["output"]
    assert not Path(f"/tmp/left-behind-{mark}").exists(), "its files are gone"
    mine = [p for p in Path("/proc").glob("[0-9]*/cmdline") if b"sleep\x001000" in text_of(p)]
    owners = {os.stat(path.parent).st_uid for path in mine}
    assert not [uid for uid in owners if uid > 1 << 30], "its processes have ended"
    assert not list((base / "source").glob("grading-*"))


def text_of(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # it has just ended
        return b""


def test_a_container_that_is_set_up_wrong_is_refused(tmp_path: Path) -> None:
    """Answers that are open to everybody, a toolkit that is not; one line says what to do."""
    course = Path(tempfile.mkdtemp(prefix="course-", dir="/tmp"))
    try:
        course.chmod(0o755)
        for name in ("distlab", "given", "clusters", "solutions", "tests"):
            (course / name).mkdir(mode=0o755)
        (course / "course.toml").touch(0o644)
        said = container.obstacle(course)
        if os.geteuid() != 0:
            assert said == "only root with ids of other users can run code as another user"
            return
        where = f"{course}/solutions"
        assert said == f"every user may read {where}: `chmod -R go-rwx {where}`"
        (course / "solutions").chmod(0o700)
        assert "tests: `chmod" in container.obstacle(course)
        (course / "tests").chmod(0o700)
        (course / "given").chmod(0o700)
        assert container.obstacle(course).startswith(f"other users may not use {course}/given")
    finally:
        shutil.rmtree(course)


@needs_root
def test_a_submission_is_open_to_its_own_user_alone(tmp_path: Path) -> None:
    folder = tmp_path / "ada" / "phase1"
    folder.mkdir(parents=True)
    (folder / "a.py").touch()
    (folder / "link.py").symlink_to("/etc/passwd")
    before = os.stat("/etc/passwd")
    user = container.user()
    with container.open_to(user, folder):
        modes = [
            (p.stat().st_gid, stat.S_IMODE(p.stat().st_mode)) for p in (folder, folder / "a.py")
        ]
        assert modes == [(user, 0o750), (user, 0o640)]
        assert stat.S_IMODE((tmp_path / "ada").stat().st_mode) & 0o001
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert os.stat("/etc/passwd") == before


def test_the_agent_kills_nobody_outside_of_a_sandbox() -> None:
    """It kills all processes that it can, so a user with others, or root, is refused."""
    for limits in (Limits(), Limits(container=True)):
        with pytest.raises(SystemExit, match="runs in a sandbox only"):
            agent(json.dumps({"user": None, "limits": vars(limits)}))


def test_whose_submission_it_is(tmp_path: Path) -> None:
    path = tmp_path / "submission_metadata.json"
    assert autograder._whose(path) == ("student", None), "where it is tried out"
    path.write_text(json.dumps(STUDENT | {"users": [{"email": "b@x"}, {"email": "a@x"}]}))
    student, when = autograder._whose(path)
    assert student.startswith("a@x")
    assert "b@x" in student
    assert when is not None
    assert when.isoformat() == STUDENT["created_at"]
    path.write_text('{"users": 3}')
    assert autograder._whose(path) == ("student", None)


def test_a_broken_autograder_is_no_fault_of_the_student(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(base: Path) -> dict:
        inside = json.loads((base / "results" / "results.json").read_text("utf-8"))
        assert inside["output"] == gradescope.NO_RESULT, "there before anything else"
        raise OSError("no checks here")

    monkeypatch.setattr(autograder, "_graded", broken)
    before = os.umask(0o022)
    try:
        assert autograder.main([str(tmp_path)]) == 0
    finally:
        os.umask(before)
    found = json.loads((tmp_path / "results" / "results.json").read_text("utf-8"))
    assert found["output"] == gradescope.BROKEN
    assert "no checks here" in capsys.readouterr().err, "for the instructor"
