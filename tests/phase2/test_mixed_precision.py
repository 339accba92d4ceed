"""Checks of exercise 2.5: what computes in 16 bits, what stays in float32, and why."""

from __future__ import annotations

from typing import Any

import torch
import torch._dynamo  # torch.optim imports it when an optimizer is made: once here, not per rank
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from distlab.grading import exercise, expect_close, expect_equal, fail, trace
from distlab.reference.workloads import build_model, digits
from tests.phase2.half_precision import (
    BF16,
    CLASSES,
    FEATURES,
    FP16,
    RANKS,
    plain,
    seeded,
    window_of,
)

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
        self.register_buffer("shift", torch.randn(8))
        nn.init.normal_(self.norm.weight)
        nn.init.normal_(self.batch.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.second(self.norm(self.first(x) + self.shift)))
        h = self.batch(torch.tanh(self.third(self.frozen(h))))
        return self.head(h + self.softmax(h @ h.T) @ h)


def with_autocast(
    seed: int, windows: list, dtype: torch.dtype
) -> tuple[dict[str, torch.Tensor], float]:
    """Gradients and mean loss of one process on everything at once, by torch.autocast."""
    model = plain(seed)
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


# -- 2.5 ------------------------------------------------------------------------------------------
@exercise("2.5", "virtual cuda")
def test_masters_are_the_parameters(impl, run, seed):
    """From outside a float32 model: names, ties and values of the weights as they were."""

    def body(ctx):
        inner = seeded(seed, Net).to(ctx.device)
        model = impl.MixedPrecision(inner, BF16)
        named = dict(model.named_parameters())
        return {
            "names": [n for n, _ in model.named_parameters()],
            "same": [a is b for a, b in zip(model.parameters(), named.values(), strict=True)],
            "frozen": [n for n in named if not named[n].requires_grad],
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
    expect_equal(
        got["frozen"], ["frozen.weight", "frozen.bias"], what="without gradient", cause="frozen"
    )
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


@exercise("2.5", "virtual cuda")
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
            tokens = nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(8, CLASSES))
            logits = impl.MixedPrecision(tokens, dtype)(torch.tensor([[1, 8]]))
            moments = [s[k] for s in optimizer.state.values() for k in ("exp_avg", "exp_avg_sq")]
            return {
                "seen": {kind: sorted(set(found)) for kind, found in seen.dtypes.items()},
                "step": sorted(set(at_step)),
                "state": sorted({str(m.dtype) for m in moments}),
                "left": sorted({str(g.dtype) for g in left}),
                "logits": [str(logits.dtype)],
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
        ):
            expect_equal(found, want, what=f"in {dtype}: {what}", cause=cause)
        if str(dtype) in got["left"]:
            fail(
                f"gradients in {dtype} are left in the model after the step: they are stale, and "
                "hold 2 bytes per parameter",
                cause="gradient-left",
            )


@exercise("2.5", "virtual cuda")
def test_small_updates_are_not_lost(impl, run, seed):
    """20 steps, each too small for a 16-bit weight to move, add up in the masters."""
    rate = 1e-4

    def body(ctx):
        model = impl.MixedPrecision(plain(seed).to(ctx.device), BF16)
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


@exercise("2.5", "virtual cuda")
def test_forward_reads_the_rounded_masters(impl, run, seed):
    """After a step the model computes with the new weights: those of its masters, rounded."""

    def body(ctx):
        model = impl.MixedPrecision(plain(seed).to(ctx.device), BF16)
        optimizer = torch.optim.SGD(model.parameters(), lr=2.0)
        window = window_of(seed, 0, [(8, 0)], ctx.device)
        impl.mixed_step(model, optimizer, window)
        copy = plain(seed).to(ctx.device)
        with torch.no_grad():
            for ours, theirs in zip(copy.parameters(), model.parameters(), strict=True):
                ours.copy_(theirs)
        want = impl.MixedPrecision(copy, BF16)(window[0][0])
        return [t.detach().cpu() for t in (model(window[0][0]), want)]

    ((got, want),) = run(body, 1)
    off = float((got - want).norm() / want.norm())
    if off > 0.02:
        fail(
            f"after a step the logits are off by {off:.0%} of what the masters, rounded, give: the "
            "weights that forward reads must follow their masters",
            cause="stale-weights",
        )


@exercise("2.5", "virtual gloo cuda")
def test_step_equals_autocast_in_one_process(impl, run, seed, cases):
    """Uneven windows on all ranks: gradient, loss and norm of torch.autocast, within rounding."""
    for world_size, dtype in cases((3, BF16), (2, FP16), (4, BF16), (1, BF16)):
        shapes = RANKS[:world_size]

        def body(ctx, shapes=shapes, dtype=dtype):
            model = impl.MixedPrecision(plain(seed).to(ctx.device), dtype)
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            seen = {}
            optimizer.register_step_pre_hook(
                lambda *_: seen.update({n: p.grad.cpu() for n, p in model.named_parameters()})
            )
            window = window_of(seed, ctx.rank, shapes[ctx.rank], ctx.device)
            loss, norm = impl.mixed_step(model, optimizer, window)
            return seen, float(loss), float(norm), [p.detach().cpu() for p in model.parameters()]

        results = run(body, world_size)
        windows = [window_of(seed, rank, shape) for rank, shape in enumerate(shapes)]
        want, mean = with_autocast(seed, windows, dtype)
        norm = float(torch.cat([g.flatten() for g in want.values()]).norm())
        eps = torch.finfo(dtype).eps
        largest = max(float(g.abs().max()) for g in want.values())
        what = f"{world_size} ranks in {dtype}"
        for rank, (got, loss, length, masters) in enumerate(results):
            for name, value in want.items():
                expect_close(
                    got.get(name),
                    value,
                    what=f"{what}: gradient of {name}",
                    rank=rank,
                    rtol=0.0,
                    atol=4 * eps * largest,
                )
            if abs(loss - mean) > 4 * eps:
                fail(f"{what}: the mean loss is {mean}, got {loss}", cause="loss-value", rank=rank)
            if abs(length - norm) > 4 * eps * norm:
                fail(f"{what}: the norm is {norm}, got {length}", cause="norm", rank=rank)
            if any(not torch.equal(a, b) for a, b in zip(masters, results[0][3], strict=True)):
                fail(f"{what}: the masters differ from rank 0's", cause="ranks-differ", rank=rank)


@exercise("2.5", "virtual gloo")
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
        if log.messages > 3:
            fail(
                f"rank {log.rank} issued {log.messages} collectives, at most 3 are needed",
                cause="too-many-messages",
                rank=log.rank,
            )


@exercise("2.5", "virtual cuda")
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


@exercise("2.5", "virtual")
def test_what_can_not_be_done_is_refused(impl, run, seed):
    """Another dtype, a model cast already, a device without the type: ValueError, nothing done."""

    def body(ctx):
        said = []

        def attempt(model, dtype):
            kind, text = "accepted", ""
            dtypes = [[str(p.dtype) for p in model.parameters()]]
            try:
                impl.MixedPrecision(model, dtype)
            except ValueError as error:
                kind, text = "ValueError", str(error)
            except Exception as error:
                kind, text = type(error).__name__, str(error)
            dtypes.append([str(p.dtype) for p in model.parameters()])
            said.append([kind, text, *dtypes])

        for dtype in (torch.float32, torch.float64, torch.int8):
            attempt(plain(seed), dtype)
        attempt(plain(seed).bfloat16(), BF16)
        with NoProducts(FP16):
            attempt(plain(seed), FP16)
            impl.MixedPrecision(plain(seed), BF16)
        return said

    (said,) = run(body, 1)
    tried = {
        "float32": ("float32",),
        "float64": ("float64",),
        "int8": ("int8",),
        "a model in bfloat16": ("0.weight", "bfloat16"),
        "a device without float16": ("float16", "cpu"),
    }
    for (what, names), (kind, text, before, after) in zip(tried.items(), said, strict=True):
        got = f"{kind}: {text}" if text else kind
        if kind == "ValueError":
            unnamed = [name for name in names if name not in text]
            got = f"{text} lacks {unnamed}" if unnamed else "changed" * (before != after)
        expect_equal(got, "", what=f"ValueError with the names in it for {what}", cause="accepted")


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
