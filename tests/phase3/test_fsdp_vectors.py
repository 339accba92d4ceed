"""Checks of exercise 3.15: one flat parameter step by step, clipping, and raised errors."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch._dynamo  # torch.optim imports it when an optimizer is made: once here, not per rank
import torch.distributed as dist
from torch import Tensor, nn

from distlab.grading import exercise, expect_close, expect_equal, expect_refused, fail, refusal
from tests.phase3.fsdp_branches import Chain, inputs_of
from tests.phase3.fsdp_models import net, use_of_freed_is_told
from tests.phase3.fsdp_states import check_begins_anew

GROUPS = ((1, 3), (0, 2, 4))  # the second does other things meanwhile
SHAPES = ((3, 4), (), (0, 3), (2, 3), (5,)), ((2,), (2, 1))
KINDS = ("float64", "float32", "bfloat16", "float16", "int64")
TURNS = 5
TOLERANCE = {"float64": 1e-12, "float32": 1e-6, "bfloat16": 0.01, "float16": 2e-3}


def drawn(seed: int, dtype: str, which: int) -> list[Tensor]:
    """A transposed, an empty and a 0-d tensor, two views of one storage; or two small ones."""
    generator = torch.Generator().manual_seed(seed * 10 + which)
    numels = [math.prod(shape) for shape in SHAPES[which]]
    values = torch.randn(sum(numels), generator=generator, dtype=torch.float64)
    if dtype == "int64":
        values = values * 2.0**40
    values = values.to(getattr(torch, dtype))
    if dtype == "int64":
        values += 2**53 + 1
    parts = values.split(numels)
    found = [part.view(shape) for part, shape in zip(parts, SHAPES[which], strict=True)]
    found[0] = found[0].t().contiguous().t() if found[0].dim() == 2 else found[0]
    return found


def gradients(seed: int, dtype: str, rank: int, turn: int) -> list[Tensor | None]:
    """A rank's gradients in a turn: one missing everywhere, one on rank 3 alone; then just one.

    In the second turn those of ranks 1 and 2 are zeros, which travel like any other.
    """
    which = int(rank in GROUPS[1])
    generator = torch.Generator().manual_seed(seed * 100 + rank * 10 + turn)
    found: list[Tensor | None] = [
        torch.randn(shape, generator=generator, dtype=torch.float64).to(getattr(torch, dtype))
        for shape in SHAPES[which]
    ]
    if turn == 2:
        return [None] * len(found)
    if turn > 2:
        return [g if k == (turn - 3) * (len(found) - 1) else None for k, g in enumerate(found)]
    if turn == 1 and rank in (1, 2):
        found = [torch.zeros_like(g) for g in found if g is not None]
    if rank == 3:
        found[0] = None
    found[-1] = None
    return found


def placed(seed: int, dtype: str, which: int) -> tuple[nn.Module, dict[nn.Parameter, list[Any]]]:
    """Parameters and their attributes, of which the first has two."""
    module = nn.Module()
    trainable = dtype != "int64"
    every = [nn.Parameter(t, requires_grad=trainable) for t in drawn(seed, dtype, which)]
    places = {p: [(module, f"p{k}", f"p{k}")] for k, p in enumerate(every)}
    places[every[0]].append((module, "tied", "tied"))
    return module, places


@exercise(
    "3.15",
    "virtual gloo",
    asserts="shard owner no-padding full leaves silent row-major in-flight once places freed "
    "waits-first forgets zero-filled nothing-sent mean-added gather-bytes reduce-bytes group "
    "dtype layout parameters alone life trainable meta device",
)
def test_one_vector_step_by_step(impl, run, seed):
    """A flat parameter alone: shard, gather, free, reduce; strided, 0-d, empty; every dtype."""

    def body(ctx):
        groups = [dist.new_group(list(ranks)) for ranks in GROUPS]
        which = int(ctx.rank in GROUPS[1])
        return [one_vector(impl, ctx, seed, dtype, groups[which], which) for dtype in KINDS]

    results = run(body, 5)
    for rank, every in enumerate(results):
        for dtype, got in zip(KINDS, every, strict=True):
            judge_vector(got, seed, dtype, rank)


def one_vector(impl, ctx, seed, dtype, group, which) -> dict[str, Any]:
    """The values at each moment of the life of one vector."""
    module, places = placed(seed, dtype, which)
    names = [name for attributes in places.values() for _, name, _ in attributes]
    last = 0

    def sent() -> list[tuple[str, int, bool]]:
        nonlocal last
        new, last = ctx.ledger.events[last:], len(ctx.ledger.events)
        return [(e.op, e.sent, e.end is None) for e in new]

    def attributes() -> list[Any]:
        return [getattr(module, name, "no attribute") for name in names]

    def is_freed() -> tuple[int, bool]:
        return flat.full.untyped_storage().nbytes(), all(a is None for a in attributes())

    sent()
    flat = impl.FlatParameter(places, group, ctx.device)
    parameter = isinstance(flat.shard, nn.Parameter)
    shared = flat.shard.untyped_storage().nbytes() > flat.shard.nbytes
    out: dict[str, Any] = {
        "making": sent(),
        "shard": flat.shard.detach().clone(),
        "kind": (parameter, flat.shard.requires_grad, flat.shard.grad is None, shared),
        "same": [p.detach().clone() for p in places],
        "full": (tuple(flat.full.shape), str(flat.full.dtype)),
        "freed": [is_freed()],
    }
    flat.start_gather()
    flat.start_gather()
    out["gathering"] = sent()
    out["under way"] = all(a is None for a in attributes())
    flat.finish_gather()
    flat.finish_gather()
    views = attributes()
    out["values"] = [copy_of(view) for view in views]
    full = flat.full.untyped_storage().data_ptr()
    out["views"] = [
        (v.is_leaf, v.requires_grad, v.untyped_storage().data_ptr() == full or not v.numel())
        for v in views
        if isinstance(v, Tensor)
    ]
    flat.start_gather()
    out["there already"] = sent()
    flat.free()
    out["freed"].append(is_freed())
    with torch.no_grad():
        flat.shard.add_(1)
    flat.start_gather()
    flat.free()  # while it is under way
    out["freed"].append(is_freed())
    flat.start_gather()
    flat.finish_gather()
    out["changed"] = [copy_of(view) for view in attributes()]
    if dtype != "int64":
        out["grads"] = reduced(flat, seed, dtype, ctx.rank, sent)
    flat.free()
    if dtype != "int64":
        on_meta = {nn.Parameter(p.detach().to("meta")): a for p, a in places.items()}
        shard = impl.FlatParameter(on_meta, group, ctx.device).shard
        out["from meta"] = (shard.numel(), str(shard.device))
        lone = impl.FlatParameter({[*places][-1]: []}, group, ctx.device).shard
        out["lone"] = lone.untyped_storage().nbytes() - lone.nbytes
        there = impl.FlatParameter(places, group, torch.device("meta"))
        out["on meta"] = (there.shard.device.type, there.full.device.type)
    return out


def reduced(flat, seed: int, dtype: str, rank: int, sent) -> list[Any]:
    """Several reductions: the messages, those under way, and the gradient afterwards."""
    sent()
    found = []
    for turn in range(TURNS):
        for leaf, gradient in zip(flat.leaves, gradients(seed, dtype, rank, turn), strict=True):
            turned = gradient is not None and gradient.dim() == 2 and rank in (1, 4)
            leaf.grad = gradient.t().contiguous().t() if turned else gradient
        flat.start_reduce()
        messages = sent()
        kept = [leaf.grad is not None for leaf in flat.leaves]
        flat.finish_reduce()
        flat.finish_reduce()
        found.append((messages, any(kept), copy_of(flat.shard.grad)))
    return found


def copy_of(value: Any) -> Any:
    """A tensor's copy; anything else as it is."""
    return value.detach().clone() if isinstance(value, Tensor) else value


def judge_vector(got: dict[str, Any], seed: int, dtype: str, rank: int) -> None:
    which = int(rank in GROUPS[1])
    ranks = GROUPS[which]
    values = drawn(seed, dtype, which)
    vector = torch.cat([v.flatten() for v in values])
    chunk = -(-len(vector) // len(ranks))
    start = ranks.index(rank) * chunk
    mine = slice(start, start + chunk)
    where = f"a vector of {len(vector)} {dtype} elements, ranks {ranks}"
    same = [torch.equal(a, b) for a, b in zip(got["same"], values, strict=True)]

    def expect(what: str, found: object, want: object, cause: str) -> None:
        expect_equal(found, want, what=f"{where}: {what}", rank=rank, cause=cause)

    expect("messages of making it", got["making"], [], "communicated")
    if got["shard"].shape != vector[mine].shape:
        size = got["shard"].numel()
        text = f"{where}: rank {rank} keeps {size} elements, {len(vector[mine])} are its part"
        cause = "padding" if size > len(vector[mine]) else "elements-lost"
        fail(text, cause=cause, rank=rank)
    trainable = dtype != "int64"
    exact = {"rank": rank, "rtol": 0.0, "atol": 0.0}
    expect_close(got["shard"], vector[mine], what=f"{where}: shard", **exact)
    kind = (True, trainable, True, False)
    what = "shard: a Parameter, trainable, without gradient, part of a larger storage"
    expect(what, got["kind"], kind, "shard")
    expect("the parameters are as before", all(same), True, "changed")
    expect("full", got["full"], ((len(ranks) * chunk,), f"torch.{dtype}"), "full")
    what = "bytes of full and whether attributes are None: made, freed, freed under way"
    expect(what, got["freed"], [(0, True)] * 3, "not-freed")
    nbytes = (len(ranks) - 1) * chunk * vector.element_size()
    judge_messages(f"{where}: two start_gather", got["gathering"], "all_gather", nbytes, rank)
    if not got["under way"]:
        text = f"{where}: attributes are tensors while the gather is under way, without values: "
        fail(f"{text}put the leaves there in finish_gather", cause="too-early", rank=rank)
    expect("messages of start_gather when it is there", got["there already"], [], "gathered-twice")
    tied = [values[0], *values]
    for shift, found in ((0, got["values"]), (1, got["changed"])):
        if len(found) != len(tied) or not all(isinstance(v, Tensor) for v in found):
            fail(f"{where}: gathered attributes are {found}", cause="attributes", rank=rank)
        for value, want in zip(found, tied, strict=True):
            after = want + shift
            expect_close(value, after, what=f"{where}: gathered, shard + {shift}", **exact)
    views = [(True, trainable, True)] * len(tied)
    expect("attributes: leaf, trainable, view of full", got["views"], views, "leaves")
    if trainable:
        expect("from meta", got["from meta"], (len(vector[mine]), "cpu"), "meta")
        what = "bytes that the shard of a single parameter keeps beside its own"
        expect(what, got["lone"], 0, "shard")
        expect("device of shard and full", got["on meta"], ("meta", "meta"), "device")
        judge_reduced(got["grads"], seed, dtype, rank, mine, where)


def judge_messages(what: str, got: list[Any], op: str, nbytes: int, rank: int) -> None:
    want = [(op, nbytes, True)]
    if [g[:2] for g in got] == [w[:2] for w in want] and not got[0][2]:
        text = f"{what}: rank {rank} waits for its {op} at once, nothing can be done beside it"
        fail(text, cause="waited-at-once", rank=rank)
    expect_equal(
        got, want, what=f"{what}: (operator, bytes, under way)", rank=rank, cause="messages"
    )


def judge_reduced(
    found: list[Any], seed: int, dtype: str, rank: int, mine: slice, where: str
) -> None:
    ranks = GROUPS[int(rank in GROUPS[1])]
    shapes = SHAPES[int(rank in GROUPS[1])]
    total = torch.zeros((), dtype=torch.float64)
    for turn, (messages, kept, got) in enumerate(found):
        parts = []
        for each in ranks:
            every = gradients(seed, dtype, each, turn)
            flat = [
                torch.zeros(math.prod(shape)) if g is None else g.double().flatten()
                for g, shape in zip(every, shapes, strict=True)
            ]
            parts.append(torch.cat(flat).double())
        total = total + torch.stack(parts).mean(0)
        what = f"{where}: gradient after {turn + 1} reductions"
        if turn == 2:
            what = f"{where}: a reduction without any gradient"
            expect_equal(messages, [], what=f"{what}: messages", rank=rank, cause="messages")
        else:
            size = -(-len(total) // len(ranks))
            nbytes = (len(ranks) - 1) * size * getattr(torch, dtype).itemsize
            what_sent = f"{where}: start_reduce"
            judge_messages(what_sent, messages, "reduce_scatter", nbytes, rank)
        expect_equal(kept, False, what=f"{what}: leaves keep theirs", rank=rank, cause="kept")
        if not isinstance(got, Tensor):
            fail(f"{what}: expected a tensor, got {got!r}", cause="missing", rank=rank)
        name = str(got.dtype).removeprefix("torch.")
        expect_equal(name, dtype, what=f"{what}: dtype", rank=rank, cause="dtype")
        near = TOLERANCE[dtype]
        parts = [part[mine] for part in parts] if turn == 0 else None
        known = {"contributions": parts} if parts else {}
        expect_close(
            got.double(), total[mine], what=what, rank=rank, rtol=near, atol=4 * near, **known
        )


# -- clipping -------------------------------------------------------------------------------------
INF, NAN = float("inf"), float("nan")
# gradients on the group's two ranks (None: it has none), limit
CLIPPED: dict[str, tuple[str, float | None, float | None, float]] = {
    "larger than the limit": ("float64", 3.0, -4.0, 2.5),
    "smaller than the limit": ("float64", 3.0, -4.0, 100.0),
    "equal to the limit": ("float64", 2.0, 2.0, 6.0),
    "zero": ("float64", 0.0, 0.0, 1.0),
    "whose squares overflow float32": ("float32", 3e25, 2e25, 1e3),
    "in bfloat16": ("bfloat16", 3.0, -4.0, 2.5),
    "missing on one rank": ("float64", 3.0, None, 2.5),
    "missing everywhere": ("float64", None, None, 2.5),
    "infinite on one rank": ("float64", INF, 2.0, 1.0),
    "NaN on one rank": ("float64", 1.0, NAN, 1.0),
    "with an infinite limit": ("float64", 3.0, -4.0, INF),
}


@exercise(
    "3.15",
    "virtual",
    asserts="clip-in-place clip-norm clip-nothing clip-float64 clip-cost clip-refused refusals "
    "group dtype alone cost",
)
def test_clipping(impl, run, seed):
    """One factor for all shards of the group, in place; small, infinite and NaN are not touched."""
    factor = 1 + seed % 5

    def body(ctx):
        groups = [dist.new_group([3, 1]), dist.new_group([0, 2])]
        mine = int(ctx.rank % 2 == 0)
        out = {}
        for name, (dtype, *parts, limit) in CLIPPED.items():
            inner = nn.Linear(2, 3).to(getattr(torch, dtype))  # 9 elements: 5 and 4
            model = impl.FSDP(inner, group=groups[mine])
            (shard,) = model.parameters()
            value = parts[ctx.rank // 2]
            if value is not None:
                shard.grad = torch.full_like(shard, value * (factor if mine else 1))
            kept = shard.grad
            with ctx.region(name):
                norm = impl.clip_by_global_norm(model, limit)
            left = None if kept is None else kept.double().unique().tolist()
            out[name] = norm, left, shard.grad is kept
        with ctx.region("wrong"):
            wrong = [
                refusal(impl.clip_by_global_norm, model, limit) for limit in (0.0, -1.0, NAN, -INF)
            ]
        return out, wrong

    results = run(body, 4)
    for rank, (got, wrong) in enumerate(results):
        log = results.logs[rank]
        for name, (dtype, *parts, limit) in CLIPPED.items():
            scaled = [None if p is None else p * (1 if rank % 2 else factor) for p in parts]
            squares = [n * (p or 0.0) ** 2 for n, p in zip((5, 4), scaled, strict=True)]
            norm, mine = math.sqrt(sum(squares)), scaled[rank // 2]
            expect_clipped(got[name], norm, mine, limit, f"a gradient {name}", dtype, rank)
            events = [(e.op, e.numel) for e in log.select(region=name).events]
            what = f"messages of clipping a gradient {name}: (operator, elements)"
            expect_equal(events, [("all_reduce", 1)], what=what, rank=rank, cause="cost")
        for limit, text in zip(("0", "-1", "NaN", "-infinity"), wrong, strict=True):
            if text.startswith("!"):
                text = f"max_norm {limit}: expected a ValueError, but {text[1:]}"
                fail(text, cause="accepted", rank=rank)
        if log.select(region="wrong").events:
            fail("a limit was refused after a message", cause="late-check", rank=rank)


@exercise("3.15", "virtual gloo cuda", nccl=True, asserts="clip-on-cpu")
def test_clipping_of_shards_on_the_cpu(impl, run, seed):
    """Offloaded shards: their gradients are on the CPU, and the group adds up where it can."""

    def body(ctx):
        model = impl.FSDP(nn.Linear(2, 3))  # 9 elements: 5 and 4
        (shard,) = model.parameters()
        shard.grad = torch.full_like(shard, 3.0)
        norm = impl.clip_by_global_norm(model, 4.5)
        return norm, shard.grad.unique().tolist(), shard.grad.device.type

    for rank, (norm, left, device) in enumerate(run(body, 2)):
        expect_clipped((norm, left, True), 9.0, 3.0, 4.5, "a gradient on the CPU", "float32", rank)
        what = "the device of a shard's gradient on the CPU"
        expect_equal(device, "cpu", what=what, rank=rank, cause="device")


def expect_clipped(
    got: Any, norm: float, mine: float | None, limit: float, what: str, dtype: str, rank: int
) -> None:
    told, left, in_place = got
    near = 1e-2 if dtype == "bfloat16" else 1e-6
    if not isinstance(told, float):
        text = f"{what}: the norm is a {type(told).__name__}, expected a float"
        fail(text, cause="type", rank=rank)
    same = told == norm or (math.isnan(told) and math.isnan(norm))
    if not (same or abs(told - norm) <= 1e-6 * norm + 1e-12 < INF):
        text = f"{what}: the norm of the whole gradient is {norm:.9g}, got {told:.9g}"
        if abs(told - norm) <= near * norm:
            text += ": add the squares in float64, whatever the gradient's dtype"
        fail(text, cause="norm", rank=rank)
    factor = limit / norm if limit < norm < INF else 1.0
    if mine is None:
        expect_equal(left, None, what=f"{what}: the gradient there", rank=rank, cause="clipping")
        return
    want = mine * factor
    fits = len(left) == 1 and (left[0] == want or abs(left[0] - want) <= near * abs(want))
    if math.isnan(mine):
        fits = math.isnan(left[0])
    if not fits:
        text = f"{what}: elements of {mine:.9g} with norm {norm:.9g} and max_norm {limit:.9g} "
        fail(f"{text}become {left}, expected {want:.9g}", cause="clipping", rank=rank)
    expect_equal(in_place, True, what=f"{what}: shard.grad is the same tensor", rank=rank)


# -- life -----------------------------------------------------------------------------------------
@exercise("3.15", "virtual", asserts="anew values life alone")
@use_of_freed_is_told()
def test_next_forward_begins_anew(impl, run, seed):
    """After a forward, then a backward that raised on all ranks: fresh values, right gradients."""

    check_begins_anew(run, seed, lambda inner: impl.FSDP(inner, list(inner.blocks)))


@exercise("3.15", "virtual", asserts="fixed-kinds refusals")
def test_changes_after_wrapping_are_refused(impl, run, seed):
    """A model that is frozen or cast after wrapping: forward raises ValueError on every rank."""

    def body(ctx):
        frozen, cast = (impl.FSDP(m, m.units()) for m in (net(seed), net(seed)))
        next(iter(frozen.parameters())).requires_grad_(False)
        cast.to(torch.float32)
        inputs = torch.zeros(1, 3, dtype=torch.float64)
        return [refusal(frozen, inputs), refusal(cast, inputs.float())]

    expect_refused(run(body, 2), ["frozen after wrapping", "cast after wrapping"])


@exercise("3.15", "virtual", asserts="training mean-added shards dtype parameters alone life twice")
@use_of_freed_is_told()
def test_two_models_of_mixed_dtypes_at_once(impl, run, seed):
    """Two models whose passes alternate; units of three dtypes, one runs twice; branches."""

    def body(ctx):
        inner = [Chain(seed), Chain(seed + 1)]
        models = [impl.FSDP(m, list(m.parts)) for m in inner]
        x = inputs_of(seed, ctx.rank)
        losses = [(model(x, ctx.rank == 1) ** 2).sum() for model in models]
        for loss in losses:
            loss.backward()
        squares = []
        for model in models:
            totals: dict[str, Tensor] = {}
            for shard in model.parameters():
                if shard.grad is not None:
                    name = f"{shard.grad.dtype}"
                    totals[name] = totals.get(name, 0.0) + shard.grad.double().square().sum()
            squares.append({name: float(total) for name, total in totals.items()})
        return squares

    results = run(body, 2)
    for number in range(2):
        want = mean_squares(seed, number)
        for name, right in want.items():
            got = sum(result[number].get(name, 0.0) for result in results)
            if abs(got - right) > 0.05 * right + 1e-9:
                fail(
                    f"model {number} of two: the squares of its mean gradient in {name} add up "
                    f"to {right:.6g}, got {got:.6g} from all shards",
                    cause="wrong-gradient",
                )
        names = sorted({name for result in results for name in result[number]})
        expect_equal(names, sorted(want), what="dtypes of gradients", cause="dtype")


def mean_squares(seed: int, number: int) -> dict[str, float]:
    """The squares of the mean gradient of two ranks, by dtype."""
    every = []
    for rank in range(2):
        alone = Chain(seed + number)
        (alone(inputs_of(seed, rank), rank == 1) ** 2).sum().backward()
        every.append([p.grad for p in alone.parameters() if p.requires_grad])
    found: dict[str, float] = {}
    for grads in zip(*every, strict=True):
        there = [g for g in grads if g is not None]
        mean = sum(g.double() for g in there) / 2
        name = f"{there[0].dtype}"
        found[name] = found.get(name, 0.0) + float(mean.square().sum())
    return found
