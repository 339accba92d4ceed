"""What the checks of exercises 3.15 to 3.20 train: awkward shapes, and a stack for measuring."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distlab.grading import expect_close, fail
from distlab.ranks import RankContext
from distlab.reference.workloads import GPT
from tests.phase3.raised import reworded

WIDTH = 5
LAYERS = ("frozen.weight", "first.weight", "first.bias", "second.weight", "second.bias")
BLOCK = ("shift", "turned", *LAYERS)
FROZEN = "frozen"


class Block(nn.Module):
    """A tied weight, one without a dimension, a transposed one, a frozen layer that is first."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.tensor(0.5))
        self.turned = nn.Parameter(torch.randn(WIDTH, 2).t())
        self.frozen = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.second.weight = self.first.weight
        self.seen: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        self.seen = {name: attrgetter(name)(self).detach().clone() for name in BLOCK}
        inside = self.first(self.frozen(x)) * self.turned[0] + self.turned[1]
        return x + self.shift * self.second(torch.tanh(inside))


class Spare(nn.Module):
    """A matrix that shows its values when it is used at all."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 3))
        self.seen = torch.empty(0)

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.weight.detach().clone()
        return x @ self.weight


class Net(nn.Module):
    """Three blocks, one that is never used, and odd layers around them with a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(3, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.unused = Spare()
        self.head = nn.Linear(WIDTH, 2, bias=False)
        self.register_buffer("offset", torch.ones(2))
        self.seen: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        names = ("inside.weight", "inside.bias", "head.weight")
        self.seen = {name: attrgetter(name)(self).detach().clone() for name in names}
        x = self.inside(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x) + self.offset

    def units(self) -> list[nn.Module]:
        """What is sharded on its own; the rest is the root's."""
        return [*self.blocks, self.unused]

    def values(self) -> dict[str, Tensor]:
        """The parameters as the last forward saw them, by name."""
        blocks = {
            f"blocks.{k}.{name}": value
            for k, block in enumerate(self.blocks)
            for name, value in block.seen.items()
        }
        return self.seen | blocks


def net(seed: int, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float64) -> Net:
    """The same on every rank; drawn on the CPU."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Net().to(device, dtype)


def batch(
    seed: int,
    rank: int,
    step: int = 0,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Two samples of a rank: inputs (2, 3), targets (2, 2)."""
    generator = torch.Generator().manual_seed(seed * 1000 + rank * 100 + step)
    inputs = torch.randn(2, 3, generator=generator, dtype=torch.float64)
    targets = torch.randn(2, 2, generator=generator, dtype=torch.float64)
    return inputs.to(device, dtype), targets.to(device, dtype)


def loss_of(model: nn.Module, pair: tuple[Tensor, Tensor]) -> Tensor:
    """Mean squared error."""
    return ((model(pair[0]) - pair[1]) ** 2).mean()


use_of_freed_is_told = functools.partial(
    reworded,
    "storage of size 0",
    "backward used a parameter whose storage is freed: gather a unit again before its backward, "
    "and free it only when its whole backward is done",
    "freed-too-early",
)


def own_gradients(
    seed: int, ranks: Iterable[int], step: int = 0, data: int | None = None
) -> list[dict[str, Tensor]]:
    """Each rank's gradients by the plain model, of what has any; ``data``: the batches' seed."""
    alone, found = net(seed), []
    for rank in ranks:
        alone.zero_grad()
        loss_of(alone, batch(seed if data is None else data, rank, step)).backward()
        named = alone.named_parameters()
        found.append({name: p.grad for name, p in named if p.grad is not None})
    return found


def values_of(model: nn.Module, inner: Net) -> dict[str, Tensor]:
    """The full parameters, as a forward sees them."""
    with torch.no_grad():
        model(torch.zeros(1, 3, dtype=inner.offset.dtype, device=inner.offset.device))
    return {name: value.cpu() for name, value in inner.values().items()}


def gradient_pieces(model: nn.Module) -> list[dict[str, Any]]:
    """The gradients of this rank's shards, and which part of which plain parameters they are."""
    return [
        {
            "names": [[name for _, _, name in places] for places in flat.places],
            "shapes": [list(shape) for shape in flat.shapes],
            "start": min(dist.get_rank(flat.group) * flat.chunk, flat.numel),
            "values": flat.shard.grad.cpu(),
        }
        for unit in model.units
        for flat in unit.flats
        if flat.shard.grad is not None
    ]


def merged_gradients(pieces: list[list[dict[str, Any]]]) -> dict[str, Tensor]:
    """The whole gradients by name, from the pieces of all ranks."""
    units: dict[str, list[dict[str, Any]]] = {}
    for piece in (piece for mine in pieces for piece in mine):
        units.setdefault(piece["names"][0][0], []).append(piece)
    whole: dict[str, Tensor] = {}
    for shards in units.values():
        vector = torch.cat([s["values"] for s in sorted(shards, key=lambda s: s["start"])])
        shapes = [torch.Size(shape) for shape in shards[0]["shapes"]]
        parts = vector.split([shape.numel() for shape in shapes])  # raises if elements are missing
        for part, shape, names in zip(parts, shapes, shards[0]["names"], strict=True):
            whole |= dict.fromkeys(names, part.view(shape))
    return whole


# norms, what the first forward of each step saw, values afterwards, messages that backward has left
Trained = tuple[list[float], list[dict[str, Tensor]], dict[str, Tensor], int]
LIMIT, PLAN = 0.05, (1, 2, 1)  # of the norm; backward passes before each step


def train(
    ctx: RankContext,
    model: nn.Module,
    inner: Net,
    seed: int,
    clip: Callable[[nn.Module, float], Tensor],
) -> Trained:
    """Three steps with AdamW: norms, and the parameters then and afterwards."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1)
    norms, seen, left = [], [], 0
    for step, passes in enumerate(PLAN):
        model.train(step != 1)  # evaluation mode has gradients all the same
        for k in range(passes):
            pair = batch(seed, ctx.rank, 10 * step + k, ctx.device)
            loss = loss_of(model, pair)
            if k == 0:
                seen.append({name: value.cpu() for name, value in inner.values().items()})
            loss.backward()
            left = max(left, sum(event.end is None for event in ctx.ledger.events))
        norms.append(float(clip(model, LIMIT)))
        if step == 1:
            loss_of(model, pair)  # looked at, but never run backward
        optimizer.step()
        optimizer.zero_grad()
        if step != 1:
            evaluated = values_of(model, inner)
    return norms, seen, evaluated, left


def compare_training(results: Sequence[Trained], seed: int, what: str, rtol: float = 1e-6) -> None:
    """With one process on the batches of all ranks."""
    world_size = len(results)
    alone = net(seed)
    optimizer = torch.optim.AdamW(alone.parameters(), lr=0.05, weight_decay=0.1)
    norms, last, seen = [], [], []
    for step, passes in enumerate(PLAN):
        seen.append(values_of(alone, alone))
        for k in range(passes):
            earlier = [0 if p.grad is None else p.grad.clone() for p in alone.parameters()]
            pairs = [batch(seed, rank, 10 * step + k) for rank in range(world_size)]
            whole = tuple(torch.cat(parts) for parts in zip(*pairs, strict=True))
            loss_of(alone, whole).backward()
        grads = [p.grad for p in alone.parameters() if p.grad is not None]
        norms.append(float(torch.cat([g.flatten() for g in grads]).norm()))
        added = zip(alone.parameters(), earlier, strict=True)
        parts = [(p.grad - before).flatten() for p, before in added if p.grad is not None]
        last.append(float(torch.cat(parts).norm()))
        for gradient in grads:
            gradient *= min(1.0, LIMIT / norms[-1])
        optimizer.step()
        optimizer.zero_grad()
    want = values_of(alone, alone)
    for rank, (got_norms, got_seen, got, left) in enumerate(results):
        if left:
            text = f"{what}: {left} messages are under way on rank {rank} when backward() returns: "
            fail(f"{text}wait for them before", cause="left-over", rank=rank)
        for step, (norm, right) in enumerate(zip(got_norms, norms, strict=True)):
            expect_fresh(got_seen[step], seen[: step + 1], f"{what}, step {step}", rank, rtol)
            if abs(norm - right) > rtol * right:
                text = f"{what}: the norm of the whole gradient in step {step} is {right:.6g}, "
                text += f"got {norm:.6g}"
                if abs(norm - last[step]) <= rtol * right:
                    text += ", that of the last backward alone: a backward adds to what is there"
                    fail(text, cause="not-added", rank=rank)
                fail(text, cause="norm", rank=rank)
        for name, value in want.items():
            where = f"{what}: {name}"
            expect_close(got[name], value, what=where, rank=rank, rtol=rtol, atol=rtol / 100)


def expect_fresh(
    got: dict[str, Tensor], history: list[dict[str, Tensor]], what: str, rank: int, rtol: float
) -> None:
    """A forward saw the last values of ``history``; the ones before are told as stale."""
    for name, value in history[-1].items():
        near = {"rtol": rtol, "atol": rtol / 100}
        if torch.allclose(got[name], value, **near):
            continue
        if any(torch.allclose(got[name], old[name], **near) for old in history[:-1]):
            text = f"{what}: the forward on rank {rank} sees {name} as it was before the "
            text += "optimizer's step: gather it from the shards again"
            fail(text, cause="stale", rank=rank)
        expect_close(got[name], value, what=f"{what}: {name} in forward", rank=rank, **near)


class Layer(nn.Module):
    """A linear layer that tells when its forward and its backward run."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.tell: Callable[[str], object] = lambda point: None

    def forward(self, x: Tensor) -> Tensor:
        self.tell("forward")
        y = self.linear(x)
        if y.requires_grad:
            y.register_hook(lambda _: self.tell("backward"))
        return torch.relu(y)


class Stack(nn.Module):
    """Equal layers, each a unit, between a small first and last one."""

    def __init__(self, width: int = 64, depth: int = 8) -> None:
        super().__init__()
        self.inside, self.outside = nn.Linear(2, width), nn.Linear(width, 2)
        self.layers = nn.ModuleList(Layer(width) for _ in range(depth))
        self.dropped: frozenset[int] = frozenset()  # layers whose output nobody uses

    def forward(self, x: Tensor) -> Tensor:
        x = self.inside(x)
        for number, layer in enumerate(self.layers):
            y = layer(x)
            x = x if number in self.dropped else y
        return self.outside(x)


UNIT = 4 * (64 * 64 + 64)  # bytes of a layer's parameters
ROOT = 4 * (2 * 64 + 64 + 2 * 64 + 2)
DEPTH = 8
WHOLE = DEPTH * UNIT + ROOT


def traced(
    wrap: Callable[[nn.Module, list[nn.Module]], nn.Module],
) -> Callable[[RankContext], None]:
    """What a trace draws: two steps of a small GPT, a unit for each block."""

    def body(ctx: RankContext) -> None:
        torch.manual_seed(0)
        inner = GPT(64, 64, 4, 64, 4)
        model = wrap(inner, list(inner.blocks))
        optimizer = torch.optim.AdamW(model.parameters())
        tokens = torch.randint(0, 64, (8, 64), generator=ctx.generator())
        for _ in ctx.steps(2):
            optimizer.zero_grad()
            logits = model(tokens).float()
            nn.functional.cross_entropy(logits, tokens.flatten()).backward()
            optimizer.step()

    return body
