# for: 3.26
"""Written differently: blocking messages, answers one by one; keys placed with a heap."""

from __future__ import annotations

import contextlib
import heapq

import torch
import torch.distributed as dist
import torch.nn.functional as F

WANT, GIVE, BYE = range(3)


def place_keys(parameters, servers):
    if not 1 <= servers <= len(parameters):
        raise ValueError(f"{servers} servers, {len(parameters)} keys")
    kinds = {p.dtype for p in parameters.values()}
    if len(kinds) != 1:
        raise ValueError(f"keys of several dtypes: {kinds}")
    names = sorted(parameters, key=lambda name: parameters[name].numel(), reverse=True)
    heap = [(parameters[name].numel(), s) for s, name in enumerate(names[:servers])]
    place = {name: s for s, name in enumerate(names[:servers])}
    heapq.heapify(heap)
    for name in names[servers:]:
        load, s = heap[0]
        place[name] = s
        heapq.heapreplace(heap, (load + parameters[name].numel(), s))
    return place


def roles(parameters, servers, group):
    place, size = place_keys(parameters, servers), dist.get_world_size(group)
    if size - servers < 1:
        raise ValueError(f"{size} ranks, {servers} of them servers: nobody works")
    if dist.get_backend(group) == "nccl":
        raise ValueError("it takes the backend cpu:gloo,cuda:nccl")
    return place


class Client:
    def __init__(self, parameters, *, servers, group=None):
        self.place = roles(parameters, servers, group)
        self.shapes = {k: (p.shape, p.dtype) for k, p in parameters.items()}
        self.servers, self.group, self.clock = servers, group, 0
        self.versions = [0] * servers

    def ask(self, server, kind, names, samples=0):
        head = torch.zeros(3 + len(self.shapes), dtype=torch.int64)
        head[:3] = torch.tensor([kind, self.clock, samples])
        for number, name in enumerate(self.shapes):
            head[3 + number] += name in names
        dist.send(head, group=self.group, group_dst=server)

    def on(self, server, names):
        return [k for k in self.shapes if k in names and self.place[k] == server]

    def pull(self, keys):
        keys, found, coming = list(keys), {}, []
        for server in range(self.servers):  # a server that answers must not wait for another one
            names = self.on(server, keys)
            sizes = [self.shapes[name][0].numel() for name in names]
            version = torch.empty(1, dtype=torch.int64)
            works = [dist.irecv(version, group=self.group, group_src=server)]
            row = None
            if names:
                row = torch.empty(sum(sizes), dtype=self.shapes[names[0]][1])
                works.append(dist.irecv(row, group=self.group, group_src=server))
            coming.append((names, sizes, version, row, works))
        for server in range(self.servers):
            self.ask(server, WANT, keys)
        for server, (names, sizes, version, row, works) in enumerate(coming):
            for work in works:
                work.wait()
            self.versions[server] = version.item()
            for size, name in zip(sizes, names, strict=True):
                found[name], row = row[:size].reshape(self.shapes[name][0]), row[size:]
        return found

    def push(self, gradients, samples=1):
        for server in range(self.servers):
            self.ask(server, GIVE, gradients, samples)
            names = self.on(server, gradients)
            if names:
                rows = [gradients[name].detach().cpu().reshape(-1) for name in names]
                dist.send(torch.cat(rows), group=self.group, group_dst=server)
        self.clock += 1

    def leave(self):
        for server in range(self.servers):
            self.ask(server, BYE, [])


def train(client, model, batches):
    last = 0.0
    parameters = {k: p for k, p in model.named_parameters() if k in client.shapes}
    with contextlib.ExitStack() as stack:
        stack.callback(client.leave)
        for inputs, targets in batches:
            state = client.pull(parameters)
            model.load_state_dict(state, strict=False)
            model.zero_grad()
            loss = F.cross_entropy(model(inputs), targets)
            loss.backward()
            last = float(loss)
            found = {k: p.grad for k, p in parameters.items() if p.grad is not None}
            client.push(found, len(targets))
    return last
