"""The grader's tier of NCCL's rules: which checks run on it, and how the report shows it."""

from __future__ import annotations

import ast
import mmap
import re
import sys
from pathlib import Path

import pytest
import torch
import torch._dynamo  # once here instead of in every forked grader
import torch.distributed as dist
from rich.console import Console

from distlab.course.catalogue import load_course, root
from distlab.grading import exercise
from distlab.grading.report import print_report
from distlab.grading.run import grade
from distlab.grading.runners import BriefNcclRunner, Here, NcclRunner
from distlab.grading.session import Request
from distlab.grading.verdicts import CheckResult, ExerciseResult, Report
from distlab.grading.wrong import all_mutants
from distlab.ranks import RankContext, RankFailure
from distlab.virtual import run_worlds

COURSE = load_course()


def tiers_of(request: Request) -> dict[str, set[str]]:
    """The tiers on which each check of 1.6 ran."""
    found: dict[str, set[str]] = {}
    report = grade(1, request)
    for check in report.exercises[0].checks:
        if check.verdict != "needs":
            found.setdefault(check.name.split("[")[0], set()).add(check.tier)
    return found


def test_checks_of_gpus_run_where_the_tier_is_asked_for() -> None:
    asked = Request(exercises=("1.6",), tier="nccl", trusted=True)
    always = {name: {"nccl"} for name in always_run()["1.6"]}
    assert tiers_of(asked) == {"test_evaluation_is_exact": {"nccl"}} | always
    ordinary = Request(exercises=("1.6",), checks=("test_evaluation_is_exact",), trusted=True)
    assert "nccl" not in tiers_of(ordinary)["test_evaluation_is_exact"]


def always_run() -> dict[str, set[str]]:
    """The names of the checks that run by NCCL's rules in every run, by exercise."""
    found: dict[str, set[str]] = {}
    for path in sorted((root() / "tests").glob("phase*/test_*.py")):
        for node in ast.walk(ast.parse(path.read_bytes())):
            marks = getattr(node, "decorator_list", ())
            for mark in (m for m in marks if ast.unparse(m).startswith("exercise(")):
                named = {k.arg: ast.unparse(k.value) for k in mark.keywords}
                tiers = ast.unparse(mark.args[1]) if len(mark.args) > 1 else ""
                if named.get("nccl") == "True" or "nccl" in tiers:
                    found.setdefault(mark.args[0].value, set()).add(node.name)
    return found


def test_a_check_declares_whether_it_always_runs() -> None:
    for always in (False, True):
        mark = exercise("1.6", "virtual gloo cuda", nccl=always).mark
        assert mark.kwargs["nccl"] is always
    asked = {"impl": "templates", "device": "cpu", "exercises": ("1.7", "1.8")}
    ran = {c.name for e in grade(1, Request(**asked)).exercises for c in e.checks}
    names = always_run()["1.7"] | always_run()["1.8"]
    assert {name.split("[")[0] for name in ran if name.endswith("[nccl]")} == names


def test_what_always_runs_is_said() -> None:
    """And every exercise with a mistake that only NCCL's rules see has such a check."""
    ids = sorted(always_run(), key=lambda e: [int(number) for number in e.split(".")])
    page = (root() / "docs" / "nccl_rules.md").read_text(encoding="utf-8")
    said = re.search(r"a check by NCCL's rules in every run:\n\n(.*?)\n\n", page, re.S)
    assert said is not None
    assert re.findall(r"\d\.\d+", said[1]) == ids
    assert {m.exercise for m in all_mutants() if m.tier == "nccl"} <= {*ids}


def test_nobody_asked_for_it() -> None:
    """Then each way is run once, for one size; the limits are for one way."""
    runs = mmap.mmap(-1, mmap.PAGESIZE)
    limits = []

    class Noting(Here):
        @staticmethod
        def run_worlds(*args, **options):
            limits.append((options["each"], options["timeout"]))
            return run_worlds(*args, **options)

    def body(ctx: RankContext) -> None:
        runs[0] += ctx.rank == 0

    for kind, count in ((BriefNcclRunner, 3), (NcclRunner, 6)):
        runs[0] = 0
        run = kind((__file__,), 5, "cpu", Noting())
        run(body, 2, delays=kind is BriefNcclRunner, timeout=2.0)
        assert runs[0] == count
        assert limits[-1] == (2.0, 2.0 * count)


def test_every_way_of_nccl_is_run() -> None:
    """What hangs in one of the three fails, and the message names it."""

    def body(ctx: RankContext) -> float:
        x = torch.ones(2, device=ctx.device)
        if ctx.rank < 2:  # a first message of a pair
            (dist.send if ctx.rank else dist.recv)(x, 1 - ctx.rank)
        return x.sum().item()

    run = NcclRunner((__file__,), 5, "cpu")
    assert [*run(body, 2)] == [2.0, 2.0]
    with pytest.raises(RankFailure) as caught:
        run(body, 3)
    assert "(simulated by NCCL's rules, nccl2)" in caught.value.message
    assert [*run(body, 3, rules="legacy lazy")] == [2.0] * 3


def test_the_report_shows_it_apart(capsys: pytest.CaptureFixture[str]) -> None:
    for tier, shown in (("nccl", True), ("virtual", False)):
        checks = [
            CheckResult("a", "fail", "rank 0 waits", "hang", title="The first", tier=tier),
            CheckResult("b", "pass", title="The second", tier="gloo"),
        ]
        result = ExerciseResult("1.4", "Averaging", 10, checks=checks)
        report = Report(1, "templates", 1, "cpu", [result])
        print_report(report, COURSE.phase(1), Console(file=sys.stdout, width=120))
        printed = capsys.readouterr().out
        assert ("nccl rules (simulated)" in printed) is shown
        assert ("check: The first (nccl rules, simulated)" in printed) is shown


def test_an_implementation_that_gloo_forgives(tmp_path: Path) -> None:
    """Passes on virtual ranks, hangs by NCCL's rules, with rank and line."""
    solution = COURSE.exercise("3.1").solution_path
    text = solution.read_text(encoding="utf-8")
    assert text.count("    if outgoing.is_cuda:\n") == 1
    text = text.replace("    if outgoing.is_cuda:\n", "    if False:\n")
    (tmp_path / solution.name).write_text(text, encoding="utf-8")
    options = {"impl": str(tmp_path), "device": "cpu", "exercises": ("3.1",), "trusted": True}
    name = "test_reduce_scatter_completes_the_own_chunk"
    verdicts = {}
    for tier in ("virtual", "nccl"):
        check = grade(3, Request(**options, checks=(name,), tier=tier)).check(name)
        assert check is not None
        verdicts[tier] = check.verdict
    assert verdicts == {"virtual": "pass", "nccl": "hang"}
    assert check.rank is not None
    assert check.line.startswith("ring_allreduce.py:")
    assert "gloo forgives this order" in check.message
