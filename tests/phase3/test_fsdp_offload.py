"""Checks of exercise 3.18: where everything is. On CPU ranks "meta" stands for the device."""

from __future__ import annotations

from functools import partial

import torch
import torch._dynamo  # torch.optim imports it when an optimizer is made: once here, not per rank
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from distlab.grading import exercise, expect_close, expect_equal, fail, trace
from distlab.observe.memory import PeakMemory, storage_bytes
from tests.phase3.fsdp_models import (
    DEPTH,
    ROOT,
    UNIT,
    WHOLE,
    Stack,
    batch,
    compare_training,
    loss_of,
    net,
    traced,
    train,
    use_of_freed_is_told,
)
from tests.phase3.raised import reworded


def prefetching(impl, inner: nn.Module, units: list[nn.Module]) -> nn.Module:
    return impl.module("fsdp_prefetch").PrefetchFSDP(inner, units, flat_type=impl.OffloadFlat)


@exercise("3.18", "virtual gloo", asserts="as-flat life parameters")
@use_of_freed_is_told()
def test_training_equals_one_process(impl, run, seed, cases):
    """Where everything is on the CPU, nothing changes: three steps with clipping, prefetching."""

    def body(ctx):
        inner = net(seed)
        model = prefetching(impl, inner, inner.units())
        return train(ctx, model, inner, seed, impl.module("fsdp").clip_by_global_norm)

    sizes = cases(3, 2, 1)
    for world_size, results in zip(sizes, run.worlds(body, sizes), strict=True):
        compare_training(results, seed, f"{world_size} ranks, 3 steps")


GROUPS = ((1, 3), (0, 2, 4))  # the second does other things meanwhile
KINDS = ("float64", "float32", "bfloat16", "int64")


def values_in(seed: int, which: int, dtype: str) -> tuple[Tensor, Tensor]:
    """Whole numbers: a transposed matrix and a scalar; integers above 2^53."""
    generator = torch.Generator().manual_seed(seed + which)
    matrix = torch.randint(-60, 60, (3 + which, 2), generator=generator)
    matrix = matrix + 2**53 + 1 if dtype == "int64" else matrix
    kind = getattr(torch, dtype)
    return matrix.to(kind).t(), torch.tensor(which + 3, dtype=kind)


@exercise(
    "3.18",
    "virtual gloo",
    asserts="as-flat shard-on-cpu full-on-device grad-on-cpu group dtype layout parameters alone "
    "life",
)
@reworded(
    "out of meta tensor",
    "the shard's values come from the device (meta stands for it, and has none): cut the shard on "
    "the CPU, where the parameters' values are",
    "device",
)
def test_vectors_in_a_group(impl, run, seed):
    """Every dtype, strided, frozen: gathered values, and the mean; one rank has no gradient."""

    def one(ctx, group, which, dtype):
        module = nn.Module()
        trainable = dtype != "int64"
        every = [nn.Parameter(v, trainable) for v in values_in(seed, which, dtype)]
        places = {p: [(module, f"p{k}", f"p{k}")] for k, p in enumerate(every)}
        flat = impl.OffloadFlat(places, group, ctx.device)
        seen, grads = [], []
        for _ in range(2):
            flat.start_gather()
            flat.finish_gather()
            seen.append([getattr(module, name).detach().clone() for name in ("p0", "p1")])
            flat.free()
            if trainable:
                shape = flat.leaves[0].shape
                whole = torch.full(shape, 2.0 + ctx.rank, dtype=flat.leaves[0].dtype)
                flat.leaves[0].grad = None if ctx.rank == 3 else whole
                flat.leaves[1].grad = torch.ones_like(flat.leaves[1])
            flat.start_reduce()
            flat.finish_reduce()
            gradient = flat.shard.grad
            grads.append(gradient.clone() if isinstance(gradient, Tensor) else None)
        kind = flat.shard.requires_grad, isinstance(flat.shard, nn.Parameter), flat.shard.is_leaf
        there = impl.OffloadFlat(places, group, torch.device("meta"))
        apart = there.shard.detach().clone(), str(there.full.device)
        nothing = {nn.Parameter(p.detach().to("meta"), trainable): a for p, a in places.items()}
        shard = impl.OffloadFlat(nothing, group, ctx.device).shard  # no values yet
        apart += (shard.numel(), str(shard.device), str(shard.dtype))
        return kind, flat.shard.detach().clone(), seen, grads, apart

    def body(ctx):
        groups = [dist.new_group(list(ranks)) for ranks in GROUPS]
        which = int(ctx.rank in GROUPS[1])
        return [one(ctx, groups[which], which, dtype) for dtype in KINDS]

    for rank, every in enumerate(run(body, 5)):
        for dtype, got in zip(KINDS, every, strict=True):
            judge_vector(got, seed, dtype, rank)


def judge_vector(got, seed: int, dtype: str, rank: int) -> None:
    which = int(rank in GROUPS[1])
    ranks = GROUPS[which]
    kind, shard, seen, grads, (of_meta, full, *deferred) = got
    trainable = dtype != "int64"
    values = values_in(seed, which, dtype)
    vector = torch.cat([v.flatten() for v in values])
    chunk = -(-len(vector) // len(ranks))
    mine = slice(ranks.index(rank) * chunk, (ranks.index(rank) + 1) * chunk)
    where = f"{dtype} on ranks {ranks}"
    what = f"{where}: shard is trainable, a Parameter, a leaf"
    expect_equal(kind, (trainable, True, True), what=what, rank=rank, cause="shard")
    exact = {"rank": rank, "rtol": 0.0, "atol": 0.0}
    wanted = [vector[mine], *values, *values]
    for value, want in zip([shard, *seen[0], *seen[1]], wanted, strict=True):
        right = f"torch.{dtype}"
        expect_equal(str(value.dtype), right, what=f"{where}: values", rank=rank, cause="dtype")
        expect_close(value, want, what=f"{where}: shard or gathered", **exact)
    what = f"{where}: the shard of parameters on the CPU, with a device elsewhere (meta)"
    expect_close(of_meta, vector[mine], what=what, **exact)
    expect_equal(full, "meta", what=f"{where}: the device of full then", rank=rank, cause="device")
    what = f"{where}: elements, device and dtype of the shard of parameters on meta"
    right = [len(vector[mine]), "cpu", f"torch.{dtype}"]
    expect_equal(deferred, right, what=what, rank=rank, cause="meta")
    if not trainable:
        expect_equal(grads, [None, None], what=f"{where}: gradients", rank=rank, cause="frozen")
        return
    parts = []
    for each in ranks:
        gradient = torch.full((values[0].numel() + 1,), 2.0 + each, dtype=torch.float64)
        gradient[:-1] *= each != 3
        gradient[-1] = 1
        parts.append(gradient[mine])
    for times, gradient in enumerate(grads, 1):
        what = f"{where}: gradient after {times} reductions"
        if gradient is None:
            fail(f"{what}: there is none", cause="missing", rank=rank)
        right = f"torch.{dtype}"
        expect_equal(str(gradient.dtype), right, what=f"{what}: dtype", rank=rank, cause="dtype")
        want = torch.stack(parts).mean(0) * times
        known = {"contributions": parts} if times == 1 else {}
        near = 1e-2 if dtype == "bfloat16" else 1e-6
        expect_close(gradient.double(), want, what=what, rank=rank, rtol=near, atol=0, **known)


def devices_after_a_step(impl, device, width: int = 64) -> dict[str, list[str]]:
    """The devices of shards, gradients and moments, and of the parameters in a unit's forward."""
    seen: list[str] = []
    inner = Stack(width).to(device)
    inner.layers[2].requires_grad_(False)
    inner.outside.double()
    inner.outside.register_forward_pre_hook(lambda _, args: (args[0].double(),))
    model = impl.module("fsdp").FSDP(inner, list(inner.layers), flat_type=impl.OffloadFlat)
    for layer in inner.layers:
        layer.tell = lambda point, layer=layer: seen.append(layer.linear.weight.device.type)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2, device=device)).sum().backward()
    optimizer.step()
    shards = list(model.parameters())
    return {
        "full parameters": sorted(set(seen)),
        "shards": sorted({s.device.type for s in shards}),
        "gradients": sorted({s.grad.device.type for s in shards if s.grad is not None}),
        "frozen shards": sorted({s.device.type for s in shards if not s.requires_grad}),
        "moments": sorted({e["exp_avg"].device.type for e in optimizer.state.values()}),
    }


def judge_devices(results, device: str) -> None:
    for rank, got in enumerate(results):
        if not got["frozen shards"]:
            text = f"rank {rank} has no frozen shard, though a layer is frozen"
            fail(f"{text}: a shard is trainable if its parameters are", cause="frozen", rank=rank)
        for what, types in got.items():
            want = [device if what == "full parameters" else "cpu"]
            where = "the device (meta stands for it)" if device == "meta" else "the device"
            expect_equal(types, want, what=f"{what}, with {where}", rank=rank, cause="device")


@exercise(
    "3.18", "virtual", asserts="shard-on-cpu full-on-device grad-on-cpu state-with-shards dtype"
)
@use_of_freed_is_told()
def test_everything_is_where_it_should_be(impl, run, seed):
    """Shards, gradients and moments on the CPU, a unit's parameters on the device."""
    results = run(lambda ctx: devices_after_a_step(impl, "meta"), 3, compute="roofline")
    judge_devices(results, "meta")


@exercise("3.18", "cuda", asserts="pinned shard-on-cpu complete")
@use_of_freed_is_told()
def test_everything_is_where_it_should_be_on_a_gpu(impl, run, seed):
    """The same with a GPU, and shards in pinned memory."""

    def body(ctx):
        got = devices_after_a_step(impl, ctx.device)
        inner = Stack().to(ctx.device)
        model = impl.module("fsdp").FSDP(inner, list(inner.layers), flat_type=impl.OffloadFlat)
        pinned = all(shard.is_pinned() for shard in model.parameters() if shard.numel())
        flat = impl.OffloadFlat({nn.Parameter(torch.ones(8)): []}, None, ctx.device)
        flat.leaves[0].grad = torch.full((8,), 3.0, device=ctx.device)
        flat.start_reduce()
        torch.cuda._sleep(10**9)  # cycles: a copy that nobody waits for comes later
        flat.finish_reduce()
        return got, pinned, flat.shard.grad.tolist()

    results = run(body, 2)
    judge_devices([r[0] for r in results], "cuda")
    for rank, (_, pinned, gradient) in enumerate(results):
        expect_equal(pinned, True, what="shards are pinned", rank=rank, cause="not-pinned")
        what = "the gradient on the CPU, read at once"
        expect_equal(gradient, [3.0] * 4, what=what, rank=rank, cause="not-complete")


class Crossings(TorchDispatchMode):
    """Count the bytes that are copied from the CPU to the device (meta) and back."""

    def __init__(self) -> None:
        super().__init__()
        self.to_device = self.to_cpu = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in ("_to_copy", "copy_") and isinstance(out, Tensor):
            source = args[1] if name == "copy_" else args[0]
            if source.is_meta != out.is_meta:
                self.to_device += out.nbytes * out.is_meta
                self.to_cpu += out.nbytes * source.is_meta
        return out


@exercise("3.18", "virtual", asserts="bus as-flat cost")
@use_of_freed_is_told()
def test_only_shards_cross_the_bus(impl, run, seed):
    """Per step two shards go to the device and one comes back: 3·4Ψ/W bytes."""

    def body(ctx):
        inner = Stack().to("meta")
        model = impl.module("fsdp").FSDP(inner, list(inner.layers), flat_type=impl.OffloadFlat)
        inputs = torch.ones(1, 2, device="meta")
        model(inputs).sum().backward()
        model.zero_grad()
        with Crossings() as bus, ctx.region("step"):
            model(inputs).sum().backward()
        return [bus.to_device, bus.to_cpu]

    world_size = 4
    results = run(body, world_size, compute="roofline")
    padding = 4 * (DEPTH + 1) * world_size
    for rank, (there, back) in enumerate(results):
        for what, got, times in (("to the device", there, 2), ("to the CPU", back, 1)):
            limit = times * (WHOLE / world_size + padding)
            if got > limit or got < times * (WHOLE / world_size - padding):
                fail(
                    f"rank {rank} copies {got:,} B {what} in a step, expected about {limit:,.0f} "
                    f"B = {times}·4Ψ/W: the shards, and neither full parameters nor nothing",
                    cause="bus",
                    rank=rank,
                )
    for log in results.logs:
        share = (world_size - 1) / world_size * 3 * WHOLE
        log.select(region="step").sent_at_most(share + 3 * padding, "3(W-1)/W·P, as before")


class OnDevice(PeakMemory):
    """Follow the bytes on the device (meta) alone."""

    def _made(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        if storage.device.type == "meta":
            super()._made(storage, nbytes)


@exercise("3.18", "virtual", asserts="nothing-between resources")
@use_of_freed_is_told()
def test_device_keeps_nothing(impl, run, seed):
    """Between steps nothing that was made since wrapping has bytes on the device."""

    def body(ctx):
        inner = Stack().to("meta")
        inputs = torch.ones(1, 2, device="meta")
        with OnDevice() as memory:
            model = impl.module("fsdp").FSDP(inner, list(inner.layers), flat_type=impl.OffloadFlat)
            optimizer = torch.optim.Adam(model.parameters())
            model(inputs).sum().backward()
            optimizer.step()
            on_device = memory.current
        return on_device, storage_bytes(model.parameters())

    world_size = 4
    for rank, (device, cpu) in enumerate(run(body, world_size, compute="roofline")):
        if device:
            fail(
                f"rank {rank} keeps {device:,} B on the device between steps (a unit has {UNIT:,} "
                f"B, the root {ROOT:,} B)",
                cause="too-much-memory",
                rank=rank,
            )
        limit = WHOLE / world_size + 4 * (DEPTH + 1)
        if cpu > limit:
            fail(f"rank {rank} keeps {cpu:,} B of shards", cause="too-much-memory", rank=rank)


@exercise("3.18", "virtual", asserts="grad-on-cpu complete parameters life")
@use_of_freed_is_told()
def test_accumulation_stays_on_the_cpu(impl, run, seed):
    """A second backward adds to the gradient on the CPU; frozen parameters have none."""

    def body(ctx):
        inner = net(seed)
        model = impl.module("fsdp").FSDP(inner, inner.units(), flat_type=impl.OffloadFlat)
        pair = batch(seed, ctx.rank)
        grads = []
        for _ in range(2):
            loss_of(model, pair).backward()
            grads.append([s.grad.clone() for s in model.parameters() if s.grad is not None])
        return *grads, sum(s.numel() for s in model.parameters() if s.requires_grad)

    results = run(body, 2)
    trainable = sum(p.numel() for p in net(seed).parameters() if p.requires_grad)
    expect_equal(
        sum(r[2] for r in results), trainable, what="elements that are trainable", cause="frozen"
    )
    for rank, (once, twice, _) in enumerate(results):
        pairs = zip(once, twice, strict=True)
        off = max(float((b - 2 * a).abs().max()) for a, b in pairs if len(a))
        if off > 1e-9:
            fail(f"two equal backward passes differ by {off} from twice one", rank=rank)


@trace("3.18", measures="hidden")
def trace_offload(impl):
    """Two steps of a small GPT; on a CPU the copies are none."""
    return traced(partial(prefetching, impl))
