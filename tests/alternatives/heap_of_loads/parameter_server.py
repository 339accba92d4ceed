# for: 3.22, 3.23, 3.24
"""Written differently: tries around each receive, isend for answers, a list of held pulls."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from given.agreement import Group, expect_alike

from .parameter_client import (
    FIELDS,
    LEAVE,
    LOST,
    PULL,
    PUSH,
    Client,
    check_roles,
    cut,
    place_keys,
    train,
)


@dataclass
class Request:
    worker: int
    kind: int
    clock: int = 0
    samples: int = 0
    keys: list[str] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)


class Server:
    def __init__(
        self, parameters: Mapping[str, Tensor], *, servers: int, lr: float, group: Group = None
    ) -> None:
        server_of = place_keys(parameters, servers)
        workers = check_roles(servers, group)
        me = dist.get_rank(group)
        self.names, self.lr, self.group = list(parameters), lr, group
        self.values = {
            k: p.detach().cpu().clone() for k, p in parameters.items() if server_of[k] == me
        }
        self.live = list(range(servers, servers + workers))
        self.lost: dict[int, str] = {}
        self.version = 0

    def receive(self, worker: int | None) -> Request:
        length = FIELDS + len(self.names)
        header = torch.zeros(length, dtype=torch.int64)
        if worker is None:
            found = dist.recv(header, group=self.group)
            ranks = dist.get_process_group_ranks(self.group or dist.group.WORLD)
            worker = ranks.index(found)
        else:
            try:
                dist.irecv(header, group=self.group, group_src=worker).wait()
            except RuntimeError as error:
                return self._drop(worker, error)
        kind, clock, samples = header[:FIELDS].tolist()
        flags = zip(self.names, header[FIELDS:].bool().tolist(), strict=True)
        like = {k: self.values[k] for k, yes in flags if yes and k in self.values}
        gradients: dict[str, Tensor] = {}
        if kind == LEAVE:
            self.live = [each for each in self.live if each != worker]
        if kind == PUSH and like:
            joined = torch.cat([t.reshape(-1) for t in like.values()])
            try:
                dist.irecv(joined, group=self.group, group_src=worker).wait()
            except RuntimeError as error:
                return self._drop(worker, error)
            gradients = cut(joined, like)
        return Request(worker, kind, clock, samples, list(like), gradients)

    def _drop(self, worker: int, error: RuntimeError) -> Request:
        self.live.remove(worker)
        self.lost[worker] = str(error)
        return Request(worker, LOST)

    def answer(self, request: Request) -> None:
        messages = [torch.tensor([self.version], dtype=torch.int64)]
        if request.keys:
            messages.append(torch.cat([self.values[k].flatten() for k in request.keys]).clone())
        try:
            for work in [
                dist.isend(m, group=self.group, group_dst=request.worker) for m in messages
            ]:
                work.wait()
        except RuntimeError as error:
            if request.worker in self.live:
                self._drop(request.worker, error)

    def update(self, pushes: list[Request]) -> None:
        counted = [push for push in pushes if push.samples > 0]
        for k in self.values:
            samples = sum(push.samples for push in counted if k in push.gradients)
            if samples:
                weighted = [
                    push.gradients[k] * (push.samples / samples)
                    for push in counted
                    if k in push.gradients
                ]
                mean = weighted[0]
                for each in weighted[1:]:
                    mean = mean + each
                self.values[k].sub_(mean, alpha=self.lr)
        self.version += bool(pushes)


def serve_synchronous(server: Server) -> None:
    while server.live:
        for worker in tuple(server.live):
            request = server.receive(worker)
            if request.kind == PULL:
                server.answer(request)
        pushes: list[Request] = []
        for worker in tuple(server.live):
            request = server.receive(worker)
            if request.kind == PUSH:
                pushes.append(request)
        server.update(pushes)


def serve_asynchronous(server: Server) -> None:
    while len(server.live) > 0:
        only = server.live[0] if len(server.live) == 1 else None
        request = server.receive(only)
        match request.kind:
            case 0:  # PULL
                server.answer(request)
            case 1:  # PUSH
                server.update([request])


def serve_bounded(server: Server, staleness: int) -> None:
    if not staleness >= 0:
        raise ValueError("a bound of staleness is 0 or more")
    done = dict.fromkeys(server.live, 0)
    waiting: list[Request] = []
    while server.live:
        held = {request.worker for request in waiting}
        can_send = sorted(set(server.live) - held)
        request = server.receive(can_send[0] if len(can_send) == 1 else None)
        if request.kind == PUSH:
            server.update([request])
            done[request.worker] = request.clock + 1
        elif request.kind == PULL:
            waiting.append(request)
        while True:
            slowest = min((done[worker] for worker in server.live), default=0)
            free = [r for r in waiting if done[r.worker] <= slowest + staleness]
            if not free:
                break
            waiting = [r for r in waiting if r not in free]
            for each in free:
                server.answer(each)


def fit(
    model: nn.Module,
    batches: Iterable[tuple[Tensor, Tensor]],
    *,
    servers: int,
    lr: float,
    staleness: float | None = None,
    group: Group = None,
) -> dict[str, Tensor]:
    if staleness is not None and not staleness >= 0:
        raise ValueError("staleness is None, or 0 or more")
    trainable = {k: p for k, p in model.named_parameters() if p.requires_grad}
    place_keys(trainable, servers)
    check_roles(servers, group)
    expect_alike(list(trainable.values()), group)
    if dist.get_rank(group) < servers:
        server = Server(trainable, servers=servers, lr=lr, group=group)
        if staleness is None:
            serve_synchronous(server)
        elif staleness < float("inf"):
            serve_bounded(server, staleness)  # type: ignore[arg-type]
        else:
            serve_asynchronous(server)
        return dict(server.values)
    train(Client(trainable, servers=servers, group=group), model, batches)
    return {}
