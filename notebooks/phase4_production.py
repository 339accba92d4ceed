# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Phase 4: a run that keeps going, and tells what it does
#
# 1. Kill and resume: the loss curve does not notice
# 2. Compression: accuracy against bytes
# 3. A straggler is found
# 4. The report of a run
#
# By default the cells run the solutions; set `IMPL = "templates"` to use *your* files in
# `phase4_production/`. Cells whose exercise is still blank then say so and go on.

# %%
IMPL = "solutions"

# %%
import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

sys.path[:0] = [".", ".."]  # where the course lies

import torch
import torch.distributed as dist
import torch.nn.functional as F
from IPython.display import Markdown, display
from matplotlib import pyplot as plt
from torch import nn
from torch.utils.data import DataLoader

from distlab.commands.notebook import Notebook, show
from distlab.virtual import run_virtual
from distlab.reference.workloads import build_model, digits, epoch_order
from solutions.phase3_multi_node.comm_hooks import all_reduce, bf16_compress
from solutions.phase3_multi_node.ddp import DDP

notebook = Notebook(4, IMPL)
module, ranks = notebook.module, notebook.ranks
folder = tempfile.TemporaryDirectory()
FOLDER = Path(folder.name)

# %% [markdown]
# ## 1. Kill and resume
#
# Two ranks train on the digits with compressed gradients (Top-K) and save every 20 steps: model,
# optimizer, random streams, position in the data, and each rank's residual. At step 57 rank 1 is
# killed with SIGKILL: no warning, no clean-up. The same program, started again, finds the newest
# whole checkpoint and goes on after step 40. The curve of a run that nobody killed lies underneath.

# %%
checkpoints, resume, elastic = (
    module(name) for name in ("fault_tolerance", "resume", "elastic_sampler")
)
compression = module("gradient_compression")
EPOCHS, EVERY, KILLED = 4, 20, 57


def training(ctx, name, killed=None):
    """Train to the end from the newest checkpoint of this run; losses go to a file as they come."""
    torch.manual_seed(0)
    model = build_model("mlp")
    wrapped, hook = DDP(model), compression.TopK(model.parameters(), 0.02, momentum=0.9)
    wrapped.register_comm_hook(hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    data = digits()
    sampler = elastic.ElasticSampler(
        len(data), global_batch_size=64, rank=ctx.rank, world_size=ctx.world_size
    )
    loader = DataLoader(data, batch_sampler=sampler)
    state = resume.TrainingState(
        sampler=sampler, model=model, optimizer=optimizer, compression=hook, own=["compression"]
    )
    store = checkpoints.CheckpointStore(FOLDER / name)
    saved, position = store.load(), resume.Position()
    if saved is not None:
        position = state.restore(saved)
    log = (FOLDER / f"{name}.jsonl").open("a", buffering=1)
    for images, labels in resume.batches(loader, position, EPOCHS):
        if position.step == killed and ctx.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        loss = F.cross_entropy(wrapped(images), labels)
        loss.backward()
        optimizer.step()
        mean = loss.detach() / ctx.world_size
        dist.all_reduce(mean)
        if ctx.rank == 0:
            log.write(json.dumps([position.step, mean.item()]) + "\n")
        if position.step % EVERY == 0:
            store.save(position.step, *state.capture(position))


def losses(name):
    lines = (FOLDER / f"{name}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


if ranks(lambda ctx: training(ctx, "whole"), 2):
    ranks(lambda ctx: training(ctx, "killed", KILLED), 2)
    before = losses("killed")
    ranks(lambda ctx: training(ctx, "killed"), 2)
    after, whole = losses("killed")[len(before) :], losses("whole")
    print(f"killed after step {before[-1][0]}, went on with step {after[0][0]}")
    expected = dict(whole)
    apart = max(abs(loss - expected[step]) for step, loss in [*before, *after])
    print(f"largest difference from the run without a kill: {apart}")
    figure, axes = plt.subplots(figsize=(8, 3.5), layout="constrained")
    axes.plot(*zip(*whole, strict=True), color="#d9d9d9", linewidth=6, label="nobody killed it")
    axes.plot(*zip(*before, strict=True), color="#d94801", label="until the kill")
    axes.plot(*zip(*after, strict=True), color="#08519c", linestyle="--", label="resumed")
    moments = {"checkpoint, resumed here ": (after[0][0] - 1, "#08519c", "right", 0.45),
               f" rank 1 killed in step {KILLED}": (before[-1][0], "#d94801", "left", 0.9)}  # fmt: skip
    for text, (step, colour, side, height) in moments.items():
        axes.axvline(step, color=colour, linewidth=1)
        place = {"transform": axes.get_xaxis_transform(), "ha": side}
        axes.text(step, height, text, color=colour, size=9, **place)
    axes.set(xlabel="step", ylabel="loss", yscale="log")
    axes.yaxis.set_major_locator(plt.LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("")
    axes.legend(loc="lower left")
    show(
        figure,
        "The loss of the run that was killed and resumed lies on the loss of the run that nobody "
        "killed. Lines mark the kill, and the checkpoint from which it was resumed.",
    )

# %% [markdown]
# ## 2. Accuracy against bytes
#
# An MLP of 300,000 parameters, two ranks, and seven ways to reduce its gradients. The bytes are those
# that a rank really sent, as the ledger counted them. Up and to the left is better.

# %%
power, quantisation = module("powersgd"), module("quantisation")
WAYS = {  # hook for a model, momentum of the optimizer
    "all-reduce": (lambda model: all_reduce, 0.9),
    "bfloat16": (lambda model: bf16_compress, 0.9),
    "int8": (lambda model: quantisation.Int8(), 0.9),
    "one bit": (lambda model: quantisation.OneBit(model.parameters()), 0.9),
    "random-K, 5 %": (lambda model: compression.RandomK(model.parameters(), 0.05), 0.0),
    "Top-K, 1 %": (lambda model: compression.TopK(model.parameters(), 0.01, momentum=0.9), 0.0),
    "PowerSGD, rank 2": (lambda model: power.PowerSGD(model.parameters(), 2), 0.9),
}
LR, STEPS = 0.1, 6 * 22


def compressed(ctx, make, momentum):
    torch.manual_seed(0)
    first, second = nn.Linear(64, 512), nn.Linear(512, 512)
    model = nn.Sequential(nn.Flatten(), first, nn.ReLU(), second, nn.ReLU(), nn.Linear(512, 10))
    wrapped = DDP(model)
    wrapped.register_comm_hook(make(model))
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=momentum)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    data = digits()
    for step in range(STEPS):
        order = epoch_order(len(data), 0, step // 22)
        images, labels = data[order[step % 22 * 64 :][:64][ctx.rank :: ctx.world_size]]
        with ctx.region("steps"):
            optimizer.zero_grad()
            F.cross_entropy(wrapped(images), labels).backward()
        optimizer.step()
        schedule.step()
    images, labels = digits(train=False)[:]
    return (model(images).argmax(1) == labels).float().mean().item()


digits(), digits(train=False)
points = {}
for name, (make, momentum) in WAYS.items():
    results = ranks(lambda ctx, m=make, mu=momentum: compressed(ctx, m, mu), 2)
    if results:
        sent = results.logs[0].select(region="steps").sent / STEPS
        points[name] = sent, 100 * results[0]
        fewer = points["all-reduce"][0] / sent
        print(f"{name:17} {sent:12,.0f} bytes per step, {fewer:4.0f} times fewer"
              f"   {points[name][1]:.1f} %")  # fmt: skip

figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
for name, (sent, accuracy) in points.items():
    axes.scatter(sent, accuracy, s=60, color="#0072B2")
    axes.annotate(name, (sent, accuracy), xytext=(6, 6), textcoords="offset points")
axes.set(xscale="log", xlabel="bytes that a rank sends per step", ylabel="accuracy, %")
axes.margins(x=0.15, y=0.15)
axes.grid(alpha=0.3)
show(
    figure,
    "Accuracy over the bytes that a rank sends per step, one named point for each way to reduce "
    "gradients; the axis of bytes is logarithmic.",
)

# %% [markdown]
# ## 3. A straggler is found
#
# Four virtual ranks, so that the times are the same at every run: data 4 ms, forward 10 ms, backward
# 20 ms, and an all-reduce of 1 MB. From step 60 on rank 2 loads its data six times as slowly. The
# step time is the *same on all ranks*: the others wait for rank 2. What gives it away is each rank's
# own time, without waiting.

# %%
monitoring, stragglers, sinks = module("monitoring"), module("stragglers"), module("sinks")
SLOW, SINCE, LAST = 2, 60, 150


def observed(ctx):
    monitor, cluster = monitoring.StepMonitor(), stragglers.ClusterMonitor(every=10)
    sink = sinks.JsonLines(FOLDER / "run" / "metrics.jsonl") if ctx.rank == 0 else None
    generator = torch.Generator().manual_seed(ctx.rank)
    gradients, found = torch.zeros(250_000), []
    for step in range(LAST):
        jitter = 1 + 0.05 * torch.rand(1, generator=generator).item()
        with monitor.phase("data"):
            time.sleep(0.004 * (6 if ctx.rank == SLOW and step >= SINCE else 1))
        with monitor.phase("forward"):
            time.sleep(0.010 * jitter)
        with monitor.phase("backward"):
            time.sleep(0.020 * jitter)
        with monitor.communication():
            dist.all_reduce(gradients)
        report = cluster.add(monitor.step(samples=32, loss=2.0 / (1 + step / 20)))
        if report is not None:
            found.append([report.step, [1e3 * r.own for r in report.ranks],
                          1e3 * report.ranks[0].seconds / report.steps,
                          [str(s) for s in report.stragglers]])  # fmt: skip
            if sink:
                sink.write(report.step, report.as_dict())
    if sink:
        sink.close()
    return found


results = ranks(observed, 4, run=run_virtual)
if results:
    reports = results[0]
    first = next(r for r in reports if r[3])
    print(f"after step {first[0]}: {first[3][0]}")
    figure, axes = plt.subplots(figsize=(8, 3.5), layout="constrained")
    steps = [r[0] + 1 for r in reports]
    axes.plot(steps, [r[2] for r in reports], "k:", lw=2, label="step, on every rank")
    for rank, style in enumerate(("C0o-", "C1s-", "C3D-", "C2^-")):
        own = [r[1][rank] for r in reports]
        axes.plot(steps, own, style, mfc="none", label=f"rank {rank}, own time")
    axes.axvline(SINCE, color="#555555", linewidth=1)
    axes.text(SINCE + 1, 3, f"rank {SLOW} loads its data slowly from here on", color="#555555")
    axes.set(xlabel="step", ylabel="milliseconds", ylim=(0, None))
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    show(
        figure,
        "Milliseconds of a step over steps. From step 60 on the step takes longer on every rank, "
        "but only the own time of rank 2 has grown.",
    )

# %% [markdown]
# ## 4. The report of a run
#
# `write_report` reads the JSON lines that the run left, finds the bottleneck, and says with which
# numbers. This is the page that it wrote for the run above.

# %%
report = module("training_report")
page = ranks(
    lambda ctx: str(report.write_report(FOLDER / "run")), 1, process_group=False, ledger=False
)
if page:
    text = Path(page[0]).read_text()
    print(text.splitlines()[2])
    display(Markdown(text.partition("\n![")[0]))
    show(
        FOLDER / "run/where_a_step_goes.png",
        "Where a step's time goes, over the steps of the run.",
    )
    show(FOLDER / "run/own_time_of_each_rank.png", "The own time of each rank: rank 2 stands out.")
folder.cleanup()
