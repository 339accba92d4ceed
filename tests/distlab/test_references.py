"""Reference runs: hashes hold, the CPU ones are what a run gives, damage is named."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
import torch

from distlab.course.catalogue import root
from distlab.reference import compare as references
from distlab.reference.workloads import (
    CHARACTERS,
    CONTEXT,
    DATA,
    WORKLOADS,
    build_model,
    decode,
    digits,
    encode,
    epoch_order,
    text,
    workload,
)

# records of GPUs are judged by test_doctor_cuda
EVERY = sorted((root() / "references").glob("*/*.json"))
RECORDS = [path for path in EVERY if not path.stem.startswith("nccl-")]


@pytest.mark.parametrize("path", RECORDS, ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_hashes_and_configuration_hold(path: Path) -> None:
    data = references.load(path.parent.name, path.stem)
    chosen = WORKLOADS[path.stem.split("-")[0]]  # -bfloat16-x8: of the solutions
    assert data["configuration"] == vars(chosen)
    samples = len(DATA[chosen.data]())
    steps = math.ceil(samples / chosen.global_batch_size) * chosen.epochs
    assert len(data["losses"]) == min(steps, chosen.steps or steps)


@pytest.mark.parametrize("name", sorted(WORKLOADS))
def test_cpu_records_are_what_a_run_gives(name: str) -> None:
    reference = references.load("cpu", name)
    try:
        references.expect_same_data(reference)
    except references.OtherData as differs:
        pytest.skip(str(differs))
    chosen = WORKLOADS[name]
    losses, norms, model = references.train_alone(chosen, epochs=chosen.epochs)
    assert references.compare(reference, losses, 1e-6) == []
    assert norms == pytest.approx(reference["gradient_norms"], rel=1e-4, abs=1e-6)
    assert references.compare_parameters(reference, model, 1e-6) == []


def test_damage_is_named(tmp_path: Path) -> None:
    (tmp_path / "cpu").mkdir()
    copy = tmp_path / "cpu" / "digits_mlp.json"
    shutil.copy(references.reference_path("cpu", "digits_mlp"), copy)
    data = json.loads(copy.read_text())
    data["losses"][3] += 1e-3
    copy.write_text(json.dumps(data))
    with pytest.raises(ValueError, match="corrupt"):
        references.load("cpu", "digits_mlp", tmp_path)
    copy.write_text("{")
    with pytest.raises(ValueError, match="can't be read"):
        references.load("cpu", "digits_mlp", tmp_path)
    copy.unlink()
    with pytest.raises(ValueError, match="distlab record --device cpu"):
        references.load("cpu", "digits_mlp", tmp_path)


def test_other_data_are_never_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    reference = references.load("cpu", "digits_mlp")
    references.expect_same_data(reference)
    monkeypatch.setattr(references, "data_hash", lambda name: "of another Python")
    with pytest.raises(references.OtherData, match="digits_mlp can't be compared: its digits"):
        references.expect_same_data(reference)
    with pytest.raises(references.OtherData):
        references.best("digits_mlp")


def test_comparison_names_the_step() -> None:
    reference = {"losses": [1.0, 0.5, 0.25]}
    assert references.compare(reference, [1.0, 0.5], 1e-6) == []
    assert "step 1" in references.compare(reference, [1.0, 0.6, 0.25], 1e-6)[0]


def test_workloads() -> None:
    assert (len(digits()), len(digits(train=False))) == (1437, 360)
    images, labels = digits().tensors
    assert images.shape[1:] == (1, 8, 8)
    assert (images.min(), images.max()) == (-1, 1)
    assert sorted(set(labels.tolist())) == list(range(10))
    assert sorted(epoch_order(10, 3, 1).tolist()) == list(range(10))
    with pytest.raises(ValueError, match="digits_mlp"):
        workload("digits_mlq")


def test_text_is_windows_of_documentation() -> None:
    tokens = encode("Line 1\n\tµ~")
    assert tokens.dtype == torch.int64
    assert decode(tokens) == "Line 1\n??~"
    assert decode(encode(CHARACTERS)) == CHARACTERS
    assert encode("").shape == (0,)
    train, test = text(), text(train=False)
    assert len(train) > 6000
    assert 8 < len(train) / len(test) < 10
    for inputs, targets in (train.tensors, test.tensors):
        assert inputs.shape == targets.shape == (len(inputs), CONTEXT)
        assert inputs.dtype == targets.dtype == torch.int64
        assert inputs.flatten()[1:].equal(targets.flatten()[:-1])
    assert "assert" in decode(train[0][0])
    assert (train.tensors[0] == encode("?")).float().mean() < 0.01


def test_tiny_gpt_divides_and_is_causal() -> None:
    model = build_model("tiny_gpt", seed=1)
    assert sum(p.numel() for p in model.parameters()) == 210_304
    assert [len(CHARACTERS) % ranks for ranks in (2, 4, 8)] == [0, 0, 0]
    inputs = text()[:2][0]
    changed = inputs.clone()
    changed[:, 40:] = 3
    with torch.no_grad():
        before, after = (model(x).view(2, CONTEXT, -1) for x in (inputs, changed))
    torch.testing.assert_close(before[:, :40], after[:, :40])
