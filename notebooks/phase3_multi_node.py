# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Phase 3: many nodes
#
# 1. The ring, step by step: who has whose part of which chunk
# 2. What an all-reduce costs: measured points on the α–β model
# 3. Overlap: buckets that leave while backward computes
# 4. Memory: DDP, ZeRO-1, ZeRO-2 and FSDP beside their formulas
# 5. Parameter servers: what waiting costs, and what staleness costs
#
# By default the cells run the solutions; set `IMPL = "templates"` to use *your* files in
# `phase3_multi_node/`. Cells whose exercise is still blank then say so and go on.

# %%
IMPL = "solutions"

# %%
import sys
from itertools import pairwise

sys.path[:0] = [".", ".."]  # where the course lies

import torch
import torch.nn.functional as F
from matplotlib import pyplot as plt
from torch import nn

from distlab.commands.notebook import Notebook, show
from distlab.ranks import run_ranks
from distlab.observe.memory import storage_bytes
from distlab.virtual import run_virtual
from distlab.reference.workloads import build_model, digits

notebook = Notebook(3, IMPL, run=run_virtual)
module, ranks = notebook.module, notebook.ranks

# %% [markdown]
# ## 1. The ring, step by step
#
# Four ranks (rows), a tensor in four chunks (columns). A cell names the ranks whose parts are in
# that chunk by now; what came in the step has a frame. In the first three steps every chunk
# collects all parts (reduce-scatter, exercise 3.1), and each rank ends with one complete chunk, its
# own. In the other three the complete chunks travel on (all-gather, 3.2). The plan is your
# `reduce_scatter_steps` and `all_gather_steps`: who sends which chunk, replayed here with sets.

# %%
ring = module("ring_allreduce")
W = 4


def plans(ctx):
    return [
        [[list(step) for step in steps(rank, W)] for rank in range(W)]
        for steps in (ring.reduce_scatter_steps, ring.all_gather_steps)
    ]


def replay(scatter, gather):
    """After each step: the parts in every chunk of every rank, and the chunk that has just come."""
    has = [[{rank} for _ in range(W)] for rank in range(W)]
    shown = [([[set(c) for c in row] for row in has], [None] * W)]
    for plan, adds in ((scatter, True), (gather, False)):
        for step in zip(*plan, strict=True):
            sent = [set(has[rank][send]) for rank, (send, _) in enumerate(step)]
            for rank, (_, receive) in enumerate(step):
                came = sent[(rank - 1) % W]
                has[rank][receive] = has[rank][receive] | came if adds else came
            shown.append(([[set(c) for c in row] for row in has], [r for _, r in step]))
    return shown


def draw(axis, has, came):
    for rank in range(W):
        for chunk in range(W):
            parts = has[rank][chunk]
            colour = plt.cm.Greens(0.08 + 0.13 * (len(parts) - 1))  # the text on it is black
            axis.add_patch(plt.Rectangle((chunk, rank), 0.94, 0.9, color=colour))
            if came[rank] == chunk:
                frame = plt.Rectangle((chunk, rank), 0.94, 0.9, fill=False, ec="#D55E00", lw=2.5)
                axis.add_patch(frame)
            text = "all" if len(parts) == W else "+".join(map(str, sorted(parts)))
            axis.text(chunk + 0.47, rank + 0.46, text, ha="center", va="center", fontsize=10)
    axis.set(xlim=(-0.1, W), ylim=(W, -0.1), aspect="equal")
    axis.set_xticks([c + 0.47 for c in range(W)], [str(c) for c in range(W)])
    axis.set_yticks([r + 0.46 for r in range(W)], [f"rank {r}" for r in range(W)])
    axis.tick_params(length=0)
    axis.spines[:].set_visible(False)


results = ranks(plans, 1, process_group=False)
if results:
    shown = replay(*results[0])
    titles = ["before"] + [f"reduce-scatter, step {k}" for k in (1, 2, 3)]
    titles += [f"all-gather, step {k}" for k in (1, 2, 3)]
    figure, axes = plt.subplots(2, 4, figsize=(13, 6.8), layout="constrained")
    axes[1, 0].axis("off")
    for axis, title, (has, came) in zip(
        axes.flat[[0, 1, 2, 3, 5, 6, 7]], titles, shown, strict=True
    ):
        draw(axis, has, came)
        axis.set(title=title, xlabel="chunk")
    show(
        figure,
        "Seven grids of 4 ranks by 4 chunks. In three steps of reduce-scatter each rank comes to "
        "one chunk with all parts; in three steps of all-gather these reach every rank.",
    )

# %% [markdown]
# The same for real: the ledger counts what your `ring_all_reduce` sends. A tensor of 1,000 elements
# in float32 are 4,000 bytes; no all-reduce can send fewer than 2(W-1)/W of them.

# %%
print(f"{'ranks':>5}{'messages':>10}{'sent, bytes':>13}{'2(W-1)/W N':>12}{'virtual ms':>12}")
for world_size in (2, 4, 8):

    def body(ctx):
        tensor = torch.full((1000,), float(ctx.rank))
        ring.ring_all_reduce(tensor)
        return tensor[0].item()

    results = ranks(body, world_size, cluster="laptop")
    if results:
        log = results.logs[0]
        sends = [event for event in log.events if event.op == "send"]
        least = 2 * (world_size - 1) / world_size * 4000
        assert set(results) == {sum(range(world_size))}
        took = results.clock * 1e3
        print(f"{world_size:5}{len(sends):10}{log.sent:13,}{least:12,.0f}{took:12.3f}")

# %% [markdown]
# ## 2. What an all-reduce costs
#
# Every pattern is a number of messages on the critical path, each α, and a number of bytes, each β:
# the ring 2(W-1) short messages, the tree few long ones, halving-doubling something between. Points
# are measured on this machine with four processes and gloo (the best of twelve); α and β are
# fitted for each pattern (exercise 3.29); lines are the model. Where the lowest lines cross, `auto`
# changes its choice: the strip below. (Where ranks share cores and memory, one may win throughout.)

# %% tags=["measured"]
choice = module("allreduce_choice")
SIZES = [4, 1024, 16_384, 131_072, 1_048_576, 4_194_304]
COLOURS = {"ring": "#0072B2", "tree": "#D55E00", "halving_doubling": "#009E73"}
STYLES = {"ring": ("o", "-"), "tree": ("s", "--"), "halving_doubling": ("^", "-.")}


def costs(ctx):
    tries = [choice.measure(SIZES, repeats=1) for _ in range(12)]  # the machine may be busy
    timings = [min(same, key=lambda t: t.seconds) for same in zip(*tries, strict=True)]
    links = choice.fit(timings)
    grid = [4 * 2 ** (k / 2) for k in range(41)]
    lines = {p: [choice.predict(p, ctx.world_size, int(n), links) for n in grid] for p in links}
    chosen = [choice.choose(ctx.world_size, int(n), links) for n in grid]
    return [[list(t) for t in timings], {p: list(v) for p, v in links.items()}, grid, lines, chosen]


results = ranks(costs, 4, run=run_ranks, ledger=False)
if results:
    timings, links, grid, lines, chosen = results[0]
    figure, (axis, strip) = plt.subplots(
        2, 1, figsize=(8, 4.8), layout="constrained", sharex=True, height_ratios=(9, 1)
    )
    for pattern, (alpha, beta) in links.items():
        points = [(n, t * 1e3) for p, _, n, t in timings if p == pattern]
        label = f"{pattern}: α {alpha * 1e6:.0f} µs, 1/β {1 / beta / 1e9:.2f} GB/s"
        marker, line = STYLES[pattern]
        axis.loglog(*zip(*points, strict=True), marker, color=COLOURS[pattern])
        seconds = [t * 1e3 for t in lines[pattern]]
        axis.loglog(grid, seconds, line, color=COLOURS[pattern], marker=marker, ms=0, label=label)
    ends = [k for k, (a, b) in enumerate(pairwise(chosen), 1) if a != b]
    for first, last in pairwise([0, *ends, len(grid) - 1]):
        strip.axvspan(grid[first], grid[last], color=COLOURS[chosen[first]], lw=0)
        if last - first > 9:
            middle = (grid[first] * grid[last]) ** 0.5
            strip.text(middle, 0.5, chosen[first], color="w", ha="center", va="center", size=9)
    strip.set(yticks=[], xlabel="bytes of the tensor")
    strip.set_ylabel("auto", rotation=0, ha="right", va="center")
    axis.set(ylabel="ms", title="all-reduce over 4 processes: measured, and the α–β model")
    axis.yaxis.set_major_locator(plt.LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_minor_formatter("")
    axis.grid(alpha=0.3)
    axis.legend()
    show(
        figure,
        "Measured times of three all-reduce patterns over bytes as points, the fitted models as "
        "lines, both axes logarithmic. A strip below names the pattern that auto chooses.",
    )

# %% [markdown]
# ## 3. Overlap
#
# A model of eight layers whose backward takes 10 ms each, on four virtual ranks behind a slow link.
# The upper lane is backward, layer by layer; the lower one is the network. Three ways to send the
# same bytes: each gradient waited for at once, all in one bucket, or buckets that leave while
# backward goes on (exercise 3.10). What lies in the grey area, after 80 ms of backward, is
# *exposed*: nothing hides it. The last bucket always is.

# %%
overlap = module("overlap")
hooks = module("comm_hooks")
LAYERS, BUSY, WIDTH = 8, 0.010, 560  # layers, virtual seconds, elements
LAYER_BYTES = 4 * WIDTH * WIDTH


class Slow(nn.Linear):
    """A layer whose backward takes BUSY virtual seconds, and notes when."""

    def __init__(self, spans):
        super().__init__(WIDTH, WIDTH, bias=False)
        self.spans = spans

    def forward(self, x):
        import time

        def busy(_):
            begun = time.perf_counter()
            time.sleep(BUSY)
            self.spans.append([begun, time.perf_counter()])

        y = super().forward(x)
        y.register_hook(busy)
        return y


def one_step(ctx, bucket_bytes, waits):
    import time

    spans = []
    model = nn.Sequential(*(Slow(spans) for _ in range(LAYERS)))
    model = overlap.BucketedDDP(model, bucket_bytes=bucket_bytes, first_bucket_bytes=bucket_bytes)
    if waits:
        import torch.distributed as dist

        model.register_comm_hook(hooks.blocking(dist.all_reduce))
    for _ in range(2):  # the order of the gradients is known after the first one
        spans.clear()
        with ctx.region("other"):
            loss = model(torch.ones(1, WIDTH, requires_grad=True)).sum()
        with ctx.region("step"):
            begun = time.perf_counter()
            loss.backward()
            ended = time.perf_counter()
    return [begun, ended, spans]


WAYS = {
    "each layer waited for": (1, True),
    "one bucket for all": (LAYERS * LAYER_BYTES, False),
    "a bucket for two layers": (2 * LAYER_BYTES, False),
    "a bucket for each layer": (1, False),
}
steps = {}
for name, (bucket_bytes, waits) in WAYS.items():
    results = ranks(lambda ctx, b=bucket_bytes, w=waits: one_step(ctx, b, w), 4, cluster="laptop")
    if results:
        begun, ended, spans = results[0]
        sent = [e for e in results.logs[0].select(region="step").events if e.start >= begun]
        steps[name] = (begun, ended, spans, [(e.start, e.end) for e in sent])

if len(steps) == len(WAYS):
    figure, axes = plt.subplots(4, 1, figsize=(10, 6.5), sharex=True, layout="constrained")
    for axis, (name, (begun, ended, spans, sent)) in zip(axes, steps.items(), strict=True):
        for k, (start, end) in enumerate(spans):
            left, width = (start - begun) * 1e3, (end - start) * 1e3
            axis.barh(0, width, 0.8, left, color="#56B4E9", ec="w")
            axis.text(left + width / 2, 0, LAYERS - k, ha="center", va="center", fontsize=8)
        for start, end in sent:  # a bucket begins when it may and the one before is through
            axis.barh(1, (end - start) * 1e3, 0.8, (start - begun) * 1e3, color="#D55E00", ec="w")
        exposed = ended - begun - LAYERS * BUSY
        axis.axvspan(LAYERS * BUSY * 1e3, (ended - begun) * 1e3, color="#E3E3E3", zorder=0)
        axis.set(yticks=[0, 1], yticklabels=["backward", "network"], ylim=(1.6, -0.6))
        title = f"{name}: {(ended - begun) * 1e3:.1f} ms, of which {exposed * 1e3:.1f} exposed"
        axis.set_title(title, loc="left", fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
    axes[1].text(LAYERS * BUSY * 1e3 + 20, 0.1, "exposed", size=10)
    axes[-1].set_xlabel("ms since backward began (the numbers are layers)")
    show(
        figure,
        "Four timelines with a lane for backward and one for the network. Waiting for each layer "
        "exposes most; buckets that leave during backward expose little more than the last one.",
    )

# %% [markdown]
# More buckets hide more, until α per message costs more than the shorter last bucket saves. The
# bound of exercise 3.10, max(t, f) + c for each bucket, gives the same numbers without running
# anything.
#
# ## 4. Memory
#
# What a rank holds between two steps, measured, for the MLP with Adam in float32 (Ψ parameters: 4Ψ
# bytes each for parameters, gradients and two moments). Black ticks are the formulas of exercises
# 3.13 to 3.15.

# %%
ddp, zero, fsdp = module("ddp"), module("zero"), module("fsdp")
FORMULAS = {
    "DDP": lambda w: 16,
    "ZeRO-1": lambda w: 8 + 8 / w,
    "ZeRO-2": lambda w: 4 + 12 / w,
    "FSDP": lambda w: 16 / w,
}
digits()


def prepared(kind, model):
    """What to call, its optimizer, and what holds the gradients after backward."""
    if kind == "FSDP":
        wrapped = fsdp.FSDP(model)
        optimizer = torch.optim.Adam(wrapped.parameters())
        return wrapped, optimizer, list(wrapped.parameters())
    if kind == "ZeRO-2":
        optimizer = module("zero_gradients").Zero2Optimizer(model.parameters(), torch.optim.Adam)
        return model, optimizer, [piece.part for piece in optimizer.pieces]
    wrapped = ddp.DDP(model)
    parameters = list(model.parameters())
    if kind == "DDP":
        return wrapped, torch.optim.Adam(parameters), parameters
    return wrapped, zero.ZeroOptimizer(parameters, torch.optim.Adam), parameters


def held(ctx, kind):
    model = build_model("mlp")
    numel = sum(p.numel() for p in model.parameters())
    called, optimizer, holders = prepared(kind, model)
    images, labels = digits()[16 * ctx.rank : 16 * ctx.rank + 16]
    F.cross_entropy(called(images), labels).backward()
    gradients = storage_bytes(p.grad for p in holders)
    optimizer.step()
    moments = [t for state in optimizer.state.values() for t in state.values()]
    moments = storage_bytes(t for t in moments if torch.is_tensor(t) and t.dim())
    parameters = called.parameters() if kind == "FSDP" else model.parameters()
    return [n / numel for n in (storage_bytes(parameters), gradients, moments)]


PARTS = (
    {"fc": "#A6D3EE"},
    {"fc": "#F6C65B", "hatch": "///"},
    {"fc": "#BFE3D5", "hatch": "..."},
)
worlds, found = (1, 2, 4, 8), {}
for kind in FORMULAS:
    for world_size in worlds:
        results = ranks(lambda ctx, k=kind: held(ctx, k), world_size)
        if results:
            found[kind, world_size] = results[0]
        else:
            break
if found:
    figure, axis = plt.subplots(figsize=(10, 3.8), layout="constrained")
    kinds = ("parameters", "gradients", "optimizer state")
    for column, (strategy, formula) in enumerate(FORMULAS.items()):
        for k, world_size in enumerate(worlds):
            if (strategy, world_size) not in found:
                continue
            x, bottom = column + 0.2 * (k - 1.5), 0.0
            for part, style in zip(found[strategy, world_size], PARTS, strict=True):
                axis.bar(x, part, 0.17, bottom, ec="#555555", lw=0.6, **style)
                bottom += part
            axis.text(x, bottom + 0.25, f"W={world_size}", ha="center", fontsize=8)
            ends = [x - 0.1, x + 0.1]
            (line,) = axis.plot(ends, [formula(world_size)] * 2, color="k", lw=2)
    patches = [plt.Rectangle((0, 0), 1, 1, ec="#555555", **style) for style in PARTS]
    axis.legend([*patches, line], [*kinds, "formula"], ncols=4, loc="upper center")
    axis.set(ylabel="bytes per parameter on a rank", ylim=(0, 20))
    axis.set_xticks(range(len(FORMULAS)), list(FORMULAS))
    show(
        figure,
        "Bytes per parameter on a rank, as stacked bars for W = 1, 2, 4 and 8. DDP stays at 16; "
        "ZeRO-1 falls towards 8, ZeRO-2 towards 4, FSDP towards 0. Each bar ends at its formula.",
    )

# %% [markdown]
# ## 5. Parameter servers
#
# One server, four workers. A step takes 10 ms, but every fifth one, by chance, takes 60.
# Synchronous rounds wait whenever *any* worker stalls; asynchronous ones never wait. With a bound s a
# worker more than s pushes ahead waits, which rides out most stalls. That is throughput
# (left; a round's mean stands for four gradients, so synchronous steps are four times as long).
#
# The price is staleness: a gradient is applied to values that other workers' updates have changed
# since it was computed, W-1 of them on average. On the right every run spends the same 240
# gradients, asynchronously, with more and more workers: what a learning rate bears shrinks as
# staleness grows. (The dotted line is where a network that guesses would be.)

# %%
server = module("parameter_server")
WORKERS, STEP, SECONDS, GRADIENTS = 4, 0.01, 1.5, 240  # virtual seconds
BOUNDS = {"synchronous": None, "s = 0": 0, "s = 4": 4, "asynchronous": float("inf")}
digits(), digits(train=False)


def serve(keeper, bound):
    if bound is None:
        server.serve_synchronous(keeper)
    elif bound == float("inf"):
        server.serve_asynchronous(keeper)
    else:
        server.serve_bounded(keeper, bound)


def loss_of(model, values):
    """The test loss of the model with these values."""
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(values[name])
        images, labels = digits(train=False)[:]
        return F.cross_entropy(model(images), labels).item()


def trained(ctx, bound, lr, seconds=float("inf"), count=10**6):
    """Server: the loss at the end; worker: [time, version, loss] at its pulls."""
    import time

    model = build_model("mlp")
    named = dict(model.named_parameters())
    if ctx.rank == 0:
        keeper = server.Server(named, servers=1, lr=lr)
        serve(keeper, bound)
        return loss_of(model, keeper.values)
    client = module("parameter_client").Client(named, servers=1)
    images, labels = digits()[ctx.rank - 1 :: ctx.world_size - 1]
    batches = list(zip(images.split(32), labels.split(32), strict=True))
    chance = torch.Generator().manual_seed(ctx.rank)
    begun, curve = time.perf_counter(), []
    while time.perf_counter() < begun + seconds and len(curve) < count:
        values = client.pull(named)
        loss = loss_of(model, values) if seconds < 10 and ctx.rank == 1 else 0.0
        curve.append([time.perf_counter() - begun, client.versions[0], loss])
        with torch.no_grad():
            for name, p in named.items():
                p.copy_(values[name])
                p.grad = None
        stalls = torch.rand((), generator=chance) < 0.2
        time.sleep(STEP * (6 if stalls else 0.9 + 0.2 * torch.rand((), generator=chance).item()))
        inputs, targets = batches[len(curve) % len(batches)]
        F.cross_entropy(model(inputs), targets).backward()
        client.push({name: p.grad for name, p in named.items()}, len(targets))
    client.leave()
    return curve


def staleness(workers):
    """Other workers' updates between a worker's pull and its push, for all of them."""
    return [b[1] - a[1] - 1 for w in workers for a, b in pairwise(w)]


timed, spent = {}, {}
for name, bound in BOUNDS.items():
    lr = 0.1 * WORKERS if bound is None else 0.1
    results = ranks(
        lambda ctx, b=bound, r=lr: trained(ctx, b, r, SECONDS), WORKERS + 1, ledger=False
    )
    if results:
        timed[name] = results[1:]
for lr in (0.05, 0.2, 0.4):
    for workers in (1, 2, 4, 8, 16):
        results = ranks(
            lambda ctx, r=lr, w=workers: trained(ctx, float("inf"), r, count=GRADIENTS // w),
            workers + 1,
            ledger=False,
        )
        if not results:
            break
        stale = staleness(results[1:])
        spent.setdefault(lr, []).append((sum(stale) / len(stale), results[0]))
if timed and spent:
    print(f"{'':14}{'gradients/s':>12}{'stale by, mean':>16}{'most':>6}{'loss at the end':>17}")
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3.8), layout="constrained")
    styles = ("C0-", "C1--", "C2-.", "k:")
    for style, (name, workers) in zip(styles, timed.items(), strict=False):
        seconds, _, losses = zip(*workers[0], strict=True)
        left.semilogy(seconds, losses, style, label=name)
        stale, rate = staleness(workers), sum(map(len, workers)) / SECONDS
        mean = sum(stale) / len(stale)
        print(f"{name:14}{rate:12.0f}{mean:16.1f}{max(stale):6}{losses[-1]:17.3f}")
    for style, (lr, points) in zip(("C0o-", "C1s--", "C2^-."), spent.items(), strict=False):
        right.semilogy(*zip(*points, strict=True), style, label=f"learning rate {lr}")
    right.axhline(torch.tensor(10.0).log().item(), color="k", ls=":", lw=1.5, label="a guess")
    left.set(xlabel="virtual seconds", ylabel="test loss", title="what waiting costs")
    right.set(
        xlabel="mean staleness, updates", title=f"what staleness costs: {GRADIENTS} gradients"
    )
    for axis in (left, right):
        axis.grid(alpha=0.3)
        axis.legend()
        axis.set_yticks([0.1, 0.2, 0.5, 1, 2], ["0.1", "0.2", "0.5", "1", "2"], minor=False)
        axis.yaxis.set_minor_formatter("")
    show(
        figure,
        "Left, test loss over virtual seconds: asynchronous falls fastest, synchronous and s = 0 "
        "slowest. Right, test loss over mean staleness: it rises, most with large rates.",
    )
