"""distlab record --all and distlab references: what is run, what is written, what is compared.

Records in these tests are made by the tests, in folders of their own: "made up by a test" is their
device's name.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any

import pytest

from benchmarks import training
from distlab import cli
from distlab.commands import gpu_run, references
from distlab.commands import record as recording
from distlab.course.catalogue import load_course
from distlab.grading.report import print_report
from distlab.grading.verdicts import CheckResult, ExerciseResult, Report
from distlab.ranks import run_ranks
from distlab.reference import compare, sealed, shelf
from distlab.reference.workloads import WORKLOADS, Workload
from tests.distlab.pretend_driver import text_of

SHORT = Workload(name="short", model="mlp", data="digits", optimizer="sgd", lr=0.1, steps=8)


@pytest.mark.parametrize("precision", training.PRECISIONS)
def test_training_on_two_ranks_is_that_of_one_process(precision: str) -> None:
    """Every second sample on each rank: the same global batches, the same losses."""

    def body(ctx: Any) -> Any:
        found = training.record(SHORT, precision, ctx.device)
        return {key: found[key] for key in ("losses", "ranks", "dtype", "tf32", "backend")}

    want, _, _ = compare.train_alone(SHORT, epochs=SHORT.epochs)
    for found in run_ranks(body, 2, timeout=60):
        assert len(found["losses"]) == SHORT.steps
        assert (
            compare.compare({"losses": want}, found["losses"], training.TOLERANCES[precision]) == []
        )
        assert (found["ranks"], found["dtype"], found["tf32"]) == (2, precision, False)
        assert found["backend"] == "gloo"


def test_a_wrong_training_is_told() -> None:
    want, _, _ = compare.train_alone(SHORT, epochs=SHORT.epochs)
    found = {"dtype": "float32", "losses": [*want[:5], want[5] + 0.1], "samples_per_second": 1.0}
    told = training.outcome(SHORT, found)
    assert told["status"] == "failed"
    assert told["message"].startswith("step 5: loss")
    assert training.outcome(SHORT, found | {"losses": want})["status"] == "passed"


def test_trainings_on_one_device_and_on_all() -> None:
    every = recording.trainings(["digits_mlp", "tiny_gpt"], "cuda", 8, {})
    assert len(every) == 2 * 2 * 2
    assert [t.part.name for t in every][::4] == [
        "digits_mlp in float32 on 1 GPU",
        "digits_mlp in float32 on 8 GPUs",
    ]
    for each in every:
        count = "8" if "8 GPUs" in each.part.name else "1"
        assert each.part.prefix == ()
        assert each.part.command[:5] == (
            *("-m", "torch.distributed.run", "--nproc-per-node"),
            *(count, "--standalone"),
        )
        assert each.part.command[-6:] == (
            *("benchmarks.training", each.workload),
            *("--precision", each.precision, "--device", "cuda"),
        )
    assert len(recording.trainings(["tiny_gpt"], "cpu", 1, {})) == 2


def test_trainings_over_the_nodes_of_a_job() -> None:
    job = {"SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_ID": "12345", "SLURMD_NODENAME": "node1"}
    alone, *_, over = recording.trainings(["tiny_gpt"], "cuda", 4, job)
    assert (alone.part.prefix, over.part.prefix) == ((), ("srun", "--ntasks-per-node=1"))
    assert over.part.name == "tiny_gpt in bfloat16 on 8 GPUs"
    text = " ".join(over.part.command)
    assert "--nproc-per-node 4 --nnodes 2 --rdzv-backend c10d --rdzv-endpoint node1:22345" in text


def made_up(name: str = "digits_mlp", **more: Any) -> dict[str, Any]:
    """A record with a hash that holds, and the data's hash as it is here."""
    data = sealed.read(compare.reference_path("cpu", name), name, "")
    return data | {"device_name": "made up by a test"} | more


@pytest.fixture
def options(tmp_path: Path) -> argparse.Namespace:
    return argparse.Namespace(all=True, device="cpu", workload="digits_mlp", out=tmp_path)


def test_a_failed_training_leaves_the_others_and_its_old_record(
    monkeypatch: pytest.MonkeyPatch, options: argparse.Namespace
) -> None:
    """A record is written as its training ends; what fails is told, with status 1."""
    old = shelf.training_path("cpu", "digits_mlp", "bfloat16", 1, options.out)
    sealed.write(old, made_up(ranks=1, date="before"))

    def run(part: Any) -> dict[str, Any]:
        if "bfloat16" in part.name:
            return {"status": "failed", "message": "rank 0: it broke", "result": {}}
        ranks = int(part.command[3])
        made = made_up(ranks=ranks, dtype="float32")
        return {"status": "passed", "message": "fine", "result": {"training": made}}

    monkeypatch.setattr(recording, "run", run)
    monkeypatch.setattr(recording, "yardstick", lambda chosen, device: made_up())
    monkeypatch.setattr(recording.os, "cpu_count", lambda: 3)
    status, text = text_of(recording.main, options)
    assert status == 1
    assert "NO  digits_mlp in bfloat16 on 3 ranks: rank 0: it broke" in text
    assert "need a GPU: not recorded" in text
    names = sorted(each.name for each in shelf.every(options.out))
    assert names == [
        f"cpu/digits_mlp{n}" for n in ("", "-bfloat16-x1", "-float32-x1", "-float32-x3")
    ]
    assert shelf.kept(old).data["date"] == "before"


def test_what_can_not_be_recorded_is_refused(
    monkeypatch: pytest.MonkeyPatch, options: argparse.Namespace, capsys: pytest.CaptureFixture[str]
) -> None:
    options.workload = "digits_mlq"
    with pytest.raises(ValueError, match="no workload 'digits_mlq': there are digits_cnn"):
        text_of(recording.main, options)
    monkeypatch.setattr(recording, "usable_gpus", lambda: ([], "the driver lists none"))
    assert cli.main(["record", "--device", "cuda"]) == 2
    told = "distlab: this machine has no CUDA device (the driver lists none); use --device cpu"
    assert capsys.readouterr().err.strip() == told
    monkeypatch.setenv("RANK", "1")
    assert text_of(recording.main, options) == (0, "")


def look(folder: Path, *names: str, plot: Path | None = None) -> tuple[int, str]:
    return text_of(references.main, argparse.Namespace(names=list(names), folder=folder, plot=plot))


def test_records_are_listed_and_damage_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(compare.reference_path("cpu", "x").parent, tmp_path / "cpu")
    status, text = look(tmp_path)
    assert status == 0
    assert {line.split()[0] for line in text.splitlines()} >= {f"cpu/{name}" for name in WORKLOADS}
    damaged = tmp_path / "cpu" / "tiny_gpt.json"
    damaged.write_text(damaged.read_text().replace('"seed": 0', '"seed": 1'))
    status, text = look(tmp_path)
    assert (status, "tiny_gpt" in text) == (1, False)
    assert "reference cpu/tiny_gpt.json is corrupt" in capsys.readouterr().err
    with pytest.raises(ValueError, match="corrupt"):
        look(tmp_path, "cpu/digits_mlp", "cpu/tiny_gpt")
    with pytest.raises(ValueError, match="there is no reference run"):
        look(tmp_path / "nowhere")


def test_two_records_side_by_side(tmp_path: Path) -> None:
    one = made_up()
    later = [loss + 0.25 * (step == 99) for step, loss in enumerate(one["losses"])]
    rate = one["samples_per_second"] * 3
    sealed.write(tmp_path / "cpu" / "one.json", one)
    two = made_up(losses=later, samples_per_second=rate, ranks=4, dtype="float32")
    sealed.write(tmp_path / "cpu" / "two.json", two)
    sealed.write(tmp_path / "cpu" / "gpt.json", made_up("tiny_gpt"))
    picture = tmp_path / "curves.png"
    status, text = look(tmp_path, "cpu/one", "cpu/two", plot=picture)
    assert status == 0
    assert "furthest apart at step 100: 2.5e-01" in text
    assert "3.00 x" in text
    assert picture.read_bytes()[1:4] == b"PNG"
    with pytest.raises(ValueError, match="trained other things"):
        look(tmp_path, "cpu/one", "cpu/gpt")
    sealed.write(tmp_path / "cpu" / "other.json", made_up(data_hash="of another Python"))
    with pytest.raises(ValueError, match="trained on other data"):
        look(tmp_path, "cpu/one", "cpu/other")
    with pytest.raises(ValueError, match="no reference 'cpu/three': there are cpu/gpt"):
        look(tmp_path, "cpu/one", "cpu/three")


def test_the_report_says_which_reference_was_used() -> None:
    exercise = ExerciseResult("1.5", "Trainer", 10, checks=[CheckResult("a", "pass")])
    report = Report(1, "solutions", 1, "cpu", [exercise])
    report.references = {"digits_mlp": "recorded on a CPU in float64"}

    def shown(out: Any) -> int:
        print_report(report, load_course().phase(1), out)
        return 0

    _, text = text_of(shown)
    line = "compared with the reference run of digits_mlp: recorded on a CPU in float64"
    assert line in text.splitlines()
    assert report.as_json()["references"] == report.references


def test_gpus_are_looked_for_once(
    monkeypatch: pytest.MonkeyPatch, options: argparse.Namespace
) -> None:
    """The trainings in this process begin CUDA; a fork that looks for GPUs would fail after it."""
    looked: list[str] = []
    begun: list[str] = []

    def look_for() -> tuple[list[str], str]:
        looked.append("CUDA has begun" if begun else "before CUDA")
        return ([], "forked after CUDA began") if begun else (["NVIDIA H100"], "")

    def yardstick(chosen: Any, device: str) -> dict[str, Any]:
        begun.append(device)
        return made_up()

    examined: list[list[str]] = []
    for module in (recording, gpu_run):
        monkeypatch.setattr(module, "usable_gpus", look_for)
    monkeypatch.setattr(recording, "yardstick", yardstick)
    monkeypatch.setattr(recording, "trainings", lambda *_: [])
    monkeypatch.setattr(gpu_run, "parts", lambda count, backends: examined.append([count]) or [])
    monkeypatch.setattr(gpu_run, "nccl_backends", dict)
    options.device, options.workload = "auto", None
    assert text_of(recording.main, options)[0] == 0
    assert (looked, examined, set(begun)) == (["before CUDA"], [[1]], {"cuda"})
