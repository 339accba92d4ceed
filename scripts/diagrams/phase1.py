"""Diagrams of phase 1: data parallelism on one node."""

from __future__ import annotations

from statistics import median

from solutions.phase1_data_parallel.data_loader import ShardedSampler, split_batch
from solutions.phase1_data_parallel.simple_allreduce import communication_cost
from solutions.phase3_multi_node.tree_allreduce import tree_links

from .letters import SMALL
from .registry import diagram
from .shapes import Cell, columns, flow, row
from .sheet import MARGIN, RANKS, WIDTH, Sheet
from .times import Bar, Message, ladder, lanes, ticks


@diagram("1.1", "All ranks draw one order; it is dealt out like cards")
def sampler(sheet: Sheet) -> None:
    order, ranks = [7, 2, 9, 4, 0, 5, 1, 8, 3, 6], 3
    held: list[list[Cell]] = []
    for rank in range(ranks):
        mine = ShardedSampler(len(order), rank=rank, world_size=ranks, shuffle=False)
        held.append(
            [
                Cell(f"{order[index]}{'*' * (k >= mine.num_real)}", RANKS[rank], k >= mine.num_real)
                for k, index in enumerate(mine)
            ]
        )
    total = sum(map(len, held))
    row(sheet, "order", [held[p % ranks][p // ranks] for p in range(total)], w=38, below=14)
    for rank, cells in enumerate(held):
        spread = [cells[p // ranks] if p % ranks == rank else None for p in range(total)]
        row(sheet, f"rank {rank}", spread, w=38)
    sheet.gap(4)
    sheet.note(
        f"{len(order)} samples, W = {ranks}. * is padding: the order begins again, so that each "
        f"rank has {len(held[0])}. Nothing is sent: all compute the same order from (seed, epoch)."
    )


@diagram("1.2", "Step k of all ranks together is slice k of the order")
def loading(sheet: Sheet) -> None:
    samples, ranks, batch = 21, 4, 8
    share = split_batch(batch, ranks)
    shards = [
        list(ShardedSampler(samples, rank=r, world_size=ranks, shuffle=False, remainder="keep"))
        for r in range(ranks)
    ]
    steps = -(-len(shards[0]) // share)
    w, left = 42, MARGIN + 74
    for step in range(steps):
        middle = left + w * (step * (share + 1) + share / 2)
        sheet.text(middle, sheet.y + 8, f"step {step}", anchor="middle", bold=True)
    sheet.gap(24)
    for rank, shard in enumerate(shards):
        cells: list[Cell | None] = []
        for step in range(steps):
            mine = shard[step * share : (step + 1) * share]
            cells += [Cell(str(index), RANKS[rank]) for index in mine]
            cells += [Cell("", "plain", dashed=True)] * (share - len(mine)) + [None]
        row(sheet, f"rank {rank}", cells, w=w)
    for step in range(steps):
        middle = left + w * (step * (share + 1) + share / 2)
        end = min((step + 1) * batch, samples)
        sheet.text(middle, sheet.y + 8, f"order[{step * batch}:{end}]", anchor="middle", size=SMALL)
    sheet.gap(24)
    sheet.note(
        f"{samples} samples, global batch B = {batch}, b = B/W = {share} per rank. A number is a "
        "place in the order. In the last step some ranks have less. All take part: nobody leaves "
        "early."
    )


@diagram("1.3", "Before the first step every rank takes the state of one")
def broadcast(sheet: Sheet) -> None:
    ranks = 4
    links = {child: tree_links(child, 0, ranks)[0] for child in range(1, ranks)}
    rounds = (ranks - 1).bit_length()
    when = {child: rounds - (child & -child).bit_length() for child in links}  # far children first
    have: list[list[Cell | None]] = [[Cell(f"θ{'₀₁₂₃'[r]}", RANKS[r]) for r in range(ranks)]]
    arrows = []
    for turn in range(rounds):
        new = {child for child in links if when[child] == turn}
        last = have[-1]
        have.append(
            [Cell("θ₀", RANKS[0], strong=True) if r in new else last[r] for r in range(ranks)]
        )
        arrows += [(turn, int(links[child] or 0), child) for child in new]
    heads = ["at the start", *(f"after round {turn + 1}" for turn in range(rounds))]
    columns(sheet, [f"rank {r}" for r in range(ranks)], heads, have, arrows, apart=70)
    sheet.note(
        "State: all parameters and buffers, P bytes. Each rank gets it once. A tree needs ⌈log₂ "
        f"W⌉ = {rounds} rounds for W = {ranks}. Afterwards all are equal bit for bit."
    )


@diagram("1.4", "Each gradient counts as much as the samples behind it")
def averaging(sheet: Sheet) -> None:
    counts, gradients = (2, 1, 3), (3, 6, 0)
    n = sum(counts)
    parts = [c * g / n for c, g in zip(counts, gradients, strict=True)]
    small = "₀₁₂"
    have: list[list[Cell | None]] = [
        [
            Cell(f"n{small[r]} = {counts[r]}, g{small[r]} = {gradients[r]}", RANKS[r])
            for r in range(3)
        ],
        [Cell(f"n{small[r]}·g{small[r]}/n = {parts[r]:g}", RANKS[r]) for r in range(3)],
        [Cell(f"∇L = {sum(parts):g}", "grey", strong=True)] * 3,
    ]
    middles = columns(
        sheet, [f"rank {r}" for r in range(3)], ["own samples", f"weighted, n = {n}", "all ranks"],
        have, [(0, r, r) for r in range(3)], apart=34,
    )  # fmt: skip
    left, right = middles[1][0][0], middles[2][0][0]
    middle = (left + right) / 2
    for _, y in middles[1]:
        sheet.path([(middle - 15, y), (middle, y)])
        sheet.arrow([(middle, y), (middle + 15, y)])
    sheet.path([(middle, middles[1][0][1]), (middle, middles[1][-1][1])])
    sheet.text(middle, sheet.y + 6, "all-reduce (sum)", anchor="middle", size=SMALL)
    sheet.gap(22)
    plain = sum(gradients) / 3
    sheet.note(
        f"The plain mean of the three gradients is {plain:g}. It is right only if all n_r are "
        "equal."
    )


@diagram("1.5", "Equal weights stay equal if every rank takes every step")
def loop(sheet: Sheet) -> None:
    weight, rate, own = 2.0, 0.1, (1.0, 3.0)
    average = sum(own) / 2
    stages = [
        ("weights", [weight, weight]),
        ("own gradient", list(own)),
        ("average", [average] * 2),
        ("new weights", [weight - rate * average] * 2),
    ]
    cells = [
        [Cell(f"{sign} = {v:g}", RANKS[r]) for r, v in enumerate(values)]
        for (_, values), sign in zip(stages, "wggw", strict=True)
    ]
    heads = [name for name, _ in stages]
    arrows = [(index, r, r) for index in range(3) for r in range(2)]
    middles = columns(sheet, ["rank 0", "rank 1"], heads, cells, arrows, apart=40, below=34)
    for (_, values), column in zip(stages, middles, strict=True):
        sign = "equal" if values[0] == values[1] else "differ"
        x, y = column[0][0], (column[0][1] + column[1][1]) / 2
        sheet.text(
            x, y, sign, anchor="middle", size=SMALL, tone="green" if sign == "equal" else "red"
        )
    sheet.y -= 22
    flow(
        sheet,
        [
            Cell("zero_grad", wide=0.9),
            Cell("forward,\nbackward", wide=0.9),
            Cell("average_gradients\nall ranks, always", wide=1.5),
            Cell("optimizer.step\nall ranks, always", wide=1.45),
        ],
        h=44,
    )
    sheet.note(
        "Two equal batches, SGD with learning rate 0.1. The next batch begins with equal weights "
        "again."
    )


@diagram("1.6", "Add what can be added, then divide once")
def metrics(sheet: Sheet) -> None:
    right = [(3, 4), (0, 1)]
    for rank, (good, count) in enumerate(right):
        cells = [
            Cell("✓" if k < good else "✗", "green" if k < good else "red") for k in range(count)
        ]
        spaces: list[Cell | None] = [None] * (4 - count)
        row(
            sheet,
            f"rank {rank}",
            [*cells, *spaces],
            w=36,
            after=f"{good} right of {count}: {good / count:.2f}",
        )
    sheet.gap(6)
    mean = sum(g / c for g, c in right) / len(right)
    good, count = (sum(pair[k] for pair in right) for k in (0, 1))
    exact = good / count
    span = WIDTH - 2 * MARGIN - 210 - 60
    for words, value, tone in (
        ("mean of means: wrong", mean, "red"),
        (f"{good} / {count}, sums first: exact", exact, "green"),
    ):
        sheet.text(MARGIN, sheet.y + 13, words)
        sheet.box(MARGIN + 210, sheet.y, span * value, 26, "", tone)
        sheet.text(MARGIN + 218 + span * value, sheet.y + 13, f"{value:.3f}", bold=True)
        sheet.gap(34)
    sheet.note("One all-reduce of three numbers: sum of losses, right answers, samples.")


@diagram("1.7", "All messages pass one rank, one after the other")
def through_root(sheet: Sheet) -> None:
    ranks = 4
    reduce = [Message(r - 1, r, 0, tone=RANKS[r]) for r in range(1, ranks)]
    spread = [Message(ranks - 2 + r, 0, r, tone=RANKS[0]) for r in range(1, ranks)]
    names = ["root 0", *(f"rank {r}" for r in range(1, ranks))]
    cost = communication_cost("root", ranks, 1)
    where = ladder(sheet, names, reduce + spread, cost.steps)
    middle = where.x(ranks - 1)
    sheet.path([(middle - 4, where.top - 2), (middle - 4, where.bottom)], "grey", dashed=True)
    for start, words in ((0, "reduce: the root combines"), (ranks - 1, "broadcast: the result")):
        x = where.x(start + (ranks - 1) / 2) - 4
        sheet.text(x, sheet.y + 8, words, anchor="middle")
    sheet.gap(26)
    sheet.note(
        f"W = {ranks}: 2(W-1) = {cost.messages} messages of N bytes, {cost.steps} steps. The root "
        f"sends {cost.max_bytes_per_rank} N bytes and receives as many."
    )


@diagram("1.8", "Many messages at once, or few one after the other")
def strategies(sheet: Sheet) -> None:
    ranks = 4
    names = [f"rank {r}" for r in range(ranks)]
    direct = [
        Message(step, r, (r + step + 1) % ranks, tone=RANKS[r], lasts=0.86)
        for step in range(ranks - 1)
        for r in range(ranks)
    ]
    values = [1, 2, 3, 4]
    chain = [Message(r, r, r + 1, str(sum(values[: r + 1])), RANKS[r]) for r in range(ranks - 1)]
    chain += [
        Message(ranks - 1 + k, r, r - 1, str(sum(values)))
        for k, r in enumerate(range(ranks - 1, 0, -1))
    ]
    for name, messages, words in (
        ("direct", direct, "everyone to everyone"),
        ("chain", chain, f"values 1, 2, 3, 4; partial sums go down, {sum(values)} comes back"),
    ):
        cost = communication_cost(name, ranks, 1)
        sheet.note(f"{name}: {words}", bold=True)
        ladder(sheet, names, messages, cost.steps, apart=28)
        sheet.note(
            f"{cost.messages} messages, {cost.steps} steps; the busiest rank sends "
            f"{cost.max_bytes_per_rank} N"
        )
        sheet.gap(6)


@diagram("1.9", "Start together; the slowest rank's time counts")
def timing(sheet: Sheet) -> None:
    late, call = (1.0, 2.6, 0.4), (4.1, 3.8, 5.0)
    begin = max(late) + 0.4
    rows = {}
    for rank, (arrives, ends) in enumerate(zip(late, call, strict=True)):
        rows[f"rank {rank}"] = [
            Bar(0, arrives, "", "grey"),
            Bar(arrives, begin, "", "plain", dashed=True),
            Bar(
                begin, begin + ends, f"the call: {ends:g} ms", RANKS[rank], strong=ends == max(call)
            ),
        ]
    where = lanes(sheet, rows, begin + max(call), apart=10)
    ticks(sheet, where, {begin: "barrier, sync, start", begin + max(call): "sync, stop"})
    sheet.note(
        f"One repeat gives {max(call):g} ms: the slowest rank (all-reduce MAX). Grey is work "
        "before, dashed is waiting in the barrier: neither is timed."
    )
    repeats = (max(call), 4.8, 9.7, 5.1, 5.2)
    middle = median(repeats)
    cells = [
        Cell(f"{value:g}", "green" if value == middle else "grey", value == middle)
        for value in repeats
    ]
    row(sheet, "repeats", cells, w=60, after=f"median {middle:g} ms")
    sheet.note(
        "Warm up first. The median is not moved by the disturbed repeat; the mean would be "
        f"{sum(repeats) / len(repeats):.1f} ms."
    )
