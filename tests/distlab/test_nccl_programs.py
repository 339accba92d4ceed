"""Whole programs of the course by NCCL's rules: they find their GPUs, join, train and leave."""

from __future__ import annotations

import sys

import torch._dynamo  # once here instead of in every forked world
import torch.distributed as dist

from distlab.course.catalogue import root
from distlab.ranks import RankContext
from distlab.virtual import VirtualResults, run_virtual
from solutions.phase1_data_parallel import trainer
from solutions.phase2_advanced import train_gpt

assert torch._dynamo
FILES = tuple(map(str, (root() / "solutions").glob("*/*.py")))


def run(main: str, world_size: int, *arguments: str) -> VirtualResults:
    """The program on ranks that have no group, in each way in which PyTorch runs NCCL."""

    def body(ctx: RankContext) -> bool:
        sys.argv = [main, *arguments]
        {"trainer": trainer, "train_gpt": train_gpt}[main].main()
        return dist.is_initialized()

    options = {"rules": "nccl", "seed": 1, "process_group": False, "learner_files": FILES}
    results = run_virtual(body, world_size, **options, timeout=120)
    assert [*results] == [False] * world_size
    return results


def test_the_trainer_of_phase_1() -> None:
    results = run("trainer", 2, "--epochs", "1", "--device", "cuda")
    assert "digits_mlp: 2 ranks on cuda, 1 epochs" in results.output[0]


def test_tensor_and_pipeline_parallel_training() -> None:
    arguments = ("--tensor", "2", "--pipeline", "2", "--steps", "2", "--device", "cuda")
    results = run("train_gpt", 4, *arguments)
    assert "tensor 2 x pipeline 2 x data 1, 1f1b, on cuda" in results.output[0]
