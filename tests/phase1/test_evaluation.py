"""Checks of exercise 1.6: loss and accuracy over the samples of all ranks, exactly."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from distlab.grading import exercise, expect_equal, fail, trace
from distlab.reference.workloads import WORKLOADS, build_model, digits
from tests.phase1.loaders import data_of, loader_of


@exercise("1.6", "virtual gloo")
def test_metrics_of_uneven_shards(impl, run, seed):
    """Mean loss and accuracy over all samples, not the mean of means; one message."""
    mine = [(6.0, 3, 4), (0.5, 0, 1), (0.0, 0, 0)]

    def body(ctx):
        with ctx.region("metrics"):
            got = impl.global_metrics(*mine[ctx.rank])
        many = impl.global_metrics(0.0, 2**24 + 1, 2**25)  # float32 can't hold the first count
        try:
            impl.global_metrics(0.0, 0, 0)
            refused = False
        except ValueError:
            refused = True
        return [float(v) for v in got], float(many[1]), refused

    results = run(body, 3)
    for rank, (got, many, refused) in enumerate(results):
        want = [6.5 / 5, 3 / 5]
        if got == [mine[rank][0] / max(mine[rank][2], 1), mine[rank][1] / max(mine[rank][2], 1)]:
            fail("these are the rank's own numbers", cause="own-metrics", rank=rank)
        for what, value, right in zip(("mean loss", "accuracy"), got, want, strict=True):
            if abs(value - right) > 1e-12:
                cause = "mean-of-means" if abs(value - right) < 1 else "wrong"
                fail(
                    f"{what} of 4, 1 and 0 samples: expected {right}, got {value}",
                    cause=cause,
                    rank=rank,
                )
        if many != (2**24 + 1) / 2**25:
            fail("counts above 16 million are not exact: sum them in float64", cause="precision")
        expect_equal(refused, True, what="ValueError where no rank has a sample", rank=rank)
    messages = results.logs[0].select(region="metrics").messages
    expect_equal(messages, 1, what="messages of global_metrics", cause="too-many-messages")


class Moody(nn.Module):
    """Different in eval mode; remembers whether gradients were recorded and how it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)
        self.recorded = False
        self.fail = False

    def forward(self, x):
        self.recorded |= torch.is_grad_enabled()
        if self.fail:
            raise RuntimeError("evaluation fails")
        out = self.linear(x)
        return out.flip(1) * 3 if self.training else out


def moody(seed: int) -> Moody:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Moody().double()


def alone(seed: int, n: int) -> tuple[float, float]:
    """Loss and accuracy of one process on the whole test set."""
    inputs, targets = data_of(seed, n).tensors
    logits = moody(seed).linear(inputs)
    accuracy = (logits.argmax(1) == targets).double().mean().item()
    return F.cross_entropy(logits, targets).item(), accuracy


def check_evaluation(run, impl, seed: int, world_size: int, n: int, remainder: str) -> None:
    def body(ctx):
        dataset = data_of(seed, n)
        model = moody(seed).to(ctx.device)
        loader = loader_of(impl, ctx, dataset, 4 * ctx.world_size, seed, remainder, shuffle=False)
        out = []
        for training in (True, False):
            model.train(training)
            loss, accuracy = impl.evaluate(model, loader, device=ctx.device)
            out.append([float(loss), float(accuracy), training, model.training])
        return out, model.recorded

    results = run(body, world_size)
    want = alone(seed, n)
    where = f"{n} samples on {world_size} ranks, remainder={remainder!r}"
    for rank, (out, recorded) in enumerate(results):
        for loss, accuracy, before, after in out:
            for what, got, right in (("loss", loss, want[0]), ("accuracy", accuracy, want[1])):
                if abs(got - right) > 1e-9:
                    padded = " (repeated samples counted?)" if remainder == "pad" else ""
                    fail(
                        f"{where}: {what} of the test set is {right}, got {got}{padded}",
                        cause="not-exact",
                        rank=rank,
                    )
            if after != before:
                fail("the model's training mode was not restored", cause="mode-lost", rank=rank)
        if recorded:
            fail("gradients were recorded in evaluation", cause="grad-recorded", rank=rank)


@exercise("1.6", "virtual gloo cuda")
def test_evaluation_is_exact(impl, run, seed, cases):
    """Each sample counts once, under padding, uneven shards and empty ones."""
    for w, n, remainder in cases((2, 21, "pad"), (4, 21, "keep"), (3, 2, "pad"), (3, 2, "keep")):
        check_evaluation(run, impl, seed, w, n, remainder)


@exercise("1.6", "virtual")
def test_mode_is_restored_after_an_error(impl, run, seed):
    """A model that raises in evaluation is left in training mode."""

    def body(ctx):
        model = Moody().double()
        model.fail = True
        loader = loader_of(impl, ctx, data_of(seed, 8), 4, seed)
        try:
            impl.evaluate(model, loader)
        except RuntimeError as error:
            return model.training, str(error)
        return model.training, ""

    training, said = run(body, 1)[0]
    raised = "evaluation fails" in said
    expect_equal(raised, True, what="the model's own error comes out", cause="error-swallowed")
    expect_equal(training, True, what="training mode after an error", cause="mode-lost")


@exercise("1.6", "virtual")
def test_one_rank_prints(impl, run):
    """Only the group's first rank prints, and nothing is communicated for it."""

    def body(ctx):
        group = dist.new_group([1, 2])
        with ctx.region("print"):
            impl.print_once("epoch 1 of 3")
            if ctx.rank in (1, 2):
                impl.print_once("in the group", group)
            if ctx.rank == 0:
                impl.print_once("only rank 0 comes here")

    results = run(body, 3)
    lines = [text.splitlines() for text in results.output]
    for rank, (mine, want) in enumerate(
        zip(lines, (["epoch 1 of 3", "only rank 0 comes here"], ["in the group"], []), strict=True)
    ):
        got = [line for line in mine if line in ("epoch 1 of 3", "in the group") or line in want]
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
