"""Reference runs: hashes hold, the CPU ones are what a run gives, damage is named."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest

from distlab import references
from distlab.course import root
from distlab.workloads import WORKLOADS, digits, epoch_order, workload

RECORDS = sorted((root() / "references").glob("*/*.json"))


@pytest.mark.parametrize("path", RECORDS, ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_hashes_and_configuration_hold(path: Path) -> None:
    data = references.load(path.parent.name, path.stem)
    chosen = WORKLOADS[path.stem]
    assert data["configuration"] == vars(chosen)
    assert len(data["losses"]) == math.ceil(len(digits()) / chosen.global_batch_size) * (
        chosen.epochs
    )


@pytest.mark.parametrize("name", sorted(WORKLOADS))
def test_cpu_records_are_what_a_run_gives(name: str) -> None:
    reference = references.load("cpu", name)
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
    with pytest.raises(ValueError, match=r"python -m distlab\.record"):
        references.load("cpu", "digits_mlp", tmp_path)


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
