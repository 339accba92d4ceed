"""Where a number has to be for a group to add it up."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from distlab.ranks import RankContext, run_ranks
from given.agreement import device_in, expect_alike, takes_cpu


@pytest.mark.parametrize(
    ("backends", "device"),
    [
        ("cpu:gloo,cuda:gloo", "cpu"),
        ("cpu:gloo,cuda:nccl", "cpu"),
        ("cuda:nccl", "cuda:3"),
    ],
)
def test_on_the_cpu_if_the_backend_takes_it(
    backends: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "get_backend_config", lambda group: backends)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert device_in(None) == torch.device(device)
    assert takes_cpu(None) is (device == "cpu")


def test_ranks_without_a_tensor_agree() -> None:
    def body(ctx: RankContext) -> str:
        expect_alike([])
        try:
            expect_alike([torch.ones(2)] if ctx.rank else [])
        except ValueError as error:
            return str(error)
        return ""

    for said in run_ranks(body, 2, ledger=False):
        assert "0 to 1 tensors" in said
