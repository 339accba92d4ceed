"""The trainer on a mesh: the loss of one process, and a run that goes on under another mesh."""

from __future__ import annotations

from pathlib import Path

import pytest

from distlab.ranks import RankFailure
from solutions.phase3_multi_node.sharding_strategies import readable
from solutions.phase4_production.config_sources import make_config
from solutions.phase4_production.imagenet_trainer import dry_run
from solutions.phase4_production.mesh_engine import layout_of
from solutions.phase4_production.trainer_config import Config, ConfigError
from tests.phase4.image_runs import loss_curve, records, train
from tests.phase4.text_runs import STEPS, config_of, few_texts

pytestmark = pytest.mark.verdict

AVERAGE = "--ema-decay=0.9"
MESH = ["--strategy=mesh", AVERAGE]
SGD = ["--optimizer=sgd", "--base-lr=0.3"]  # the norm clips the first step, not the second
MESHES = {
    "tensor 2 x pipeline 2": ["--tensor=2", "--pipeline=2", "--sequence-parallel"],
    "shard 2 x context 2": ["--shard=2", "--context=2", "--micro-batch=2"],
    "data 2 x pipeline 2": ["--pipeline=2", "--schedule=zero-bubble"],
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return few_texts(tmp_path_factory.mktemp("texts"))


def curve_and_end(config: Config, world_size: int, node_size: int) -> list[float]:
    """The losses of all steps, and that of the last evaluation."""
    assert train(config, world_size, environ={"LOCAL_WORLD_SIZE": str(node_size)})["complete"]
    return [*loss_curve(config), records(config)[-1]["val_loss"]]


@pytest.fixture(scope="module")
def alone(data: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """One process without a mesh."""
    return curve_and_end(config_of(data, tmp_path_factory.mktemp("alone"), AVERAGE, *SGD), 1, 1)


@pytest.mark.parametrize("axes", MESHES.values(), ids=MESHES)
def test_every_mesh_trains_like_one_process(
    data: Path, alone: list[float], tmp_path: Path, axes: list[str]
) -> None:
    """The last batch is half as large, and val has nine sequences: neither divides.

    On two nodes of two ranks: for shard and context, the axes change their order.
    """
    config = config_of(data, tmp_path, *MESH, *SGD, *axes)
    assert curve_and_end(config, 4, 2) == pytest.approx(alone, rel=2e-4)
    last = records(config)[-1]
    assert last["tokens"] == 144, "each counts once"
    assert last["tokens_per_second"] == pytest.approx(16 * last["samples_per_second"])


def test_goes_on_under_another_mesh(data: Path, tmp_path: Path) -> None:
    """Four ranks, other four ranks, then one: weights, Adam's state and the average move along."""
    want = curve_and_end(config_of(data, tmp_path / "alone", AVERAGE), 1, 1)
    for world_size, steps, axes in (
        (4, 2, MESHES["tensor 2 x pipeline 2"]),
        (4, 3, MESHES["shard 2 x context 2"]),
        (1, STEPS, []),
    ):
        config = config_of(data, tmp_path, *MESH, *axes, f"--max-steps={steps}")
        done = train(config, world_size)
        assert done["complete"]
    assert "resumed after step 3, saved by 4 ranks" in done["output"]
    found = [*loss_curve(config), records(config)[-1]["val_loss"]]
    assert found == pytest.approx(want, rel=2e-4)


def test_a_checkpoint_of_another_model_is_refused_and_kept(data: Path, tmp_path: Path) -> None:
    train(config_of(data, tmp_path, *MESH, "--max-steps=1"), 1)
    kept = sorted((tmp_path / "checkpoints").rglob("*"))
    for arguments, words in (
        (["--strategy=ddp"], r"another kind of strategy \(mesh, not whole\)"),
        (["--layers=1"], "of a model with other layers or another width"),
    ):
        with pytest.raises(RankFailure, match=words):
            train(config_of(data, tmp_path, *MESH, *arguments), 1)
        assert sorted((tmp_path / "checkpoints").rglob("*")) == kept


def test_a_mesh_that_does_not_fit_is_refused(data: Path, tmp_path: Path) -> None:
    for arguments, words in (
        (["--tensor=4"], "2 ranks are no multiple of shard 1 x tensor 4 x pipeline 1 x context 1"),
        (["--global-batch=7"], "a global batch of 7 does not divide by 2 replicas"),
        (["--micro-batch=3"], "4 sequences of a replica don't divide into micro-batches of 3"),
    ):
        with pytest.raises(ConfigError, match=words):
            layout_of(config_of(data, tmp_path, *MESH, *arguments), 2)
    config = config_of(data, tmp_path, *MESH, "--context=2", "--length=18")
    with pytest.raises(RankFailure, match="raised ValueError: 18 tokens don't divide into 4"):
        train(config)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--strategy=mesh"], "strategy mesh cuts the layers of gpt, not of small_cnn"),
        (["--tensor=2"], "tensor 2 needs strategy mesh, not ddp"),
        (["--model=gpt", "--strategy=mesh"], "strategy mesh does not take label_smoothing 0.05"),
        (["--model=gpt", "--strategy=mesh", "--label-smoothing=0", "--precision=bf16"], "fp32"),
        (["--pipeline=0"], "pipeline must be at least 1, got 0"),
    ],
)
def test_a_wrong_field_is_one_sentence(arguments: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make_config(None, arguments)


def test_a_dry_run_shows_the_mesh(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    plan = dry_run(config_of(data, tmp_path, *MESH, "--tensor=2"))
    lines = dict(line.split(None, 1) for line in plan.splitlines() if line)
    assert lines["strategy"] == (
        "mesh of data 1 x shard 1 x tensor 2 x pipeline 1 x context 1; schedule 1f1b"
    )
    assert lines["batch"] == "8 = 8 per replica, in 1 micro-batches of 8"
    borders = 4 * 2 + 2  # activations of 8 x 16 tokens of width 16; of each token three numbers
    sent = 8 * 16 * 4 * (16 * borders + 3) + 8  # and the norm
    assert lines["messages"] == f"{readable(sent)} sent per rank and step"
    assert "memory" not in lines
