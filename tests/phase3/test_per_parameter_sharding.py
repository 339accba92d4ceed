"""Checks of exercise 3.32: rows of every parameter, and all that a parameter is good for."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch._dynamo  # torch.optim imports it when an optimizer is made: once here, not per rank
import torch.distributed as dist
from torch import Tensor, nn

from distlab.grading import exercise, expect_close, expect_equal, fail
from tests.phase3.fsdp_branches import Chain, change_often, changing, inputs_of
from tests.phase3.fsdp_models import (
    FROZEN,
    batch,
    compare_training,
    loss_of,
    net,
    own_gradients,
    train,
    use_of_freed_is_told,
    values_of,
)
from tests.phase3.fsdp_states import Trouble, check_begins_anew, odds, raise_once

SHAPES = ((5, 3), (2, 2, 2), (7,), (1, 4), (0, 3), ())
NEAR = {"rtol": 1e-9, "atol": 1e-10}


def clip(model: nn.Module, max_norm: float) -> Tensor:
    """The norm over all ranks' shards, as exercise 3.15 clips."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    nothing = next(model.parameters()).detach().new_zeros((), dtype=torch.float64)
    norm = sum((g.double().square().sum() for g in gradients), nothing)
    dist.all_reduce(norm, group=model.group)
    norm.sqrt_()
    for gradient in gradients:
        gradient *= torch.clamp(max_norm / norm, max=1.0)
    return norm


def joined(parts: list[dict[str, Tensor]], like: dict[str, Tensor]) -> dict[str, Tensor]:
    """The ranks' rows, one after the other, in the shapes of the plain module."""
    found = {}
    for name, value in like.items():
        rows = torch.cat([part[name] for part in parts])
        found[name] = rows.view(value.shape) if rows.numel() == value.numel() else rows
    return found


# -- rows -----------------------------------------------------------------------------------------
@exercise("3.32", "virtual", asserts="rows view no-dimension joined layout")
def test_rows_of_each_rank(impl, run):
    """Rank r has rows r·R to (r+1)·R: a view with all dimensions; joined, the parts are whole."""

    def body(ctx):
        found = []
        for shape in SHAPES:
            whole = torch.arange(float(torch.Size(shape).numel())).view(shape)
            whole = whole.t().contiguous().t() if whole.dim() == 2 else whole
            for world_size in (1, 2, 3, 5):
                parts = [impl.own_rows(whole, rank, world_size) for rank in range(world_size)]
                memory = {p.untyped_storage().data_ptr() for p in parts if p.numel()}
                same = memory <= {whole.untyped_storage().data_ptr()}
                found.append(([(list(p.shape), p.flatten().tolist()) for p in parts], same))
        return found

    found = iter(run(body, 1)[0])
    for shape in SHAPES:
        whole = torch.arange(float(torch.Size(shape).numel())).reshape(shape or (1,))
        for world_size in (1, 2, 3, 5):
            parts, same = next(found)
            most = -(-len(whole) // world_size)
            for rank, got in enumerate(parts):
                want = whole[rank * most : (rank + 1) * most]
                what = f"shape and elements of the rows of rank {rank} of {world_size}, of {shape}"
                right = list(want.shape), want.flatten().tolist()
                expect_equal(got, right, what=what, cause="other-rows")
            if not same:
                fail(f"the rows of {shape} are copies, expected views", cause="copied")


@exercise("3.32", "virtual gloo", asserts="shard names order state dtype layout row-major")
def test_shards_have_the_parameters_names(impl, run, seed):
    """Names, order and dtypes of the plain module; the ranks' state dicts, joined, are its own."""

    def body(ctx):
        plain, inner = odds(seed), odds(seed)
        impl.PerParameterFSDP(inner, inner.units())
        names = [[name for name, _ in m.named_parameters()] for m in (plain, inner)]
        tied = all(part.tied is part.wide for part in (inner.root, inner.one, inner.two))
        kept = [p.requires_grad for p in inner.parameters()]
        state = {name: value.clone() for name, value in inner.state_dict().items()}
        small = all(p.untyped_storage().nbytes() <= p.nbytes for p in inner.parameters())
        strides = [name for name, p in inner.named_parameters() if not p.is_contiguous()]
        return names, tied, kept, state, small, strides

    alone = odds(seed)
    parameters = dict(alone.named_parameters(remove_duplicate=False))
    results = run(body, 3)
    for rank, (names, tied, kept, state, small, strides) in enumerate(results):
        expect_equal(names[1], names[0], what="names of the shards", rank=rank, cause="names")
        expect_equal(tied, True, what="tied parameters are one", rank=rank, cause="untied")
        right = [p.requires_grad for p in alone.parameters()]
        expect_equal(kept, right, what="trainable ones", rank=rank, cause="frozen")
        expect_equal(small, True, what="shards own just their rows", rank=rank, cause="kept-alive")
        what = "shards that are not in row-major order"
        expect_equal(strides, [], what=what, rank=rank, cause="other-order")
        right = list(alone.state_dict())
        expect_equal(list(state), right, what="names in the state", rank=rank, cause="names")
    states = [result[3] for result in results]
    whole = joined(states, {n: p.detach() for n, p in parameters.items()})
    for name, value in alone.state_dict().items():
        got = whole[name] if name in parameters else states[1][name]
        kind, right = (got.dtype, got.shape), (value.dtype, value.shape)
        expect_equal(kind, right, what=f"dtype and shape of {name}, joined", cause="dtype-or-shape")
        expect_equal(torch.equal(got, value), True, what=f"{name}, joined, is equal to the plain")


# -- values ---------------------------------------------------------------------------------------
@exercise("3.32", "virtual gloo cuda", asserts="training values mean-added shard unused")
@use_of_freed_is_told()
def test_first_step_moves_by_the_mean_gradient(impl, run, seed, cases):
    """One step of SGD moves every full parameter by the mean of the ranks' gradients."""

    def body(ctx):
        inner = net(seed, ctx.device)
        model = impl.PerParameterFSDP(inner, inner.units())
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0, weight_decay=0.0)
        loss = loss_of(model, batch(seed, ctx.rank, device=ctx.device))
        seen = {name: value.cpu() for name, value in inner.values().items()}
        loss.backward()
        optimizer.step()
        return seen, values_of(model, inner), inner.unused.weight.grad is None

    plain, sizes = net(seed), cases(3, 5, 1, 2, 4)
    before, own = values_of(plain, plain), own_gradients(seed, range(max(sizes)))
    for world_size, results in zip(sizes, run.worlds(body, sizes), strict=True):
        for rank, (seen, after, none) in enumerate(results):
            what = "a unit that no rank uses has no gradient"
            expect_equal(none, True, what=what, rank=rank, cause="unused")
            for name, value in before.items():
                what = f"{world_size} ranks: {name} in the first forward"
                expect_close(seen[name], value, what=what, rank=rank, rtol=0, atol=0)
            for name, value in before.items():
                same = name.replace("second.weight", "first.weight")
                zeros = torch.zeros_like(value)
                parts = [part.get(same, zeros) for part in own[:world_size]]
                want, what = torch.stack(parts).mean(0), f"{world_size} ranks: step of {name}"
                moved = value - after[name]
                expect_close(moved, want, what=what, rank=rank, contributions=parts, **NEAR)


@exercise("3.32", "virtual gloo cuda", asserts="training mean-added values life done")
@use_of_freed_is_told()
def test_training_equals_one_process(impl, run, seed, cases):
    """AdamW, clipping, accumulation, evaluation between the steps: as one process on all data."""

    def body(ctx):
        inner = net(seed, ctx.device)
        model = impl.PerParameterFSDP(inner, [] if ctx.world_size == 2 else inner.units())
        return train(ctx, model, inner, seed, clip)

    sizes = cases(3, 2, 5, 1)
    for world_size, results in zip(sizes, run.worlds(body, sizes), strict=True):
        compare_training(results, seed, f"{world_size} ranks, 3 steps")


def decayed(named: Any) -> torch.optim.Optimizer:
    """AdamW that shrinks matrices only, by the names of the parameters."""
    groups: dict[float, list[Tensor]] = {0.0: [], 0.5: []}
    for name, parameter in named:
        groups[0.0 if name.endswith(("bias", "shift")) else 0.5].append(parameter)
    decays = [{"params": group, "weight_decay": decay} for decay, group in groups.items()]
    return torch.optim.AdamW(decays, lr=0.05)


FREEZING = ("", "blocks.0", "blocks.2.second", "")  # what is frozen in each step
THAWED = "blocks.1.frozen.weight"


def freeze_in_turn(model: nn.Module, inner: Any, pairs: Any) -> dict[str, Any]:
    """A step for each of FREEZING. Gradients are forgotten before the freezing, but not all."""
    optimizer = decayed(inner.named_parameters())
    for number, part in enumerate(FREEZING):
        for name, parameter in inner.named_parameters():
            still = FROZEN in name and not (number and name == THAWED)
            parameter.requires_grad_(not still and not (part and name.startswith(part)))
            if parameter.requires_grad or number == 2:
                parameter.grad = None
        loss_of(model, pairs(number)).backward()
        optimizer.step()
    names = {parameter: name for name, parameter in inner.named_parameters()}
    state = {names[p]: each["exp_avg"].clone() for p, each in optimizer.state.items()}
    return {"values": values_of(model, inner), "state": state}


@exercise("3.32", "virtual gloo", asserts="groups freezing frozen-kept state parameters life")
@use_of_freed_is_told()
def test_groups_and_freezing(impl, run, seed):
    """Weight decay by name; parameters are frozen and thawed between steps; Adam's state by name.

    In one step the stale gradient of what was frozen stays, and is stepped as on one process.
    """

    def body(ctx):
        inner = net(seed)
        model = impl.PerParameterFSDP(inner, inner.units())
        return freeze_in_turn(model, inner, lambda number: batch(seed, ctx.rank, number))

    def whole(number: int) -> tuple[Tensor, ...]:
        pairs = [batch(seed, rank, number) for rank in range(3)]
        return tuple(torch.cat(parts) for parts in zip(*pairs, strict=True))

    alone = net(seed)
    want = freeze_in_turn(alone, alone, whole)
    results = run(body, 3)
    for rank, got in enumerate(results):
        for name, value in want["values"].items():
            what = f"{name} after steps in which {FREEZING} were frozen"
            expect_close(got["values"][name], value, what=what, rank=rank, rtol=1e-6, atol=1e-8)
        names = sorted(got["state"])
        right = sorted(want["state"])
        expect_equal(names, right, what="parameters with state", rank=rank, cause="state")
    moments = joined([got["state"] for got in results], want["state"])
    for name, value in want["state"].items():
        what = f"Adam's first moment of {name}, the ranks' rows joined"
        expect_close(moments[name], value, what=what, rtol=1e-6, atol=1e-9)


@exercise("3.32", "virtual", asserts="group mean-added")
@use_of_freed_is_told()
def test_the_mean_is_over_the_group(impl, run):
    """Two groups of unequal sizes: gradients are divided by the ranks of the own group."""

    def body(ctx):
        groups = [dist.new_group(ranks) for ranks in ([0, 2], [1])]
        inner = nn.Linear(1, 2, bias=False)
        model = impl.PerParameterFSDP(inner, group=groups[ctx.rank % 2])
        model(torch.full((1, 1), 1.0 + ctx.rank)).sum().backward()
        return inner.weight.grad

    for rank, got in enumerate(run(body, 3)):
        want = torch.full((1 + rank % 2, 1), 2.0)
        what = "the mean gradient in the groups [0, 2] and [1], where rank r has r + 1"
        expect_close(got, want, what=what, rank=rank)


@exercise("3.32", "virtual", asserts="group values unused order-no-value life")
@use_of_freed_is_told()
def test_another_order_costs_no_value(impl, run, seed):
    """In a group: units run in another order with every forward, twice, or not at all."""

    def body(ctx):
        groups = [dist.new_group([3, 1]), dist.new_group([0, 2])]
        inner = changing(seed)
        group = groups[ctx.rank % 2 == 0]
        model = impl.PerParameterFSDP(inner, inner.units(), group=group)
        return change_often(model, inner, seed, range(ctx.rank, ctx.rank + 1))

    want = []
    for ranks in (range(0, 4, 2), range(1, 4, 2)):
        alone = changing(seed)
        want.append(change_often(alone, alone, seed, ranks))
    results = run(body, 4)
    for rank, got in enumerate(results):
        for name, value in want[rank % 2].items():
            what = f"{name} after steps with units in changing order"
            expect_close(got[name], value, what=what, rank=rank, rtol=1e-6, atol=1e-8)
    for log in results.logs:
        log.all_waited()


@exercise("3.32", "virtual", asserts="training mean-added zero-filled dtype parameters alone life")
@use_of_freed_is_told()
def test_two_models_of_mixed_dtypes_at_once(impl, run, seed):
    """Two models whose passes alternate; units of three dtypes; a gradient on one rank alone."""

    def body(ctx):
        inner = [Chain(seed), Chain(seed + 1)]
        models = [impl.PerParameterFSDP(m, list(m.parts)) for m in inner]
        x = inputs_of(seed, ctx.rank)
        losses = [(model(x, ctx.rank == 1) ** 2).sum() for model in models]
        for loss in losses:
            loss.backward()
        return [
            {name: p.grad for name, p in m.named_parameters() if p.grad is not None} for m in inner
        ]

    results = run(body, 2)
    for number in range(2):
        every = []
        for rank in range(2):
            alone = Chain(seed + number)
            (alone(inputs_of(seed, rank), rank == 1) ** 2).sum().backward()
            named = alone.named_parameters()
            every.append({n: p.grad for n, p in named if p.requires_grad})
        like = {name: grad for name, grad in every[1].items() if grad is not None}
        for rank, result in enumerate(results):
            names = sorted(result[number])
            what = f"model {number}: parameters with a gradient"
            expect_equal(names, sorted(like), what=what, rank=rank, cause="no-gradient")
        found = joined([result[number] for result in results], like)
        for name, grad in like.items():
            other = torch.zeros_like(grad) if every[0][name] is None else every[0][name]
            near = {torch.bfloat16: 0.05, torch.float32: 1e-4, torch.float64: 1e-4}[grad.dtype]
            what = f"model {number}: mean gradient of {name}"
            want = ((grad.double() + other.double()) / 2).to(grad.dtype)
            expect_close(found[name], want, what=what, rtol=near, atol=near * grad.abs().max())


# -- accumulation and life ------------------------------------------------------------------------
@exercise("3.32", "virtual gloo", asserts="unsent sum nested restored life")
@use_of_freed_is_told()
def test_accumulation_without_messages(impl, run, seed):
    """Backward in no_sync sends no gradient; the next one outside adds the mean of the sums."""

    def body(ctx):
        inner = changing(seed)
        model = impl.PerParameterFSDP(inner, inner.units())
        with ctx.region("unsent"):
            with model.no_sync():
                loss_of(model, batch(seed, ctx.rank, 0)).backward()
                with contextlib.suppress(Trouble), model.no_sync():
                    raise Trouble("inside")
                values_of(model, inner)  # an evaluation
                loss_of(model, batch(seed, ctx.rank, 1)).backward()
            none = all(p.grad is None for p in model.parameters())
        inner.plan = (0,)  # the other blocks' gradients wait since the first passes
        with contextlib.suppress(Trouble), model.no_sync():
            raise Trouble("the setting before must be back")
        loss_of(model, batch(seed, ctx.rank, 2)).backward()
        torch.optim.SGD(model.parameters(), lr=1.0).step()
        inner.plan = (0, 1, 2)
        return none, values_of(model, inner)

    alone = changing(seed)
    before = values_of(alone, alone)
    for number in range(3):
        alone.plan = (0,) if number == 2 else (0, 1, 2)
        for rank in range(3):
            (loss_of(alone, batch(seed, rank, number)) / 3).backward()
    torch.optim.SGD(alone.parameters(), lr=1.0).step()
    alone.plan = (0, 1, 2)
    want = values_of(alone, alone)
    results = run(body, 3)
    for rank, (none, got) in enumerate(results):
        log = results.logs[rank].select(region="unsent")
        others = sorted({event.op for event in log.events} - {"all_gather"})
        what = "collectives in no_sync beside all-gathers"
        expect_equal(others, [], what=what, rank=rank, cause="sent")
        expect_equal(none, True, what="shards without a gradient", rank=rank, cause="sent")
        for name, value in want.items():
            moved, right = before[name] - got[name], before[name] - value
            what = f"step of {name} after two passes in no_sync and one outside"
            expect_close(moved, right, what=what, rank=rank, **NEAR)


@exercise("3.32", "virtual", asserts="forgets anew life")
@use_of_freed_is_told()
def test_raised_backward_is_forgotten(impl, run, seed):
    """After a backward in no_sync that raised nothing of what was not sent counts any more."""

    def body(ctx):
        inner = net(seed)
        model = impl.PerParameterFSDP(inner, inner.units())
        with model.no_sync():
            loss_of(model, batch(seed, ctx.rank, 1)).backward()
            hook = raise_once(inner.blocks[0], "backward")
            with contextlib.suppress(Trouble):
                loss_of(model, batch(seed, ctx.rank, 2)).backward()
            hook.remove()
        loss_of(model, batch(seed, ctx.rank)).backward()
        torch.optim.SGD(model.parameters(), lr=1.0).step()
        return values_of(model, inner)

    plain, own = net(seed), own_gradients(seed, range(2))
    before = values_of(plain, plain)
    for rank, after in enumerate(run(body, 2)):
        for name, value in before.items():
            same = name.replace("second.weight", "first.weight")
            parts = [part.get(same, torch.zeros_like(value)) for part in own]
            what = f"step of {name} after a backward in no_sync that raised"
            want, moved = torch.stack(parts).mean(0), value - after[name]
            expect_close(moved, want, what=what, rank=rank, contributions=parts, **NEAR)


@exercise("3.32", "virtual", asserts="anew values life alone")
@use_of_freed_is_told()
def test_next_forward_begins_anew(impl, run, seed):
    """After a forward, then a backward that raised on all ranks: fresh values, right gradients."""
    check_begins_anew(run, seed, lambda inner: impl.PerParameterFSDP(inner, list(inner.blocks)))
