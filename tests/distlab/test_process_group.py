"""Every program leaves its group so that no thread of gloo is left, and the helper keeps its word.

Other programs are looked at where their tests run them: train_gpt, train_two_nodes, train_elastic
and imagenet_trainer.
"""

from __future__ import annotations

import contextlib
import io
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from distlab.ranks import RankContext, run_ranks
from given.process_group import process_group
from solutions.phase3_multi_node.ddp import DDP
from tests.at_exit.expected import needs_proc, no_threads_left, reports, run_forked
from tests.at_exit.sitecustomize import Watch

WRONG = "tests.at_exit.destroys_only"
PHASE1, PHASE3 = "solutions.phase1_data_parallel", "solutions.phase3_multi_node"
PROGRAMS = {
    f"{PHASE1}.trainer": ["--workload=digits_mlp", "--device=cpu", "--epochs=1"],
    f"{PHASE1}.collectives": ["--sizes", "400"],
    f"{PHASE3}.allreduce_choice": [],
    f"{PHASE3}.hierarchical_allreduce": [],
    WRONG: [],
}
RANKS = 2


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[int]]]:
    """Where the ranks of all programs have reported, and how they ended."""
    folder = tmp_path_factory.mktemp("programs")
    wanted = [[name, RANKS, "", name, *arguments] for name, arguments in PROGRAMS.items()]
    return folder, run_forked(folder, wanted)


@needs_proc
@pytest.mark.parametrize("program", [name for name in PROGRAMS if name != WRONG])
def test_a_program_leaves_no_thread(program: str, ended) -> None:
    folder, statuses = ended
    assert statuses[program] == [0] * RANKS
    no_threads_left(folder / program, RANKS)


@needs_proc
def test_threads_that_are_left_are_seen(ended) -> None:
    """A plain destroy after a late import, on any torch: otherwise the tests here prove nothing."""
    found = reports(ended[0] / WRONG)
    assert sorted(found) == list(range(RANKS))
    for each in found.values():
        assert [len(report["left"]) for report in each] == [report["made"] for report in each]


# -- the helper -----------------------------------------------------------------------------------
def alone() -> dict[str, object]:
    """Settings for a group of one rank."""
    return {"store": dist.HashStore(), "rank": 0, "world_size": 1}


def end_of(body: Callable[[], object]) -> tuple[list[str], str]:
    """What one rank has left after a group in which ``body`` ran, and what it said."""

    def rank(ctx: RankContext) -> tuple[list[str], str]:
        watch, said = Watch(), io.StringIO()
        watch.start(distributed_c10d)
        with contextlib.redirect_stderr(said):
            with process_group("gloo", **alone()):
                body()
            left = watch.left()
        assert not dist.is_initialized()
        return left, said.getvalue()

    return run_ranks(rank, 1, process_group=False, ledger=False, timeout=60)[0]


def train_with_hooks() -> None:
    """A wrapper whose hooks are called, in a group of its own."""
    model = DDP(torch.nn.Linear(3, 2), group=dist.new_group([0]))
    model(torch.ones(2, 3)).sum().backward()
    assert model.trainable[0].grad is not None


def define_a_default() -> None:
    """A function of the learner's that is defined after joining, and stays."""

    def scaled(x: torch.Tensor, group=dist.group.WORLD, *, other=dist.group.WORLD) -> None:
        dist.all_reduce(x, group=group)

    KEPT.append(scaled)


def keep_in_a_variable() -> None:
    KEPT.append(dist.new_group([0]))


def keep_by_hooks() -> None:
    """A circle through autograd, as a learner would write it."""
    owner = Wrapper()
    owner.group = dist.new_group([0])
    owner.weight = torch.nn.Parameter(torch.ones(2))
    owner.weight.register_post_accumulate_grad_hook(owner.ready)


class Wrapper:
    def ready(self, p: torch.nn.Parameter) -> None:
        """Nothing."""


KEPT: list[object] = []


@needs_proc
@pytest.mark.parametrize("body", [train_with_hooks, define_a_default])
def test_nothing_is_left(body: Callable[[], object]) -> None:
    assert end_of(body) == ([], "")


@needs_proc
@pytest.mark.parametrize(
    ("body", "holder"),
    [
        (keep_in_a_variable, f"`KEPT` in {__name__}"),
        (keep_by_hooks, "an object of type Wrapper"),
    ],
)
def test_who_holds_a_group_is_named(body: Callable[[], object], holder: str) -> None:
    left, said = end_of(body)
    assert left
    assert said.startswith(f"process_group: {holder} still refers to a group after leaving it")
    assert said.count("\n") == 1


def test_it_can_be_joined_again() -> None:
    def body(ctx: RankContext) -> list[float]:
        found = []
        for number in range(2):
            store = dist.FileStore(f"{ctx_folder}/store{number}", 2)
            with process_group("gloo", store=store, rank=ctx.rank, world_size=2):
                x = torch.full((1,), 1.0 + ctx.rank + number)
                dist.all_reduce(x)
                found.append(x.item())
        return found

    with tempfile.TemporaryDirectory() as ctx_folder:
        found = run_ranks(body, 2, process_group=False, ledger=False, timeout=60)
    assert list(found) == [[3.0, 5.0], [3.0, 5.0]]


def test_a_failed_rank_waits_for_nobody() -> None:
    """It has begun what the other rank never takes part in; its exception comes out unchanged."""

    def body(ctx: RankContext) -> str:
        store = dist.FileStore(f"{folder}/store", 2)
        try:
            with process_group("gloo", store=store, rank=ctx.rank, world_size=2):
                dist.barrier()
                if ctx.rank == 0:
                    dist.all_reduce(torch.ones(1), async_op=True)
                    pair = dist.new_group([0, 1])
                    dist.all_reduce(torch.ones(1), group=pair, async_op=True)
                    raise KeyError("the news")
                dist.new_group([0, 1])
                store.wait(["failed"], timedelta(seconds=300))
        except KeyError as error:
            assert not dist.is_initialized()
            store.set("failed", "")
            return repr(error)
        return "has waited"

    with tempfile.TemporaryDirectory() as folder:
        found = run_ranks(body, 2, process_group=False, ledger=False, timeout=200)
    assert list(found) == ["KeyError('the news')", "has waited"]
