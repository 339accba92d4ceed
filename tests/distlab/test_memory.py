"""What a rank holds, against the formulas."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from distlab.observe.failure import CheckFailed
from distlab.observe.memory import PeakMemory, SavedActivations, held_by
from distlab.ranks import run_ranks


def test_state_by_kind() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8, bias=False))
    model[2].weight = model[0].weight  # tied: counted once
    psi = sum(p.numel() for p in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters())
    assert held_by(model, optimizer).gradients == 0
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
    held = held_by(model, optimizer)
    assert (held.parameters, held.gradients) == (4 * psi, 4 * psi)
    assert held.buffers == 2 * 8 * 4 + 8
    assert held.optimizer == 2 * 4 * psi + 4 * len(list(model.parameters()))  # moments and steps
    assert held.total == held.parameters + held.gradients + held.buffers + held.optimizer
    held.at_most(0, parameters=4 * psi)
    with pytest.raises(CheckFailed, match=r"rank 3 holds .* of optimizer, .* at most 10 B = f"):
        held.at_most(3, "f", optimizer=10)


def test_saved_activations() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)))
    x = torch.ones(32, 16)
    with SavedActivations(model) as saved:
        model(x)
    assert saved.bytes == 5 * 32 * 16 * 4  # the input of each Linear is the last Tanh's output
    with SavedActivations(model) as none, torch.no_grad():
        model(x)
    assert none.bytes == 0


def test_peak_of_all_tensors() -> None:
    with PeakMemory() as memory:
        a = torch.ones(1000)
        b = a + 1
        view = b.view(10, 100)
        assert memory.current == 8000
        del a
        assert memory.current == 4000
        del b, view
        assert memory.current == 0
        c = torch.zeros(500)
        c += 1
        assert memory.current == 2000
    assert memory.peak == 8000


def test_resized_storages_count() -> None:
    outside = torch.ones(500)
    with PeakMemory() as memory:
        a = torch.empty(1000)
        view = a[10:20]
        a.untyped_storage().resize_(0)
        assert memory.current == 0
        a.untyped_storage().resize_(4000)
        assert memory.current == 4000
        outside.untyped_storage().resize_(8000)
        assert memory.current == 12_000
        outside.untyped_storage().resize_(0)
        assert memory.current == 4000
        del a, view
        assert memory.current == 0
    assert memory.peak == 12_000
    outside.untyped_storage().resize_(2000)
    assert memory.current == 0


def test_a_dtensor_counts_with_its_local_part() -> None:
    def body(ctx) -> int:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor, Shard

        mesh = init_device_mesh("cpu", (2,))
        whole = DTensor.from_local(torch.ones(500), mesh, [Shard(0)])
        with PeakMemory() as memory:
            more = whole + 1
            return memory.current if more.shape == (1000,) else -1

    assert list(run_ranks(body, 2, ledger=False)) == [2000, 2000]
