"""Checks of exercise 3.31: ranks that fail or leave, and what a join refuses."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from distlab.grading import exercise, expect_close, expect_equal, fail
from tests.phase3.breaking import Breaks
from tests.phase3.uneven_models import batches, compare, loss_of, net, one_process, optimizer_of

COUNTS = (3, 1, 4)
FAILING = {"shadow": 1, "loader": 0, "late": 0}  # which rank fails in these ways; rank 2 in others
WAYS = [  # in which a rank fails, and whether the ranks agree
    ("backward", True),
    ("loader", False),
    ("early", True),
    ("early", False),
    ("forward", True),
    ("backward", False),
    ("late", True),
    ("break", False),
    ("weight", True),
    ("shadow", True),
]


class Fragile(nn.Module):
    """Two layers and a counter; forward or backward can break between the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4).double(), nn.Linear(4, 2).double()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor, breaks: str = "") -> torch.Tensor:
        self.calls += 1
        h = torch.tanh(self.first(x))
        if breaks == "forward":
            raise KeyError("forward broke, as asked for")
        return self.second(Breaks.apply(h) if breaks == "backward" else h)


def fragile() -> Fragile:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return Fragile()


def train(ctx, impl, wrapped, own, way=""):
    """One join in which this rank fails in its second step in the given ``way``.

    Returns how it ended: the type of the exception, and the rank that a StepAborted names.
    """

    def loader():
        for number, x in enumerate(own):
            if number == 1 and way == "loader":
                raise KeyError("the loader broke, as asked for")
            yield x

    options = {"weight": lambda _: float("inf")} if way == "weight" else {}
    try:
        with wrapped.join(loader(), **options) as steps:
            for number, x in enumerate(steps):
                wrapped.zero_grad()
                now = way if number == 1 else ""
                if now == "early" or (x is None and now == "shadow"):
                    raise KeyError("the body broke, as asked for")
                if x is None:
                    wrapped.shadow()
                else:
                    wrapped(x, breaks=now).square().sum().backward()
                if now == "late":
                    raise KeyError("the step broke, as asked for")
                if now == "break":
                    break
    except Exception as error:
        if not isinstance(error, impl.StepAborted):
            return type(error).__name__, None
        return "StepAborted", getattr(error, "rank", None)
    return "end", None


def inputs(seed: int, rank: int, count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed * 1009 + rank)
    return [torch.randn(3, 4, generator=generator, dtype=torch.float64) for _ in range(count)]


@exercise("3.31", "virtual gloo", asserts="left told own-exception life alone refusals")
def test_a_rank_that_fails_ends_the_join_of_all(impl, run, seed, cases):
    """In its loader, before and in forward, in backward, after it, by break: no rank waits."""
    alone = fragile()
    alone(inputs(seed, 2, 4)[2]).square().sum().backward()  # rank 2's third batch, alone
    want = [p.grad for p in alone.parameters()]
    own_end = {"weight": "ValueError", "break": "end"}
    for way, agree in cases(*WAYS):

        def body(ctx):
            sizes = {"bucket_bytes": 150, "first_bucket_bytes": 100}
            wrapped = impl.UnevenDDP(fragile(), agree=agree, **sizes)
            own = inputs(seed, ctx.rank, COUNTS[ctx.rank])
            how = train(ctx, impl, wrapped, own, way if ctx.rank == failing else "")
            again = train(ctx, impl, wrapped, own[: 1 + ctx.rank])
            return how, again, [p.grad.clone() for p in wrapped.parameters()]

        failing = FAILING.get(way, 2)
        for rank, (how, again, gradients) in enumerate(run(body, 3)):
            mine = own_end.get(way, "KeyError"), None
            expected = mine if rank == failing else ("StepAborted", failing)
            what = f"rank {failing} fails ({way}, agree={agree}): how the join ends"
            cause = "own-exception" if rank == failing else "failure-not-told"
            expect_equal(how, expected, what=what, rank=rank, cause=cause)
            what = f"the join after one that failed ({way}, agree={agree})"
            expect_equal(again, ("end", None), what=what, rank=rank, cause="next-join-broken")
            for got, value in zip(gradients, want, strict=True):
                expect_close(got, value, what=f"{what}: a gradient", rank=rank, rtol=1e-9)


@exercise("3.31", "virtual", asserts="told left ddp group life")
def test_a_group_after_a_rank_has_left(impl, run):
    """The others hear the number in the group; a backward after the join has DDP's mean."""

    def join(wrapped, rank):
        """How the join ends, where rank 1 has one batch, and rank 2 raises at its second one."""
        try:
            with wrapped.join([torch.ones(1, 1)] * rank) as steps:
                for number, x in enumerate(steps):
                    if number == 1 and rank == 2:
                        raise KeyError("the body broke, as asked for")
                    wrapped.shadow() if x is None else wrapped(x).sum().backward()
        except impl.StepAborted as error:
            return f"StepAborted of rank {error.rank}"
        except KeyError:
            return "KeyError"
        return "end"

    def body(ctx):
        group, found = dist.new_group([1, 2]), []
        for agree in (False, True) if ctx.rank else ():
            model = nn.Linear(1, 1, bias=False)
            wrapped = impl.UnevenDDP(model, group=group, agree=agree)
            how = join(wrapped, ctx.rank)
            wrapped.zero_grad()
            wrapped(torch.full((1, 1), float(ctx.rank))).sum().backward()
            found.append((how, model.weight.grad))
        return found

    for rank, found in enumerate(run(body, 3)):
        for agree, (how, grad) in zip((False, True), found, strict=False):
            want = "KeyError" if rank == 2 else "StepAborted of rank 1"
            what = f"number 1 of the group [1, 2] fails, agree={agree}: how the join ends"
            expect_equal(how, want, what=what, rank=rank, cause="failure-not-told")
            if grad.item() != 1.5:
                said = "after the join that failed ranks 1 and 2 have gradients of 1 and 2"
                text = f"{said}: rank {rank} got {grad.item():g} as their mean, expected 1.5"
                fail(text, cause="old-share", rank=rank)


@exercise("3.31", "virtual", asserts="told left mean")
def test_a_step_that_fails_is_left_out(impl, run, seed):
    """The body catches what its step raises: with agree no rank steps, and the join goes on."""

    def body(ctx):
        model = net(seed)
        wrapped = impl.UnevenDDP(model, agree=True)
        optimizer = optimizer_of(model)
        said = []
        with wrapped.join(batches(seed, ctx.rank, COUNTS[ctx.rank])) as steps:
            for number, batch in enumerate(steps):
                optimizer.zero_grad()
                if number == 2 and ctx.rank == 0:
                    continue
                try:
                    if batch is None:
                        wrapped.shadow()
                    else:
                        loss_of(wrapped, batch).backward()
                except impl.StepAborted as error:
                    said.append((number, error.rank))
                    continue
                optimizer.step()
        return said, {n: p.detach().clone() for n, p in model.named_parameters()}

    model = net(seed)
    one_process(
        model,
        optimizer_of(model),
        [batches(seed, rank, count) for rank, count in enumerate(COUNTS)],
        left_out=[2],
    )
    want = {n: p.detach() for n, p in model.named_parameters()}
    for rank, (said, got) in enumerate(run(body, 3)):
        expected = [] if rank == 0 else [(2, 0)]
        what = "rank 0 skips step 2: the steps in which StepAborted came, and the rank it names"
        expect_equal(said, expected, what=what, rank=rank, cause="failure-not-told")
        compare(got, want, rank, "step 2 left out")


@exercise("3.31", "virtual", asserts="together")
def test_all_ranks_may_leave_together(impl, run, seed):
    """All break after the same step: none raises, and the next join begins anew."""

    def body(ctx):
        wrapped = impl.UnevenDDP(fragile())
        steps = 0
        for most in (2, 9):
            with wrapped.join(inputs(seed, ctx.rank, COUNTS[ctx.rank])) as found:
                for x in found:
                    wrapped.shadow() if x is None else wrapped(x).sum().backward()
                    steps += 1
                    if steps == most:
                        break
        return steps

    for rank, steps in enumerate(run(body, 3)):
        what = "steps of a join left after two, and of a whole one"
        expect_equal(steps, 2 + max(COUNTS), what=what, rank=rank, cause="steps")


@exercise("3.31", "virtual gloo", asserts="throw refusals")
def test_throw_ends_all_ranks_at_the_first_end(impl, run, seed):
    """With throw=True all ranks raise RuntimeError instead of the step that some can't take."""

    def body(ctx):
        found = []
        for counts in ((3, 2, 4), (2, 2, 2)):
            wrapped = impl.UnevenDDP(fragile())
            steps, how = 0, "end"
            try:
                with wrapped.join(inputs(seed, ctx.rank, counts[ctx.rank]), throw=True) as batches:
                    for x in batches:
                        if x is None:
                            how = "None came"
                            wrapped.shadow()
                        else:
                            wrapped(x).sum().backward()
                        steps += 1
            except impl.StepAborted:
                how = "StepAborted"
            except RuntimeError:
                how = "RuntimeError"
            found.append((steps, how))
        return found

    for rank, found in enumerate(run(body, 3)):
        want = [(2, "RuntimeError"), (2, "end")]
        what = "steps and end with 3, 2, 4 and with 2, 2, 2 batches"
        expect_equal(found, want, what=what, rank=rank, cause="throw")


@exercise("3.31", "virtual", asserts="refusals steps")
def test_a_refused_join_leaves_the_running_one(impl, run):
    """A join in a join sends nothing; a body that catches the refusal goes on as before."""

    def body(ctx):
        model = nn.Linear(1, 1, bias=False)
        wrapped, found = impl.UnevenDDP(model), []
        own = [torch.full((1, 1), 1.0 + ctx.rank)] * 2
        with wrapped.join(own, weight=lambda _: 1.0 + 2 * ctx.rank) as steps:
            for x in steps:
                wrapped.zero_grad()
                refused = False
                try:
                    with ctx.region("refused"), wrapped.join(own):
                        pass
                except RuntimeError:
                    refused = True
                wrapped(x).sum().backward()
                found.append((refused, model.weight.grad.item()))
        return found

    results = run(body, 2)
    for rank, found in enumerate(results):
        what = "in both steps of a join: whether a join in it is refused, and the step's gradient"
        expect_equal(found, [(True, 1.75)] * 2, what=what, rank=rank, cause="join-ended")
        sent = results.logs[rank].select(region="refused").events
        if sent:
            text = f"rank {rank} issued {sent[0]} for a join that it refuses"
            fail(text, cause="late-check", rank=rank, line=sent[0].line)


@exercise("3.31", "virtual", asserts="refusals weight")
def test_what_a_join_refuses(impl, run, seed):
    """Weights that are not positive or finite; a join in a join; shadow() without a turn."""

    def tried(call):
        try:
            call()
        except Exception as error:
            return type(error).__name__
        return "nothing"

    def body(ctx):
        wrapped = impl.UnevenDDP(fragile())
        own = inputs(seed, ctx.rank, 2)
        found = []

        def weighted(value):
            with wrapped.join(own, weight=lambda _: value) as steps:
                next(steps)

        def twice():
            with wrapped.join(own) as steps:
                next(steps)
                with wrapped.join(own):
                    found.append("a second join began")

        found += [tried(lambda v=value: weighted(v)) for value in (0.0, -1.0, float("nan"))]
        found.append(tried(twice))
        with ctx.region("shadow"):
            found.append(tried(wrapped.shadow))
        with wrapped.join(own[: 2 - ctx.rank]) as steps:
            for x in steps:
                if x is not None:
                    with ctx.region("shadow"):
                        found.append(tried(wrapped.shadow))
                    wrapped(x).sum().backward()
                else:
                    wrapped.shadow()
                with ctx.region("shadow"):
                    found.append(tried(wrapped.shadow))
        return found

    results = run(body, 2)
    for rank, found in enumerate(results):
        want = ["ValueError"] * 3 + ["RuntimeError"] * (2 + 4 - rank)
        what = "weights of 0, -1 and NaN, a join in a join, shadow() outside of its turn"
        expect_equal(found, want, what=what, rank=rank, cause="accepted")
        sent = results.logs[rank].select(region="shadow").events
        if sent:
            text = f"rank {rank} issued {sent[0]} for a shadow() that it refuses"
            fail(text, cause="late-check", rank=rank, line=sent[0].line)
