"""Measured kernels and curves: formulas, files that are wrong, and what a step does with them."""

from __future__ import annotations

import dataclasses
import functools
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from distlab.course.catalogue import root
from distlab.hardware import kernels as room
from distlab.hardware.clusters import load_cluster
from distlab.hardware.collectives import collective_time
from distlab.hardware.curves import Curve, interpolated, reach
from distlab.hardware.kernels import load_kernels
from distlab.ranks import RankContext
from distlab.simulate.plan import Plan
from distlab.simulate.prediction import Answer, simulate
from distlab.virtual import run_virtual
from distlab.virtual.fusion import Fusion
from distlab.virtual.isolation import entered

pytestmark = pytest.mark.verdict

NODE = load_cluster("dgx-h100")
H100 = load_kernels("h100")
ALONE = {"product": 1.0, "attention": 1.0, "memory": 1.0}


def seconds(body) -> float:
    """The virtual time of a body on one GPU."""
    return run_virtual(body, 1, cluster=NODE, compute="kernels").clock


# -- kernels --------------------------------------------------------------------------------------
def test_a_product_takes_its_arithmetic_and_a_part_of_its_traffic() -> None:
    def body(ctx: RankContext) -> None:
        a = torch.empty(4096, 4096, device="meta", dtype=torch.bfloat16)
        a @ a

    form, nbytes = H100.product["bfloat16"], 3 * 4096**2 * 2
    alone = 2 * 4096**3 / (form.share * NODE.gpu.flops["bfloat16"])
    alone += form.traffic * nbytes / NODE.gpu.bandwidth
    assert seconds(body) == pytest.approx(H100.host + H100.load["product"] * alone)


def test_a_causal_mask_halves_the_arithmetic_of_attention_and_not_its_time() -> None:
    def attended(causal: bool) -> float:
        def body(ctx: RankContext) -> None:
            q = torch.empty(1, 32, 4096, 128, device="meta", dtype=torch.bfloat16)
            torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=causal)

        return seconds(body) - H100.host

    assert 0.5 < attended(True) / attended(False) < 0.65


def test_shares_of_other_operators_are_found_by_name() -> None:
    gpu = NODE.gpu
    plain, norm = (H100.moved(gpu, name, 1e9) for name in ("add", "native_layer_norm"))
    assert plain == pytest.approx(1e9 / (0.95 * gpu.bandwidth) * H100.load["memory"])
    assert norm == pytest.approx(plain * 0.95 / 0.60)


def test_a_measured_convolution_has_its_own_share() -> None:
    for known in H100.convolution[::40]:
        flops = 1e12
        rate = room.rate(NODE.gpu, known.dtype)
        want = flops / (known.share * rate) * H100.load["product"]
        assert H100.convolved(NODE.gpu, flops, known) == pytest.approx(want, rel=1e-3)
    known = next(c for c in H100.convolution if (c.dtype, c.kernel) == ("bfloat16", 3))
    wider = dataclasses.replace(known, into=known.into + 8)
    assert H100.convolved(NODE.gpu, 1e12, wider) == pytest.approx(
        H100.convolved(NODE.gpu, 1e12, known), rel=0.2
    )


def test_small_kernels_wait_for_the_host_and_that_is_no_compute() -> None:
    def body(ctx: RankContext) -> None:
        a = torch.empty(8, device="meta")
        for _ in range(100):
            a = a + 1

    assert seconds(body) == pytest.approx(100 * H100.host + H100.kernel, rel=1e-6)
    (answer,) = simulate(Plan(model="mlp", gpus=(1,), batch=64))
    assert answer.host > answer.compute
    assert answer.step == pytest.approx(answer.compute + answer.exposed + answer.host)
    assert sum(answer.parts.values()) == pytest.approx(answer.compute)


def test_more_nodes_make_kernels_slower() -> None:
    assert H100.growing(1) == 1.0
    assert H100.growing(64) == pytest.approx(1 + 6 * H100.growth)


def test_optimizer_that_is_fused_is_faster() -> None:
    slow, fused = step(), step(fused=("optimizer",))
    ratio = H100.optimizer["fused"] / H100.optimizer["foreach"]
    assert slow.parts["optimizer"] == pytest.approx(ratio * fused.parts["optimizer"])


def test_a_result_inside_a_fused_kernel_is_neither_written_nor_read() -> None:
    """Bias, dropout and residual sum of N elements move 4N, 5N and 6N bytes, fused 7N."""

    def body(ctx: RankContext, rules: tuple[str, ...]) -> dict[str, float]:
        model = entered().mine.model
        model.fusion = Fusion(rules) if rules else None
        x, bias = (torch.empty(4096, 8192, device="meta", dtype=torch.bfloat16) for _ in range(2))
        y = x + bias[0]
        dropped, _ = torch.native_dropout(y, 0.1, True)
        del y
        z = x + dropped
        (x.sum(), z.sum())  # a sum is no part of a chain
        return {"seconds": model.spent["memory"], "host": model.host}

    plain, fused, compiled = (
        run_virtual(body, 1, rules, cluster=NODE, compute="kernels", ledger=False)[0]
        for rules in ((), ("residual",), ("pointwise",))
    )
    count = 4096 * 8192
    add, dropout, sums = (
        H100.moved(NODE.gpu, name, count) for name in ("add", "native_dropout", "sum")
    )
    bias = H100.moved(NODE.gpu, "add", 2 * 8192)
    apart = 4 * add + bias + 5 * dropout + 6 * add + 2 * 2 * sums
    together = 4 * add + bias + 1 * dropout + 2 * add + 2 * 2 * sums
    assert plain["seconds"] == pytest.approx(apart, rel=1e-3)
    assert fused["seconds"] == compiled["seconds"] == pytest.approx(together, rel=1e-3)
    assert plain["host"] - fused["host"] == pytest.approx(2 * H100.host)


def test_only_ranks_that_meet_in_every_layer_slow_each_other_down() -> None:
    fields = {"cluster": "dgx-h100", "model": "gpt-1b", "layers": 2, "tensor": 8}
    one, four = simulate(Plan(gpus=(8, 32), **fields))
    assert four.parts["product"] == pytest.approx(one.parts["product"])
    alone, many = simulate(Plan(gpus=(8, 32), model="gpt-1b", layers=2, strategy="fsdp"))
    assert many.parts["product"] / alone.parts["product"] == pytest.approx(H100.growing(4))


# -- files ----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("  load: as the H100's (assumed)\n", "", "nothing about load"),
        ("load: assumed, ", "load: guessed, ", "nothing about load"),
        ("like: h100", "like: h10", "no kernels 'h10'"),
        ("sources:", "rubbish: 1\nsources:", "rubbish"),
        ("product: assumed", "memory: fitted, product: assumed", "are fitted, at most 6"),
    ],
)
def test_files_that_are_wrong_are_refused(tmp_path: Path, old: str, new: str, words: str) -> None:
    text = (room.FOLDER / "kernels/h200.yaml").read_text(encoding="utf-8")
    if "fitted" in new:  # the shares of ten operators
        text = text.replace("memory: assumed, ", "")
    assert old in text
    path = tmp_path / "own.yaml"
    path.write_text(text.replace(old, new, 1), encoding="utf-8")
    with pytest.raises(ValueError, match=words):
        load_kernels(str(path))


# -- curves ---------------------------------------------------------------------------------------
def test_a_curve_gives_its_own_points_back() -> None:
    for name in ("dgx-a100", "dgx-h200", "p6-b200"):
        cluster = load_cluster(name)
        for curve in cluster.curves:
            shards = curve.ranks if curve.op == "all_gather" else 1
            for size in curve.bandwidth:
                got = collective_time(curve.op, size / shards, tuple(range(curve.ranks)), cluster)
                assert got == pytest.approx(curve.seconds(size), rel=1e-6), (name, curve.op, size)


def test_a_curve_is_interpolated_over_the_logarithm_and_ends_at_the_closed_form() -> None:
    points = [(20.0, 0.5), (24.0, 0.9)]
    assert interpolated(points, 22.0) == pytest.approx(0.7)
    assert interpolated(points, 10.0) == 0.5
    assert interpolated(points, 24.5) == pytest.approx(0.95)
    assert interpolated(points, 40.0) == 1.0


def test_a_curve_inside_a_node_says_nothing_of_several_nodes() -> None:
    curve = Curve(op="all_reduce", ranks=8, nodes=1, bandwidth={2**20: 1e9}, source="a test")

    def form(*_: object) -> float:
        return 1.0

    assert reach([curve], "all_reduce", 2**20, 4, 1, form) != 1.0
    assert reach([curve], "all_reduce", 2**20, 16, 2, form) == 1.0
    assert reach([curve], "broadcast", 2**20, 8, 1, form) == 1.0


def test_algorithms_by_name_do_not_follow_the_curve() -> None:
    cluster = load_cluster("dgx-a100")
    bare = dataclasses.replace(cluster, curves=())
    group, nbytes = tuple(range(8)), 2**24
    ring = [collective_time("all_reduce", nbytes, group, c, "ring") for c in (cluster, bare)]
    assert ring[0] == ring[1]
    fastest = [collective_time("all_reduce", nbytes, group, c) for c in (cluster, bare)]
    assert fastest[0] > fastest[1]


# -- what a step does besides ---------------------------------------------------------------------
@functools.cache
def step(**fields) -> Answer:
    """A step of a small transformer with FSDP on one GPU."""
    common = {"model": "mpt-125m", "strategy": "fsdp", "gpus": (1,), "precision": "mixed"}
    (answer,) = simulate(Plan(**common | fields))
    return answer


def test_recomputation_costs_a_forward_and_saves_memory() -> None:
    none, selective, full = step(), step(recompute="selective"), step(recompute="full")
    assert none.parts["product"] < selective.parts["product"] < full.parts["product"]
    blocks, head = 12 * 12 * 768**2, 50_368 * 768  # parameters; the head is computed once
    again = 1 + blocks / (blocks + head) / 3
    assert full.parts["product"] == pytest.approx(none.parts["product"] * again, rel=0.1)
    assert full.memory < selective.memory < none.memory


def test_accumulation_updates_once_for_several_batches() -> None:
    one, four = step(batch=2), step(batch=2, accumulate=4)
    assert four.parts["product"] == pytest.approx(4 * one.parts["product"], rel=1e-6)
    assert four.parts["optimizer"] == pytest.approx(one.parts["optimizer"], rel=1e-6)
    assert four.rate > one.rate


def test_longer_sequences_have_more_attention_per_token() -> None:
    short, long = step(), step(batch=1, length=8192)
    assert long.parts["product"] == pytest.approx(short.parts["product"], rel=0.05)
    assert long.parts["attention"] > 2.5 * short.parts["attention"]


def test_precisions_order_the_speed_of_convolutions() -> None:
    plain, tf32, autocast = (
        next(simulate(Plan(model="resnet50", gpus=(1,), batch=64, precision=precision)))
        for precision in ("", "tf32", "autocast")
    )
    assert autocast.step < tf32.step < plain.step
    assert autocast.memory < plain.memory


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"precision": "mixed"}, "needs --strategy fsdp"),
        ({"precision": "half"}, "precision must be one of"),
        ({"recompute": "some"}, "recompute must be one of"),
        (
            {"precision": "autocast", "strategy": "parameter-server", "gpus": (4,)},
            "has no autocast",
        ),
        (
            {"model": "gpt-1b", "tensor": 2, "gpus": (2,), "recompute": "selective"},
            "is that of written",
        ),
        ({"model": "mlp", "dropout": 0.1}, "are for the GPTs"),
        ({"model": "gpt-1b", "dropout": 1.0}, "dropout must be in"),
        ({"model": "gpt-1b", "attention": "flash"}, "attention must be one of"),
        ({"model": "gpt-1b", "copy_batch": 4}, "need --tensor or --pipeline"),
        ({"accumulate": 0}, "must be positive"),
        ({"accumulate": 2}, "accumulate goes with"),
        ({"model": "resnet50", "length": 10}, "has no sequences"),
    ],
)
def test_plans_that_do_not_fit_are_refused(fields: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        _ = Plan(**fields).spec


def test_an_earlier_model_on_meta_changes_no_prediction() -> None:
    """ResNet-50 has 53 counters of batches, whose copies are kernels. A fresh process counts them
    as one does that has made tensors on meta."""
    program = (
        "import sys, torch\n"
        "from distlab.simulate import Plan, simulate\n"
        "if sys.argv[1]:\n"
        "    with torch.device('meta'): torch.empty(1)\n"
        "plan = Plan(model='resnet50', gpus=(2,), cluster='dgx-h100', strategy='bucketed')\n"
        "print(next(iter(simulate(plan))).step)\n"
    )
    steps = [
        subprocess.run(
            [sys.executable, "-c", program, word], cwd=root(), text=True, check=True,
            stdout=subprocess.PIPE,
        ).stdout
        for word in ("", "before")
    ]  # fmt: skip
    assert steps[0] == steps[1]
