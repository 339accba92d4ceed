"""Ranks in a sandbox: the same results and failures as outside, and nothing else to be had."""

from __future__ import annotations

import errno
import importlib.util
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from distlab.course.catalogue import root
from distlab.grading.runners import HERE
from distlab.host.processes import descendants
from distlab.observe.log import Event
from distlab.ranks import RankFailure, RankResults
from distlab.sandbox import Sandbox, obstacle
from distlab.sandbox.cgroups import Group
from tests.sandbox.small import LEARNER, SMALL

ALONE: dict[str, Any] = {"process_group": False, "ledger": False}


@pytest.fixture(scope="module")
def submission(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A learner's folder of phase 1, in which no exercise is solved."""
    folder = tmp_path_factory.mktemp("submission")
    (folder / "learner.py").write_text(LEARNER, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def sandbox(submission: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sandbox]:
    """One for all tests: each leaves it as it was."""
    if obstacle():
        pytest.skip(f"no sandbox can be made here: {obstacle()}")
    shared = tmp_path_factory.mktemp("shared")
    with Sandbox(root(), submission, SMALL, shared=shared) as place:
        yield place


def found(results: RankResults) -> list[object]:
    """All that checks look at, but for times of real ranks."""
    events = [
        [vars(e) | {"start": 0, "end": e.end is not None, "line": lines(e)} for e in log.events]
        for log in results.logs
    ]
    return [[value.tolist() for value in results], results.output, events]


def lines(event: Event) -> str:
    """Of files beside the checks' own only the name is told."""
    return os.path.basename(event.line)


def failed(failure: RankFailure) -> list[object]:
    """All that is told of a failure."""
    reports = [(r.rank, r.state, r.line, r.output) for r in failure.reports]
    told = failure.message, failure.kind, failure.cause, failure.rank, failure.line
    return [*told, failure.interleaving, reports]


def summed(ctx, factor):
    x = torch.full((3,), float(ctx.rank + 1))
    with ctx.region("here"):
        dist.all_reduce(x)
    print("rank", ctx.rank)
    return x * factor


def test_results_are_those_of_this_machine(sandbox: Sandbox) -> None:
    """Values, logs and output of real ranks; clocks and links of virtual ones."""
    here, inside = (place.run_ranks(summed, 2, 5, seed=3) for place in (HERE, sandbox))
    assert found(here) == found(inside)
    assert lines(here.logs[0].events[0]) == inside.logs[0].events[0].line != ""
    options: dict[str, Any] = {"seed": 1, "seeds": 2, "compute": "none"}
    both = [place.run_worlds(summed, (2, 3), 5, **options) for place in (HERE, sandbox)]
    for one, other in zip(*both, strict=True):
        assert found(one) == found(other)
        assert (one.clocks, one.traffic) == (other.clocks, other.traffic)
        assert one.host_reads == other.host_reads


def test_failures_are_those_of_this_machine(sandbox: Sandbox, submission: Path) -> None:
    """A raise, a deadlock, a mismatch and a death: message, cause, rank, line, where ranks were."""
    path = submission / "learner.py"

    def body(ctx, what):
        spec = importlib.util.spec_from_file_location("learner", path)
        learner = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(learner)
        if what == "raise" and ctx.rank:
            learner.divide(1)
        elif what == "deadlock" and not ctx.rank:
            learner.send_to_nobody(torch.ones(1))
        elif what == "mismatch":
            learner.sum_all(torch.ones(1 + ctx.rank))
        elif what == "death" and ctx.rank:
            os._exit(3)

    for what, kind in (("raise", "exception"), ("deadlock", "hang"), ("mismatch", "mismatch")):
        told = []
        for place in (HERE, sandbox):
            with pytest.raises(RankFailure) as caught:
                place.run_worlds(body, (2,), what, learner_files=(str(path),))
            told.append(failed(caught.value))
        assert told[0] == told[1]
        assert told[0][1] == kind
    with pytest.raises(RankFailure, match="exit status 3"):
        sandbox.run_ranks(body, 2, "death")


def test_what_is_not_there(sandbox: Sandbox) -> None:
    """No answers, no checks, no other files, no network, no privileges, no way to the agent."""

    def refused(pid):
        found = []
        for name in ("mem", "environ", "fd/0", "maps"):
            try:
                os.close(os.open(f"/proc/{pid}/{name}", os.O_RDONLY))
            except OSError as error:
                found.append(error.errno)
        return found

    def look(ctx):
        status = dict(
            line.split(":\t") for line in Path("/proc/self/status").read_text().splitlines()
        )
        files = [Path("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]
        opened = [os.readlink(path) for path in files if os.path.lexists(path)]
        return {
            "course": sorted(os.listdir(course)),
            "writes": [p for p in (course, "/", "/etc", "/usr") if os.access(p, os.W_OK)],
            "home": [p for p in ("/home", "/var", "/root/.ssh", "/run") if os.path.exists(p)],
            "network": [name for _, name in socket.if_nameindex()],
            "pids": [int(name) for name in os.listdir("/proc") if name.isdigit()],
            "status": {
                k: status.get(k) for k in ("CapInh", "CapPrm", "CapEff", "CapAmb", "NoNewPrivs")
            },
            "seccomp": status.get("Seccomp"),
            "user": os.getuid(),
            "imports": [p for p in sys.path if os.access(p or ".", os.W_OK)],
            "here": os.access(".", os.W_OK),
            "environment": sorted(os.environ),
            "agent": refused(os.getppid()),
            "first": refused(1),
            "sockets": [name for name in opened if name.startswith("socket:")],
        }

    course = str(root())
    seen = sandbox.run_ranks(look, 1, **ALONE)[0]
    parts = {"clusters", "course.toml", "distlab", "given", ".venv"}
    assert {*seen["course"]} <= parts
    assert seen["writes"] == []
    assert seen["home"] == []
    assert seen["network"] == ["lo"]
    assert max(seen["pids"]) < 1000
    assert len(seen["pids"]) == 2  # the agent, the rank
    assert seen["first"] == [errno.EACCES] * 4
    none = "0" * 16
    held = dict.fromkeys(("CapInh", "CapPrm", "CapEff", "CapAmb"), none)
    assert seen["status"] == held | {"NoNewPrivs": "1"}
    if importlib.util.find_spec("pyseccomp"):
        assert seen["seccomp"] == "2"
    assert seen["user"] != os.getuid()
    assert not {"LAUNCH_PYTHON", "PYTEST_CURRENT_TEST"} & {*seen["environment"]}
    assert seen["agent"] == [errno.EACCES] * 4
    assert seen["sockets"] == []
    assert seen["imports"] == []  # the agent would import what a rank has put there
    assert seen["here"]


def test_nothing_is_left_to_the_next_run(sandbox: Sandbox) -> None:
    """Daemons, files and folders: also deep ones, and those that can't be entered."""

    def leave(ctx):
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                signal.pause()
            os._exit(0)
        Path("/dev/shm/note").write_text("secret")
        os.makedirs("/tmp/closed/inside")
        os.chmod("/tmp/closed", 0)
        os.chdir("/tmp")
        for _ in range(60):
            os.mkdir("d")
            os.chdir("d")

    def look(ctx):
        pids = [name for name in os.listdir("/proc") if name.isdigit()]
        return [len(pids), {"closed", "d"} & {*os.listdir("/tmp")}, os.listdir("/dev/shm")]

    sandbox.run_ranks(leave, 1, **ALONE)
    assert sandbox._agent is not None  # it could tidy up
    assert sandbox.run_ranks(look, 1, **ALONE)[0] == [2, set(), []]


def test_files_of_checks_go_in_and_out(sandbox: Sandbox) -> None:
    """A folder of the check's own is there for all its runs; links don't come out."""
    assert sandbox.shared is not None
    folder = sandbox.shared / "check"
    folder.mkdir()
    (folder / "given").write_text("1")

    def write(ctx):
        (folder / "made").mkdir()
        (folder / "made" / "file").write_text((folder / "given").read_text() + "2")
        (folder / "given").unlink()
        (folder / "link").symlink_to("/etc/hostname")
        os.mkfifo(folder / "pipe")

    sandbox.run_ranks(write, 1, **ALONE)
    assert [str(p.relative_to(folder)) for p in sorted(folder.rglob("*"))] == ["made", "made/file"]

    def read(ctx):
        return (folder / "made" / "file").read_text()

    assert sandbox.run_ranks(read, 1, **ALONE)[0] == "12"


def test_limits(sandbox: Sandbox) -> None:
    """Of a file, of all files, of processes, of an answer."""

    def write(ctx, size, number):
        with open(f"/tmp/{number}", "wb") as file:
            file.write(b"x" * size)

    def fill(ctx):
        for number in range(20):
            try:
                write(ctx, 1 << 20, number)
            except OSError as error:
                return error.errno, number
        return 0, 0

    def fork(ctx):
        for number in range(1000):
            try:
                if os.fork() == 0:
                    signal.pause()
            except OSError as error:
                return error.errno, number
        return 0, 0

    with pytest.raises(RankFailure, match="File too large"):
        sandbox.run_ranks(write, 1, 3 << 20, 0, **ALONE)
    assert sandbox.run_ranks(fill, 1, **ALONE)[0] == (errno.ENOSPC, 8)
    code, number = sandbox.run_ranks(fork, 1, **ALONE)[0]
    assert (code, number < 100) == (errno.EAGAIN, True)
    with pytest.raises(RankFailure, match=r"more than 4,194,304 bytes") as caught:
        sandbox.run_ranks(lambda ctx: torch.ones(2_000_000), 1, **ALONE)
    assert caught.value.kind == "crash"


def test_signals_from_inside_do_not_reach_the_agent(sandbox: Sandbox) -> None:
    def disturb(ctx):
        for number in (signal.SIGSTOP, signal.SIGKILL, signal.SIGINT, signal.SIGTERM):
            os.kill(os.getppid(), number)
        return os.getppid()

    sandbox.run_ranks(lambda ctx: None, 1, **ALONE)
    before = sandbox._agent
    assert sandbox.run_ranks(disturb, 1, **ALONE)[0] == 1
    assert sandbox._agent is before is not None


def test_an_agent_that_ends_or_hangs_fails_its_run_only(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("distlab.sandbox.place.MORE_TIME", 0.5)

    def disturb(number: int) -> None:
        assert sandbox._agent is not None
        os.kill(descendants(sandbox._agent.process.pid)[0], number)

    for number, kind in ((signal.SIGSTOP, "hang"), (signal.SIGKILL, "crash")):
        sandbox.run_ranks(lambda ctx: None, 1, **ALONE)
        threading.Timer(0.5, disturb, [number]).start()
        with pytest.raises(RankFailure) as caught:
            sandbox.run_ranks(lambda ctx: time.sleep(30), 1, timeout=2, **ALONE)
        assert caught.value.kind == kind
        assert sandbox._agent is None
    assert sandbox.run_ranks(lambda ctx: ctx.rank, 1, **ALONE)[0] == 0
    monkeypatch.setattr(Group, "limits_memory", False)
    monkeypatch.setattr("distlab.sandbox.process.exceeds", lambda pid, most: True)
    with pytest.raises(RankFailure, match="more than 3,221,225,472 bytes of memory"):
        sandbox.run_ranks(lambda ctx: time.sleep(30), 1, **ALONE)
