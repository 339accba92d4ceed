"""What the checks of the parameter server share: models, data, and one process that does it all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from distlab.grading import fail
from distlab.ranks import RankContext

LR = 0.25
PULL, PUSH, LEAVE = range(3)
SIZES = {"a": (7, 3), "b": (5,), "c": (11,), "d": (2, 2), "e": (1,)}


def parameters(seed: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Five keys of 42 elements together; the matrices are transposed in memory."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {k: shape[::-1] for k, shape in SIZES.items()}
    drawn = {k: torch.randn(s, generator=generator, dtype=dtype) for k, s in shapes.items()}
    return {k: t.t() if t.dim() == 2 else t for k, t in drawn.items()}


def zeros() -> dict[str, Tensor]:
    return {k: torch.zeros(shape) for k, shape in SIZES.items()}


def network(seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        first, middle, last = nn.Linear(5, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        return nn.Sequential(first, nn.Tanh(), middle, nn.Tanh(), last)


def batches(seed: int, worker: int, count: int) -> list[tuple[Tensor, Tensor]]:
    """``count`` batches, of another size for every worker."""
    generator = torch.Generator().manual_seed(seed * 1009 + worker)
    return [
        (
            torch.randn(worker + 2, 5, generator=generator),
            torch.randint(0, 3, (worker + 2,), generator=generator),
        )
        for _ in range(count)
    ]


def in_rounds(
    seed: int, counts: list[int], *, over_workers: bool = False
) -> tuple[dict[str, Tensor], list[float]]:
    """One process: in each round a step on the batches of all workers that have one left.

    Returns the values at the end and each worker's last loss, 0 without a batch. ``over_workers``:
    a known mistake, the mean over workers and not over their samples.
    """
    model = network(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    data = [batches(seed, worker, count) for worker, count in enumerate(counts)]
    last = [0.0] * len(counts)
    for given in zip_longest(*data):
        for worker, batch in enumerate(given):
            if batch is not None:
                last[worker] = F.cross_entropy(model(batch[0]), batch[1]).item()
        parts = [batch for batch in given if batch is not None]
        optimizer.zero_grad()
        inputs, targets = (torch.cat(part) for part in zip(*parts, strict=True))
        losses = [F.cross_entropy(model(x), y) for x, y in parts]
        mean = F.cross_entropy(model(inputs), targets)
        loss = sum(losses) / len(losses) if over_workers else mean
        loss.backward()
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}, last


def served(
    impl: Any,
    ctx: RankContext,
    values: Mapping[str, Tensor],
    servers: int,
    serve: Callable[[Any], object],
    worker: Callable[[Any, int], Any],
    lr: float = LR,
    group: dist.ProcessGroup | None = None,
) -> Any:
    """One rank's body: a server returns [values, version, lost, the parameters that it was given,
    as they are at the end]; a worker what ``worker`` does.
    """
    rank = dist.get_rank(group)
    if rank < servers:
        server = impl.Server(values, servers=servers, lr=lr, group=group)
        serve(server)
        given = {k: v.detach().clone() for k, v in values.items()}
        return [dict(server.values), int(server.version), sorted(server.lost), given]
    client = impl.module("parameter_client").Client
    return worker(client(values, servers=servers, group=group), rank - servers)


def gathered(results: Sequence[Any], servers: int) -> dict[str, Tensor]:
    """The keys of all servers; each must be on one."""
    merged: dict[str, Tensor] = {}
    for rank in range(servers):
        for key, value in results[rank][0].items():
            if key in merged:
                fail(f"key {key} is on two servers", cause="placed-twice", rank=rank)
            merged[key] = value
    return merged


def answered(
    values: Mapping[str, Tensor],
    place: Mapping[str, int],
    servers: int,
    group: dist.ProcessGroup | None = None,
) -> list[list[Any]]:
    """A server's end by the protocol alone: answers pulls, notes requests, applies nothing.

    Returns each request as [worker, kind, clock, samples, chosen keys, gradients in one list].
    """
    me, heard = dist.get_rank(group), []
    live = list(range(servers, dist.get_world_size(group)))
    while live:
        for worker in list(live):
            header = torch.empty(3 + len(values), dtype=torch.int64)
            dist.recv(header, group=group, group_src=worker)
            kind, clock, samples, *flags = header.tolist()
            chosen = [key for key, flag in zip(values, flags, strict=True) if flag]
            mine = [key for key in chosen if place[key] == me]
            gradients: list[float] = []
            if kind == PULL:
                version = torch.tensor([len(heard) + 10 * me])  # another one on each server
                dist.send(version, group=group, group_dst=worker)
                if mine:
                    vector = torch.cat([values[key].detach().flatten() for key in mine])
                    dist.send(vector, group=group, group_dst=worker)
            elif kind == PUSH and mine:
                like = values[mine[0]]
                vector = torch.empty(sum(values[key].numel() for key in mine), dtype=like.dtype)
                dist.recv(vector, group=group, group_src=worker)
                gradients = vector.tolist()
            elif kind == LEAVE:
                live.remove(worker)
            heard.append([worker, kind, clock, samples, chosen, gradients])
    return heard
