"""Checks of exercise 4.6: Top-K with error feedback and momentum correction."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distlab.explain.case import Diagnosis
from distlab.grading import exercise, expect_close, expect_refused, fail, refusal, trace
from tests.phase4.compressed_training import Sums, check_memory, check_training
from tests.phase4.compression import (
    Bucket,
    Variants,
    all_gradients,
    also,
    beside_all_reduce,
    bucket_of,
    check_begins,
    check_edges,
    check_refused_state,
    check_resumed,
    check_time_gained,
    expect_bytes,
    expect_steps,
    gradient,
    reduced,
    several_steps,
)

STEPS = 4
MOVED = Diagnosis(
    "not-moved",
    "a part is lost, or was sent twice: the state of a parameter (residual, velocity) must go "
    "with it into each new bucket, and back when an earlier bucket comes again",
)
SHAPES = ((7, 5), (5,), (1,))  # 41 entries


def simulate(
    own: list[list[Tensor]],
    k: int,
    momentum: float = 0.0,
    *,
    feedback: bool = True,
    clear: bool = True,
    mask: bool = True,
    late: bool = False,
    twice: bool = False,
) -> list[Tensor]:
    """Each step's sum over the ranks; ``own``: for each rank the gradients of all steps.

    ``feedback``, ``clear``, ``mask``, ``late``, ``twice`` leave out or change parts of it: the
    residual, its clearing, the velocity's clearing, momentum before the choice or after it.
    """
    sums = [torch.zeros_like(g) for g in own[0]]
    moved = torch.zeros_like(own[0][0])
    for gradients in own:
        u, v = torch.zeros_like(gradients[0]), torch.zeros_like(gradients[0])
        for step, g in enumerate(gradients):
            if late:
                v = v + g
            else:
                u = momentum * u + g
                v = (v if feedback else 0) + u
            chosen = v.abs().topk(k).indices
            sums[step][chosen] += v[chosen]
            if clear:
                v[chosen] = 0
            if mask:
                u[chosen] = 0
    if late or twice:  # the optimizer's momentum, on what has arrived
        for step, arrived in enumerate(sums):
            moved = momentum * moved + arrived
            sums[step] = moved.clone()
    return sums


def variants(own: list[list[Tensor]], k: int, momentum: float = 0.0) -> Variants:
    """The sums that known mistakes give."""
    found = {
        "no-error-feedback": (
            "this step's gradients alone give this sum: the part that earlier steps did not send "
            "is lost",
            simulate(own, k, momentum, feedback=False),
        ),
        "residual-not-cleared": (
            "entries that were sent are still in the residual: they are sent again and again",
            simulate(own, k, momentum, clear=False),
        ),
    }
    if not momentum:
        return found
    return {
        "velocity-not-cleared": (
            "the velocity was not cleared where it was sent",
            simulate(own, k, momentum, mask=False),
        ),
        "no-momentum": ("it is what no momentum gives", simulate(own, k)),
        "momentum-after-the-choice": (
            "momentum was taken of the arrived sum, not of the gradients before the choice",
            simulate(own, k, momentum, late=True),
        ),
        "momentum-twice": (
            "momentum was taken twice: before the choice and of the arrived sum",
            simulate(own, k, momentum, twice=True),
        ),
        **found,
    }


def check_topk(impl, run, seed, sizes, ratio: float, momentum: float) -> None:
    """Four steps on one bucket equal the algorithm's."""
    k = max(1, round(41 * ratio))
    for world_size, dtype in sizes:

        def body(ctx):
            bucket = bucket_of(*SHAPES, dtype=dtype, device=ctx.device)
            own = [gradient(bucket, seed, ctx.rank, step) for step in range(STEPS)]
            return several_steps(lambda ps: impl.TopK(ps, ratio, momentum), bucket, own)

        own = all_gradients(bucket_of(*SHAPES, dtype=dtype), seed, world_size, STEPS)
        expect_steps(
            run(body, world_size),
            simulate(own, k, momentum),
            f"{k} of 41 entries of {world_size} ranks, momentum {momentum}",
            variants(own, k, momentum),
            rtol=1e-5,
            atol=1e-6,
        )


@exercise("4.6", "virtual gloo cuda", asserts="largest count residual same-bits")
def test_sends_the_largest_and_owes_the_rest(impl, run, seed, cases):
    """Each rank's k largest of gradient plus residual are summed; the rest is sent later."""
    sizes = (3, torch.float64), (2, torch.float32), (1, torch.float64), (4, torch.float64)
    check_topk(impl, run, seed, cases(*sizes), 0.2, 0.0)
    # nearly all are chosen by all three: another order of the sums would show in their bits
    check_topk(impl, run, seed, ((3, torch.float32),), 0.9, 0.0)
    _expect_chosen_by_all_digits(impl, run, seed)


def _expect_chosen_by_all_digits(impl, run, seed) -> None:
    """Entries of float64 that float32 takes to be equal: still the largest ones are sent."""

    def near_one(rank: int) -> Tensor:
        order = torch.randperm(12, generator=torch.Generator().manual_seed(seed + rank))
        return (1 + order.double() * 1e-12) * (-1) ** order

    def body(ctx):
        bucket = bucket_of((12,), device=ctx.device)
        return several_steps(lambda ps: impl.TopK(ps, 0.25), bucket, [near_one(ctx.rank)])

    own = [[near_one(rank)] for rank in range(2)]
    expect_steps(run(body, 2), simulate(own, 3), "3 of 12 entries between 1 and 1 + 1e-11")


@exercise("4.6", "virtual", asserts="momentum masking")
def test_momentum_comes_before_the_choice(impl, run, seed):
    """Velocity and residual follow the gradients; both are cleared where something was sent."""
    check_topk(impl, run, seed, ((2, torch.float64), (1, torch.float32)), 0.2, 0.7)


@exercise("4.6", "virtual", asserts="belongs-to-parameters zeros-at-first")
def test_nothing_is_lost_when_buckets_are_made_anew(impl, run, seed):
    """Residuals move with their parameters: after some empty steps everything has arrived."""
    sizes, full = {"p": 8, "q": 5}, 3  # entries of each parameter; steps that are not empty
    # of each step: which are in which bucket; the first one comes again
    layouts = ["pq"], ["q", "p"], ["pq"], *[["qp"]] * 5

    def body(ctx):
        parameters = {x: nn.Parameter(torch.zeros(n).double()) for x, n in sizes.items()}
        hook = impl.TopK([*parameters.values()], 0.25)
        arrived = {x: torch.zeros(n).double() for x, n in sizes.items()}
        buckets = {}
        for step, layout in enumerate(layouts):
            for index, names in enumerate(layout):
                made = Bucket(index, [parameters[x] for x in names])
                bucket = buckets.setdefault(names, made)
                values = gradient(bucket, seed + index, ctx.rank, step) * (step < full)
                got = reduced(hook, bucket, values).split([sizes[x] for x in names])
                for x, part in zip(names, got, strict=True):
                    arrived[x] += part
            if step == full - 1:
                buckets.clear()
        return torch.cat([*arrived.values()])

    def put_by(rank: int) -> Tensor:
        total = {x: torch.zeros(n).double() for x, n in sizes.items()}
        for step, layout in enumerate(layouts[:full]):
            for index, names in enumerate(layout):
                bucket = bucket_of(*((sizes[x],) for x in names))
                values = gradient(bucket, seed + index, rank, step)
                for x, part in zip(names, values.split([sizes[x] for x in names]), strict=True):
                    total[x] += part
        return torch.cat([*total.values()])

    put = [put_by(rank) for rank in range(2)]
    for rank, arrived in enumerate(run(body, 2)):
        expect_close(
            arrived,
            sum(put),
            what="all that has arrived, of parameters that changed their buckets",
            rank=rank,
            contributions=put,
            rules=[lambda _: MOVED],
            rtol=1e-9,
        )


@exercise("4.6", "virtual gloo", asserts="bytes messages count cost")
def test_bytes_are_those_of_k_values_and_indices(impl, run, seed, cases):
    """(W-1)·k·(itemsize + 4) bytes per bucket, in few messages; k is at least 1."""
    for world_size, ratio, dtype in cases(
        (3, 0.01, torch.float32),
        (2, 0.1, torch.float64),
        (1, 0.1, torch.float32),
        (4, 1e-6, torch.bfloat16),
    ):
        numel = 3_000

        def body(ctx):
            bucket = bucket_of((numel - 100,), (100,), dtype=dtype)
            hook = impl.TopK(bucket.parameters, ratio, 0.5)
            values = [gradient(bucket, seed, ctx.rank, step) for step in range(2)]
            with ctx.region("steps"):
                return [int(reduced(hook, bucket, g).count_nonzero()) for g in values]

        k = max(1, round(ratio * numel))
        results = run(body, world_size)
        for rank, log in enumerate(results.logs):
            if max(results[rank]) > k * world_size:
                fail(
                    f"{max(results[rank])} entries are not zero on rank {rank}: {world_size} ranks "
                    f"may send {k} each",
                    cause="too-many-entries",
                    rank=rank,
                )
            mine = log.select(region="steps")
            want = 2 * (world_size - 1) * k * (dtype.itemsize + 4)
            expect_bytes(mine, want, f"2 steps × (W-1)·{k}·({dtype.itemsize} + 4)", messages=4)


@exercise("4.6", "virtual", asserts="count same-bits")
def test_ratio_one_is_an_exact_sum(impl, run, seed):
    """With ratio 1 everything is sent, and nothing is owed."""

    def body(ctx):
        bucket = bucket_of(*SHAPES)
        own = [gradient(bucket, seed, ctx.rank, step) for step in range(2)]
        return several_steps(lambda ps: impl.TopK(ps, 1.0), bucket, own)

    own = all_gradients(bucket_of(*SHAPES), seed, 3, 2)
    want = [sum(parts) for parts in zip(*own, strict=True)]
    expect_steps(run(body, 3), want, "ratio 1", rtol=1e-12)


@exercise("4.6", "virtual", asserts="state copy numbered life")
def test_state_goes_on_to_the_bit(impl, run, seed):
    """After a save and a load, in a new hook or an old one, the later steps are the same."""
    check_resumed(run, lambda ps: impl.TopK(ps, 0.2, 0.5), seed)


@exercise("4.6", "virtual gloo", asserts="empty")
def test_empty_and_tiny_buckets(impl, run, seed):
    """Buckets of no, one and two entries, and of zeros only."""
    check_edges(run, lambda ps: impl.TopK(ps, 0.01, 0.5), seed)


@exercise(
    "4.6",
    "virtual",
    asserts="group-only like-the-buffer frozen several-under-way untouched not-kept-alive "
    "group dtype layout parameters life alone",
)
def test_two_models_in_two_groups(impl, run, seed):
    """Ranks 4, 1, 3 and ranks 2, 0 (with momentum) compress among themselves, in three dtypes."""

    def expect(sums: Sums) -> None:
        k = round(0.3 * len(sums.own[0][0]))
        momentum = 0.5 if sums.ranks == [0, 2] else 0.0
        want = simulate(sums.own, k, momentum)
        for rank, steps in zip(sums.ranks, sums.got, strict=True):
            for step, got in enumerate(steps):
                expect_close(
                    got,
                    want[step],
                    what=f"{sums.what}, step {step}",
                    rank=rank,
                    rules=also(step, variants(sums.own, k, momentum)),
                    rtol=2e-3 if sums.dtype == torch.float16 else 1e-5,
                    atol=1e-6,
                )

    def make(parameters, group):
        return impl.TopK(parameters, 0.3, 0.5 if dist.get_world_size(group) == 2 else 0.0, group)

    check_training(run, make, seed, expect)


@exercise("4.6", "virtual", asserts="memory one-tensor resources")
def test_memory_is_a_copy_of_the_gradients(impl, run):
    """A copy of the gradients, two with momentum, also after buckets are made anew."""
    check_memory(run, lambda ps, _: impl.TopK(ps, 0.01), 1)
    check_memory(run, lambda ps, _: impl.TopK(ps, 0.01, 0.5), 2)


@exercise("4.6", "virtual", asserts="begins cost")
def test_hook_begins_and_does_not_wait(impl, run):
    """The hook returns while values and indices are on the way."""
    check_begins(run, lambda ps: impl.TopK(ps, 0.9))


@exercise("4.6", "virtual", asserts="refused unknown other-state refusals")
def test_bad_input_is_refused(impl, run):
    """Ratios outside (0, 1], momentum outside [0, 1), other parameters' state, their bucket."""
    nan = float("nan")
    settings = [(0.0,), (-0.1,), (1.5,), (nan,), (0.1, 1.0), (0.1, -0.5), (0.1, nan)]
    calls = [
        *(f"(ratio, momentum) = {values}" for values in settings),
        "a state of other parameters",
        "a state of fewer parameters",
        "a state of more parameters",
        "a bucket of other parameters",
        "a bucket whose last parameter is another's",
        "a bucket whose first parameter is another's",
        "a bucket whose parameter in the middle is another's",
        "a state of the same parameters in another order",
    ]

    def body(ctx):
        bucket, other = bucket_of((41,), (3,)), bucket_of((8,), (3,))
        (first, second), (another, _) = bucket.parameters, other.parameters
        hook = impl.TopK([first, second], 0.5)
        fewer = impl.TopK([first], 0.5)
        more = impl.TopK([first, second, another], 0.5)
        lists = [first, another], [another, second], [first, another, second]
        turned = impl.TopK([second, first], 0.5)
        mixed = [Bucket(1, pair) for pair in lists]
        return [
            *(refusal(impl.TopK, bucket.parameters, *values) for values in settings),
            refusal(hook.load_state_dict, impl.TopK(other.parameters, 0.5).state_dict()),
            refusal(hook.load_state_dict, fewer.state_dict()),
            refusal(hook.load_state_dict, more.state_dict()),
            *(refusal(hook, wrong) for wrong in (other, *mixed)),
            refusal(hook.load_state_dict, turned.state_dict()),
        ]

    expect_refused(run(body, 2), calls)


@exercise("4.6", "virtual", asserts="unknown residual life")
def test_a_refused_bucket_changes_nothing(impl, run, seed):
    """A bucket with an unknown parameter is refused between two steps, which go on as before."""

    def body(ctx):
        bucket, other = bucket_of(*SHAPES), bucket_of((2,))
        hook = impl.TopK(bucket.parameters, 0.2, 0.5)
        found = []
        for step in range(3):
            found.append(reduced(hook, bucket, gradient(bucket, seed, ctx.rank, step)))
            strange = Bucket(1, [*bucket.parameters, *other.parameters])
            strange.buffer.fill_(7.0)
            refusal(hook, strange)
        return found

    own = all_gradients(bucket_of(*SHAPES), seed, 2, 3)
    want = simulate(own, 8, 0.5)
    expect_steps(run(body, 2), want, "with refused buckets between", rtol=1e-5, atol=1e-6)


@exercise("4.6", "virtual", asserts="nothing-half-loaded refusals")
def test_a_refused_state_changes_nothing(impl, run):
    """A state of which a part fits is refused as a whole: other sizes, momentum there or here."""
    with_it, without = lambda ps: impl.TopK(ps, 0.1, 0.5), lambda ps: impl.TopK(ps, 0.1)
    calls = [
        ("a second parameter of another size", 4, without, without),
        ("the same, with momentum", 4, with_it, with_it),
        ("saved with momentum, loaded without", 3, with_it, without),
        ("saved without momentum, loaded with", 3, without, with_it),
    ]
    check_refused_state(run, calls)


@exercise("4.6", "gloo", asserts="bytes cost")
def test_time_is_gained_between_nodes(impl, run, nodes):
    """Two nodes with a link of 8 Mbit/s: 1 MB takes a second, and compressed far less."""
    check_time_gained(run, nodes, lambda ps: impl.TopK(ps, 0.01), 30)


@trace("4.6")
def trace_topk(impl):
    """A bucket with all-reduce, then with Top-K."""
    return beside_all_reduce(lambda ps: impl.TopK(ps, 0.01))
