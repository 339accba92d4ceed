# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Phase 1: data parallelism, seen
#
# Three questions, answered with real processes on this machine:
#
# 1. Who trains on what? (sharding)
# 2. Why is the average of gradients the right thing, and when is it not? (averaging)
# 3. What does communication cost? (bytes, messages, time)
#
# Each cell starts ranks of its own: forked processes with a gloo group. By default they run the
# solutions; set `IMPL = "templates"` to look at *your* files in `phase1_data_parallel/` instead.
# Cells whose exercise is still blank then say so and go on.

# %%
IMPL = "solutions"

# %%
import sys
import tempfile
from pathlib import Path

sys.path[:0] = [".", ".."]  # where the course lies

import torch
import torch.distributed as dist
from matplotlib import pyplot as plt

from distlab.commands.notebook import Notebook, show
from distlab.reference.compare import train_alone
from distlab.picture import draw, spans_of
from distlab.reference.workloads import WORKLOADS, build_model, build_optimizer, digits

notebook = Notebook(1, IMPL)
ranks = notebook.ranks
data_loader, trainer = map(notebook.module, ("data_loader", "trainer"))
allreduce, collectives = map(notebook.module, ("simple_allreduce", "collectives"))

# %% [markdown]
# ## 1. Who trains on what?
#
# 22 samples, 4 ranks, global batches of 8. Every column is a position in the epoch's order, every
# colour a rank. Each block of 8 columns is one optimizer step: all ranks together consume exactly
# the samples that one process would. White cells with a dashed frame are padding: repeated samples
# that make the shards equally long.

# %%
N, WORLD, BATCH = 22, 4, 8
COLOURS = ("#56B4E9", "#E69F00", "#009E73", "#CC79A7")  # colour-blind readers tell them apart


def who_has_what(ctx):
    out = []
    for epoch in (0, 1):
        for rank in range(WORLD):
            sampler = data_loader.ShardedSampler(N, rank=rank, world_size=WORLD, seed=3)
            sampler.set_epoch(epoch)
            out.append([sampler.num_real, [int(i) for i in sampler]])
    return out


found = ranks(who_has_what, 1, process_group=False)
if found:
    figure, axes = plt.subplots(2, 1, figsize=(10, 3.6), sharex=True, layout="constrained")
    for epoch, axis in enumerate(axes):
        for rank in range(WORLD):
            real, indices = found[0][epoch * WORLD + rank]
            for k, index in enumerate(indices):
                colour = COLOURS[rank]
                padding = {"fc": "w", "ec": colour, "ls": "--", "lw": 2}
                style = {"color": colour} if k < real else padding
                axis.bar(k * WORLD + rank, 1, width=0.88, **style)
                axis.text(k * WORLD + rank, 0.55, str(index), ha="center", va="center", size=11)
                axis.text(k * WORLD + rank, 0.1, f"rank {rank}", ha="center", size=6)
        for step in range(0, N, BATCH):
            axis.axvline(step - 0.5, color="black", linewidth=2 * (step > 0))
            if epoch == 0:
                text = f"global batch {step // BATCH + 1}"
                axis.text(step + BATCH / 2 - 0.5, 1.06, text, ha="center")
        axis.set(yticks=[], ylabel=f"epoch {epoch}", xlim=(-0.7, N + 1.7))
        axis.spines[:].set_visible(False)
    axes[1].set_xlabel("position in the epoch's order (the number in a cell is the sample)")
    handles = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in COLOURS]
    handles.append(plt.Rectangle((0, 0), 1, 1, fc="w", ec="#555555", ls="--"))
    names = [f"rank {r}" for r in range(WORLD)] + ["padding"]
    figure.legend(handles, names, loc="outside right upper", frameon=False)
    show(
        figure,
        "Two rows, one for each epoch. The ranks' colours take turns from left to right, 24 cells "
        "in three global batches of 8; the last two cells are padding.",
    )

# %% [markdown]
# ## 2. Averaging
#
# Rank 0 has one sample, rank 1 has three. The gradient of the mean over all four is the *weighted*
# mean of the ranks' gradients. The plain mean gives rank 0's single sample half of the say.

# %%
COUNTS = [1, 3]
VALUES = torch.tensor([8.0, 1.0, 2.0, 1.0])


def average(ctx):
    start = sum(COUNTS[: ctx.rank])
    mine = VALUES[start : start + COUNTS[ctx.rank]]
    weight = torch.nn.Parameter(torch.zeros(()))
    (weight * mine).mean().backward()  # the gradient is the mean of the rank's values
    own = weight.grad.clone()
    trainer.average_gradients([weight], len(mine))
    return own, weight.grad


results = ranks(average, 2)
if results:
    owns = [own.item() for own, _ in results]
    print(f"the ranks' own gradients   {owns[0]:.3f}, {owns[1]:.3f}")
    print(f"plain mean                 {sum(owns) / 2:.3f}")
    print(f"average_gradients          {results[0][1].item():.3f}")
    print(f"one process, all samples   {VALUES.mean().item():.3f}")

# %% [markdown]
# Now for real: four ranks train the digits classifier, then one process does, on the same global
# batches. The curves lie on each other; their difference is rounding, and it is plotted below. Where
# it is zero, the two losses are equal to the last bit.

# %%
workload, EPOCHS = WORKLOADS["digits_mlp"], 4
digits()


def train(ctx):
    model = build_model(workload.model, workload.seed + ctx.rank)
    loader = data_loader.build_loader(
        digits(),
        rank=ctx.rank,
        world_size=ctx.world_size,
        global_batch_size=workload.global_batch_size,
        seed=workload.seed,
        remainder="keep",
    )
    losses = trainer.train(model, loader, build_optimizer(workload, model), epochs=EPOCHS)
    return losses, trainer.weight_hash(model)


results = ranks(train, 4, ledger=False)
if results:
    losses, hashes = results[0][0], {h for _, h in results}
    single, _, _ = train_alone(workload, epochs=EPOCHS, dtype=torch.float32)
    figure, (upper, lower) = plt.subplots(2, 1, figsize=(9, 5), sharex=True, layout="constrained")
    upper.plot(single, label="1 process", linewidth=6, color="#A6D3EE")
    upper.plot(losses, label="4 ranks", linewidth=1.2, color="black")
    upper.set(ylabel="global loss", yscale="log")
    upper.legend()
    apart = [abs(a - b) for a, b in zip(losses, single, strict=True)]
    lower.plot(apart, ".", color="#D55E00")
    apart_near_1 = torch.finfo(torch.float32).eps
    lower.axhline(apart_near_1, color="black", linestyle=":", linewidth=1)
    text = "float32 numbers near 1 lie so far apart "
    lower.text(len(losses), apart_near_1, text, va="bottom", ha="right")
    lower.set(xlabel="step", ylabel="difference of the losses", ylim=(-0.04 * max(apart), None))
    show(
        figure,
        "Above, two loss curves on each other fall from 2.3 to about 0.1. Below, their difference "
        "at each step: a few times 1e-7 at most, and zero at some steps.",
    )
    print(f"different weight hashes among the 4 ranks: {len(hashes)} (1 means: equal to the bit)")

# %% [markdown]
# What did the ranks do meanwhile? The ledger recorded each operator; here is one epoch. On a small
# model most of the time goes to communication: its cost is latency, not bytes.

# %% tags=["measured"]
def one_epoch(ctx):
    model = build_model(workload.model, ctx.rank)
    optimizer = build_optimizer(workload, model)
    loader = data_loader.build_loader(
        digits(), rank=ctx.rank, world_size=ctx.world_size, global_batch_size=256
    )
    trainer.train(model, loader, optimizer, epochs=1)  # warms up
    dist.barrier()
    ctx.start_picture()
    trainer.train(model, loader, optimizer, epochs=1)


results = ranks(one_epoch, 4)
if results:
    with tempfile.TemporaryDirectory() as folder:
        picture = draw(spans_of(results), Path(folder) / "ranks.png", "One epoch on 4 ranks")
        show(
            picture,
            "A timeline with a row for each of 4 ranks: short boxes of compute, long boxes of "
            "all-reduce, hatched boxes where a rank waits for another one.",
        )

# %% [markdown]
# ## 3. What does communication cost?
#
# First the count: bytes sent by the busiest rank and messages in all, from the ledger, against the
# formulas of exercise 1.8.

# %%
NUMEL = 10_000


def reduce_once(ctx, name):
    getattr(allreduce, f"all_reduce_{name}")(torch.ones(NUMEL))
    if ctx.rank == 0:
        cost = allreduce.communication_cost(name, ctx.world_size, 4 * NUMEL)
        return cost.messages, cost.max_bytes_per_rank
    return None


heads = ("ranks", "messages", "formula", "busiest, bytes", "formula")
print(f"{'strategy':10}{{:>6}}{{:>10}}{{:>9}}{{:>16}}{{:>9}}".format(*heads))
for name in ("root", "direct", "chain"):
    for world_size in (2, 4):
        results = ranks(lambda ctx, name=name: reduce_once(ctx, name), world_size)
        if results:
            messages = sum(log.select("send").messages for log in results.logs)
            busiest = max(log.sent for log in results.logs)
            want, most = results[0]
            print(f"{name:10}{world_size:6}{messages:10}{want:9}{busiest:16,}{most:9,.0f}")

# %% [markdown]
# Then the clock: time over size, the best of twelve. Flat at the left, where latency counts; straight
# at the right, where bytes do. (On two cores four ranks compete for the processor: expect noise.)

# %% tags=["measured"]
SIZES = [4 * 10**k for k in range(1, 7)]
STYLES = ("C0o-", "C1s--", "C2D-.", "k^:")


def measure(ctx):
    tries = [collectives.compare_strategies(SIZES, warmup=1, repeats=1) for _ in range(12)]
    best = [min(same, key=lambda r: r.seconds) for same in zip(*tries, strict=True)]
    return [[r.strategy, r.nbytes, r.seconds, r.bus_bandwidth] for r in best]


results = ranks(measure, 4, ledger=False)
if results:
    figure, axis = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for name, style in zip(dict.fromkeys(row[0] for row in results[0]), STYLES):
        rows = [row for row in results[0] if row[0] == name]
        axis.loglog([r[1] for r in rows], [r[2] * 1e3 for r in rows], style, label=name)
    axis.set(xlabel="bytes", ylabel="time of one all-reduce, ms", title="4 ranks, gloo")
    axis.yaxis.set_major_locator(plt.LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_minor_formatter("")
    axis.grid(alpha=0.3)
    axis.legend()
    show(
        figure,
        "Time of an all-reduce over its bytes for root, direct, chain and the backend, both axes "
        "logarithmic: level up to some kilobytes, then rising with the bytes.",
    )
    biggest = [row for row in results[0] if row[1] == SIZES[-1]]
    for name, nbytes, seconds, bus in biggest:
        print(f"{name:10}{nbytes / 1e6:6.0f} MB {seconds * 1e3:8.2f} ms {bus / 1e6:9.0f} MB/s bus")

# %% [markdown]
# **To think about.** By steps·(α + bytes·β) alone direct takes half of what root and chain take, at
# every size: nothing crosses. Do your lines cross, and what do the ranks share there? What would they
# look like with a network of 1 ms latency? `notebooks/virtual_cluster.ipynb` answers such questions
# without a network.
