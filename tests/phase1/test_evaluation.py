"""Checks of exercise 1.6: loss and accuracy over the samples of all ranks, exactly."""

from __future__ import annotations

import math
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from distlab.grading import (
    exercise,
    expect_equal,
    expect_few_waits,
    expect_refusals,
    fail,
    refusal,
    trace,
)
from distlab.reference.workloads import WORKLOADS, build_model, digits
from tests.phase1.groups import group_of, order_in
from tests.phase1.loaders import data_of, loader_of

MINE = {
    "4, 1 and 0 samples": [(6.0, 3, 4), (0.5, 0, 1), (0.0, 0, 0)],
    "billions of samples": [(2.0**33 + 1, 2**31 + 1, 2**32), (1.0, 1, 3), (0.0, 0, 0)],
    "losses of many sizes": [(1e9 + 0.25, 1, 3), (0.125, 2, 2), (0.0, 0, 2)],
}


def numbers(got: object, rank: int) -> list[float]:
    """The two floats that came back; otherwise the check fails."""
    if not isinstance(got, tuple) or [type(v) for v in got] != [float, float]:
        fail(f"expected (mean loss, accuracy) as floats, got {got!r}", cause="type", rank=rank)
    return list(got)


@exercise("1.6", "virtual gloo", asserts="mean exact one-message dtype cost alone resources")
def test_metrics_of_uneven_shards(impl, run, seed):
    """Mean loss and accuracy over all samples, not the mean of means; one message."""

    def body(ctx):
        with ctx.region("metrics"):
            answers = [impl.global_metrics(*parts[ctx.rank]) for parts in MINE.values()]
        endless = math.inf if ctx.rank == 1 else 1.0
        return answers, impl.global_metrics(endless, 1, 2)

    results = run(body, 3)
    for rank, (answers, endless) in enumerate(results):
        for (what, parts), got in zip(MINE.items(), answers, strict=True):
            loss, right, count = (sum(each) for each in zip(*parts, strict=True))
            own_loss, own_right, own_count = parts[rank]
            own = own_loss / max(own_count, 1), own_right / max(own_count, 1)
            check_pair(numbers(got, rank), (loss / count, right / count), own, what, rank)
        what = "(mean loss, accuracy), one rank's losses are infinite"
        got = numbers(endless, rank)
        expect_equal(got, [math.inf, 0.5], what=what, rank=rank, cause="infinity-lost")
    for log in results.logs:
        log = log.select(region="metrics")
        log.all_waited()
        messages = log.messages
        what = "messages of three calls of global_metrics"
        expect_equal(messages, 3, what=what, rank=log.rank, cause="too-many-messages")
        for event in log.events:
            if event.payload > 64:
                text = f"{event} has {event.payload} bytes, at most 64 are needed"
                fail(text, cause="too-many-bytes", rank=log.rank, line=event.line)


def check_pair(got, want, own, what: str, rank: int) -> None:
    """The mean loss and the accuracy, to float64's rounding."""
    if want != own and tuple(got) == own:
        fail(f"{what}: these are the rank's own numbers", cause="own-metrics", rank=rank)
    for name, value, right in zip(("mean loss", "accuracy"), got, want, strict=True):
        error = abs(value - right) / max(1.0, abs(right))
        if not error <= 1e-14:
            cause = "precision" if error < 1e-6 else "mean-of-means" if error < 1 else "wrong"
            why = {"precision": ": add up in float64"}.get(cause, "")
            text = f"{name} of {what}: expected {right!r}, got {value!r}{why}"
            fail(text, cause=cause, rank=rank)


@exercise("1.6", "virtual", asserts="mean refused group refusals life")
def test_metrics_in_a_group(impl, run, seed):
    """In a group out of order, while the ranks of another group have no sample and all refuse."""

    def body(ctx):
        group = [group_of(ranks) for ranks in ([3, 1], [2, 0])][1 - ctx.rank % 2]
        if ctx.rank % 2 == 0:
            return [refusal(impl.global_metrics, 0.0, 0, 0, group) for _ in range(2)]
        return [impl.global_metrics(float(ctx.rank), 1, ctx.rank, group) for _ in range(2)]

    for rank, answers in enumerate(run(body, 4)):
        if rank % 2 == 0:
            expect_refusals(answers, ["no rank of the group has a sample"] * 2, rank=rank)
            continue
        for got in answers:
            own = 1.0, 1 / rank
            what = "1 and 3 samples of the group [3, 1]"
            check_pair(numbers(got, rank), (4 / 4, 2 / 4), own, what, rank)


class Moody(nn.Module):
    """Different in eval mode; remembers whether gradients were recorded and how it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)
        self.drop = nn.Dropout(0.0).eval()  # as one who freezes a part of the model leaves it
        self.live = nn.Dropout(0.5)
        self.recorded = False
        self.fail = False

    def forward(self, x):
        self.recorded |= torch.is_grad_enabled()
        if self.fail == "interrupt":
            raise KeyboardInterrupt
        if self.fail:
            raise RuntimeError("evaluation fails")
        if not len(x):
            raise RuntimeError("the model is called without a sample")
        out = self.live(self.linear(x))
        return out.flip(1) * 3 if self.training else out


def moody(seed: int) -> Moody:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Moody().double()


class Broken(torch.utils.data.Dataset):
    """A rank can't read the samples after its first two, whichever these are."""

    def __init__(self, n: int) -> None:
        self.n, self.reads = n, 0

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int):
        self.reads += 1
        if self.reads > 2:
            raise RuntimeError("loading fails ")
        return torch.zeros(6, dtype=torch.float64), 0


def modes_of(model: nn.Module) -> list[bool]:
    return [module.training for module in model.modules()]


def alone(seed: int, n: int) -> tuple[float, float]:
    """Loss and accuracy of one process on the first ``n`` samples of the test set."""
    inputs, targets = (t[:n] for t in data_of(seed, 21).tensors)
    logits = moody(seed).linear(inputs)
    accuracy = (logits.argmax(1) == targets).double().mean().item()
    return F.cross_entropy(logits, targets).item(), accuracy


def check_evaluation(run, impl, seed: int, world_size: int, n: int, remainder: str) -> None:
    def body(ctx):
        dataset = torch.utils.data.Subset(data_of(seed, 21), range(n))
        model = moody(seed).to(ctx.device)
        own = loader_of(impl, ctx, dataset, 4 * ctx.world_size, seed, remainder, shuffle=False)
        out = []
        for training in (True, False):
            model.train(training)
            model.drop.eval()
            before = modes_of(model)
            with ctx.region("evaluate"):
                answer = impl.evaluate(model, own, device=ctx.device)
            out.append([answer, before == modes_of(model), torch.is_grad_enabled()])
            torch.set_grad_enabled(True)
        return out, model.recorded

    results = run(body, world_size)
    counted = n // world_size * world_size if remainder == "drop" else n
    want = alone(seed, counted)
    where = f"{n} samples on {world_size} ranks, remainder={remainder!r}"
    for rank, (out, recorded) in enumerate(results):
        for answer, kept, recording in out:
            loss, accuracy = numbers(answer, rank)
            for what, got, right in (("loss", loss, want[0]), ("accuracy", accuracy, want[1])):
                if not abs(got - right) <= 1e-9:
                    text = f"{where}: {what} of {counted} samples is {right!r}, got {got!r}"
                    text += counted_as(accuracy, want[1], counted)
                    fail(text, cause="not-exact", rank=rank)
            if not kept:
                fail("a module's training mode was not restored", cause="mode-lost", rank=rank)
            if not recording:
                text = "after the evaluation no gradients are recorded any more: use torch.no_grad "
                fail(f"{text}for the time of the evaluation only", cause="grad-off", rank=rank)
        if recorded:
            fail("gradients were recorded in evaluation", cause="grad-recorded", rank=rank)
        messages = results.logs[rank].select(region="evaluate").messages
        what = f"{where}: messages of two evaluations"
        expect_equal(messages, 2, what=what, rank=rank, cause="too-many-messages")


def counted_as(accuracy: float, right: float, samples: int) -> str:
    """The number of samples that divided the accuracy, if the right answers
    were counted correctly."""
    if not accuracy or abs(accuracy - right) < 1e-9:
        return ""
    divisor = right * samples / accuracy
    near = abs(divisor - round(divisor)) < 1e-6
    return f" (right if there were {divisor:.0f} samples)" if near else ""


@exercise("1.6", "virtual gloo cuda", asserts="each-once empty modes no-gradient evaluated alone")
def test_evaluation_is_exact(impl, run, seed, cases):
    """Each sample counts once, under padding, uneven shards and empty ones."""
    for w, n, remainder in cases(
        (2, 21, "pad"), (4, 21, "keep"), (3, 2, "pad"), (3, 2, "keep"), (4, 21, "drop")
    ):
        check_evaluation(run, impl, seed, w, n, remainder)


@exercise("1.6", "virtual", asserts="each-once group life")
def test_evaluation_in_a_group(impl, run, seed):
    """Two groups evaluate two models at once, each on all samples."""
    groups = ([3, 1], [2, 0])

    def body(ctx):
        made, ranks = [group_of(each) for each in groups], groups[1 - ctx.rank % 2]
        place = SimpleNamespace(rank=ranks.index(ctx.rank), world_size=2)
        model = moody(seed + ctx.rank % 2)
        own = loader_of(impl, place, data_of(seed + ctx.rank % 2, 21), 8, seed, "pad")
        with torch.no_grad():
            answer = impl.evaluate(model, own, made[1 - ctx.rank % 2])
            recording = torch.is_grad_enabled()
        with torch.no_grad():
            model.linear.bias[2] = math.nan if ctx.rank == ranks[1] else 0.0
        bad = impl.evaluate(model, own, made[1 - ctx.rank % 2])
        return answer, recording, bad

    for rank, (answer, recording, bad) in enumerate(run(body, 4)):
        what = "gradients are recorded after an evaluation under torch.no_grad"
        expect_equal(recording, False, what=what, rank=rank, cause="grad-on")
        loss = numbers(bad, rank)[0]
        if loss == loss:
            text = f"the losses of a rank are nan: expected the mean loss nan, got {loss!r}"
            fail(text, cause="nan-lost", rank=rank)
        want = alone(seed + rank % 2, 21)
        for what, got, right in zip(("loss", "accuracy"), numbers(answer, rank), want, strict=True):
            if not abs(got - right) <= 1e-9:
                where = f"{what} in the group {groups[1 - rank % 2]}"
                text = f"{where}: expected {right!r}, got {got!r}"
                fail(text, cause="not-exact", rank=rank)


@exercise("1.6", "virtual", asserts="modes refused life")
def test_mode_is_restored_after_an_error(impl, run, seed):
    """A model is left in training mode, whether it, the loader or the user stops the evaluation."""

    def body(ctx):
        model = Moody().double()
        before = modes_of(model)
        loader = loader_of(impl, ctx, data_of(seed, 8), 4, seed)
        broken = loader_of(impl, ctx, Broken(8), 4, seed)
        said, kept = "", True
        for model.fail, batches in (("interrupt", loader), ("", broken), ("error", loader)):
            try:
                impl.evaluate(model, batches)
            except (RuntimeError, KeyboardInterrupt) as error:
                said += str(error) or "interrupt "
            kept = kept and modes_of(model) == before and torch.is_grad_enabled()
            model.train()
            model.drop.eval()
            torch.set_grad_enabled(True)
        nothing = loader_of(impl, ctx, data_of(seed, 1), 2, seed, "drop")
        return kept, said, refusal(impl.evaluate, model, nothing), modes_of(model) == before

    for rank, (kept, said, refused, again) in enumerate(run(body, 2)):
        raised = said.startswith("interrupt ") and said.count("fails") == 2
        what = "an interrupt, the loader's and the model's own error come out"
        expect_equal(raised, True, what=what, rank=rank, cause="error-swallowed")
        what = "modes, and recording of gradients, as before, after an interrupt or an error, "
        what += "also one of the loader"
        expect_equal(kept, True, what=what, rank=rank, cause="mode-lost")
        expect_refusals([refused], ["no rank has a sample to evaluate"], rank=rank)
        expect_equal(again, True, what="modes as before, no samples", rank=rank, cause="mode-lost")


@exercise("1.6", "virtual", asserts="prints output group cost")
def test_one_rank_prints(impl, run):
    """Only the group's first rank prints, and it communicates nothing for that."""

    def body(ctx):
        group = group_of([2, 1])
        with ctx.region("print"):
            impl.print_once("  epoch 1 of 3")
            impl.print_once("in the group", group)  # rank 0 is no member
            if ctx.rank == 0:
                impl.print_once("only rank 0 comes here")

    results = run(body, 3)
    first = order_in([2, 1])[0]
    grouped = [["in the group"] if rank == first else [] for rank in (1, 2)]
    wants = [["  epoch 1 of 3", "only rank 0 comes here"], *grouped]
    for rank in (1, 2, 0):
        want, lines = wants[rank], results.output[rank].splitlines()
        got = [line for line in lines if line in ("  epoch 1 of 3", "in the group") or line in want]
        cause = "every-rank-prints" if len(got) > len(want) else "not-printed"
        expect_equal(got, want, what="printed lines", rank=rank, cause=cause)
        events = results.logs[rank].select(region="print").events
        expect_equal(len(events), 0, what="communication to print", rank=rank, cause="communicates")


@trace("1.6")
def trace_evaluation(impl):
    """The digits' test set evaluated twice, 4 ranks: one message each."""
    chosen = WORKLOADS["digits_mlp"]
    digits(train=False)

    def body(ctx):
        model = build_model(chosen.model, 0)
        loader = loader_of(impl, ctx, digits(train=False), 256, 0, shuffle=False)
        impl.evaluate(model, loader)  # warms up
        dist.barrier()
        ctx.start_picture()
        for _ in range(2):
            impl.evaluate(model, loader)

    return body


@exercise("1.6", "nccl", asserts="host")
def test_evaluation_reads_sums_at_the_end(impl, run, seed):
    """The host waits for its GPU twice per batch at most, for the copies, and 8 times beside."""
    batches = 6

    def body(ctx):
        model = moody(seed).to(ctx.device)
        loader = loader_of(impl, ctx, data_of(seed, 4 * batches), 4, seed, shuffle=False)
        with ctx.region("step"):
            impl.evaluate(model, loader, device=ctx.device)

    expect_few_waits(run(body, 2), 2 * batches + 8, f"{batches} batches")
