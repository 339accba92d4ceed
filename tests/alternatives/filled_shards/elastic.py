# for: 4.4
"""Written differently: new shards are filled in place, and seeds are hashes of texts."""

from __future__ import annotations

import copy
import hashlib
import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from given.safe_format import Tree

from .fault_tolerance import Saved
from .sample_seeds import random_state, set_random_state


def chunk_of(numel: int, world_size: int, rank: int) -> range:
    if numel == 0:
        return range(0, 0)
    each = (numel + world_size - 1) // world_size
    borders = [min(each * r, numel) for r in (rank, rank + 1)]
    return range(*borders)


def cut(own: Tensor, numel: int, world_size: int, rank: int) -> Tree:
    count = len(chunk_of(numel, world_size, rank))
    chunk = torch.empty(count, dtype=own.dtype, device=own.device)
    with torch.no_grad():
        chunk.copy_(own.detach().flatten()[:count])
    return {"numel": numel, "chunk": chunk}


def is_chunk(value: Any) -> bool:
    return isinstance(value, dict) and value.keys() == {"numel", "chunk"}


def recut(saved: Saved, world_size: int, rank: int) -> Tree:
    trees: dict[int, Tree] = {}

    def tree_of(old: int) -> Tree:
        if old not in trees:
            trees[old] = saved.own(old)
        return trees[old]

    model = min(rank * saved.world_size // world_size, saved.world_size - 1)
    result = copy.copy(tree_of(model))

    def fill(chunk: Tree, keys: list[Any]) -> Tree:
        numel = chunk["numel"]
        mine = chunk_of(numel, world_size, rank)
        made = torch.empty(len(mine), dtype=chunk["chunk"].dtype, device=chunk["chunk"].device)
        if not mine:
            return {"numel": numel, "chunk": made}
        each = len(chunk_of(numel, saved.world_size, 0))
        for old in range(mine.start // each, (mine.stop - 1) // each + 1):
            theirs = chunk_of(numel, saved.world_size, old)
            node: Any = tree_of(old)
            for key in keys:
                node = node[key]
            if node["chunk"].numel() != len(theirs):
                raise ValueError(
                    f"rank {old} has {node['chunk'].numel()} of {len(theirs)} elements"
                )
            low, high = (max(mine.start, theirs.start), min(mine.stop, theirs.stop))
            made[low - mine.start : high - mine.start] = node["chunk"][
                low - theirs.start : high - theirs.start
            ]
        return {"numel": numel, "chunk": made}

    def build(node: Any, keys: list[Any]) -> Any:
        if is_chunk(node):
            return fill(node, keys)
        if isinstance(node, dict):
            return {key: build(node[key], [*keys, key]) for key in node}
        if isinstance(node, list):
            return [build(item, [*keys, i]) for i, item in enumerate(node)]
        if isinstance(node, tuple):
            return tuple((build(item, [*keys, i]) for i, item in enumerate(node)))
        return node

    return build(result, [])


@dataclass(frozen=True)
class Adapted:
    saved: Saved
    world_size: int
    seed: int

    @property
    def step(self) -> int:
        return self.saved.step

    @property
    def shared(self) -> Tree:
        return self.saved.shared

    @property
    def metadata(self) -> dict[str, Any]:
        return self.saved.metadata

    def own(self, rank: int) -> Tree:
        tree = recut(self.saved, self.world_size, rank)
        bare = sorted(
            (name for name, part in tree.get("parts", {}).items() if isinstance(part, Tensor))
        )
        if rank < self.saved.world_size:
            source = self.saved.own(rank)
            streams = source.get("random")
            states = {name: source["parts"][name] for name in bare}
        else:

            def number(what: str) -> int:
                text = f"{self.seed}/{self.step}/{rank}/{what}"
                return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")

            streams = new_streams(number("process"), tree["random"]) if "random" in tree else None
            states = {}
            for name in bare:
                kind = tree["parts"][name]
                states[name] = bare_state(number(f"generator {name}"), kind)
        if streams is not None:
            tree["random"] = streams
        tree.get("parts", {}).update(states)
        return tree


def new_streams(seed: int, like: Tree) -> Tree:

    def number(what: str, size: int) -> int:
        return int.from_bytes(hashlib.sha256(f"{seed} {what}".encode()).digest()[:size], "big")

    kept = random_state()
    try:
        random.seed(number("random", 16))
        np.random.seed(number("numpy", 4))
        torch.default_generator.manual_seed(number("torch", 8))
        streams = random_state()
    finally:
        set_random_state(kept)
    for name, state in like.items():
        if name not in streams:
            streams[name] = bare_state(number(name, 8), state)
    return streams


def adapt(saved: Saved, world_size: int, seed: int = 0) -> Saved | Adapted:
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, got {world_size}")
    if saved.world_size != world_size:
        return Adapted(saved=saved, world_size=world_size, seed=seed)
    return saved


def bare_state(seed: int, like: Tensor) -> Tensor:
    if like.numel() == 16:
        return torch.tensor([seed % 2**63, 0], dtype=torch.int64).view(torch.uint8)
    generator = torch.Generator()
    generator.manual_seed(seed)
    return generator.get_state()
