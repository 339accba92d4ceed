"""Checks of exercise 3.28: sharded state, saved and loaded by any number of ranks."""

from __future__ import annotations

import torch
import torch._dynamo  # torch.optim imports it when an optimizer is made: once here, not per rank

from distlab.grading import exercise, expect_equal, fail, trace
from tests.phase3.fsdp_models import Stack, net, values_of
from tests.phase3.fsdp_states import compare, refused, steps, wrapped


@exercise("3.28", "virtual gloo")
def test_training_goes_on_at_another_world_size(impl, run, seed):
    """Saved by 4 ranks, loaded by 2, 3 and 1, AdamW's moments too: as if nothing had happened."""

    def save(ctx):
        model, inner, optimizer = wrapped(impl, seed, offset=2.0)
        steps(model, optimizer, seed, 0, range(3))
        with ctx.region("save"):
            saved = impl.sharded_state_dict(model, optimizer)
        steps(model, optimizer, seed, 0, range(3, 5))
        values = values_of(model, inner)
        inner.offset.fill_(9.0)  # a copy was asked for
        return saved, values

    first = run(save, 4)
    saved, want = [r[0] for r in first], first[0][1]
    for log in first.logs:
        if log.select(region="save").events:
            fail("saving shards sent messages", cause="communicated")

    def load(ctx):
        model, inner, optimizer = wrapped(impl, seed + 1)
        impl.load_sharded_state_dict(model, iter(saved), optimizer)
        steps(model, optimizer, seed, 0, range(3, 5))
        return values_of(model, inner), inner.offset.clone()

    sizes = (3, 2, 1, 4)
    for world_size, results in zip(sizes, run.worlds(load, sizes), strict=True):
        for rank, (got, offset) in enumerate(results):
            what = f"saved by 4 ranks, trained on by {world_size}"
            expect_equal(offset.tolist(), [2.0, 2.0], what="the buffer when saved", cause="buffers")
            compare(got, want, what, rank, rtol=1e-9)


@exercise("3.28", "virtual")
def test_pieces_are_the_model_without_padding(impl, run, seed):
    """All pieces together have each element once; merged they are the plain state dict."""

    def body(ctx):
        model, inner, optimizer = wrapped(impl, seed, offset=2.0)
        saved = impl.sharded_state_dict(model, optimizer)
        return saved, values_of(model, inner)

    plain = net(seed)
    numel = sum(p.numel() for p in plain.parameters())
    results = run(body, 4)
    saved = [r[0] for r in results]
    count = sum(len(piece["values"]) for state in saved for piece in state["pieces"])
    expect_equal(count, numel, what="elements in the pieces of 4 ranks", cause="padding")

    def join(ctx):
        whole = impl.merge(saved)
        lacking = [refused(lambda k=k: impl.merge(saved[:k] + saved[k + 1 :])) for k in range(4)]
        model, inner, _ = wrapped(impl, seed + 1)
        before = values_of(model, inner)
        lost = refused(lambda: impl.load_sharded_state_dict(model, saved[1:]))
        return whole, lacking, lost, before, values_of(model, inner)

    whole, lacking, lost, before, after = run(join, 1)[0]
    same = all(torch.equal(after[name], before[name]) for name in before)
    plain.offset.fill_(2.0)
    compare(whole, plain.state_dict(), "merged")
    expect_equal(lacking, [True] * 4, what="merge refuses three of four states", cause="accepted")
    expect_equal(lost, True, what="loading refuses three of four states", cause="accepted")
    expect_equal(same, True, what="parameters unchanged", cause="half-loaded")


@trace("3.28")
def trace_sharded_state(impl):
    """Two steps, and shards that are saved and loaded again: no message."""

    def body(ctx):
        torch.manual_seed(0)
        inner = Stack(width=256)
        model = impl.module("fsdp").FSDP(inner, list(inner.layers))
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in ctx.steps(2):
            model(torch.ones(32, 2)).sum().backward()
            optimizer.step()
        saved = impl.sharded_state_dict(model, optimizer)
        pieces = sum(len(piece["values"]) for piece in saved["pieces"])
        print(f"rank {ctx.rank}: {len(saved['pieces'])} pieces of {pieces} elements")

    return body
