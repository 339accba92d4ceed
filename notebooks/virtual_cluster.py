# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # The virtual cluster: a design on 256 GPUs, on this machine
#
# The ranks below are threads of one process that pass a baton. Your program runs unchanged;
# only the transport and the clock are virtual. A message of n bytes arrives α + n·β after both ends
# are ready. Messages share links as the cluster's description says (`clusters/*.yaml`, every number
# with its source). So the values are real and the times are predictions.
#
# 1. Training for real on 4 emulated GPUs, with the time that a cluster would have needed
# 2. How far does it scale? Efficiency over the number of GPUs
# 3. Where is the bottleneck? The same model on different clusters
# 4. Ring, tree or hierarchical? All-reduce from 2 to 256 GPUs
# 5. What if a rank is slow, or a link?
#
# By default the cells run the solutions; set `IMPL = "templates"` to use *your* files.

# %%
IMPL = "solutions"

# %%
import sys

sys.path[:0] = [".", ".."]  # where the course lies

import torch
import torch.distributed as dist
from matplotlib import pyplot as plt

from distlab.commands.notebook import Notebook, show
from distlab.virtual import load_cluster, run_virtual
from distlab.hardware.collectives import ALGORITHMS, collective_time
from distlab.simulate.prediction import simulate
from distlab.simulate.plan import Plan
from distlab.reference.workloads import WORKLOADS, build_model, build_optimizer, digits

notebook = Notebook(1, IMPL)
attempt, trainer = notebook.attempt, notebook.module("trainer")
MINE = "solutions" if IMPL == "solutions" else "mine"

# %% [markdown]
# ## 1. Four emulated GPUs train the digits
#
# The arithmetic is done for real, so loss and accuracy are those of 4-way data parallelism. The
# clock is that of four H100 for the communication, and the roofline for the kernels: for a model
# this small nearly all of the time is the launch of kernels and collectives.

# %%
chosen = WORKLOADS["digits_mlp"]
digits(), digits(train=False)


def train(ctx, epochs):
    import time

    model = build_model(chosen.model, chosen.seed + ctx.rank)
    common = {"rank": ctx.rank, "world_size": ctx.world_size}
    loader = trainer.build_loader(digits(), **common, global_batch_size=64, remainder="keep")
    tests = trainer.build_loader(digits(train=False), **common, global_batch_size=64, shuffle=False)
    optimizer = build_optimizer(chosen, model)
    begun = time.perf_counter()
    losses = trainer.train(model, loader, optimizer, epochs=epochs)
    seconds = time.perf_counter() - begun
    return losses, trainer.evaluate(model, tests)[1], seconds


runs = {}
for world_size in (1, 4):
    results = attempt(
        lambda w=world_size: run_virtual(
            train, w, 3, cluster="dgx-h100", compute="roofline", timeout=120
        )
    )
    if results:
        runs[world_size] = results[0]

if runs:
    figure, axes = plt.subplots(figsize=(7, 3.5), layout="constrained")
    styles = {1: {"lw": 6, "color": "#A6D3EE"}, 4: {"lw": 1.2, "color": "black"}}
    for world_size, (losses, accuracy, seconds) in runs.items():
        label = f"{world_size} virtual GPU{'s' if world_size > 1 else ''}: {accuracy:.1%} correct"
        axes.semilogy(losses, label=f"{label}, {seconds * 1e3:.0f} ms", **styles[world_size])
    axes.set(xlabel="step", ylabel="global loss", title="The same losses on 1 and on 4 GPUs")
    axes.legend()
    show(figure, "Two loss curves on each other, of 1 and of 4 virtual GPUs.")

# %% [markdown]
# The curves lie on each other: that is what exercise 1.5 asks for. Four GPUs are *not* four times
# faster here, because 16 samples per GPU leave the kernels nothing to do.
#
# ## 2. How far does it scale?
#
# Now without arithmetic: meta tensors have shapes but no data, so a model of any size costs
# nothing. Each virtual rank runs two steps of the trainer on ResNet-50; the second is timed.

# %%
GPUS = (1, 2, 4, 8, 16, 32)


def scaling(**fields):
    return attempt(lambda: list(simulate(Plan(gpus=GPUS, **fields))))


curves = {
    "phase 1's trainer": scaling(model="resnet50", cluster="p4d-a100", impl=MINE),
    "torch's DDP": scaling(model="resnet50", cluster="p4d-a100", impl="torch"),
}
curves = {name: answers for name, answers in curves.items() if answers}
figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
for style, (name, answers) in zip(("C1s--", "C0o-"), curves.items(), strict=False):
    left.semilogx(GPUS, [a.efficiency for a in answers], style, label=name)
    right.semilogx(GPUS, [a.exposed * 1e3 for a in answers], style, label=name)
left.set(xlabel="GPUs", ylabel="efficiency", title="ResNet-50 on p4d-a100", ylim=(0.85, 1.01))
right.set(xlabel="GPUs", ylabel="ms per step", title="communication that nothing hides")
for axes in (left, right):
    axes.set_xticks(GPUS, [str(g) for g in GPUS])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
left.legend(loc="lower left")
right.legend(loc="upper left")
show(
    figure,
    "Efficiency and exposed communication over 1 to 32 GPUs, for phase 1's trainer and for torch's "
    "DDP, which stays more efficient because it hides most of its communication.",
)

# %% [markdown]
# The trainer of phase 1 reduces everything after backward, DDP reduces buckets while backward still
# runs: it hides most of what the other shows. Phase 3 builds that.
#
# ## 3. Where is the bottleneck?

# %%
CLUSTERS = ("dgx-h100", "p4d-a100", "ethernet-v100", "bigbasin-p100")
names, computes, waits = [], [], []
for cluster in CLUSTERS:
    answers = attempt(
        lambda c=cluster: list(simulate(Plan(model="resnet50", cluster=c, gpus=(16,), impl=MINE)))
    )
    if answers:
        names.append(f"{cluster}\n{answers[0].rate:,.0f} images/s")
        computes.append(answers[0].compute / answers[0].step)
        waits.append(answers[0].communication_share)
figure, axes = plt.subplots(figsize=(8, 3.6), layout="constrained")
bars = (computes, [0] * len(names), "#56B4E9", "", "computes")
for widths, lefts, colour, hatch, what in (
    bars, (waits, computes, "#D55E00", "//", "waits for communication")
):  # fmt: skip
    shown = axes.barh(names, widths, left=lefts, color=colour, hatch=hatch, ec="w", label=what)
    axes.bar_label(shown, [f"{w:.0%}" for w in widths], label_type="center",
                   bbox={"fc": "w", "ec": "none", "pad": 1.5})  # fmt: skip
axes.set(xlabel="share of a step", xlim=(0, 1), xticks=[0, 0.25, 0.5, 0.75, 1])
axes.set_xticklabels(["0", "25 %", "50 %", "75 %", "100 %"])
axes.spines[["top", "right"]].set_visible(False)
figure.suptitle("ResNet-50 on 16 GPUs of two nodes, all-reduce after backward")
figure.legend(loc="outside lower center", ncols=2, frameon=False)
show(
    figure,
    "Shares of a step that compute and that wait for communication, as bars for four clusters.",
)

# %% [markdown]
# A faster GPU behind a slower network only waits more. Compare the two numbers that matter, FLOP/s
# per GPU and bytes/s per GPU out of the node:

# %%
for name in CLUSTERS:
    c = load_cluster(name)
    share = c.between.bandwidth * c.nics_per_node / c.gpus_per_node
    print(
        f"{name:15} {c.gpu.flops['float32'] / 1e12:6.1f} TFLOP/s (fp32)   "
        f"{share / 1e9:5.2f} GB/s per GPU between nodes"
    )

# %% [markdown]
# ## 4. Ring, tree or hierarchical?
#
# The ring sends the fewest bytes, but its latency grows with the number of ranks; a tree's grows
# with the logarithm. Between nodes it matters how many bytes cross the slow links at once.

# %%
cluster, worlds = load_cluster("p4d-a100"), [2**k for k in range(1, 9)]
STYLES = ("C0o-", "C1s--", "C2^-.", "C3D-", "C4v--")
figure, panels = plt.subplots(1, 3, figsize=(12, 3.6), layout="constrained", sharex=True)
for axes, (label, nbytes) in zip(
    panels, (("4 kB", 4e3), ("1 MB", 1e6), ("100 MB", 1e8)), strict=True
):
    for name in ("backend", *ALGORITHMS):
        times = [
            collective_time("all_reduce", nbytes, tuple(range(w)), cluster, name) for w in worlds
        ]
        style = {"ms": 4} if name in ALGORITHMS else {"color": "#C8C8C8", "lw": 7}
        drawn = STYLES[list(ALGORITHMS).index(name)] if name in ALGORITHMS else "-"
        axes.loglog(worlds, [t * 1e3 for t in times], drawn, label=name, **style)
    axes.set_xticks(worlds, [str(w) for w in worlds])
    axes.minorticks_off()
    axes.set(xlabel="GPUs", title=f"all-reduce of {label}")
    axes.grid(alpha=0.3)
panels[0].set_ylabel("milliseconds")
lines = panels[0].get_legend_handles_labels()
figure.legend(*lines, loc="outside lower center", ncols=6, frameon=False)
show(
    figure,
    "Time of an all-reduce over 2 to 256 GPUs, for 4 kB, 1 MB and 100 MB. The naive one is slowest. "
    "With 4 kB ring and hierarchical take longer on more GPUs, tree and halving hardly do.",
)

# %% [markdown]
# These are closed forms. The same from messages, by a program: a plain ring on 64 virtual ranks
# takes exactly 2(W-1)(α + N/W·β).

# %%


def ring(ctx, n):
    w, r = ctx.world_size, ctx.rank
    chunks, buffer = list(torch.ones(n).chunk(w)), torch.empty(n // w)
    for step in range(2 * (w - 1)):
        send, receive = (r - step) % w, (r - step - 1) % w
        handle = dist.isend(chunks[send], (r + 1) % w)
        dist.recv(buffer, (r - 1) % w)
        handle.wait()
        chunks[receive].copy_(chunks[receive] + buffer if step < w - 1 else buffer)
    return float(chunks[0][0])


import dataclasses

flat = dataclasses.replace(cluster, gpus_per_node=64)
w, n = 64, 6400
measured = run_virtual(ring, w, n, cluster=flat, ledger=False)
formula = 2 * (w - 1) * (flat.inside.alpha + 4 * n / w * flat.inside.beta)
print(f"sum {measured[0]:.0f}; virtual time {measured.clock * 1e6:.6f} µs", end=", ")
print(f"formula {formula * 1e6:.6f} µs")

# %% [markdown]
# ## 5. Stragglers
#
# Synchronous training waits for the slowest: one rank that computes 1.5 times slower, or one slow
# link, sets the pace of all.

# %%


def one_step(ctx):
    model = build_model("mlp", 0)
    images, labels = digits()[:1024]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return trainer.train_step(model, optimizer, images[ctx.rank :: 8], labels[ctx.rank :: 8])


cases = {
    "all equal": {},
    "rank 3 computes at 2/3": {"slow_ranks": {3: 1.5}},
    "rank 3's links at 1/10": {"slow_links": {3: 10.0}},
}
for name, options in cases.items():
    results = attempt(
        lambda o=options: run_virtual(one_step, 8, cluster="dgx-h100", compute="roofline", **o)
    )
    if results:
        print(f"{name:25} {results.clock * 1e6:8.0f} µs per step")

# %% [markdown]
# More: `distlab simulate --help`; how well all this predicts real machines is measured in
# `benchmarks/README.md`, with the errors.
