"""Checks of exercise 1.5: the synchronous training loop."""

from __future__ import annotations

import torch
import torch._dynamo  # torch.optim imports it when an optimizer is made: once here, not per rank
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from distlab.grading import exercise, expect_close, expect_equal, fail, trace
from distlab.reference import compare as references
from distlab.reference.workloads import WORKLOADS, build_model, build_optimizer, digits, epoch_order
from tests.phase1.loaders import data_of, loader_of

OPTIMIZERS = {
    "SGD with momentum": lambda p: torch.optim.SGD(p, lr=0.2, momentum=0.9),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.03, weight_decay=0.1),
}


def net(seed: int, device: torch.device | str = "cpu") -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3))
        return layers.double().to(device)


def flat_weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()]).cpu()


def alone(
    seed: int, n: int, name: str, *, batch: int, epochs: int
) -> tuple[list[float], torch.Tensor]:
    """The yardstick: losses and weights of one process on the same global batches."""
    inputs, targets = data_of(seed, n).tensors
    model = net(seed)
    optimizer = OPTIMIZERS[name](model.parameters())
    losses = []
    for epoch in range(epochs):
        order = epoch_order(len(targets), seed, epoch)
        for start in range(0, len(order), batch):
            chosen = order[start : start + batch]
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs[chosen]), targets[chosen])
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses, flat_weights(model)


def check_training(run, impl, seed: int, world_size: int, n: int, name: str) -> None:
    batch, epochs = 4 * world_size, 2

    def body(ctx):
        make, dataset = OPTIMIZERS[name], data_of(seed, n)
        model = net(seed + ctx.rank, ctx.device)  # only rank 0 starts with the right weights
        loader = loader_of(impl, ctx, dataset, batch, seed)
        seen = []
        losses = impl.train(
            model,
            loader,
            make(model.parameters()),
            epochs=epochs,
            device=ctx.device,
            on_step=lambda step, loss, samples: seen.append((step, loss, samples)),
        )
        return losses, flat_weights(model), impl.weight_hash(model), seen

    results = run(body, world_size)
    want, right = alone(seed, n, name, batch=batch, epochs=epochs)
    where = f"{name}, {world_size} ranks, {n} samples"
    steps = -(-n // batch) * epochs
    per_step = [0] * steps
    for rank, result in enumerate(results):
        if not torch.equal(result[1], results[0][1]):
            apart = float((result[1] - results[0][1]).abs().max())
            fail(
                f"{where}: the weights of ranks 0 and {rank} differ by up to {apart:.3g} after "
                "training: the replicas did not start equal, or did not take equal steps",
                cause="replicas-differ",
                rank=rank,
            )
    for rank, (losses, flat, _, seen) in enumerate(results):
        expect_equal(len(losses), steps, what=f"{where}: number of steps", rank=rank, cause="steps")
        expect_close(
            torch.tensor(losses, dtype=torch.float64),
            torch.tensor(want, dtype=torch.float64),
            what=f"{where}: global loss of every step (one process has it from the same batches)",
            rank=rank,
            rtol=1e-8,
            atol=1e-8,
        )
        expect_close(flat, right, what=f"{where}: final weights", rank=rank, rtol=1e-7, atol=1e-7)
        told = [step for step, _, _ in seen]
        expect_equal(told, list(range(1, steps + 1)), what="steps told to on_step", rank=rank)
        for step, _, samples in seen:
            per_step[step - 1] += samples
    for rank, result in enumerate(results):
        what = "weight_hash of equal weights"
        expect_equal(result[2], results[0][2], what=what, rank=rank, cause="hash")
    sizes = [min(batch, n - start) for start in range(0, n, batch)] * epochs
    expect_equal(per_step, sizes, what=f"{where}: samples per optimizer step, all ranks together")


@exercise("1.5", "virtual gloo cuda")
def test_training_equals_one_process(impl, run, seed, cases):
    """W ranks equal one process on the same global batches, for SGD with momentum and AdamW."""
    for name in cases(*OPTIMIZERS):
        check_training(run, impl, seed, 2, 24, name)


@exercise("1.5", "virtual")
def test_training_with_uneven_and_empty_batches(impl, run, seed):
    """The last batches are uneven over the ranks, or empty on some."""
    check_training(run, impl, seed, 4, 37, "SGD with momentum")  # last batch: 2, 1, 1, 1
    check_training(run, impl, seed, 3, 25, "AdamW")  # last batch: 1, 0, 0
    check_training(run, impl, seed, 1, 9, "AdamW")


@exercise("1.5", "virtual")
def test_one_step_on_unequal_parts(impl, run, seed):
    """train_step returns the global mean loss, and every rank takes the same step."""
    counts, ends = [1, 5, 0], [1, 6, 6]
    parts = [slice(end - count, end) for end, count in zip(ends, counts, strict=True)]

    def body(ctx):
        inputs, targets = data_of(seed, 6).tensors
        part = parts[ctx.rank]
        model = net(seed, ctx.device)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        for p in model.parameters():  # left from before: must not be counted
            p.grad = torch.ones_like(p)
        got = impl.train_step(model, optimizer, inputs[part], targets[part])
        return float(got), [p.detach() for p in model.parameters()]

    results = run(body, 3)
    inputs, targets = data_of(seed, 6).tensors
    fresh = net(seed)
    want = F.cross_entropy(fresh(inputs), targets)
    want.backward()
    moved = [(p - p.grad).detach() for p in fresh.parameters()]
    losses = F.cross_entropy(fresh(inputs), targets, reduction="none")
    owns = [losses[part].mean().item() if n else 0.0 for part, n in zip(parts, counts, strict=True)]
    for rank, (got, params) in enumerate(results):
        expect_close(
            torch.tensor([got], dtype=torch.float64),
            torch.tensor([want.item()], dtype=torch.float64),
            what="the global mean loss of 1, 5 and 0 samples",
            rank=rank,
            contributions=[torch.tensor([v], dtype=torch.float64) for v in owns],
            weights=counts,
            rtol=1e-9,
            atol=1e-9,
        )
        for p, q in zip(params, moved, strict=True):
            expect_close(p, q, what="weights after the step", rank=rank, rtol=1e-9, atol=1e-9)


@exercise("1.5")
def test_hash_sees_every_bit(impl, run, seed):
    """Equal replicas have equal hashes; one changed bit anywhere changes it."""

    def body(ctx):
        model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).double()
        hashes = [impl.weight_hash(model), impl.weight_hash(model)]
        with torch.no_grad():
            model[0].weight[1, 2] += 1e-15
        hashes.append(impl.weight_hash(model))
        model[1].running_mean[0] += 1.0
        hashes.append(impl.weight_hash(model))
        return hashes

    first, again, moved, buffer = run(body, 1, process_group=False)[0]
    expect_equal(again, first, what="the hash of the same weights", cause="hash")
    if moved == first:
        fail("a weight changed in its last bits and the hash did not", cause="hash")
    if buffer == moved:
        fail("a buffer changed and the hash did not", cause="hash")


@exercise("1.5", "virtual")
def test_communication_of_a_step(impl, run, seed):
    """Per step only the gradients travel: no weights, no frozen parameters."""

    def body(ctx):
        inputs, targets = data_of(seed, 16).tensors
        model = nn.Sequential(nn.Linear(6, 200), nn.Tanh(), nn.Linear(200, 3)).double()
        model[0].requires_grad_(False)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        mine = slice(ctx.rank, None, ctx.world_size)
        with ctx.region("step"):
            impl.train_step(model, optimizer, inputs[mine], targets[mine])

    nbytes = (200 * 3 + 3) * 8  # of the last layer
    for log in run(body, 4).logs:
        log = log.select(region="step")
        log.all_waited()
        log.sent_at_most(1.5 * (nbytes + 16 * 8), "2(W-1)/W of the gradients and a few numbers")
        log.sent_at_least(1.5 * nbytes - 64, "2(W-1)/W of the gradients")


@exercise("1.5")
def test_training_matches_the_reference_run(impl, run, seed):
    """An epoch on the digits gives the losses of the recorded reference run."""
    chosen, epochs = WORKLOADS["digits_mlp"], 1
    try:
        reference, note = references.best(chosen.name)
    except ValueError as error:
        fail(str(error), cause="reference")
    digits()  # read once, before the ranks fork

    def body(ctx):
        model = build_model(chosen.model, chosen.seed + ctx.rank).to(ctx.device)
        optimizer = build_optimizer(chosen, model)
        loader = loader_of(impl, ctx, digits(), chosen.global_batch_size, chosen.seed)
        return impl.train(model, loader, optimizer, epochs=epochs, device=ctx.device)

    for rank, losses in enumerate(run(body, 4, timeout=30)):
        for problem in references.compare(reference, losses, references.LOSS_TOLERANCE):
            fail(f"{problem}; reference: {note}", cause="reference", rank=rank)
        if len(losses) != 23:
            fail(f"{len(losses)} steps in an epoch, expected 23", cause="steps", rank=rank)


@trace("1.5")
def trace_training(impl):
    """One epoch on the digits with evaluation, 4 ranks."""

    chosen = WORKLOADS["digits_mlp"]
    digits(), digits(train=False)

    def body(ctx):
        model = build_model(chosen.model, ctx.rank)
        loader = loader_of(impl, ctx, digits(), 256, 0)
        optimizer = build_optimizer(chosen, model)
        impl.module("trainer").train(model, loader, optimizer, epochs=1)  # warms up
        dist.barrier()
        ctx.start_picture()
        impl.module("trainer").train(model, loader, optimizer, epochs=1)
        impl.module("evaluation").evaluate(
            model, loader_of(impl, ctx, digits(train=False), 256, 0, shuffle=False)
        )

    return body
