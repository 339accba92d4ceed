"""The answers to phase 2's small cases of experts, and the numbers of their picture."""

from __future__ import annotations

import json
import math

import torch

from benchmarks import moe_balance
from distlab.ranks import RankContext
from distlab.virtual import run_virtual
from scripts.diagrams.registry import ROOT
from solutions.phase2_advanced.expert_parallel import ExpertParallel
from solutions.phase2_advanced.mixture_of_experts import Router
from tests.guidelines.folded import says, sections


def two_experts(chances: list[float], **options: float) -> tuple[Router, torch.Tensor]:
    """A router of two experts, and tokens that have these probabilities for expert 0."""
    router = Router(1, 2, **options).double()
    router.weight.data.copy_(torch.tensor([[1.0], [0.0]]))
    p = torch.tensor(chances, dtype=torch.float64)
    return router, (p / (1 - p)).log().unsqueeze(1)


def test_2_24() -> None:
    def body(ctx: RankContext) -> tuple[object, ...]:
        router, x = two_experts([0.9, 0.8, 0.6, 0.3], capacity_factor=1.0)
        routing = router(x)
        router.update_bias(0.2)
        means = routing.load_E / 4, router.bias_E, router(x).load_E
        lost = (~routing.kept_NK).flatten().nonzero().flatten().tolist()
        return lost, routing.loss.item(), *(m.tolist() for m in means)

    lost, loss, share, bias, load = run_virtual(body, 1, learner_files=(__file__,))[0]
    one, other = share
    says(2, "2.24", f"f = ({one:g}, {other:g})", f"= {loss:.2f}", f"C = ⌈1·1·4/2⌉ = {4 // 2}")
    says(2, "2.24", *(f"token {token} is dropped" for token in lost))
    says(2, "2.24", f"({bias[0]:g}, {bias[1]:g})", f"The load is ({load[0]}, {load[1]})")


def test_2_25() -> None:
    def body(ctx: RankContext) -> tuple[int, ...]:
        chances = ([0.9, 0.1, 0.1], [0.1])[ctx.rank]
        router, x = two_experts(chances)
        router = router.float()
        router.weight.data = torch.cat([router.weight.data, torch.zeros(2, 3)], 1)
        x = torch.cat([x.float(), torch.zeros(len(x), 3)], 1)
        layer = ExpertParallel(router, torch.ones(2, 4, 5), torch.ones(2, 5, 4))
        with ctx.region("layer"):
            layer(x)
        return tuple(layer.rows)

    results = run_virtual(body, 2, learner_files=(__file__,))
    (one,), (other,) = results
    says(2, "2.25", f"rank 0 computes {one} row and rank 1 computes {other}")
    for rank, (sent, back) in enumerate(((3, 1), (1, 3))):
        moved = results.logs[rank].select(op="all_to_all", region="layer").events
        brought = sum(event.payload for event in moved)
        says(2, "2.25", f"16 + ({sent} + {back})·16 = {brought} bytes")


def test_numbers_of_the_picture() -> None:
    """Measured numbers in the text are those of the file."""
    found = json.loads(moe_balance.FILE.read_text(encoding="utf-8"))
    assert found["factors"] == [*moe_balance.FACTORS]
    text = " ".join(sections(2)["2.24"].split())
    times = [sum(found["kinds"][kind]["busiest"][-50:]) / 50 for kind in moe_balance.KINDS]
    for value in times:
        assert f" {value:.1f} times" in text
    shares = [
        found["kinds"][kind]["dropped"][found["factors"].index(1.25)] for kind in moe_balance.KINDS
    ]
    none, loss, bias = (100 * share for share in shares)
    assert f"{none:.0f} %, {loss:.0f} % and {bias:.1f} % of the choices are dropped" in text
    assert (ROOT / "docs" / "diagrams" / "2.24-2.svg").is_file()


def test_a_short_training_has_the_same_kind_of_numbers() -> None:
    """Three steps: the load adds up to the batch, and room for all drops nothing."""
    found = moe_balance.measure(steps=3)
    for each in found["kinds"].values():
        assert len(each["busiest"]) == 3
        assert all(1 <= times <= moe_balance.EXPERTS for times in each["busiest"])
        assert each["dropped"] == sorted(each["dropped"], reverse=True)
        assert math.isclose(each["dropped"][-1], 0, abs_tol=1e-6)
