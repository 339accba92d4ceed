# alternative for: 3.22, 3.23, 3.24
"""Written differently: key numbers instead of flags, a message per key, one loop with a policy."""

from __future__ import annotations

import heapq

import torch
import torch.distributed as dist
import torch.nn.functional as F

WANT, GIVE, BYE = 10, 20, 30


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
    return place


class Client:
    def __init__(self, parameters, *, servers, group=None):
        self.place = roles(parameters, servers, group)
        self.shapes = {k: (p.shape, p.dtype) for k, p in parameters.items()}
        self.order = list(parameters)
        self.servers, self.group, self.clock = servers, group, 0
        self.versions = [0] * servers

    def ask(self, server, kind, names, samples=0):
        """Number of keys first, then their numbers."""
        head = torch.tensor([kind, self.clock, samples, len(names)])
        dist.send(head, group=self.group, group_dst=server)
        if names:
            numbers = torch.tensor([self.order.index(k) for k in names])
            dist.send(numbers, group=self.group, group_dst=server)

    def on(self, server, names):
        return sorted(k for k in set(names) if self.place[k] == server)

    def pull(self, keys):
        keys, found = list(keys), {}
        for server in range(self.servers):
            names = self.on(server, keys)
            self.ask(server, WANT, names)
            version = torch.empty(1, dtype=torch.int64)
            dist.recv(version, group=self.group, group_src=server)
            self.versions[server] = version.item()
            for name in names:
                shape, dtype = self.shapes[name]
                found[name] = torch.empty(shape, dtype=dtype)
                dist.recv(found[name], group=self.group, group_src=server)
        return found

    def push(self, gradients, samples=1):
        for server in range(self.servers):
            names = self.on(server, gradients)
            self.ask(server, GIVE, names, samples)
            for name in names:
                gradient = gradients[name].detach().cpu().contiguous()
                dist.send(gradient, group=self.group, group_dst=server)
        self.clock += 1

    def leave(self):
        for server in range(self.servers):
            self.ask(server, BYE, [])


class Shard:
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
        head = torch.empty(4, dtype=torch.int64)
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
        kind, clock, samples, count = head.tolist()
        names, gradients = [], {}
        if count:
            numbers = torch.empty(count, dtype=torch.int64)
            dist.recv(numbers, group=self.group, group_src=worker)
            names = [self.order[n] for n in numbers.tolist()]
        for name in names if kind == GIVE else ():
            gradients[name] = torch.empty_like(
                self.values[name], memory_format=torch.contiguous_format
            )
            dist.recv(gradients[name], group=self.group, group_src=worker)
        return kind, clock, samples, names, gradients

    def tell(self, worker, names):
        def send():
            dist.send(torch.tensor([self.version]), group=self.group, group_dst=worker)
            for name in names:
                dist.send(self.values[name].clone(), group=self.group, group_dst=worker)
            return True

        self.guarded(worker, send)

    def descend(self, pushes):
        """``pushes``: (samples, gradients)."""
        for name, value in self.values.items():
            sums, count = torch.zeros_like(value), 0
            for samples, gradients in pushes:
                if name in gradients:
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


def train(client, model, batches):
    last = 0.0
    parameters = {k: p for k, p in model.named_parameters() if k in client.shapes}
    for inputs, targets in batches:
        state = client.pull(parameters)
        model.load_state_dict(state, strict=False)
        model.zero_grad()
        loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        last = float(loss)
        client.push({k: p.grad for k, p in parameters.items() if p.grad is not None}, len(targets))
    client.leave()
    return last


def fit(model, batches, *, servers, lr, staleness=None, group=None):
    if staleness is not None and not staleness >= 0:
        raise ValueError(f"a bound of {staleness}")
    keys = {k: p for k, p in model.named_parameters() if p.requires_grad}
    roles(keys, servers, group)
    compare(keys, group)
    if dist.get_rank(group) < servers:
        shard = Shard(keys, servers=servers, lr=lr, group=group)
        if staleness is None:
            serve_synchronous(shard)
        else:
            serve_bounded(shard, min(staleness, 10**9))
        return shard.values
    train(Client(keys, servers=servers, group=group), model, batches)
    return {}
