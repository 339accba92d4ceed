"""How ddp and zero1 reduce a bucket: by a pattern of phase 3 or a compressor of this phase."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterable

import torch.distributed as dist
from torch import nn

from given.bucket_hooks import Hook
from solutions.phase3_multi_node.comm_hooks import all_reduce, bf16_compress, blocking
from solutions.phase3_multi_node.halving_doubling import halving_doubling_all_reduce
from solutions.phase3_multi_node.hierarchical_allreduce import all_reduce_hierarchical
from solutions.phase3_multi_node.ring_allreduce import ring_all_reduce
from solutions.phase3_multi_node.topology import (
    Topology,
    exchange_places,
    make_groups,
    own_place,
    topology_of,
)
from solutions.phase3_multi_node.tree_allreduce import tree_all_reduce

from .gradient_compression import RandomK, TopK
from .powersgd import PowerSGD
from .quantisation import Int8, OneBit
from .trainer_config import Config

PATTERNS = {
    "ring": ring_all_reduce,
    "tree": tree_all_reduce,
    "halving_doubling": halving_doubling_all_reduce,
}


def make_hook(config: Config, parameters: Iterable[nn.Parameter]) -> Hook:
    """The hook that the configuration asks for, for a model's ``parameters``. A collective call.

    Patterns of the course run inside backward and stop it. The result is right, and nothing is
    hidden.
    """
    if config.pattern == "hierarchical":
        groups = make_groups(find_topology())
        return blocking(lambda buffer: all_reduce_hierarchical(buffer, groups))
    if config.pattern != "auto":
        return blocking(PATTERNS[config.pattern])
    momentum = config.momentum if config.optimizer == "sgd" else 0.0  # momentum correction
    makers: dict[str, Callable[[], Hook]] = {
        "none": lambda: all_reduce,
        "bf16": lambda: bf16_compress,
        "topk": lambda: TopK(parameters, config.compression_ratio, momentum),
        "randomk": lambda: RandomK(parameters, config.compression_ratio, config.seed),
        "powersgd": lambda: PowerSGD(parameters, config.compression_rank),
        "int8": lambda: Int8(seed=config.seed),
        "onebit": lambda: OneBit(parameters),
    }
    return makers[config.compression]()


def find_topology() -> Topology:
    """Which ranks share a node: a host, or the ranks that one of torchrun's agents has started
    there."""
    host = f"{socket.gethostname()}/{os.environ.get('GROUP_RANK', 0)}"
    store = dist.PrefixStore("trainer", dist.distributed_c10d._get_default_store())
    rank, world_size = dist.get_rank(), dist.get_world_size()
    places = exchange_places(own_place(os.environ, host), store, rank, world_size)
    return topology_of(places)
