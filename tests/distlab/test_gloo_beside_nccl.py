"""Groups of gloo on virtual ranks: alone, beside NCCL's, and in one group with NCCL."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from distlab.ranks import RankContext, RankFailure
from distlab.virtual import run_virtual

HERE = (__file__,)
MODES = ("nccl2", "legacy lazy", "legacy eager")


def numbers(ctx: RankContext, value: float) -> torch.Tensor:
    return torch.full((4,), float(value), device=ctx.device)


def exchange(tensor: torch.Tensor, other: int, group: dist.ProcessGroup) -> torch.Tensor:
    """Both ends receive before they send."""
    handles = [
        dist.irecv(got := torch.empty_like(tensor), group=group, group_src=other),
        dist.isend(tensor, group=group, group_dst=other),
    ]
    for handle in handles:
        handle.wait()
    return got


def test_a_group_of_gloo_where_all_are() -> None:
    def body(ctx: RankContext) -> list[float]:
        group = dist.new_group([0, 2], backend="gloo")
        assert dist.get_backend() == "gloo"
        if ctx.rank == 1:
            return []
        assert dist.get_backend(group) == "gloo"
        dist.all_reduce(x := numbers(ctx, ctx.rank), group=group)
        return x.tolist()

    for seed in (None, 1):
        assert [*run_virtual(body, 3, seed=seed)] == [[2.0] * 4, [], [2.0] * 4]


def test_a_program_that_joins_by_gloo() -> None:
    """Its groups are gloo's, also where NCCL's rules hold and a group names no backend."""

    def body(ctx: RankContext) -> list[float]:
        dist.init_process_group("gloo", init_method="env://")
        group = dist.new_group([0, 1])
        assert (dist.get_backend(), dist.get_backend(group)) == ("gloo", "gloo")
        got = exchange(torch.full((4,), float(ctx.rank)), 1 - ctx.rank, group)
        dist.destroy_process_group()
        return got.tolist()

    for rules in ("gloo", *MODES):
        results = run_virtual(body, 2, rules=rules, process_group=False, learner_files=HERE)
        assert [*results] == [[1.0] * 4, [0.0] * 4]


@pytest.mark.parametrize("rules", MODES)
def test_it_takes_tensors_of_both_and_has_gloos_order(rules: str) -> None:
    def body(ctx: RankContext) -> list[float]:
        group = dist.new_group(backend="gloo")
        dist.all_reduce(x := numbers(ctx, ctx.rank + 1), group=group)
        dist.all_gather(every := [numbers(ctx, 0) for _ in range(2)], x, group=group)
        got = exchange(x.cpu(), 1 - ctx.rank, group)
        assert [t.device for t in (x, *every)] == [ctx.device] * 3
        return [x[0].item(), every[1][0].item(), got[0].item()]

    assert [*run_virtual(body, 2, rules=rules, learner_files=HERE)] == [[3.0] * 3] * 2


def test_ranks_outside_of_it_wait_for_ever_in_torch_2_8() -> None:
    """They split the world's communicator, and the members of a group of gloo's do not."""

    def body(ctx: RankContext) -> None:
        dist.new_group([0, 1], backend="gloo")
        dist.barrier()

    for rules in ("nccl2", "legacy lazy"):
        run_virtual(body, 3, rules=rules, learner_files=HERE)
    with pytest.raises(RankFailure, match="ranks 0 and 1 never came to it") as caught:
        run_virtual(body, 3, rules="legacy eager", learner_files=HERE)
    assert "rank 2 waits in new_group, which splits the world's communicator" in str(caught.value)


def test_it_passes_no_messages_of_gpus() -> None:
    def body(ctx: RankContext) -> None:
        group = dist.new_group(backend="gloo")
        exchange(numbers(ctx, 1), 1 - ctx.rank, group)

    words = "recv of a tensor on cuda:[01] in a group of gloo, which passes messages between CPUs"
    with pytest.raises(RankFailure, match=words):
        run_virtual(body, 2, rules="nccl2", learner_files=HERE)


@pytest.mark.parametrize("rules", MODES)
def test_one_group_of_both(rules: str) -> None:
    """What is on the host goes by gloo, with tags and from any rank; the rest by NCCL's rules."""

    def body(ctx: RankContext, wrong: bool) -> list[float]:
        torch.cuda.set_device(ctx.rank)
        dist.init_process_group("cpu:gloo,cuda:nccl", device_id=torch.device("cuda", ctx.rank))
        group, other = dist.group.WORLD, 1 - ctx.rank
        assert dist.get_backend_config() == "cpu:gloo,cuda:nccl"
        dist.all_reduce(x := numbers(ctx, 1))
        dist.all_reduce(y := torch.full((4,), 2), dist.ReduceOp.BOR)
        got = exchange(y.float(), other, group)
        batch = [dist.P2POp(dist.isend, got, other), dist.P2POp(dist.irecv, z := got * 0, other)]
        for handle in dist.batch_isend_irecv(batch):
            handle.wait()
        if ctx.rank:
            dist.send(z, 0, tag=3)
        else:
            assert dist.recv(z, tag=3) == 1
        if wrong:
            exchange(x, other, group)
        dist.destroy_process_group()
        return [x[0].item(), z[0].item()]

    options = {"rules": rules, "process_group": False, "learner_files": HERE}
    assert [*run_virtual(body, 2, False, **options)] == [[2.0, 2.0]] * 2
    with pytest.raises(RankFailure, match="gloo forgives this order"):
        run_virtual(body, 2, True, **options)
