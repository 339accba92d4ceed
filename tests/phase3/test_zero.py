"""Checks of exercise 3.13: the optimizer's state on one rank each, everything else as before."""

from __future__ import annotations

import copy

import torch
import torch._dynamo  # torch.optim imports it when an optimizer is made: once here, not per rank
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

from distlab.grading import (
    exercise,
    expect_equal,
    expect_few_waits,
    expect_refused,
    fail,
    refusal,
    trace,
)
from distlab.observe.memory import held_by
from tests.phase3.zero_models import (
    AT_THE_START,
    BUCKET,
    MATRIX,
    STILL,
    WHOLE,
    Equal,
    awkward,
    bystanders_of,
    compare,
    groups_of,
    judge_bystanders,
    judge_dtypes,
    loaded,
    mean_gradients,
    plain,
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


@exercise("3.13", "virtual gloo cuda", asserts="like-whole unmoved layout parameters alone")
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
    for name in STILL:
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


@exercise("3.13", "virtual", asserts="groups")
def test_users_groups_are_obeyed(impl, run, seed):
    """Any option written to ``param_groups`` holds from the next step, in its group."""

    def stepped(kind):
        model = awkward(seed)
        optimizer = kind(groups_of(model), torch.optim.SGD, lr=0.1)
        optimizer.param_groups[1]["lr"] = 0.0
        optimizer.param_groups[0]["maximize"] = True
        before = values_of(model)
        mean_gradients(model, seed, 2, 0)
        optimizer.step()
        return before, values_of(model)

    def body(ctx):
        return stepped(impl.ZeroOptimizer)

    moves = ["turned", "inside.weight", "first.weight", "head.weight"]
    want = stepped(plain)[1]
    for rank, (before, after) in enumerate(run(body, 2)):
        got = [name for name, p in after.items() if not torch.equal(p, before[name])]
        if "frozen.weight" in got:
            said = "a frozen parameter that has a gradient of before is stepped"
            fail(said, cause="frozen-moved", rank=rank)
        what = "what moves with a rate of 0 for all else"
        expect_equal(got, moves, what=what, rank=rank, cause="rate-ignored")
        for name in moves:
            if not torch.allclose(after[name], want[name], rtol=1e-9):
                said = f"{name} has not gone up: 'maximize', written to param_groups, is ignored"
                fail(said, cause="option-ignored", rank=rank)


class Counts(torch.optim.SGD):
    """Counts in its groups' options, as some optimizers do; ``step`` takes an argument."""

    def __init__(self, params, **options):
        super().__init__(params, **options)
        self.seen = 0

    def add_param_group(self, param_group):
        param_group.setdefault("count", 100)
        param_group.setdefault("tally", torch.tensor(100))
        super().add_param_group(param_group)

    def step(self, closure=None, *, more=1):
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + more
            group.setdefault("tally", torch.tensor(0)).add_(more)  # as schedulers change a rate
        return super().step(closure)


@exercise("3.13", "virtual", asserts="groups-back step-arguments life")
def test_what_the_inner_optimizer_adds_is_kept(impl, run):
    """Options that the optimizer adds and changes are in ``param_groups`` and
    saved; ``step`` takes more."""

    def body(ctx):
        def made():
            named = [*Equal().named_parameters()]
            groups = [{"params": named[:2]}, {"params": named[2:]}]
            return impl.ZeroOptimizer(groups, Counts, lr=0.1)

        def count(groups):
            return [int(group.get(name, -1)) for group in groups for name in ("count", "tally")]

        optimizer, other = made(), made()
        optimizer.step(more=5)
        stepped = count(optimizer.param_groups)
        state = optimizer.state_dict()
        saved = count(state["param_groups"])
        optimizer.step(more=20)
        kept = count(state["param_groups"])
        other.load_state_dict(state)
        other.step()
        return [stepped, saved, kept, count(other.param_groups), count(state["param_groups"])]

    for rank, got in enumerate(run(body, 2)):
        what = "in each of two groups two options that the inner optimizer makes 100 and "
        what += "step(more=5) raises, a number and, in place, a tensor (-1: it is missing): after "
        what += "the step, in state_dict()"
        expect_equal(got[:2], [[105] * 4] * 2, what=what, rank=rank, cause="option-lost")
        what += ", there after another step, after one more step of who has loaded it, and then in "
        what += "what that one has loaded"
        want = [[n] * 4 for n in (105, 105, 105, 106, 105)]
        expect_equal(got, want, what=what, rank=rank, cause="option-alive")


SIZES = (5, 3, 2)  # elements: with shards of 4 on 3 ranks, 2 of padding


@exercise("3.13", "virtual", asserts="vectors dtype layout")
def test_vectors_and_pieces(impl, run):
    """Parameters lie in the vector one after the other; a piece is a view
    of the rank's own part."""

    def body(ctx):
        def offset(tensor):
            return (tensor.data_ptr() - vector.flat.data_ptr()) // tensor.itemsize

        if not hasattr(impl, "FlatVector"):
            return None
        found = []
        for dtype in (torch.float32, torch.bfloat16):
            shaped = [torch.ones(5), torch.ones(1, 3).t(), torch.ones(2, 1)]
            weights = [nn.Parameter(t.to(dtype) * (k + 1)) for k, t in enumerate(shaped)]
            late = nn.Parameter(torch.ones(7, dtype=dtype))
            optimizer = impl.ZeroOptimizer([*weights[::-1], late], torch.optim.SGD, bucket_bytes=16)
            order = [[tuple(p.shape) for p in each.parameters] for each in optimizer.vectors]
            vector = impl.FlatVector(weights, None)
            numbers = {p: k for k, p in enumerate(weights)}
            pieces = [
                (numbers[piece.whole], piece.start, piece.stop, offset(piece.part))
                for piece in vector.pieces
            ]
            lie = [(offset(p), p.is_contiguous(), p.is_leaf) for p in weights]
            flat = str(vector.flat.dtype)[6:], vector.flat.tolist(), vector.flat.requires_grad
            found.append([order[0], flat, lie, (offset(vector.own), len(vector.own)), pieces])
        return found

    owned = [[(0, 0, 4, 0)], [(0, 4, 5, 4), (1, 0, 3, 5)], [(2, 0, 2, 8)]]
    values = [1.0] * 5 + [2.0] * 3 + [3.0] * 2 + [0.0] * 2
    for rank, found in enumerate(run(body, 3)):
        for dtype, got in zip(("float32", "bfloat16"), found or (), strict=found is not None):
            want = {
                "the vector that leaves first: the last parameter": [(7,)],
                "dtype, values, requires_grad of flat": (dtype, values, False),
                "parameters: offset in flat, contiguous, leaf": [
                    (offset, True, True) for offset in (0, 5, 8)
                ],
                "offset and length of own": (4 * rank, 4),
                "pieces: parameter, start, stop, offset of part in flat": owned[rank],
            }
            for value, (what, right) in zip(got, want.items(), strict=True):
                what = f"5, 3 and 2 elements of {dtype} on 3 ranks, {what}"
                expect_equal(value, right, what=what, rank=rank, cause="wrong-pieces")


@exercise("3.13", "gloo", asserts="like-whole")
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


@exercise("3.13", "virtual gloo", asserts="part resources")
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
                    f"is 8Ψ/W = {limit:,.0f} B. Every element belongs to one rank, evenly",
                    cause="too-much-memory",
                    rank=rank,
                )
            if state < limit - 2 * slack:
                fail(f"rank {rank} holds {state:,} B of state", cause="too-little-state", rank=rank)
            if max(parameters, gradients) > WHOLE + slack:
                fail("a second copy of the parameters", cause="second-copy", rank=rank)


@exercise("3.13", "virtual gloo", asserts="bytes messages unmoved cost parameters")
def test_bytes_of_a_step(impl, run, seed):
    """A step sends (W-1)/W·P bytes per rank, P without frozen parameters, all messages at once."""

    def body(ctx):
        model = Equal()
        weights = with_bystanders(model)
        groups = [{"params": weights[:7]}, {"params": weights[7:]}]
        optimizer = impl.ZeroOptimizer(groups, torch.optim.Adam, bucket_bytes=2 * MATRIX)
        model(torch.ones(1, 32)).sum().backward()
        with ctx.region("step"):
            optimizer.step()
        return bystanders_of(weights)

    worlds = (4, 2, 1)
    for world_size, results in zip(worlds, run.worlds(body, worlds), strict=True):
        budget = (world_size - 1) / world_size * WHOLE
        for log in results.logs:
            log.all_waited()
            part = log.select(region="step")
            part.sent_at_most(budget + 200, "(W-1)/W·P of what is trained")
            sizes = [event.payload for event in part.events] or [MATRIX]
            if part.messages > 12 or max(sizes) > 2 * MATRIX or not min(sizes):
                fail(
                    f"rank {log.rank} issued {part.messages} messages of {min(sizes):,} to "
                    f"{max(sizes):,} B for 12 parameters in buckets of {2 * MATRIX:,} B",
                    cause="messages",
                    rank=log.rank,
                )
            if world_size > 1 and loaded(log, "step") != [*range(part.messages)]:
                fail(
                    f"rank {log.rank} has waited for a message before it issued the next one: let "
                    "all go, then wait for all",
                    cause="one-by-one",
                    rank=log.rank,
                )
        judge_bystanders(results)


@exercise("3.13", "virtual", asserts="dtypes dtype")
def test_each_dtype_stays(impl, run):
    """Parameters in float32, bfloat16 and float64: at step() all of a piece is in its own dtype."""

    def body(ctx):
        return steps_in_three_dtypes(impl.ZeroOptimizer, share=1)

    judge_dtypes(run(body, 2), share=1)


@exercise("3.13", "virtual gloo cuda", asserts="state load groups life resources")
def test_state_moves_to_another_world_size(impl, run, seed, cases):
    """2 ranks and the plain optimizer load the state that 3 ranks save, and train on with it."""
    kind, options = OPTIMIZERS["AdamW"]
    options = options | {"amsgrad": True}  # a third moment, whatever its name

    def save(ctx):
        model = awkward(seed, ctx.device)
        optimizer = impl.ZeroOptimizer(groups_of(model), kind, bucket_bytes=BUCKET, **options)
        train(model, optimizer, seed, 3, ctx.device)
        everywhere, only = optimizer.state_dict(), optimizer.state_dict(to=1)
        weights, early = copy.deepcopy(model.state_dict()), copy.deepcopy(everywhere)
        optimizer.step()
        return weights, everywhere, [len(only), len(everywhere)], early

    def resume(ctx, weights, state):
        model = awkward(seed, ctx.device)
        optimizer = impl.ZeroOptimizer(groups_of(model), kind, bucket_bytes=BUCKET, **options)
        for p in model.parameters():  # a life before, with state that will be forgotten
            p.grad = torch.ones_like(p) if p.requires_grad else None
        optimizer.step()
        model.load_state_dict(weights)
        optimizer.load_state_dict(state)
        rate = optimizer.param_groups[0]["lr"]
        held = held_by(model, optimizer)
        got = train(model, optimizer, seed, 3, ctx.device, 2, first=3)
        again = optimizer.state_dict()
        return rate, got, held.optimizer, [state["state"][k] for k in (0, 1)], len(again["state"])

    saved = run(save, 3)
    weights, state, _, early = saved[0]
    same_state(state, early, "the result of state_dict(), after a further step,", "state-alive")
    for rank, (_, _, lengths, _) in enumerate(saved):
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
    same_state(state, plain.state_dict(), "saved", "wrong-state")
    state = copy.deepcopy(plain.state_dict())  # of tensors that may be transposed in memory
    plain.load_state_dict(copy.deepcopy(saved[0][1]))  # it steps on the tensors that it is given
    want = train(alone, plain, seed, 3, "cpu", 2, first=3)
    sizes = cases(2, 1, 4)
    for world_size, results in zip(sizes, run.worlds(resume, sizes, weights, state), strict=True):
        most = 24 * max(7 * 7 + 7, sum(p.numel() for p in alone.parameters()) / world_size) + 900
        for rank, (rate, got, held, given, length) in enumerate(results):
            expect_equal(rate, 0.05 / 8, what="learning rate", rank=rank, cause="wrong-rate")
            what = "parameters with state: what was there before load_state_dict is forgotten; it"
            expect_equal(length, len(state["state"]), what=what, rank=rank, cause="wrong-keys")
            for k in (0, 1):
                for name, value in given[k].items():
                    if not torch.equal(value, state["state"][k][name]):
                        said = f"steps after load_state_dict have changed {name} in what it got"
                        fail(said, cause="state-alive", rank=rank)
            if world_size > 1 and held > most:
                fail(
                    f"rank {rank} of {world_size} holds {held:,} B of state after load_state_dict, "
                    f"its part is less than {most:,.0f} B. Copy, a view keeps the whole alive",
                    cause="too-much-memory",
                    rank=rank,
                )
            compare(got, want, f"{world_size} ranks go on with the state of 3", rank)


def same_state(got, want, what, cause):
    """A state equals another one: keys, values, and what the groups say."""
    keys = sorted(want["state"])
    expect_equal(sorted(got["state"]), keys, what=f"{what} keys of the state", cause="wrong-keys")
    for k, entry in want["state"].items():
        names = sorted(entry)
        expect_equal(sorted(got["state"][k]), names, what=f"{what} keys of {k}", cause="wrong-keys")
        for name, value in entry.items():
            found = got["state"][k][name]
            if found.shape != value.shape or not torch.allclose(found.cpu(), value, atol=1e-9):
                fail(f"{what} {name} of parameter {k}: {found}, expected {value}", cause=cause)
    for mine, group in zip(got["param_groups"], want["param_groups"], strict=True):
        expect_equal(mine, group, what=f"{what} group", cause="wrong-groups")


@exercise("3.13", "virtual gloo", asserts="like-whole closure later-group state group")
def test_works_in_a_group(impl, run, seed):
    """Ranks 1 and 3 of four train beside 0 and 2; closure, a later group and state_dict work."""
    groups = [1, 3], [0, 2]

    def body(ctx):
        made = [dist.new_group(members) for members in groups]
        k = int(ctx.rank % 2 == 0)
        model = awkward(seed + k)
        first, second = groups_of(model)
        optimizer = impl.ZeroOptimizer([first], torch.optim.AdamW, group=made[k], lr=0.05)
        calls = []

        def closure():
            calls.append(torch.is_grad_enabled())
            optimizer.zero_grad()
            mean_gradients(model, seed + k, 2, len(calls))
            return 7

        said = [optimizer.step(closure)]
        optimizer.add_param_group(second)
        said.append(optimizer.step(closure))
        number = groups[k].index(ctx.rank)
        only = [len(optimizer.state_dict(to=to)) for to in (0, 1)]
        return [*said, calls, only[number], only[1 - number]], values_of(model)

    results = run(body, 4)
    for k, members in enumerate(groups):
        alone = awkward(seed + k)
        alone.frozen.weight.grad = None
        first, second = groups_of(alone)
        plain = torch.optim.AdamW([first], lr=0.05)
        for step in (1, 2):
            alone.zero_grad()
            mean_gradients(alone, seed + k, 2, step)
            plain.step()
            if step == 1:
                plain.add_param_group(second)
        for rank in members:
            said, got = results[rank]
            what = "what two steps return, and whether autograd was on in each call of the closure"
            expect_equal(said[:3], [7, 7, [True, True]], what=what, rank=rank, cause="no-loss")
            what = "entries of state_dict(to=own rank of the group) and of state_dict(to=the other)"
            expect_equal(said[3:], [2, 0], what=what, rank=rank, cause="wrong-rank")
            compare(got, values_of(alone), f"ranks {members} of 4", rank)


def saved_adam(sizes, lr):
    """The state that a plain Adam saves after a step, for groups with ``sizes`` parameters."""
    shapes = [[nn.Parameter(torch.ones(32, 32)) for _ in range(size)] for size in sizes]
    plain = torch.optim.Adam([{"params": params} for params in shapes], lr=lr)
    for p in (p for params in shapes for p in params):
        p.grad = torch.ones_like(p)
    plain.step()
    return plain.state_dict()


@exercise("3.13", "virtual", asserts="refused refusals life")
def test_wrong_calls_are_refused(impl, run, seed):
    """A foreign group, no bucket size, a rank that is not there, the state of another model."""
    wrong = [2], [12, 1], [12], [10, 2], [2, 9], [2, 10, 1]
    calls = [*AT_THE_START, "to=2", "to=-1"]
    calls += [f"a state of groups of {sizes}, into groups of [2, 10]" for sizes in wrong]

    def body(ctx):
        weights = [*Equal().parameters()]
        groups = [{"params": weights[:2]}, {"params": weights[2:]}]
        optimizer = impl.ZeroOptimizer(groups, torch.optim.Adam)
        optimizer.load_state_dict(saved_adam([2, 10], lr=0.5))

        def what_it_holds():
            held = sum(len(entry) for entry in optimizer.state.values())
            return [held, *(group["lr"] for group in optimizer.param_groups)]

        before = what_it_holds()
        said = [
            *refused_at_the_start(impl.ZeroOptimizer),
            *(refusal(optimizer.state_dict, to=to) for to in (2, -1)),
            *(refusal(optimizer.load_state_dict, saved_adam(sizes, lr=0.25)) for sizes in wrong),
        ]
        return said, [before, what_it_holds()]

    results = run(body, 2)
    kept = [held for _, held in results]
    for rank in range(2):
        results[rank] = results[rank][0]
    expect_refused(results, calls)
    for rank, (before, after) in enumerate(kept):
        what = "entries of the state, rates of the groups after load_state_dict has refused others"
        expect_equal(after, before, what=what, rank=rank, cause="changed-by-refusal")


@trace("3.13")
def trace_zero(impl):
    """Two steps of twelve equal layers in four buckets."""
    return traced(lambda *args, **options: impl.ZeroOptimizer(*args, **options))


@exercise("3.13", "nccl", asserts="host")
def test_a_step_does_not_wait_for_the_gpu(impl, run, seed):
    """With an inner optimizer that does not wait for the GPU the host does not, either."""

    def body(ctx):
        model = awkward(seed, ctx.device)
        parameters = [p for p in model.parameters() if p.requires_grad]
        optimizer = impl.ZeroOptimizer(parameters, torch.optim.SGD, lr=0.1, bucket_bytes=300)
        mean_gradients(model, seed, 2, 0, ctx.device)
        with ctx.region("step"):
            optimizer.step()

    expect_few_waits(run(body, 2), 0, "step")
