"""Where each rank computes, and by which backend ranks talk: agreed on before there is a group.

A rank knows only the GPUs that its launcher shows to it: all of the node (torchrun), or one (SLURM
with ``--gpus-per-task=1``), which is then number 0 on every rank. Only its UUID tells whether two
ranks mean the same GPU. No rank alone knows whether all nodes have GPUs. So all ranks tell each
other through a store, and every rank finds the same:

========================  ==================  ====================================================
each rank has             backend             otherwise
========================  ==================  ====================================================
a GPU of its own          nccl, bound to it   without a bound device NCCL makes communicators late,
                                              and a first batch of messages must have all ranks
a GPU, shared by some     gloo                no messages: gloo's are between CPUs; then the CPU
no GPU, at least one      gloo, on the CPU
========================  ==================  ====================================================

``auto`` leaves the choice open and falls back to the CPU. ``cuda`` is refused, on all ranks.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

CHOICES = ("auto", "cpu", "cuda")


@dataclass(frozen=True)
class Placement:
    """This rank's device, the backend of all ranks, and both in words."""

    device: torch.device
    backend: str
    text: str

    @property
    def settings(self) -> dict[str, Any]:
        """The settings for ``process_group``: NCCL's groups are bound to the device."""
        bound = {"device_id": self.device} if self.backend == "nccl" else {}
        return {"backend": self.backend, **bound}


def visible_gpus() -> list[str]:
    """The UUIDs of the GPUs that this process sees, in the order of their numbers."""
    count = torch.cuda.device_count()
    return [str(torch.cuda.get_device_properties(number).uuid) for number in range(count)]


def choose(
    wanted: Sequence[str], gpus: Sequence[str], point_to_point: bool
) -> tuple[str, str, str]:
    """(cuda or cpu, backend, both in words) from each rank's wish and its GPU's UUID, or "".

    Raises ValueError if the ranks don't ask for the same device, or for one that is not there.
    """
    if len({*wanted}) > 1:
        raise ValueError(f"the ranks ask for different devices: {', '.join(sorted({*wanted}))}")
    ranks, count = len(gpus), len({*gpus} - {""})
    who = f"{ranks} rank{'s' * (ranks > 1)}"
    many = f"{who}, {count} GPU{'s' * (count != 1)}"
    obstacle = ""
    if "" in gpus:
        obstacle = f"{many}: rank {[*gpus].index('')} has none"
    elif count < ranks and point_to_point:
        obstacle = f"{many}: point-to-point needs a GPU per rank"
    if wanted[0] == "cuda" and obstacle:
        raise ValueError(f"{obstacle}; use --device cpu")
    if wanted[0] == "cpu" or obstacle:
        note = f" ({obstacle})" if obstacle and count else ""
        return "cpu", "gloo", f"{who} on the CPU, backend gloo{note}"
    if count < ranks:
        return "cuda", "gloo", f"{many}, backend gloo (NCCL takes a GPU per rank)"
    return "cuda", "nccl", f"{many}, backend nccl"


def place(
    wanted: str, store: dist.Store, rank: int, world_size: int, *, point_to_point: bool = False
) -> Placement:
    """Agree with all ranks on devices and backend; call it before joining, once per store.

    ``wanted`` is one of ``CHOICES``; ``point_to_point``: the program passes messages. Of the GPUs
    that a rank sees it takes number LOCAL_RANK, counted round. The GPU becomes the current one. On
    the CPU a rank computes with one thread. Raises ValueError as ``choose`` does, on every rank,
    when all ranks have read the reason.
    """
    seen = visible_gpus() if wanted != "cpu" else []
    number = int(os.environ.get("LOCAL_RANK", rank)) % max(1, len(seen))
    store = dist.PrefixStore("devices", store)
    store.set(f"own/{rank}", json.dumps([wanted, seen[number] if seen else ""]))
    every = [json.loads(store.get(f"own/{other}")) for other in range(world_size)]
    store.set(f"read/{rank}", "")
    if rank == 0:  # it may be the one that serves the store
        store.wait([f"read/{other}" for other in range(world_size)])
    kind, backend, text = choose([w for w, _ in every], [gpu for _, gpu in every], point_to_point)
    if kind == "cpu":
        torch.set_num_threads(1)
        return Placement(torch.device("cpu"), backend, text)
    torch.cuda.set_device(number)
    return Placement(torch.device("cuda", number), backend, text)
