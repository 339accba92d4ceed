"""A worker's end of a parameter server: it pulls the keys that it needs and pushes gradients.

Some ranks keep the parameters, the others pull them and push gradients. Ranks 0 … S-1 of the group
are servers, the others workers. A *key* is one parameter, and each key lives on one server. A
worker pulls the keys that its next batch needs, computes, and pushes the gradients that it has. In
the protocol every worker sends every request to every server. Each line is a message:

    worker → server   header, int64: kind (PULL, PUSH, LEAVE), clock (pushes so far), samples, and
                      for each key, in the order of the parameters, 1 if it is chosen, else 0
                      PUSH: the gradients of the chosen keys that live there, as one vector
    server → worker   after PULL: the version (updates so far), one int64;
                      then the values of the chosen keys that live there, as one vector

Keys stand in a vector in the order of the parameters. Where no chosen key lives, no vector is sent.
If the chosen keys have no elements, an empty vector is sent. Per step a worker that uses b bytes of
parameters moves 2b bytes, in 5S messages at most.

Values travel from CPU memory, over a group that has gloo for it (``"cpu:gloo,cuda:nccl"``).
Source: Li et al. 2014 (OSDI, parameter server), sections 3.1 and 3.4.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from given.agreement import Group, rank_in, takes_cpu

PULL, PUSH, LEAVE, LOST = range(4)  # LOST is never sent: the connection broke
FIELDS = 3  # kind, clock, samples; one 0 or 1 per key follows


def place_keys(parameters: Mapping[str, Tensor], servers: int) -> dict[str, int]:
    """The server of each key, so that the servers hold about equally many elements.

    The fullest and the emptiest server differ by at most the elements of the largest key. No server
    is without a key, also if keys have no elements. The result is the same on every rank. Raises
    ValueError if ``servers`` < 1, if there are more servers than keys, or for keys of different
    dtypes: a message has one.
    """
    # --- exercise 3.26: start
    # Step 1: refuse numbers that leave a server without a key, and dtypes that don't fit into one
    #         message
    # Step 2: the largest keys first, each to the server that has least so far
    if servers < 1:
        raise ValueError(f"there must be at least 1 server, got {servers}")
    if servers > len(parameters):
        raise ValueError(f"{servers} servers for {len(parameters)} keys: some would be empty")
    dtypes = sorted({str(p.dtype) for p in parameters.values()})
    if len(dtypes) > 1:
        raise ValueError(f"all keys must have one dtype, these have {' and '.join(dtypes)}")
    loads = [(0, 0, server) for server in range(servers)]  # elements, keys, server
    server_of = {}
    for key in sorted(parameters, key=lambda key: -parameters[key].numel()):
        elements, keys, server = min(loads)
        server_of[key] = server
        loads[server] = elements + parameters[key].numel(), keys + 1, server
    return server_of
    # --- exercise 3.26: end


def check_roles(servers: int, group: Group = None) -> int:
    """The number of workers of ``group``, without communication.

    Raises ValueError if no rank is left for a worker, on a rank that is no member, and if the group
    can't pass tensors on the CPU. Beside NCCL its backend must be ``"cpu:gloo,cuda:nccl"``.
    """
    # --- exercise 3.26: start
    # Step 3: refuse a rank that is no member (`rank_in`), and a backend that would fail at the
    #         first message (`takes_cpu`)
    rank_in(group)
    if not takes_cpu(group):
        raise ValueError("values travel on the CPU: use the backend cpu:gloo,cuda:nccl, not nccl")
    world_size = dist.get_world_size(group)
    if servers >= world_size:
        raise ValueError(f"{servers} servers among {world_size} ranks leave no worker")
    return world_size - servers
    # --- exercise 3.26: end


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

        Every server gets the request, so that it knows how far this worker is. All requests leave
        before the worker waits for the first answer. Values have the dtype and shapes of the
        parameters. ``versions`` becomes the number of updates that each server had applied.
        """
        # --- exercise 3.26: start
        # Step 4: start all requests and all receives, then wait: the servers work at the same time
        # Step 5: split each server's vector into its keys, in the order of the parameters
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
        # --- exercise 3.26: end

    def push(self, gradients: Mapping[str, Tensor], samples: int = 1) -> None:
        """Send gradients, each a mean over ``samples``; keys without one are not sent.

        Every server gets the header, also without a gradient for it: it tells this worker's clock.
        """
        # --- exercise 3.26: start
        # Step 6: send each server a header, and one vector with its keys in the order of the
        #         parameters
        header = self._header(PUSH, gradients, samples)
        handles = []
        for server in range(self.servers):
            handles.append(dist.isend(header, group=self.group, group_dst=server))
            mine = self._on(server, gradients)
            if mine:
                vector = torch.cat([gradients[k].detach().flatten() for k in mine]).cpu()
                handles.append(dist.isend(vector, group=self.group, group_dst=server))
        for handle in handles:
            handle.wait()
        self.clock += 1
        # --- exercise 3.26: end

    def leave(self) -> None:
        """Tell the servers that this worker is done; it must send nothing afterwards."""
        # --- exercise 3.26: start
        # Step 7: send a header, nothing else
        header = self._header(LEAVE, ())
        for server in range(self.servers):
            dist.send(header, group=self.group, group_dst=server)
        # --- exercise 3.26: end


def train(client: Client, model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]]) -> float:
    """A worker's training: pull, forward, backward, push for every batch; then leave.

    Returns the last batch's loss (0.0 without a batch). The client's keys are pulled into the
    model's parameters of that name. Gradients are those of the batch alone, with its number of
    samples. A parameter without gradient is not pushed. The model ends with the values of the last
    pull. The worker leaves also if a batch fails, and then the exception is raised.
    """
    # --- exercise 3.26: start
    # Step 8: copy the values into the model in place, onto its device
    # Step 9: leave also when a batch fails, so that the servers don't wait for this worker
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
    # --- exercise 3.26: end
