"""Whole programs of the course by NCCL's rules: they find their GPUs, join, train and leave."""

from __future__ import annotations

import sys

import pytest
import torch
import torch._dynamo  # once here instead of in every forked world
import torch.distributed as dist

from distlab.course.catalogue import root
from distlab.ranks import RankContext, RankFailure
from distlab.virtual import VirtualResults, run_virtual
from solutions.phase1_data_parallel import trainer
from solutions.phase2_advanced import train_gpt
from solutions.phase3_multi_node.halving_doubling import halving_doubling_all_reduce

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


def halve_and_double(ctx: RankContext, bind: bool) -> list[float]:
    """A program that joins by itself; of three ranks the third takes no part in any batch."""
    torch.cuda.set_device(ctx.rank)
    store = dist.PrefixStore("own", dist.HashStore())
    bound = {"device_id": torch.device("cuda", ctx.rank)} if bind else {}
    dist.init_process_group("nccl", rank=ctx.rank, world_size=3, store=store, **bound)
    x = torch.full((5,), float(ctx.rank), device="cuda")
    halving_doubling_all_reduce(x)
    dist.destroy_process_group()
    return x.tolist()


def test_a_program_that_binds_no_device_before_its_first_batch() -> None:
    options = {"process_group": False, "learner_files": FILES}
    for rules in ("nccl2", "legacy lazy", "legacy eager"):
        assert [*run_virtual(halve_and_double, 3, True, rules=rules, **options)] == [[3.0] * 5] * 3
    assert [*run_virtual(halve_and_double, 3, False, rules="nccl2", **options)] == [[3.0] * 5] * 3
    with pytest.raises(RankFailure) as caught:
        run_virtual(halve_and_double, 3, False, rules="legacy lazy", **options)
    assert caught.value.kind == "hang"
    assert "rank 2 never came to it. gloo forgives this" in caught.value.message
    assert "rank 0 waits in the first use of the communicator of ranks 0, 1 and 2" in str(
        caught.value
    )
    assert "batch_isend_irecv" in caught.value.line
