# for: 3.26
"""Written differently: a heap of loads, receives before sends, pushes that block."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Mapping

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from given.agreement import Group, rank_in, takes_cpu

PULL, PUSH, LEAVE, LOST = range(4)  # LOST is never sent: the connection broke
FIELDS = 3  # kind, clock, samples; one 0 or 1 per key follows


def place_keys(parameters: Mapping[str, Tensor], servers: int) -> dict[str, int]:
    if servers < 1 or servers > len(parameters):
        raise ValueError(f"{len(parameters)} keys can't be dealt out to {servers} servers")
    if len({p.dtype for p in parameters.values()}) != 1:
        raise ValueError("all keys must have one dtype")
    heap = [(0, 0, server) for server in range(servers)]
    names = list(parameters)
    place = dict.fromkeys(names, 0)
    for k in sorted(range(len(names)), key=lambda k: (-parameters[names[k]].numel(), k)):
        elements, held, server = heap[0]
        place[names[k]] = server
        heapq.heapreplace(heap, (elements + parameters[names[k]].numel(), held + 1, server))
    return place


def check_roles(servers: int, group: Group = None) -> int:
    rank_in(group)
    size = dist.get_world_size(group)
    if servers >= size:
        raise ValueError(f"all {size} ranks would be servers")
    if not takes_cpu(group):
        raise ValueError("NCCL alone takes no tensor on the CPU")
    return size - servers


def cut(vector: Tensor, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    parts = vector.split([tensor.numel() for tensor in like.values()])
    return {k: part.view(like[k].shape) for k, part in zip(like, parts, strict=True)}


class Client:
    def __init__(
        self, parameters: Mapping[str, Tensor], *, servers: int, group: Group = None
    ) -> None:
        self.place = place_keys(parameters, servers)
        check_roles(servers, group)
        self.parameters, self.servers, self.group = parameters, servers, group
        self.clock = 0  # pushes so far
        self.versions = [0] * servers  # what the last pull read

    def _header(self, kind: int, keys: Iterable[str], samples: int = 0) -> Tensor:
        chosen = set(keys)
        flags = [int(key in chosen) for key in self.parameters]
        return torch.tensor([kind, self.clock, samples, *flags])

    def _on(self, server: int, keys: Collection[str]) -> list[str]:
        return [k for k in self.parameters if k in keys and self.place[k] == server]

    def pull(self, keys: Iterable[str]) -> dict[str, Tensor]:
        wanted = frozenset(keys)
        where = [self._on(server, wanted) for server in range(self.servers)]
        versions = [torch.zeros(1, dtype=torch.int64) for _ in where]
        vectors, receives = [], []
        for server, mine in enumerate(where):
            receives.append(dist.irecv(versions[server], group=self.group, group_src=server))
            size = sum(self.parameters[k].numel() for k in mine)
            vectors.append(torch.empty(size, dtype=next(iter(self.parameters.values())).dtype))
            if mine:
                receives.append(dist.irecv(vectors[-1], group=self.group, group_src=server))
        headers = [self._header(PULL, wanted) for _ in where]
        sends = [
            dist.isend(header, group=self.group, group_dst=server)
            for server, header in enumerate(headers)
        ]
        for each in sends + receives:
            each.wait()
        self.versions = [version.item() for version in versions]
        found: dict[str, Tensor] = {}
        for mine, vector in zip(where, vectors, strict=True):
            found |= cut(vector, {k: self.parameters[k] for k in mine}) if mine else {}
        return found

    def push(self, gradients: Mapping[str, Tensor], samples: int = 1) -> None:
        for server in range(self.servers):
            dist.send(self._header(PUSH, gradients, samples), group=self.group, group_dst=server)
            mine = self._on(server, gradients)
            if not mine:
                continue
            vector = torch.empty(
                sum(self.parameters[k].numel() for k in mine), dtype=self.parameters[mine[0]].dtype
            )
            for k, part in cut(vector, {k: self.parameters[k] for k in mine}).items():
                part.copy_(gradients[k].detach())
            dist.send(vector, group=self.group, group_dst=server)
        self.clock += 1

    def leave(self) -> None:
        for server in range(self.servers):
            dist.send(self._header(LEAVE, []), group=self.group, group_dst=server)


def train(client: Client, model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]]) -> float:
    loss_value, failed = 0.0, True
    try:
        for inputs, targets in batches:
            values = client.pull(client.parameters)
            mine = {k: model.get_parameter(k) for k in client.parameters}
            with torch.no_grad():
                for k, value in values.items():
                    mine[k].data.copy_(value)
            for p in model.parameters():
                p.grad = None
            loss = F.cross_entropy(model(inputs), targets)
            loss.backward()
            loss_value = float(loss.detach())
            client.push(
                {k: p.grad for k, p in mine.items() if p.grad is not None}, samples=len(targets)
            )
        failed = False
    finally:
        try:
            client.leave()
        except RuntimeError:
            if not failed:
                raise
    return loss_value
