"""Checks of exercise 1.5: the synchronous training loop."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Iterable
from types import SimpleNamespace

import torch
import torch._dynamo  # torch.optim imports it when an optimizer is made: once here, not per rank
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from distlab.explain.case import Case, Diagnosis
from distlab.grading import exercise, expect_close, expect_equal, fail, trace
from distlab.reference import compare as references
from distlab.reference.workloads import WORKLOADS, build_model, build_optimizer, digits, epoch_order
from tests.phase1.groups import group_of, order_in
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
    seed: int, n: int, name: str, *, batch: int, epochs: Iterable[int], start: int = 0
) -> tuple[list[float], torch.Tensor]:
    """The yardstick: losses and weights of one process on the same global batches."""
    inputs, targets = data_of(seed, n).tensors
    model = net(seed + start)
    optimizer = OPTIMIZERS[name](model.parameters())
    losses = []
    for epoch in epochs:
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
    want, right = alone(seed, n, name, batch=batch, epochs=range(epochs))
    where = f"{name}, {world_size} ranks, {n} samples"
    steps = -(-n // batch) * epochs
    per_step = [0] * steps
    for rank, result in enumerate(results):
        if not torch.equal(result[1], results[0][1]):
            apart = float((result[1] - results[0][1]).abs().max())
            fail(
                f"{where}: the weights of ranks 0 and {rank} differ by up to {apart:.3g} after "
                "training. The replicas did not start equal, or did not take equal steps",
                cause="replicas-differ",
                rank=rank,
            )
    for rank, (losses, flat, _, seen) in enumerate(results):
        if not isinstance(losses, list) or not all(isinstance(v, float) for v in losses):
            fail(f"{where}: expected a list of floats, got {losses!r}", cause="type", rank=rank)
        what = f"{where}: losses of the ranks"
        expect_equal(losses, results[0][0], what=what, rank=rank, cause="losses-differ")
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
        what = f"{where}: steps told to on_step"
        expect_equal(told, list(range(1, steps + 1)), what=what, rank=rank, cause="steps")
        what = f"{where}: losses told to on_step"
        expect_equal([loss for _, loss, _ in seen], losses, what=what, rank=rank, cause="on-step")
        for step, _, samples in seen:
            per_step[step - 1] += samples
    for rank, result in enumerate(results):
        what = "weight_hash of equal weights"
        expect_equal(result[2], results[0][2], what=what, rank=rank, cause="hash")
    sizes = [min(batch, n - start) for start in range(0, n, batch)] * epochs
    expect_equal(per_step, sizes, what=f"{where}: samples per optimizer step, all ranks together")


@exercise("1.5", "virtual gloo cuda", asserts="training on-step")
def test_training_equals_one_process(impl, run, seed, cases):
    """W ranks equal one process on the same global batches, for SGD with momentum and AdamW."""
    for name in cases(*OPTIMIZERS):
        check_training(run, impl, seed, 2, 24, name)


@exercise("1.5", "virtual", asserts="training alone")
def test_training_with_uneven_and_empty_batches(impl, run, seed):
    """The last batches are uneven over the ranks, or empty on some."""
    check_training(run, impl, seed, 4, 37, "SGD with momentum")  # last batch: 2, 1, 1, 1
    check_training(run, impl, seed, 3, 25, "AdamW")  # last batch: 1, 0, 0
    check_training(run, impl, seed, 1, 9, "AdamW")


@exercise("1.5", "virtual", asserts="step old-gradients same-loss")
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


GROUPS = ([3, 1], [2, 0])
COUNTS = {3: 4, 1: 1, 2: 0, 0: 0}


class Wide(nn.Module):
    """A net with an unused layer, a layer without optimizer, and a frozen layer."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.net, self.never, self.frozen = net(seed), nn.Linear(2, 2), nn.Linear(6, 6).double()
        self.foreign = nn.Parameter(torch.ones(3, dtype=torch.float64))  # no optimizer holds it
        nn.init.eye_(self.frozen.weight)
        nn.init.zeros_(self.frozen.bias)
        nn.init.ones_(self.never.weight)
        nn.init.ones_(self.never.bias)
        for p in self.parameters():
            p.grad = torch.ones_like(p)
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(self.frozen(x)) * self.foreign


def kept_from_before(right: torch.Tensor) -> Callable[[Case], Diagnosis | None]:
    """A rule: ones, a gradient from before the step, are part of the gradient."""

    def rule(case: Case) -> Diagnosis | None:
        if not case.fits(right + 1):
            return None
        return Diagnosis("old-gradients", "a gradient from before the step counts")

    return rule


def part_of(seed: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    inputs, targets = data_of(seed, 5).tensors
    part = {3: slice(0, 4), 1: slice(4, 5)}.get(rank, slice(0, 0))
    return inputs[part], targets[part]


@exercise("1.5", "virtual", asserts="step no-samples unused old-gradients group alone parameters")
def test_steps_in_two_groups(impl, run, seed):
    """A step in a group out of order, while another group steps without any samples."""

    def body(ctx):
        mine = [group_of(ranks) for ranks in GROUPS][1 - ctx.rank % 2]
        model = Wide(seed)
        trained = [*model.net.parameters(), *model.never.parameters()]
        optimizer = torch.optim.SGD(trained, lr=1.0, weight_decay=0.5)
        taken = []
        optimizer.register_step_post_hook(lambda *_: taken.append(1))
        loss = impl.train_step(model, optimizer, *part_of(seed, ctx.rank), mine)
        having = [name for name, p in model.named_parameters() if p.grad is not None]
        params = [p.detach() for p in model.parameters()]
        return loss, params, having, model.foreign.grad, len(taken)

    right = Wide(seed)
    inputs, targets = data_of(seed, 5).tensors
    right.zero_grad()
    loss = F.cross_entropy(right(inputs), targets)
    loss.backward()
    torch.optim.SGD(right.net.parameters(), lr=1.0, weight_decay=0.5).step()
    for rank, (got, params, having, foreign, taken) in enumerate(run(body, 4)):
        samples = COUNTS[rank]
        what = f"calls of optimizer.step, {'4 and 1' if samples else 'no'} samples in the group"
        expect_equal(taken, 1, what=what, rank=rank, cause="steps")
        if not isinstance(got, float):
            fail(f"train_step returns {got!r}, no float", cause="type", rank=rank)
        if not samples and got != 0.0:
            text = f"no rank has a sample: loss 0.0 expected, got {got}"
            fail(text, cause="no-samples", rank=rank)
        if samples and abs(got - loss.item()) > 1e-9:
            text = f"the global mean loss of 4 and 1 samples is {loss.item()}, got {got}"
            fail(text, cause="wrong-loss", rank=rank)
        want = right if samples else Wide(seed)
        for (name, q), p in zip(want.named_parameters(), params, strict=True):
            unused = not samples or "never" in name
            if unused and q.any() and torch.equal(p, q / 2):
                text = f"{name} has shrunk by weight decay, but no rank has used it in this step: "
                text += "its gradient must be None, not zero"
                fail(text, cause="invented-gradient", rank=rank)
            what = f"{name} after a step, {'4 and 1' if samples else 'no'} samples in the group"
            expect_close(p, q, what=what, rank=rank, rtol=1e-9, atol=1e-9)
        if samples:
            what = "the gradient of a parameter that the optimizer does not hold"
            expect_close(
                foreign,
                right.foreign.grad,
                what=what,
                rank=rank,
                before=torch.ones_like(foreign),
                rtol=1e-9,
                atol=1e-9,
                rules=(kept_from_before(right.foreign.grad),),
            )
        if not samples and having:
            text = f"no rank has a sample, but {having[0]} has a gradient after the step (forget "
            text += "those of before, also of parameters that the optimizer does not hold)"
            fail(text, cause="no-samples", rank=rank)


@exercise("1.5", "virtual", asserts="training first-rank mode on-step group life resources")
def test_training_twice_in_a_group(impl, run, seed):
    """Training in a group begins with its first rank's weights, and can be called again."""
    name = "SGD with momentum"

    def body(ctx):
        ranks = GROUPS[1 - ctx.rank % 2]
        mine = [group_of(each) for each in GROUPS][1 - ctx.rank % 2]
        model = net(seed + ctx.rank).eval()
        model.register_buffer("own", torch.tensor(float(ctx.rank)))
        modes, told = [], []
        model.register_forward_pre_hook(
            lambda module, _: modes.append(all(part.training for part in module.modules()))
        )
        optimizer = OPTIMIZERS[name](model.parameters())
        place = SimpleNamespace(rank=ranks.index(ctx.rank), world_size=2)
        loader = loader_of(impl, place, data_of(seed, 13), 4, seed)
        loader.batch_sampler.set_epoch(5)  # whatever was done with it before
        losses = []
        for epochs in (1, 0, 1):
            losses += impl.train(
                model,
                loader,
                optimizer,
                epochs=epochs,
                group=mine,
                on_step=lambda step, *_, model=model: told.append(
                    (step, flat_weights(model.eval()))  # and leaves it in eval mode
                ),
            )
        last = torch.equal(told[-1][1], flat_weights(model))
        alive = weakref.ref(model[0].weight)
        weights, own = flat_weights(model), float(model.own)
        steps = [step for step, _ in told]
        told.clear()
        del model, optimizer
        return losses, weights, own, all(modes), steps, last, alive() is not None

    for rank, (losses, weights, own, modes, steps, last, alive) in enumerate(run(body, 4)):
        first = order_in(GROUPS[1 - rank % 2])[0]
        want, right = alone(seed, 13, name, batch=4, epochs=(0, 0), start=first)
        where = f"two trainings in the group {GROUPS[1 - rank % 2]}"
        expect_close(
            torch.tensor(losses, dtype=torch.float64),
            torch.tensor(want, dtype=torch.float64),
            what=f"{where}: losses",
            rank=rank,
            rtol=1e-8,
            atol=1e-8,
        )
        expect_close(weights, right, what=f"{where}: weights", rank=rank, rtol=1e-7, atol=1e-7)
        what = f"{where}: a buffer, the number of the rank whose state all begin with"
        expect_equal(own, float(first), what=what, rank=rank, cause="buffers")
        if not modes:
            text = (
                f"{where}: a step was not taken in training mode (the model and its modules came "
            )
            text += "in eval mode, and on_step leaves them in eval mode)"
            fail(text, cause="mode", rank=rank)
        what = "steps told to on_step, in two trainings"
        expect_equal(steps, [1, 2, 3, 4] * 2, what=what, rank=rank, cause="steps")
        what = "on_step sees the weights after the step"
        expect_equal(last, True, what=what, rank=rank, cause="on-step")
        what = "the model is alive after the last reference is gone"
        expect_equal(alive, False, what=what, rank=rank, cause="kept-alive")


class State(nn.Module):
    """Parameters and buffers of many kinds, with numbers from ``seed``."""

    def __init__(self, seed: int, *, strided: bool = False) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(seed)
        matrix = torch.rand(3, 4, generator=g, dtype=torch.float64)
        matrix = matrix.t().contiguous().t() if strided else matrix
        self.matrix = nn.Parameter(matrix)
        self.brief = nn.Parameter(torch.rand(3, generator=g).bfloat16(), requires_grad=False)
        self.number = nn.Parameter(torch.rand((), generator=g))
        self.empty = nn.Parameter(torch.empty(0, 2))
        self.tied = self.matrix
        flat = torch.rand(7, generator=g)  # one memory for two parameters
        self.left, self.right = nn.Parameter(flat[:3]), nn.Parameter(flat[3:])
        self.register_buffer("counts", torch.randint(0, 99, (2,), generator=g))
        self.register_buffer("mask", torch.rand(5, generator=g) > 0.5)
        self.register_buffer("scratch", torch.rand(2, generator=g), persistent=False)
        self.register_buffer("waves", torch.rand(2, generator=g, dtype=torch.complex64))


@exercise("1.5", asserts="hash dtype layout parameters")
def test_hash_sees_every_bit(impl, run, seed):
    """Equal replicas have equal hashes, whatever their memory; one changed bit changes it."""
    names = [n for n, t in (*State(0).named_parameters(), *State(0).named_buffers()) if t.numel()]

    def body(ctx):
        hashes = [impl.weight_hash(State(seed, strided=strided)) for strided in (False, True)]
        for name in names:
            model = State(seed)
            tensor = getattr(model, name).data
            tensor.view(-1)[:1].view(torch.uint8)[0] ^= 1
            hashes.append(impl.weight_hash(model))
        return hashes

    first, strided, *moved = run(body, 1, process_group=False)[0]
    expect_equal(strided, first, what="the hash of the same weights, strided", cause="hash")
    for name, changed in zip(names, moved, strict=True):
        if changed == first:
            fail(f"one bit of {name} changed and the hash did not", cause="hash")
    digest = hashlib.sha256()
    for tensor in (*State(seed).parameters(), *State(seed).buffers()):
        digest.update(bytes(tensor.detach().reshape(-1).view(torch.uint8).tolist()))
    if first != digest.hexdigest():
        text = "the hash is not that of the elements of all parameters, then of all buffers: each "
        text += "tensor once, in its logical order, no bytes beside it in memory; expected "
        fail(f"{text}{digest.hexdigest()}, got {first}", cause="hash")


@exercise("1.5", "virtual", asserts="only-gradients cost resources parameters")
def test_communication_of_a_step(impl, run, seed):
    """Per step only the gradients travel: no weights, no frozen parameters, no buffers."""

    def body(ctx):
        inputs, targets = data_of(seed, 16).tensors
        middle = nn.BatchNorm1d(200, affine=False)
        model = nn.Sequential(nn.Linear(6, 200), middle, nn.Linear(200, 3)).double()
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


@exercise("1.5", asserts="training")
def test_training_matches_the_reference_run(impl, run, seed, reference):
    """An epoch on the digits gives the losses of the recorded reference run."""
    chosen, epochs = WORKLOADS["digits_mlp"], 1
    recorded, note = reference(chosen.name)
    digits()  # read once, before the ranks fork

    def body(ctx):
        model = build_model(chosen.model, chosen.seed + ctx.rank).to(ctx.device)
        optimizer = build_optimizer(chosen, model)
        loader = loader_of(impl, ctx, digits(), chosen.global_batch_size, chosen.seed)
        return impl.train(model, loader, optimizer, epochs=epochs, device=ctx.device)

    for rank, losses in enumerate(run(body, 4, timeout=30)):
        for problem in references.compare(recorded, losses, references.LOSS_TOLERANCE):
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
