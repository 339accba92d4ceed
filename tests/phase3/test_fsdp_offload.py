"""Checks of exercise 3.18: where everything is. On CPU ranks "meta" stands for the device."""

from __future__ import annotations

from functools import partial

import torch
import torch._dynamo  # torch.optim imports it when an optimizer is made: once here, not per rank
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from distlab.grading import exercise, expect_equal, fail, trace
from distlab.observe.memory import storage_bytes
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


def prefetching(impl, inner: nn.Module, units: list[nn.Module]) -> nn.Module:
    return impl.module("fsdp_prefetch").PrefetchFSDP(inner, units, flat_type=impl.OffloadFlat)


@exercise("3.18", "virtual gloo")
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


def devices_after_a_step(impl, device, width: int = 64) -> dict[str, list[str]]:
    """Where shards, gradients and moments are, and what a unit's forward sees."""
    seen: list[str] = []
    inner = Stack(width).to(device)
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
        "gradients": sorted({s.grad.device.type for s in shards}),
        "moments": sorted({e["exp_avg"].device.type for e in optimizer.state.values()}),
    }


def judge_devices(results, device: str) -> None:
    for rank, got in enumerate(results):
        for what, types in got.items():
            want = [device if what == "full parameters" else "cpu"]
            where = "the device (meta stands for it)" if device == "meta" else "the device"
            expect_equal(types, want, what=f"{what}, with {where}", rank=rank, cause="device")


@exercise("3.18", "virtual")
@use_of_freed_is_told()
def test_everything_is_where_it_should_be(impl, run, seed):
    """Shards, gradients and moments on the CPU, a unit's parameters on the device."""
    results = run(lambda ctx: devices_after_a_step(impl, "meta"), 3, compute="roofline")
    judge_devices(results, "meta")


@exercise("3.18", "cuda")
@use_of_freed_is_told()
def test_everything_is_where_it_should_be_on_a_gpu(impl, run, seed):
    """The same with a GPU, and shards in pinned memory."""

    def body(ctx):
        got = devices_after_a_step(impl, ctx.device)
        inner = Stack().to(ctx.device)
        model = impl.module("fsdp").FSDP(inner, list(inner.layers), flat_type=impl.OffloadFlat)
        pinned = all(shard.is_pinned() for shard in model.parameters() if shard.numel())
        return got, pinned

    results = run(body, 2)
    judge_devices([r[0] for r in results], "cuda")
    for rank, (_, pinned) in enumerate(results):
        expect_equal(pinned, True, what="shards are pinned", rank=rank, cause="not-pinned")


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


@exercise("3.18", "virtual")
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


@exercise("3.18", "virtual")
@use_of_freed_is_told()
def test_device_keeps_nothing(impl, run, seed):
    """Between steps no parameter, gradient or moment has bytes on the device."""

    def body(ctx):
        inner = Stack().to("meta")
        model = impl.module("fsdp").FSDP(inner, list(inner.layers), flat_type=impl.OffloadFlat)
        optimizer = torch.optim.Adam(model.parameters())
        model(torch.ones(1, 2, device="meta")).sum().backward()
        optimizer.step()
        held = [*model.parameters(), *(s.grad for s in model.parameters())]
        held += [value for entry in optimizer.state.values() for value in entry.values()]
        held += [flat.full for unit in model.units for flat in unit.flats]
        on_device = sum(t.untyped_storage().nbytes() for t in held if t.is_meta)
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


@exercise("3.18", "virtual")
@use_of_freed_is_told()
def test_accumulation_stays_on_the_cpu(impl, run, seed):
    """A second backward adds to the gradient on the CPU; what is frozen has none."""

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


@trace("3.18")
def trace_offload(impl):
    """Two steps of a small GPT; on a CPU the copies are none."""
    return traced(partial(prefetching, impl))
