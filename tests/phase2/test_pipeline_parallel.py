"""Checks of exercise 2.10: GPipe, and the interpreter that runs any schedule."""

from __future__ import annotations

import dataclasses
import time
import weakref

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from distlab.grading import (
    exercise,
    expect_equal,
    expect_few_waits,
    expect_refusals,
    expect_refused,
    fail,
    refusal,
    trace,
)
from distlab.observe.memory import PeakMemory, storage_bytes
from distlab.virtual import load_cluster
from tests.phase2.pipeline_orders import (
    any_order,
    as_steps,
    bubble,
    completed,
    early_receives,
    placement,
    plain,
    problem_of,
    times,
)
from tests.phase2.pipeline_runs import PER, UNIT, check_run, loss_of, paced_scenario
from tests.phase2.pipelines import (
    Meter,
    Paced,
    batch,
    boundaries,
    compare,
    cut,
    gradients,
    layers,
    one_process,
    paced_batch,
    paced_boundaries,
    squares,
)


# -- order --------------------------------------------------------------------------
@exercise("2.10", "gloo", asserts="gpipe gpipe-bubble make-schedule")
def test_gpipe_is_complete_and_forwards_come_first(impl, run):
    """Each stage and micro-batch once, all forwards first, the bubble of theory, any m and p."""
    sizes = [(4, 8), (1, 3), (2, 1), (3, 2), (5, 5)]

    def body(ctx):
        complete = [plain(impl.make_schedule("gpipe", p, m)) for p, m in sizes]
        return list(zip([plain(impl.gpipe(p, m)) for p, m in sizes], complete, strict=True))

    for (p, m), (order, schedule) in zip(
        sizes, run(body, 1, process_group=False, ledger=False)[0], strict=True
    ):
        what = f"GPipe with {p} ranks and {m} micro-batches"
        cause, text = problem_of(schedule, p, m)
        if cause:
            fail(f"{what}: {text}", cause=cause)
        compute = [[step for step in steps if len(step[0]) == 1] for steps in schedule]
        expect_equal(compute, order, what=f"{what}: compute steps of the schedule", cause="order")
        for rank, steps in enumerate(order):
            kinds = "".join(kind for kind, _, _ in steps)
            expect_equal(kinds, "F" * m + "B" * m, what=f"{what}: steps", rank=rank, cause="order")
            expect_equal({s for _, s, _ in steps}, {rank}, what=f"{what}: stages", rank=rank)
        got, want = bubble(order, {"F": 1.0, "B": 2.0}), (p - 1) / (m + p - 1)
        if got > want + 1e-9:
            fail(f"{what}: bubble {got:.3f}, (p-1)/(m+p-1) = {want:.3f}", cause="bubble")


# -- the interpreter ------------------------------------------------------------------------------
@exercise(
    "2.10", "virtual gloo cuda", asserts="gradient loss own-data called-once parameters layout"
)
def test_gpipe_equals_one_process(impl, run, seed, cases):
    """Gradients of every layer and the loss, on all ranks, for several m and numbers of stages."""
    sizes = ((3, 4, False), (2, 1, False), (4, 2, True), (1, 3, False), (2, 2, "all"))
    for ranks, m, frozen in cases(*sizes):
        schedule = lambda module: module.make_schedule("gpipe", ranks, m)
        check_run(run, impl, seed, ranks, m, schedule, frozen=frozen)


@exercise("2.10", "virtual", asserts="gradient loss life")
def test_gradients_add_up_over_steps(impl, run, seed):
    """Steps of two pipelines of the same modules, in turn and without clearing, add up."""
    order = any_order(seed, placement("v", 2, 2), 4)
    plans = completed(seed, order), completed(seed + 1, order)

    def body(ctx):
        found = layers(seed)
        parts = cut(found, 4)
        x, y = batch(seed, 4 * PER)
        mine = [parts[ctx.rank], parts[3 - ctx.rank]]
        shapes = boundaries(parts, x[:PER])
        made = [
            impl.Pipeline(mine, as_steps(impl, plan), F.cross_entropy, shapes) for plan in plans
        ]
        losses = [made[number].step(x, y) for number in (0, 1, 0)]
        return gradients(found, mine), loss_of(losses)

    parts, loss = one_process(seed, 4 * PER, 4)
    compare(list(run(body, 2)), parts, loss, "three steps of two pipelines", times=3.0)


@exercise("2.10", "virtual", asserts="boundaries dtype gradient loss")
def test_boundaries_of_two_dtypes(impl, run, seed):
    """A stage may work in float32 between stages in float64, and take its input to other shapes."""

    def model():
        found = layers(seed)
        found[3], found[4] = found[3].float(), found[4].float()
        found[3] = nn.Sequential(Cast(torch.float32), *found[3])
        found[4] = nn.Sequential(*found[4], nn.Unflatten(1, (1, -1)))
        found[5] = nn.Sequential(nn.Flatten(), Cast(torch.float64), *found[5])
        return found

    def body(ctx):
        found = model()
        parts = [nn.Sequential(*found[a:b]) for a, b in ((0, 3), (3, 4), (4, 5), (5, 8))]
        x, y = batch(seed, 2 * PER)
        shapes = boundaries(parts, x[:PER])
        schedule = impl.make_schedule("gpipe", 4, 2)
        pipeline = impl.Pipeline([parts[ctx.rank]], schedule, F.cross_entropy, shapes)
        loss = pipeline.step(x, y)
        return gradients(found, [parts[ctx.rank]]), loss

    parts, total = [], 0.0
    words, classes = batch(seed, 2 * PER)
    for x, y in zip(words.chunk(2), classes.chunk(2), strict=True):
        found = model()
        loss = F.cross_entropy(nn.Sequential(*found)(x), y) / 2
        loss.backward()
        parts.append(gradients(found))
        total += loss.item()
    compare(list(run(body, 4)), parts, total, "boundaries in float32", rtol=1e-4)


class Cast(nn.Module):
    """The values in another dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Cast."""
        return x.to(self.dtype)


class Detached(nn.Linear):
    """A linear layer that looks at its input and learns nothing through it."""

    def __init__(self, uses_weight: bool) -> None:
        super().__init__(2, 2, dtype=torch.float64)
        self.uses_weight = uses_weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A constant, or the layer of a detached input."""
        return super().forward(x.detach()) if self.uses_weight else torch.ones_like(x)


@exercise("2.10", "virtual", asserts="zero-gradient alone")
def test_a_stage_that_stops_the_gradient(impl, run, seed):
    """One stage alone does not use its input, or its output needs no gradient: zeros go on."""

    def body(ctx):
        out = []
        for uses_weight in (True, False):
            stages = [nn.Linear(2, 2), Detached(uses_weight), nn.Linear(2, 2)]
            stage = stages[ctx.rank].double()
            schedule = impl.make_schedule("gpipe", 3, 2)
            shapes = [torch.empty(1, 2, dtype=torch.float64, device="meta")] * 2
            pipeline = impl.Pipeline([stage], schedule, squares, shapes)
            x = torch.ones(2, 2, dtype=torch.float64)
            pipeline.step(x, torch.ones(4, 1, dtype=torch.float64))  # two targets per input
            grad = stage.weight.grad
            out.append(None if grad is None else bool(grad.any()))
        return out

    results = list(run(body, 3))
    for number, what in enumerate(("a detached input", "a constant output")):
        got = [each[number] for each in results]
        if got[0]:
            text = f"{what} on rank 1, and rank 0 has a gradient that is not zero"
            fail(text, cause="wrong", rank=0)
        trained = [bool(got[1]), got[2]]
        text = f"{what} on rank 1: whether ranks 1 and 2 have a gradient"
        expect_equal(trained, [number == 0, True], what=text, cause="no-gradient")


@exercise("2.10", "virtual gloo", asserts="any-schedule gradient called-once")
def test_any_valid_schedule_runs(impl, run, seed, cases):
    """Orders and places of messages by chance, several stages per rank, neighbours on one rank."""
    sizes = cases(("v", 2, 2, 3), ("round", 3, 1, 4), ("block", 2, 2, 2), ("v", 1, 3, 2))
    for number, (kind, ranks, chunks, m) in enumerate(sizes):
        order = any_order(seed + number, placement(kind, ranks, chunks), m)
        chosen = completed(seed + number, order)
        schedule = lambda module: as_steps(module, chosen)
        check_run(run, impl, seed, ranks, m, schedule, chunks=chunks, kind=kind)


class Meets(nn.Module):
    """The same values, after a collective of a group that is not the pipeline's."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group = group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Meet."""
        dist.all_reduce(torch.ones(1), group=self.group)
        return x


@exercise("2.10", "virtual", asserts="group-ranks other-groups group")
def test_two_pipelines_side_by_side(impl, run, seed):
    """Each runs in its own group, whose ranks are not those of the world."""

    def body(ctx):
        groups = [dist.new_group([3, 0, 2]), dist.new_group([4, 1])]
        group = groups[0] if ctx.rank in (0, 2, 3) else groups[1]
        heads = dist.new_group([0, 1])  # the first stages have something to say to each other
        ranks, rank = dist.get_world_size(group), dist.get_rank(group)
        own = seed + ranks
        found = layers(own)
        parts = cut(found, ranks)
        x, y = batch(own, 4 * PER)
        schedule = impl.make_schedule("gpipe", ranks, 4)
        shapes = boundaries(parts, x[:PER])
        stage = nn.Sequential(parts[rank], Meets(heads)) if rank == 0 else parts[rank]
        pipeline = impl.Pipeline([stage], schedule, F.cross_entropy, shapes, group=group)
        loss = pipeline.step(x, y)
        return gradients(found, [parts[rank]]), loss

    results = run(body, 5)
    for members in ([0, 2, 3], [1, 4]):
        own = seed + len(members)
        parts, loss = one_process(own, 4 * PER, 4)
        what = f"the pipeline of ranks {members}"
        compare([results[r] for r in members], parts, loss, what)


@exercise("2.10", "virtual gloo", asserts="messages boundaries cost")
def test_messages_and_bytes_are_those_of_the_schedule(impl, run, seed):
    """Each boundary is crossed once forward and once back per micro-batch, and no more is sent."""
    ranks, m, width = 3, 4, 50

    def body(ctx):
        part = nn.Sequential(nn.Linear(width, width), nn.Tanh()).bfloat16()
        shapes = [torch.empty(PER, width, dtype=torch.bfloat16, device="meta")] * (ranks - 1)
        schedule = impl.make_schedule("gpipe", ranks, m)
        pipeline = impl.Pipeline([part], schedule, squares, shapes)
        x = torch.ones(m * PER, width, dtype=torch.bfloat16)
        with ctx.region("step"):
            pipeline.step(x, x)

    results = run(body, ranks)
    for log in results.logs:
        log = log.select(region="step")
        log.all_waited()
        crossings = (log.rank < ranks - 1) + (log.rank > 0)
        sends, nbytes = crossings * m, crossings * m * PER * width * 2
        formula = "an activation or gradient in bfloat16 per boundary and micro-batch"
        messages_sent = log.select(op="send").messages
        if messages_sent != sends:
            text = f"rank {log.rank} sends {messages_sent} messages, the schedule has {sends}"
            fail(text, cause="messages", rank=log.rank)
        if sum(count for op, count in log.ops().items() if op not in ("send", "recv")) > 2:
            text = f"rank {log.rank} used {dict(log.ops())}: one collective for the loss will do"
            fail(text, cause="collectives", rank=log.rank)
        log.sent_at_most(nbytes + 32, formula + " and the loss")
        log.sent_at_least(nbytes, formula)


@exercise("2.10", "virtual", asserts="no-waiting cost")
def test_messages_travel_while_ranks_compute(impl, run):
    """No rank waits for a send, and only a rank that needs the data waits for a
    receive: the time of theory."""
    ranks, m, message = 4, 6, UNIT / 2
    schedule = early_receives(ranks, m)
    assert problem_of(schedule, ranks, m) == ("", "")
    laptop = load_cluster("laptop")
    link = dataclasses.replace(laptop.inside, alpha=message, bandwidth=1e15)

    def body(ctx):
        meter = Meter()
        stage = Paced((UNIT, UNIT, UNIT), meter)
        chosen = as_steps(impl, schedule)
        pipeline = impl.Pipeline([stage], chosen, squares, paced_boundaries(ranks))
        begin = time.perf_counter()
        pipeline.step(*paced_batch(m))
        return meter.end - begin

    cluster = dataclasses.replace(laptop, inside=link)
    took = max(run.simulate(body, ranks, cluster=cluster)) / UNIT
    want = max(times(schedule, {"F": 1.0, "B": 2.0}, message / UNIT).values())
    if took > want * 1.001:
        text = f"{ranks} ranks, {m} micro-batches, messages of half a forward: the last backward "
        text += f"ends after {took:.2f} forwards, {want:.2f} can be had: somebody waits for a "
        fail(text + "send, or for a receive before its data is needed", cause="slower")


@exercise("2.10", "virtual", asserts="few-sends cost")
def test_few_sends_are_unfinished(impl, run):
    """When a send starts, at most two earlier ones of its direction are not waited for."""
    m = 6
    laptop = load_cluster("laptop")
    link = dataclasses.replace(laptop.inside, alpha=UNIT, bandwidth=1e15)

    def body(ctx):
        stage = Paced((UNIT / 20,) * 3)
        schedule = impl.make_schedule("gpipe", 3, m)
        impl.Pipeline([stage], schedule, squares, paced_boundaries(3)).step(*paced_batch(m))

    cluster = dataclasses.replace(laptop, inside=link)
    for log in run.simulate(body, 3, cluster=cluster).logs:
        sends = log.select(op="send").events
        for number, send in enumerate(sends):
            before = [s for s in sends[:number] if s.peer == send.peer]
            before = [s for s in before if s.end is None or s.end > send.start]
            if len(before) > 2:
                text = f"rank {log.rank} starts {send} while {len(before)} earlier ones are not "
                text += "waited for, two are enough"
                fail(text, cause="too-many-in-flight", rank=log.rank, line=send.line)
    check_sends_of_two_stages(run, impl, cluster)


def check_sends_of_two_stages(run, impl, cluster) -> None:
    """Two stages of a rank and two directions: eight may be unfinished."""
    m, places = 12, [("F", 0), ("F", 2), ("B", 2), ("B", 0)]
    order = [[(k, s + r, i) for k, s in places for i in range(m)] for r in range(2)]
    schedule = completed(0, order)

    def body(ctx):
        stages = [Paced((UNIT / 20,) * 3) for _ in range(2)]
        pipeline = impl.Pipeline(stages, as_steps(impl, schedule), squares, paced_boundaries(4))
        pipeline.step(*paced_batch(m))

    for log in run.simulate(body, 2, cluster=cluster).logs:
        sends = log.select(op="send").events
        for number, send in enumerate(sends):
            before = [s for s in sends[:number] if s.end is None or s.end > send.start]
            if len(before) > 8:
                text = f"rank {log.rank} has two stages and starts {send} while {len(before)} "
                text += "earlier ones are not waited for, eight are enough"
                fail(text, cause="too-many-in-flight", rank=log.rank, line=send.line)


class Noted(nn.Module):
    """A stage that counts, when it is called, the tensors of earlier
    micro-batches that are alive."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)
        self.inputs: list[weakref.ref] = []
        self.outputs: list[weakref.ref] = []
        self.alive = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A linear layer."""
        for noted in (self.inputs, self.outputs):
            self.alive = max(self.alive, sum(ref() is not None for ref in noted))
        y = self.layer(x)
        if x.requires_grad:  # the first stage's inputs are the caller's
            self.inputs.append(weakref.ref(x))
        self.outputs.append(weakref.ref(y))
        return y


@exercise("2.10", "virtual", asserts="freed resources")
def test_inputs_and_outputs_are_freed(impl, run, seed):
    """One micro-batch after another: no input and no output of a finished micro-batch stays."""
    m, width = 10, 3
    plans = {"1 rank with 3 stages": [0, 0, 0], "2 ranks with 2 stages each": [0, 1, 0, 1]}

    def body(ctx):
        found, alone = [], dist.new_group([0])
        for rank_of in plans.values():
            if ctx.rank > max(rank_of):
                continue
            stages = [Noted(width) for rank in rank_of if rank == ctx.rank]
            order = [
                [(kind, s, i) for i in range(m) for kind, s in turns(rank_of) if rank_of[s] == rank]
                for rank in range(max(rank_of) + 1)
            ]
            group = None if len(order) > 1 else alone
            shapes = [torch.empty(1, width, device="meta")] * (len(rank_of) - 1)
            schedule = as_steps(impl, completed(seed, order))
            pipeline = impl.Pipeline(stages, schedule, squares, shapes, group=group)
            pipeline.step(torch.ones(m, width), torch.ones(m, width))
            found.append([stage.alive for stage in stages])
        return found

    results = run(body, 2)
    for rank, found in enumerate(results):
        for (what, rank_of), alive in zip(list(plans.items())[rank:], found, strict=True):
            sends = 4 if max(rank_of) else 0  # unfinished ones may hold an output
            for stage, count in enumerate(alive):
                if count > 1 + sends:
                    text = f"{what}, micro-batches go forth and back one by one: of those "
                    text += f"that are done, {count} inputs or outputs of the rank's stage {stage} "
                    fail(f"{text}are still in memory", cause="not-freed", rank=rank)


def turns(rank_of: list[int]) -> list[tuple[str, int]]:
    """Forward through all stages, and back."""
    stages = range(len(rank_of))
    return [*(("F", s) for s in stages), *(("B", s) for s in reversed(stages))]


class Slow(nn.Module):
    """The same values, after a while."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Sleep."""
        time.sleep(UNIT)
        return x


@exercise("2.10", "virtual", asserts="any-schedule messages")
def test_messages_are_told_apart_by_their_rank(impl, run, seed):
    """A gradient that overtakes an activation is not taken for it."""
    first = [("F", 0, 0), ("send F", 0, 0), ("F", 0, 1), ("send F", 0, 1)]
    first += [(kind, 0, i) for i in range(2) for kind in ("recv B", "B")]
    middle = [("recv F", 1, 0), ("F", 1, 0), ("send F", 1, 0), ("recv F", 1, 1), ("recv B", 1, 0)]
    middle += [("F", 1, 1), ("send F", 1, 1), ("B", 1, 0), ("send B", 1, 0)]
    middle += [(kind, 1, 1) for kind in ("recv B", "B", "send B")]
    last = [(kind, 2, i) for i in range(2) for kind in ("recv F", "F", "B", "send B")]
    schedule = [first, middle, last]
    assert problem_of(schedule, 3, 2) == ("", "")

    def body(ctx):
        found = layers(seed)
        parts = cut(found, 3)
        x, y = batch(seed, 2 * PER)
        shapes = boundaries(parts, x[:PER])
        stage = nn.Sequential(parts[0], Slow()) if ctx.rank == 0 else parts[ctx.rank]
        pipeline = impl.Pipeline([stage], as_steps(impl, schedule), F.cross_entropy, shapes)
        loss = pipeline.step(x, y)
        return gradients(found, [parts[ctx.rank]]), loss

    parts, loss = one_process(seed, 2 * PER, 2)
    results = run.simulate(body, 3, cluster="dgx-h100")
    compare(list(results), parts, loss, "a slow first stage")


@exercise("2.10", "virtual", asserts="freed resources")
def test_nothing_is_kept_after_a_step(impl, run):
    """All activations are freed; GPipe keeps m micro-batches at most while it runs."""
    ranks, m = 3, 5

    def body(ctx):
        meter = Meter()
        schedule = impl.make_schedule("gpipe", ranks, m)
        stage = Paced((0.0, 0.0, 0.0), meter)
        pipeline = impl.Pipeline([stage], schedule, squares, paced_boundaries(ranks))
        pipeline.step(*paced_batch(m))
        part, x = nn.Linear(64, 64), torch.ones(m, 64)
        shapes = [torch.empty(1, 64, device="meta")] * (ranks - 1)
        pipeline = impl.Pipeline([part], schedule, squares, shapes)
        with PeakMemory() as memory:
            pipeline.step(x, x)
        held = memory.current - storage_bytes(p.grad for p in part.parameters())
        return [meter.peak, meter.live, held]

    for rank, (peak, live, held) in enumerate(run(body, ranks)):
        if held >= 3 * 64 * 4:  # the last ones may be left until the next step
            text = f"after the step {held} bytes are held beside the gradients, each of 5 "
            text += "activations has 256: free them, also those that were sent"
            fail(text, cause="not-freed", rank=rank)
        if live:
            text = f"{live} micro-batches are still kept after the step: free each after its B"
            fail(text, cause="not-freed", rank=rank)
        expect_equal(peak, m, what="most micro-batches kept", rank=rank, cause="peak")


# -- bad input ------------------------------------------------------------------------------------
@exercise("2.10", "virtual", asserts="refused-schedule refused-plan refused-batch refusals")
def test_bad_input_is_refused_on_all_ranks(impl, run, seed):
    """A ValueError on every rank, before anything is sent: no hang."""

    def step(size, targets=None):
        def call(ctx):
            ranks = ctx.world_size
            stage, schedule = Paced((0.0, 0.0, 0.0)), impl.make_schedule("gpipe", ranks, 4)
            pipeline = impl.Pipeline([stage], schedule, squares, paced_boundaries(ranks))
            other = size if targets is None else targets
            pipeline.step(torch.zeros(size, 1), torch.zeros(other, 1))

        return call

    def made(stages, schedule, boundary_count=2):
        def call(ctx):
            chunks = [Paced((0.0, 0.0, 0.0)) for _ in range(stages)]
            impl.Pipeline(chunks, schedule(), squares, paced_boundaries(boundary_count + 1))

        return call

    weights = completed(seed, [[(k, r, 0) for k in "FBW"] for r in range(3)])
    plan = lambda ranks: lambda: impl.make_schedule("gpipe", ranks, 4)
    batches = {
        "a batch of 10 for 4 micro-batches": step(10),
        "8 inputs and 6 targets for 4 micro-batches": step(8, 6),
        "8 inputs and no targets": step(8, 0),
        "no inputs and 8 targets": step(0, 8),
        "6 inputs and 8 targets for 4 micro-batches": step(6, 8),
        "an empty batch for 4 micro-batches": step(0),
    }
    calls = {
        "a schedule for 4 ranks on 3": made(1, plan(4), 3),
        "a schedule with 3 stages for 5": made(1, plan(3), 4),
        "2 modules for 1 stage": made(2, plan(3)),
        "an empty schedule": made(1, lambda: [[], [], []]),
        "steps W in a plain pipeline": made(1, lambda: as_steps(impl, weights)),
        **batches,
        "0 micro-batches": lambda ctx: impl.make_schedule("gpipe", 3, 0),
        "-4 micro-batches": lambda ctx: impl.gpipe(3, -4),
        "GPipe with 0 chunks": lambda ctx: impl.make_schedule("gpipe", 3, 3, 0),
        "1F1B with 2 chunks": lambda ctx: impl.make_schedule("1f1b", 3, 3, 2),
        "0 ranks": lambda ctx: impl.gpipe(0, 2),
        "the schedule 'zigzag'": lambda ctx: impl.make_schedule("zigzag", 3, 3),
        "GPipe with 2 chunks": lambda ctx: impl.make_schedule("gpipe", 3, 3, 2),
    }

    def body(ctx):
        chosen = batches if ctx.world_size == 1 else calls
        return [refusal(call, ctx) for call in chosen.values()]

    for ranks, chosen in ((1, batches), (3, calls)):  # one rank alone never hangs
        expect_refused(run(body, ranks), list(chosen))


@exercise("2.10", "virtual", asserts="boundary-error dtype")
def test_a_wrong_boundary_is_named(impl, run, seed):
    """A stage whose output has another shape or dtype than its boundary says: ValueError."""
    wrong = {
        "7 features instead of 5": torch.empty(2, 5),
        "7 x 2 instead of 2 x 7": torch.empty(7, 2),
        "float32 instead of float64": torch.empty(2, 7, dtype=torch.float64),
        "float32 instead of int32": torch.empty(2, 7, dtype=torch.int32),
    }

    def body(ctx):
        out = []
        for shape in wrong.values():
            stages = [nn.Linear(1, 7), nn.Linear(7, 1)]
            schedule = as_steps(impl, [[("F", 0, 0), ("F", 1, 0), ("B", 1, 0), ("B", 0, 0)]])
            pipeline = impl.Pipeline(stages, schedule, squares, [shape.to("meta")])
            out.append(refusal(pipeline.step, torch.ones(2, 1), torch.ones(2, 1)))
        return out

    def alone(ctx):  # rank 1, which would wait for the output, takes no step
        out = []
        for shape in wrong.values():
            schedule = impl.make_schedule("gpipe", 2, 1)
            stage = (nn.Linear(1, 7), nn.Linear(7, 1))[ctx.rank]
            pipeline = impl.Pipeline([stage], schedule, squares, [shape.to("meta")])
            if ctx.rank == 0:
                out.append(refusal(pipeline.step, torch.ones(2, 1), torch.ones(2, 1)))
        return out

    expect_refused(run(body, 1), [f"an output of {what}" for what in wrong])
    calls = [f"an output for another rank of {what}" for what in wrong]
    expect_refusals(run(alone, 2)[0], calls, rank=0)


# -- traces ---------------------------------------------------------------------------------------
@trace("2.10", bubble=3 / 11)
def trace_gpipe(impl):
    """GPipe with 8 micro-batches."""
    return paced_scenario(lambda module: module.make_schedule("gpipe", 4, 8))(impl)


@exercise("2.10", "nccl", asserts="host")
def test_a_pipelined_step_waits_once_for_the_gpu(impl, run, seed):
    """However many micro-batches there are, the host waits for its GPU once, for the loss."""

    def body(ctx):
        parts = cut([layer.to(ctx.device) for layer in layers(seed)], 2)
        x, y = (t.to(ctx.device) for t in batch(seed, 4 * PER))
        shapes = boundaries(parts, x[:PER])
        schedule = impl.make_schedule("gpipe", 2, 4)
        pipeline = impl.Pipeline([parts[ctx.rank]], schedule, F.cross_entropy, shapes)
        with ctx.region("step"):
            pipeline.step(x, y)

    expect_few_waits(run(body, 2), 1, "a step of 4 micro-batches")
