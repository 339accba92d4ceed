"""A parameter server: some ranks keep the parameters, the others pull them and push gradients.

Ranks 0 … S-1 of the group are servers, the others workers. A *key* is one parameter; each key lives
on one server. A worker pulls the keys that its next batch needs, computes, and pushes the gradients
that it has. When the server answers decides everything:

    synchronous     all live workers read the same version; their mean gradient makes the next one
    asynchronous    a push is applied when it comes, a pull is answered when it comes
    bounded (SSP)   as asynchronous, but nobody reads who is more than s pushes ahead of the slowest

The protocol, the same for all three; every worker sends every request to every server:

    worker → server   header: kind, clock (pushes so far), samples, and for each key 0 or 1
                      PUSH: then the gradients of those keys that live there, as one vector
    server → worker   after PULL: the version (updates so far), then the values, as one vector

Per step a worker that uses b bytes of parameters moves 2b, in 5S messages at most; a server moves
(W-S)·2b/S: with one server its link is the bottleneck, so keys are spread evenly. An update is
never lost: one loop reads, changes and answers, one request at a time.

A worker that dies shows as a broken connection where its server waits for it *by name*. Headers of
asynchronous workers come from any rank: gloo can do that, NCCL can't, and gloo can't be polled. So
values travel from CPU memory, over a group that has gloo for it (``"cpu:gloo,cuda:nccl"``).
Sources: Li et al. 2014 (OSDI, parameter server), sections 3.1 and 3.4; Ho et al. 2013 (NIPS, SSP),
sections 2 and 3.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from given.agreement import Group, expect_alike, rank_in

PULL, PUSH, LEAVE, LOST = range(4)  # LOST is never sent: the connection broke
FIELDS = 3  # kind, clock, samples; one 0 or 1 per key follows


def place_keys(parameters: Mapping[str, Tensor], servers: int) -> dict[str, int]:
    """The server of each key, so that the servers hold about equally many elements.

    The fullest and the emptiest server differ by one key at most: by no more elements than the
    largest key has. No server is without a key. The same on every rank. Raises ValueError if
    ``servers`` < 1, if there are more servers than keys, or for keys of different dtypes: a message
    has one.
    """
    # --- exercise 3.22: start
    # Step 1: refuse what leaves a server without work, and what does not fit into one message
    # Step 2: the largest keys first, each to the server that has least so far
    if servers < 1:
        raise ValueError(f"there must be at least 1 server, got {servers}")
    if servers > len(parameters):
        raise ValueError(f"{servers} servers for {len(parameters)} keys: some would be empty")
    dtypes = sorted({str(p.dtype) for p in parameters.values()})
    if len(dtypes) > 1:
        raise ValueError(f"all keys must have one dtype, these have {' and '.join(dtypes)}")
    loads = [(0, 0, server) for server in range(servers)]  # elements, keys, server
    place = {}
    for key in sorted(parameters, key=lambda key: -parameters[key].numel()):
        elements, keys, server = min(loads)
        place[key] = server
        loads[server] = elements + parameters[key].numel(), keys + 1, server
    return place
    # --- exercise 3.22: end


def check_roles(servers: int, group: Group = None) -> int:
    """The number of workers of ``group``, without communication.

    Raises ValueError if servers are all that it has, and on a rank that is no member.
    """
    # --- exercise 3.22: start
    # Step 3: every rank knows the size of the group; who is no member does not (`rank_in`)
    rank_in(group)
    world_size = dist.get_world_size(group)
    if servers >= world_size:
        raise ValueError(f"{servers} servers among {world_size} ranks leave no worker")
    return world_size - servers
    # --- exercise 3.22: end


def cut(vector: Tensor, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The parts of ``vector`` (n,) by key, in the order and the shapes of ``like``."""
    parts = vector.split([tensor.numel() for tensor in like.values()])
    return {k: part.view(like[k].shape) for k, part in zip(like, parts, strict=True)}


class Client:
    """A worker's end: ``pull``, ``push`` and ``leave``.

    ``parameters`` give the names, shapes and dtype (the same for all) of the keys; their values are
    not used. Raises ValueError as ``place_keys`` and ``check_roles`` do.
    """

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
        """Those of ``keys`` that live on ``server``, in the order of the parameters."""
        return [k for k in self.parameters if k in keys and self.place[k] == server]

    def pull(self, keys: Iterable[str]) -> dict[str, Tensor]:
        """The current values of ``keys``, on the CPU; only they travel, in one message per server.

        Every server gets the request, so that it knows how far this worker is. ``versions``
        becomes how many updates each server had applied.
        """
        # --- exercise 3.22: start
        # Step 4: all requests and all receives first, then wait: the servers work at the same time
        # Step 5: cut each server's vector into its keys, in the order of the parameters
        keys = set(keys)
        header = self._header(PULL, keys)
        dtype = next(iter(self.parameters.values())).dtype
        answers, handles = [], []
        for server in range(self.servers):
            like = {k: self.parameters[k] for k in self._on(server, keys)}
            version = torch.empty(1, dtype=torch.int64)
            vector = torch.empty(sum(p.numel() for p in like.values()), dtype=dtype)
            handles.append(dist.isend(header, group=self.group, group_dst=server))
            handles.append(dist.irecv(version, group=self.group, group_src=server))
            if like:
                handles.append(dist.irecv(vector, group=self.group, group_src=server))
            answers.append((like, version, vector))
        for handle in handles:
            handle.wait()
        self.versions = [int(version) for _, version, _ in answers]
        values: dict[str, Tensor] = {}
        for like, _, vector in answers:
            values |= cut(vector, like)
        return values
        # --- exercise 3.22: end

    def push(self, gradients: Mapping[str, Tensor], samples: int = 1) -> None:
        """Send gradients, each a mean over ``samples``; keys without one are not sent.

        Every server gets the header, also without a gradient for it: it is this worker's clock.
        """
        # --- exercise 3.22: start
        # Step 6: per server one header and one vector with the keys in the order of the parameters
        header = self._header(PUSH, gradients, samples)
        handles = []
        for server in range(self.servers):
            handles.append(dist.isend(header, group=self.group, group_dst=server))
            mine = self._on(server, gradients)
            if mine:
                vector = torch.cat([gradients[k].detach().cpu().flatten() for k in mine])
                handles.append(dist.isend(vector, group=self.group, group_dst=server))
        for handle in handles:
            handle.wait()
        self.clock += 1
        # --- exercise 3.22: end

    def leave(self) -> None:
        """Tell the servers that this worker is done; it must send nothing afterwards."""
        # --- exercise 3.22: start
        # Step 7: a header is all
        header = self._header(LEAVE, ())
        for server in range(self.servers):
            dist.send(header, group=self.group, group_dst=server)
        # --- exercise 3.22: end


@dataclass
class Request:
    """What a worker asks for; ``gradients`` come with PUSH."""

    worker: int
    kind: int
    clock: int = 0
    samples: int = 0
    keys: list[str] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)


class Shard:
    """A server's end: the values of its keys, and what it does with one request.

    ``values``: key to tensor, in the order of ``parameters``, copied from them to the CPU.
    ``version``: updates so far. ``live``: workers that have neither left nor died. ``lost``: those
    that died, and the error. Raises ValueError as ``place_keys`` and ``check_roles`` do.
    """

    def __init__(
        self, parameters: Mapping[str, Tensor], *, servers: int, lr: float, group: Group = None
    ) -> None:
        place = place_keys(parameters, servers)
        workers = check_roles(servers, group)
        me = dist.get_rank(group)
        self.names, self.lr, self.group = list(parameters), lr, group
        self.values = {
            k: p.detach().cpu().clone() for k, p in parameters.items() if place[k] == me
        }
        self.live = list(range(servers, servers + workers))
        self.lost: dict[int, str] = {}
        self.version = 0

    def receive(self, worker: int | None) -> Request:
        """The next request of ``worker``, or of any; PUSH only with all of its gradients.

        A worker whose connection breaks is removed from ``live`` and noted in ``lost``, the request
        is LOST; so is one that leaves, with LEAVE. A broken receive from any is a RuntimeError.
        """
        # --- exercise 3.22: start
        # Step 8: the header says what follows; the gradients come from the same worker, by name
        # Step 9: a broken connection is this worker's end, not the server's
        header = torch.empty(FIELDS + len(self.names), dtype=torch.int64)
        try:
            if worker is None:
                found = dist.recv(header, group=self.group)
                worker = dist.get_group_rank(self.group or dist.group.WORLD, found)
            else:
                dist.recv(header, group=self.group, group_src=worker)
            kind, clock, samples, *flags = header.tolist()
            chosen = [k for k, flag in zip(self.names, flags, strict=True) if flag]
            keys = [k for k in chosen if k in self.values]
            request = Request(worker, kind, clock, samples, keys)
            if kind == PUSH and keys:
                like = {k: self.values[k] for k in keys}
                vector = self.values[keys[0]].new_empty(sum(v.numel() for v in like.values()))
                dist.recv(vector, group=self.group, group_src=worker)
                request.gradients = cut(vector, like)
        except RuntimeError as error:
            if worker is None:
                raise
            return self._drop(worker, error)
        if kind == LEAVE:
            self.live.remove(worker)
        return request
        # --- exercise 3.22: end

    def _drop(self, worker: int, error: RuntimeError) -> Request:
        self.live.remove(worker)
        self.lost[worker] = str(error)
        return Request(worker, LOST)

    def answer(self, request: Request) -> None:
        """Send the version and the values that a PULL asks for; the worker may be gone by now."""
        # --- exercise 3.22: start
        # Step 10: one vector, a copy, so that an update can't change what is on its way
        try:
            version = torch.tensor([self.version])
            dist.send(version, group=self.group, group_dst=request.worker)
            if request.keys:
                vector = torch.cat([self.values[k].flatten() for k in request.keys])
                dist.send(vector, group=self.group, group_dst=request.worker)
        except RuntimeError as error:
            self._drop(request.worker, error)
        # --- exercise 3.22: end

    def update(self, pushes: list[Request]) -> None:
        """One step of SGD: every key moves by its mean gradient over the samples of ``pushes``.

        Only who has pushed a key counts in its mean. Without any push nothing happens.
        """
        # --- exercise 3.22: start
        # Step 11: per key the gradients that there are, weighted by samples; one version more
        for key, value in self.values.items():
            having = [p for p in pushes if key in p.gradients]
            total = sum(p.samples for p in having)
            for push in having if total else ():
                value.sub_(push.gradients[key], alpha=self.lr * push.samples / total)
        self.version += bool(pushes)
        # --- exercise 3.22: end


def serve_synchronous(shard: Shard) -> None:
    """Serve until no worker is left, in rounds: all live workers pull, then all of them push.

    All pulls of a round see the same version; the mean of the round's pushes makes the next one.
    Workers may take different numbers of rounds. One that leaves or dies is waited for no more, and
    does not count in the mean; its push counts in full or not at all.
    """
    # --- exercise 3.22: start
    # Step 12: answer every live worker before taking the first push: they compute together
    # Step 13: wait for each by name, so that a dead one shows; whoever is left makes the round
    while shard.live:
        for worker in list(shard.live):
            request = shard.receive(worker)
            if request.kind == PULL:
                shard.answer(request)
        requests = [shard.receive(worker) for worker in list(shard.live)]
        shard.update([r for r in requests if r.kind == PUSH])
    # --- exercise 3.22: end


def serve_asynchronous(shard: Shard) -> None:
    """Serve until no worker is left: every request at once, whoever it is from.

    Each push is one update (a version); none is lost, and none waits for another worker.
    """
    # --- exercise 3.23: start
    # Step 1: whoever comes first; the last one by name, so that its death shows
    # Step 2: answer a pull, apply a push, alone
    while shard.live:
        request = shard.receive(shard.live[0] if len(shard.live) == 1 else None)
        if request.kind == PULL:
            shard.answer(request)
        elif request.kind == PUSH:
            shard.update([request])
    # --- exercise 3.23: end


def serve_bounded(shard: Shard, staleness: int) -> None:
    """Serve asynchronously, but hold a pull back while its worker is too far ahead.

    A worker at clock c (it has pushed c times) is answered when every live worker has pushed at
    least c - ``staleness`` times; a worker that leaves or dies holds nobody back. 0: all workers
    compute their c-th gradients after all others' c-1-th. Raises ValueError, before anything is
    received, if ``staleness`` < 0.
    """
    # --- exercise 3.24: start
    # Step 1: refuse a negative bound; a clock per worker, and the pulls that wait
    # Step 2: who waits can't speak; if one alone can, ask it by name, so that its death shows
    # Step 3: a push moves its worker's clock; who is gone has none
    # Step 4: then answer all the pulls that the slowest live worker allows by now
    if staleness < 0:
        raise ValueError(f"the staleness bound must be at least 0, got {staleness}")
    clocks = dict.fromkeys(shard.live, 0)
    held: dict[int, Request] = {}
    while shard.live:
        speakers = [worker for worker in shard.live if worker not in held]
        request = shard.receive(speakers[0] if len(speakers) == 1 else None)
        if request.kind == PULL:
            held[request.worker] = request
        elif request.kind == PUSH:
            shard.update([request])
            clocks[request.worker] = request.clock + 1
        slowest = min((clocks[worker] for worker in shard.live), default=0)
        for worker in [w for w in held if clocks[w] - staleness <= slowest]:
            shard.answer(held.pop(worker))
    # --- exercise 3.24: end


def train(client: Client, model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]]) -> float:
    """A worker's training: pull, forward, backward, push for every batch; then leave.

    Returns the last batch's loss (0.0 without a batch). Only trainable parameters are keys; those
    that got no gradient are not pushed. The model ends with what the last pull gave.
    """
    # --- exercise 3.22: start
    # Step 14: the values go into the model in place, onto its device
    # Step 15: leave also when something fails, so that the servers need not find out
    loss_value = 0.0
    named = {name: p for name, p in model.named_parameters() if name in client.parameters}
    try:
        for inputs, targets in batches:
            values = client.pull(named)
            with torch.no_grad():
                for name, p in named.items():
                    p.copy_(values[name])
                    p.grad = None
            loss = F.cross_entropy(model(inputs), targets)
            loss.backward()
            gradients = {name: p.grad for name, p in named.items() if p.grad is not None}
            client.push(gradients, len(targets))
            loss_value = loss.item()
    finally:
        client.leave()
    return loss_value
    # --- exercise 3.22: end


def fit(
    model: nn.Module,
    batches: Iterable[tuple[Tensor, Tensor]],
    *,
    servers: int,
    lr: float,
    staleness: float | None = None,
    group: Group = None,
) -> dict[str, Tensor]:
    """What every rank calls: the first ``servers`` ranks serve, the others train on their batches.

    ``staleness``: None for synchronous rounds, infinity for asynchronous, else the bound. Begins
    with the servers' models; a server's batches are not read. Returns the final values of this
    server's keys, on a worker nothing. Raises ValueError, on every rank and before any
    communication, for a negative staleness and as ``place_keys`` and ``check_roles`` do; on every
    rank, after one all-reduce of 48 bytes, if the ranks' models differ in shapes or dtypes.
    """
    # --- exercise 3.24: start
    # Step 5: settings are checked everywhere, and models (`expect_alike`): a worker would wait for
    #         a server that has refused, and a server end with a message of another length
    # Step 6: this rank's role decides; trainable parameters are the keys
    if staleness is not None and not staleness >= 0:
        raise ValueError(f"the staleness bound must be at least 0, got {staleness}")
    keys = {name: p for name, p in model.named_parameters() if p.requires_grad}
    place_keys(keys, servers)
    check_roles(servers, group)
    expect_alike([*keys.values()], group)
    if dist.get_rank(group) >= servers:
        train(Client(keys, servers=servers, group=group), model, batches)
        return {}
    shard = Shard(keys, servers=servers, lr=lr, group=group)
    if staleness is None:
        serve_synchronous(shard)
    elif staleness == float("inf"):
        serve_asynchronous(shard)
    else:
        serve_bounded(shard, int(staleness))
    return shard.values
    # --- exercise 3.24: end
