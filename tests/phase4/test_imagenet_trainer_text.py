"""The trainer on text: the loss of one process, resumed to the bit, and an exact perplexity."""

from __future__ import annotations

import math
from pathlib import Path
from pydoc_data.topics import topics

import pytest
import torch
import torch.nn.functional as F

from solutions.phase4_production.batches import DataError
from solutions.phase4_production.preflight import check
from solutions.phase4_production.text_data import open_text
from solutions.phase4_production.text_folder import write_texts
from solutions.phase4_production.text_task import TextTask
from solutions.phase4_production.trainer_config import ConfigError
from solutions.phase4_production.training_report import evaluated
from tests.phase4.image_runs import loss_curve, losses, records, train
from tests.phase4.text_runs import LENGTH, SIZES, STEPS, config_of, few_texts

pytestmark = pytest.mark.verdict

STRATEGIES = {
    "ddp, uneven micro-batches": ["--micro-batch=3"],
    "zero2": ["--strategy=zero2"],
    "fsdp, recomputed": ["--strategy=fsdp", "--activation-checkpointing"],
    "torch fsdp": ["--parallel=torch", "--strategy=fsdp"],
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return few_texts(tmp_path_factory.mktemp("texts"))


@pytest.fixture(scope="module")
def alone(data: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of one process."""
    found = losses(config_of(data, tmp_path_factory.mktemp("alone")), 1)
    assert len(found) == STEPS
    return found


def test_samples_are_the_text_over_the_ends_of_files(data: Path) -> None:
    whole = b"".join((data / "train" / f"{n}.txt").read_bytes() + b"\0" for n in range(3))
    blocks = open_text(data, "train", LENGTH)
    assert len(blocks) == (len(whole) - 1) // LENGTH == 37
    for index in (0, 12, len(blocks) - 1):  # the 13th block goes over two ends of files
        tokens, following, found = blocks[3, index]
        first = index * LENGTH
        assert bytes(tokens.tolist()) == whole[first : first + LENGTH]
        assert bytes(following.tolist()) == whole[first + 1 : first + 1 + LENGTH]
        assert found == index


@pytest.mark.parametrize("arguments", STRATEGIES.values(), ids=STRATEGIES)
def test_every_strategy_trains_like_one_process(
    data: Path, alone: list[float], tmp_path: Path, arguments: list[str]
) -> None:
    assert losses(config_of(data, tmp_path, *arguments)) == pytest.approx(alone, rel=2e-4)


def test_resumed_is_uninterrupted_to_the_bit(data: Path, tmp_path: Path) -> None:
    """Also the evaluation, with an average of the weights."""
    for parts in ([7], [3, 7]):
        for stop in parts:
            arguments = ["--epochs=2", "--ema-decay=0.9", f"--max-steps={stop}"]
            config = config_of(data, tmp_path / str(len(parts)), *arguments)
            found = train(config)
        assert ("resumed after step 3" in found["output"]) == (len(parts) == 2)
    whole, parts_of = (config_of(data, tmp_path / n) for n in ("1", "2"))
    assert loss_curve(whole) == loss_curve(parts_of)
    ends = [[r["val_loss"] for r in records(c) if "val_loss" in r] for c in (whole, parts_of)]
    assert ends[0] == ends[1] != []


def test_goes_on_with_other_numbers_of_ranks(
    data: Path, alone: list[float], tmp_path: Path
) -> None:
    for world_size, steps in ((2, 2), (3, 4), (1, STEPS)):
        config = config_of(data, tmp_path, f"--max-steps={steps}")
        assert train(config, world_size)["complete"]
    assert loss_curve(config) == pytest.approx(alone, rel=2e-4)


def test_perplexity_is_that_of_the_model_on_all_of_val(data: Path, tmp_path: Path) -> None:
    """Nine sequences on two ranks, one of which has a blank one; weights that hardly move."""
    config = config_of(data, tmp_path, "--base-lr=1e-9", "--max-steps=5")
    found = train(config)
    task = TextTask(config)
    assert task.val_set is not None
    pairs = [task.val_set[-1, n][:2] for n in range(len(task.val_set))]
    tokens, targets = (torch.stack(each) for each in zip(*pairs, strict=True))
    assert len(tokens) == SIZES["val"][0] // LENGTH == 9
    want = F.cross_entropy(task.build_model()(tokens), targets.flatten()).item()
    last = records(config)[-1]
    assert last["val_loss"] == pytest.approx(want, rel=1e-5)
    assert last["perplexity"] == pytest.approx(math.exp(want), rel=1e-4)
    assert last["tokens"] == 9 * LENGTH
    assert last["tokens_per_second"] == pytest.approx(LENGTH * last["samples_per_second"])
    told = f"perplexity {last['perplexity']:.3f} over 144 tokens"
    assert told in found["summary"]
    assert evaluated(records(config)) == [("perplexity", f"{last['perplexity']:.3f}")]


def test_the_documentation_is_laid_out_once(tmp_path: Path) -> None:
    folder = write_texts(tmp_path / "text")
    texts = sorted(folder.rglob("*.txt"), key=lambda path: path.stem)
    assert [path.stem for path in texts] == sorted(topics)
    assert [path.parent.name for path in texts[:11]] == ["val", *["train"] * 9, "val"]
    texts[0].write_text("mine")
    assert write_texts(folder) == folder
    assert texts[0].read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["text"]


def test_missing_text_is_one_line(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train").mkdir()
    for folder, length, words in (
        (tmp_path / "nowhere", 8, r"there is no data folder .*nowhere/train: texts \(\*\.txt\)"),
        (tmp_path, 8, r"train has no texts \(\*\.txt\)"),
        (data, 600, "train has 591 bytes of text: length 600 needs 601 at least"),
    ):
        with pytest.raises(DataError, match=words):
            open_text(folder, "train", length)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"no data folder .*: make it with: .*text_folder$"):
        check(["--model=gpt", "--data=.distlab/text"], {})
    with pytest.raises(ConfigError, match=r"no data folder .*: \*\.txt go in there"):
        check(["--model=gpt", "--data=mine"], {})


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--mixup=0.2"], "mixup is for images, and model gpt reads text"),
        (["--channels-last"], "channels_last is for images"),
        (["--heads=3"], "width 16 does not divide by 3 heads"),
        (["--length=0"], "length must be at least 1, got 0"),
    ],
)
def test_a_wrong_field_is_one_sentence(arguments: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        config_of(Path("data"), Path("out"), *arguments)
