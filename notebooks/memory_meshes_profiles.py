# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Memory, meshes and profiles
#
# 1. Selective recomputation: what a limit holds, and what it computes again
# 2. Batch norm: statistics of a rank, and of all ranks
# 3. Numbers of 8 bits: one scale, or one for each block
# 4. Uneven inputs: who shadows
# 5. Per-parameter sharding: which rank keeps how much
# 6. A mesh: the order of its axes
# 7. Streaming DiLoCo: bytes of each step
# 8. Profiles: where the time goes
#
# By default the cells run the solutions; set `IMPL = "templates"` to use *your* files in the folders of
# phases 2 to 4. Cells whose exercise is still blank then say so and go on.

# %%
IMPL = "solutions"

# %%
import sys
from functools import partial
from itertools import permutations
from pathlib import Path

sys.path[:0] = [".", ".."]  # where the course lies

import torch
import torch.nn.functional as F
from matplotlib import pyplot as plt
from torch import nn

from distlab.commands.notebook import COLOURS, Notebook, show
from distlab.observe.memory import PeakMemory, storage_bytes
from distlab.reference.workloads import Block, build_model, digits
from distlab.virtual import run_virtual
from given.operators import Mode, Operation

phase2 = Notebook(2, IMPL, run=run_virtual)
phase3 = Notebook(3, IMPL, run=run_virtual)
phase4 = Notebook(4, IMPL, run=run_virtual)
digits(), digits(train=False)
HATCHES = ("", "//", "..", "xx")

# %% [markdown]
# ## 1. Selective recomputation
#
# A transformer block of width 128 on 128 tokens. Exercise 2.27 keeps the outputs that save at least so
# many FLOPs per byte, and computes the others again. Attention is one fused operator here, and saves 128
# FLOPs per byte. The products save 64, the last one 256.

# %%
selective = phase2.module("selective_recomputation")
LIMITS = (0, 64, 100)


class Flops(Mode):
    """Counts the FLOPs of the operators that run."""

    total = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        out = op(*args, **(kwargs or {}))
        self.total += Operation(op, args, kwargs or {}, out).flops
        return out


def block_step(call):
    """Bytes that the block holds after forward, and FLOPs of forward and backward."""
    torch.manual_seed(0)
    layer, x = Block(128, 4), torch.randn(1, 128, 128, requires_grad=True)
    with PeakMemory() as memory, Flops() as counting:
        y = call(layer, x)
        held = memory.current - y.nbytes + x.nbytes
        y.sum().backward()
    return held, counting.total


def recomputed(ctx):
    policies = [selective.at_least(limit) for limit in LIMITS] + [lambda operation: False]
    calls = [partial(selective.selective_checkpoint, policy) for policy in policies]
    return [block_step(call) for call in (lambda layer, x: layer(x), *calls)]


results = phase2.ranks(recomputed, 1, process_group=False, ledger=False)
if results:
    NAMES = ["no segment", *(f"at_least({limit})" for limit in LIMITS), "nothing kept"]
    least = results[0][0][1]
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 2.8), layout="constrained", sharey=True)
    left.barh(NAMES, [held / 1e3 for held, _ in results[0]], color=COLOURS[0])
    left.invert_yaxis()
    left.set(xlabel="kB held after forward")
    right.barh(NAMES, [100 * (flops / least - 1) for _, flops in results[0]], color=COLOURS[1])
    right.set(xlabel="FLOPs computed again, % of a step")
    show(
        figure,
        "Bars for each limit. The higher the limit, the fewer bytes are held and the more FLOPs are "
        "computed again.",
    )
    for name, (held, flops) in zip(NAMES, results[0], strict=True):
        print(f"{name:14} holds {held:9,} B and computes {flops / least - 1:6.1%} again")

# %% [markdown]
# `at_least(0)` holds more than no segment: a policy cannot know which outputs backward reads.
#
# ## 2. Batch norm over all ranks
#
# Four ranks have n rows of 512 channels each. The true variance is 1. A rank's own rows give it too low,
# and far off if n is small; the group's rows (2.28's `group_moments`) are four times as many.

# %%
norms = phase2.module("sync_batch_norm")
ROWS, CHANNELS = (2, 4, 8, 16, 32), 512


def variances(ctx):
    found, generator = [], torch.Generator().manual_seed(ctx.rank)
    for rows in ROWS:
        x = torch.randn(rows, CHANNELS, generator=generator)
        both = x.var(0, unbiased=False), norms.group_moments(x)[1].float()
        found.append([var.quantile(torch.tensor([0.1, 0.5, 0.9])).tolist() for var in both])
    return found


results = phase2.ranks(variances, 4)
if results:
    figure, axis = plt.subplots(figsize=(8, 3), layout="constrained")
    for k, name in enumerate(("own rows", "all four ranks")):
        low, middle, high = zip(*(row[k] for row in results[0]), strict=True)
        axis.fill_between(ROWS, low, high, color=COLOURS[k], alpha=0.25, hatch=HATCHES[k])
        axis.plot(ROWS, middle, "os"[k] + "-", color=COLOURS[k], label=name)
    axis.axhline(1, color="grey", lw=1)
    axis.set_xscale("log", base=2)
    axis.set(xlabel="rows of a rank", ylabel="variance of a channel", title="median, and 10 to 90 %")
    axis.legend()
    show(
        figure,
        "Variance over the rows of a rank. With 2 own rows the median is far below 1, and with all "
        "ranks' rows it is closer to 1. Both come near 1 with 32 rows, the own rows' band later.",
    )
    print(f"2 rows for each rank: median {results[0][0][0][1]:.2f} alone, {results[0][0][1][1]:.2f} "
          "over the group")  # fmt: skip

# %% [markdown]
# ## 3. Numbers of 8 bits
#
# A row of 1,024 normal numbers has one outlier. With one scale for the row (exercise 2.29) the outlier
# takes the range, and small numbers become zero. With a scale for 32 elements it spoils its own block.

# %%
eight = phase2.module("low_precision")
OUTLIERS, BLOCKS = [4.0**k for k in range(2, 11)], {"one scale": 1024, "blocks of 32": 32}


def lost(ctx):
    row, found = torch.randn(1, 1024, generator=torch.Generator().manual_seed(0)), {}
    for name, block in BLOCKS.items():
        found[name] = []
        for outlier in OUTLIERS:
            row[0, 7] = outlier
            short = eight.restore(eight.quantise_blocks(row, block, torch.float8_e4m3fn))
            error = ((short - row).abs() / row.abs()).median().item()
            found[name].append([(short == 0).float().mean().item(), error])
    return found


results = phase2.ranks(lost, 1, process_group=False, ledger=False)
if results:
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 2.8), layout="constrained")
    for k, (name, rows) in enumerate(results[0].items()):
        zeros, errors = zip(*rows, strict=True)
        style = {"color": COLOURS[k], "marker": "os"[k], "ms": 4, "label": name}
        left.semilogx(OUTLIERS, [100 * z for z in zeros], base=2, **style)
        right.semilogx(OUTLIERS, [100 * e for e in errors], base=2, **style)
    left.set(xlabel="outlier", ylabel="numbers that become 0, %")
    right.set(xlabel="outlier", ylabel="median error, %")
    left.legend()
    show(
        figure,
        "Share of numbers that become zero, and median error, over the size of the outlier. With one "
        "scale both rise to 100 %; with blocks they stay low.",
    )
    last = {name: rows[-1][0] for name, rows in results[0].items()}
    print("with the largest outlier " + ", ".join(f"{n}: {s:.1%} zeros" for n, s in last.items()))

# %% [markdown]
# ## 4. Uneven inputs
#
# Three ranks have 4, 2 and 3 batches. In 3.31's `join` a rank without a batch shadows the others. The
# weights of all ranks end as those of one process that takes the mean over the batches of each step.

# %%
uneven = phase3.module("uneven_inputs")
BATCHES = (4, 2, 3)


def linear():
    torch.manual_seed(0)
    return nn.Linear(8, 1)


def batches_of(rank):
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(4, 8, generator=generator) for _ in range(BATCHES[rank])]


def joined(ctx):
    model, seen = uneven.UnevenDDP(linear()), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with model.join(batches_of(ctx.rank)) as batches:
        for batch in batches:
            optimizer.zero_grad()
            if batch is None:
                model.shadow()
            else:
                model(batch).square().mean().backward()
            optimizer.step()
            seen.append(batch is not None)
    return seen, [p.detach() for p in model.parameters()]


def one_process():
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(max(BATCHES)):
        optimizer.zero_grad()
        now = [batches_of(r)[step] for r in range(len(BATCHES)) if step < BATCHES[r]]
        torch.stack([model(batch).square().mean() for batch in now]).mean().backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


results = phase3.ranks(joined, len(BATCHES))
if results:
    figure, axis = plt.subplots(figsize=(7, 2), layout="constrained")
    for rank, (seen, _) in enumerate(results):
        for step, real in enumerate(seen):
            style = {"color": COLOURS[rank]} if real else {"color": "#dddddd", "hatch": "//"}
            axis.barh(rank, 0.94, 0.8, step, ec="w", **style)
            ink = {"color": "white" if real else "black"}
            axis.text(step + 0.47, rank, "batch" if real else "shadow", ha="center", va="center", **ink)
    axis.set(yticks=range(len(BATCHES)), ylabel="rank", xlabel="step", ylim=(2.5, -0.5))
    axis.set_xticks([step + 0.47 for step in range(max(BATCHES))], range(max(BATCHES)))
    show(figure, "Four steps of three ranks. Rank 1 shadows in the last two, rank 2 in the last one.")
    whole = one_process()
    apart = max((a - b).abs().max().item() for _, own in results for a, b in zip(own, whole))
    print(f"weights beside one process: {'rounding' if apart < 1e-6 else apart}")

# %% [markdown]
# ## 5. Per-parameter sharding
#
# A small MLP on eight ranks. The flat vector (3.15) gives all ranks equally much. With rows of each
# parameter (3.32), the last ranks have less: 10 biases on 8 ranks are 2 for each of five.

# %%
fsdp, rows = phase3.module("fsdp"), phase3.module("per_parameter_sharding")
WORLD = 8


def kept(ctx, kind):
    wrapped = fsdp.FSDP(build_model("mlp")) if kind == "flat" else None
    wrapped = wrapped or rows.PerParameterFSDP(build_model("mlp"))
    images, labels = digits()[4 * ctx.rank : 4 * ctx.rank + 4]
    F.cross_entropy(wrapped(images), labels).backward()
    return storage_bytes(wrapped.parameters()), [[*p.shape] for p in wrapped.parameters()]


found = {}
for kind in ("flat", "by rows"):
    results = phase3.ranks(lambda ctx, k=kind: kept(ctx, k), WORLD)
    if results:
        found[kind] = results
if len(found) == 2:
    figure, axis = plt.subplots(figsize=(8, 2.6), layout="constrained")
    for k, (kind, results) in enumerate(found.items()):
        places = [rank + 0.4 * k for rank in range(WORLD)]
        heights = [nbytes / 1e3 for nbytes, _ in results]
        axis.bar(places, heights, 0.36, color=COLOURS[k], hatch=HATCHES[k], ec="w", label=kind)
    axis.set(xlabel="rank", ylabel="kB of parameters")
    axis.legend(loc="lower left")
    show(figure, "kB of parameters of eight ranks: equal bars for the flat vector; by rows the last "
                 "ranks have a little less.")  # fmt: skip
    for kind, results in found.items():
        print(f"{kind:8} rank 0 has {results[0][1]}")

# %% [markdown]
# ## 6. The order of a mesh's axes
#
# 32 ranks on four nodes, two on each of five axes, and the bytes that a rank sends along each axis in a
# step of a GPT. Exercise 3.33's `bytes_leaving` gives what leaves the busiest node for each of the 120
# orders, and `arranged` the best one.

# %%
mesh = phase3.module("mesh")
KB = {"pipeline": 33, "data": 369, "expert": 131, "context": 197, "tensor": 361}
NODE = 8


def orders(ctx):
    grids = [mesh.Grid(dict.fromkeys(order, 2)) for order in permutations(KB)]
    best = mesh.arranged(mesh.Grid(dict.fromkeys(KB, 2)), KB, NODE)
    return [mesh.bytes_leaving(grid, KB, NODE) for grid in grids], [*best.sizes]


results = phase3.ranks(orders, 1, process_group=False, ledger=False)
if results:
    leaving, best = results[0]
    figure, axis = plt.subplots(figsize=(8, 2.6), layout="constrained")
    axis.plot([n / 1e3 for n in sorted(leaving)], color=COLOURS[0], drawstyle="steps-mid")
    axis.set(xlabel="order of the axes, best first", ylabel="MB that leave a node", ylim=(0, None))
    show(figure, "MB that leave the busiest node, for 120 orders of the axes in rising order: the worst "
                 "order sends several times as much as the best one.")  # fmt: skip
    print(f"best: {' x '.join(best)}, {min(leaving) / 1e3:.1f} MB; worst: {max(leaving) / 1e3:.1f} MB")

# %% [markdown]
# ## 7. Streaming DiLoCo
#
# An MLP on two ranks, 24 steps. DiLoCo sends all parameters every 8 steps. Streaming DiLoCo (3.34) sends
# one of its four layers every 2 steps, with 32 or with 4 bits. Bytes are those of the ledger.

# %%
local, streaming = phase3.module("local_sgd"), phase3.module("streaming_diloco")
STEPS, EVERY, FRAGMENTS = 24, 8, 4
OUTER = {"every": EVERY, "lr": 0.7, "momentum": 0.5}


def rounds_of(kind, model):
    if kind == "DiLoCo":
        return local.DiLoCo(model, **OUTER)
    units = [module for module in model.modules() if isinstance(module, nn.Linear)]
    parts = streaming.strided(units, FRAGMENTS)
    return streaming.StreamingDiLoCo(model, parts, bits=int(kind.split()[1]), **OUTER)


def trained(ctx, kind):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), *(nn.Linear(64, 64) for _ in range(3)), nn.Linear(64, 10))
    optimizer, rounds = torch.optim.Adam(model.parameters(), lr=3e-3), rounds_of(kind, model)
    images, labels = digits()[:]
    for step in range(STEPS):
        chosen = slice((2 * step + ctx.rank) * 32, (2 * step + ctx.rank + 1) * 32)
        optimizer.zero_grad()
        F.cross_entropy(model(images[chosen]), labels[chosen]).backward()
        optimizer.step()
        with ctx.region(f"step {step}"):
            rounds.step()
    rounds.finish()
    images, labels = digits(train=False)[:]
    with torch.no_grad():
        return F.cross_entropy(model(images), labels).item()


sent = {}
for kind in ("DiLoCo", "streaming, 32 bits", "streaming, 4 bits"):
    results = phase3.ranks(lambda ctx, k=kind: trained(ctx, k), 2)
    if results:
        log = results.logs[0]
        sent[kind] = [log.select(region=f"step {step}").sent for step in range(STEPS)]
        most = max(sent[kind]) / 1e3
        print(f"{kind:20} at most {most:6.1f} kB in a step; loss on test data {results[0]:.2f}")
if sent:
    figure, axis = plt.subplots(figsize=(9, 2.8), layout="constrained")
    for k, (kind, each) in enumerate(sent.items()):
        places = [step + 1 + 0.28 * (k - 1) for step in range(STEPS)]
        style = {"color": COLOURS[k], "hatch": HATCHES[k], "ec": "w"}
        axis.bar(places, [n / 1e3 for n in each], 0.28, label=kind, **style)
    axis.set(xlabel="step", ylabel="kB that a rank sends")
    axis.legend()
    show(figure, "kB that a rank sends in each step: three tall bars for DiLoCo, many short ones for "
                 "streaming, and hardly visible ones with 4 bits.")  # fmt: skip

# %% [markdown]
# ## 8. Profiles
#
# Five recorded runs (`given/profiles`), each slow or growing for one reason. Exercise 4.19 reads each
# file, gives each moment to one part, and names the bottleneck.

# %%
reading = phase4.module("profile_reading")
PROFILES = sorted(Path("given/profiles").glob("*.json.gz"))


def looked_at(ctx):
    traces = [reading.read_trace(path) for path in PROFILES]
    found = [reading.bottleneck(trace) for trace in traces]
    lost = [reading.parts(trace) for trace in traces]
    return [[a, [b.part, b.amount, b.detail]] for a, b in zip(lost, found, strict=True)]


results = phase4.ranks(looked_at, 1, process_group=False, ledger=False)
if results:
    names = [path.name.partition(".")[0] for path in PROFILES]
    shares = [{p: ns / sum(lost.values()) for p, ns in lost.items()} for lost, _ in results[0]]
    parts = [p for p in shares[0] if any(row[p] > 0.01 for row in shares)]
    figure, axis = plt.subplots(figsize=(9, 2.8), layout="constrained")
    left = [0.0] * len(names)
    for k, part in enumerate(parts):
        widths = [100 * row[part] for row in shares]
        style = {"color": COLOURS[k], "hatch": (*HATCHES, "\\\\", "++")[k], "ec": "w"}
        axis.barh(names, widths, 0.7, left, label=part, **style)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axis.invert_yaxis()
    axis.set(xlabel="% of the window")
    axis.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    show(
        figure,
        "Bars of five recorded runs, divided into compute, communication, data, optimizer and "
        "launch. Each loses most to the part that it is named after; memory has none.",
    )
    for name, (_, (part, amount, detail)) in zip(names, results[0], strict=True):
        how_much = f"{amount:,} bytes per step" if part == "memory" else f"{amount / 1e6:,.0f} ms"
        print(f"planted: {name:14} found: {part:14} {how_much}{detail and f', {detail}'}")
