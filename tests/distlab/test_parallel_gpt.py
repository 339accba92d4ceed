"""The GPT of phase 2's closing run: however it is laid out, it trains like one process."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import forked_commands
import pytest
import torch
import torch._dynamo  # torch.optim imports it: once here, not in every rank
import torch.nn.functional as F

from distlab.course.catalogue import root
from distlab.ranks import RankFailure, run_ranks
from distlab.reference.workloads import GPT
from distlab.virtual import run_virtual
from solutions.phase2_advanced.gradient_accumulation import clip_by_global_norm
from solutions.phase2_advanced.parallel_gpt import Layout, ParallelGPT, make_groups, train_step
from tests.at_exit.expected import environment, no_threads_left
from tests.forked_agents import start

pytestmark = pytest.mark.verdict

WORDS, LENGTH, BATCH, STEPS, NORM = 97, 8, 8, 3, 0.5

LAYOUTS = [
    {"tensor": 2, "pipeline": 2, "micro_batches": 4},
    {"tensor": 2, "pipeline": 2, "micro_batches": 4, "sequence_parallel": True},
    {"tensor": 2, "pipeline": 3, "micro_batches": 2, "schedule": "gpipe"},
    {
        "tensor": 2,
        "pipeline": 2,
        "chunks": 2,
        "micro_batches": 4,
        "schedule": "interleaved",
        "sequence_parallel": True,
    },
    {"pipeline": 4, "micro_batches": 8, "schedule": "zero-bubble"},
    {"tensor": 4, "sequence_parallel": True},
    {"tensor": 2, "pipeline": 2, "data": 2, "micro_batches": 2, "sequence_parallel": True},
    {"data": 4},
]


def whole() -> GPT:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return GPT(WORDS, LENGTH, layers=4, width=16, heads=4).double()


def batch_of(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    text = torch.randint(0, WORDS, (BATCH, LENGTH + 1), generator=generator)
    return text[:, :-1], text[:, 1:]


def one_process() -> tuple[list[float], list[float]]:
    """Losses and gradient norms."""
    model = whole()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, norms = [], []
    for step in range(STEPS):
        tokens, targets = batch_of(step)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(tokens), targets.flatten())
        loss.backward()
        norms.append(clip_by_global_norm(model.parameters(), NORM))
        optimizer.step()
        losses.append(loss.item())
    return losses, norms


def body(ctx, fields: dict) -> tuple[list[float], list[float]]:
    layout = Layout(**fields)
    groups = make_groups(layout)
    model = ParallelGPT(whole(), layout, groups)
    share = BATCH // layout.data
    mine = slice(groups.data.rank() * share, (groups.data.rank() + 1) * share)
    pipeline = model.pipeline(share, LENGTH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, norms = [], []
    for step in range(STEPS):
        tokens, targets = batch_of(step)
        loss, norm = train_step(
            model, pipeline, optimizer, tokens[mine], targets[mine], max_norm=NORM
        )
        losses.append(loss)
        norms.append(norm)
    return losses, norms


def ranks_of(fields: dict) -> int:
    return Layout(**fields).ranks


@pytest.mark.parametrize("fields", LAYOUTS, ids=str)
def test_every_layout_trains_like_one_process(fields: dict) -> None:
    want = one_process()
    for rank, got in enumerate(run_virtual(body, ranks_of(fields), fields, timeout=60)):
        for name, a, b in zip(("losses", "norms"), got, want, strict=True):
            assert a == pytest.approx(b, rel=1e-12), f"{name} of rank {rank}"


def test_real_processes_do_as_well() -> None:
    for fields in LAYOUTS[:2]:
        for got in run_ranks(body, 4, fields, timeout=60):
            assert got[0] == pytest.approx(one_process()[0], rel=1e-12)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tensor": 3}, "4 heads"),
        ({"pipeline": 7}, "7 stages"),
        ({"tensor": 2, "micro_batches": 3}, "3 micro-batches"),
        ({"schedule": "2f2b"}, "2f2b"),
        ({"chunks": 2}, "interleaved"),
        ({"data": 0}, ">= 1"),
    ],
)
def test_what_can_not_be_cut_is_refused_on_every_rank(fields: dict, words: str) -> None:
    with pytest.raises((RankFailure, ValueError), match=words):
        run_virtual(body, ranks_of(fields), fields, timeout=20)


def test_a_layout_for_other_ranks_is_refused() -> None:
    with pytest.raises(RankFailure, match="takes 2 ranks, there are 3"):
        run_virtual(body, 3, {"tensor": 2}, timeout=20)


PROGRAM = "solutions.phase2_advanced.train_gpt"


def torchrun(ranks: int) -> list[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}"]
    return [*launcher, "--standalone", "-m", PROGRAM, "--device=cpu"]


def test_the_program_trains_and_compares(tmp_path: Path) -> None:
    """On ranks that are forked; those of the next test are new interpreters."""
    picture, ends, out = tmp_path / "gpt.png", tmp_path / "ends", tmp_path / "said"
    layout = ["--tensor=2", "--pipeline=2", "--steps=3", "--batch=4"]
    command = [*torchrun(4), *layout, "--compare", f"--plot={picture}"]
    torch.set_num_threads(1)  # a process forked from this one would wait for its lost threads
    status = start(command, out, os.environ | environment(ends), ranks=4).wait(180)
    said = out.read_text()
    assert status == 0, said
    no_threads_left(ends, 4)
    assert "tensor 2 x pipeline 2 x data 1" in said
    assert float(said.partition("largest difference ")[2].split()[0]) < 1e-5
    assert picture.read_bytes()[:4] == b"\x89PNG"


def test_the_program_refuses_in_one_line() -> None:
    command = [*torchrun(2), "--tensor=2", "--steps=1", "--batch=6"]
    done = forked_commands.run(command, cwd=root(), timeout=180)
    assert done.returncode != 0
    assert "train_gpt: 6 sequences of 64 tokens don't divide into 4 micro-batches" in done.stderr
    alone = forked_commands.run([sys.executable, "-m", PROGRAM], cwd=root())
    assert alone.returncode == 1
    assert alone.stderr.startswith("start it with: torchrun")
