"""What the checks of exercises 3.15, 3.20, 3.28 and 3.32 share: training, wrapping, comparing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch._dynamo  # torch.optim imports it when an optimizer is made: once here, not per rank
from torch import Tensor, nn

from distlab.grading import expect_close, expect_equal, fail
from tests.phase3.fsdp_models import Net, batch, loss_of, net, values_of


def refused(call: Callable[[], object]) -> bool:
    """Whether ``call()`` raises ValueError."""
    try:
        call()
    except ValueError:
        return True
    return False


def steps(
    model: nn.Module, optimizer: torch.optim.Optimizer, seed: int, rank: int, numbers: range
) -> None:
    """Training steps with these numbers; half of the samples of a rank of two."""
    for number in numbers:
        optimizer.zero_grad()
        loss_of(model, batch(seed, rank, number)).backward()
        optimizer.step()


def wrapped(
    impl: Any,
    seed: int,
    offset: float = 1.0,
    units: Callable[[Net], list[nn.Module]] | None = None,
) -> tuple[nn.Module, Net, torch.optim.Optimizer]:
    """A sharded model, its inside, and AdamW for it."""
    inner = net(seed)
    inner.offset.fill_(offset)
    model = impl.module("fsdp").FSDP(inner, units(inner) if units else inner.units())
    return model, inner, torch.optim.AdamW(model.parameters(), lr=0.05)


def compare(
    got: Mapping[str, Tensor],
    want: Mapping[str, Tensor],
    what: str,
    rank: int | None = None,
    rtol: float = 0.0,
) -> None:
    """The same names, and values that are equal, or near where there is a tolerance."""
    names = sorted(want.keys() ^ got.keys())
    if names:
        fail(f"{what}: the names {names} differ from the plain module's", cause="names", rank=rank)
    for name, value in want.items():
        expect_close(got[name], value, what=f"{what}: {name}", rank=rank, rtol=rtol, atol=rtol)


class Trouble(RuntimeError):
    """What the model raises."""


def raise_once(part: nn.Module, place: str) -> Any:
    """A hook that raises in the part's forward, or in its backward."""

    def trouble(*_: object) -> None:
        raise Trouble(place)

    if place == "forward":
        return part.first.register_forward_hook(trouble)
    return part.first.register_forward_hook(lambda *args: args[-1].register_hook(trouble) and None)


def check_begins_anew(run: Any, seed: int, wrap: Callable[[Net], nn.Module]) -> None:
    """After a forward, then a backward that raised: fresh values, and the right gradients.

    The first forward then is an evaluation's.
    """

    def body(ctx):
        inner = net(seed)
        model = wrap(inner)
        shards = list(model.parameters())  # what raises may leave other tensors in the modules
        out, evaluated = [], {}
        for place in ("forward", "backward"):
            hook = raise_once(inner.blocks[-1], place)
            try:
                loss_of(model, batch(seed, ctx.rank, 5)).backward()
                out.append(f"no exception in {place}")
            except Trouble:
                out.append("")
            hook.remove()
            for shard in shards:
                shard.grad = None
                if shard.is_floating_point():
                    shard.detach().mul_(0.5)
            if place == "forward":
                evaluated = values_of(model, inner)
        loss_of(model, batch(seed, ctx.rank)).backward()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        before = {name: value.clone() for name, value in inner.values().items()}
        optimizer.step()
        return out, evaluated, before, values_of(model, inner)

    alone = net(seed)
    with torch.no_grad():
        for parameter in alone.parameters():
            parameter.mul_(0.25)
    pairs = [batch(seed, rank) for rank in range(2)]
    loss_of(alone, tuple(torch.cat(parts) for parts in zip(*pairs, strict=True))).backward()
    before = values_of(alone, alone)
    torch.optim.SGD(alone.parameters(), lr=1.0).step()
    after = values_of(alone, alone)
    near = {"rtol": 1e-9, "atol": 1e-11}
    for rank, (raised, evaluated, seen, then) in enumerate(run(body, 2)):
        expect_equal(raised, ["", ""], what="exceptions that were lost", rank=rank, cause="lost")
        for name, value in before.items():
            if torch.equal(evaluated[name], value * 4):
                fail(
                    f"{name} in an evaluation after a forward that raised on rank {rank}: the "
                    "shards have changed since, a vector that was still there was used",
                    cause="stale",
                    rank=rank,
                )
            if any(torch.equal(seen[name], value * old) for old in (2, 4)):
                fail(
                    f"{name} in the forward after two steps that raised on rank {rank}: the "
                    "shards have changed since, a vector that was still there was used",
                    cause="stale",
                    rank=rank,
                )
            what = f"{name} in the forward after two steps that raised"
            expect_close(seen[name], value, what=what, rank=rank, **near)
            if not torch.allclose(then[name], after[name], **near):
                fail(
                    f"{name} after a step of SGD, after a forward and a backward that raised, on "
                    f"rank {rank}: the values in forward are right, the gradient is not that of "
                    "this backward alone: forget what the one that raised has left",
                    cause="old-gradient",
                    rank=rank,
                )


class Odd(nn.Module):
    """Tied, transposed, 0-d, empty and frozen parameters of four dtypes; several buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.turned = nn.Parameter(torch.randn(3, 5).t())
        self.scalar = nn.Parameter(torch.randn(()))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.wide = nn.Parameter(torch.randn(7, dtype=torch.float64))
        self.coarse = nn.Parameter(torch.randn(3).bfloat16())
        self.tied = self.wide
        numbers = torch.tensor([2**53 + 1, -5, 2**60 + 3])
        self.numbers = nn.Parameter(numbers, requires_grad=False)
        self.register_buffer("nothing", None)
        self.register_buffer("count", torch.tensor(2**53 + 1))
        self.register_buffer("mean", torch.randn(2, 2).t())
        self.register_buffer("scratch", torch.zeros(4), persistent=False)


class Odds(nn.Module):
    """Three of them: two units and one in the root."""

    def __init__(self) -> None:
        super().__init__()
        self.root, self.one, self.two = Odd(), Odd(), Odd()

    def units(self) -> list[nn.Module]:
        return [self.one, self.two]


def odds(seed: int) -> Odds:
    """The same on every rank."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Odds()


def expect_state(
    got: Any,
    want: Mapping[str, Tensor],
    what: str,
    rank: int | None = None,
    cause: str = "wrong",
) -> None:
    """The same names, shapes, dtypes and values, on the CPU."""
    if not isinstance(got, Mapping):
        fail(f"{what}: expected a dictionary, got {got!r}", cause="type", rank=rank)
    names = sorted(want.keys() ^ got.keys())
    if names:
        fail(f"{what}: the names {names} differ from the plain module's", cause="names", rank=rank)
    for name, value in want.items():
        found = got[name]
        kind = (found.dtype, found.shape) if isinstance(found, Tensor) else type(found)
        right = value.dtype, value.shape
        expect_equal(kind, right, what=f"{what}: {name}", rank=rank, cause="dtype-or-shape")
        if not torch.equal(found, value):
            pair = found.flatten().tolist(), value.flatten().tolist()
            k = next(k for k, (a, b) in enumerate(zip(*pair, strict=True)) if a != b)
            text = f"{what}: element {k} of {name} is {pair[0][k]!r}, expected {pair[1][k]!r}"
            fail(text, cause=cause, rank=rank)
