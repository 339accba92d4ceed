"""The program that trains a GPT on any mesh, and the recorded bytes of its five axes."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import forked_commands
import pytest
import torch
import torch._dynamo  # torch.optim imports it: once here, not in every rank

from benchmarks import mesh_bytes
from distlab.course.catalogue import root
from distlab.reference.workloads import CONTEXT
from solutions.phase3_multi_node.mesh_traffic import expected
from solutions.phase3_multi_node.mixture_gpt import build_gpt
from solutions.phase3_multi_node.train_mesh import layout_of, options_of
from tests.at_exit.expected import environment, no_threads_left
from tests.forked_agents import start
from tests.guidelines.folded import sections

assert torch._dynamo
PROGRAM = "solutions.phase3_multi_node.train_mesh"


def torchrun(ranks: int) -> list[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}"]
    return [*launcher, "--standalone", "-m", PROGRAM, "--device=cpu"]


def test_the_program_trains_and_compares(tmp_path: Path) -> None:
    ends, out = tmp_path / "ends", tmp_path / "said"
    layout = ["--experts=2", "--context=2", "--steps=2", "--batch=4", "--micro-batches=2"]
    command = [*torchrun(4), *layout, "--compare"]
    torch.set_num_threads(1)  # a process forked from this one would wait for its lost threads
    status = start(command, out, os.environ | environment(ends), ranks=4).wait(180)
    said = out.read_text()
    assert status == 0, said
    no_threads_left(ends, 4)
    assert "expert 2 x context 2, 1f1b, on cpu" in said
    assert float(said.partition("largest difference ")[2].split()[0]) < 1e-5


def test_without_a_launcher_the_program_says_how_to_start_it() -> None:
    alone = forked_commands.run([sys.executable, "-m", PROGRAM], cwd=root())
    assert alone.returncode == 1
    assert alone.stderr.startswith("start it with: torchrun")


def test_the_data_axis_takes_the_ranks_that_are_left() -> None:
    assert layout_of(options_of(["--tensor=2", "--shard=2"]), 12).data == 3
    with pytest.raises(ValueError, match=r"data 2 x .*tensor 2.* takes 4 ranks, there are 6"):
        layout_of(options_of(["--tensor=2", "--data=2"]), 6)
    with pytest.raises(ValueError, match="takes 4 ranks, there are 2"):
        layout_of(options_of(["--tensor=4"]), 2)


def test_the_model_has_experts_if_ranks_share_them() -> None:
    assert options_of(["--experts=2"]).model == "tiny_moe"
    assert options_of([]).model == "tiny_gpt"


def test_recorded_bytes_are_those_of_the_formulas() -> None:
    found = json.loads(mesh_bytes.FILE.read_text(encoding="utf-8"))
    gpt = build_gpt(mesh_bytes.MODEL)
    want = expected(gpt, mesh_bytes.LAYOUT, mesh_bytes.BATCH, CONTEXT)
    rows = {frozenset(row["axes"]): row["counted"] for row in found["rows"]}
    assert rows.keys() == {frozenset(axes) for axes in want}
    for axes, nbytes in want.items():
        assert rows[frozenset(axes)] == pytest.approx(nbytes, abs=mesh_bytes.LAYOUT.ranks)
    table = sections(3)["3.33"]
    missing = [n for n in rows.values() if n > 1e4 and f"{n / 1e6:.2f}" not in table]
    assert not missing, "the guidelines have other bytes"
    best, reverse = found["orders"]
    assert best["order"][-1] == reverse["order"][0] == "tensor"
    assert best["milliseconds"] < reverse["milliseconds"]
