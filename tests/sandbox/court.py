"""Grade one check of exercise 1.4 as the grader does, without the time that pytest takes to start.

What a session is asked before and after each check, and what runs the check's ranks, is the
grader's own; one sandbox serves all submissions: what it shows of them is written anew for each.
"""

from __future__ import annotations

import ast
import json
import os
from dataclasses import dataclass
from pathlib import Path

from distlab.course.catalogue import load_course
from distlab.grading.judge import verdict_of
from distlab.grading.runners import HERE
from distlab.grading.session import Request, Session
from distlab.grading.verdicts import CheckResult
from distlab.host.processes import (
    become_subreaper,
    children,
    die_with_parent,
    end_strays,
    forget_descriptors,
    not_for_children,
)
from distlab.sandbox import Limits, Sandbox
from distlab.virtual import reap_children
from tests.phase1.test_trainer_averaging import test_mean_over_the_ranks as check

EXERCISE = load_course().exercise("1.4")


def _right() -> str:
    """The solution's function alone: it needs no other file."""
    text = EXERCISE.solution_path.read_text(encoding="utf-8")
    nodes = {node.name: node for node in ast.walk(ast.parse(text)) if hasattr(node, "name")}
    function = ast.get_source_segment(text, nodes["average_gradients"]) or ""
    return RIGHT + function + "\n"


RIGHT = """
from collections.abc import Iterable
import torch
import torch.distributed as dist
from torch import nn

"""
RIGHT = _right()
SEED = 7


@dataclass
class Court:
    """``folder``: of the submission. ``box``: the sandbox it runs in; None runs it on this
    machine."""

    folder: Path
    box: Sandbox | None = None
    limits: Limits | None = None

    def judge(
        self, text: str, tier: str = "virtual", *, imported: bool = False, guarded: bool = True
    ) -> CheckResult:
        """The verdict on a submission with this ``trainer.py``; ``imported``: it is imported first,
        in a rank of its own, as the grader does where not only one check is wanted."""
        places = [self.folder] if self.box is None else [self.folder, self.shown]
        for place in places:
            (place / "trainer.py").write_text(text, encoding="utf-8")
        if self.box is None:
            return self._judge_apart(tier, imported, guarded)
        return self._judge(tier, imported, guarded)

    def _judge(self, tier: str, imported: bool, guarded: bool) -> CheckResult:
        request = Request(
            impl=str(self.folder),
            device="cpu",
            seed=SEED,
            exercises=("1.4",),
            known=frozenset(e.id for e in load_course().exercises) - {"1.4"},
            trusted=not imported,
            guarded=guarded,
            sandbox=self.limits,
        )
        session = Session(request, place=self.box or HERE)
        try:
            session.prepare(EXERCISE, tier)
            check(session.implementation(EXERCISE), session.runner(EXERCISE, tier), SEED)
        except BaseException as error:
            return verdict_of(error)
        return verdict_of(None)

    def _judge_apart(self, tier: str, imported: bool, guarded: bool) -> CheckResult:
        """In a child that has none of this process's descriptors, as ``grade`` does."""
        become_subreaper()
        before, parent = children(), os.getpid()
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                not_for_children.append(writing)
                forget_descriptors({writing})
                die_with_parent(parent)
                found = self._judge(tier, imported, guarded)
                os.write(writing, json.dumps(vars(found)).encode())
                reap_children()
            finally:
                os._exit(0)
        os.close(writing)
        with os.fdopen(reading) as pipe:
            fields = json.load(pipe)
        os.waitpid(pid, 0)
        left = children() - before
        end_strays(before)
        assert not left
        return CheckResult(**fields | {"printed": dict(enumerate(fields["printed"].values()))})

    @property
    def shown(self) -> Path:
        """The copy of the submission that the sandbox shows."""
        assert self.box is not None
        return self.box._shown[0][0]
