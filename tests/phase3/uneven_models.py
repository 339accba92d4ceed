"""What the checks of exercise 3.31 train: a net with branches and buffers, and batches for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch._dynamo  # torch.optim imports it when an optimizer is made: once here, not per rank
import torch.nn.functional as F
from torch import Tensor, nn

from distlab.grading import expect_close, fail

CLASSES = 3


class Batch(NamedTuple):
    """Samples, and the branch that the model takes for them."""

    inputs: Tensor  # (n, 4)
    targets: Tensor  # (n,)
    taken: str


class Net(nn.Module):
    """A norm with buffers, two branches, two dtypes; one parameter is transposed, one frozen, one
    unused."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 5, bias=False)
        self.norm = nn.BatchNorm1d(5)
        self.a, self.b = nn.Linear(5, CLASSES), nn.Linear(5, CLASSES, bias=False)
        self.nobodys = nn.Parameter(torch.ones(2))
        self.double()
        self.shift = nn.Parameter(torch.randn(CLASSES, 5, dtype=torch.float64).t())
        self.scale = nn.Parameter(torch.full((CLASSES,), 1.5))
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)

    def forward(self, inputs: Tensor, taken: str) -> Tensor:
        h = torch.tanh(self.norm(self.stem(inputs)))
        return (h @ self.shift + getattr(self, taken)(h)) * self.scale.double()


def net(seed: int) -> Net:
    """A net with the same values in each call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Net()


def batches(seed: int, rank: int, count: int, device: str | torch.device = "cpu") -> list[Batch]:
    """``count`` batches of 3 to 5 samples. Branch b is taken first in the third step."""
    generator = torch.Generator().manual_seed(seed * 1009 + rank)
    found = []
    for step in range(count):
        n = 3 + (2 * rank + step) % 3
        inputs = torch.randn(n, 4, generator=generator, dtype=torch.float64)
        targets = torch.randint(0, CLASSES, (n,), generator=generator)
        taken = "b" if step >= 2 and (rank + step) % 2 else "a"
        found.append(Batch(inputs.to(device), targets.to(device), taken))
    return found


def samples_in(batch: Batch) -> int:
    """How many samples a batch has."""
    return len(batch.targets)


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    """The mean over the batch's samples."""
    return F.cross_entropy(model(batch.inputs, batch.taken), batch.targets)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """Momentum and weight decay move what has a gradient of zero, and leave None alone."""
    return torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9, weight_decay=0.1)


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor | None]:
    """Weights, buffers, gradients and momenta by name."""
    found: dict[str, Tensor | None] = {n: v.detach().clone() for n, v in model.state_dict().items()}
    for name, p in model.named_parameters():
        found[f"gradient of {name}"] = None if p.grad is None else p.grad.clone()
        momentum = optimizer.state[p].get("momentum_buffer") if p in optimizer.state else None
        found[f"momentum of {name}"] = None if momentum is None else momentum.clone()
    return found


def join_steps(
    wrapped: Any,
    optimizer: torch.optim.Optimizer,
    own: Sequence[Batch],
    **options: Any,
) -> Iterator[bool]:
    """Train in a join; tells after each step whether this rank had a batch."""
    with wrapped.join(own, **options) as found:
        for batch in found:
            optimizer.zero_grad()
            if batch is None:
                wrapped.shadow()
            else:
                loss_of(wrapped, batch).backward()
            optimizer.step()
            yield batch is not None


def one_process(
    model: Net,
    optimizer: torch.optim.Optimizer,
    of_ranks: Sequence[Sequence[Batch]],
    weight: Callable[[Batch], float] = lambda _: 1.0,
    left_out: Sequence[int] = (),
) -> None:
    """Train ``model`` on the union of the ranks' batches of each step; buffers are those of the
    first rank that has one. A step in ``left_out`` runs its forwards alone."""
    for step in range(max(map(len, of_ranks), default=0)):
        optimizer.zero_grad()
        having = [own[step] for own in of_ranks if step < len(own)]
        total = sum(weight(batch) for batch in having)
        before = [b.clone() for b in model.buffers()]
        after = before
        for number, batch in enumerate(having):
            for buffer, value in zip(model.buffers(), before, strict=True):
                buffer.data.copy_(value)
            loss = loss_of(model, batch) * (weight(batch) / total)
            if step not in left_out:
                loss.backward()
            if number == 0:
                after = [b.clone() for b in model.buffers()]
        last = step + 1
        sources = [own for own in of_ranks if step < len(own)]
        nexts = [own for own in of_ranks if last < len(own)]
        if nexts and nexts[0] is not sources[0]:  # the next step begins with another rank's buffers
            after = _buffers_after(model, before, nexts[0][step])
        for buffer, value in zip(model.buffers(), after, strict=True):
            buffer.data.copy_(value)
        if step not in left_out:
            optimizer.step()


def _buffers_after(model: Net, before: Sequence[Tensor], batch: Batch) -> list[Tensor]:
    """The buffers of the rank that forwards ``batch`` from the buffers ``before``."""
    for buffer, value in zip(model.buffers(), before, strict=True):
        buffer.data.copy_(value)
    with torch.no_grad():
        loss_of(model, batch)
    return [b.clone() for b in model.buffers()]


def compare(
    got: dict[str, Tensor | None], want: dict[str, Tensor | None], rank: int, what: str
) -> None:
    """By name; None must be None."""
    for name, value in want.items():
        mine = got[name]
        if (mine is None) != (value is None):
            have = "None" if mine is None else "a tensor"
            fail(
                f"{what}: {name} is {have} on rank {rank}, and {'None' if value is None else 'a '}"
                f"{'' if value is None else 'tensor'} in one process",
                cause="not-none" if value is None else "none-alone",
                rank=rank,
            )
        if mine is None or value is None:
            continue
        if not value.is_floating_point():
            mine, value = mine.double(), value.double()
        # a float32 parameter is rounded in each step, and a norm of three samples magnifies that
        expect_close(mine, value, what=f"{what}: {name}", rank=rank, rtol=1e-5, atol=1e-5)


def expect_same(results: Sequence[dict[str, Tensor | None]], ranks: Sequence[int]) -> None:
    """The same bits on all ``ranks``."""
    for rank in ranks[1:]:
        for name, value in results[ranks[0]].items():
            other = results[rank][name]
            same = other is value if value is None or other is None else torch.equal(value, other)
            if not same:
                said = f"{name} differs between ranks {ranks[0]} and {rank} after the join"
                fail(said, cause="ranks-differ", rank=rank)
