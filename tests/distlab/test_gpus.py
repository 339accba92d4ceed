"""GPUs are kept out of the process that forks ranks, and shown to ranks that are to use them."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from distlab.course.catalogue import load_course
from distlab.grading import runners
from distlab.grading.session import Request, Session
from distlab.grading.verdicts import NotRun
from distlab.host import gpus
from distlab.observe.log import sent_from_shared_gpu
from distlab.ranks import RankContext, RankFailure, fork_problem, run_ranks
from distlab.virtual import run_virtual


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose GPUs 4 and 6 are this user's, as PyTorch tells it."""
    monkeypatch.setattr(gpus, "_before", None)
    monkeypatch.setattr(gpus, "_found", 0)
    monkeypatch.setenv(gpus.VISIBLE, "4,6")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(visible()))


def visible() -> list[str]:
    """What this process is shown."""
    return [number for number in os.environ.get(gpus.VISIBLE, "").split(",") if number]


@pytest.mark.usefixtures("two_gpus")
def test_hidden_here_counted_and_shown_to_ranks() -> None:
    assert gpus.count() == 2
    gpus.hide()
    assert (visible(), gpus.count()) == ([], 2)
    gpus.hide()  # once more changes nothing
    assert gpus.environment()[gpus.VISIBLE] == "4,6"
    gpus.show()
    assert (visible(), gpus.count()) == (["4", "6"], 2)


@pytest.mark.usefixtures("two_gpus")
def test_without_nvml_another_process_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch would ask CUDA here, and then no fork could use a GPU."""
    asked = []

    def ask_cuda() -> int:
        asked.append(os.getpid())
        return len(visible())

    monkeypatch.setattr(torch.cuda, "device_count", ask_cuda)
    monkeypatch.setattr(torch.cuda, "_device_count_nvml", lambda: -1)
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    assert gpus.count() == 2
    gpus.hide()
    assert (visible(), gpus.count()) == ([], 2)
    assert not asked
    monkeypatch.setattr(torch.cuda, "_device_count_nvml", lambda: 2)
    monkeypatch.setattr(gpus, "_before", None)
    gpus.count()
    assert asked == [os.getpid()]


def test_a_variable_that_was_not_set_is_not_set_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "_before", None)
    monkeypatch.delenv(gpus.VISIBLE, raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    gpus.hide()
    assert os.environ[gpus.VISIBLE] == ""
    gpus.show()
    assert gpus.VISIBLE not in os.environ


@pytest.mark.usefixtures("two_gpus")
def test_a_process_that_uses_its_gpus_keeps_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    gpus.hide()
    assert visible() == ["4", "6"]
    assert "in use" in fork_problem()


@pytest.mark.usefixtures("two_gpus")
def test_forks_that_reach_no_gpu_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where CUDA was asked while they were hidden."""
    monkeypatch.setattr(gpus, "_spent", False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(visible()))
    gpus.hide()
    assert fork_problem("cuda") == ""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "no GPU" in fork_problem("cuda")
    assert fork_problem() == ""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert "no GPU" in fork_problem("cuda")  # what CUDA has answered stays


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize("run", [run_ranks, run_virtual])
def test_ranks_on_the_cpu_see_none(run: Callable[..., Any]) -> None:
    assert list(run(lambda ctx: len(visible()), 2)) == [0, 0]
    assert gpus.count() == 2


@pytest.mark.parametrize("run", [run_ranks, run_virtual])
def test_backward_here_and_then_in_ranks(run: Callable[..., Any]) -> None:
    """Where there is a GPU, the first one starts threads that no fork has."""

    def slope(factor: float) -> float:
        x = torch.ones(3, requires_grad=True)
        (factor * x).sum().backward()
        assert x.grad is not None
        return x.grad.sum().item()

    gpus.hide()
    assert slope(2) == 6
    assert list(run(lambda ctx: slope(ctx.rank), 2)) == [0, 3]


def of_shared_gpu(ctx: RankContext) -> None:
    raise sent_from_shared_gpu("send")


@pytest.mark.usefixtures("two_gpus")
def test_messages_between_ranks_on_one_gpu_need_more_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """And where each rank has one, nobody may claim it."""
    runner = Session(Request()).runner(load_course().exercise("1.7"), "cuda")
    monkeypatch.setattr(runners.Here, "run_ranks", staticmethod(on_the_cpu))
    with pytest.raises(NotRun) as caught:
        runner(of_shared_gpu, 3)
    assert caught.value.result.verdict == "needs"
    assert caught.value.result.message.startswith("3 GPUs: send of a tensor on a GPU that several")
    with pytest.raises(RankFailure):
        runner(of_shared_gpu, 2)


def on_the_cpu(body: Callable[..., Any], world_size: int, **options: Any) -> list[Any]:
    return run_ranks(body, world_size, **options | {"device": "cpu"})


def test_messages_of_a_shared_gpu_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """gloo would abort the process."""

    def body(ctx: RankContext) -> None:
        monkeypatch.setattr(torch.Tensor, "is_cuda", True)
        if ctx.rank:
            dist.recv(torch.ones(2), 0)
        else:
            dist.send(torch.ones(2), 1)

    with pytest.raises(RankFailure) as caught:
        run_ranks(body, 2)
    assert caught.value.cause == "shared-gpu"
