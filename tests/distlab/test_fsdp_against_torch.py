"""FSDP against torch's own, and misuse that the toolkit names."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from distlab.ranks import RankFailure, run_ranks
from distlab.reference.workloads import GPT
from distlab.virtual import run_virtual
from solutions.phase3_multi_node.fsdp import FSDP, clip_by_global_norm
from solutions.phase3_multi_node.fsdp_prefetch import PrefetchFSDP

pytestmark = pytest.mark.verdict


def gpt() -> GPT:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return GPT(31, 8, 3, 12, 2)


def test_the_same_training_as_torchs_fully_shard() -> None:
    def body(ctx) -> list[list[float]]:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        theirs, plain, ahead = gpt(), gpt(), gpt()
        for block in theirs.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(theirs, mesh=mesh)
        models = [
            theirs,
            FSDP(plain, list(plain.blocks)),
            PrefetchFSDP(ahead, list(ahead.blocks)),
        ]
        found: list[list[float]] = [[] for _ in models]
        tokens = torch.randint(0, 31, (4, 8), generator=ctx.generator())
        optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in models]
        for _ in range(4):
            for k, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
                optimizer.zero_grad()
                loss = F.cross_entropy(model(tokens), tokens.flatten())
                loss.backward()
                if k:
                    norm = clip_by_global_norm(model, 0.5)
                else:
                    whole = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                    norm = float(whole.full_tensor())
                optimizer.step()
                found[k] += [loss.item(), norm]
        return found

    for theirs, plain, ahead in run_ranks(body, 3, ledger=False, timeout=60):
        assert plain == pytest.approx(theirs, rel=1e-4)
        assert ahead == pytest.approx(theirs, rel=1e-4)


@pytest.mark.parametrize("run", [run_virtual, run_ranks])
def test_forward_on_some_ranks_only_is_named(run) -> None:
    """An evaluation on rank 0 alone waits for the others' shards for ever."""

    def body(ctx) -> None:
        inner = gpt()
        model = FSDP(inner, list(inner.blocks))
        if ctx.rank == 0:
            with torch.no_grad():
                model(torch.zeros(1, 8, dtype=torch.int64))

    with pytest.raises(RankFailure, match="all_gather") as failure:
        run(body, 2, timeout=20)
    assert failure.value.kind == "hang"
    assert "rank 1" in str(failure.value)


def test_a_freed_parameter_is_none_not_garbage() -> None:
    def body(ctx) -> bool:
        inner = gpt()
        model = FSDP(inner, list(inner.blocks))
        before = inner.norm.weight is None
        model(torch.zeros(1, 8, dtype=torch.int64)).sum().backward()
        return before and inner.norm.weight is None

    assert list(run_virtual(body, 2)) == [True, True]


class Awkward(torch.nn.Module):
    """Changes its input in place, and recomputes a part in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(F.relu(x, inplace=True))
        return checkpoint(self.second, x, use_reentrant=False)


@pytest.mark.parametrize("wrapper", [FSDP, PrefetchFSDP])
def test_inputs_changed_in_place_and_recomputation(wrapper) -> None:
    def body(ctx) -> list[float]:
        out = []
        for sharded in (False, True):
            torch.manual_seed(0)
            inner = torch.nn.Sequential(torch.nn.Linear(4, 4), *[Awkward() for _ in range(3)])
            model = wrapper(inner, list(inner)[1:]) if sharded else inner
            optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
            for _ in range(3):
                optimizer.zero_grad()
                loss = (model(torch.ones(2, 4)) ** 2).sum()
                loss.backward()
                optimizer.step()
            out.append(loss.item())
        return out

    for plain, sharded in run_virtual(body, 2):
        assert sharded == pytest.approx(plain, rel=1e-5)
