"""Scenarios of PyTorch's own tests: the course's implementation and torch's in the same ranks.

``docs/pytorch_scenarios.toml`` lists the scenarios. A scenario is a function that every rank runs;
it returns what came out of the course's implementation and what came out of torch's. All scenarios
of a file share one start of ranks.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from distlab.ranks import RankContext, run_ranks

Pair = tuple[Any, Any]
Body = Callable[[RankContext], Pair]
VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])
VERIFIED = (2, 15)  # in 2.8 some answers are others: fully_shard sums gradients over gloo
ERRORS = (ValueError, TypeError, RuntimeError, AssertionError, KeyError)


class Ran:
    """What the ranks returned for every scenario of a file."""

    def __init__(self, results: list[dict[str, Pair]]) -> None:
        self.results = results

    def compare(self, name: str, rtol: float) -> None:
        """The same on every rank, to rounding."""
        for rank, found in enumerate(self.results):
            ours, theirs = found[name]
            expect_same(ours, theirs, f"rank {rank}", rtol)


class Scenarios:
    """The scenarios of a file; ``ported`` makes a test of one."""

    def __init__(self) -> None:
        self.bodies: dict[str, Body] = {}

    def ported(
        self, body: Body, *, rtol: float = 1e-5, listed: bool = True
    ) -> Callable[[Ran], None]:
        """A test that compares both results of ``body``; it asks for the fixture ``ran``."""
        name = body.__name__
        if listed:
            self.bodies[name] = body

        def test(ran: Ran) -> None:
            ran.compare(name, rtol)

        test.__name__, test.__doc__, test.__module__ = name, body.__doc__, body.__module__
        return test

    def about(self, rtol: float) -> Callable[[Body], Callable[[Ran], None]]:
        """As ``ported``, for results that agree to ``rtol`` only."""
        return lambda body: self.ported(body, rtol=rtol)

    def newer(self, body: Body, *, rtol: float = 1e-5) -> Callable[[Ran], None]:
        """As ``ported``; skipped where torch is too old to give what it gives now."""
        if VERSION >= VERIFIED:
            return self.ported(body, rtol=rtol)
        reason = f"torch {torch.__version__} is older than the one that this was compared with"
        return pytest.mark.skip(reason)(self.ported(body, listed=False))

    def run(self, world_size: int) -> Ran:
        """Start the ranks once, and let them run all scenarios one after the other."""

        def all_of_them(ctx: RankContext) -> dict[str, Pair]:
            torch.set_num_threads(1)
            return {name: plain(body(ctx)) for name, body in self.bodies.items()}

        return Ran(list(run_ranks(all_of_them, world_size, ledger=False, timeout=120)))


def plain(value: Any) -> Any:
    """``value`` without autograd history, and nothing but plain containers."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    return value


def expect_same(ours: Any, theirs: Any, where: str, rtol: float) -> None:
    """Equal structures, equal plain data, close tensors and floats."""
    if isinstance(theirs, dict):
        assert list(ours) == list(theirs), where
        for key in theirs:
            expect_same(ours[key], theirs[key], f"{where}: {key}", rtol)
    elif isinstance(theirs, list):
        assert len(ours) == len(theirs), where
        for k, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            expect_same(one, other, f"{where}: {k}", rtol)
    elif isinstance(theirs, Tensor):
        assert isinstance(ours, Tensor), where
        torch.testing.assert_close(
            ours, theirs, rtol=rtol, atol=rtol, msg=lambda text: f"{where}: {text}"
        )
    elif isinstance(theirs, float):
        assert ours == pytest.approx(theirs, rel=rtol, abs=rtol), where
    else:
        assert ours == theirs, where


def seeded(make: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """A module whose values are the same on all ranks."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()


def twins(make: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    """Two modules with the same values, one for each side."""
    module = seeded(make)
    return module, copy.deepcopy(module)


def refused(call: Callable[[], object]) -> bool:
    """Whether ``call`` raises one of the errors that say what is wrong."""
    try:
        call()
    except ERRORS:
        return True
    return False


def inputs(ctx: RankContext, *shape: int, salt: int = 0) -> Tensor:
    """Random numbers that differ by rank and ``salt``."""
    return torch.randn(*shape, generator=ctx.generator(salt))


def gradients(module: nn.Module) -> list[Tensor | None]:
    """Every parameter's gradient, None included."""
    return [p.grad if p.grad is None else p.grad.detach().clone() for p in module.parameters()]


def values(module: nn.Module) -> list[Tensor]:
    """Every parameter and buffer."""
    return [t.detach().clone() for t in (*module.parameters(), *module.buffers())]


def mlp() -> nn.Module:
    """Two odd layers."""
    return nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3))
