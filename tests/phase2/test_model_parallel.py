"""Checks of exercise 2.8: training with the layers on several ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch._dynamo  # torch.optim imports it when an optimizer is made: once here, not per rank
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from distlab.grading import exercise, expect_close, fail, trace
from distlab.reference.workloads import GPT

VOCABULARY, LENGTH, BLOCKS, WIDTH = 13, 6, 3, 8
BOUNDS = {1: [0, 5], 2: [0, 2, 5], 3: [0, 1, 3, 5], 4: [0, 1, 2, 4, 5]}  # of the five layers


def gpt(seed: int, dtype=torch.float64, device="cpu") -> GPT:
    """Embedding, three blocks, head; the first and the last layer share a weight."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return GPT(VOCABULARY, LENGTH, BLOCKS, WIDTH, 2).to(device, dtype)


def mlp(seed: int, dtype=torch.float64, device="cpu") -> nn.Sequential:
    """Five layers of different width, the first one frozen."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers = [nn.Linear(3, 7), nn.Tanh(), nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, VOCABULARY)]
        layers[0].requires_grad_(False)
        return nn.Sequential(*layers).to(device, dtype)


def batches(seed: int, model: nn.Module) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Batches for ``gpt`` or ``mlp``: several shapes with as many elements, rows or columns."""
    generator = torch.Generator().manual_seed(seed)
    p = next(model.parameters())
    made = []
    for size, length in ((4, LENGTH), (LENGTH, 4), (4, 4), (4, LENGTH)):
        tokens = torch.randint(0, VOCABULARY, (size, length + 1), generator=generator)
        inputs, targets = tokens[:, :-1], tokens[:, 1:].flatten()
        if isinstance(model, nn.Sequential):
            inputs = torch.randn(size, 3, generator=generator, dtype=torch.float64).to(p.dtype)
            targets = targets[:size]  # a (size, 3) batch
        made.append((inputs.to(p.device), targets.to(p.device)))
    return made


def parameters_of(layers: list[nn.Module], values: str = "data") -> list[torch.Tensor]:
    """The values of the layers' parameters, in order; tied parameters once."""
    found = nn.ModuleList(layers).parameters()
    return [torch.zeros(0) if (v := getattr(p, values)) is None else v.cpu() for p in found]


def names_in(model: nn.Module, layers: list[nn.Module]) -> list[str]:
    """The model's names for the parameters of its layers, in order; tied parameters once."""
    names = {id(p): name for name, p in model.named_parameters()}
    return [names.get(id(p), "another tensor") for p in nn.ModuleList(layers).parameters()]


def sgd(parameters) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.5, momentum=0.9)


# -- training -------------------------------------------------------------------------------------
def check_gradients(run, impl, seed: int, world_size: int, make) -> None:
    bounds = BOUNDS[world_size]

    def body(ctx):
        model = make(seed, device=ctx.device)
        layers = impl.layers_of(model)
        names = names_in(model, layers[bounds[ctx.rank] : bounds[ctx.rank + 1]])
        stage = impl.Stage(layers, bounds)
        impl.forward_backward(stage, *batches(seed, model)[0])
        impl.reduce_ties(stage)
        return parameters_of([stage], "grad"), names

    results = run(body, world_size)
    alone = make(seed)
    inputs, targets = batches(seed, alone)[0]
    F.cross_entropy(alone(inputs), targets).backward()
    of_one = {name: p.grad for name, p in alone.named_parameters() if p.grad is not None}
    for rank, (grads, names) in enumerate(results):
        want = [of_one.get(name, torch.zeros(0)) for name in names]
        what = f"{make.__name__} in {world_size} stages, stage {rank}"
        if len(grads) != len(want):
            text = f"{what}: {len(grads)} parameters, expected {len(want)}, those of its layers"
            fail(text, cause="wrong-layers", rank=rank)
        for k, (got, right) in enumerate(zip(grads, want, strict=True)):
            if right.any() and not (got.numel() and got.any()):
                text = f"{what}: no gradient comes to its parameter {k}: does the gradient of its "
                fail(text + "last activation come back?", cause="no-gradient", rank=rank)
        for k, (got, right) in enumerate(zip(grads, want, strict=True)):
            name = f"{what}: gradient of its parameter {k}"
            expect_close(got, right, what=name, rank=rank, rtol=1e-9, atol=1e-11)


@exercise("2.8", "virtual gloo cuda", nccl=True, asserts="gradients own-layers summed")
def test_gradients_of_every_stage(impl, run, seed, cases):
    """forward_backward gives every stage the gradients of one process;
    tied gradients are summed."""
    for world_size, make in cases((3, gpt), (2, gpt), (4, mlp), (1, gpt)):
        check_gradients(run, impl, seed, world_size, make)


def check_training(run, impl, seed, world_size: int, make, dtype=torch.float64) -> None:
    bounds = BOUNDS[world_size]

    def body(ctx):
        model = make(seed, dtype, ctx.device)
        data, layers = batches(seed, model), impl.layers_of(model)
        names = names_in(model, layers[bounds[ctx.rank] : bounds[ctx.rank + 1]])
        stage = impl.Stage(layers, bounds)
        optimizer = sgd(stage.parameters()) if list(stage.parameters()) else None
        optimizer = optimizer or sgd([nn.Parameter(torch.zeros(1))])  # a stage of activations only
        for p in stage.parameters():  # from before: must not be counted
            p.grad = torch.ones_like(p) if p.requires_grad else None
        losses = [float(impl.train_step(stage, optimizer, *batch)) for batch in data]
        return losses, parameters_of([stage]), names

    def reference(ctx):  # in a rank: 16 bits are rounded in another way on another device
        alone, losses = make(seed, dtype, ctx.device), []
        optimizer = sgd(alone.parameters())
        for inputs, targets in batches(seed, alone):
            optimizer.zero_grad()
            loss = F.cross_entropy(alone(inputs), targets)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses, {name: p.detach().cpu() for name, p in alone.named_parameters()}

    results = run(body, world_size)
    want, of_one = run(reference, 1, process_group=False)[0]
    shapes = [tuple(inputs.shape) for inputs, _ in batches(seed, make(seed, dtype))]
    what = f"{make.__name__}, {str(dtype)[6:]}, {world_size} stages"
    close = {torch.float64: {"rtol": 1e-9, "atol": 1e-11}, torch.float32: {"rtol": 1e-4}}
    for rank in reversed(range(world_size)):
        losses, got, names = results[rank]
        right = [of_one.get(name, torch.zeros(0)) for name in names]
        for step, (loss, true) in enumerate(zip(losses, want, strict=True)):
            if not math.isclose(loss, true, rel_tol=1e-6):
                text = f"{what}: loss of step {step} on rank {rank} is {true:g}, got {loss:g}"
                text += f" (batches of shapes {shapes[: step + 1]} so far)" * bool(step)
                more = "; the last stage knows it" if rank < world_size - 1 else ""
                fail(text + more, cause="loss-value", rank=rank)
        for k, (a, b) in enumerate(zip(got, right, strict=True)):
            name = f"{what}, stage {rank}: parameter {k} after four steps"
            expect_close(a, b, what=name, rank=rank, **close.get(dtype, {}))


@exercise("2.8", "virtual gloo cuda", asserts="one-process same-loss received forgotten dtype")
def test_training_equals_one_process(impl, run, seed, cases):
    """train_step four times, batches of several shapes: one process's weights and its loss."""
    for world_size, make, dtype in cases(
        (3, gpt, torch.float64),
        (4, mlp, torch.float64),
        (2, gpt, torch.bfloat16),
        (4, gpt, torch.float32),
        (1, mlp, torch.float64),
    ):
        check_training(run, impl, seed, world_size, make, dtype)


# -- odd models, in groups ------------------------------------------------------------------------
class Fold(nn.Module):
    """(B, 6) to (B, 3, 2), not contiguous; its parameter is unused."""

    def __init__(self) -> None:
        super().__init__()
        self.idle = nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(-1, 2, 3).transpose(1, 2)


class Narrow(nn.Module):
    """float64 to float32."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.float()


class Plus(nn.Module):
    """A layer with one more parameter, which it adds or only holds."""

    def __init__(self, layer: nn.Module, more: nn.Parameter, used: bool) -> None:
        super().__init__()
        self.layer, self.more, self.used = layer, more, used

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + self.more if self.used else self.layer(x)


def odd(seed: int, narrow: bool) -> nn.Sequential:
    """Eight layers. One layer is there twice. The last layer holds parameters of the first layer
    and of that one, but does not use them. Activations are transposed, and change their dtype."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        linear = nn.Linear(2, 2).double()
        linear.bias.requires_grad_(False)
        more, beside = (nn.Parameter(torch.randn(n).double()) for n in (6, 2))
        shared = Plus(linear, beside, True)
        last = torch.float32 if narrow else torch.float64
        layers = [
            Plus(nn.Linear(3, 6).double(), more, True),
            Fold(),
            shared,
            nn.Tanh(),
            shared,
            nn.Flatten(),
            Narrow() if narrow else nn.Identity(),
            Plus(nn.Linear(6, VOCABULARY, dtype=last), more, False),
        ]
        layers[-1].beside = beside  # ties of stages 0 and 3, then of 1, 2 and 3
        return nn.Sequential(*layers)


def half_squares(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """A loss of its own."""
    return 0.5 * (outputs.double() - targets[:, None]).square().sum()


def odd_batch(seed: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(size, 3, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(0, VOCABULARY, (size,), generator=generator)


@exercise(
    "2.8",
    "virtual",
    asserts="adds first-reads last-reads any-activation frozen ties unused-copy several group "
    "dtype layout parameters life alone",
)
def test_odd_models_in_two_groups(impl, run, seed):
    """Transposed and cast activations, a layer used twice, another loss; two groups at once."""
    check_odd(run, impl, seed, [[0, 1, 2, 3]], [0, 2, 4, 7, 8])
    check_odd(run, impl, seed, [[3, 1], [0, 2]], (0, 3, 8))


def check_odd(run, impl, seed: int, groups: list[list[int]], bounds: Sequence[int]) -> None:
    def body(ctx):
        made = [dist.new_group(ranks) for ranks in groups]
        number = next(k for k, ranks in enumerate(groups) if ctx.rank in ranks)
        group, members = made[number], sorted(groups[number])
        at = members.index(ctx.rank)
        ties = {}
        if len(groups) > 1:
            ties["groups"] = impl.tie_groups(impl.layers_of(odd(seed, True)), bounds, groups)
        found = []
        stages = []
        for turn in range(2):  # two models at once
            layers = impl.layers_of(odd(seed + number + 5 * turn, turn == 0))
            own = layers[bounds[at] : bounds[at + 1]]
            names = names_in(nn.Sequential(*layers), own)
            stages.append((impl.Stage(layers, bounds, group, **ties), names))
        for size in (4, 3):
            for turn, (stage, _) in enumerate(stages):
                inputs, targets = odd_batch(seed + number + 7 * turn + size, size)
                inputs = inputs if at == 0 else torch.full_like(inputs, math.nan)
                targets = targets if at == len(members) - 1 else targets * 0 - 7
                loss = impl.forward_backward(stage, inputs, targets, half_squares)
                found.append(loss.item() if isinstance(loss, torch.Tensor) else loss)
        for stage, _ in stages:
            impl.reduce_ties(stage)
        return found, [(names, parameters_of([stage], "grad")) for stage, names in stages]

    results = run(body, 4)
    for number, ranks in enumerate(groups):
        for turn in range(2):
            alone, losses = odd(seed + number + 5 * turn, turn == 0), []
            for size in (4, 3):
                inputs, targets = odd_batch(seed + number + 7 * turn + size, size)
                loss = half_squares(alone(inputs), targets)
                loss.backward()
                losses.append(loss.item())
            named = dict(alone.named_parameters())
            want = {n: p.grad for n, p in named.items() if p.grad is not None}
            for rank in sorted(ranks):
                found, parts = results[rank]
                what = f"ranks {sorted(ranks)}, model {turn}, two batches"
                for got, right in zip(found[turn::2], losses, strict=True):
                    if not isinstance(got, float) or not math.isclose(got, right, rel_tol=1e-9):
                        text = f"{what}: the loss on rank {rank} is {right:.9g}, got {got!r}"
                        fail(text, cause="loss-value", rank=rank)
                names, grads = parts[turn]
                for name, got in zip(names, grads, strict=True):
                    right = want.get(name, torch.zeros(got.shape, dtype=got.dtype))
                    if got.numel() and name in named and not named[name].requires_grad:
                        text = f"{what}: the frozen {name} has got a gradient: it is not tied"
                        fail(text, cause="frozen-tied", rank=rank)
                    if got.numel() and name.endswith("idle"):
                        text = f"{what}: {name}, which is not tied and used by nobody, has got a "
                        text += "gradient: one process gives it none, and does not step it"
                        fail(text, cause="not-tied", rank=rank)
                    if name.endswith("idle"):
                        continue
                    if right.numel() and not got.numel():
                        text = f"{what}: no gradient of {name} after reduce_ties: stages that share"
                        fail(text + " a parameter get the sum", cause="no-gradient", rank=rank)
                    close = {"rtol": 1e-5, "atol": 1e-5}
                    expect_close(got, right, what=f"{what}: gradient of {name}", rank=rank, **close)


@trace("2.8", measures="waiting")
def trace_split(impl):
    """Three steps of a small GPT in equally many layers: one rank works at a time."""

    def body(ctx):
        layers = impl.layers_of(GPT(96, 32, 6, 64, 4))
        bounds = [len(layers) * r // ctx.world_size for r in range(ctx.world_size + 1)]
        stage = impl.Stage(layers, bounds)
        optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)
        tokens = torch.randint(0, 96, (8, 33))
        for step in range(4):
            if step == 1:
                dist.barrier()
                ctx.start_picture()
            impl.train_step(stage, optimizer, tokens[:, :-1], tokens[:, 1:].flatten())

    return body
