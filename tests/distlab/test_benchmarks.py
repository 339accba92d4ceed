"""The benchmarks run and their page is well formed; their numbers are not tested."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import subprocess
import sys
import warnings
from types import ModuleType

import forked_commands
import pytest
import torch

from benchmarks import (
    allreduce,
    checkpoint,
    compression,
    context_parallel,
    cuda,
    cuda_steps,
    ddp,
    experts,
    fsdp,
    hierarchical,
    image_trainer,
    local_sgd,
    low_precision,
    mesh,
    mixed_precision,
    monitoring,
    parameter_server,
    per_parameter,
    pipeline,
    published,
    ranks,
    recompute,
    run,
    selective,
    split,
    sync_batch_norm,
    tensor_parallel,
    trainer,
    uneven,
    zero,
)
from benchmarks.ratio import LEAST_STARTS
from distlab.commands import gpu_run
from distlab.course.catalogue import root
from distlab.netcluster import cluster_obstacle
from distlab.simulate.models import model_spec

pytestmark = pytest.mark.verdict


def test_ranks_and_trainer_still_run() -> None:
    ranks.forked(2)
    taken = trainer.compare("digits MLP", 2, epochs=1)
    assert {name: len(values) for name, values in taken.items()} == {"solution": 1, "DDP": 1}
    assert all(ms > 0 for values in taken.values() for ms in values)


def test_split_still_runs() -> None:
    times = split.compare(2, repeats=1)
    assert {name: len(values) for name, values in times.items()} == {"solution": 1, "torch": 1}
    assert split.greedy([3, 1, 1, 3], 2) == split.equal_counts([3, 1, 1, 3], 2) == [0, 2, 4]
    assert split.greedy([1, 1, 1, 9], 3) == [0, 2, 3, 4]


def test_llama_is_of_the_right_size_and_recomputes() -> None:
    with torch.device("meta"):
        model = model_spec("llama-8b").build()
    assert sum(p.numel() for p in model.parameters()) == 8_030_261_248
    small, large = (published.torchtitan(layers) for layers in (1, 3))
    names = [
        "Llama 3.1 8B, FSDP on 8 H100, tokens/s per GPU",
        "Llama 3.1 8B, FSDP on 8 H100, memory, GiB",
    ]
    assert [row[0] for row in large] == names
    assert float(small[0][2].replace(",", "")) > float(large[0][2].replace(",", ""))
    layer_gib = (float(large[1][2]) - float(small[1][2])) / 2
    everything = 2 * 8192 * 2 * (16 * 4096 + 4 * 14336) / 2**30  # were all activations kept
    assert 0 < layer_gib < 0.6 * everything


def test_mixed_precision_and_recompute_still_run() -> None:
    times = mixed_precision.compare(torch.bfloat16, 1, repeats=1)
    assert set(times) == {"solution", "torch", "fp32"}
    _, peaks = recompute.compare("16 MLP layers", repeats=1)
    assert peaks["solution"] < peaks["none"] / 2


@pytest.mark.parametrize("module", [recompute, selective, low_precision])
def test_what_a_new_process_measured_comes_back(module: ModuleType) -> None:
    """Ranks return plain numbers, and a table's row is made of these."""
    found = module.PAIRED.cases()[-1].start(1, 0)
    assert {who for pair in module.PAIRED.pairs for who in pair} <= {*found.values}
    assert {*found.facts} == {*module.PAIRED.facts}


def test_selective_recomputation_needs_no_more_than_pytorchs() -> None:
    """Gradients are compared by the benchmark itself; here peaks and FLOPs."""
    _, costs = selective.compare((1, 32, selective.WIDTH), repeats=1)
    for ours, theirs in (("", "selective"), (", nothing kept", "full")):
        found, torchs = costs[f"exercise 2.27{ours}"], costs[f"torch, {theirs}"]
        assert found[0] <= torchs[0]
        assert found[1] <= torchs[1]
    assert costs["exercise 2.27"][1] < costs["exercise 2.27, nothing kept"][1]
    assert costs["exercise 2.27"][0] <= costs["no checkpointing"][0]


def test_tensor_parallelism_equals_pytorchs() -> None:
    """Outputs and gradients (compared by the benchmark itself), bytes and activations."""
    times = tensor_parallel.compare(2, repeats=1)
    assert [*times] == [*tensor_parallel.KINDS]
    for kind, (sent, kept) in tensor_parallel.costs(2).items():
        regather = kind == tensor_parallel.KINDS[3]
        assert sent[0] <= sent[1] * (1.26 if regather else 1.001)  # row biases
        assert kept[0] <= kept[1] * (0.9 if regather else 1)


def test_pipeline_still_runs() -> None:
    for facts in pipeline.compare("interleaved", 2, repeats=1):
        assert len(facts["ours"]) == len(facts["torch"]) == 1
        kept, nbytes, loss = facts["ours facts"]
        assert kept <= facts["torch facts"][0]
        assert nbytes > 0
        assert loss == pytest.approx(facts["torch facts"][2])


@pytest.mark.skipif(cluster_obstacle() is not None, reason="needs a cluster on this machine")
def test_hierarchical_sends_less_between_nodes() -> None:
    samples = hierarchical.compare((0, 0, 1, 1), 1_000_000, repeats=2)
    (_, flat), (_, ours) = samples["gloo"][0], samples["solution"][0]
    assert 0.9e6 < ours < 1.2e6
    assert 1.4e6 < flat < 1.7e6


def test_hierarchical_says_why_it_was_not_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    refused = dataclasses.replace(hierarchical.PAIRED, obstacle=lambda: "no permission")
    monkeypatch.setattr(hierarchical, "PAIRED", refused)
    assert run.measured(["hierarchical"], "run", LEAST_STARTS) == []
    assert "not measured: no permission" in capsys.readouterr().out


def test_all_reduces_still_run() -> None:
    found = allreduce.compare(2, {4: 1, 4_000: 2}, repeats=1)
    assert [nbytes for nbytes, _, _ in found] == [4, 4_000]
    for _, taken, chosen in found:
        assert [*taken] == ["gloo", *allreduce.COLUMNS]
        assert all(seconds > 0 for values in taken.values() for seconds in values)
        assert chosen in ("tree", "halving_doubling", "ring")


def test_ddp_still_runs_and_holds_what_torchs_does() -> None:
    for pair in ddp.PAIRS.values():
        (times, held), (torchs, held_by_torch) = ddp.compare("digits CNN", pair, 2, repeats=1)
        assert len(times) == len(torchs) == 1
        assert held <= held_by_torch


def test_what_the_doctor_measures_on_gpus_runs_on_the_cpu() -> None:
    """On as many ranks as a part can be divided over; one rank sends nothing."""
    found = cuda.measured("bandwidth", 3, "cpu", 1)
    assert found["message"].endswith("times the bandwidth of gloo, on 3 ranks")
    assert [len(row) for row in found["result"]["table"]] == [len(found["result"]["header"])] * 2
    found = cuda.measured("pipeline", 3, "cpu", 1)
    assert found["status"] == "passed"
    assert found["message"].endswith("of a step, on 2 ranks")
    assert [row[0] for row in found["result"]["table"]] == [*pipeline.THEIRS]
    assert cuda.measured("bandwidth", 1, "cuda", 1)["status"] == "needs"
    assert set(cuda.PARTS) == {"bandwidth", *gpu_run.COMPARED}
    assert set(cuda_steps.STRATEGIES) == set(gpu_run.COMPARED)


def one_rank(*options: str) -> subprocess.CompletedProcess[str]:
    """``benchmarks.cuda_steps`` as torchrun starts its only rank."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    told = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": port}
    command = [sys.executable, "-m", "benchmarks.cuda_steps", *options]
    environment = os.environ | told | {"MASTER_ADDR": "127.0.0.1"}
    return forked_commands.run(command, env=environment, cwd=root())


@pytest.mark.parametrize("strategy", cuda_steps.STRATEGIES)
def test_steps_that_the_doctor_watches_run_on_the_cpu(strategy: str) -> None:
    done = one_rank(strategy, "--device", "cpu")
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert found["status"] == "passed"
    assert found["message"].endswith("world size 1 on ProcessGroupGloo")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_rank_that_fails_tells_the_doctor_why() -> None:
    done = one_rank("ddp")
    found = json.loads(done.stdout)
    assert (done.returncode, found["status"]) == (1, "failed")
    assert found["message"].startswith("rank 0: RuntimeError: ")
    assert "Traceback" in found["result"]["said"]


def test_waits_of_the_host_are_counted_by_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of torch's warnings, in the step that is watched, and the mode is put back."""
    modes: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)

    def step() -> None:
        if modes:
            for _ in range(3):
                warnings.warn(f"called a {cuda_steps.SYNC}", stacklevel=1)
            warnings.warn("something else", stacklevel=1)

    found = cuda_steps.waits(step, torch.device("cuda", 0))
    ((line, count),) = found.items()
    assert (line.split(":")[0], count) == ("tests/distlab/test_benchmarks.py", 3)
    assert modes == ["warn", "default"]


def test_rounds_divide_the_bytes() -> None:
    sent = local_sgd.bytes_per_step(2)
    ddp = sent.pop("torch DDP")
    assert len(sent) == 3
    assert all(abs(each * local_sgd.H / ddp - 1) < 0.01 for each in sent.values())


def test_servers_still_run(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(parameter_server, "BUDGET", 0.2)
    table = parameter_server.measure(1)
    assert [row[0] for row in table.rows] == ["torch DDP", *parameter_server.WAYS]
    parameter_server.plot(tmp_path / "losses.png")
    assert (tmp_path / "losses.png").read_bytes()[:4] == b"\x89PNG"


def test_newer_exercises_equal_what_stands_beside_them() -> None:
    """Numbers are compared by the benchmarks themselves."""
    found = [
        context_parallel.compare(2, 64, repeats=1),
        experts.compare(2, repeats=1),
        sync_batch_norm.compare((4, 8, 4, 4), 2, repeats=1),
        low_precision.compare(16, 32, 16, repeats=1),
        mesh.compare(mesh.GRIDS[0], mesh.STEP, repeats=1),
    ]
    assert all(len(values) == 1 for taken in found for values in taken.values())
    assert [len(times) for times in uneven.compare("digits CNN", 2, repeats=1)] == [1, 1]
    made = per_parameter.CONTESTANTS
    seconds, peaks = fsdp.compare("tiny GPT", 2, repeats=1, contestants=made)
    assert [*seconds] == [*made]
    assert peaks[0] <= 1.1 * peaks[1]


def test_zero_still_runs_and_shards() -> None:
    model = zero.LARGE[-1]
    (times, held), (torchs, held_by_torch) = zero.compare(model, 2, repeats=1)
    assert len(times) == len(torchs) == 1
    assert held <= 1.02 * held_by_torch


def test_monitoring_still_runs() -> None:
    """Trains the same weights (compared by the benchmark itself)."""
    taken, alone = monitoring.compare("digits CNN", 2, repeats=1)
    assert {name: len(values) for name, values in taken.items()} == {"plain": 1, "monitored": 1}
    assert alone > 0


def test_compression_hooks_still_run(monkeypatch) -> None:
    monkeypatch.setitem(ddp.STEPS, "GPT, 4 layers", 1)
    for pair in compression.PAIRS.values():
        mine, torchs = compression.compare("GPT, 4 layers", pair, 2, repeats=1)
        assert len(mine) == len(torchs) == 1


@pytest.mark.parametrize("kind", checkpoint.KINDS)
def test_checkpoint_still_runs(kind: str) -> None:
    times = checkpoint.compare(kind, repeats=1, scale=256)
    assert [*times] == ["solution", "DCP"]
    for ((stall, total),) in times.values():
        assert 0 < stall <= total


def test_trainer_of_images_still_runs_beside_plain_ddp() -> None:
    found = image_trainer.compare("small_cnn", 8, 16, steps=1, world_size=2, repeats=1)
    assert [len(times) for times in found.values()] == [1, 1, 1]
    assert [*found] == ["trainer", "trainer on torch", "plain torch DDP"]
