"""The trainer gives the loss of a single process, whatever strategy, pattern or compressor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn

from tests.phase4.image_runs import STEPS, config_of, few_digits, losses, records, train

pytestmark = pytest.mark.verdict

STRATEGIES = {
    "ddp": [],
    "zero1": ["--strategy=zero1"],
    "zero2": ["--strategy=zero2"],
    "fsdp": ["--strategy=fsdp"],
    "fsdp, offloaded": ["--strategy=fsdp", "--offload"],
    "fsdp, recomputed": ["--strategy=fsdp", "--activation-checkpointing"],
    "auto": ["--strategy=auto"],
    "ring": ["--pattern=ring"],
    "tree": ["--pattern=tree", "--strategy=zero1"],
    "halving and doubling": ["--pattern=halving_doubling"],
    "hierarchical": ["--pattern=hierarchical"],
    "all of random-K": ["--compression=randomk", "--compression-ratio=1.0"],
    "accumulation": ["--micro-batch=3"],
    "channels last": ["--channels-last"],
    "saved while training waits": ["--async-save=false"],
    "torch ddp": ["--parallel=torch"],
    "torch zero1": ["--parallel=torch", "--strategy=zero1"],
    "torch zero2": ["--parallel=torch", "--strategy=zero2"],
    "torch fsdp": ["--parallel=torch", "--strategy=fsdp"],
}
LOSSY = ["topk", "randomk", "powersgd", "int8", "onebit", "bf16"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return few_digits(tmp_path_factory.mktemp("digits"))


@pytest.fixture(scope="module")
def alone(data: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of one process."""
    found = losses(config_of(data, tmp_path_factory.mktemp("alone")), 1)
    assert len(found) == STEPS
    return found


@pytest.mark.parametrize("arguments", STRATEGIES.values(), ids=STRATEGIES)
def test_every_strategy_trains_like_one_process(
    data: Path, alone: list[float], tmp_path: Path, arguments: list[str]
) -> None:
    config = config_of(data, tmp_path, *arguments)
    assert losses(config) == pytest.approx(alone, rel=2e-4)


@pytest.mark.parametrize("parallel", ["course", "torch"])
def test_hybrid_on_two_nodes_of_two_ranks(
    data: Path, alone: list[float], tmp_path: Path, parallel: str
) -> None:
    arguments = ["--strategy=hybrid", "--node-size=2", f"--parallel={parallel}"]
    config = config_of(data, tmp_path, *arguments)
    assert losses(config, 4) == pytest.approx(alone, rel=2e-4)


def test_uneven_batches_on_three_ranks(data: Path, alone: list[float], tmp_path: Path) -> None:
    """16 images for 3 ranks, in micro-batches of 4."""
    config = config_of(data, tmp_path, "--micro-batch=4")
    assert losses(config, 3) == pytest.approx(alone, rel=2e-4)


@pytest.mark.parametrize("compression", LOSSY)
def test_compressors_start_like_one_process_and_learn(
    data: Path, alone: list[float], tmp_path: Path, compression: str
) -> None:
    config = config_of(data, tmp_path, f"--compression={compression}", "--epochs=2")
    found = losses(config)
    assert found[0] == pytest.approx(alone[0], rel=1e-5)
    assert len(found) == 2 * STEPS
    assert min(found[-3:]) < found[0]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_16_bits_follow_float32(
    data: Path, alone: list[float], tmp_path: Path, precision: str
) -> None:
    config = config_of(data, tmp_path, f"--precision={precision}", "--max-norm=5")
    assert losses(config) == pytest.approx(alone, rel=0.05)


def test_mixup_and_average_of_weights_train(data: Path, tmp_path: Path) -> None:
    config = config_of(
        data, tmp_path, "--mixup=0.2", "--ema-decay=0.9", "--max-norm=1", "--epochs=3"
    )
    assert train(config)["complete"]
    assert all(0 <= record["top1"] <= 1 for record in records(config) if "top1" in record)


def with_fewer_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchvision makes its models as ever, of classes that take less of what is repeated."""
    from torchvision import models  # only here: it takes a second

    resnet, vision = models.resnet.ResNet, models.vision_transformer.VisionTransformer

    def small_resnet(block: type[nn.Module], layers: list[int], **options: Any) -> nn.Module:
        return resnet(block, [1 for _ in layers], **options)

    def small_vision(**options: Any) -> nn.Module:
        narrow = {"num_layers": 2, "num_heads": 2, "hidden_dim": 32, "mlp_dim": 64}
        return vision(**(options | narrow))

    monkeypatch.setattr(models.resnet, "ResNet", small_resnet)
    monkeypatch.setattr(models.vision_transformer, "VisionTransformer", small_vision)


@pytest.mark.parametrize("model", ["resnet18", "vit_b_16"])
def test_models_of_torchvision_train(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    """Sharded with recomputed activations: batch norm and attention under both."""
    with_fewer_layers(monkeypatch)
    arguments = [f"--model={model}", "--image-size=32", "--max-steps=1", "--strategy=fsdp"]
    config = config_of(data, tmp_path, *arguments, "--activation-checkpointing")
    assert train(config)["complete"]
    assert len(records(config)) == 1


def test_evaluation_is_exact_on_any_number_of_ranks(data: Path, tmp_path: Path) -> None:
    """30 images on 1, 3 and 4 ranks: the same numbers, every image once."""
    found = []
    for world_size in (1, 3, 4):
        config = config_of(data, tmp_path / str(world_size), "--base-lr=1e-6")
        train(config, world_size)
        last = records(config)[-1]
        assert last["images"] == 30
        found.append([last["top1"], last["top5"], last["val_loss"]])
    for other in found[1:]:
        assert other == pytest.approx(found[0], rel=1e-3)
        assert other[:2] == found[0][:2]


def test_a_run_leaves_a_report_with_the_data_wait(data: Path, tmp_path: Path) -> None:
    found = train(config_of(data, tmp_path, "--workers=1"), report=True)
    assert "top-1" in found["summary"]
    page = (tmp_path / "logs" / "report.md").read_text(encoding="utf-8")
    assert "Bottleneck" in page
    assert "| data |" in page
