"""Submissions that attack get no point, change nothing, leave nothing behind, and get a verdict.

``quiet_*.py``, ``loud.py`` and ``forged.py`` hold the attacks. After each of them the grader grades
a right submission right.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import socket
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import forged
import loud
import pytest
from attacks import QUIET, Loud, quiet, told
from court import EXERCISE, RIGHT, Court

from distlab.course.catalogue import root
from distlab.grading import runners
from distlab.grading.verdicts import CheckResult
from distlab.host.processes import PATIENCE, children, descendants
from distlab.ranks import stacks
from distlab.sandbox import Limits, Sandbox, obstacle, place
from distlab.virtual import reap_children, reports

LOUD: dict[str, Loud] = loud.ATTACKS | forged.ATTACKS
LIMIT = 0.5  # seconds after which a run that hangs is ended
LIMITS = Limits(
    seconds=20,
    memory_bytes=1 << 30,
    processes=64,
    file_bytes=8 << 20,
    tmp_bytes=24 << 20,
    answer_bytes=32 << 20,
)
IPC_CREAT, IPC_RMID = 0o1000, 0
# what a probe may raise where it gets nothing; anything else is a mistake in the probe
REFUSALS = {"nothing", "PermissionError", "FileNotFoundError", "OSError", "ModuleNotFoundError"}
REFUSALS |= {"ConnectionRefusedError", "TimeoutError", "ValueError", "ProcessLookupError"}


@dataclass
class Outside:
    """What attacks look for beside the submission, and must not change."""

    folder: Path

    def seen(self) -> dict[str, tuple[int, bytes]]:
        """Every file below it: its mode and its content."""
        found = {}
        for path in sorted(self.folder.rglob("*")):
            mode = path.lstat().st_mode
            found[str(path)] = mode, path.read_bytes() if stat.S_ISREG(mode) else b""
        return found

    @property
    def submission(self) -> Path:
        """Of the attacker: what is in it is the test's own."""
        return self.folder.parent / "submission"


@pytest.fixture(scope="module")
def outside(tmp_path_factory: pytest.TempPathFactory) -> Outside:
    base = tmp_path_factory.mktemp("attacks")
    found = Outside(base / "outside")
    for folder in (found.folder / "neighbour", found.submission):
        folder.mkdir(parents=True)
    for each in (base, found.folder, *found.folder.iterdir()):
        each.chmod(0o755)
    (found.folder / "canary").write_text("a secret\n")
    (found.folder / "neighbour" / "trainer.py").write_text(RIGHT)
    (found.submission / "trainer.py").write_text("")
    return found


@pytest.fixture(scope="module")
def places(outside: Outside) -> Iterator[dict[str, Any]]:
    """What there is for quiet attacks to find: files, sockets, memory, descriptors, variables."""
    name = f"course-canary-{os.getpid()}"
    libc = ctypes.CDLL(None, use_errno=True)
    with contextlib.ExitStack() as stack:
        port = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        for address in ("\0" + name, str(outside.folder / "socket")):
            wire = stack.enter_context(socket.socket(socket.AF_UNIX))
            wire.bind(address)
            wire.listen()
        held = stack.enter_context(open(outside.folder / "canary"))
        os.set_inheritable(held.fileno(), True)
        shared = Path("/dev/shm") / name
        shared.write_text("a secret\n")
        stack.callback(shared.unlink)
        key = 0x5EC0 + os.getpid()
        segment = libc.shmget(key, 4096, IPC_CREAT | 0o666)
        stack.callback(libc.shmctl, segment, IPC_RMID, None)
        stack.enter_context(pytest.MonkeyPatch.context()).setenv("COURSE_CANARY", "a secret")
        yield {
            "root": str(root()),
            "outside": str(outside.folder),
            "neighbour": str(outside.folder / "neighbour"),
            "name": name,
            "key": key,
            "port": port.getsockname()[1],
            "tmp": LIMITS.tmp_bytes,
            "file": LIMITS.file_bytes,
            "memory": LIMITS.memory_bytes,
            "processes": LIMITS.processes,
            "open": 2000,
        }


def course_hash() -> str:
    """Of what is graded by, and with."""
    found = hashlib.sha256((root() / "course.toml").read_bytes())
    for name in ("distlab", "given", "solutions", "tests", *{EXERCISE.phase.folder}):
        for path in sorted((root() / name).rglob("*.py")):
            found.update(str(path).encode() + path.read_bytes())
    return found.hexdigest()


@pytest.fixture(scope="module")
def court(outside: Outside, places: dict[str, Any]) -> Iterator[Court]:
    """One sandbox for all attacks; the course is the same afterwards, and no process is left."""
    if obstacle():
        pytest.skip(f"no sandbox can be made here: {obstacle()}")
    before, processes = course_hash(), children()
    modules = ("distlab.grading.implementation", "torch._dynamo")
    with Sandbox(root(), outside.submission, LIMITS, modules) as box:
        yield Court(outside.submission, box, LIMITS)
    reap_children()
    assert [pid for pid in children() - processes if not _ends(pid)] == []
    assert course_hash() == before


def _ends(pid: int) -> bool:
    """A child that was killed may take a moment."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        if os.waitpid(pid, os.WNOHANG)[0]:
            return True
        time.sleep(0.01)
    return False


@pytest.fixture
def nothing_changes(outside: Outside, places: dict[str, Any]) -> Iterator[None]:
    before, names = outside.seen(), set(os.listdir("/dev/shm"))
    yield
    assert outside.seen() == before
    assert places["name"] in names & set(os.listdir("/dev/shm"))


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """What hangs need not hang for long."""
    monkeypatch.setattr(runners, "RUN_LIMIT", LIMIT)
    monkeypatch.setattr(runners, "CHECK_LIMIT", LIMIT)
    monkeypatch.setattr(stacks, "ANSWER", 0.1)
    monkeypatch.setattr(reports, "GRACE", 0.5)
    monkeypatch.setattr(place, "MORE_TIME", 10.0)


def solution_lines() -> list[str]:
    """Lines that stand in the solution of the exercise only."""
    whole = EXERCISE.solution_path.read_text(encoding="utf-8")
    region = whole.partition(f"exercise {EXERCISE.id}: start")[2].partition("# --- exercise")[0]
    return [text for line in region.splitlines() if len(text := line.strip()) > 20]


def expect_no_points(found: CheckResult) -> None:
    """A verdict other than pass, that tells nothing of the solution and harms no terminal."""
    assert found.verdict in ("fail", "error", "crash", "hang"), found
    shown = "\n".join([found.message, found.line, *found.printed.values()])
    assert [line for line in solution_lines() if line in shown] == []
    assert "\x1b" not in found.message + found.line


@pytest.mark.parametrize("when", ["imported", "called"])
@pytest.mark.parametrize("name", QUIET)
def test_quiet_attacks_get_nothing(
    name: str, when: str, court: Court, places: dict[str, Any], nothing_changes: None
) -> None:
    """Each probe of a submission was tried, and was refused or found nothing."""
    alone = when == "imported"
    text = quiet(name, places | {"alone": alone}, when)
    found = court.judge(text, imported=alone, guarded=False)
    expect_no_points(found)
    outcomes = told(found.message)
    assert {n: got for n, got in outcomes.items() if got not in REFUSALS} == {}
    assert len(outcomes) >= 8


def test_nothing_is_kept_for_the_next_run(
    court: Court, places: dict[str, Any], nothing_changes: None
) -> None:
    """Files, memory of the system, daemons and their sockets: a second run finds none of it."""
    kept = court.judge(quiet("keeps", places, "imported"), imported=True)
    assert len(told(kept.message)) >= 5
    looked = told(
        court.judge(quiet("keeps", places | {"looks": 1}, "imported"), imported=True).message
    )
    assert {n: got for n, got in looked.items() if got not in REFUSALS} == {}
    assert len(looked) >= 8


# what the same probes get where there are no walls: they can
FOUND = {
    "reads": "solution's file; check's file; wrong implementations; references; "
    "import of the solution; import of the check; import through the toolkit; path by path object; "
    "loaded modules; whole file tree; file outside; neighbour's submission; "
    "shared memory of the system; shared memory of System V",
    "reaches": "parent's environment; parent's descriptors; canary in an environment; "
    "port of the host's loopback; abstract socket; socket in a file",
}


@pytest.mark.parametrize("name", FOUND)
def test_quiet_attacks_find_what_is_there(
    name: str, outside: Outside, places: dict[str, Any], nothing_changes: None
) -> None:
    """Without a sandbox and without the guard against shortcuts: a probe that could find nothing
    would prove nothing."""
    only = FOUND[name].split("; ")
    text = quiet(name, places | {"alone": False, "only": only}, "called")
    outcomes = told(Court(outside.submission).judge(text, guarded=False).message)
    assert {n: got for n, got in outcomes.items() if not got.startswith("REACHED")} == {}
    assert len(outcomes) == len(only)


@pytest.mark.parametrize("name", LOUD)
def test_loud_attacks_fail(
    name: str, court: Court, outside: Outside, nothing_changes: None, short: None
) -> None:
    """A verdict, no point; then a right submission passes in a sandbox where nothing is left."""
    attack = LOUD[name]
    expect_no_points(court.judge(attack.text(outside.folder), attack.tier, imported=attack.alone))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runners, "RUN_LIMIT", 10.0)
        patch.setattr(runners, "CHECK_LIMIT", 60.0)
        after = court.judge(RIGHT)
    assert after.verdict == "pass", after
    assert len(descendants(os.getpid())) <= len(children()) + 1  # bubblewrap, and the agent


# but for those that tests/distlab/hostile_files.py has already
ELSEWHERE = {"stops itself", "kills itself", "leaves with 0", "closes all descriptors"}
ELSEWHERE |= {"becomes a program", "daemon", "daemon that respawns", "goes on as the rank"}
PROMISED = [n for n, attack in LOUD.items() if attack.promised and n not in ELSEWHERE]


@pytest.mark.parametrize("name", PROMISED)
def test_the_grader_without_a_sandbox_stands_it(
    name: str, outside: Outside, nothing_changes: None, short: None
) -> None:
    """What README promises of the grader that learners run themselves."""
    attack, here = LOUD[name], Court(outside.submission)
    expect_no_points(here.judge(attack.text(outside.folder), attack.tier, imported=attack.alone))
