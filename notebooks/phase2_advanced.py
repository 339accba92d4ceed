# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Phase 2: one model, cut in every direction
#
# 1. Memory for time: micro-batches and recomputed activations
# 2. Numbers of 16 bits: why the optimizer keeps its own weights
# 3. Pipelines: GPipe, 1F1B, interleaved and zero-bubble side by side
# 4. The same schedules executed, with their bubble measured
# 5. Tensor and sequence parallelism: what they send, what they keep
# 6. All of it together: a tiny GPT on 2 x 2 ranks
#
# By default the cells run the solutions; set `IMPL = "templates"` to use *your* files in
# `phase2_advanced/`. Cells whose exercise is still blank then say so and go on.

# %%
IMPL = "solutions"

# %%
import sys

sys.path[:0] = [".", ".."]  # where the course lies

import torch
import torch.nn.functional as F
from matplotlib import pyplot as plt
from torch import nn

from distlab.commands.notebook import Notebook, show
from distlab.observe.memory import PeakMemory
from distlab.virtual import run_virtual
from distlab.reference.workloads import CONTEXT, GPT, build_model, text

notebook = Notebook(2, IMPL)
module, ranks = notebook.module, notebook.ranks

# %% [markdown]
# ## 1. Memory for time
#
# One batch of 64 samples, divided into more and more micro-batches: the gradient is the same, the
# peak shrinks until weights and gradients are all that is left. Recomputing activations (exercise
# 2.7) gets there without dividing the batch: a stack of n layers keeps about √n of them.

# %%
accumulation, checkpointing = module("gradient_accumulation"), module("activation_checkpointing")
WIDTH, DEPTH, BATCH = 128, 16, 64


def stack():
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(DEPTH)]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 10))


def peak_of(step):
    with PeakMemory() as memory:
        step()
    return memory.peak


def micro_batches(ctx):
    inputs, targets = torch.randn(BATCH * 16, WIDTH), torch.zeros(BATCH * 16, dtype=torch.int64)
    found = []
    for count in (1, 2, 4, 8, 16, 32):
        model = stack()
        window = list(zip(inputs.chunk(count), targets.chunk(count), strict=True))
        accumulation.accumulate(model, window[:1], 1.0)  # gradients are there
        model.zero_grad(set_to_none=False)
        peak = peak_of(lambda m=model, w=window: accumulation.accumulate(m, w, len(targets)))
        found.append([count, peak, model[-1].weight.grad.norm().item()])
    return found


def recomputed(ctx):
    x, found = torch.randn(BATCH * 16, WIDTH), []
    for segments in (0, 1, 2, 4, 8, 16):
        model = stack()

        def step(model=model, segments=segments):
            y = checkpointing.checkpoint_sequential(model, segments, x) if segments else model(x)
            y.sum().backward()

        step()
        model.zero_grad(set_to_none=False)
        found.append([segments, peak_of(step)])
    return found


one = ranks(micro_batches, 1, process_group=False, ledger=False)
two = ranks(recomputed, 1, process_group=False, ledger=False)
if one and two:
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.2), layout="constrained", sharey=True)
    left.bar([str(r[0]) for r in one[0]], [r[1] / 1e6 for r in one[0]], color="#56B4E9")
    left.set(xlabel="micro-batches per step", ylabel="peak of a step, MB", title="accumulation")
    names = ["none" if r[0] == 0 else str(r[0]) for r in two[0]]
    right.bar(names, [r[1] / 1e6 for r in two[0]], color="#009E73")
    right.set(xlabel="segments that are recomputed", title="activation checkpointing")
    show(
        figure,
        "Peak memory of a step as bars. With 1 to 32 micro-batches it falls at every doubling; "
        "with recomputed segments it is lowest in the middle, at 4.",
    )
    norms = [r[2] for r in one[0]]
    print(f"norm of a gradient: {norms[0]:.6f} with 1 micro-batch, {norms[-1]:.6f} with 32")

# %% [markdown]
# ## 2. Numbers of 16 bits
#
# bf16 has 8 bits of precision: between 1 and 2 its numbers lie 0.0078 apart, between 0.5 and 1 half as
# far, 0.0039. An update of less than half a distance disappears. Exercise 2.5 keeps fp32 *master
# weights* for the optimizer. Below, a weight of 1 gets 100 steps of -0.001. It is rounded to a number
# below 1 only if a step is more than 0.00195.

# %%
low = torch.ones((), dtype=torch.bfloat16)
master = torch.ones(())
lows, masters = [], []
for _ in range(100):
    low -= 0.001
    master -= 0.001
    lows.append(low.item())
    masters.append(master.to(torch.bfloat16).item())
figure, axis = plt.subplots(figsize=(8, 2.6), layout="constrained")
axis.plot(lows, "--", color="#D55E00", lw=2, label="optimizer steps in bf16")
axis.plot(masters, color="#0072B2", lw=2, label="bf16 copy of an fp32 master weight")
axis.set(xlabel="step", ylabel="weight")
axis.legend(loc="lower left")
show(
    figure,
    "The weight over 100 steps: in bf16 it stays at 1, the copy of a master weight goes down in "
    "stairs to 0.9.",
)

# %% [markdown]
# ## 3. Pipelines
#
# Four ranks, eight micro-batches. A box is one step of one micro-batch: forwards take 1, backwards
# 2 (where they are split, 1 for the inputs and 1 for the weights). Interleaved 1F1B divides the
# model into eight stages, two per rank (the second in lighter colours). White is the *bubble*.
# Schedules are data: these pictures come from exercise 2.21's `replay`, nothing was computed.

# %%
schedules, pipelines = module("pipeline_schedules"), module("pipeline_parallel")
zero = module("zero_bubble")
RANKS, MICRO, CHUNKS = 4, 8, 2
COLOURS = {"F": "#56B4E9", "B": "#E8804A", "W": "#8FD6BC"}
FILLS, HATCHES = ("#0072B2", "#56B4E9", "#E69F00", "#009E73"), ("", "//", "..", "xx")


def orders(m):
    return {
        "GPipe": pipelines.gpipe(RANKS, m),
        "1F1B": pipelines.one_f_one_b(RANKS, m),
        "interleaved": pipelines.interleaved(RANKS, m, CHUNKS),
        "zero-bubble": zero.zero_bubble(RANKS, m),
    }


def replayed(ctx):
    found = {}
    for name, order in orders(MICRO).items():
        costs = {"F": 0.5, "B": 1.0} if name == "interleaved" else None
        replay = schedules.replay(order, costs)
        spans = [[(tuple(step), a, b) for step, a, b in rank] for rank in replay.spans]
        found[name] = [spans, replay.bubble, replay.seconds, schedules.peak_live(order)]
    return found


results = ranks(replayed, 1, process_group=False, ledger=False)
if results:
    found = results[0]
    figure, axes = plt.subplots(4, 1, figsize=(12, 8), sharex=True, layout="constrained")
    for axis, (name, (spans, bubble, seconds, _)) in zip(axes, found.items(), strict=True):
        for rank, boxes in enumerate(spans):
            for (kind, stage, i), start, end in boxes:
                shade = 1 - 0.45 * (stage // RANKS)
                axis.barh(rank, end - start, 0.9, start, color=COLOURS[kind], alpha=shade, ec="w")
                axis.text((start + end) / 2, rank, i, ha="center", va="center", fontsize=7)
        axis.set(yticks=range(RANKS), ylim=(RANKS - 0.5, -0.5), ylabel="rank")
        axis.set_title(f"{name}: {seconds:g} units of time, bubble {bubble:.1%}", loc="left")
        axis.spines[["top", "right"]].set_visible(False)
    handles = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in COLOURS.values()]
    names = ["forward", "backward (of the inputs)", "backward of the weights"]
    figure.legend(handles, names, loc="outside lower center", ncols=3, frameon=False)
    show(
        figure,
        "Four schedules of 4 ranks and 8 micro-batches over time. GPipe does all forwards first, "
        "1F1B alternates, interleaved and zero-bubble leave less white, the idle time.",
    )

# %% [markdown]
# What each rank has to keep meanwhile, in units of the activations of one micro-batch and a quarter
# of the model (a stage of the interleaved schedule is an eighth, so it counts half):

# %%
if results:
    figure, axis = plt.subplots(figsize=(9, 3), layout="constrained")
    for k, (name, (*_, peaks)) in enumerate(found.items()):
        heights = [p / (CHUNKS if name == "interleaved" else 1) for p in peaks]
        style = {"color": FILLS[k], "hatch": HATCHES[k], "ec": "w"}
        axis.bar([r + 0.2 * k for r in range(RANKS)], heights, 0.18, label=name, **style)
    axis.set(xticks=[r + 0.3 for r in range(RANKS)], ylabel="activations kept at most")
    axis.set_xticklabels([f"rank {r}" for r in range(RANKS)])
    axis.set_ylim(0, 1.25 * MICRO)
    axis.legend(ncols=4, loc="upper center")
    show(
        figure,
        "Activations that each rank keeps at most, as bars: GPipe 8 on every rank, 1F1B 4 on rank "
        "0 and 1 on rank 3, interleaved and zero-bubble between.",
    )

# %% [markdown]
# ## 4. Executed
#
# The interpreter of exercise 2.10 runs these schedules for real. On the virtual cluster a step takes
# exactly as long as it says, so the bubble can be compared with the formula; what is left are the
# microseconds of the messages.

# %%
FORWARD, BACKWARD = 0.1, 0.2  # virtual seconds


class Busy(nn.Linear):
    """A layer whose forward and backward take the time that they are told."""

    def __init__(self, share):
        super().__init__(4, 4)
        self.share = share

    def forward(self, x):
        import time

        time.sleep(FORWARD * self.share)
        y = super().forward(x)
        y.register_hook(lambda _: time.sleep(BACKWARD * self.share))
        return y


def executed(ctx, name, chunks):
    import time

    plan = pipelines.make_schedule(name, ctx.world_size, MICRO, chunks)
    boundaries = [torch.empty(1, 4, device="meta")] * (ctx.world_size * chunks - 1)
    pipeline = pipelines.Pipeline(
        [Busy(1 / chunks) for _ in range(chunks)], plan, F.mse_loss, boundaries
    )
    begun = time.perf_counter()
    pipeline.step(torch.ones(MICRO, 4), torch.zeros(MICRO, 4))
    return time.perf_counter() - begun


print(f"{'schedule':14}{'ranks':>6}{'bubble':>10}{'formula':>10}")
for name, chunks in (("gpipe", 1), ("1f1b", 1), ("interleaved", 2)):
    for world_size in (2, 4, 8):
        results = ranks(
            lambda ctx, name=name, chunks=chunks: executed(ctx, name, chunks),
            world_size,
            run=run_virtual,
            cluster="dgx-h100",
        )
        if results:
            bubble = 1 - MICRO * (FORWARD + BACKWARD) / max(results)
            formula = (world_size - 1) / (chunks * MICRO + world_size - 1)
            print(f"{name:14}{world_size:6}{bubble:10.2%}{formula:10.2%}")

# %% [markdown]
# ## 5. Tensor and sequence parallelism
#
# One transformer block on four ranks. Tensor parallelism sends four all-reduces of the activations
# per step, sequence parallelism eight halves of an all-reduce: the same bytes. But it keeps less,
# because what tensor parallelism repeats on every rank is cut as well.

# %%
transformer, sequence = module("parallel_transformer"), module("sequence_parallel")
SHAPE = (4, 64, 64)  # batch, time, width


def block_step(ctx, kind):
    torch.manual_seed(0)
    block, x = GPT(96, 64, 1, 64, 4).blocks[0], torch.randn(SHAPE)
    if kind == "tensor":
        block = transformer.ParallelBlock(block)
    elif kind == "sequence":
        block = sequence.SequenceParallelBlock(block)
        x = x.chunk(ctx.world_size, 1)[ctx.rank].contiguous()
    x.requires_grad_()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = block(x)
    y.sum().backward()
    weights = {p.data_ptr() for p in block.parameters()}
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in kept}
    return sum(size for memory, size in storages.items() if memory not in weights)


kinds = {"one process": 1, "tensor": 4, "sequence": 4}
sent, kept = {}, {}
for kind, world_size in kinds.items():
    results = ranks(lambda ctx, kind=kind: block_step(ctx, kind), world_size)
    if results:
        kept[kind], sent[kind] = results[0], results.logs[0].sent
        operators = [event.op for event in results.logs[0].events]
        print(f"{kind:12} sends {results.logs[0].sent:9,.0f} B: {operators}")
if len(kept) == len(kinds):
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 2.8), layout="constrained")
    left.bar(list(sent), [n / 1e3 for n in sent.values()], color="#CC79A7")
    left.set(ylabel="kB sent per rank", title="communication of a step")
    right.bar(list(kept), [n / 1e3 for n in kept.values()], color="#E69F00")
    right.set(ylabel="kB kept per rank", title="activations kept for backward")
    show(
        figure,
        "Bars for one process, tensor and sequence parallelism. The two send the same bytes; "
        "tensor parallelism keeps less than one process, sequence parallelism least.",
    )

# %% [markdown]
# ## 6. All of it together
#
# The tiny GPT on real text: tensor parallel 2 x pipeline 2, and one process. (The whole run, with
# progress: `make gpt`.)

# %%
parallel_gpt = module("parallel_gpt")
STEPS, BATCH = 12, 8
text()


def batch_of(step):
    tokens, targets = text().tensors
    chosen = slice(step * BATCH, (step + 1) * BATCH)
    return tokens[chosen], targets[chosen]


def train(ctx):
    layout = parallel_gpt.Layout(tensor=2, pipeline=2, micro_batches=4)
    groups = parallel_gpt.make_groups(layout)
    model = parallel_gpt.ParallelGPT(build_model("tiny_gpt"), layout, groups)
    pipeline = model.pipeline(BATCH, CONTEXT)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    steps = (batch_of(step) for step in range(STEPS))
    return [parallel_gpt.train_step(model, pipeline, optimizer, *b)[0] for b in steps]


def alone():
    model = build_model("tiny_gpt")
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=3e-3), []
    for step in range(STEPS):
        tokens, targets = batch_of(step)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(tokens), targets.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


results = ranks(train, 4, ledger=False)
if results:
    single = alone()
    figure, axis = plt.subplots(figsize=(8, 3), layout="constrained")
    axis.plot(single, lw=6, color="#A6D3EE", label="one process")
    axis.plot(results[0], lw=1.2, color="black", label="tensor 2 x pipeline 2")
    axis.set(xlabel="step", ylabel="loss per character, nats")
    axis.legend()
    show(
        figure,
        "Two loss curves on each other, of one process and of 4 ranks, fall over 12 steps.",
    )
    apart = max(abs(a - b) for a, b in zip(results[0], single, strict=True))
    print(f"the curves agree to {apart:.0e}: {'rounding' if apart < 1e-4 else 'a mistake'}")
