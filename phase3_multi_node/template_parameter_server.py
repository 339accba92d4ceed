# Exercises 3.22, 3.23, 3.24: replace every `raise NotImplementedError` by your code.
# The docstrings say what is asked for. Test with: python test_phase3.py 3.22
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
    # Step 1: refuse what leaves a server without work, and what does not fit into one message
    # Step 2: the largest keys first, each to the server that has least so far
    raise NotImplementedError("exercise 3.22")


def check_roles(servers: int, group: Group = None) -> int:
    """The number of workers of ``group``, without communication.

    Raises ValueError if servers are all that it has, and on a rank that is no member.
    """
    # Step 3: every rank knows the size of the group; who is no member does not (`rank_in`)
    raise NotImplementedError("exercise 3.22")


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
        # Step 4: all requests and all receives first, then wait: the servers work at the same time
        # Step 5: cut each server's vector into its keys, in the order of the parameters
        raise NotImplementedError("exercise 3.22")

    def push(self, gradients: Mapping[str, Tensor], samples: int = 1) -> None:
        """Send gradients, each a mean over ``samples``; keys without one are not sent.

        Every server gets the header, also without a gradient for it: it is this worker's clock.
        """
        # Step 6: per server one header and one vector with the keys in the order of the parameters
        raise NotImplementedError("exercise 3.22")

    def leave(self) -> None:
        """Tell the servers that this worker is done; it must send nothing afterwards."""
        # Step 7: a header is all
        raise NotImplementedError("exercise 3.22")


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
        # Step 8: the header says what follows; the gradients come from the same worker, by name
        # Step 9: a broken connection is this worker's end, not the server's
        raise NotImplementedError("exercise 3.22")

    def _drop(self, worker: int, error: RuntimeError) -> Request:
        self.live.remove(worker)
        self.lost[worker] = str(error)
        return Request(worker, LOST)

    def answer(self, request: Request) -> None:
        """Send the version and the values that a PULL asks for; the worker may be gone by now."""
        # Step 10: one vector, a copy, so that an update can't change what is on its way
        raise NotImplementedError("exercise 3.22")

    def update(self, pushes: list[Request]) -> None:
        """One step of SGD: every key moves by its mean gradient over the samples of ``pushes``.

        Only who has pushed a key counts in its mean. Without any push nothing happens.
        """
        # Step 11: per key the gradients that there are, weighted by samples; one version more
        raise NotImplementedError("exercise 3.22")


def serve_synchronous(shard: Shard) -> None:
    """Serve until no worker is left, in rounds: all live workers pull, then all of them push.

    All pulls of a round see the same version; the mean of the round's pushes makes the next one.
    Workers may take different numbers of rounds. One that leaves or dies is waited for no more, and
    does not count in the mean; its push counts in full or not at all.
    """
    # Step 12: answer every live worker before taking the first push: they compute together
    # Step 13: wait for each by name, so that a dead one shows; whoever is left makes the round
    raise NotImplementedError("exercise 3.22")


def serve_asynchronous(shard: Shard) -> None:
    """Serve until no worker is left: every request at once, whoever it is from.

    Each push is one update (a version); none is lost, and none waits for another worker.
    """
    # Step 1: whoever comes first; the last one by name, so that its death shows
    # Step 2: answer a pull, apply a push, alone
    raise NotImplementedError("exercise 3.23")


def serve_bounded(shard: Shard, staleness: int) -> None:
    """Serve asynchronously, but hold a pull back while its worker is too far ahead.

    A worker at clock c (it has pushed c times) is answered when every live worker has pushed at
    least c - ``staleness`` times; a worker that leaves or dies holds nobody back. 0: all workers
    compute their c-th gradients after all others' c-1-th. Raises ValueError, before anything is
    received, if ``staleness`` < 0.
    """
    # Step 1: refuse a negative bound; a clock per worker, and the pulls that wait
    # Step 2: who waits can't speak; if one alone can, ask it by name, so that its death shows
    # Step 3: a push moves its worker's clock; who is gone has none
    # Step 4: then answer all the pulls that the slowest live worker allows by now
    raise NotImplementedError("exercise 3.24")


def train(client: Client, model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]]) -> float:
    """A worker's training: pull, forward, backward, push for every batch; then leave.

    Returns the last batch's loss (0.0 without a batch). Only trainable parameters are keys; those
    that got no gradient are not pushed. The model ends with what the last pull gave.
    """
    # Step 14: the values go into the model in place, onto its device
    # Step 15: leave also when something fails, so that the servers need not find out
    raise NotImplementedError("exercise 3.22")


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
    # Step 5: settings are checked everywhere, and models (`expect_alike`): a worker would wait for
    #         a server that has refused, and a server end with a message of another length
    # Step 6: this rank's role decides; trainable parameters are the keys
    raise NotImplementedError("exercise 3.24")
