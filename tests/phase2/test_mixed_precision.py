"""Checks of exercise 2.5: which parts compute in 16 bits, which stay in float32, and why."""

from __future__ import annotations

from typing import Any

import torch
import torch._dynamo  # torch.optim imports it when an optimizer is made: once here, not per rank
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from distlab.grading import (
    exercise,
    expect_close,
    expect_equal,
    expect_refusals,
    fail,
    refusal,
    trace,
)
from distlab.reference.workloads import build_model, digits
from tests.phase2.half_precision import (
    BF16,
    CLASSES,
    FEATURES,
    FP16,
    RANKS,
    net,
    seeded,
    window_of,
)
from tests.phase2.windows import expect_numbers, plain

FP32 = torch.float32
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")
IN_FP32 = ("norm", "softmax")


class Net(nn.Module):
    """Tied, frozen and unused weights, a buffer, three modules that stay in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(FEATURES, 8), nn.LayerNorm(8)
        self.second, self.third = nn.Linear(8, 8), nn.Linear(8, 8)
        self.third.weight = self.second.weight
        self.frozen, self.batch = nn.Linear(8, 8).requires_grad_(False), nn.BatchNorm1d(8)
        self.softmax, self.head = nn.Softmax(-1), nn.Linear(8, CLASSES)
        self.unused = nn.Parameter(torch.randn(3))
        self.counts = nn.Parameter(torch.ones(8, dtype=torch.int64), requires_grad=False)
        self.tables = nn.Module()
        self.tables.register_buffer("shift", torch.randn(8))
        self.register_buffer("steps", torch.zeros(8, dtype=torch.int64))
        self.register_buffer("factor", torch.rand(8) + 0.5, persistent=False)
        self.second.bias.requires_grad_(False)
        self.first.weight = nn.Parameter(torch.randn(FEATURES, 8).t())
        nn.init.normal_(self.norm.weight)
        nn.init.normal_(self.batch.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inside = (self.tables.shift, self.steps, self.factor, self.counts)
        self.inside = [str(tensor.dtype) for tensor in inside]
        self.inside += [str(m.weight.dtype) for m in (self.frozen, self.norm, self.batch)]
        x = self.first(x) * self.factor + self.tables.shift + self.steps + self.counts
        h = torch.tanh(self.second(self.norm(x)))
        h = self.batch(torch.tanh(self.third(self.frozen(h))))
        return self.head(h + self.softmax(h @ h.T) @ h)


def with_autocast(
    seed: int, windows: list, dtype: torch.dtype
) -> tuple[dict[str, torch.Tensor], float]:
    """Gradients and mean loss of one process on everything at once, by torch.autocast."""
    model = net(seed)
    every = [pair for window in windows for pair in window]
    with torch.autocast("cpu", dtype=dtype):
        logits = model(torch.cat([x for x, _ in every]))
    loss = F.cross_entropy(logits.float(), torch.cat([y for _, y in every]))
    loss.backward()
    return {n: p.grad for n, p in model.named_parameters()}, loss.item()


class Seen(TorchDispatchMode):
    """The dtypes of the floating tensors that operators read, by kind; whether autocast was on."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.dtypes: dict[str, list[str]] = {}
        self.device, self.autocast = device.type, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.autocast |= torch.is_autocast_enabled(self.device)
        name = func._schema.name.removeprefix("aten::")
        kinds = ["product"] if name in PRODUCTS else [k for k in IN_FP32 if k in name]
        if name.startswith("_log_softmax"):
            kinds = ["loss"]
        for kind in kinds:
            read = [a for a in args if isinstance(a, torch.Tensor) and a.is_floating_point()]
            self.dtypes.setdefault(kind, []).extend(str(a.dtype) for a in read)
        return func(*args, **(kwargs or {}))


class NoProducts(TorchDispatchMode):
    """A device that can't multiply matrices of ``dtype``."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if name in PRODUCTS and any(getattr(a, "dtype", None) == self.dtype for a in args):
            raise RuntimeError(f'"{name}_impl" not implemented for {self.dtype}')
        return func(*args, **(kwargs or {}))


# what has no master in a Net: frozen parameters and those of norms
ITSELF = ("second.bias", "frozen.weight", "frozen.bias", "counts", "norm.weight", "batch.bias")


# -- 2.5 ------------------------------------------------------------------------------------------
@exercise("2.5", "virtual cuda", asserts="masters names exact tied frozen parameters")
def test_masters_are_the_parameters(impl, run, seed):
    """From outside a float32 model: names, ties and values of the weights as they were."""

    def body(ctx):
        inner = seeded(seed, Net).to(ctx.device)
        model = impl.MixedPrecision(inner, BF16)
        named = dict(model.named_parameters())
        return {
            "ties": [n for n, _ in model.named_parameters("net", remove_duplicate=False)],
            "top": [n for n, _ in model.named_parameters(recurse=False)],
            "names": [n for n, _ in model.named_parameters()],
            "same": [a is b for a, b in zip(model.parameters(), named.values(), strict=True)],
            "frozen": [n for n in named if not named[n].requires_grad],
            "copied": [n for n, p in inner.named_parameters() if n in ITSELF and named[n] is not p],
            "masters": {n: p.detach().cpu() for n, p in named.items() if p.requires_grad},
            "buffers": {n: str(b.dtype) for n, b in inner.named_buffers() if "running" in n},
        }

    (got,) = run(body, 1)
    start, masters = dict(seeded(seed, Net).named_parameters()), got["masters"]
    for name, dtype in ((n, master.dtype) for n, master in masters.items()):
        if dtype != FP32:
            fail(
                f"the optimizer is given {name} in {dtype}: it must step the float32 masters",
                cause="master-dtype",
            )
    expect_equal(
        got["names"] == list(start) and all(got["same"]),
        True,
        what="parameters() and named_parameters() go by the model's names, each once",
        cause="names",
    )
    inner = seeded(seed, Net)
    for what, names in (
        ("ties", [n for n, _ in inner.named_parameters("net", remove_duplicate=False)]),
        ("top", [n for n, _ in inner.named_parameters(recurse=False)]),
    ):
        expect_equal(got[what], names, what="names by the arguments of any module", cause="names")
    still = [n for n, p in start.items() if not p.requires_grad]
    expect_equal(got["frozen"], still, what="without gradient", cause="frozen")
    what = "frozen parameters and those of norms that are given as copies instead of themselves"
    expect_equal(got["copied"], [], what=what, cause="copied")
    shared = [n for n in start if n in masters]
    rounded = [n for n in shared if not torch.equal(start[n], masters[n])]
    if rounded:
        fail(
            f"the masters of {', '.join(rounded)} are not the weights from before: copy "
            "before you cast, a rounded weight does not come back",
            cause="master-rounded",
        )
    expect_equal(
        set(got["buffers"].values()),
        {str(FP32)},
        what="running statistics of norms",
        cause="buffer-dtype",
    )


@exercise(
    "2.5",
    "virtual cuda",
    asserts="product-dtype fp32-modules inside logits no-autocast none-left dtype layout "
    "parameters",
)
def test_each_tensor_has_its_type(impl, run, seed, cases):
    """Products in 16 bits; norms, softmax, loss, gradients at the step, optimizer in float32."""
    for dtype in cases(BF16, FP16):

        def body(ctx, dtype=dtype):
            inner = seeded(seed, Net).to(ctx.device)
            model = impl.MixedPrecision(inner, dtype)
            optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad])
            at_step = []
            optimizer.register_step_pre_hook(
                lambda opt, *_: at_step.extend(
                    str(p.grad.dtype) for p in opt.param_groups[0]["params"]
                )
            )
            with Seen(ctx.device) as seen:
                window = window_of(seed, 0, [(5, 0), (4, 1)], ctx.device)
                impl.mixed_step(model, optimizer, window)
            left = [p.grad for p in inner.parameters() if p.grad is not None]
            inside = list(inner.inside)
            tokens = nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(8, CLASSES))
            outside = impl.MixedPrecision(tokens, dtype)
            logits = outside(torch.tensor([[1, 8]]))
            logits.sum().backward()
            left += [p.grad for p in tokens.parameters() if p.grad is not None]
            moments = [s[k] for s in optimizer.state.values() for k in ("exp_avg", "exp_avg_sq")]
            return {
                "seen": {kind: sorted(set(found)) for kind, found in seen.dtypes.items()},
                "step": sorted(set(at_step)),
                "state": sorted({str(m.dtype) for m in moments}),
                "left": sorted({str(g.dtype) for g in left}),
                "logits": [str(logits.dtype)],
                "inside": inside,
                "autocast": seen.autocast,
            }

        (got,) = run(body, 1)
        wide, low = [str(FP32)], [str(dtype)]
        expect_equal(
            got["autocast"],
            False,
            what="torch.autocast is on in the step: here you write the casts yourself",
            cause="autocast",
        )
        seen = got["seen"]
        for what, found, want, cause in (
            ("gradients when the optimizer steps", got["step"], wide, "gradient-dtype"),
            ("Adam's moments", got["state"], wide, "state-dtype"),
            ("what matrix products read", seen.get("product"), low, "product-dtype"),
            ("what norms read", seen.get("norm"), wide, "norm-dtype"),
            ("what softmaxes read", seen.get("softmax"), wide, "softmax-dtype"),
            ("what the loss reads", seen.get("loss"), wide, "loss-dtype"),
            ("logits of a model of tokens", got["logits"], wide, "loss-dtype"),
            (
                "shift, steps, factor, counts, a frozen and two norms' weights, in forward",
                got["inside"],
                [*low, "torch.int64", *low, "torch.int64", *low, *wide, *wide],
                "inside-dtype",
            ),
        ):
            expect_equal(found, want, what=f"in {dtype}: {what}", cause=cause)
        if str(dtype) in got["left"]:
            fail(
                f"gradients in {dtype} are left in the model after backward: they are stale, and "
                "hold 2 bytes per parameter",
                cause="gradient-left",
            )


@exercise("2.5", "virtual cuda", asserts="masters step")
def test_small_updates_are_not_lost(impl, run, seed):
    """20 steps, each too small for a 16-bit weight to move, add up in the masters."""
    rate = 1e-4

    def body(ctx):
        model = impl.MixedPrecision(net(seed).to(ctx.device), BF16)
        start = {n: p.detach().clone() for n, p in model.named_parameters()}
        masters = {n: p.clone() for n, p in start.items()}
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)

        def follow(*_):
            for name, p in model.named_parameters():
                masters[name].add_(p.grad, alpha=-rate)  # float32 rounds here as it does there

        optimizer.register_step_pre_hook(follow)
        for _ in range(20):
            impl.mixed_step(model, optimizer, window_of(seed, 0, [(8, 0)], ctx.device))
        end = {n: p.detach() for n, p in model.named_parameters()}
        return [{n: t.cpu() for n, t in each.items()} for each in (start, end, masters)]

    ((start, end, masters),) = run(body, 1)
    for name, master in masters.items():
        moved, value = end[name] - start[name], master - start[name]
        lost = float((moved - value).norm() / value.norm())
        if lost > 0.02:
            fail(
                f"{name}: of 20 updates below the distance of {BF16} numbers {lost:.0%} is lost: "
                "the sum must stay in the float32 master",
                cause="update-lost",
            )


@exercise("2.5", "virtual cuda", asserts="write-back rounded several life")
def test_forward_reads_the_rounded_masters(impl, run, seed):
    """After a step the model computes with the new weights: its masters, rounded."""

    def body(ctx):
        model = impl.MixedPrecision(net(seed).to(ctx.device), BF16)
        other = impl.MixedPrecision(net(seed + 1).to(ctx.device), FP16)
        optimizer = torch.optim.SGD(model.parameters(), lr=2.0)
        window = window_of(seed, 0, [(8, 0)], ctx.device)
        inputs = window[0][0]
        before = inputs.clone()

        def pair():
            copy = net(seed).to(ctx.device)
            with torch.no_grad():
                for ours, theirs in zip(copy.parameters(), model.parameters(), strict=True):
                    ours.copy_(theirs)
            right = impl.MixedPrecision(copy, BF16)(inputs)
            return [t.detach().cpu() for t in (model(inputs), right)]

        first = other(inputs).detach()
        impl.mixed_step(model, optimizer, window)
        found = [pair()]
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1.5)
        model.write_back()
        found.append(pair())
        found.append([other(inputs).detach().cpu(), first.cpu()])
        frozen = impl.MixedPrecision(net(seed).requires_grad_(False).to(ctx.device), BF16)
        first = frozen(inputs).detach().cpu()
        frozen.write_back()
        found.append([frozen(inputs).detach().cpu(), first])
        found.append([inputs.cpu(), before.cpu()])
        return found

    (found,) = run(body, 1)
    told = (
        ("after a step the logits", "stale-weights"),
        ("after the masters were changed and written back the logits", "stale-weights"),
        ("the logits of another model", "models-mixed"),
        ("after write_back the logits of a frozen model", "stale-weights"),
        ("the inputs of forward", "inputs-changed"),
    )
    for (got, want), (what, cause) in zip(found, told, strict=True):
        off = float((got.double() - want.double()).norm() / want.double().norm())
        if not off <= 1e-4:
            fail(
                f"{what} are off by {off:.2%} of what the masters, rounded, give: the weights that "
                "forward reads are the masters, rounded to nearest",
                cause=cause,
            )


@exercise("2.5", "virtual gloo cuda", asserts="step returned float32-sum product-dtype alone")
def test_step_equals_autocast_in_one_process(impl, run, seed, cases):
    """Uneven windows on all ranks: gradient, loss and norm of torch.autocast, within rounding."""
    for world_size, dtype in cases((3, BF16), (2, FP16), (4, BF16), (1, BF16)):
        check_step(run, impl, seed, RANKS[:world_size], dtype, None, [])


@exercise("2.5", "virtual", asserts="group step")
def test_only_the_groups_ranks_step_together(impl, run, seed):
    """Ranks 1 and 3 step by their own targets, clipped, while ranks 0 and 2 do, too."""
    shapes = [RANKS[3], RANKS[0], RANKS[1], RANKS[1]]
    check_step(run, impl, seed, shapes, BF16, 0.05, [[3, 1], [0, 2]])


def check_step(
    run: Any, impl: Any, seed: int, shapes: list, dtype: Any, limit: float | None, groups: list
) -> None:
    """One step of the ranks of each group: gradients, norm, loss and masters."""

    def body(ctx):
        made = [dist.new_group(ranks) for ranks in groups]
        mine = [g for g, ranks in zip(made, groups, strict=True) if ctx.rank in ranks]
        model = impl.MixedPrecision(net(seed).to(ctx.device), dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        window = window_of(seed, ctx.rank, shapes[ctx.rank], ctx.device)
        given = {"group": mine[0]} if mine else {}
        answer = impl.mixed_step(model, optimizer, window, max_norm=limit, **given)
        return plain(answer), {n: p.detach().cpu() for n, p in model.named_parameters()}

    results = run(body, len(shapes))
    every = [window_of(seed, rank, shape) for rank, shape in enumerate(shapes)]
    start = dict(net(seed).named_parameters())
    eps = torch.finfo(dtype).eps
    for ranks in groups or [list(range(len(shapes)))]:
        members = sorted(ranks)
        want, mean = with_autocast(seed, [every[r] for r in members], dtype)
        norm = float(torch.cat([g.flatten() for g in want.values()]).norm())
        factor = 1.0 if limit is None else min(1.0, limit / norm)
        largest = factor * max(float(g.abs().max()) for g in want.values())
        what = f"ranks {members} in {dtype}"
        for rank in members:
            answer, masters = results[rank]
            loss, length = expect_numbers(answer, [float, float], what, rank)
            for name, value in want.items():
                expect_close(
                    start[name].detach() - masters[name],
                    value * factor,
                    what=f"{what}: what the step, at rate 1, took from {name}",
                    rank=rank,
                    rtol=0.0,
                    atol=4 * eps * largest + 1e-6,
                )
            if not abs(loss - mean) <= 4 * eps:
                fail(f"{what}: the mean loss is {mean}, got {loss}", cause="loss-value", rank=rank)
            if not abs(length - norm) <= 4 * eps * norm:
                fail(f"{what}: the norm is {norm}, got {length}", cause="norm", rank=rank)
            first = results[members[0]][1]
            if any(not torch.equal(p, first[n]) for n, p in masters.items()):
                message = f"{what}: the masters differ from rank {members[0]}'s"
                fail(message, cause="ranks-differ", rank=rank)


@exercise("2.5", "virtual gloo", asserts="cost once")
def test_gradients_travel_in_float32_once(impl, run, seed):
    """One all-reduce of 4 bytes per trainable parameter and window; nothing in 16 bits."""

    def body(ctx):
        inner = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, CLASSES))
        inner[0].requires_grad_(False)
        model = impl.MixedPrecision(inner, BF16)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        window = [(torch.ones(2, 64), torch.zeros(2, dtype=torch.int64))] * 2
        with ctx.region("step"):
            impl.mixed_step(model, optimizer, window)

    count = 2 * 64 + 64 * CLASSES + CLASSES  # of the norm and the last layer
    for log in run(body, 3).logs:
        log = log.select(region="step")
        for event in log.events:
            if event.dtype in ("bfloat16", "float16"):
                fail(
                    f"rank {log.rank} sends {event}: a sum of ranks loses what is small in 16 "
                    "bits; cast before the sum",
                    cause="wire-dtype",
                    rank=log.rank,
                    line=event.line,
                )
        log.all_waited()
        share = 4 / 3 * 4 * count
        log.sent_at_most(share + 200, "2(W-1)/W of 4 bytes per trainable parameter, once")
        log.sent_at_least(share - 16, "2(W-1)/W of 4 bytes per trainable parameter")
        if len(log.events) > 3:
            fail(
                f"rank {log.rank} issued {len(log.events)} collectives, at most 3 are needed",
                cause="too-many-messages",
                rank=log.rank,
            )


@exercise("2.5", "virtual cuda", asserts="float32-sum")
def test_micro_batches_add_up_in_float32(impl, run):
    """One large gradient and 64 that a 16-bit sum would not notice."""
    x = torch.tensor([[1.0, -1.0, 0.5, 2.0]])
    factors = [512.0] + [1.0] * 64

    def body(ctx):
        inner = nn.Linear(4, CLASSES, bias=False).to(ctx.device)
        nn.init.zeros_(inner.weight)
        model = impl.MixedPrecision(inner, BF16)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        target = torch.zeros(1, dtype=torch.int64, device=ctx.device)
        window = [((f * x).to(ctx.device), target) for f in factors]
        impl.mixed_step(model, optimizer, window)
        return next(model.parameters()).detach().cpu()

    (got,) = run(body, 1)
    error = torch.tensor([[1 / 3 - 1], [1 / 3], [1 / 3]])  # of softmax at zero
    want = -sum(factors) / len(factors) * error @ x
    off = float((got - want).norm() / want.norm())
    if off > 0.02:
        fail(
            f"65 micro-batches, the first 512 times larger: the sum is off by {off:.1%}; add the "
            "gradients up in float32",
            cause="sum-rounded",
        )


@exercise("2.5", "virtual", asserts="refused refusals life")
def test_what_can_not_be_done_is_refused(impl, run, seed):
    """Another dtype, a model cast already, a device without the type: ValueError, nothing done."""

    def body(ctx):
        refused, kept = [], []

        def attempt(model, dtype):
            tensors = [*model.parameters(), *model.buffers()]
            before = [(p.dtype, p.detach().clone()) for p in tensors]
            norms = [m for m in model.modules() if isinstance(m, nn.LayerNorm)]
            gives = norms[0](torch.ones_like(norms[0].weight)).dtype
            random = torch.get_rng_state()
            calls = (impl.check_precision, impl.MixedPrecision)
            refused.extend(refusal(call, model, dtype) for call in calls)
            pairs = zip(before, [*model.parameters(), *model.buffers()], strict=True)
            same = all(p.dtype == d and torch.equal(p, old) for (d, old), p in pairs)
            same &= norms[0](torch.ones_like(norms[0].weight)).dtype == gives
            kept.append(same and torch.equal(random, torch.get_rng_state()))

        for dtype in (torch.float32, torch.float64, torch.int8):
            attempt(net(seed), dtype)
        attempt(net(seed).bfloat16(), BF16)
        last = net(seed)
        last.register_buffer("shift", torch.ones(2))
        last[-1].bias.data = last[-1].bias.data.double()
        attempt(last, BF16)
        first = net(seed)
        first[0].weight.data = first[0].weight.data.double()
        attempt(first, BF16)
        for low in (FP16, torch.float64):
            frozen = net(seed)
            frozen[0].requires_grad_(False).to(low)
            attempt(frozen, BF16)
        inner = net(seed)
        wrapper = impl.MixedPrecision(inner, BF16)
        attempt(wrapper, BF16)
        attempt(inner, BF16)
        with NoProducts(FP16):
            attempt(net(seed), FP16)
            impl.MixedPrecision(net(seed), BF16)
        impl.check_precision(seeded(seed, Net), FP16)  # one with an integer parameter
        return refused, kept

    results = run(body, 2)
    tried = (
        "float32",
        "float64",
        "int8",
        "a model in bfloat16",
        "a model whose last parameter is float64",
        "a model whose first parameter is float64",
        "a model with a frozen layer in float16",
        "a model with a frozen layer in float64",
        "a wrapper",
        "a model that is wrapped already",
        "a device without float16",
    )
    names = [f"{call} of {what}" for what in tried for call in ("check_precision", "the wrapper")]
    for rank, (refused, kept) in enumerate(results):
        expect_refusals(refused, names, rank=rank)
        for what, same in zip(tried, kept, strict=True):
            expect_equal(same, True, what=f"{what}: nothing changed", cause="late-check")


@trace("2.5")
def trace_mixed_steps(impl):
    """Steps of two micro-batches each on the digits, in bfloat16."""
    digits()

    def body(ctx):
        images, labels = digits()[ctx.rank :: ctx.world_size]
        model = impl.MixedPrecision(build_model("mlp", 0), BF16)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in ctx.steps(3):
            chosen = [slice(32 * k, 32 * k + 32) for k in range(2 * step, 2 * step + 2)]
            window = [(images[c], labels[c]) for c in chosen]
            impl.mixed_step(model, optimizer, window)

    return body
