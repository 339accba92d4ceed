"""The strategies of this phase behind one signature, as the closing run compares them.

Each is a function (model, workload, groups, every) that prepares the training of ``model`` on this
rank. It returns a function that trains on this rank's batches, and the module to evaluate
afterwards. All ranks evaluate together, and rank 0's result counts. Weights, batches and optimizer
are the same. So all but the two DiLoCos take the same steps and differ by rounding only (bfloat16
by its own). Their costs differ. Per step, for P bytes of parameters on 2 nodes of 2 ranks, with
rings:

======================  ==========================================  =====================
strategy                leave the busiest node                      state, bytes per
                                                                    parameter and rank
======================  ==========================================  =====================
ring DDP                2·3/4·P: one link of the ring leaves        16
hierarchical DDP        2·1/2·P, the least that is possible         16
the same in bfloat16    half of that                                16
FSDP                    3·3/4·P, less what stays gathered           16/4
hybrid sharding         2·1/2·P                                     16/2
parameter server        1·P for each worker elsewhere: values one   12 (workers 8)
                        way, then gradients the other
DiLoCo                  2·3/4·P, but only once in ``every`` steps   24
streaming DiLoCo        3·17/128·P once in ``every`` steps, in      24
                        fragments, beside the next step
======================  ==========================================  =====================

Sources: those of the modules that the strategies come from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from distlab.reference.workloads import Workload, build_optimizer
from given.agreement import Group, takes_cpu
from given.bucket_hooks import Hook

from .comm_hooks import blocking
from .ddp import DDP
from .fsdp_hybrid import HybridFlat
from .fsdp_prefetch import PrefetchFSDP
from .hierarchical_allreduce import all_reduce_hierarchical, bytes_leaving_a_node
from .local_sgd import DiLoCo
from .local_sgd import train as train_rounds
from .parameter_client import Client
from .parameter_client import train as train_worker
from .parameter_server import Request, Server, serve_synchronous
from .ring_allreduce import ring_all_reduce
from .streaming_diloco import StreamingDiLoCo, strided
from .topology import NodeGroups, Topology

Batches = Iterable[tuple[Tensor, Tensor]]
Prepared = tuple[Callable[[Batches], object], nn.Module]
SERVERS = 1
FRAGMENTS = 2
OUTER = {"lr": 0.7, "momentum": 0.5}  # a run of a few rounds needs less momentum than the paper's


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Batches) -> None:
    """The training loop of all strategies that reduce gradients in backward."""
    for inputs, targets in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()


def replicated(
    hook_of: Callable[[NodeGroups], Hook],
    model: nn.Module,
    chosen: Workload,
    groups: NodeGroups,
    every: int,
) -> Prepared:
    """DDP whose buckets are reduced as ``hook_of(groups)`` says."""
    wrapped = DDP(model)
    wrapped.register_comm_hook(hook_of(groups))
    return partial(steps, wrapped, build_optimizer(chosen, model)), wrapped


def ring_hook(groups: NodeGroups) -> Hook:
    """Exercise 3.3: a ring through all ranks."""
    return blocking(ring_all_reduce)


def hierarchical_hook(groups: NodeGroups) -> Hook:
    """Exercise 3.8: in the nodes, across, in the nodes."""
    return blocking(partial(all_reduce_hierarchical, groups=groups))


def half_hook(groups: NodeGroups) -> Hook:
    """The same on a copy of 16 bits."""

    def reduce(flat: Tensor) -> None:
        half = flat.bfloat16()
        all_reduce_hierarchical(half, groups)
        flat.copy_(half)

    return blocking(reduce)


def units_of(model: nn.Module) -> list[nn.Module]:
    """The blocks of a transformer; a small network is one unit: short messages cost latency."""
    return list(getattr(model, "blocks", ()))


def sharded(model: nn.Module, chosen: Workload, groups: NodeGroups, every: int) -> Prepared:
    """Exercises 3.15 and 3.16 over all ranks."""
    wrapped = PrefetchFSDP(model, units_of(model))
    return partial(steps, wrapped, build_optimizer(chosen, wrapped)), wrapped


def hybrid(model: nn.Module, chosen: Workload, groups: NodeGroups, every: int) -> Prepared:
    """Exercise 3.19: sharded in the node, replicated across."""
    flat_type = partial(HybridFlat, replicas=groups.across)
    wrapped = PrefetchFSDP(model, units_of(model), group=groups.node, flat_type=flat_type)
    return partial(steps, wrapped, build_optimizer(chosen, wrapped)), wrapped


class OptimizingServer(Server):
    """A server that takes a step of the workload's optimizer for each mean gradient.

    Its model's parameters are the values that it serves.
    """

    def __init__(self, model: nn.Module, chosen: Workload, group: Group) -> None:
        named = dict(model.named_parameters())
        super().__init__(named, servers=SERVERS, lr=chosen.lr, group=group)
        self.parameters = {key: named[key] for key in self.values}
        for key, p in self.parameters.items():
            p.data = self.values[key]
        self.optimizer = build_optimizer(chosen, model)

    def update(self, pushes: list[Request]) -> None:
        """One step on the mean over the samples of ``pushes``, which all have all keys."""
        if not pushes:  # all workers have left
            return
        total = sum(push.samples for push in pushes)
        for key, p in self.parameters.items():
            parts = [push.gradients[key] * (push.samples / total) for push in pushes]
            p.grad = torch.stack(parts).sum(0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.version += 1


def served(model: nn.Module, chosen: Workload, groups: NodeGroups, every: int) -> Prepared:
    """Exercise 3.22: rank 0 serves, the others train. Values travel from the CPU, so they need a
    group of gloo beside one of NCCL."""
    group = None if takes_cpu(None) else dist.new_group(backend="gloo")
    if dist.get_rank() >= SERVERS:
        client = Client(dict(model.named_parameters()), servers=SERVERS, group=group)
        return partial(train_worker, client, model), model
    server = OptimizingServer(model.cpu(), chosen, group)
    return lambda _: serve_synchronous(server), model


def seldom(model: nn.Module, chosen: Workload, groups: NodeGroups, every: int) -> Prepared:
    """Exercise 3.25: DiLoCo."""
    optimizer, rounds = build_optimizer(chosen, model), DiLoCo(model, every=every, **OUTER)
    return lambda batches: train_rounds(model, optimizer, batches, rounds), model


def streamed(model: nn.Module, chosen: Workload, groups: NodeGroups, every: int) -> Prepared:
    """Exercise 3.34: its blocks in turn; the last unit has what is in no block."""
    units = [*units_of(model), model]
    parts = strided(units, min(FRAGMENTS, len(units), every))
    delay = min(1, every - 1)
    rounds = StreamingDiLoCo(model, parts, every=every, delay=delay, bits=4, **OUTER)
    optimizer = build_optimizer(chosen, model)
    return lambda batches: train_rounds(model, optimizer, batches, rounds), model


STRATEGIES: dict[str, Callable[[nn.Module, Workload, NodeGroups, int], Prepared]] = {
    "ring DDP": partial(replicated, ring_hook),
    "hierarchical DDP": partial(replicated, hierarchical_hook),
    "hierarchical, bf16": partial(replicated, half_hook),
    "FSDP": sharded,
    "hybrid sharding": hybrid,
    "parameter server": served,
    "DiLoCo": seldom,
    "streaming DiLoCo": streamed,
}


def gathered(topology: Topology) -> float:
    """Bytes that leave a node in a ring's all-gather of e3m0, per byte of float32 on each rank."""
    return (topology.world_size - 1) * 17 / 128


def formula(name: str, model: nn.Module, groups: NodeGroups, every: int) -> float:
    """Payload bytes that leave the busiest node per step; ``model`` is not wrapped."""
    topology, nbytes = groups.topology, sum(p.nbytes for p in model.parameters())
    ring = partial(bytes_leaving_a_node, topology, algorithm="ring")
    across = bytes_leaving_a_node(topology, nbytes, "hierarchical")
    if name == "FSDP":  # all is gathered twice and reduced, but root and last unit gathered once
        units = [sum(p.nbytes for p in unit.parameters()) for unit in units_of(model)]
        return ring(2 * nbytes + sum(units[:-1])) / 2
    if name == "parameter server":  # values down from the first node, gradients up from the others
        return sum(map(len, topology.nodes[1:])) * nbytes
    return {
        "ring DDP": ring(nbytes),
        "hierarchical DDP": across,
        "hierarchical, bf16": across / 2,
        "hybrid sharding": across,
        "DiLoCo": ring(nbytes) / every,
        "streaming DiLoCo": gathered(topology) * nbytes / every,
    }[name]
