"""FSDP's own work, beside compute and messages, grows with the units and not with their square."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import nn

from distlab.virtual import run_virtual
from solutions.phase3_multi_node.fsdp import FSDP, FlatParameter
from solutions.phase3_multi_node.fsdp_prefetch import PrefetchFSDP

pytestmark = pytest.mark.verdict


ASKED = ("start_gather", "finish_gather", "free", "start_reduce", "finish_reduce")


def looks(kind: type[FSDP], units: int) -> int:
    """How often a training step asks a vector for something: to gather, free or reduce."""

    def body(ctx) -> int:
        asked = 0

        class Asked(FlatParameter):
            def __getattribute__(self, name: str) -> object:
                nonlocal asked
                asked += name in ASKED
                return super().__getattribute__(name)

        layers = [nn.Linear(2, 2) for _ in range(units)]
        model = kind(nn.Sequential(*layers), layers, flat_type=Asked)
        inputs = torch.ones(1, 2, requires_grad=True)
        model(inputs).sum().backward()  # the second step has learnt the order
        asked = 0
        model(inputs).sum().backward()
        return asked

    return run_virtual(body, 1)[0]


@pytest.mark.parametrize("kind", [FSDP, PrefetchFSDP])
def test_looks_at_vectors_grow_with_the_units(kind) -> None:
    found = [looks(kind, units) for units in (8, 16, 32)]
    assert found[0] >= 8
    steps = [more - less for less, more in pairwise(found)]
    assert steps[1] == 2 * steps[0], found
