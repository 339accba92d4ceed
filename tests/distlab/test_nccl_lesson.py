"""What learners are taught of NCCL: the picture, the guidelines, the program of exercise 3.30."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch._dynamo  # once here instead of in every forked grader
import torch.distributed as dist

from distlab.course.catalogue import load_course, root
from distlab.grading.session import Request
from distlab.grading.verdicts import CheckResult
from distlab.grading.warm import WarmGrader
from distlab.ranks import RankContext, RankFailure
from distlab.virtual import run_virtual
from scripts import queues

COURSE = load_course()
CALLS = {"recv": dist.irecv, "send": dist.isend}


def issued(queue: tuple[queues.Entry, ...], rules: str) -> list[float]:
    """What two ranks get that issue this."""

    def body(ctx: RankContext) -> float:
        got = torch.zeros(1, device=ctx.device)
        tensors = {"recv": got, "send": torch.full((1,), 1.0 + ctx.rank, device=ctx.device)}
        ends = [
            [dist.P2POp(CALLS[op], tensors[op], 1 - ctx.rank) for op in entry] for entry in queue
        ]
        for handle in [work for entry in ends for work in dist.batch_isend_irecv(entry)]:
            handle.wait()
        return got.item()

    return [*run_virtual(body, 2, rules=rules, learner_files=(__file__,), timeout=20)]


def test_the_picture_shows_what_blocks() -> None:
    """What has an entry behind another one hangs by NCCL's rules, and passes on gloo."""
    again = "draw it again: python -m scripts.queues"
    text = queues.PICTURE.read_text(encoding="utf-8")
    stuck = []
    for title, queue in queues.QUEUES.items():
        assert f"{title}: {queues.told(queue)}" in text, again
        assert issued(queue, "gloo") == [2.0, 1.0]
        stuck.append(bool(queues.behind(queue)))
        if stuck[-1]:
            with pytest.raises(RankFailure, match="is behind recv"):
                issued(queue, "nccl")
        else:
            assert issued(queue, "nccl") == [2.0, 1.0]
    assert stuck == [True, False]


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    queues.draw(tmp_path / "queues.svg")
    drawn = (tmp_path / "queues.svg").read_text(encoding="utf-8")
    for words in (*queues.QUEUES, "receive from 1", "send to 0", "queue of rank 1", "is behind"):
        assert words in drawn
    queues.draw(tmp_path / "queues.png")
    assert (tmp_path / "queues.png").read_bytes().startswith(b"\x89PNG")


def test_the_guidelines_teach_it_and_show_the_picture() -> None:
    sections = {1: "## What NCCL changes", 3: "## 3.30 The same program on NCCL"}
    for number, heading in sections.items():
        path = root() / COURSE.phase(number).folder / "guidelines.md"
        text = path.read_text(encoding="utf-8")
        _, _, section = text.partition(f"{heading}\n")
        section = section.partition("\n## ")[0]
        pictures = re.findall(r"!\[[^]]+\]\(([^)]+)\)", section)
        assert queues.PICTURE in [(path.parent / each).resolve() for each in pictures]
        assert "docs/nccl_rules.md" in section


@pytest.fixture(scope="module")
def grader() -> Iterator[WarmGrader]:
    with WarmGrader() as warm:
        yield warm


def graded(grader: WarmGrader, impl: str, tier: str, check: str = "") -> list[CheckResult]:
    chosen = {"checks": (check,)} if check else {}
    request = Request(
        impl=impl, device="cpu", exercises=("3.30",), tier=tier, trusted=True, **chosen
    )
    (result,) = grader.grade(3, request).exercises
    return [check for check in result.checks if check.verdict != "needs"]


@pytest.mark.parametrize("tier", ["virtual", "gloo"])
def test_the_given_program_passes_on_gloo(grader: WarmGrader, tier: str) -> None:
    found = graded(grader, str(root() / "given"), tier)
    assert len(found) > 5
    assert {check.verdict for check in found} == {"pass"}, [c.message for c in found]


FAULTS = {  # check: the fault's cause, line and words
    "test_edges_come_from_both_neighbours": ("hang", "handle.wait()", "gloo forgives this order"),
    "test_teams_and_their_leaders": ("hang", "leaders = dist.new_group(", "never came to it"),
    "test_means_of_team_and_world": ("exception", "dist.all_reduce(team", "a tensor of the host"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_each_of_its_faults_is_told_by_rank_line_and_cause(grader: WarmGrader, name: str) -> None:
    cause, line, words = FAULTS[name]
    (found,) = graded(grader, str(root() / "given"), "nccl", name)
    assert (found.cause, found.tier) == (cause, "nccl")
    assert found.rank is not None
    assert found.line.startswith("team_program.py:")
    assert line in found.line
    assert words in found.message
