"""``distlab simulate``: tables, files, strategies and implementations, and wrong calls."""

from __future__ import annotations

import csv
import dataclasses
import functools
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torchvision  # noqa: F401 (here, once: not in every process that simulates)

from distlab.cli import main
from distlab.ranks import RankFailure
from distlab.simulate import report as show
from distlab.simulate.choices import IMPLS
from distlab.simulate.models import GPT, MODELS
from distlab.simulate.plan import Plan
from distlab.simulate.prediction import Answer, simulate

pytestmark = pytest.mark.verdict

NO_HOST = {"roofline": True}  # a step as short as the MLP's waits for the launch of its kernels


@functools.cache
def answers(plan: Plan) -> tuple[Answer, ...]:
    return tuple(simulate(plan))


def answers_of(**fields) -> tuple[Answer, ...]:
    return answers(Plan(**fields))


@pytest.fixture
def short_gpt(monkeypatch: pytest.MonkeyPatch) -> str:
    """GPT-1B with 8 of its 24 layers, and a head so small that stages are of the same length."""

    def build(positions: int = 2048, layers: int = 8) -> GPT:
        return GPT(1024, positions, layers, 2048, 16)

    spec = dataclasses.replace(MODELS["gpt-1b"], name="gpt-short", build=build, layers=8)
    monkeypatch.setitem(MODELS, spec.name, spec)
    return spec.name


@pytest.mark.parametrize("impl", ["solutions", "torch"])
def test_scaling_of_a_small_model(impl: str) -> None:
    common = {"model": "mlp", "impl": impl, "batch": 256, **NO_HOST}
    one, two, sixteen = answers_of(gpus=(1, 2, 16), **common)
    assert one.efficiency == 1.0
    assert one.exposed == pytest.approx(0.0, abs=1e-4)  # alone, only the launch of collectives
    assert two.rate < 2 * one.rate
    assert sixteen.efficiency < two.efficiency < 1
    assert sixteen.step > sixteen.compute == pytest.approx(one.compute, rel=0.2)
    assert sixteen.step == pytest.approx(sixteen.compute + sixteen.exposed, rel=0.02)
    assert two.bytes_per_link["between"] == 0 < sixteen.bytes_per_link["between"]
    assert {span.rank for span in sixteen.spans} == set(range(8))


def test_bytes_flops_and_memory_of_a_known_model() -> None:
    """ResNet-50: 25.6 million parameters, about 3 · 8.2 GFLOP per image."""
    (answer,) = answers_of(model="resnet50", gpus=(2,), impl="solutions", batch=8)
    assert answer.bytes_per_link["inside"] == pytest.approx(2 * 25_557_032 * 4, rel=1e-3)
    gpu_peak = 67e12
    assert answer.mfu * answer.step * gpu_peak == pytest.approx(8 * 3 * 8.2e9, rel=0.03)
    state = 25_557_032 * 4 * 3  # weights, gradients, momentum
    assert state < answer.memory < state + 8 * 120e6  # and what 8 images leave for backward


def test_torchs_ddp_hides_communication_and_ours_does_not() -> None:
    common = {"model": "gpt-1b", "gpus": (4,), "cluster": "p4d-a100"}
    (torchs,), (ours,) = answers_of(impl="torch", **common), answers_of(impl="solutions", **common)
    assert torchs.hidden > 0.8 * (torchs.hidden + torchs.exposed)
    assert ours.hidden < 0.1 * ours.exposed
    assert torchs.step < ours.step


def test_bucketed_hides_what_torchs_ddp_hides() -> None:
    common = {"model": "gpt-1b", "gpus": (4,), "cluster": "p4d-a100"}
    common |= {"strategy": "bucketed"}
    (ours,), (torchs,) = answers_of(impl="solutions", **common), answers_of(impl="torch", **common)
    assert ours.hidden > 0.8 * (ours.hidden + ours.exposed)
    assert ours.step < 1.01 * torchs.step
    assert ours.memory < 1.01 * torchs.memory
    assert ours.bytes_per_link == pytest.approx(torchs.bytes_per_link, rel=1e-3)
    (at_once,) = answers_of(impl="solutions", bucket_mb=1e5, **common)
    assert at_once.exposed > 2 * ours.exposed


def test_local_sgd_communicates_once_in_a_round() -> None:
    common = {"model": "mlp", "gpus": (4,), "batch": 64, "cluster": "ethernet-v100"}
    (ddp,) = answers_of(**common)
    (four,) = answers_of(strategy="local-sgd", every=4, **common)
    (eight,) = answers_of(strategy="local-sgd", every=8, **common)
    assert sum(four.bytes_per_link.values()) == pytest.approx(
        sum(ddp.bytes_per_link.values()) / 4, rel=1e-2
    )
    assert four.exposed == pytest.approx(2 * eight.exposed, rel=0.05)
    assert eight.step < four.step < ddp.step
    assert four.compute == pytest.approx(eight.compute, rel=0.05)


def test_zero1_shards_the_state_and_sends_half_as_much_again() -> None:
    common = {"model": "gpt-1b", "gpus": (4,), "cluster": "p4d-a100", "impl": "solutions"}
    (whole,), (sharded,) = (answers_of(strategy=s, **common) for s in ("bucketed", "zero1"))
    sent = [sum(answer.bytes_per_link.values()) for answer in (whole, sharded)]
    assert sent[1] == pytest.approx(1.5 * sent[0], rel=0.02)
    assert sharded.memory < whole.memory


def test_torchs_zero1_shards_the_state_and_broadcasts_the_parts() -> None:
    common = {"model": "mlp", "gpus": (4,), "impl": "torch"}
    (whole,), (sharded,) = (answers_of(strategy=s, **common) for s in ("bucketed", "zero1"))
    sent = [sum(answer.bytes_per_link.values()) for answer in (whole, sharded)]
    parts = 17_226 * 4  # of all ranks together; the table counts a broadcast once, at its root
    assert sent[1] - sent[0] == pytest.approx(parts, rel=0.01)
    assert sharded.memory < whole.memory
    assert sharded.rate > 0


def test_zero2_needs_less_memory_in_the_bytes_of_ddp() -> None:
    common = {"model": "mlp", "gpus": (4,), "impl": "solutions", "bucket_mb": 1.0}
    (whole,), (sharded,) = (answers_of(strategy=s, **common) for s in ("bucketed", "zero2"))
    sent = [sum(answer.bytes_per_link.values()) for answer in (whole, sharded)]
    assert sent[1] == pytest.approx(sent[0], rel=0.02)
    assert sharded.memory < whole.memory


def test_phases_own_all_reduces_send_what_theory_says() -> None:
    common = {"model": "mlp", "gpus": (16,), "cluster": "ethernet-v100"}
    names = ("ring", "tree", "halving-doubling", "hierarchical")
    found = {name: answers_of(strategy=name, **common)[0] for name in names}
    whole = 17_226 * 4
    for name in names[:3]:
        sent = sum(found[name].bytes_per_link.values())
        assert sent == pytest.approx(2 * 15 * whole, rel=0.01), name
    # two nodes: each of the 16 ranks sends an eighth of the tensor once, and gets one
    leaving = found["hierarchical"].bytes_per_link["between"]
    assert leaving == pytest.approx(16 * whole / 8, rel=0.01)
    assert leaving < found["ring"].bytes_per_link["between"] * 0.6
    assert found["tree"].step < found["ring"].step  # latency: 4 levels against 30 steps


def test_parameter_server_sends_everything_twice_per_worker() -> None:
    common = {"model": "mlp", "gpus": (4,), "strategy": "parameter-server", **NO_HOST}
    (one,), (two,) = (answers_of(servers=servers, **common) for servers in (1, 2))
    assert sum(one.bytes_per_link.values()) == pytest.approx(3 * 2 * 17_226 * 4, rel=0.01)
    assert sum(two.bytes_per_link.values()) == pytest.approx(2 * 2 * 17_226 * 4, rel=0.01)
    assert one.rate == pytest.approx(3 * 64 / one.step)
    assert two.step < one.step  # each server has half of the bytes to send


def test_servers_without_rounds_let_workers_overlap() -> None:
    """Rounds make all workers wait for the server at once; alone, each waits for its own turn."""
    common = {"model": "mlp", "gpus": (5,), "strategy": "parameter-server"}
    (rounds,) = answers_of(**common)
    (bounded,) = answers_of(staleness=1, every=4, **common)
    (free,) = answers_of(staleness=float("inf"), every=4, **common)
    for answer in (bounded, free):
        assert answer.bytes_per_link == pytest.approx(rounds.bytes_per_link, rel=0.01)
        assert answer.memory <= rounds.memory
    assert free.step <= bounded.step < rounds.step


def test_parameter_servers_of_any_size_need_no_memory_here() -> None:
    (answer,) = answers_of(model="gpt-1b", gpus=(3,), strategy="parameter-server", batch=1)
    assert answer.bytes_per_link["inside"] == pytest.approx(2 * 2 * 2 * 1.31e9, rel=0.02)


def test_vision_transformers_attention_is_fused_as_a_gpus_is() -> None:
    """nn.MultiheadAttention gives mask and dropout by position: still no matrix of scores."""
    (answer,) = answers_of(model="vit_b16", gpus=(1,), batch=8)
    scores = 12 * 12 * 8 * 197**2 * 2  # layers, heads, images: one matrix each, in 16 bits
    state = 4 * 2 * 86.6e6
    assert answer.memory < state + 740e6 < state + 740e6 + scores


def test_slower_networks_and_algorithms_tell() -> None:
    fast, slow = (
        answers_of(model="resnet50", gpus=(16,), batch=8, cluster=c)[0].exposed
        for c in ("dgx-h100", "ethernet-v100")
    )
    assert slow > 3 * fast
    ring, tree = (
        answers_of(model="mlp", gpus=(64,), collective=c)[0].exposed for c in ("ring", "tree")
    )
    assert ring > tree  # small messages: latency of 64 hops against that of a tree


def test_seven_billion_parameters_need_no_memory_here() -> None:
    (answer,) = answers_of(model="gpt-7b", gpus=(2,), impl="torch")
    assert answer.memory > 4 * 2 * 6.6e9  # weights, gradients and two moments in 16 bits
    assert not answers_of(model="gpt-7b", gpus=(1,), batch=1, cluster="p4d-a100")[0].fits


def test_tensor_and_pipeline_parallelism_cut_memory_and_cost_a_bubble(short_gpt: str) -> None:
    common = {"model": short_gpt, "gpus": (4,), "batch": 2}
    (whole,) = answers_of(**common)
    (tensor,) = answers_of(tensor=4, **common)
    (sequence,) = answers_of(tensor=4, sequence_parallel=True, **common)
    (pipeline,) = answers_of(pipeline=4, micro_batches=8, **common)
    (combined,) = answers_of(tensor=2, pipeline=2, micro_batches=4, **common)
    assert max(tensor.memory, pipeline.memory, combined.memory) < 0.7 * whole.memory
    assert sequence.memory < tensor.memory
    assert tensor.bubble == sequence.bubble == 0 < combined.bubble
    # the timeline has one rank of each stage
    shown = [{span.rank for span in a.spans} for a in (tensor, pipeline, combined)]
    assert shown == [{0}, {0, 1, 2, 3}, {0, 2}]
    # stages of the same length: (p-1) / (m + p-1) of the step, but for the optimizer's part
    assert pipeline.bubble == pytest.approx(3 / 11, rel=0.2)
    rates = [a.rate for a in (whole, tensor, sequence, pipeline, combined)]
    assert max(rates) < 4 * min(rates)


def test_better_schedules_have_smaller_bubbles(short_gpt: str) -> None:
    common = {"model": short_gpt, "gpus": (2,), "batch": 2, "pipeline": 2, "micro_batches": 4}
    bubbles = [
        answers_of(schedule=schedule, chunks=chunks, **common)[0].bubble
        for schedule, chunks in (("1f1b", 1), ("interleaved", 2), ("zero-bubble", 1))
    ]
    assert bubbles[0] > bubbles[1] > bubbles[2] > 0


def test_sharding_saves_memory_and_hides_its_messages() -> None:
    common = {"model": "gpt-1b", "cluster": "p4d-a100", "gpus": (4,)}
    (sharded,) = answers_of(strategy="fsdp", **common)
    (replicated,) = answers_of(strategy="ddp", impl="torch", **common)
    state = 4 * 2 * 1.31e9  # weights, gradients and two moments in 16 bits
    assert replicated.memory > state
    assert sharded.memory < replicated.memory - 0.45 * state  # 3/4, less root and units in full
    sent = sharded.bytes_per_link["inside"] / 4
    whole = 3 / 4 * 2 * 1.31e9
    assert 2.5 * whole < sent < 3.01 * whole
    assert sharded.hidden > 0.8 * (sharded.hidden + sharded.exposed)


def test_hybrid_sharding_keeps_gathers_in_the_node() -> None:
    common = {"model": "gpt-1b", "cluster": "p4d-a100", "batch": 1, "gpus": (16,)}
    (full,), (hybrid,) = (answers_of(strategy=s, **common) for s in ("fsdp", "hybrid"))
    assert full.bytes_per_link["inside"] == 0
    between = hybrid.bytes_per_link["between"] / 16
    assert between == pytest.approx(2 * 1.31e9 / 8, rel=0.02)
    assert hybrid.memory > full.memory
    assert hybrid.step < full.step


def test_every_model_has_an_input_that_fits() -> None:
    for name in MODELS:
        (answer,) = answers_of(model=name, gpus=(1,), batch=1, cluster="p4d-a100")
        assert answer.rate > 0
        assert not answer.unmodelled


def test_command_writes_table_and_pictures(tmp_path: Path, capsys) -> None:
    config = tmp_path / "sim.yaml"
    config.write_text("model: mlp\ncluster: laptop\ngpus: [1, 2, 4]\n")
    out = tmp_path / "out"
    assert main(["simulate", "--config", str(config), "--gpus", "1", "2", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "mlp, ddp by solutions, on laptop" in printed
    assert "efficiency" in printed
    rows = list(csv.DictReader((out / "mlp-ddp-solutions-laptop.csv").open()))
    assert [row["gpus"] for row in rows] == ["1", "2"]
    data = json.loads((out / "mlp-ddp-solutions-laptop.json").read_text())
    assert data["plan"]["cluster"] == "laptop"
    assert data["rows"][1]["step"] == float(rows[1]["step"])
    for end in (".png", "-timeline.png"):
        assert (out / f"mlp-ddp-solutions-laptop{end}").read_bytes()[:4] == b"\x89PNG"


def test_what_takes_too_long_leaves_a_line_and_the_rows_before(
    tmp_path: Path, capsys, monkeypatch
) -> None:
    def slow(plan: Plan):
        yield from answers(dataclasses.replace(plan, gpus=(1, 2)))
        raise RankFailure("no result after 1800 s", kind="hang")

    monkeypatch.setattr(show, "simulate", slow)
    arguments = ["simulate", "--model", "mlp", "--gpus", "1", "2", "256", "--out", str(tmp_path)]
    assert main(arguments) == 0
    assert "256 GPUs were not done here in 1,800 s" in " ".join(capsys.readouterr().out.split())
    data = json.loads((tmp_path / "mlp-ddp-solutions-dgx-h100.json").read_text())
    assert [row["gpus"] for row in data["rows"]] == [1, 2]


def test_what_will_take_long_is_said_beforehand(monkeypatch, tmp_path: Path, capsys) -> None:
    monkeypatch.setattr(show, "LONG", 0.0)
    monkeypatch.setattr(show, "simulate", answers)
    monkeypatch.setattr(show, "write", lambda *_: [])
    for given, words in (
        (["--every-rank"], "without --every-rank"),
        (["--strategy", "tree"], "larger --bucket-mb"),
    ):
        arguments = ["--model", "mlp", "--gpus", "1", "2", *given]
        assert main(["simulate", *arguments, "--out", str(tmp_path)]) == 0
        said = " ".join(capsys.readouterr().out.split())
        assert "2 GPUs take" in said
        assert words in said


def test_installed_command_works_from_any_folder(tmp_path: Path) -> None:
    command = shutil.which("distlab", path=str(Path(sys.executable).parent))
    if command is None:
        pytest.skip("needs the course installed in this environment")
    arguments = ["simulate", "--model", "mlp", "--gpus", "2", "--out", str(tmp_path)]
    done = subprocess.run([command, *arguments], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "efficiency" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--cluster", "dgx-h10"], "did you mean dgx-h100?"),
        (["--model", "resnet5"], "did you mean resnet50?"),
        (["--gpus", "0"], "must be positive"),
        (["--impl", "theirs"], "impl must be one of"),
        (["--collective", "star"], "collective must be one of"),
        (["--strategy", "zero"], "no strategy"),
        (["--strategy", "fsdp", "--impl", "torch"], "with solutions or mine"),
        (["--strategy", "local-sgd", "--impl", "torch"], "with solutions or mine"),
        (["--strategy", "ring", "--impl", "torch"], "with solutions or mine"),
        (["--strategy", "parameter-server", "--gpus", "1"], "1 servers need more than 1 GPUs"),
        (["--strategy", "parameter-server", "--staleness", "-1", "--gpus", "2"], "at least 0"),
        (["--every", "0"], "must be positive"),
        (["--dtype", "float12"], "dtype must be one of"),
        (["--config", "missing.yaml"], "missing.yaml"),
        (["--model", "gpt-1b", "--tensor", "8", "--gpus", "4"], "no multiple of tensor 8"),
        (["--model", "resnet50", "--tensor", "2", "--gpus", "4"], "are for the GPTs"),
        (["--model", "gpt-1b", "--pipeline", "2", "--gpus", "2", "--impl", "torch"], "mine"),
        (["--model", "gpt-1b", "--pipeline", "0"], "must be positive"),
    ],
)
def test_wrong_calls_get_one_line(arguments: list[str], words: str, capsys) -> None:
    assert main(["simulate", *arguments]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert said.count("\n") == 1


def test_ones_own_blank_exercise_is_named(capsys, tmp_path: Path) -> None:
    assert "mine" in IMPLS
    code = main(["simulate", "--impl", "mine", "--model", "mlp", "--gpus", "2"])
    said = capsys.readouterr()
    if code:  # a learner's own trainer may be done: then it simulates
        assert code == 2
        assert "still blank" in said.err
