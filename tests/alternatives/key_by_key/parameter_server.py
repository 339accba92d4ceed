# for: 3.22, 3.23, 3.24
"""Written differently: tuples instead of requests, sums per key, one loop with a policy."""

from __future__ import annotations

import torch
import torch.distributed as dist

from .parameter_client import BYE, GIVE, WANT, Client, roles, train


class Server:
    def __init__(self, parameters, *, servers, lr, group=None):
        place, me = roles(parameters, servers, group), dist.get_rank(group)
        self.order, self.lr, self.group = list(parameters), lr, group
        self.values = {
            k: p.detach().to("cpu", copy=True) for k, p in parameters.items() if place[k] == me
        }
        self.live = list(range(servers, dist.get_world_size(group)))
        self.version, self.lost = 0, {}

    def guarded(self, worker, call):
        try:
            return call()
        except RuntimeError as error:
            self.live.remove(worker)
            self.lost[worker] = error
            return None

    def hear(self, among):
        """(worker, kind, clock, samples, names, gradients); kind None if it has died."""
        head = torch.empty(3 + len(self.order), dtype=torch.int64)
        if len(among) > 1:
            worker = dist.recv(head, group=self.group)
            if self.group is not None:
                worker = dist.get_group_rank(self.group, worker)
        else:
            (worker,) = among
        rest = self.guarded(worker, lambda: self.details(worker, head, len(among) == 1))
        if rest is None:
            return worker, None, 0, 0, [], {}
        if rest[0] == BYE:
            self.live.remove(worker)
        return worker, *rest

    def details(self, worker, head, whole):
        if whole:
            dist.recv(head, group=self.group, group_src=worker)
        kind, clock, samples = head[:3].tolist()
        chosen = [self.order[n] for n in head[3:].nonzero().flatten().tolist()]
        names, gradients = [name for name in chosen if name in self.values], {}
        if kind == GIVE and names:
            row = self.values[names[0]].new_empty(sum(self.values[n].numel() for n in names))
            dist.recv(row, group=self.group, group_src=worker)
            for name in names:
                size = self.values[name].numel()
                gradients[name], row = row[:size].view(self.values[name].shape), row[size:]
        return kind, clock, samples, names, gradients

    def tell(self, worker, names):
        def send():
            dist.send(torch.tensor([self.version]), group=self.group, group_dst=worker)
            if names:
                row = torch.hstack([self.values[name].reshape(-1) for name in names])
                dist.send(row, group=self.group, group_dst=worker)
            return True

        self.guarded(worker, send)

    def descend(self, pushes):
        """``pushes``: (samples, gradients)."""
        for name, value in self.values.items():
            sums, count = torch.zeros_like(value), 0
            for samples, gradients in pushes:
                if name in gradients and samples:
                    sums += samples * gradients[name]
                    count += samples
            if count:
                value -= self.lr * sums / count
        if pushes:
            self.version += 1


def compare(keys, group):
    """Every rank tells every other what it has: first how long that is, then the text."""
    text = repr([(k, tuple(p.shape), p.dtype) for k, p in keys.items()]).encode()
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, torch.tensor([len(text)]), group=group)
    length = max(int(size) for size in sizes)
    texts = [torch.zeros(length, dtype=torch.uint8) for _ in sizes]
    dist.all_gather(texts, torch.tensor([*text.ljust(length)], dtype=torch.uint8), group=group)
    if any(not torch.equal(texts[0], other) for other in texts):
        raise ValueError("the ranks have different keys")


def serve_synchronous(shard):
    while shard.live:
        for worker in tuple(shard.live):
            heard = shard.hear([worker])
            if heard[1] == WANT:
                shard.tell(worker, heard[4])
        pushes = []
        for worker in tuple(shard.live):
            heard = shard.hear([worker])
            if heard[1] == GIVE:
                pushes.append((heard[3], heard[5]))
        shard.descend(pushes)


def serve_asynchronous(shard):
    serve_bounded(shard, 10**9)


def serve_bounded(shard, staleness):
    if staleness < 0:
        raise ValueError(f"a bound of {staleness}")
    ahead, waiting = dict.fromkeys(shard.live, 0), []
    while shard.live:
        blocked = {worker for worker, _ in waiting}
        among = [w for w in shard.live if w not in blocked]
        worker, kind, clock, samples, names, gradients = shard.hear(among)
        if kind == GIVE:
            shard.descend([(samples, gradients)])
            ahead[worker] += 1
        if kind == WANT:
            waiting.append((worker, names))
        again = []
        for worker, names in waiting:
            if all(ahead[worker] - ahead[other] <= staleness for other in shard.live):
                shard.tell(worker, names)
            else:
                again.append((worker, names))
        waiting = again


def fit(model, batches, *, servers, lr, staleness=None, group=None):
    if staleness is not None and not staleness >= 0:
        raise ValueError(f"a bound of {staleness}")
    keys = {k: p for k, p in model.named_parameters() if p.requires_grad}
    roles(keys, servers, group)
    compare(keys, group)
    if dist.get_rank(group) < servers:
        shard = Server(keys, servers=servers, lr=lr, group=group)
        if staleness is None:
            serve_synchronous(shard)
        else:
            serve_bounded(shard, min(staleness, 10**9))
        return shard.values
    train(Client(keys, servers=servers, group=group), model, batches)
    return {}
