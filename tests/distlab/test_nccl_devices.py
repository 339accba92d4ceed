"""GPUs that are none: what a program is told of devices under NCCL's rules, and what is refused."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from distlab.ranks import RankContext, RankFailure
from distlab.virtual import run_virtual

HERE = (__file__,)
Body = Callable[[RankContext], Any]


def run(body: Body, world_size: int = 2, **options: Any) -> Any:
    """The results by all of NCCL's rules."""
    return run_virtual(body, world_size, **{"rules": "nccl", "learner_files": HERE} | options)


def failure_of(body: Body, world_size: int = 2, **options: Any) -> RankFailure:
    with pytest.raises(RankFailure) as caught:
        run(body, world_size, **options)
    return caught.value


# -- where tensors are ---------------------------------------------------------------------------
def test_tensors_are_where_they_are_made_or_moved() -> None:
    def body(ctx: RankContext) -> None:
        gpu, host = ctx.device, torch.ones(3)
        assert gpu == torch.device("cuda", ctx.rank)
        made = [
            torch.empty(3, device=gpu),
            torch.zeros(3, device="cuda"),
            torch.tensor([1.0, 2.0], device=gpu),
            torch.as_tensor([1], device=str(gpu)),
            torch.arange(4, device=gpu),
            torch.rand(3, device=gpu),
            host.to(gpu),
            host.to("cuda"),
            host.to(gpu, torch.float64),
            host.cuda(),
            torch.zeros_like(host, device=gpu),
            host.new_ones(2, device=gpu),
            nn.Linear(2, 2, device=gpu).weight,
        ]
        for number, tensor in enumerate(made):
            assert tensor.device == gpu, number
            assert tensor.is_cuda, number
            assert not tensor.is_cpu, number
            assert tensor.get_device() == ctx.rank, number
            assert (tensor + 1).device == tensor.view(-1)[:1].device == gpu, number
            assert torch.ones_like(tensor).device == tensor.new_empty(1).device == gpu, number
            assert tensor.cpu().device.type == tensor.to("cpu").device.type == "cpu", number
        for tensor in (host, torch.zeros(2), torch.tensor(1), torch.from_numpy(host.numpy())):
            assert tensor.device.type == "cpu"
            assert not tensor.is_cuda

    run(body)


def test_a_tensor_that_is_there_is_not_copied() -> None:
    def body(ctx: RankContext) -> None:
        x = torch.ones(3, device=ctx.device)
        assert x.to(ctx.device) is x
        assert x.cuda() is x
        assert x.to(torch.zeros(1, device=ctx.device)) is x
        assert x.to(ctx.device, copy=True) is not x
        there = torch.ones(3)
        assert there.cpu() is there
        there.copy_(x)
        assert there.device.type == "cpu"

    run(body)


def test_a_training_step_is_on_the_gpu_forward_and_backward() -> None:
    def body(ctx: RankContext) -> float:
        torch.manual_seed(0)
        layers = [nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(72, 8), nn.LayerNorm(8), nn.ReLU()]
        model = nn.Sequential(*layers, nn.Dropout(0.1), nn.Linear(8, 3)).to(ctx.device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        x, y = torch.randn(4, 1, 8, 8), torch.tensor([0, 1, 2, 0])
        x, y = x.to(ctx.device), y.to(ctx.device)
        seen: list[torch.device] = []
        model[0].register_full_backward_hook(lambda *given: seen.append(given[2][0].device))
        for _ in range(2):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y) + model(x)[:, 1:].cumprod(0).sum()
            loss.backward()
            for p in model.parameters():
                assert p.grad is not None
                assert p.grad.device == ctx.device
                dist.all_reduce(p.grad, op=dist.ReduceOp.AVG)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        assert {*seen} == {ctx.device}
        return float(loss)

    values = run(body)
    assert values[0] == values[1]


@pytest.mark.parametrize(
    "mix",
    [
        lambda gpu: torch.ones(3, device=gpu) + torch.ones(3),
        lambda gpu: nn.Linear(3, 3).to(gpu)(torch.ones(3)),
        lambda gpu: nn.Linear(3, 3)(torch.ones(3, device=gpu)),
        lambda gpu: torch.cat([torch.ones(3), torch.ones(3, device=gpu)]),
        lambda gpu: torch.ones(3, device=gpu).add_(torch.zeros(3, device="cpu")),
    ],
)
def test_two_devices_in_one_operator(mix: Callable[[torch.device], torch.Tensor]) -> None:
    failure = failure_of(lambda ctx: mix(ctx.device))
    assert "Expected all tensors to be on the same device" in failure.message


def test_numbers_of_the_host_go_with_all() -> None:
    def body(ctx: RankContext) -> None:
        x = torch.arange(4.0, device=ctx.device)
        assert (x * torch.tensor(2.0)).device == ctx.device
        assert x[torch.tensor([0, 2])].device == ctx.device
        x[torch.tensor([1])] = 3
        x[0] = torch.tensor(5.0)

    run(body)


def test_generators_draw_for_their_own_device() -> None:
    def right(ctx: RankContext) -> torch.Tensor:
        generator = torch.Generator(ctx.device).manual_seed(3)
        assert generator.device == ctx.device
        return torch.rand(3, generator=generator, device=ctx.device).cpu()

    def wrong(ctx: RankContext) -> torch.Tensor:
        return torch.rand(3, generator=torch.Generator(), device=ctx.device)

    torch.testing.assert_close(run(right)[0], run(right)[1])
    assert "Expected a 'cuda' device type for generator" in failure_of(wrong).message


def test_numpy_reads_the_host_only() -> None:
    assert (
        "Use Tensor.cpu()" in failure_of(lambda c: torch.ones(1, device=c.device).numpy()).message
    )
    assert run(lambda c: float(torch.ones(1, device=c.device).cpu().numpy()[0]))[0] == 1.0


def test_objects_go_by_the_gpu() -> None:
    def body(ctx: RankContext) -> list[Any]:
        found: list[Any] = [None, None]
        dist.all_gather_object(found, {"rank": ctx.rank})
        return found

    assert run(body)[1] == [{"rank": 0}, {"rank": 1}]


# -- what the host reads -------------------------------------------------------------------------
READS: list[tuple[str, int, Callable[[torch.Tensor], Any]]] = [
    ("item", 1, lambda x: x[0].item()),
    ("bool", 1, lambda x: bool(x[0] > 0)),
    ("float", 1, lambda x: float(x.sum())),
    ("tolist", 1, lambda x: x.tolist()),
    ("cpu", 1, lambda x: x.cpu()),
    ("copy", 1, lambda x: torch.zeros(3).copy_(x)),
    ("equal", 1, lambda x: torch.equal(x, x + 1)),
    ("nonzero", 1, lambda x: x.nonzero()),
    ("arithmetic", 0, lambda x: (x * 2).sum().add_(1)),
    ("move there", 1, lambda x: x.copy_(torch.ones(3))),
    ("made there", 1, lambda x: torch.tensor([1.0, 2.0], device=x.device)),
    ("new there", 1, lambda x: x + x.new_tensor([1.0, 2.0, 3.0])),
    ("as there", 1, lambda x: torch.as_tensor([1.0], device=x.device)),
    ("to", 1, lambda x: torch.ones(3).to(x.device)),
    ("synchronise", 1, lambda x: torch.cuda.synchronize()),
    ("move beside", 0, lambda x: x.copy_(torch.ones(3), non_blocking=True)),
    ("to beside", 0, lambda x: torch.ones(3).to(x.device, non_blocking=True)),
    ("cuda beside", 0, lambda x: torch.ones(3).cuda(non_blocking=True)),
    ("fill there", 0, lambda x: torch.full((3,), 2.0, device=x.device)),
    ("number", 0, lambda x: x.__setitem__(0, 4.0)),
    ("on the host", 0, lambda x: torch.ones(3).sum().item()),
]


@pytest.mark.parametrize(("name", "count", "look"), READS, ids=[name for name, *_ in READS])
def test_reads_of_the_host_are_counted(name: str, count: int, look: Callable[..., Any]) -> None:
    def body(ctx: RankContext) -> None:
        x = torch.ones(3, device=ctx.device)
        with ctx.region("looks"):
            look(x)

    for reads in run(body).host_reads:
        assert len(reads) == count
        for read in reads:
            assert read.region == "looks"
            assert f'("{name}", 1, lambda' in read.line


# -- what is refused -----------------------------------------------------------------------------
def full(ctx: RankContext, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(4, dtype=dtype, device=ctx.device)


def message(ctx: RankContext, tensor: torch.Tensor, **more: Any) -> None:
    dist.send(tensor, 1, **more) if ctx.rank == 0 else dist.recv(tensor, 0, **more)


def raw(ctx: RankContext, tensor: torch.Tensor) -> None:
    """Without the view as real numbers that torch's own functions take."""
    dist.group.WORLD.send([tensor], 1 - ctx.rank, 0).wait()


REFUSED: list[tuple[str, str, Callable[[RankContext], Any]]] = [
    ("RuntimeError", "No backend type associated with", lambda c: dist.all_reduce(torch.ones(3))),
    ("RuntimeError", "No backend type associated with", lambda c: message(c, torch.ones(3))),
    ("RuntimeError", "does not support recvAnysource", lambda c: dist.recv(full(c))),
    ("ValueError", "NCCL ignores tags", lambda c: message(c, full(c), tag=3)),
    ("ValueError", "Cannot use ReduceOp.BAND", lambda c: reduced(c, dist.ReduceOp.BAND)),
    ("ValueError", "Cannot use ReduceOp.BOR", lambda c: reduced(c, dist.ReduceOp.BOR)),
    ("ValueError", "Cannot use ReduceOp.BXOR", lambda c: reduced(c, dist.ReduceOp.BXOR)),
    ("ValueError", "only implemented for GLOO", lambda c: dist.group.WORLD.monitored_barrier()),
    ("ValueError", "must be contiguous", lambda c: dist.all_reduce(full(c)[::2])),
    ("ValueError", "must be contiguous", lambda c: message(c, full(c)[::2])),
    ("TypeError", "not supported for NCCL", lambda c: message(c, full(c, torch.int16))),
    ("TypeError", "not supported for NCCL", lambda c: dist.all_reduce(full(c, torch.int16))),
    ("TypeError", "not supported for NCCL", lambda c: raw(c, full(c, torch.complex64))),
    (
        "DistBackendError",
        "not on device passed to init_process_group",
        lambda c: dist.all_reduce(torch.ones(3, device=f"cuda:{1 - c.rank}")),
    ),
]


FORGIVEN = {
    "No backend type associated with",
    "does not support recvAnysource",
    "NCCL ignores tags",
    "Cannot use ReduceOp.BOR",
    "not supported for NCCL",
}


def reduced(ctx: RankContext, op: Any) -> None:
    dist.all_reduce(full(ctx, torch.int32), op=op)


@pytest.mark.parametrize(("kind", "words", "body"), REFUSED)
def test_what_nccl_refuses(kind: str, words: str, body: Body) -> None:
    failure = failure_of(body, seed=1)
    first = failure.message.splitlines()[0]
    assert "gloo forgives it" in first or words not in FORGIVEN
    assert f"raised {kind}: " in first
    assert words in first
    assert "test_nccl_devices.py:" in failure.line


def test_what_nccl_takes() -> None:
    def body(ctx: RankContext) -> list[Any]:
        flags, pairs, mean = (full(ctx, d) for d in (torch.bool, torch.complex64, torch.float16))
        dist.all_reduce(flags)
        dist.all_reduce(pairs)
        dist.all_reduce(mean, op=dist.ReduceOp.AVG)
        message(ctx, full(ctx, torch.uint8))
        message(ctx, full(ctx, torch.complex64))
        return [flags[0].item(), pairs[0].item().real, mean[0].item()]

    assert run(body)[0] == [True, 2.0, 1.0]


def test_cuda_is_there() -> None:
    def body(ctx: RankContext) -> list[Any]:
        torch.cuda.set_device(ctx.device)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in "ab")
        begin.record()
        x = full(ctx)
        handle = dist.all_reduce(x, async_op=True)
        torch.cuda.synchronize()
        end.record()
        value = x[0].item()
        handle.wait()
        assert begin.elapsed_time(end) >= 0
        there = torch.cuda.is_available(), torch.cuda.device_count(), torch.cuda.current_device()
        return [*there, value]

    assert run(body) == [[True, 2, 0, 2.0], [True, 2, 1, 2.0]]


def test_autocast_casts() -> None:
    def body(ctx: RankContext) -> None:
        layer, x = nn.Linear(3, 3).to(ctx.device), torch.ones(2, 3, device=ctx.device)
        for dtype in (torch.bfloat16, torch.float16):
            with torch.autocast("cuda", dtype=dtype):
                assert torch.is_autocast_enabled("cuda")
                assert torch.get_autocast_dtype("cuda") == dtype
                y = layer(x)
            assert y.dtype == dtype
            y.float().sum().backward()
        assert layer.weight.grad is not None
        assert layer.weight.grad.device == ctx.device

    run(body)


def test_a_gradient_goes_back_to_where_its_tensor_is() -> None:
    def body(ctx: RankContext) -> None:
        host = torch.ones(3, requires_grad=True)
        (host.to(ctx.device) * 2).sum().backward()
        assert host.grad is not None
        assert host.grad.device.type == "cpu"
        assert host.grad.tolist() == [2.0] * 3

    run(body)


def test_a_thread_beside_the_rank_moves_tensors() -> None:
    def body(ctx: RankContext) -> list[float]:
        x, found = torch.ones(2, device=ctx.device), []
        thread = threading.Thread(target=lambda: found.extend(x.cpu().tolist()))
        thread.start()
        thread.join()
        return found

    results = run(body)
    assert [*results] == [[1.0, 1.0]] * 2
    assert results.host_reads == [[], []]
