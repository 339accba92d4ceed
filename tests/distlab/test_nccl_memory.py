"""Memory in flight under NCCL's rules: who touches it before the wait is named, with the line."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from distlab.ranks import RankContext, RankFailure
from distlab.virtual import run_virtual

HERE = (__file__,)
Touch = Callable[[torch.Tensor], Any]
BOTH = {"rules": "nccl", "seed": 1, "seeds": 2, "learner_files": HERE}


def run(body: Callable[[RankContext], Any], world_size: int = 2) -> Any:
    run_virtual(body, world_size, **BOTH | {"seed": None, "seeds": 1})
    return run_virtual(body, world_size, **BOTH)


def failure_of(body: Callable[[RankContext], Any], world_size: int = 2) -> RankFailure:
    with pytest.raises(RankFailure) as caught:
        run_virtual(body, world_size, **BOTH)
    return caught.value


def exchanging(touch: Touch, side: str) -> Callable[[RankContext], torch.Tensor]:
    """Exchange eight numbers; ``touch`` one side's buffer before the wait."""

    def body(ctx: RankContext) -> torch.Tensor:
        other = 1 - ctx.rank
        whole = torch.arange(20.0, device=ctx.device)
        sides = {"recv": whole[:8], "send": whole[8:16], "rest": whole[16:], "all": whole}
        ends = [
            dist.P2POp(dist.irecv, sides["recv"], other),
            dist.P2POp(dist.isend, sides["send"], other),
        ]
        (handle,) = dist.batch_isend_irecv(ends)
        touch(sides[side])
        handle.wait()
        return whole

    return body


def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


TOUCHES: list[tuple[str, Touch, str]] = [
    ("recv", lambda x: x + 1, "read-in-flight"),
    ("recv", lambda x: x[2:3].item(), "read-in-flight"),
    ("recv", lambda x: x.view(2, 4).t().sum(), "read-in-flight"),
    ("recv", lambda x: torch.cat([x, x]), "read-in-flight"),
    ("recv", lambda x: torch.ones_like(x).copy_(x), "read-in-flight"),
    ("recv", lambda x: x.cpu(), "read-in-flight"),
    ("recv", lambda x: x.zero_(), "overwritten-in-flight"),
    ("recv", lambda x: torch.neg(torch.ones(8, device=x.device), out=x), "overwritten-in-flight"),
    ("send", lambda x: x.add_(1), "overwritten-in-flight"),
    ("send", lambda x: x[::3].fill_(1), "overwritten-in-flight"),
    ("send", lambda x: x.untyped_storage().resize_(0), "overwritten-in-flight"),
    ("all", lambda x: x.sum(), "read-in-flight"),
]


@pytest.mark.parametrize(("side", "touch", "cause"), TOUCHES)
def test_a_touch_before_the_wait(side: str, touch: Touch, cause: str) -> None:
    failure = failure_of(exchanging(touch, side))
    assert failure.cause == cause
    assert failure.rank in (0, 1)
    assert f"rank {failure.rank} " in failure.message
    assert "while it is in flight" in failure.message
    assert failure.line.startswith("test_nccl_memory.py:")
    assert "lambda x: " in failure.line


INNOCENT: list[tuple[str, Touch]] = [
    ("send", lambda x: x + 1),
    ("send", lambda x: x.sum().item()),
    ("rest", lambda x: x.add_(1).sum()),
    ("recv", lambda x: x.view(2, 4).detach()[1:]),
    ("recv", lambda x: (x.shape, x.dtype, x.device, x.numel())),
    ("all", lambda x: torch.zeros_like(x[::17]).shape),
    ("all", lambda x: x.as_strided((2, 2), (2, 1), 16).add_(1)),
    ("all", lambda x: x.as_strided((2,), (8,), 8).sum()),
]


@pytest.mark.parametrize(("side", "touch"), INNOCENT)
def test_a_touch_of_something_else(side: str, touch: Touch) -> None:
    values = run(exchanging(touch, side))
    assert values[0][:8].tolist() == values[1][:8].tolist() == [*map(float, range(8, 16))]


@pytest.mark.parametrize("op", ["all_reduce", "broadcast", "all_gather"])
def test_collectives_are_in_flight_as_well(op: str) -> None:
    def body(ctx: RankContext) -> None:
        x, whole = (torch.ones(n, device=ctx.device) for n in (4, 8))
        if op == "all_gather":
            handle = dist.all_gather_into_tensor(whole, x, async_op=True)
        else:
            whole = x
            more = {"src": 0} if op == "broadcast" else {}
            handle = getattr(dist, op)(x, async_op=True, **more)
        doubled(whole)
        handle.wait()

    failure = failure_of(body)
    assert failure.cause == "read-in-flight"
    assert op in failure.message
    assert "return x * 2" in failure.line
    assert op != "broadcast" or failure.rank == 1  # the root's is only read


def test_what_arrives_is_poisoned_until_the_wait() -> None:
    """Read past torch, which would refuse it."""

    def body(ctx: RankContext) -> list[float]:
        x, n = torch.full((4,), 7.0), torch.full((4,), 7)
        floats, integers = (t.to(ctx.device) for t in (x, n))
        seen = []
        for tensor, kind in ((floats, "f"), (integers, "q")):
            if ctx.rank == 0:
                dist.send(tensor, 1)
                continue
            handle = dist.irecv(tensor, 0)
            first = ctypes.string_at(tensor.data_ptr(), tensor.element_size())
            seen.append(memoryview(first).cast(kind)[0])
            handle.wait()
            seen.append(tensor[0].item())
        return [str(value) for value in seen]

    assert run(body)[1] == ["nan", "7.0", str(2**63 - 1), "7"]


def test_two_messages_into_one_buffer() -> None:
    def body(ctx: RankContext) -> None:
        x = torch.ones(4, device=ctx.device)
        if ctx.rank == 0:
            ends = [dist.P2POp(dist.irecv, x, 1), dist.P2POp(dist.irecv, x[2:], 1)]
        else:
            ends = [dist.P2POp(dist.isend, x, 0), dist.P2POp(dist.isend, x[2:], 0)]
        for handle in dist.batch_isend_irecv(ends):
            handle.wait()

    assert failure_of(body).cause == "two-in-one-buffer"


def test_a_handle_that_nobody_waits_for() -> None:
    def body(ctx: RankContext) -> None:
        dist.all_reduce(torch.ones(4, device=ctx.device), async_op=True)

    failure = failure_of(body)
    assert failure.cause == "never-waited"


def test_waiting_for_the_gpu_is_waiting() -> None:
    def body(ctx: RankContext) -> float:
        x = torch.ones(4, device=ctx.device)
        dist.all_reduce(x, async_op=True)
        torch.cuda.synchronize()
        return x.sum().item()

    assert [*run(body)] == [8.0, 8.0]
