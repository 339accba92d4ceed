"""Measure a strategy on two nodes: time, bytes on the link, state, and the result.

- The time per step: the median of all rounds of ``--every`` steps but the first.
- The bytes per step that a node puts on its link, read from the counter of its network interface.
  Headers and acknowledgements count.
- The state, which is all memory in use between steps: parameters, gradients, moments, and other
  tensors that a strategy keeps.
- The result on test data.

Times are those of the slowest rank, bytes those of the busiest node, and state that of the fullest
rank.
"""

from __future__ import annotations

import argparse
import gc
import math
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from distlab.reference.workloads import DATA, Workload, build_model

from .comm_hooks import blocking
from .overlap import BucketedDDP
from .topology import NodeGroups
from .two_node_strategies import SERVERS, STRATEGIES, formula

BUSY_LAYERS, BUSY_WIDTH, BUSY_SECONDS = 4, 346, 0.3
BUSY_BYTES = 4 * BUSY_WIDTH**2
SCORES = {"digits": ("test accuracy", "{:.1%}", 360), "text": ("validation loss", "{:.3f}", 100)}


def settle(device: torch.device) -> None:
    """Return when ``device`` has finished its work: a GPU's host runs ahead of it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def bytes_sent(interface: str) -> int:
    """Bytes that this node has put on ``interface`` so far."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == interface:
            return int(counters.split()[8])
    raise ValueError(f"this node has no network interface {interface!r}")


class Meter:
    """This rank's batches on ``device``; notes time and bytes after each ``every`` steps."""

    def __init__(
        self,
        batches: Iterator[tuple[Tensor, Tensor]],
        every: int,
        interface: str,
        device: torch.device,
    ) -> None:
        self.batches, self.every, self.interface = batches, every, interface
        self.device = device
        self.marks: list[tuple[float, int]] = []

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for step, (inputs, targets) in enumerate(self.batches):
            if step and step % self.every == 0:
                self.mark()
            yield inputs.to(self.device), targets.to(self.device)
        self.mark()

    def mark(self) -> None:
        """Note the time and the bytes sent so far."""
        settle(self.device)
        self.marks.append((time.perf_counter(), bytes_sent(self.interface)))

    def per_step(self) -> tuple[float, float]:
        """(seconds, bytes) per step after the first round; NaN for a rank that had no batches.

        Seconds are those of the median round, so that a busy moment of the machine counts little.
        """
        if len(self.marks) < 2:
            return math.nan, math.nan
        seconds, sent = zip(*self.marks, strict=True)
        rounds = [end - begin for begin, end in pairwise(seconds)]
        nbytes = (sent[-1] - sent[0]) / len(rounds)
        return statistics.median(rounds) / self.every, nbytes / self.every


def batches_of(
    chosen: Workload, count: int, part: int, parts: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Part ``part`` of each of the first ``count`` global batches: inputs, flat targets."""
    inputs, targets = DATA[chosen.data]().tensors
    for step in range(count):
        generator = torch.Generator().manual_seed(step)
        order = torch.randperm(len(inputs), generator=generator)[: chosen.global_batch_size]
        mine = order.tensor_split(parts)[part]
        yield inputs[mine], targets[mine].flatten()


def live_bytes() -> int:
    """Bytes of all tensors that a Python object holds, every storage counted once.

    A thread of the backend may hold the last message a moment longer: that is no state.
    """
    gc.collect()
    held = gc.get_referents(*gc.get_objects())
    tensors = [each for each in held if issubclass(type(each), Tensor)]
    tensors += [t.grad for t in tensors if t.is_leaf and t.grad is not None]
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@torch.no_grad()
def score_of(model: nn.Module, chosen: Workload) -> float:
    """Share of right answers on the digits, loss per character on the text, of the test data."""
    *_, count = SCORES[chosen.data]
    device = next(model.parameters()).device
    inputs, targets = (each.to(device) for each in DATA[chosen.data](False)[:count])
    logits, targets = model.eval()(inputs), targets.flatten()
    if chosen.data == "digits":
        return (logits.argmax(1) == targets).float().mean().item()
    return F.cross_entropy(logits, targets).item()


@dataclass
class Row:
    """A strategy's costs and result: of the slowest rank, the busiest node, the fullest rank."""

    strategy: str
    seconds: float
    sent: float
    formula: float
    state: float
    score: float


def measure(name: str, chosen: Workload, groups: NodeGroups, options: argparse.Namespace) -> Row:
    """Train with strategy ``name`` and measure its costs; a collective call."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    servers = SERVERS if name == "parameter server" else 0
    count = options.steps[chosen.name]
    DATA[chosen.data](), DATA[chosen.data](False)
    gc.freeze()  # live_bytes counts what is made from now on
    model = build_model(chosen.model, chosen.seed).to(options.device)
    expected = formula(name, model, groups, options.every)
    train, trained = STRATEGIES[name](model, chosen, groups, options.every)
    share = batches_of(chosen, count, max(0, rank - servers), world_size - servers)
    meter = Meter(share, options.every, options.interface, options.device)
    dist.barrier()
    train(meter)
    seconds, sent = meter.per_step()
    state = live_bytes()
    gc.unfreeze()
    numbers = [seconds, sent, state, score_of(trained, chosen)]
    mine = torch.tensor(numbers, dtype=torch.float64, device=options.device)
    flat = mine.new_empty(world_size * len(mine))
    dist.all_gather_into_tensor(flat, mine)
    table = flat.view(world_size, -1)
    seconds, sent = table[servers:, :2].amax(0).tolist()
    return Row(name, seconds, sent, expected, table[:, 2].max().item(), table[0, 3].item())


def link_rate(groups: NodeGroups, device: torch.device, nbytes: int = 2_000_000) -> float:
    """Bits per second from the first node to the second, between one pair of ranks."""
    (first, *_), (second, *_), *_ = groups.topology.nodes
    data, seconds = torch.zeros(nbytes // 4, device=device), 0.0
    for _ in range(2):  # the first message opens the connection
        dist.barrier()
        begun = time.perf_counter()
        if dist.get_rank() == first:
            dist.send(data, second)
        elif dist.get_rank() == second:
            dist.recv(data, first)
            settle(device)
            seconds = time.perf_counter() - begun
    found = torch.tensor(seconds, device=device)
    dist.broadcast(found, second)
    return 8 * nbytes / found.item()


class Busy(nn.Linear):
    """A layer of ``BUSY_BYTES`` whose backward takes longer, as if on another processor."""

    def __init__(self) -> None:
        super().__init__(BUSY_WIDTH, BUSY_WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, BUSY_WIDTH) to the same."""
        y = super().forward(x)
        y.register_hook(lambda _: time.sleep(BUSY_SECONDS))
        return y


def overlap(device: torch.device, count: int = 2) -> tuple[float, float]:
    """Seconds per backward with a bucket per layer: waited for one by one, or at the end."""
    found = []
    for hook in (blocking(dist.all_reduce), None):
        model = BucketedDDP(
            nn.Sequential(*(Busy() for _ in range(BUSY_LAYERS))).to(device),
            bucket_bytes=1,
            first_bucket_bytes=1,
        )
        if hook is not None:
            model.register_comm_hook(hook)
        for step in range(count + 1):
            if step == 1:  # the first one opens connections
                dist.barrier()
                begun = time.perf_counter()
            model(torch.ones(1, BUSY_WIDTH, device=device, requires_grad=True)).sum().backward()
        settle(device)
        found.append((time.perf_counter() - begun) / count)
    return found[0], found[1]
