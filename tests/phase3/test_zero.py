"""Checks of exercise 3.13: the optimizer's state on one rank each, everything else as before."""

from __future__ import annotations

import copy

import torch
import torch._dynamo  # torch.optim imports it when an optimizer is made: once here, not per rank
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer

from distlab.grading import exercise, expect_equal, expect_refused, fail, refusal, trace
from distlab.observe.memory import held_by
from tests.phase3.zero_models import (
    AT_THE_START,
    BUCKET,
    MATRIX,
    WHOLE,
    Equal,
    awkward,
    bystanders_of,
    compare,
    groups_of,
    judge_bystanders,
    judge_dtypes,
    mean_gradients,
    refused_at_the_start,
    steps_in_three_dtypes,
    traced,
    values_of,
    with_bystanders,
)

OPTIMIZERS = {
    "AdamW": (torch.optim.AdamW, {"lr": 0.05}),
    "SGD": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True}),
}


def train(model, optimizer, seed, world_size, device="cpu", steps=3, first=0):
    """``steps`` steps with a learning rate that falls, on the mean gradients of all ranks."""
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    for step in range(first, first + steps):
        optimizer.zero_grad()
        mean_gradients(model, seed, world_size, step, device)
        optimizer.step()
        schedule.step()
    return values_of(model)


@exercise("3.13", "virtual gloo cuda")
def test_training_equals_one_process(impl, run, seed, cases):
    """Groups, a schedule, odd, tied, frozen and unused parameters: as the plain optimizer."""

    def body(ctx):
        out = {}
        for name, (kind, options) in OPTIMIZERS.items():
            model = awkward(seed, ctx.device)
            optimizer = impl.ZeroOptimizer(groups_of(model), kind, bucket_bytes=BUCKET, **options)
            given = values_of(model)
            out[name] = given, train(model, optimizer, seed, ctx.world_size, ctx.device)
        return out

    sizes = cases(3, 2, 5, 1, 4)
    for world_size, results in zip(sizes, run.worlds(body, sizes), strict=True):
        for name, (kind, options) in OPTIMIZERS.items():
            alone = awkward(seed)
            before = values_of(alone)
            want = train(alone, kind(groups_of(alone), **options), seed, world_size)
            for rank, got in enumerate(results):
                judge(*got[name], results[0][name][1], before, rank)
            for rank, got in enumerate(results):
                compare(got[name][1], want, f"{world_size} ranks, {name}", rank)


def judge(given, got, first, before, rank):
    """Mistakes that have a name: values lost, ranks that differ, nothing trained, unused moved."""
    lost = [name for name in before if not torch.equal(given[name], before[name])]
    if lost:
        fail(
            f"making the optimizer has changed {', '.join(lost)}: copy the values into the vector "
            "before the parameters become its views",
            cause="values-lost",
            rank=rank,
        )
    still = [name for name in before if torch.equal(got[name], before[name])]
    if len(still) == len(before):
        fail(
            "training changes no parameter of the model: the optimizer steps on tensors that the "
            "model does not use",
            cause="not-trained",
            rank=rank,
        )
    for name in ("unused", "frozen.weight"):
        if name not in still:
            fail(f"{name} has no gradient and moved", cause="moved", rank=rank)
    unlike = [name for name in got if not torch.equal(got[name], first[name])]
    if unlike:
        fail(
            f"after training {', '.join(unlike)} differ from rank 0's: everybody's updated part "
            "must reach everybody",
            cause="ranks-differ",
            rank=rank,
        )


@exercise("3.13", "virtual")
def test_users_groups_are_obeyed(impl, run, seed):
    """A learning rate of 0, written to ``param_groups``, stops its group and only this."""

    def body(ctx):
        model = awkward(seed)
        optimizer = impl.ZeroOptimizer(groups_of(model), torch.optim.SGD, lr=0.1)
        optimizer.param_groups[1]["lr"] = 0.0
        before = values_of(model)
        mean_gradients(model, seed, 2, 0)
        optimizer.step()
        return before, values_of(model)

    want = ["inside.weight", "first.weight", "head.weight"]
    for rank, (before, after) in enumerate(run(body, 2)):
        got = [name for name, p in after.items() if not torch.equal(p, before[name])]
        expect_equal(got, want, what="what moves", rank=rank, cause="rate-ignored")


@exercise("3.13", "gloo")
def test_equals_torchs_sharded_optimizer(impl, run, seed):
    """The same parameters as torch's ZeroRedundancyOptimizer."""

    def trained(make):
        model = Equal()
        optimizer = make(model.parameters(), torch.optim.Adam, lr=0.01)
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(1, 32)).sum().backward()
            optimizer.step()
        return values_of(model)

    def body(ctx):
        return trained(impl.ZeroOptimizer)

    def reference(ctx):
        return trained(ZeroRedundancyOptimizer)

    results = run(body, 2)
    for rank, want in enumerate(run(reference, 2)):
        for name, value in want.items():
            if not torch.allclose(results[rank][name], value, rtol=1e-5, atol=1e-7):
                fail(f"{name} differs from torch's", cause="unlike-torch", rank=rank)


@exercise("3.13", "virtual gloo")
def test_state_is_one_part_of_w(impl, run, seed):
    """Adam's moments take 8Ψ/W bytes on every rank, parameters and gradients stay 4Ψ each."""

    def body(ctx):
        model = Equal()
        optimizer = impl.ZeroOptimizer(model.parameters(), torch.optim.Adam, bucket_bytes=MATRIX)
        model(torch.ones(1, 32)).sum().backward()
        optimizer.step()
        held = held_by(model, optimizer)
        return [held.parameters, held.gradients, held.optimizer]

    sizes = (4, 3, 2)
    for world_size, results in zip(sizes, run.worlds(body, sizes), strict=True):
        slack = 2000  # step counts of the pieces, padding
        for rank, (parameters, gradients, state) in enumerate(results):
            limit = 2 * WHOLE / world_size + slack
            if state > limit:
                fail(
                    f"rank {rank} of {world_size} holds {state:,} B of optimizer state, its part "
                    f"is 8Ψ/W = {limit:,.0f} B: every element belongs to one rank, evenly",
                    cause="too-much-memory",
                    rank=rank,
                )
            if state < limit - 2 * slack:
                fail(f"rank {rank} holds {state:,} B of state", cause="too-little-state", rank=rank)
            if max(parameters, gradients) > WHOLE + slack:
                fail("a second copy of the parameters", cause="second-copy", rank=rank)


@exercise("3.13", "virtual gloo")
def test_bytes_of_a_step(impl, run, seed):
    """A step sends (W-1)/W·P bytes per rank on average, P without what is frozen."""

    def body(ctx):
        model = Equal()
        weights = with_bystanders(model)
        optimizer = impl.ZeroOptimizer(weights, torch.optim.Adam, bucket_bytes=2 * MATRIX)
        model(torch.ones(1, 32)).sum().backward()
        with ctx.region("step"):
            optimizer.step()
        return bystanders_of(weights)

    sizes = (4, 2, 1)
    for world_size, results in zip(sizes, run.worlds(body, sizes), strict=True):
        budget = (world_size - 1) / world_size * WHOLE
        for log in results.logs:
            log.all_waited()
            log.select(region="step").sent_at_most(budget + 200, "(W-1)/W·P of what is trained")
        judge_bystanders(results)


@exercise("3.13", "virtual")
def test_each_dtype_stays(impl, run):
    """Parameters in float32, bfloat16 and float64: at step() all of a piece is in its own dtype."""

    def body(ctx):
        return steps_in_three_dtypes(impl.ZeroOptimizer, share=1)

    judge_dtypes(run(body, 2), share=1)


@exercise("3.13", "virtual gloo cuda")
def test_state_moves_to_another_world_size(impl, run, seed, cases):
    """What 3 ranks save, 2 ranks and the plain optimizer load, and train on with it."""
    kind, options = OPTIMIZERS["AdamW"]

    def save(ctx):
        model = awkward(seed, ctx.device)
        optimizer = impl.ZeroOptimizer(groups_of(model), kind, bucket_bytes=BUCKET, **options)
        train(model, optimizer, seed, 3, ctx.device)
        everywhere, only = optimizer.state_dict(), optimizer.state_dict(to=1)
        return model.state_dict(), everywhere, [len(only), len(everywhere)]

    def resume(ctx, weights, state):
        model = awkward(seed, ctx.device)
        model.load_state_dict(weights)
        optimizer = impl.ZeroOptimizer(groups_of(model), kind, bucket_bytes=BUCKET, **options)
        optimizer.load_state_dict(state)
        rate = optimizer.param_groups[0]["lr"]
        return rate, train(model, optimizer, seed, 3, ctx.device, 2, first=3)

    saved = run(save, 3)
    weights, state, _ = saved[0]
    for rank, (_, _, lengths) in enumerate(saved):
        expect_equal(
            lengths,
            [2 if rank == 1 else 0, 2],
            what="entries of state_dict(to=1) and of state_dict()",
            rank=rank,
            cause="wrong-rank",
        )
    alone = awkward(seed)
    plain = kind(groups_of(alone), **options)
    train(alone, plain, seed, 3)
    want_state = plain.state_dict()["state"]
    expect_equal(sorted(state["state"]), sorted(want_state), what="keys", cause="wrong-keys")
    for k, entry in want_state.items():
        for name, value in entry.items():
            got = state["state"][k][name]
            if got.shape != value.shape or not torch.allclose(got.cpu(), value, atol=1e-9):
                fail(
                    f"saved {name} of parameter {k} differs from the plain optimizer's: {got}",
                    cause="wrong-state",
                )
    plain.load_state_dict(copy.deepcopy(state))  # it steps on the tensors that it is given
    want = train(alone, plain, seed, 3, "cpu", 2, first=3)
    sizes = cases(2, 1, 4)
    for world_size, results in zip(sizes, run.worlds(resume, sizes, weights, state), strict=True):
        for rank, (rate, got) in enumerate(results):
            expect_equal(rate, 0.05 / 8, what="learning rate", rank=rank, cause="wrong-rate")
            compare(got, want, f"{world_size} ranks go on with the state of 3", rank)


@exercise("3.13", "virtual gloo")
def test_works_in_a_group(impl, run, seed):
    """In a group of two of three ranks nobody else takes part; closure and a later group work."""

    def body(ctx):
        pair = dist.new_group([2, 1])
        if ctx.rank == 0:
            return None
        model = awkward(seed)
        first, second = groups_of(model)
        optimizer = impl.ZeroOptimizer([first], torch.optim.AdamW, group=pair, lr=0.05)
        optimizer.add_param_group(second)

        def closure():
            optimizer.zero_grad()
            mean_gradients(model, seed, 2, 0)
            return 7

        return optimizer.step(closure), values_of(model)

    alone = awkward(seed)
    plain = torch.optim.AdamW(groups_of(alone), lr=0.05)
    mean_gradients(alone, seed, 2, 0)
    plain.step()
    for rank, out in enumerate(run(body, 3)):
        if out is not None:
            expect_equal(out[0], 7, what="what step returns", rank=rank, cause="no-loss")
            compare(out[1], values_of(alone), "ranks 1 and 2 of 3", rank)


@exercise("3.13", "virtual")
def test_wrong_calls_are_refused(impl, run, seed):
    """A foreign group, no bucket size, a rank that is not there, the state of another model."""
    calls = [*AT_THE_START, ("state_dict(to=2)", [2]), ("another model's state", [12, 2])]

    def body(ctx):
        optimizer = impl.ZeroOptimizer(Equal().parameters(), torch.optim.Adam)
        other = torch.optim.Adam([torch.zeros(1), torch.zeros(2)]).state_dict()
        return [
            *refused_at_the_start(impl.ZeroOptimizer),
            refusal(optimizer.state_dict, to=2),
            refusal(optimizer.load_state_dict, other),
        ]

    expect_refused(run(body, 2), calls)


@trace("3.13")
def trace_zero(impl):
    """Two steps of twelve equal layers in four buckets."""
    return traced(lambda *args, **options: impl.ZeroOptimizer(*args, **options))
