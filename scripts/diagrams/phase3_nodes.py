"""Diagrams of phase 3: nodes and groups, buckets and the overlap with backward."""

from __future__ import annotations

import torch

from solutions.phase3_multi_node.buckets import partition
from solutions.phase3_multi_node.topology import Place, Topology, topology_of

from .letters import SMALL
from .registry import diagram
from .shapes import Cell, columns, row
from .sheet import INNER, MARGIN, RANKS, WIDTH, Sheet
from .times import Bar, lanes, ticks


def placement(nodes: list[int]) -> Topology:
    """The topology of ranks whose launcher put rank r on ``nodes[r]``."""
    return topology_of([Place(f"host{node}", node, None) for node in nodes])


@diagram("3.7", "A rank's number does not say which node it is on")
def nodes(sheet: Sheet) -> None:
    cases = {
        "filled": placement([0, 0, 0, 1, 1, 1]),
        "dealt out": placement([0, 1, 0, 1, 0, 1]),
        "uneven": placement([0, 0, 0, 0, 1, 1]),
    }
    room, w = (INNER - 74) / 3, 34
    for index, (name, topology) in enumerate(cases.items()):
        x = MARGIN + 74 + index * room
        most = max(map(len, topology.nodes))
        sheet.text(x + most * w / 2, sheet.y + 8, name, anchor="middle", bold=True)
        for local in range(most):
            sheet.text(
                x + local * w + (w - 3) / 2, sheet.y + 32, str(local), anchor="middle", size=SMALL
            )
        for node, ranks in enumerate(topology.nodes):
            for local, rank in enumerate(ranks):
                y = sheet.y + 44 + node * 36
                sheet.box(x + local * w, y, w - 3, 30, str(rank), RANKS[node], strong=local == 0)
    sheet.text(MARGIN, sheet.y + 32, "local rank", size=SMALL)
    for node in range(2):
        sheet.text(MARGIN, sheet.y + 59 + node * 36, f"node {node}")
    sheet.gap(124)
    sheet.note(
        "A number is a global rank, a bold border its node's leader. The local rank decides "
        "which GPU a rank takes."
    )


@diagram("3.7-2", "Rows are nodes, columns go across them")
def node_groups(sheet: Sheet) -> None:
    dealt = placement([0, 1, 0, 1]).nodes
    w, h, x = 110.0, 36.0, MARGIN + 84
    for local in range(2):
        middle = x + local * (w + 30) + w / 2
        sheet.text(middle, sheet.y + 8, f"local rank {local}", anchor="middle")
    top = sheet.y + 30
    sheet.box(x - 10, top - 8, w + 20, 2 * h + 38, "", "plain", dashed=True)
    for node, ranks in enumerate(dealt):
        y = top + node * (h + 22)
        sheet.text(MARGIN, y + h / 2, f"node {node}")
        sheet.box(x - 16, y - 4, 2 * w + 62, h + 8, "", "plain", dashed=True)
        for local, rank in enumerate(ranks):
            words = f"rank {rank}"
            sheet.box(x + local * (w + 30), y, w, h, words, RANKS[node], strong=local == 0)
        words = f'"node" {" and ".join(map(str, ranks))}'
        sheet.text(x + 2 * w + 56, y + h / 2, words)
    sheet.y = top + 2 * h + 38
    across = " and ".join(str(ranks[0]) for ranks in dealt)
    sheet.text(x + w / 2, sheet.y + 6, f'"across" {across}: the leaders', anchor="middle")
    sheet.gap(24)
    sheet.note(
        "Dealt out to two nodes. M nodes of L ranks have M + L groups; every rank is in two."
    )


@diagram("3.8", "What leaves a node is one sum, a shard from each rank")
def hierarchical(sheet: Sheet) -> None:
    topology = placement([0, 0, 1, 1])
    local = {rank: topology.locate(rank) for rank in range(4)}

    def shard(name: str, ranks: tuple[int, ...]) -> str:
        return name + "".join(map(str, ranks))

    cells = []
    for moment in range(4):
        column: list[Cell | None] = []
        for rank in range(4):
            node, own = local[rank]
            mates = topology.nodes[node]
            every = tuple(range(4))
            name = "AB"[own]
            words = [
                "\n".join(shard(n, (rank,)) for n in "AB"),
                shard(name, mates),
                shard(name, every),
                "\n".join(shard(n, every) for n in "AB"),
            ][moment]
            column.append(
                Cell(words, "green" if moment > 1 else RANKS[node], strong=moment in (1, 2))
            )
        cells.append(column)
    names = [f"n{local[rank][0]}, rank {rank}" for rank in range(4)]
    peers = [[(0, 1), (1, 0), (2, 3), (3, 2)], [(0, 2), (2, 0), (1, 3), (3, 1)]]
    arrows = [(index, a, b) for index in range(3) for a, b in peers[index % 2]]
    heads = ["start", "inside", "across", "inside"]
    found = columns(sheet, names, heads, cells, arrows, label=84, apart=46, below=10, h=40)
    middle = (found[0][1][1] + found[0][2][1]) / 2
    sheet.path([(MARGIN, middle), (MARGIN + 78, middle)], "grey", dashed=True)
    for index, words in enumerate(["reduce-scatter", "all-reduce", "all-gather"]):
        x = found[index + 1][0][0]
        sheet.text(x, sheet.y + 4, words, anchor="middle", size=SMALL)
    sheet.gap(20)
    sheet.note(
        "Two nodes of two ranks. A and B are the halves of the tensor; digits are the ranks "
        "whose parts are in the sum. Only the middle stage uses the network, with all ranks at "
        "once. The leaders speak for nodes of different size."
    )


@diagram("3.30", "Use groups in one order on all ranks, and nobody waits")
def groups(sheet: Sheet) -> None:
    orders = {
        "different orders: both wait for ever": (["world", "team"], ["team", "world"]),
        "one order: both go on": (["world", "team"], ["world", "team"]),
    }
    tone = {"world": "blue", "team": "orange"}
    for words, queues in orders.items():
        stuck = queues[0][0] != queues[1][0]
        sheet.note(words, bold=True, tone="red" if stuck else "green")
        top, x0, w = sheet.y, MARGIN + 130, 120
        for rank, queue in enumerate(queues):
            y = top + rank * 62
            sheet.text(MARGIN, y + 15, f"rank {rank}" + " (leader)" * (rank == 0))
            for position, name in enumerate(queue):
                words = f"{name}" + (" waits" if stuck and position == 0 else "")
                sheet.box(
                    x0 + position * (w + 60),
                    y,
                    w,
                    30,
                    words,
                    tone[name],
                    strong=position == 0,
                    dashed=stuck and position == 1,
                )
        for first, name in enumerate(queues[0]):
            second = queues[1].index(name)
            x1, x2 = (x0 + position * (w + 60) + w / 2 for position in (first, second))
            sheet.path([(x1, top + 32), (x2, top + 60)], tone[name], dashed=stuck, k=not stuck)
        sheet.y = top + 104
    sheet.note(
        "A row is the order in which a rank first uses its communicators, left first. A line "
        "joins the two ends of one communicator; it can begin when both are first in their row."
    )


@diagram("3.9", "Buckets fill in the order in which gradients come")
def bucket_order(sheet: Sheet) -> None:
    layers = {"embed": 4, "layer1": 4, "layer2": 4, "layer3": 4, "head": 2}  # MB
    tone = dict(zip(layers, (*RANKS, "grey"), strict=True))
    unit = (WIDTH - 2 * MARGIN - 96) / sum(layers.values())

    def cells(names: list[str]) -> list[Cell]:
        return [Cell(name, tone[name], wide=layers[name]) for name in names]

    come = [*reversed(layers)]
    lists = partition([torch.empty(layers[name], dtype=torch.int8) for name in come], 8, 2)
    x = MARGIN + 96
    row(sheet, "registered", cells([*layers]), x=x, w=unit)
    row(sheet, "gradients", cells(come), x=x, w=unit, below=14)
    buckets = []
    for number, members in enumerate(lists):
        size = sum(layers[come[k]] for k in members)
        words = f"bucket {number}" if size > 2 else f"b{number}"
        buckets.append(Cell(f"{words}\n{size} MB", "plain", strong=True, wide=size))
    row(sheet, "leave", buckets, x=x, w=unit, h=42)
    sheet.note(
        "The first bucket is small and leaves early. The last one has nothing left to hide it. "
        "Limits here: 2 MB for the first bucket, 8 MB for the others."
    )


@diagram("3.9-2", "A gradient is a view into its bucket's buffer")
def bucket_views(sheet: Sheet) -> None:
    x = MARGIN + 96
    shapes = {"layer3.weight": (3, 4), "layer2.weight": (2, 4), "bias": (3,)}
    total = sum(torch.Size(s).numel() for s in shapes.values())
    views = [
        Cell(f"{name}\n{tuple(s)}", t, wide=torch.Size(s).numel())
        for (name, s), t in zip(shapes.items(), ("purple", "green", "grey"), strict=True)
    ]
    unit = (WIDTH - 2 * MARGIN - 96) / total
    row(
        sheet,
        "buffer",
        [Cell(f"{total} numbers in one piece", "plain", strong=True, wide=total)],
        x=x,
        w=unit,
    )
    row(sheet, "views", views, x=x, w=unit, h=42)
    sheet.note(
        "p.grad is a view into the bucket's buffer: what is written there is sent without a copy."
    )


def arrivals(ready: list[float], cost: float) -> list[float]:
    """When each bucket has arrived: not before it is complete, nor before the one in front."""
    ends: list[float] = []
    for time in ready:
        ends.append(max([time, *ends[-1:]]) + cost)
    return ends


@diagram("3.10", "A bucket leaves while backward goes on")
def overlap(sheet: Sheet) -> None:
    layers, each, cost = 5, 1.8, 2.0
    ready = [each * (k + 1) for k in range(layers)]
    ends = arrivals(ready, cost)
    compute = [Bar(t - each, t, f"layer {layers - k}", "blue") for k, t in enumerate(ready)]
    wire = [Bar(e - cost, e, f"bucket {k + 1}", "orange") for k, e in enumerate(ends)]
    after = [
        Bar(ready[-1] + k * cost, ready[-1] + (k + 1) * cost, f"{k + 1}", "orange")
        for k in range(layers)
    ]
    span = after[-1].end
    sheet.note(f"reduced after backward: T + Σ c = {span:g} ms", bold=True)
    plain = [Bar(0, ready[-1], "backward", "blue")]
    lanes(sheet, {"compute": plain, "wire": after}, span, label=78)
    sheet.gap(8)
    sheet.note(f"overlapped: {ends[-1]:g} ms", bold=True)
    short = [Bar(b.start, b.end, b.text[-1], b.tone) for b in compute]
    wires = [Bar(b.start, b.end, b.text[-1], b.tone) for b in wire]
    where = lanes(sheet, {"compute": short, "wire": wires}, span, label=78)
    ticks(sheet, where, {ready[0]: "t₁", ready[-1]: "T", ends[-1]: "f₅"})
    x1, x2 = where.x(ready[-1]), where.x(ends[-1])
    sheet.box(x1, sheet.y, x2 - x1, 22, "exposed", "red")
    sheet.gap(32)
    sheet.note(
        f"Five layers of {each:g} ms backward, last layer first, a bucket each that needs c = "
        f"{cost:g} ms. Bucket k is complete at t_k and has arrived at f_k = max(t_k, f_(k-1)) + c."
    )


@diagram("3.11", "A gradient that does not come leaves as zeros")
def missing(sheet: Sheet) -> None:
    end, first, second = 9.0, 3.0, 6.0
    send = 1.6
    rows = {
        "rank 0": [Bar(0, end, "backward", "blue")],
        "sends": [
            Bar(first, first + send, "b0", "orange"),
            Bar(second, end, "", "grey", hatch=True),
            Bar(end, end + send, "b1", "orange"),
        ],
        "rank 1": [Bar(0, end, "backward", "green")],
        "sends ": [
            Bar(first, first + send, "b0", "orange"),
            Bar(end, end + send, "zeros", "orange", dashed=True),
        ],
    }
    where = lanes(sheet, rows, end + send + 0.3)
    ticks(sheet, where, {first: "b0 complete", second: "b1 on rank 0", end: "end of backward"})
    sheet.note(
        "Rank 1 does not take the branch of bucket b1, so no gradient comes. Rank 0's b1 is "
        "under way (hatched) until rank 1 sends zeros at the end of its backward. Both ranks "
        "send the same buckets in the same order."
    )


@diagram("3.12", "DDP says when a bucket leaves, the hook says how")
def hooks(sheet: Sheet) -> None:
    ready, called, arrived, end = 3.0, 4.4, 9.2, 10.4
    rows = {
        "DDP": [
            Bar(0, 8, "backward goes on", "blue"),
            Bar(8, arrived, "wait()", "grey"),
            Bar(arrived, end, "step", "blue"),
        ],
        "hook": [Bar(ready, called, "begin", "purple")],
        "wire": [Bar(called, arrived, "bucket.buffer is summed", "orange")],
    }
    where = lanes(sheet, rows, end, h=30, apart=22)
    top, hook, wire = where.middle
    sheet.arrow([(where.x(ready), top + 15), (where.x(ready), hook - 17)])
    sheet.text(where.x(ready) - 6, (top + hook) / 2, "bucket complete", anchor="end", size=SMALL)
    sheet.arrow([(where.x(arrived), wire - 15), (where.x(arrived), top + 17)])
    sheet.text(
        where.x(arrived) - 6, (top + hook) / 2, "sum in the buffer", anchor="end", size=SMALL
    )
    sheet.gap(2)
    sheet.note("hook(bucket) gives back a handle at once. Three hooks, one interface:")
    kinds = ("all-reduce\nin float32", "bfloat16:\nhalf the bytes", "two levels:\nnodes first")
    row(sheet, "", [Cell(kind, "orange") for kind in kinds], x=MARGIN, w=INNER / 3, h=44)
