"""The warm grader says what the cold one says; forks of a prepared process are cheap."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch

from distlab.grading.session import Request
from distlab.grading.verdicts import CheckResult
from distlab.grading.warm import WarmGrader
from distlab.grading.wrong import all_mutants, run_mutant
from distlab.host.forking import HUGE, prepare_to_fork
from distlab.ranks.parent import children


def said(check: CheckResult | None) -> tuple[object, ...]:
    assert check is not None
    return check.name, check.verdict, check.cause, check.message, check.line


def test_warm_and_cold_agree(tmp_path: Path) -> None:
    """A wrong implementation between two right ones: nothing is left to the next."""
    mutant = next(m for m in all_mutants() if m.exercise == "1.4")
    solutions = Request(device="cpu", exercises=("1.4",))
    with WarmGrader() as warm:
        before = warm.grade(1, solutions)
        (tmp_path / "mutant").mkdir()
        wrong = said(run_mutant(mutant, tmp_path / "mutant", 7, warm.grade))
        after = warm.grade(1, solutions)
    assert said(run_mutant(mutant, tmp_path / "mutant", 7)) == wrong
    assert wrong[1:3] == ("fail", mutant.told_as)
    assert [r.exercises[0].verdict for r in (before, after)] == ["pass", "pass"]
    assert before.seed != after.seed
    assert len(before.exercises[0].checks) == len(after.exercises[0].checks) > 1


def test_a_grading_that_dies_is_told() -> None:
    """The next request is graded as if nothing had been; at the end no process is left."""
    processes = children()
    with WarmGrader() as warm:
        with pytest.raises(RuntimeError, match="without a report"):
            warm.grade(1, Request(impl="/no/such/folder", exercises=("1.4",), device="cpu"))
        nothing = Request(exercises=("1.4",), device="cpu", checks=("no_such_check",))
        assert len(children()) == len(processes) + 1
        assert warm.grade(1, nothing).exercises == []
    assert children() == processes


def huge_bytes() -> int:
    found = re.search(r"AnonHugePages: +(\d+) kB", Path("/proc/self/smaps_rollup").read_text())
    return int(found[1]) * 1024 if found else 0


@pytest.mark.skipif(not os.path.exists("/proc/self/smaps_rollup"), reason="Linux tells it")
def test_memory_is_gathered_and_keeps_its_content() -> None:
    """In a child, so that what this process has is as it was."""
    pid = os.fork()
    if pid == 0:
        values = torch.arange(8 * HUGE // 8)
        prepare_to_fork()
        same = bool((values == torch.arange(8 * HUGE // 8)).all())
        os._exit(0 if same and huge_bytes() >= HUGE else 2 if same else 1)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if status == 2:
        pytest.skip("this system gathers no pages on request (Linux 6.1 does)")
    assert status == 0
