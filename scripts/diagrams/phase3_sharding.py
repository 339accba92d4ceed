"""Diagrams of phase 3: sharded optimizers, gradients and parameters."""

from __future__ import annotations

from .letters import SMALL
from .phase3_rings import panels
from .registry import diagram
from .shapes import Cell, circuit, flow, row
from .sheet import MARGIN, RANKS, WIDTH, Sheet
from .times import Bar, lanes, ticks

LEFT = MARGIN + 86


def named(sizes: dict[str, int], ranks: int) -> tuple[list[str], int]:
    """The parameter of each element of a flat vector, "·" for padding, and a shard's length."""
    elements = [name for name, size in sizes.items() for _ in range(size)]
    shard = -(-len(elements) // ranks)
    return elements + ["·"] * (shard * ranks - len(elements)), shard


def ranges(elements: list[str], start: int, end: int) -> list[tuple[str, int, int]]:
    """(parameter, first, last) of what lies between two places, numbered within the parameter."""
    found: dict[str, list[int]] = {}
    for position in range(start, min(end, len(elements))):
        name = elements[position]
        if name != "·":
            found.setdefault(name, []).append(position - elements.index(name))
    return [(name, positions[0], positions[-1]) for name, positions in found.items()]


def spelled(parts: list[tuple[str, int, int]]) -> str:
    """The ranges in words."""
    return "\n".join(f"{name} {a}…{b}" if a < b else f"{name} {a}" for name, a, b in parts)


def vector(
    sheet: Sheet, elements: list[str], tones: dict[str, str], label: str = "vector"
) -> float:
    """A row of a cell per element; gives back a cell's width."""
    w = (WIDTH - MARGIN - LEFT) / len(elements)
    cells = [Cell(e, tones.get(e, "plain"), dashed=e == "·") for e in elements]
    row(sheet, label, cells, x=LEFT, w=w)
    return w


@diagram("3.13", "Each rank steps a W-th of the elements; all get the result")
def zero1(sheet: Sheet) -> None:
    sizes, ranks = {"w1": 5, "w2": 3, "b": 2}, 3
    elements, shard = named(sizes, ranks)
    w = vector(sheet, elements, {"w1": "blue", "w2": "orange", "b": "green"})
    shards = [ranges(elements, r * shard, (r + 1) * shard) for r in range(ranks)]
    names = [Cell(f"rank {r}", "plain", strong=True, wide=shard) for r in range(ranks)]
    row(sheet, "shards", names, x=LEFT, w=w)
    row(
        sheet,
        "m and v of",
        [Cell(spelled(part), "grey", wide=shard) for part in shards],
        x=LEFT,
        w=w,
        h=44,
    )
    sheet.gap(4)
    sheet.note("step", bold=True)
    flow(
        sheet,
        [
            Cell("gradients,\nall-reduced"),
            Cell("own elements\nare stepped", "blue"),
            Cell("all-gather,\nin place", "orange"),
        ],
    )
    sheet.note(
        "· is padding, in nobody's state. Parameters are views of the vector: the all-gather "
        "writes into the model."
    )


@diagram("3.14", "Stop half way: gradients stay with their owners")
def zero2(sheet: Sheet) -> None:
    ranks = 3
    empty = Cell("", "plain", dashed=True)
    whole = [[Cell(f"g{c}", RANKS[r]) for c in range(ranks)] for r in range(ranks)]
    own = [
        [Cell(f"Σg{c}", "green", True) if c == r else empty for c in range(ranks)]
        for r in range(ranks)
    ]
    stepped = [
        [Cell(f"w{c}", "purple", True) if c == r else empty for c in range(ranks)]
        for r in range(ranks)
    ]
    gathered = [[Cell(f"w{c}", "purple") for c in range(ranks)] for _ in range(ranks)]
    panels(
        sheet,
        ["backward", "reduce-scatter", "own shard stepped", "all-gather"],
        [whole, own, stepped, gathered],
    )
    sheet.note(
        "g: gradients of a bucket, joined. Σg: the mean of one chunk, on its owner alone; p.grad "
        "is None. w: new parameters. Together both halves send what an all-reduce sends."
    )


@diagram("3.15", "A unit is there in full only around its compute")
def fsdp(sheet: Sheet) -> None:
    elements, shard = named({"w1": 6, "b1": 2, "w2": 3}, 4)
    w = vector(sheet, elements, {"w1": "blue", "b1": "orange", "w2": "green"}, "one unit")
    row(
        sheet,
        "shards",
        [Cell(f"rank {r}", "plain", strong=True, wide=shard) for r in range(4)],
        x=LEFT,
        w=w,
        below=16,
    )
    gather, forward, backward, reduce = 1.4, 2.0, 3.2, 1.4
    network: list[Bar] = []
    compute: list[Bar] = []
    full: dict[str, list[Bar]] = {"unit 1 full": [], "unit 2 full": []}
    now, turn = 0.0, 0.0
    for unit, back in ((1, False), (2, False), (2, True), (1, True)):
        turn = now if back and not turn else turn
        start = now
        network.append(Bar(now, now + gather, f"g{unit}", "orange"))
        now += gather
        length = backward if back else forward
        compute.append(Bar(now, now + length, f"u{unit}" + "'" * back, "blue"))
        now += length
        full[f"unit {unit} full"].append(Bar(start, now, "full", "purple"))
        if back:
            network.append(Bar(now, now + reduce, f"r{unit}", "green"))
            now += reduce
    where = lanes(sheet, {"network": network, "compute": compute, **full}, now, label=86)
    ticks(sheet, where, {0: "forward", turn: "backward"})
    sheet.note(
        "g: all-gather, r: reduce-scatter, u': backward of u. Between, a unit's vector has no "
        "storage; each rank keeps its shard. The optimizer steps the shards. · is padding, in "
        "messages only."
    )


@diagram("3.16", "The next unit's parameters travel while this one computes")
def prefetch(sheet: Sheet) -> None:
    units, forward, backward, message = 3, 2.0, 3.0, 1.2
    gathers: list[Bar] = []
    reduces: list[Bar] = []
    compute: list[Bar] = []
    wire = now = 0.0

    def issue(lane: list[Bar], name: str, tone: str) -> float:
        nonlocal wire
        start = max(wire, now)
        wire = start + message
        lane.append(Bar(start, wire, name, tone))
        return wire

    there = {1: issue(gathers, "g1", "orange")}
    for unit in range(1, units + 1):
        if unit < units:
            there[unit + 1] = issue(gathers, f"g{unit + 1}", "orange")
        start = max(now, there[unit])
        now = start + forward
        compute.append(Bar(start, now, f"u{unit}", "blue"))
    turn = now
    there = {units: now}
    for unit in range(units, 0, -1):
        if unit > 1:
            there[unit - 1] = issue(gathers, f"g{unit - 1}", "orange")
        start = max(now, there[unit])
        now = start + backward
        compute.append(Bar(start, now, f"u{unit}'", "blue"))
        issue(reduces, f"r{unit}", "green")
    where = lanes(sheet, {"compute": compute, "gathers": gathers, "reduces": reduces}, wire)
    ticks(sheet, where, {0: "forward", turn: "backward: u3 was kept", wire: "end"})
    alone = units * (forward + backward + 3 * message)
    sheet.note(
        f"{wire:g} ms instead of {alone:g} ms one after the other: only the first gather and the "
        "last reduce-scatter show. g: all-gather, r: reduce-scatter, u': backward of u."
    )


@diagram("3.17", "Round the copy that computes, not the one that remembers")
def precision(sheet: Sheet) -> None:
    circuit(
        sheet,
        ("float32: the copy that remembers", "bfloat16: the copy that computes"),
        ["shard: the\nmaster weights", "optimizer", "reduce-scatter,\nmean: 4 bytes"],
        ["all-gather:\n2 bytes", "forward,\nbackward", "gradients"],
        "to bfloat16",
        "to float32",
    )
    sheet.note(
        "2 and 4 bytes: what a parameter takes in a message. Each rank keeps 1/W of the masters, "
        "4Ψ/W bytes."
    )


@diagram("3.18", "Only shards cross the bus")
def offload(sheet: Sheet) -> None:
    circuit(
        sheet,
        ("CPU: keeps everything between steps", "device: a few units in full"),
        ["shard, in\npinned memory", "optimizer", "gradient\nof the shard"],
        ["shard", "all-gather,\nfull", "compute", "reduce-scatter,\nmean"],
        "4Ψ/W bytes, twice",
        "4Ψ/W bytes",
        tones=("green", "orange"),
    )
    sheet.note(
        "12Ψ/W bytes per rank and step over the bus. A full vector would be W times as much."
    )


@diagram("3.19", "Shard inside the node, replicate across nodes")
def hybrid(sheet: Sheet) -> None:
    x, w, apart, h, top = MARGIN + 70.0, 110.0, 150.0, 46.0, sheet.y + 26
    down = 70.0
    for local in range(2):
        sheet.text(
            x + local * (w + apart) + w / 2, sheet.y + 8, f"local rank {local}", anchor="middle"
        )
    for rank in range(4):
        node, local = divmod(rank, 2)
        y = top + node * (h + down)
        sheet.box(x + local * (w + apart), y, w, h, f"rank {rank}\nshard {local}", RANKS[local])
    for node in range(2):
        y = top + node * (h + down) + h / 2
        sheet.text(MARGIN, y, f"node {node}")
        ends = [(x + w + 4, y), (x + w + apart - 4, y)]
        sheet.arrow(ends, k=True)
        sheet.arrow(ends[::-1], k=True)
        sheet.text(x + w + apart / 2, y - 12, "all-gather,", anchor="middle", size=SMALL)
        sheet.text(x + w + apart / 2, y + 13, "reduce-scatter", anchor="middle", size=SMALL)
    for local in range(2):
        middle = x + local * (w + apart) + w / 2
        ends = [(middle, top + h + 4), (middle, top + h + down - 4)]
        sheet.arrow(ends, dashed=True)
        sheet.arrow(ends[::-1], dashed=True)
        sheet.text(middle + 8, top + h + down / 2, "all-reduce", size=SMALL)
    sheet.y = top + 2 * h + down + 10
    sheet.note(
        "Thick: fast links inside a node. Dashed: the network, which carries only the reduced "
        'chunk of P/L bytes. A column is a group "replicate", a row a group "shard".'
    )
