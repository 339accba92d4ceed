"""``--fp8``: the time of a layer's products and casts, and what its numbers and memory are."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from distlab.hardware.clusters import load_cluster
from distlab.hardware.kernels import load_kernels
from distlab.ranks import RankContext
from distlab.simulate.eight_bits import EIGHT, in_eight_bits
from distlab.simulate.plan import Plan
from distlab.simulate.prediction import simulate
from distlab.virtual import run_virtual
from distlab.virtual.isolation import entered

NODE, H100 = load_cluster("dgx-h100"), load_kernels("h100")
ROWS, INTO, OUT = 8192, 4096, 2048
NARROW = torch.bfloat16


def spent(eight: bool, bias: bool = False) -> tuple[dict[str, float], float]:
    """Seconds by kind of kernel and FLOPs of forward and backward of one layer on one GPU."""

    def body(ctx: RankContext) -> tuple[dict[str, float], float]:
        with torch.device("meta"):
            layer = nn.Linear(INTO, OUT, bias=bias, dtype=NARROW)
            x = torch.empty(4, ROWS // 4, INTO, dtype=NARROW, requires_grad=True)
        if eight:
            in_eight_bits([layer], NARROW)
        model = entered().mine.model
        model.spent.clear()
        y = layer(x)
        assert (y.shape, y.dtype) == ((4, ROWS // 4, OUT), NARROW)
        y.backward(torch.empty_like(y))
        assert layer.weight.grad.dtype == x.grad.dtype == NARROW
        assert (layer.weight.grad.shape, x.grad.shape) == (layer.weight.shape, x.shape)
        return dict(model.spent), model.flops

    return run_virtual(body, 1, cluster=NODE, compute="kernels")[0]


def test_three_products_at_the_rate_of_8_bits_and_a_cast_of_each_factor() -> None:
    found, flops = spent(eight=True)
    each, form, load = 2 * ROWS * INTO * OUT, H100.product[EIGHT], H100.load
    assert flops == 3 * each
    product = 3 * each / (form.share * NODE.gpu.flops[EIGHT]) * load["product"]
    assert found["product"] == pytest.approx(product)
    # a kernel reads 2 bytes an element, and writes 1 byte twice
    cast = sum(
        max(H100.moved(NODE.gpu, "cast_transpose", 4 * n), H100.kernel)
        for n in (ROWS * INTO, OUT * INTO, ROWS * OUT)
    )
    assert found["memory"] == pytest.approx(cast, rel=0.02)


def test_products_take_half_the_time_and_a_bias_is_added_in_16_bits() -> None:
    (eight, _), (sixteen, _) = spent(True), spent(False)
    assert 0.4 < eight["product"] / sixteen["product"] < 0.6
    (with_bias, flops), (_, plain) = spent(True, bias=True), spent(True)
    assert flops == plain
    assert with_bias["memory"] > eight["memory"]


def test_a_step_in_8_bits_is_faster_and_sends_as_much() -> None:
    common = {"model": "mpt-1b", "gpus": (8,), "cluster": "dgx-h100", "strategy": "fsdp"}
    plans = [Plan(precision="mixed", layers=2, fp8=fp8, **common) for fp8 in (False, True)]
    (sixteen,), (eight,) = (list(simulate(plan)) for plan in plans)
    assert 0.6 < eight.step / sixteen.step < 0.95
    assert eight.bytes_per_link == sixteen.bytes_per_link


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"model": "resnet50"}, "fp8 is for language models"),
        ({"model": "gpt-1b", "tensor": 2, "gpus": (2,)}, "without tensor or pipeline"),
        ({"model": "gpt-1b", "cluster": "p4d-a100"}, "no rate of fp8"),
    ],
)
def test_plans_without_fp8_are_refused(fields: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Plan(**{"cluster": "dgx-h100", "gpus": (1,), "fp8": True} | fields)
