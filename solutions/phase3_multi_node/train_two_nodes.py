"""Train the same models with every strategy of this phase on two nodes; measure what each costs.

    distlab cluster run --nodes 2 --ranks-per-node 2 --rate 20mbit -- \\
        python -m solutions.phase3_multi_node.train_two_nodes --plot nodes.png

The strategies, and what they should cost, are in ``two_node_strategies``. Measured are: the time
per step; the bytes per step that a node puts on its link, read from the counter of its network
interface (headers and acknowledgements count); the state, which is what is alive between steps:
parameters, gradients, moments, and whatever a strategy keeps beside them; the result on test
data. At the end gradients travel after, and beside, a backward of known length.

A fair comparison takes a link that is slow for the model, or computing hides the differences; at
20 Mbit/s a ring all-reduce of the CNN's 61 kB takes 40 ms, of the GPT's 841 kB 500 ms, several
times what they compute. The first round of ``--every`` steps is not measured, of the others the
median.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from distlab.workloads import DATA, Workload, build_model, workload
from given.parent import end_with_parent
from given.process_group import process_group

from .comm_hooks import blocking
from .overlap import BucketedDDP
from .topology import NodeGroups, exchange_places, make_groups, own_place, topology_of
from .two_node_strategies import SERVERS, STRATEGIES, formula

BUSY_LAYERS, BUSY_WIDTH, BUSY_SECONDS = 4, 346, 0.3
BUSY_BYTES = 4 * BUSY_WIDTH**2
COMPARED = [
    ("hierarchical DDP", "ring DDP"),
    ("hierarchical, bf16", "hierarchical DDP"),
    ("hybrid sharding", "FSDP"),
]
SCORES = {"digits": ("test accuracy", "{:.1%}", 360), "text": ("validation loss", "{:.3f}", 100)}


# -- measuring -------------------------------------------------------------------------------------
def bytes_sent(interface: str) -> int:
    """Bytes that this node has put on ``interface`` so far."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == interface:
            return int(counters.split()[8])
    raise ValueError(f"this node has no network interface {interface!r}")


class Meter:
    """This rank's batches; notes time and bytes after every round of ``every`` steps."""

    def __init__(
        self, batches: Iterator[tuple[Tensor, Tensor]], every: int, interface: str
    ) -> None:
        self.batches, self.every, self.interface = batches, every, interface
        self.marks: list[tuple[float, int]] = []

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for step, batch in enumerate(self.batches):
            if step and step % self.every == 0:
                self.mark()
            yield batch
        self.mark()

    def mark(self) -> None:
        """Note where time and bytes stand."""
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
    """Bytes of all tensors that the garbage collector sees, every memory counted once."""
    gc.collect()
    tensors = [each for each in gc.get_objects() if issubclass(type(each), Tensor)]
    tensors += [t.grad for t in tensors if t.is_leaf and t.grad is not None]
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@torch.no_grad()
def score_of(model: nn.Module, chosen: Workload) -> float:
    """Share of right answers on the digits, loss per character on the text, of the test data."""
    *_, count = SCORES[chosen.data]
    inputs, targets = DATA[chosen.data](False)[:count]
    logits, targets = model.eval()(inputs), targets.flatten()
    if chosen.data == "digits":
        return (logits.argmax(1) == targets).float().mean().item()
    return F.cross_entropy(logits, targets).item()


@dataclass
class Row:
    """What a strategy costs and reaches: the slowest rank, the busiest node, the fullest rank."""

    strategy: str
    seconds: float
    sent: float
    formula: float
    state: float
    score: float


def measure(name: str, chosen: Workload, groups: NodeGroups, options: argparse.Namespace) -> Row:
    """Train with strategy ``name`` and say what it takes; a collective call."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    servers = SERVERS if name == "parameter server" else 0
    count = options.steps[chosen.name]
    DATA[chosen.data](), DATA[chosen.data](False)
    gc.freeze()  # live_bytes counts what is made from now on
    model = build_model(chosen.model, chosen.seed)
    expected = formula(name, model, groups, options.every)
    train, trained = STRATEGIES[name](model, chosen, groups, options.every)
    share = batches_of(chosen, count, max(0, rank - servers), world_size - servers)
    meter = Meter(share, options.every, options.interface)
    dist.barrier()
    train(meter)
    seconds, sent = meter.per_step()
    dist.barrier()  # by now the backend has let go of the last step's messages
    state = live_bytes()
    gc.unfreeze()
    mine = torch.tensor([seconds, sent, state, score_of(trained, chosen)], dtype=torch.float64)
    flat = mine.new_empty(world_size * len(mine))
    dist.all_gather_into_tensor(flat, mine)
    table = flat.view(world_size, -1)
    seconds, sent = table[servers:, :2].amax(0).tolist()
    return Row(name, seconds, sent, expected, table[:, 2].max().item(), table[0, 3].item())


def link_rate(groups: NodeGroups, nbytes: int = 2_000_000) -> float:
    """Bits per second from the first node to the second, one pair of ranks alone."""
    (first, *_), (second, *_), *_ = groups.topology.nodes
    data, seconds = torch.zeros(nbytes // 4), 0.0
    for _ in range(2):  # the first message opens the connection
        dist.barrier()
        begun = time.perf_counter()
        if dist.get_rank() == first:
            dist.send(data, second)
        elif dist.get_rank() == second:
            dist.recv(data, first)
            seconds = time.perf_counter() - begun
    found = torch.tensor(seconds)
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


def overlap(count: int = 2) -> tuple[float, float]:
    """Seconds per backward with a bucket per layer: waited for one by one, or at the end."""
    found = []
    for hook in (blocking(dist.all_reduce), None):
        model = BucketedDDP(
            nn.Sequential(*(Busy() for _ in range(BUSY_LAYERS))),
            bucket_bytes=1,
            first_bucket_bytes=1,
        )
        if hook is not None:
            model.register_comm_hook(hook)
        for step in range(count + 1):
            if step == 1:  # the first one opens connections
                dist.barrier()
                begun = time.perf_counter()
            model(torch.ones(1, BUSY_WIDTH, requires_grad=True)).sum().backward()
        found.append((time.perf_counter() - begun) / count)
    return found[0], found[1]


# -- showing ---------------------------------------------------------------------------------------
HEAD = f"{'strategy':20}{'ms/step':>9}{'kB/step over the link':>24}{'kB of state':>13}"


def line_of(row: Row, score: str) -> str:
    """A row of the table."""
    link = f"{row.sent / 1e3:.0f} (formula {row.formula / 1e3:.0f})"
    cost = f"{row.seconds * 1e3:9.1f}{link:>24}{row.state / 1e3:13.0f}"
    return f"{row.strategy:20}{cost}{score:>17}"


def train_all(
    chosen: Workload, groups: NodeGroups, options: argparse.Namespace, show: Callable[[str], None]
) -> list[Row]:
    """Train a workload with every strategy, one after another, and show the table as it grows."""
    parameters = sum(p.numel() for p in build_model(chosen.model).parameters())
    count, batch = options.steps[chosen.name], chosen.global_batch_size
    show(
        f"\n{chosen.name}: {parameters:,} parameters, {chosen.optimizer}, {count} steps of {batch} "
        f"samples; DiLoCo agrees every {options.every} steps"
    )
    label, form, _ = SCORES[chosen.data]
    show(f"{HEAD}{label:>17}")
    rows = {}
    for name in STRATEGIES:
        rows[name] = measure(name, chosen, groups, options)
        show(line_of(rows[name], form.format(rows[name].score)))
    for better, flat in COMPARED:
        sent = rows[better].sent / rows[flat].sent
        seconds = rows[better].seconds / rows[flat].seconds
        show(f"{better}: {sent:.0%} of the bytes and {seconds:.0%} of the time of {flat}")
    return [*rows.values()]


def plot(tables: dict[str, list[Row]], title: str, path: Path) -> None:
    """Bars of time, bytes (a tick where the formula is) and state; one row for each model."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(
        len(tables), 3, squeeze=False, figsize=(12, 3.2 * len(tables)), layout="constrained"
    )
    figure.suptitle(title)
    colours = ["#888888", "#0072B2", "#56B4E9", "#888888", "#009E73", "#E69F00", "#CC79A7"]
    for line, (name, rows) in zip(axes, tables.items(), strict=True):
        label, form, _ = SCORES[workload(name).data]
        columns = {
            "ms per step": [row.seconds * 1e3 for row in rows],
            "kB over the slow link per step": [row.sent / 1e3 for row in rows],
            "kB of state on the fullest rank": [row.state / 1e3 for row in rows],
        }
        names = [row.strategy for row in rows]
        for axis, (column, values) in zip(line, columns.items(), strict=True):
            bars = axis.barh(names, values, color=colours)
            axis.bar_label(bars, [f"{v:.3g}" if v < 100 else f"{v:.0f}" for v in values], padding=4)
            axis.set(xlabel=column, xlim=(0, 1.18 * max(values)))
            axis.invert_yaxis()
            axis.spines[["top", "right"]].set_visible(False)
        formulas = [row.formula / 1e3 for row in rows]
        line[1].scatter(formulas, names, s=300, c="k", marker="|", zorder=3, label="formula")
        line[1].legend(loc="lower right")
        line[0].set_title(name, loc="left", weight="bold")
        line[1].set_yticks([])
        line[2].set_yticks(range(len(rows)), [form.format(row.score) for row in rows])
        line[2].set_ylabel(label)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def options_of(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Six strategies on two nodes, side by side.")
    parser.add_argument("--cnn-steps", type=int, default=80)
    parser.add_argument("--gpt-steps", type=int, default=20)
    parser.add_argument("--every", type=int, default=5, help="steps of a DiLoCo round")
    parser.add_argument("--plot", type=Path, help="picture, written by rank 0")
    parser.add_argument("--json", type=Path, help="the tables as numbers, written by rank 0")
    parser.add_argument(
        "--interface",
        default=os.environ.get("GLOO_SOCKET_IFNAME"),
        help="the network between the nodes, whose bytes are counted (GLOO_SOCKET_IFNAME)",
    )
    options = parser.parse_args(arguments)
    options.steps = {"digits_cnn": options.cnn_steps, "tiny_gpt": options.gpt_steps}
    for count in options.steps.values():
        if options.every < 1 or count % options.every or count < 2 * options.every:
            parser.error(f"{count} steps are no two or more rounds of {options.every}")
    if not options.interface:
        parser.error("name the network between the nodes: --interface eth0")
    return options


def run(groups: NodeGroups, options: argparse.Namespace) -> None:
    """All tables, and on rank 0 the picture."""
    first = dist.get_rank() == 0

    def show(text: str) -> None:
        if first:
            print(text, flush=True)

    sizes = " + ".join(str(len(ranks)) for ranks in groups.topology.nodes)
    rate = link_rate(groups)
    title = f"{sizes} ranks on {len(groups.topology.nodes)} nodes, link of {rate / 1e6:.0f} Mbit/s"
    show(f"{title} (measured with one message)")
    show(
        "the formula for FSDP is that of rings: gloo's reduce-scatter sends what an all-reduce does"
    )
    tables = {name: train_all(workload(name), groups, options, show) for name in options.steps}
    after, beside = overlap()
    show(
        f"\na backward of {BUSY_LAYERS * BUSY_SECONDS * 1e3:.0f} ms with {BUSY_LAYERS} buckets of "
        f"{BUSY_BYTES / 1e3:.0f} kB: {after * 1e3:.0f} ms if each is waited for at once,\n"
        f"{beside * 1e3:.0f} ms if they travel beside it"
    )
    if first and options.json:
        rows = {name: [asdict(row) for row in table] for name, table in tables.items()}
        found = {"link_bits_per_second": rate, "overlap": [after, beside], "tables": rows}
        options.json.write_text(json.dumps(found))
    if first and options.plot:
        plot(tables, title, options.plot)
        show(f"\n{options.plot}")


def main() -> None:
    """Entry point under a launcher."""
    end_with_parent()
    if "RANK" not in os.environ:
        sys.exit(
            "start it with: distlab cluster run --nodes 2 --ranks-per-node 2 --rate 20mbit -- "
            "python -m solutions.phase3_multi_node.train_two_nodes"
        )
    options = options_of()
    torch.set_num_threads(1)
    store, rank, world_size = next(dist.rendezvous("env://"))
    places = exchange_places(own_place(os.environ, socket.gethostname()), store, rank, world_size)
    try:
        with process_group("gloo", store=store, rank=rank, world_size=world_size):
            topology = topology_of(places)
            if len(topology.nodes) < 2 or not topology.even:
                raise ValueError(f"it takes two or more equal nodes, these are {topology.nodes}")
            run(make_groups(topology), options)
    except (ValueError, OSError) as error:
        sys.exit(f"train_two_nodes: {error}" if rank == 0 else 1)


if __name__ == "__main__":
    main()
