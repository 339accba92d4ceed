"""How gradings end: by themselves, by a signal, killed; and what a bad end of a run is called."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from distlab import cli
from distlab.course.catalogue import Course, Phase, load_course, root
from distlab.grading import command as grader
from distlab.grading import grade, sources
from distlab.grading.session import Request
from distlab.host import processes
from distlab.ranks import RankContext, RankFailure, run_ranks
from distlab.virtual import run_virtual

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="needs the parent-death signal")
both_tiers = pytest.mark.parametrize("ranks", [run_ranks, run_virtual])


def failure_of(ranks: Callable, body: Callable, world_size: int, **options) -> RankFailure:
    with pytest.raises(RankFailure) as caught:
        ranks(body, world_size, **options)
    return caught.value


# -- signals to the grader -----------------------------------------------------------------------
HANGS = """
import os, signal, subprocess, tempfile, time
tempfile.mkdtemp()
place = {place!r}
if os.fork() == 0:
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    open(f"{{place}}/daemon-{{os.getpid()}}", "w")
    time.sleep(1000)
other = subprocess.Popen(["sleep", "1000"], start_new_session=True)
open(f"{{place}}/program-{{other.pid}}", "w")
open(f"{{place}}/rank-{{os.getpid()}}", "w")
time.sleep(1000)
"""


def command(impl: str) -> int:
    """``python test_phase1.py``."""
    return grader.main(1, ["1.1", "--impl", impl])


def from_code(impl: str) -> int:
    """A grader that other code has forked."""
    return len(grade(1, Request(impl=impl, exercises=("1.1",))).exercises)


def watched(impl: str) -> int:
    """``distlab watch``, which forks a grader."""
    main = grader.main
    grader.main = lambda phase, args, **how: main(phase, [*args, "--impl", impl], **how)
    return cli.main(["watch", "1.1"])


def alive(pid: int) -> bool:
    """Whether the process runs: not ended, not waiting to be collected."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def wait_for(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end, "still not so after 120 s"
        time.sleep(0.02)


@on_linux
@pytest.mark.parametrize(
    ("program", "number"),
    [
        (command, signal.SIGTERM),
        (command, signal.SIGKILL),
        (from_code, signal.SIGKILL),
        (watched, signal.SIGTERM),
        (watched, signal.SIGKILL),
    ],
)
def test_a_grader_that_is_ended_leaves_nothing(
    program: Callable[[str], int], number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner, temporary, place = (tmp_path / name for name in ("learner", "temporary", "place"))
    for folder in (learner, temporary, place):
        folder.mkdir()
    (learner / "data_loader.py").write_text(HANGS.format(place=str(place)))
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr(tempfile, "tempdir", None)
    grader = os.fork()
    if grader == 0:
        try:
            output = os.open(tmp_path / "output", os.O_WRONLY | os.O_CREAT)
            os.dup2(output, 1)
            os.dup2(output, 2)
            sys.stdout, sys.stderr = open(1, "w"), open(2, "w")  # noqa: SIM115
            status = program(str(learner))
            sys.stderr.flush()
            os._exit(status)
        finally:
            os._exit(99)
    pids: dict[str, int] = {}
    try:
        wait_for(lambda: len(list(place.iterdir())) == 3)
        pids = {p.name.split("-")[0]: int(p.name.split("-")[1]) for p in place.iterdir()}
        assert len(list(temporary.glob("distlab-*"))) == 1
        os.kill(grader, number)
        _, status = os.waitpid(grader, 0)
        if program is command and number == signal.SIGTERM:
            assert not any(map(alive, pids.values()))
        wait_for(lambda: not any(map(alive, pids.values())))
        wait_for(lambda: not list(temporary.glob("distlab-*")))
    finally:
        for pid in filter(alive, (grader, *pids.values())):
            os.kill(pid, signal.SIGKILL)
    said = (tmp_path / "output").read_text()
    assert "Traceback" not in said
    if number == signal.SIGTERM:
        assert os.waitstatus_to_exitcode(status) == 143
        assert said.count("ended by SIGTERM") == 1
    if program is command:
        assert len(said.splitlines()) == (number == signal.SIGTERM)


@on_linux
def test_children_are_found_without_the_kernels_list() -> None:
    """Those of a shell: orphans of other tests may come to this process at any time."""
    shell = subprocess.Popen(["sh", "-c", "sleep 1000 & sleep 1000 & wait"])
    try:
        wait_for(lambda: len(processes.descendants(shell.pid)) == 2)
        listed = processes.descendants(shell.pid)
        assert sorted(processes._children_by_parent(shell.pid)) == sorted(listed)
    finally:
        for pid in processes.descendants(shell.pid):
            os.kill(pid, signal.SIGKILL)
        shell.wait()


@on_linux
def test_a_process_that_goes_on_without_its_pipe_is_no_dead_one() -> None:
    child = subprocess.Popen(["sleep", "1000"])
    try:
        assert processes.exit_status(child.pid) is None
        child.kill()
        assert processes.exit_status(child.pid) in (None, 9)  # None: it has not begun to end
    finally:
        child.wait()


# -- what a failure is called --------------------------------------------------------------------
@both_tiers
@pytest.mark.parametrize("first", ["isend", "irecv"])
def test_a_message_that_is_waited_for_twice_is_named(ranks: Callable, first: str) -> None:
    def body(ctx: RankContext) -> None:
        x = torch.ones(3)
        sends = (ctx.rank == 0) == (first == "isend")
        handle = (dist.isend if sends else dist.irecv)(x, 1 - ctx.rank)
        handle.wait()
        if ctx.rank == 0:
            handle.wait()

    failure = failure_of(ranks, body, 2)
    assert failure.cause == "waited-twice"
    assert "waits a second time" in failure.message
    assert "3 float32 elements" in failure.message
    assert failure.line.endswith("handle.wait()")


@both_tiers
def test_a_collective_may_be_waited_for_twice(ranks: Callable) -> None:
    def body(ctx: RankContext) -> float:
        x = torch.ones(3)
        handle = dist.all_reduce(x, async_op=True)
        handle.wait()
        handle.wait()
        return x.sum().item()

    assert list(ranks(body, 2)) == [6.0, 6.0]


@both_tiers
@pytest.mark.parametrize("what", ["dtype", "device"])
def test_a_changed_default_is_named_as_that(ranks: Callable, what: str) -> None:
    def body(ctx: RankContext) -> None:
        if ctx.rank == 1:
            if what == "dtype":
                torch.set_default_dtype(torch.float64)
            else:
                torch.set_default_device("meta")
        if what == "dtype":
            dist.all_reduce(torch.ones(3))  # of different dtypes: that is what followed

    failure = failure_of(ranks, body, 2)
    now = {"dtype": "from float32 to float64", "device": "from cpu to meta"}[what]
    assert failure.message.startswith(f"rank 1 changed torch's default {what} {now}")
    assert (failure.cause, failure.rank) == ("changed-default", 1)
    assert "torch.set_default_" in failure.line
    assert "different collectives" not in failure.message
    if what == "dtype":
        assert "what followed:" in failure.message
        assert "all_reduce of 3 float64 elements" in failure.message


@both_tiers
def test_a_default_that_is_set_back_is_no_mistake(ranks: Callable) -> None:
    def body(ctx: RankContext) -> list[str]:
        torch.set_default_dtype(torch.float64)
        inside = torch.ones(1)
        dist.all_reduce(inside)
        torch.set_default_dtype(torch.float32)
        return [str(inside.dtype), str(torch.ones(1).dtype)]

    assert list(ranks(body, 2)) == [["torch.float64", "torch.float32"]] * 2


def test_the_default_dtype_is_each_virtual_ranks_own() -> None:
    def body(ctx: RankContext) -> list[str]:
        if ctx.rank == 1:
            torch.set_default_dtype(torch.float64)
        dist.barrier()
        made = str(torch.ones(1).dtype)
        dist.barrier()
        torch.set_default_dtype(torch.float32)
        return [made]

    results = run_virtual(body, 3, seed=1, seeds=3)
    assert list(results) == [["torch.float32"], ["torch.float64"], ["torch.float32"]]


def test_other_interleavings_are_spoken_of_only_if_they_were_tried() -> None:
    def always(ctx: RankContext) -> None:
        raise ValueError("always")

    def sometimes(ctx: RankContext) -> None:
        x = torch.zeros(1)
        if ctx.rank:
            dist.send(torch.full((1,), float(ctx.rank)), 0)
            return
        dist.recv(x)
        dist.recv(torch.zeros(1))
        if x.item() == 2.0:
            raise ValueError("sometimes")

    words = "other interleavings went well"
    for seed in range(1, 5):
        assert words not in failure_of(run_virtual, always, 3, seed=seed, seeds=4).message
    seeds = [failure_of(run_virtual, sometimes, 3, seed=s, seeds=30) for s in range(1, 9)]
    told = [words in failure.message for failure in seeds]
    first = [failure.interleaving == s for s, failure in enumerate(seeds, 1)]
    assert told == [not own for own in first]
    assert len(set(told)) == 2


def test_a_phase_without_exercises_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = load_course()
    phases = [*real.phases, Phase(9, "To come", "phase9", "ready")]
    empty = Course(phases, real.exercises)
    monkeypatch.setattr(sources, "load_course", lambda: empty)
    assert grader.main(9, []) == 2
    said = capsys.readouterr().err
    assert said == "test_phase9.py: phase 9 has no exercises yet: there is nothing to grade\n"
    with pytest.raises(ValueError, match="no exercises yet"):
        grade(9, Request())


def test_a_broken_editor_lock_is_no_deleted_file(tmp_path: Path) -> None:
    """Emacs marks a file that it edits by a link to nowhere beside it."""
    source = root() / "solutions" / "phase1_data_parallel" / "data_loader.py"
    (tmp_path / "data_loader.py").write_text(source.read_text())
    (tmp_path / ".#data_loader.py").symlink_to("nowhere")
    check = "test_epochs_differ_and_repeat"
    report = grade(1, Request(impl=str(tmp_path), exercises=("1.1",), checks=(check,)))
    assert report.exercises[0].verdict == "pass"


def test_a_grading_has_no_descriptors_of_its_caller(tmp_path: Path) -> None:
    """What learner code writes to all of them does not reach the process that asked."""
    text = root() / "solutions" / "phase1_data_parallel" / "data_loader.py"
    junk = "import os\nfor fd in range(3, 60):\n    try: os.write(fd, b'junk')\n"
    junk += "    except OSError: pass\n"
    (tmp_path / "data_loader.py").write_text(text.read_text(encoding="utf-8") + junk)
    (tmp_path / "trainer.py").write_text("")
    reading, writing = os.pipe()
    try:
        grade(1, Request(impl=str(tmp_path), device="cpu", exercises=("1.1",)))
    finally:
        os.close(writing)
        with os.fdopen(reading, "rb") as pipe:
            received = pipe.read()
    assert received == b""
