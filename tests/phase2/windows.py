"""Models, micro-batches and expected values of the checks of exercises 2.1 to 2.3."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from distlab.explain.case import Case, Diagnosis, Rule
from distlab.grading import expect_close, fail

CLASSES = 3
MicroBatch = tuple[Tensor, Tensor]

# (samples, without target) per micro-batch, per rank: 1, 7 and 3 counted targets and so on
RANKS = [[(1, 0), (9, 2), (3, 0)], [(4, 1)], [], [(2, 2), (5, 0)], [(6, 3)]]


class Odd(nn.Module):
    """Tied, half-frozen, transposed, 0-d, empty and unused parameters; one of large batches only.

    ``mixed``: some parameters are float32, float16 and bfloat16; what is computed is float64.
    """

    def __init__(self, mixed: bool) -> None:
        super().__init__()
        self.turned = nn.Parameter(torch.randn(4, 4).t())
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.low = nn.Parameter(torch.zeros(4))
        self.brain = nn.Parameter(torch.zeros(4))
        self.rare = nn.Parameter(torch.zeros(CLASSES))
        self.empty = nn.Parameter(torch.zeros(0, 2))
        self.unused = nn.Parameter(torch.ones(3))
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.second.bias.requires_grad_(False)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.head = nn.Linear(4, CLASSES)
        self.double()
        if mixed:
            dtypes = {"turned": torch.float32, "low": torch.float16, "brain": torch.bfloat16}
            for name, dtype in dtypes.items():
                p = self.get_parameter(name)
                p.data = p.data.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.second(torch.tanh(self.first(self.frozen(x)))))
        x = x @ self.turned.double() * self.scale + self.low.double() + self.brain.double()
        logits = self.head(x)
        return logits + self.rare if len(x) > 5 else logits


def net(seed: int, mixed: bool = False) -> Odd:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Odd(mixed)


def micro_batch(seed: int, n: int, ignored: int = 0) -> MicroBatch:
    """``n`` samples, the last ``ignored`` of which have no target."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(n, 4, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, CLASSES, (n,), generator=generator)
    targets[n - ignored :] = -100
    return inputs, targets


def window_of(
    seed: int, rank: int, shape: Sequence[tuple[int, int]], device: torch.device | str = "cpu"
) -> list[MicroBatch]:
    drawn = (micro_batch(seed * 100 + rank * 10 + k, *s) for k, s in enumerate(shape))
    return [(inputs.to(device), targets.to(device)) for inputs, targets in drawn]


def counted(shape: Sequence[tuple[int, int]]) -> int:
    """The targets that count in a window of this shape."""
    return sum(n - ignored for n, ignored in shape)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Copies of the gradients that there are."""
    named = model.named_parameters()
    return {name: p.grad.clone() for name, p in named if p.grad is not None}


def expected(model: nn.Module, windows: Sequence[Sequence[MicroBatch]], total: float) -> float:
    """The gradient of (sum of all losses) / ``total``, as autograd gives it; returns the sum."""
    losses = torch.zeros((), dtype=torch.float64)
    for inputs, targets in [pair for window in windows for pair in window]:
        losses = losses + F.cross_entropy(model(inputs), targets, reduction="sum")
    if losses.requires_grad:
        (losses / total).backward()
    for p in model.parameters():
        if p.requires_grad and p.grad is None:
            p.grad = torch.zeros_like(p)
    return losses.item()


def each_alone(seed: int, window: Sequence[MicroBatch], total: float) -> list[dict[str, Tensor]]:
    """The gradient that each micro-batch adds to that of ``net(seed, mixed=True)``."""
    found = []
    for inputs, targets in window:
        model = net(seed, mixed=True)
        if bool((targets != -100).any()):
            expected(model, [[(inputs, targets)]], total)
            found.append(gradients(model))
    return found


def tolerances(dtype: torch.dtype, size: float) -> dict[str, float]:
    """For a sum over a few micro-batches and ranks, whose terms are as large as ``size``."""
    part = {torch.float64: 1e-10, torch.float32: 1e-5}.get(dtype, 0.05)
    return {"rtol": part, "atol": part * max(size, 1e-2)}


def compare(
    got: dict[str, Tensor],
    want: dict[str, Tensor],
    what: str,
    rank: int,
    *,
    owns: Sequence[dict[str, Tensor]] = (),
    terms: Sequence[dict[str, Tensor]] = (),
    weights: Sequence[int] = (),
    rules: Sequence[tuple[str, str, dict[str, Tensor]]] = (),
) -> None:
    """By name; ``owns``: gradients of the ranks' own means; ``terms``: what the micro-batches add,
    which may be larger than their sum; ``rules``: cause, why, formula."""
    for name, value in want.items():
        parts = [own[name] for own in owns]
        added = [value, *parts, *(term[name] for term in terms)]
        size = max((float(t.double().abs().max()) for t in added if t.numel()), default=0)
        expect_close(
            got.get(name),
            value,
            what=f"{what}: gradient of {name}",
            rank=rank,
            contributions=parts or None,
            weights=weights if parts else None,
            rules=[formula(cause, why, tensors[name]) for cause, why, tensors in rules],
            **tolerances(value.dtype, size),
        )


def formula(cause: str, sentence: str, tensor: Tensor) -> Rule:
    """A rule of one check: what the tensor would be after a known mistake."""

    def rule(case: Case) -> Diagnosis | None:
        return Diagnosis(cause, sentence) if case.fits(tensor) else None

    return rule


def plain(value: object) -> object:
    """What a call returned, fit to be sent to the grader: tensors without their graph."""
    if isinstance(value, torch.Tensor):
        return value.detach()
    if isinstance(value, tuple | list):
        return type(value)(map(plain, value))
    return value


def expect_numbers(got: object, kinds: Sequence[type], what: str, rank: int) -> list:
    """The values of a tuple, each of its kind (a float may be an int); fails otherwise."""
    if not isinstance(got, tuple | list) or len(got) != len(kinds):
        fail(f"{what}: expected {len(kinds)} values, got {got!r}", cause="type", rank=rank)
    for value, kind in zip(got, kinds, strict=True):
        allowed = (int, float) if kind is float else kind
        if not isinstance(value, allowed) or isinstance(value, bool) != (kind is bool):
            message = f"{what}: expected a {kind.__name__}, got {value!r}"
            fail(message, cause="type", rank=rank)
    return list(got)


def expect_number(got: float, want: float, what: str, cause: str, rank: int) -> None:
    """Fail unless the floats are equal to the rounding of a few sums in float64."""
    if not abs(got - want) <= 1e-9 * max(1.0, abs(want)):
        fail(f"{what}: expected {want:.12g}, got {got:.12g}", cause=cause, rank=rank)


class Kept:
    """A tensor that a graph has saved for backward."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class Watched(nn.Module):
    """Notes at each forward how many samples it has, and what of earlier forwards is alive."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, CLASSES, dtype=torch.float64)
        self.saved = weakref.WeakSet[Kept]()
        self.logits: list[weakref.ref[Tensor]] = []
        self.seen: list[tuple[int, int, int]] = []

    def forward(self, x: Tensor) -> Tensor:
        alive = sum(ref() is not None for ref in self.logits)
        self.seen.append((len(x), len(self.saved), alive))
        with torch.autograd.graph.saved_tensors_hooks(self._keep, lambda kept: kept.tensor):
            out = torch.tanh(self.layer(x)) * 2
        self.logits.append(weakref.ref(out))
        return out

    def _keep(self, tensor: Tensor) -> Kept:
        kept = Kept(tensor.detach())  # with its graph it would hold itself
        self.saved.add(kept)
        return kept


def expect_freed(seen: Sequence[tuple[int, int, int]], shape: Sequence[tuple[int, int]]) -> None:
    """Every micro-batch alone and in order; nothing of those before it is alive but one's logits.

    What has no target need not run.
    """
    sizes = [size for size, _, _ in seen]
    every, useful = [n for n, _ in shape], [n for n, ignored in shape if n > ignored]
    if sizes not in (every, useful):
        fail(
            f"the micro-batches have {every} samples, the model was called with {sizes}: each goes "
            "through the model by itself, once and in order",
            cause="forwards",
        )
    for number, (_, saved, logits) in enumerate(seen):
        if saved or logits > 1:
            fail(
                f"when micro-batch {number} begins, {saved} saved tensors and {logits} logits of "
                "earlier ones are alive: run backward for each micro-batch, and keep no graph",
                cause="graphs-kept",
            )
