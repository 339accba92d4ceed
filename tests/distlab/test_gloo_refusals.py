"""What gloo refuses or moves wrongly is refused by virtual ranks; what it takes they take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from distlab.ranks import RankContext, RankFailure, run_ranks
from distlab.virtual import run_virtual

Call = Callable[[RankContext], Any]
SIZE = 4


def dense(ctx: RankContext, scale: int = 1) -> Tensor:
    """Numbers by row and column, which differ by rank."""
    return torch.arange(SIZE * SIZE).view(SIZE, SIZE) * scale + 100.0 * ctx.rank


def turned(ctx: RankContext, scale: int = 1) -> Tensor:
    """The same numbers, column by column in memory."""
    return dense(ctx, scale).t().contiguous().t()


def gaps(ctx: RankContext, scale: int = 1) -> Tensor:
    """The same numbers; there are others between them in memory."""
    return torch.stack([dense(ctx, scale), torch.full((SIZE, SIZE), 7.0)], 2)[..., 0]


def full(dtype: torch.dtype) -> Tensor:
    return torch.ones(4, 4).to(dtype)


def rooted(ctx: RankContext, call: Callable[..., Any], one: Tensor, many: list[Tensor]) -> None:
    call(one, many if ctx.rank == 0 else None, 0)


def message(ctx: RankContext, tensor: Tensor) -> None:
    (dist.recv if ctx.rank else dist.send)(tensor, 1 - ctx.rank)


REFUSED: dict[str, Call] = {
    "Invalid scalar type": lambda c: dist.all_reduce(full(torch.int16)),
    "Invalid scalar type ": lambda c: dist.broadcast(full(torch.uint16), 0),
    "Invalid scalar type  ": lambda c: rooted(
        c, dist.gather, full(torch.complex64), [full(torch.complex64) for _ in range(2)]
    ),
    "Cannot use ReduceOp.BOR with non-integral dtype": lambda c: dist.all_reduce(
        full(torch.float32), dist.ReduceOp.BOR
    ),
    "input tensor has to be contiguous": lambda c: message(c, gaps(c)),
}


def said(ctx: RankContext) -> list[str]:
    """What each refused call raises: its type and its message."""
    found = []
    for call in REFUSED.values():
        try:
            call(ctx)
            found.append("nothing")
        except RuntimeError as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


def test_what_gloo_refuses() -> None:
    for run in (run_ranks, run_virtual):
        for every in run(said, 2, ledger=False):
            for words, got in zip(REFUSED, every, strict=True):
                assert got.startswith(f"RuntimeError: {words.strip()}"), (run.__name__, got)


def outputs(ctx: RankContext, make: Callable[..., Tensor]) -> list[Tensor]:
    return [make(ctx, 0) for _ in range(2)]


def gathered(ctx: RankContext, make: Callable[..., Tensor], given: Tensor) -> list[Tensor]:
    out = outputs(ctx, make)
    dist.all_gather(out, given)
    return out


def scattered(ctx: RankContext, make: Callable[..., Tensor]) -> Tensor:
    out = make(ctx, 0)[:2]
    dist.reduce_scatter_tensor(out, dense(ctx))
    return out


def joined(ctx: RankContext) -> Tensor:
    out = torch.empty(2 * SIZE, SIZE)
    dist.all_gather_into_tensor(out, turned(ctx))
    return out


def summed(ctx: RankContext, make: Callable[..., Tensor]) -> Tensor:
    dist.all_reduce(x := make(ctx))
    return x


def copied(ctx: RankContext, make: Callable[..., Tensor]) -> Tensor:
    dist.broadcast(x := make(ctx), 0)
    return x


def dealt(ctx: RankContext, make: Callable[..., Tensor]) -> Tensor:
    rooted(ctx, dist.scatter, out := dense(ctx, 0), [make(ctx), make(ctx, 2)])
    return out


TAKEN: list[Call] = [
    lambda c: summed(c, turned),
    lambda c: copied(c, turned),
    lambda c: gathered(c, gaps, dense(c)),
    lambda c: gathered(c, turned, gaps(c)),
    lambda c: scattered(c, gaps),
    lambda c: scattered(c, turned),
    joined,
]


def test_what_gloo_takes() -> None:
    def body(ctx: RankContext) -> list[Any]:
        return [call(ctx) for call in TAKEN]

    real, virtual = run_ranks(body, 2), run_virtual(body, 2)
    for rank in range(2):
        torch.testing.assert_close(virtual[rank], real[rank], rtol=0, atol=0)


WRONG: dict[str, tuple[Call, Call]] = {  # and the same where gloo is right
    "all_reduce": (lambda c: summed(c, gaps), lambda c: summed(c, dense)),
    "broadcast": (lambda c: copied(c, gaps), lambda c: copied(c, dense)),
    "scatter": (lambda c: dealt(c, turned), lambda c: dealt(c, dense)),
}


def test_what_gloo_moves_to_other_places() -> None:
    def body(ctx: RankContext) -> list[Any]:
        return [[wrong(ctx), right(ctx)] for wrong, right in WRONG.values()]

    real = run_ranks(body, 2)
    for number, (name, (wrong, _)) in enumerate(WRONG.items()):
        assert not all(torch.equal(*real[rank][number]) for rank in range(2))
        with pytest.raises(RankFailure, match=f"{name} was given tensors with strides") as caught:
            run_virtual(wrong, 2)
        assert "gloo moves memory as it lies" in caught.value.message


def test_strides_that_differ_by_rank() -> None:
    def body(ctx: RankContext) -> Tensor:
        return summed(ctx, turned if ctx.rank else dense)

    right = 2.0 * torch.arange(SIZE * SIZE).view(SIZE, SIZE) + 100
    assert not torch.equal(run_ranks(body, 2)[0], right)
    with pytest.raises(RankFailure, match="ranks pass tensors with other strides") as caught:
        run_virtual(body, 2)
    assert caught.value.kind == "mismatch"
    assert "(4, 1) on rank 0, (1, 4) on rank 1" in caught.value.message
