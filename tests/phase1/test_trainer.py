"""Checks of exercise 1.3: broadcast of the state; the pictures of 1.3 and 1.4."""

from __future__ import annotations

import math
import weakref

import torch
import torch.distributed as dist
from torch import nn

from distlab.grading import exercise, expect_close, expect_equal, expect_same_sequence, fail, trace
from distlab.reference.workloads import build_model, digits
from tests.phase1.groups import group_of


class Zoo(nn.Module):
    """Every kind of state: tied, frozen, strided, empty, in many dtypes, and non-persistent."""

    def __init__(self, place: int = 0) -> None:
        super().__init__()
        self.first = nn.Linear(5, 5)
        self.tied = nn.Linear(5, 5, bias=False)
        self.tied.weight = self.first.weight
        self.frozen = nn.Parameter(torch.rand(3), requires_grad=False)
        strided = torch.rand(4, 6).t()
        self.strided = nn.Parameter(strided.contiguous() if place % 2 else strided)
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.brief = nn.Parameter(torch.rand(3, 2).bfloat16())
        self.register_parameter("none", None)
        self.norm = nn.BatchNorm1d(5)
        self.register_buffer("steps", torch.randint(0, 1000, (3,)) + 2**60)
        self.register_buffer("scratch", torch.rand(2, 3), persistent=False)
        self.register_buffer("mask", torch.rand(9) > 0.5)
        self.register_buffer("short", torch.randint(-999, 999, (4,), dtype=torch.int16))
        self.register_buffer("tiny", torch.rand(5).to(torch.float8_e4m3fn))
        self.register_buffer("waves", torch.rand(3, dtype=torch.complex64))
        self.register_buffer("also", self.first.weight)  # a parameter that is a buffer, too
        self.register_buffer("precise", torch.rand((), dtype=torch.float64))
        self.register_buffer("exact", torch.rand(2, 3, dtype=torch.float64))
        self.register_buffer("light", torch.rand(2, 3).half())
        self.register_buffer("missing", torch.tensor([math.nan, math.inf, float(place)]))
        self.register_buffer("columns", torch.rand(4, 6)[:, 1:3])
        with torch.no_grad():
            self.norm.running_mean.uniform_()
            self.norm.num_batches_tracked.random_(1, 100)


def zoo_of(seed: int, place: int) -> Zoo:
    """The state of a rank, drawn alike by the rank and by the grader."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed * 31 + place)
        zoo = Zoo(place)
        memory = torch.rand(12)  # several buffers of other lengths at one address
        for name, view in (("begin", memory[:3]), ("whole", memory), ("section", memory[:6])):
            zoo.register_buffer(name, view)
        return zoo


def tensors_of(model: nn.Module) -> list[torch.Tensor]:
    return [*model.parameters(), *model.buffers()]


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    named = (*model.named_parameters(), *model.named_buffers())
    return {name: t.detach().cpu().clone() for name, t in named}


def state_bytes(model: nn.Module) -> int:
    return sum(t.numel() * t.element_size() for t in dict.fromkeys(tensors_of(model)))


def broadcast_to(impl, model: nn.Module, src: int, group: object = None) -> list[object]:
    """[state afterwards, parts of the model that were replaced or recorded]."""
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    objects = [(id(t), t.data_ptr()) for t in tensors_of(model)]
    flags = [p.requires_grad for p in model.parameters()]
    own = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    impl.broadcast_model_state(model, src, group)
    wrong = ""
    if objects != [(id(t), t.data_ptr()) for t in tensors_of(model)]:
        wrong = "new-tensors"
    if model.tied.weight is not model.first.weight:
        wrong = "new-tensors"
    if str(own) != str([p.grad for p in model.parameters()]):
        wrong = wrong or "gradients-changed"
    if flags != [p.requires_grad for p in model.parameters()]:
        wrong = wrong or "frozen"
    if any(t.grad_fn is not None for t in tensors_of(model)):
        wrong = wrong or "grad-recorded"
    return [state_of(model), wrong]


WRONG = {
    "new-tensors": "a parameter or buffer was replaced by a new tensor, or its memory by other "
    "memory: the optimizer would go on with the old one; write into it in place",
    "gradients-changed": "gradients that parameters had before have changed",
    "frozen": "requires_grad of a parameter changed",
    "grad-recorded": "a gradient was recorded",
}


def expect_state(result, before: nn.Module, source: nn.Module, what: str, rank: int) -> None:
    after, wrong = result
    if wrong:
        fail(f"{what}: {WRONG[wrong]}", cause=wrong, rank=rank)
    own = state_of(before)
    for name, value in state_of(source).items():
        expect_close(
            after[name],
            value,
            what=f"{name} ({what})",
            rank=rank,
            before=own[name] if before is not source else None,
            rtol=0.0,
            atol=0.0,
        )


@exercise(
    "1.3",
    "virtual gloo cuda",
    asserts="equal all-state strides in-place dtype layout parameters alone",
)
def test_state_equals_the_source(impl, run, seed, cases):
    """Parameters and buffers of every kind equal those of the source rank."""

    def body(ctx):
        model = zoo_of(seed, ctx.rank).to(ctx.device)  # ranks start from different random states
        return broadcast_to(impl, model, ctx.world_size // 2)

    worlds = cases(3, 1, 2, 4, 5)
    for w, results in zip(worlds, run.worlds(body, worlds), strict=True):
        zoos = [zoo_of(seed, rank) for rank in range(w)]
        for rank, result in enumerate(results):
            expect_state(result, zoos[rank], zoos[w // 2], f"from rank {w // 2} of {w}", rank)


@exercise("1.3", "virtual gloo", asserts="once cost parameters")
def test_state_is_sent_once(impl, run, seed):
    """Only the state's own bytes are sent: tied tensors once, and not from every rank."""

    def body(ctx):
        model = Zoo()
        with ctx.region("broadcast"):
            impl.broadcast_model_state(model)

    results = run(body, 3, delays=True)
    nbytes = state_bytes(Zoo())
    for log in results.logs:
        log = log.select(region="broadcast")
        log.all_waited()
        # the source may send to each rank by itself
        log.sent_at_most(2 * nbytes if log.rank == 0 else nbytes * 2 / 3 + 64, "state once")
    received = [log.select(region="broadcast").received for log in results.logs[1:]]
    for rank, got in enumerate(received, 1):
        if got < nbytes:
            fail(
                f"rank {rank} received {got} bytes, the state has {nbytes}: something is missing",
                cause="too-few-bytes",
                rank=rank,
            )
        if got > nbytes + 64:
            fail(
                f"rank {rank} received {got} bytes, the state has {nbytes}: something is sent "
                "twice, tied parameters for example",
                cause="too-many-bytes",
                rank=rank,
            )
    expect_same_sequence(results.logs)


@exercise("1.3", "virtual", asserts="group-only group life resources")
def test_state_in_a_subgroup(impl, run, seed):
    """In a group, src is a global rank; another group broadcasts another model meanwhile, twice."""
    groups = ([3, 1], [2, 0])

    def body(ctx):
        made = [group_of(ranks) for ranks in groups]
        odd = ctx.rank % 2
        model = zoo_of(seed, ctx.rank)
        untouched = torch.get_rng_state()
        impl.broadcast_model_state(nn.Flatten(), groups[1 - odd][0], made[1 - odd])  # no state
        answers = []
        for turn, src in enumerate(groups[1 - odd]):
            with torch.no_grad():  # the ranks have drifted apart
                for t, new in zip(
                    tensors_of(model), tensors_of(zoo_of(seed + turn, ctx.rank)), strict=True
                ):
                    t.copy_(new)
            answers.append(broadcast_to(impl, model, src, made[1 - odd]))
        watched = weakref.ref(model.first.weight)
        del t
        same = torch.equal(untouched, torch.get_rng_state())
        del model
        return answers, same, watched() is not None

    for rank, (answers, same, alive) in enumerate(run(body, 4)):
        for turn, result in enumerate(answers):
            src = groups[1 - rank % 2][turn]
            what = f"from global rank {src}, broadcast number {turn + 1}, after a change on all"
            before, source = zoo_of(seed + turn, rank), zoo_of(seed + turn, src)
            expect_state(result, before, source, what, rank)
        expect_equal(same, True, what="global random state as before", rank=rank)
        expect_equal(alive, False, what="a parameter is alive after its model is gone", rank=rank)


def traced_steps(impl, ctx) -> None:
    images, labels = digits()[ctx.rank :: ctx.world_size]
    model = build_model("mlp", ctx.rank)
    with ctx.region("1.3"):
        impl.broadcast_model_state(model)
    for step in range(3):
        model.zero_grad()
        chosen = slice(64 * step, 64 * step + 64)
        nn.functional.cross_entropy(model(images[chosen]), labels[chosen]).backward()
        impl.average_gradients(model.parameters(), 64)
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad


@trace("1.3")
@trace("1.4")
def trace_averaging(impl):
    """Broadcast, then three steps on the digits: forward, backward, averaging."""
    digits()

    def body(ctx):
        traced_steps(impl, ctx)  # warms up
        dist.barrier()
        ctx.start_picture()
        traced_steps(impl, ctx)

    return body
