# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Context and experts: long sequences, many parameters
#
# 1. Attention over ranks: who multiplies what, in a row and zig-zag
# 2. Ring and all-to-all executed: the same result, different bytes
# 3. Ring or all-to-all? Where they cross
# 4. A mixture of experts: balance by loss and by bias
# 5. Capacity: how many choices are dropped
# 6. Expert parallelism: where the rows go
# 7. Pipelines in a V
#
# By default the cells run the solutions; set `IMPL = "templates"` to use *your* files in
# `phase2_advanced/`. Cells whose exercise is still blank then say so and go on.

# %%
IMPL = "solutions"

# %%
import sys

sys.path[:0] = [".", ".."]  # where the course lies

import torch
import torch.distributed as dist
import torch.nn.functional as F
from matplotlib import pyplot as plt
from matplotlib.colors import ListedColormap
from torch import nn

from distlab.commands.notebook import COLOURS, Notebook, show
from distlab.virtual import load_cluster, run_virtual
from distlab.reference.workloads import digits

notebook = Notebook(2, IMPL)
module, ranks = notebook.module, notebook.ranks

# %% [markdown]
# ## 1. Who multiplies what
#
# Causal attention multiplies each query with the keys up to its own position: a triangle of pairs.
# Four ranks share 64 positions. In a row, rank 3 has the longest rows of the triangle. Zig-zag
# (exercise 2.22) cuts the sequence into 8 chunks, and rank r gets the chunks r and 7 - r. The right
# triangle comes from 2.22's `own_positions` and `visible`: each pair has the colour of the rank that
# multiplies it.

# %%
context, exchanging = module("context_parallel"), module("all_to_all_attention")
WORLD, LENGTH = 4, 64


def triangle(world, length):
    """The rank that multiplies each pair of positions, -1 where no rank does; from 2.22."""
    owner = torch.full((length, length), -1)
    sizes = context.chunk_sizes([length], world)
    for rank in range(world):
        queries = context.own_positions([length], rank, world)
        for source in range(world):
            keys = context.own_positions([length], source, world)
            for ours, theirs, masked in context.visible(rank, source, sizes):
                rows, columns = queries[ours], keys[theirs]
                seen = torch.ones(len(rows), len(columns), dtype=torch.bool)
                if masked:
                    seen = seen.tril(len(columns) - len(rows))
                block = owner[rows[:, None], columns]
                owner[rows[:, None], columns] = torch.where(seen, rank, block)
    return owner


def in_a_row(world, length):
    rows = torch.arange(length).div(length // world, rounding_mode="floor")
    visible = torch.ones(length, length, dtype=torch.bool).tril()
    return torch.where(visible, rows[:, None], -1)


def pairs(owner, world):
    return [int((owner == rank).sum()) for rank in range(world)]


results = ranks(
    lambda ctx: {world: triangle(world, LENGTH) for world in (2, 4, 8)},
    1,
    process_group=False,
    ledger=False,
)
if results:
    zigzag = results[0]
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(12, 3.8), layout="constrained")
    colours = ListedColormap(["white", *COLOURS[:WORLD]])
    placements = {"in a row": in_a_row(WORLD, LENGTH), "zig-zag": zigzag[WORLD]}
    for k, (axis, (name, owner)) in enumerate(
        zip((left, middle), placements.items(), strict=True)
    ):
        axis.imshow(owner, cmap=colours, vmin=-1, vmax=WORLD - 1, interpolation="nearest")
        axis.set(xlabel="key", ylabel="query", title=name)
        middles = [r + 0.4 * k for r in range(WORLD)]
        style = {"ec": "w", "hatch": ("", "//")[k], "color": COLOURS[:WORLD]}
        right.bar(middles, pairs(owner, WORLD), 0.36, **style)
    right.set_xticks([r + 0.2 for r in range(WORLD)], [f"rank {r}" for r in range(WORLD)])
    right.set(ylabel="pairs of positions", title="plain: in a row, hatched: zig-zag")
    show(
        figure,
        "Two triangles of queries and keys, coloured by rank. In a row each rank has a band; "
        "zig-zag it has two, a short and a long one. Bars: in a row the pairs grow with the rank, "
        "zig-zag they are equal.",
    )
    print(f"{'ranks':>5}{'in a row: most / mean':>24}{'zig-zag: most / mean':>24}")
    for world, owner in zigzag.items():
        rows = (pairs(in_a_row(world, LENGTH), world), pairs(owner, world))
        shares = [max(row) * world / sum(row) for row in rows]
        print(f"{world:5}{shares[0]:24.2f}{shares[1]:24.2f}")

# %% [markdown]
# All ranks wait for the one with most pairs, in every layer. The more ranks, the closer the row comes
# to twice the mean.
#
# ## 2. Ring and all-to-all, executed
#
# The ring sends keys and values round; all-to-all attention (2.23) exchanges positions for heads, and
# back. Both give the numbers of one process. Below, 16 heads of queries on 4 ranks, with fewer and
# fewer heads of keys and values.

# %%
HEADS, FEATURES, LONG = 16, 8, 256


def tensors(kv_heads):
    generator = torch.Generator().manual_seed(0)
    shapes = ((1, h, LONG, FEATURES) for h in (HEADS, kv_heads, kv_heads))
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def attended(ctx, way, kv_heads):
    """The largest difference from one process, of the result and of all gradients."""
    whole = [t.requires_grad_() for t in tensors(kv_heads)]
    if way == "ring":
        rows = context.own_positions([LONG], ctx.rank, ctx.world_size)
        attention = context.ring_attention
    else:
        rows = torch.arange(LONG).chunk(ctx.world_size)[ctx.rank]
        attention = exchanging.all_to_all_attention
    own = [t.detach()[:, :, rows].requires_grad_() for t in whole]
    out = attention(*own)
    out.square().sum().backward()
    right = F.scaled_dot_product_attention(*whole, is_causal=True, enable_gqa=True)
    right.square().sum().backward()
    found = [(out, right), *((a.grad, b.grad) for a, b in zip(own, whole, strict=True))]
    return max((a - b[:, :, rows]).abs().max().item() for a, b in found)


WAYS, KV_HEADS = ("ring", "all-to-all"), (16, 8, 4)
sent, apart = {}, []
for way in WAYS:
    for kv_heads in KV_HEADS:
        results = ranks(lambda ctx, w=way, g=kv_heads: attended(ctx, w, g), WORLD)
        if results:
            sent[way, kv_heads] = results.logs[0].sent
            apart += results
            print(f"{way:10} G = {kv_heads:2}: {sent[way, kv_heads]:8,} B per rank")
if len(sent) == len(WAYS) * len(KV_HEADS):
    numbers = LONG // WORLD * FEATURES * 8  # bytes of one head of a rank
    formula = {"ring": lambda g: 3 * (WORLD - 1) * 2 * g * numbers}
    formula["all-to-all"] = lambda g: 2 * (WORLD - 1) / WORLD * (2 * HEADS + 2 * g) * numbers
    figure, axis = plt.subplots(figsize=(8, 3), layout="constrained")
    for k, way in enumerate(WAYS):
        places = [i + 0.4 * k for i in range(len(KV_HEADS))]
        heights = [sent[way, g] / 1e3 for g in KV_HEADS]
        axis.bar(places, heights, 0.36, color=COLOURS[k], hatch=("", "//")[k], ec="w", label=way)
        marks = [formula[way](g) / 1e3 for g in KV_HEADS]
        axis.plot(places, marks, "_", color="black", ms=28, label="formula" if k else None)
    axis.set_xticks([i + 0.2 for i in range(len(KV_HEADS))], [f"G = {g}" for g in KV_HEADS])
    axis.set(ylabel="kB sent per rank", title="forward and backward, H = 16, W = 4")
    axis.legend()
    show(
        figure,
        "Bytes that a rank sends, as bars for 16, 8 and 4 heads of keys and values. The ring's "
        "shrink in proportion, those of the all-to-all by less. Marks of the formulas lie on top.",
    )
    print(f"largest difference from one process: {'rounding' if max(apart) < 1e-9 else max(apart)}")

# %% [markdown]
# ## 3. Where they cross
#
# Bytes are not time: the ring's messages travel while the rank multiplies, the all-to-all's do not. Work
# grows with T², bytes grow with T. So from some length on, the ring is never slower. Exercise 2.23's
# `crossing` gives that length for a machine. Here: 32 heads of 128 features, bf16, on H100.

# %%
h100 = load_cluster("dgx-h100")
LINKS = {"inside a node": h100.inside, "between nodes": h100.between}
LENGTHS = [2**k for k in range(10, 21)]
RANKS = (2, 4, 8, 16, 32)
BITS = {"batch": 1, "heads": 32, "features": 128, "itemsize": 2}


def layer(link, world, kv_heads):
    speed = {"flops": h100.gpu.flops["bfloat16"], "alpha": link.alpha, "beta": link.beta}
    return exchanging.Layer(ranks=world, kv_heads=kv_heads, **BITS, **speed)


def crossings(ctx):
    found = {}
    for name, link in LINKS.items():
        for kv_heads in (32, 16):
            one = layer(link, 8, kv_heads)
            slower = [
                exchanging.ring_seconds(one, n) / exchanging.all_to_all_seconds(one, n)
                for n in LENGTHS
            ]
            worlds = [world for world in RANKS if world <= kv_heads]
            where = [exchanging.crossing(layer(link, world, kv_heads)) for world in worlds]
            found[f"{name}, G = {kv_heads}"] = [slower, worlds, where]
    return found


results = ranks(crossings, 1, process_group=False, ledger=False)
if results:
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3.4), layout="constrained")
    for k, (name, (slower, worlds, where)) in enumerate(results[0].items()):
        style = {"color": COLOURS[k // 2], "marker": "o^"[k % 2], "ls": ("-", "--")[k % 2], "ms": 4}
        left.semilogx(LENGTHS, slower, base=2, label=name, **style)
        there = [(w, t) for w, t in zip(worlds, where, strict=True) if t]
        right.loglog(*zip(*there, strict=True), base=2, **style)
    left.axhline(1, color="grey", lw=1)
    left.set(xlabel="positions T", ylabel="ring / all-to-all", title="time on 8 ranks")
    left.legend(fontsize=8)
    right.set(xlabel="ranks W", ylabel="positions T", title="from here on the ring is not slower")
    right.set_xticks(RANKS, [str(w) for w in RANKS])
    show(
        figure,
        "Left, the ring's time divided by the all-to-all's: above 1 for short sequences, just below "
        "1 for long ones. Right, the length where they cross grows with the ranks.",
    )
    for name, (_, worlds, where) in results[0].items():
        print(f"8 ranks, {name:22} {where[worlds.index(8)]:9,.0f} positions")

# %% [markdown]
# With fewer heads of keys and values the ring sends less, and the crossing comes earlier. The
# all-to-all can use no more ranks than there are heads of keys and values: 16 ranks for G = 16. With
# 2 ranks the ring is slower at no length.
#
# ## 4. A mixture of experts
#
# A classifier of handwritten digits with eight experts, of which one computes each image, on four
# ranks with two experts each. It is trained three times from the same weights: without balancing, with
# the balance loss, and with the bias (exercise 2.24). Nobody tells the router what an expert is for.

# %%
routing, experts = module("mixture_of_experts"), module("expert_parallel")
WIDTH, INNER, EXPERTS, BATCH, STEPS = 32, 32, 8, 256, 240
LOSS, RATE, KINDS = 0.02, 0.005, ("none", "loss", "bias")
images, labels = digits()[:]
images = images.flatten(1) / 2 + 0.5  # from 0 to 1


class Classifier(nn.Module):
    """Pixels to ten classes, with a mixture of experts beside the way straight through."""

    def __init__(self):
        super().__init__()
        self.begin, self.end = nn.Linear(images.shape[1], WIDTH), nn.Linear(WIDTH, 10)
        up = torch.randn(EXPERTS, WIDTH, INNER) / WIDTH**0.5
        down = torch.randn(EXPERTS, INNER, WIDTH) / INNER**0.5
        router = routing.Router(WIDTH, EXPERTS, seed=1)
        self.experts = experts.ExpertParallel(
            router, up.requires_grad_(), down.requires_grad_()
        )

    def forward(self, x):
        x = self.begin(x)
        y, chosen = self.experts(x)
        return self.end(x + y), chosen


def average(model):
    """Gradients of the mean of all ranks' losses."""
    own = [model.experts.up, model.experts.down]
    experts.divide_expert_gradients(own)
    grads = [p.grad for p in model.parameters() if all(p is not expert for expert in own)]
    flat = nn.utils.parameters_to_vector(grads)
    dist.all_reduce(flat)
    nn.utils.vector_to_parameters(flat / dist.get_world_size(), grads)


def train(ctx, kind):
    torch.manual_seed(0)
    model, loads = Classifier(), []
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(STEPS):
        rows = torch.randint(len(images), (BATCH,))[ctx.rank :: ctx.world_size]
        logits, chosen = model(images[rows])
        loads.append(chosen.load_E)
        optimizer.zero_grad()
        extra = LOSS * chosen.loss if kind == "loss" else 0
        (F.cross_entropy(logits, labels[rows]) + extra).backward()
        average(model)
        optimizer.step()
        if kind == "bias":
            model.experts.router.update_bias(RATE)
    return {"loads": torch.stack(loads), **looked_at(ctx, model.eval())}


def looked_at(ctx, model):
    """What the trained router does with a rank's quarter of all images."""
    own = slice(ctx.rank, None, ctx.world_size)
    with torch.no_grad():
        logits, chosen = model(images[own])
        plan = experts.plan_dispatch(chosen)
    right = (logits.argmax(-1) == labels[own]).float().mean().item()
    digits_of = torch.zeros(10, EXPERTS).index_put(
        (labels[own], chosen.experts_NK[:, 0]), torch.ones(len(labels[own])), accumulate=True
    )
    choices = chosen.experts_NK
    return {"right": right, "gets": plan.gets, "digits": digits_of, "choices": choices}


trained = {}
for kind in KINDS:
    results = ranks(lambda ctx, kind=kind: train(ctx, kind), WORLD, run=run_virtual, ledger=False)
    if results:
        trained[kind] = list(results)
NAMES = {"none": "no balancing", "loss": "balance loss", "bias": "bias"}
if len(trained) == len(KINDS):
    figure, axes = plt.subplots(1, 3, figsize=(12, 3.2), layout="constrained", sharey=True)
    for axis, kind in zip(axes, KINDS, strict=True):
        shares = trained[kind][0]["loads"].T / BATCH
        shades = axis.imshow(shares, vmin=0, vmax=0.5, aspect="auto", interpolation="nearest")
        axis.set(xlabel="step", title=NAMES[kind], yticks=range(EXPERTS))
    axes[0].set_ylabel("expert")
    figure.colorbar(shades, ax=axes, label="share of the tokens", extend="max")
    show(
        figure,
        "Share of the tokens of each of 8 experts over the steps, as shades. Without balancing one "
        "expert soon has nearly all; with the loss some share; with the bias all get equally bright.",
    )
    for kind in KINDS:
        last = trained[kind][0]["loads"][-STEPS // 4 :].float().mean(0)
        right = sum(r["right"] for r in trained[kind]) / WORLD
        busiest = last.max() / last.mean()
        print(f"{NAMES[kind]:13} busiest expert: {busiest:.1f} x the mean; right: {right:.1%}")

# %% [markdown]
# ## 5. Capacity
#
# With a capacity factor c an expert takes at most c times the mean of a rank's tokens. Choices beyond
# that are dropped. The same three routers, with 2.24's `keep_first`:

# %%
FACTORS = (0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)


def dropped(ctx, choices):
    rooms = [-(-int(factor * len(choices)) // EXPERTS) for factor in FACTORS]
    return [1 - routing.keep_first(choices, EXPERTS, r).float().mean().item() for r in rooms]


curves = {}
for kind, found in trained.items():
    parts = [r["choices"] for r in found]
    results = ranks(
        lambda ctx, parts=parts: dropped(ctx, parts[ctx.rank]),
        WORLD,
        run=run_virtual,
        process_group=False,
        ledger=False,
    )
    if results:
        curves[kind] = [sum(row) / WORLD for row in zip(*results, strict=True)]
if curves:
    figure, axis = plt.subplots(figsize=(8, 3), layout="constrained")
    for k, (kind, shares) in enumerate(curves.items()):
        axis.plot(FACTORS, [100 * s for s in shares], "o^s"[k] + "-", label=NAMES[kind], ms=4)
    even = [100 * max(0, 1 - factor) for factor in FACTORS]
    axis.plot(FACTORS, even, ":", color="grey", label="an even load")
    axis.set(xlabel="capacity factor c", ylabel="dropped choices, %")
    axis.legend()
    show(
        figure,
        "Share of dropped choices over the capacity factor. Without balancing it falls slowly, with "
        "the loss faster; with the bias it is close to an even load, and near 0 from a small factor on.",
    )
    place = FACTORS.index(1.25)
    print(", ".join(f"{NAMES[k]} {c[place]:.1%}" for k, c in curves.items()), "dropped at c = 1.25")

# %% [markdown]
# ## 6. Where the rows go
#
# In expert parallelism (2.25) tokens travel to the rank of their expert. Each cell is the number of rows
# that a rank sends to an expert. Without balancing one rank computes while the others wait. On the
# right: which digits an expert sees after training with the bias.

# %%
if len(trained) == len(KINDS):
    figure, axes = plt.subplots(1, 3, figsize=(13, 3.2), layout="constrained")
    for axis, kind in zip(axes, ("none", "bias"), strict=False):
        gets = [torch.tensor(r["gets"]) for r in trained[kind]]  # per receiver: senders by experts
        table = torch.cat(gets, 1)
        axis.imshow(table, aspect="auto", vmin=0, vmax=table.sum(1).max())
        for sender, line in enumerate(table.tolist()):
            for expert, rows in enumerate(line):
                ink = "black" if rows > table.sum(1).max() / 2 else "white"
                axis.text(expert, sender, rows, ha="center", va="center", fontsize=8, color=ink)
        axis.set(xlabel="expert", ylabel="from rank", yticks=range(WORLD), title=NAMES[kind])
        work = [int(g.sum()) for g in gets]
        print(f"{NAMES[kind]:13} rows computed by rank 0 to 3: {work}, "
              f"busiest {max(work) * WORLD / sum(work):.2f} x the mean")
    seen = sum(r["digits"] for r in trained["bias"])
    shades = axes[2].imshow(seen, aspect="auto", vmin=0)
    axes[2].set(xlabel="expert", ylabel="digit", yticks=range(10), title="bias: digits of an expert")
    figure.colorbar(shades, ax=axes[2], label="images")
    show(
        figure,
        "Rows from each rank to each expert: without balancing nearly all in one column, with the "
        "bias in all columns. Right, the digits of each expert: most experts see a few of them.",
    )

# %% [markdown]
# ## 7. Pipelines in a V
#
# Four ranks, eight micro-batches, two stages per rank, the second in lighter colours. Forward, backward
# and backward of the weights of a stage take 1 each (exercise 2.26). In the two Vs the second stage of
# a rank lies behind the turn, and the loss is on rank 0: there the first backward comes first.

# %%
schedules, v_shaped = module("pipeline_schedules"), module("zero_bubble_v")
P, M = 4, 8
FILLS = {"F": "#56B4E9", "B": "#E8804A", "W": "#8FD6BC"}


def replayed(ctx):
    orders = {
        "interleaved zero bubble": v_shaped.interleaved_zero_bubble(P, M, 2),
        "ZB-V": v_shaped.zero_bubble_v(P, M),
        "DualPipe-V": v_shaped.dual_pipe_v(P, M),
    }
    found = {}
    for name, order in orders.items():
        replay = schedules.replay(order)
        spans = [[(tuple(step), a, b) for step, a, b in rank] for rank in replay.spans]
        sends = sum(s.kind.startswith("send") for r in schedules.with_messages(order) for s in r)
        found[name] = [spans, replay.bubble, max(schedules.peak_live(order)), sends]
    return found


results = ranks(replayed, 1, process_group=False, ledger=False)
if results:
    figure, axes = plt.subplots(3, 1, figsize=(13, 6.4), sharex=True, layout="constrained")
    for axis, (name, (spans, bubble, *_)) in zip(axes, results[0].items(), strict=True):
        for rank, boxes in enumerate(spans):
            for (kind, stage, i), start, end in boxes:
                shade = 1 if stage < P else 0.5
                axis.barh(rank, end - start, 0.9, start, color=FILLS[kind], alpha=shade, ec="w")
                axis.text((start + end) / 2, rank, i, ha="center", va="center", fontsize=7)
        axis.set(yticks=range(P), ylim=(P - 0.5, -0.5), ylabel="rank")
        axis.set_title(f"{name}: bubble {bubble:.1%}", loc="left")
        axis.spines[["top", "right"]].set_visible(False)
    handles = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in FILLS.values()]
    names = ["forward", "backward of the inputs", "backward of the weights"]
    figure.legend(handles, names, loc="outside lower center", ncols=3, frameon=False)
    show(
        figure,
        "Three schedules of 4 ranks over time. All end at the same time. In ZB-V no rank is idle "
        "between its first and its last step; in the interleaved one ranks wait once.",
    )
    print(f"{'schedule':25}{'bubble':>8}{'kept at most':>14}{'messages':>10}")
    for name, (_, bubble, kept, sends) in results[0].items():
        print(f"{name:25}{bubble:8.1%}{kept:14}{sends:10}")
