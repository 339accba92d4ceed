"""The answers to phase 4's small cases of compression, from the solutions' hooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from distlab.ranks import RankContext
from distlab.virtual import run_virtual
from solutions.phase4_production.gradient_compression import RandomK, TopK
from solutions.phase4_production.powersgd import orthonormal
from solutions.phase4_production.quantisation import OneBit
from tests.guidelines.folded import says
from tests.phase4.compression import bucket_of


def sent_by(make: Callable[[list[nn.Parameter]], Any], gradients: list[list[float]]) -> list[Any]:
    """What one rank's hook sends in each step."""

    def body(ctx: RankContext) -> list[list[float]]:
        bucket = bucket_of((len(gradients[0]),))
        hook, found = make(bucket.parameters), []
        for gradient in gradients:
            bucket.buffer.copy_(torch.tensor(gradient))
            hook(bucket).wait()
            found.append(bucket.buffer.tolist())
        return found

    (sent,) = run_virtual(body, 1, learner_files=(__file__,))
    return sent


def test_4_6() -> None:
    for momentum in (0.0, 0.5):
        sent = sent_by(lambda ps, m=momentum: TopK(ps, 0.5, m), [[3.0, 2.0]] * 6)  # type: ignore[misc]
        says(4, "4.6", ", ".join(f"{max(step):g}" for step in sent))
        if not momentum:
            first, second = (sum(column) for column in zip(*sent, strict=True))
            says(4, "4.6", f"{first:g} of {3 * 6} and {second:g} of {2 * 6}")


def test_4_7(monkeypatch: pytest.MonkeyPatch) -> None:
    positions = [2, 0, 2, 3]
    drawn = iter(positions)
    monkeypatch.setattr(torch, "randperm", lambda n, generator: torch.tensor([next(drawn)] * n))
    sent = sent_by(lambda ps: RandomK(ps, 0.25), [[1.0] * 4] * 4)
    for position, step in zip(positions, sent, strict=True):
        says(4, "4.7", f"{step[position]:g} from position {position}")
    never = len(sent) - sum(step[1] for step in sent)
    says(4, "4.7", f"Position 1 still owes {never:g}")


def test_4_8() -> None:
    m, q = torch.diag(torch.tensor([3.0, 1.0])), torch.full((2, 1), 0.5).sqrt()
    directions = []
    for _ in range(2):
        p = orthonormal(m @ q)
        p = p * p[0].sign()
        q = m.T @ p
        directions.append(p.flatten().tolist())
        if len(directions) == 1:
            (a, b), (c, d) = (p @ q.T).tolist()
            says(4, "4.8", f"({a:.1f} {b:.1f}; {c:.1f} {d:.1f})")
    says(4, "4.8", *("({:.3f}, {:.3f})".format(*pair) for pair in directions))
    ratios = [y / x for x, y in directions]
    says(4, "4.8", f"from 1/{1 / ratios[0]:.0f} to 1/{1 / ratios[1]:.0f}")


def test_4_9() -> None:
    sent = sent_by(OneBit, [[4.0, -1.0, 1.0], [0.0] * 3, [0.0] * 3])
    owed = torch.tensor([4.0, -1.0, 1.0])
    for step in sent:
        owed = owed - torch.tensor(step)
        for values in (step, owed.tolist()):
            says(
                4, "4.9", "(" + ", ".join(f"{v:.2f}".rstrip("0").rstrip(".") for v in values) + ")"
            )
