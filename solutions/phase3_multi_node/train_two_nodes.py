"""Train the same models with every strategy of this phase on two nodes; measure what each costs.

    distlab cluster run --nodes 2 --ranks-per-node 2 --rate 20mbit -- \\
        python -m solutions.phase3_multi_node.train_two_nodes --plot nodes.png

``two_node_strategies`` has the strategies and what they should cost. ``two_node_measuring``
measures time, bytes and state. At the end gradients travel after, and during, a backward of known
length.

The link must be slow for the model, or computing hides the differences. At 20 Mbit/s a ring
all-reduce of the CNN's 61 kB takes 40 ms, and one of the GPT's 841 kB 500 ms. That is several times
the time that they compute.

``--device cuda`` trains on GPUs over NCCL. The bytes are those of one network interface: tell NCCL
to use it (NCCL_NET=Socket, NCCL_SOCKET_IFNAME).
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch.distributed as dist

from distlab.reference.workloads import Workload, build_model, workload
from given.launched import launched
from given.parent import end_with_parent

from .topology import NodeGroups, exchange_places, make_groups, own_place, topology_of
from .two_node_measuring import (
    BUSY_BYTES,
    BUSY_LAYERS,
    BUSY_SECONDS,
    SCORES,
    Row,
    link_rate,
    measure,
    overlap,
)
from .two_node_strategies import STRATEGIES

COMPARED = [
    ("hierarchical DDP", "ring DDP"),
    ("hierarchical, bf16", "hierarchical DDP"),
    ("hybrid sharding", "FSDP"),
]


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
    colours += ["#D55E00"]
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
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
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
            parser.error(f"{count} steps must be two or more whole rounds of {options.every} steps")
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
    rate = link_rate(groups, options.device)
    title = f"{sizes} ranks on {len(groups.topology.nodes)} nodes, link of {rate / 1e6:.0f} Mbit/s"
    show(f"{title} (measured with one message)")
    show(
        "the formula for FSDP is that of rings: gloo's reduce-scatter sends what an all-reduce does"
    )
    tables = {name: train_all(workload(name), groups, options, show) for name in options.steps}
    after, beside = overlap(options.device)
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
    with launched("train_two_nodes", options.device, point_to_point=True) as at:
        options.device = at.device
        own = own_place(os.environ, socket.gethostname())
        topology = topology_of(exchange_places(own, at.store, at.rank, at.world_size))
        if len(topology.nodes) < 2 or not topology.even:
            raise ValueError(f"needs two or more nodes of equally many ranks, not {topology.nodes}")
        run(make_groups(topology), options)


if __name__ == "__main__":
    main()
