"""A hundred files that no learner should hand in: one clear verdict each, and nothing stays.

``hostile_files.py`` lists them. Here each is graded by one check, and afterwards no process, no
temporary file and no open descriptor of the grader is left.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import hostile_files as hostile
import pytest
import torch._dynamo  # noqa: F401 (once here instead of in every forked grader)

from distlab.course.catalogue import load_course
from distlab.grading import grade, run, runners
from distlab.grading.report import print_report
from distlab.grading.session import Request
from distlab.grading.verdicts import VERDICTS, ExerciseResult
from distlab.host.processes import children, end_strays
from distlab.host.terminal import console
from distlab.ranks import stacks
from distlab.virtual import reap_children

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="daemons are found by Linux only")

LIMIT = 0.5  # seconds after which a run that hangs is ended
SAMPLER = """
import torch
{imported}

class ShardedSampler:
    num_real = 0
    made = False

    def __init__(self, size, **options):
        if ShardedSampler.made:
            return
        ShardedSampler.made = True
        {called}

    def __len__(self):
        return 0

    def __iter__(self):
        return iter(())
"""
AVERAGE = """
import torch
import torch.distributed as dist

def average_gradients(parameters, num_samples, group=None):
    {called}
"""


@pytest.fixture
def nothing_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No process and no temporary file more than before, and short limits."""
    left: list[int] = []

    def strays_of_the_grader(before: set[int]) -> None:
        left.extend(children() - before)  # the grader has ended; what it left would come here
        end_strays(before)

    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(run, "end_strays", strays_of_the_grader)
    reap_children()
    before, descriptors = children(), sorted(os.listdir("/proc/self/fd"))
    yield
    assert not left
    assert children() == before
    assert os.listdir(temporary) == []
    assert sorted(os.listdir("/proc/self/fd")) == descriptors


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """``short(verdict)``: what is to hang need not hang for long."""

    def shorten(verdict: str) -> None:
        if verdict == "hang":
            monkeypatch.setattr(runners, "RUN_LIMIT", LIMIT)
            monkeypatch.setattr(runners, "CHECK_LIMIT", LIMIT)
            monkeypatch.setattr(stacks, "ANSWER", 0.1)
            monkeypatch.setattr("distlab.virtual.reports.GRACE", 0.5)

    return shorten


def graded(folder: Path, exercise: str, check: str, tier: str) -> ExerciseResult:
    """The result of a check; its report can be printed, whatever is in it."""
    request = Request(
        impl=str(folder),
        device="cpu",
        exercises=(exercise,),
        checks=(check,),
        known=frozenset(e.id for e in load_course().exercises) - {exercise},
        tier=tier,
    )
    report = grade(1, request)
    with open(os.devnull, "w", encoding="ascii") as sink, contextlib.redirect_stdout(sink):
        print_report(report, load_course().phase(1), console())
    (result,) = report.exercises
    assert {c.verdict for c in result.checks} <= set(VERDICTS)
    assert "Traceback" not in "".join(c.message for c in result.checks)
    assert "other interleavings" not in "".join(c.message for c in result.checks)
    assert not result.points
    return result


def sampler_graded(folder: Path, text: bytes) -> ExerciseResult:
    learners = folder / "learner"
    learners.mkdir()
    (learners / "data_loader.py").write_bytes(text)
    (learners / "trainer.py").write_text("")  # a folder with one file is none when that is gone
    return graded(learners, "1.1", "test_padded_shards_cover_the_data", "gloo")


def indented(code: str, by: int) -> str:
    return code.strip().replace("\n", "\n" + " " * by)


@pytest.mark.parametrize("name", hostile.SAMPLER)
def test_hostile_when_imported(name: str, tmp_path: Path, nothing_stays: None, short) -> None:
    code, verdict = hostile.SAMPLER[name]
    short(verdict)
    text = SAMPLER.format(imported=code, called="pass")
    result = sampler_graded(tmp_path, text.encode())
    assert result.verdict == verdict, result.checks


@pytest.mark.parametrize("name", hostile.CALLED)
def test_hostile_when_called(name: str, tmp_path: Path, nothing_stays: None, short) -> None:
    code, verdict = hostile.CALLED[name]
    short(verdict)
    text = SAMPLER.format(imported="", called=indented(code, 8))
    result = sampler_graded(tmp_path, text.encode())
    assert result.verdict == verdict, result.checks


@pytest.mark.parametrize("name", hostile.WHOLE)
def test_files_that_are_no_python(name: str, tmp_path: Path, nothing_stays: None) -> None:
    text, verdict = hostile.WHOLE[name]
    result = sampler_graded(tmp_path, text)
    assert result.verdict == verdict, result.checks


@pytest.mark.parametrize("name", hostile.VIRTUAL)
def test_hostile_on_virtual_ranks(name: str, tmp_path: Path, nothing_stays: None, short) -> None:
    code, verdict = hostile.VIRTUAL[name]
    short(verdict)
    learners = tmp_path / "learner"
    learners.mkdir()
    (learners / "trainer.py").write_text(AVERAGE.format(called=indented(code, 4)))
    result = graded(learners, "1.4", "test_mean_over_the_ranks", "virtual")
    assert result.verdict == verdict, result.checks
