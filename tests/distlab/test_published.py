"""Published runs: the data file, recorded predictions, their errors, and what a prediction says."""

from __future__ import annotations

import io
import json
import statistics
from pathlib import Path

import pytest
import torchvision  # noqa: F401 (here, once: not in every process that simulates)
from rich.console import Console

from benchmarks import prediction_fit, predictions, predictions_page
from benchmarks.predictions_words import WHY
from distlab.hardware.clusters import KINDS, load_cluster, names, numbers
from distlab.hardware.kernels import MOST_FITTED, fitted_numbers, load_kernels
from distlab.simulate import lines, published, report
from distlab.simulate.masters import can_be
from distlab.simulate.plan import Plan
from distlab.simulate.prediction import simulate
from distlab.simulate.published import Kind, Row, error_of, likely, recorded, rows
from distlab.simulate.stages import all_stages

FOLDER = published.FOLDER
TRAINED = [row for row in rows() if row.run and row.is_training]
MEMORY = [row for row in rows() if row.is_memory]
COLLECTIVES = [row for row in rows() if row.is_collective]
SAMPLE = (
    "r061",
    "r097",
    "r141",
    "r170",
    "r179",
    "r188",
    "r189",
)  # predicted again in the tests: the quickest


# -- the data files -------------------------------------------------------------------------------
def test_every_row_has_a_source_and_can_be_simulated_or_says_why_not() -> None:
    assert len({row.id for row in rows()}) == len(rows()) > 150
    for row in rows():
        assert row.source
        assert row.value
        assert bool(row.run) != bool(row.why_not), row.id
        if row.run:
            assert row.run["cluster"] in names(), row.id
    for row in (*TRAINED, *MEMORY):
        assert predictions.plan_of(row).spec.per_sample, row.id
    assert sum(bool(row.run) for row in rows()) >= 0.8 * len(rows())


@pytest.mark.parametrize("name", names())
def test_every_number_of_a_cluster_has_a_kind(name: str) -> None:
    cluster = load_cluster(name)
    assert set(cluster.kinds) == set(cluster.sources)
    for field, value in numbers(cluster):
        kind = cluster.kinds.get(field, cluster.kinds.get(field.split(".")[0]))
        assert not value or kind in KINDS, field
        assert kind != "fitted", "only kernels' loads are fitted"
    for curve in cluster.curves:
        assert curve.source


@pytest.mark.parametrize("path", sorted((FOLDER / "kernels").glob("*.yaml")), ids=lambda p: p.stem)
def test_few_constants_are_fitted_to_many_rows(path: Path) -> None:
    kernels = load_kernels(path.stem)
    fitted = len(fitted_numbers(kernels))
    used = sum(
        row.rests_on.startswith("loads")
        and load_cluster(row.run["cluster"]).gpu.kernels == path.stem
        for row in TRAINED
    )
    assert fitted <= MOST_FITTED
    assert fitted <= used / 3
    assert bool(fitted) == bool(used)


def test_points_of_curves_are_published_rows() -> None:
    points = {
        (row.run["cluster"], row.run["collective"], row.run["gpus"], row.run["nbytes"]): row.value
        for row in COLLECTIVES
        if row.rests_on == "curve"
    }
    found = {
        (name, curve.op, curve.ranks, size): speed / 1e9
        for name in names()
        for curve in load_cluster(name).curves
        for size, speed in curve.bandwidth.items()
    }
    assert found == pytest.approx(points)


# -- recorded predictions -------------------------------------------------------------------------
def test_no_recorded_prediction_is_stale() -> None:
    stale = [row.id for row in predictions.stale(recorded())]
    assert not stale, "python -m benchmarks.predictions predicts them again"
    assert list(recorded()) == [row.id for row in rows() if row.run]


def test_a_change_of_any_input_makes_a_record_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    (row,) = (row for row in TRAINED if row.id == SAMPLE[0])
    assert row not in predictions.stale(recorded())
    slower = load_cluster(row.run["cluster"]).kinds  # not an input
    assert slower
    monkeypatch.setattr(published, "_numbers", lambda data: {"another": 1})
    assert row in predictions.stale(recorded())


@pytest.mark.verdict
def test_collectives_come_out_again() -> None:
    for row in COLLECTIVES:
        again = published.predict_collective(row)
        assert again == pytest.approx(recorded()[row.id]["predicted"], rel=1e-6), row.id


@pytest.mark.verdict
@pytest.mark.parametrize("chosen", SAMPLE)
def test_sample_of_trainings_comes_out_again(chosen: str) -> None:
    (row,) = (row for row in (*TRAINED, *MEMORY) if row.id == chosen)
    if predictions.plan_of(row).masters and not can_be():
        pytest.skip("torch before 2.10 has no gradients of another dtype")
    again = predictions.predict(row)
    known = recorded()[row.id]
    assert again["predicted"] == pytest.approx(known["predicted"], rel=1e-6)
    assert again.get("parts", {}) == pytest.approx(known.get("parts", {}), rel=1e-6)


@pytest.mark.verdict
def test_equal_layers_and_batches_are_run_once() -> None:
    """Few of both tell what all of them would have told."""
    fields = {"model": "mpt-125m", "strategy": "fsdp", "precision": "mixed"}
    plan = Plan(gpus=(16,), batch=1, layers=8, accumulate=3, **fields)
    assert lines.all_layers(plan, lines.times_of) == pytest.approx(
        lines.times_of(lines.run(plan)), rel=1e-9
    )


@pytest.mark.verdict
@pytest.mark.skipif(not can_be(), reason="torch before 2.10 has no gradients of another dtype")
@pytest.mark.parametrize(
    ("schedule", "chunks", "stages", "layers"),
    [("1f1b", 1, 5, 3), ("interleaved", 2, 5, 1), ("1f1b", 1, 1, 4)],
)
def test_few_stages_tell_what_all_of_them_would(
    schedule: str, chunks: int, stages: int, layers: int
) -> None:
    fields = {"cluster": "dgx-a100", "model": "gpt-22b", "precision": "mixed", "dropout": 0.1}
    fields |= {"schedule": schedule, "chunks": chunks, "recompute": "full", "free_outputs": True}
    plan = Plan(
        gpus=(2 * stages,) if stages == 1 else (stages,),
        tensor=2 if stages == 1 else 1,
        pipeline=stages,
        layers=layers * stages * chunks,
        micro_batches=4 * stages,
        copy_batch=4 * stages,
        **fields,
    )
    (whole,) = simulate(plan)
    found = all_stages(plan)
    assert found.step == pytest.approx(whole.step, rel=0.01)
    assert found.most == pytest.approx(max(whole.states), rel=1e-6)
    assert found.least == pytest.approx(min(whole.states), rel=1e-6)
    assert found.memory == pytest.approx(whole.memory, rel=0.05)
    # one message more or less may be under way
    assert found.kept == pytest.approx(whole.kept[0] - whole.states[0], rel=0.05)


@pytest.mark.skipif(not can_be(), reason="torch before 2.10 has no gradients of another dtype")
def test_copies_of_the_model_sum_their_gradients() -> None:
    fields = {"cluster": "dgx-a100", "model": "gpt-22b", "precision": "mixed", "layers": 2}
    fields |= {"tensor": 2, "micro_batches": 2, "copy_batch": 2}
    (alone,), (four,) = (simulate(Plan(gpus=(gpus,), **fields)) for gpus in (2, 8))
    found = all_stages(Plan(gpus=(8,), **fields))
    assert found.step > alone.step
    # the simulated program also copies the gradients to one tensor, and back
    assert found.step == pytest.approx(four.step, rel=0.06)


@pytest.mark.parametrize("name", prediction_fit.FITTED)
def test_fitted_constants_are_what_the_rows_give(name: str) -> None:
    kernels = load_kernels(name)
    *loads, growth = prediction_fit.fit(name, recorded())
    assert loads == pytest.approx(list(kernels.load.values()), rel=0.03)
    assert growth == pytest.approx(kernels.growth, abs=0.003)


def test_a_model_left_out_of_the_fit_is_predicted_without_it() -> None:
    known, model = recorded(), "mpt-70b"
    constants = prediction_fit.fit("h100", known, without=model)
    chosen = [row for row in prediction_fit.rows_of("h100", known) if row.run["model"] == model]
    assert chosen
    for row in chosen:
        apart = prediction_fit.with_constants(row, known[row.id], constants)
        assert known[row.id]["held_out"] == pytest.approx(apart, rel=1e-3)
        assert known[row.id]["held_out"] != pytest.approx(known[row.id]["predicted"], rel=1e-6)


def test_each_table_of_the_fitted_source_is_left_out_as_a_whole() -> None:
    known = recorded()
    found = prediction_fit.held_out(known, prediction_fit.table_of)
    used = [row for name in prediction_fit.FITTED for row in prediction_fit.rows_of(name, known)]
    assert set(found) == {row.id for row in used}
    for row in used:
        assert found[row.id] != known[row.id]["predicted"]
    assert {line[0] for line in predictions_page.left_out()[1:]} == {
        row.source.split('"')[1] for row in used
    }


# -- how good they are ----------------------------------------------------------------------------
def sizes(chosen: list[Row]) -> list[float]:
    return [abs(error_of(row)) for row in chosen]


def test_trainings_are_within_the_goals() -> None:
    errors = sizes(TRAINED)
    assert statistics.median(errors) <= 0.08
    assert published.nine_in_ten(errors) <= 0.20


def test_trainings_of_projects_that_gave_no_constant_are_nearly_as_good() -> None:
    """Their errors may be half as large again."""
    errors = sizes(predictions_page.untouched())
    assert len(errors) >= 15
    assert statistics.median(errors) <= 1.5 * 0.08
    assert published.nine_in_ten(errors) <= 1.5 * 0.20


def test_collectives_are_within_the_goals() -> None:
    errors = sizes([row for row in COLLECTIVES if predictions_page.counts(row)])
    assert statistics.median(errors) <= 0.10
    assert max(errors) <= 0.30


def test_memory_is_within_the_goal() -> None:
    assert len(MEMORY) == 6
    assert max(sizes(MEMORY)) <= 0.08


def test_page_is_what_the_records_make() -> None:
    assert predictions_page.PAGE.read_text(encoding="utf-8") == predictions_page.page()
    large = [row for row in predictions_page.simulated() if predictions_page.counts(row)]
    shown = {row[0] for row in predictions_page.worst(large)}
    assert shown == set(WHY)


# -- what a prediction says -----------------------------------------------------------------------
def test_interval_is_from_runs_of_the_same_kind() -> None:
    kind = Kind("H100", "transformer", "sharded")
    errors = sizes([row for row in TRAINED if row.kind == kind])
    told = likely(kind)
    assert told.runs == len(errors) >= published.SMALL
    assert told.share == published.nine_in_ten(errors)
    assert sum(error <= told.share for error in errors) >= 0.9 * len(errors)
    assert f"9 in 10 of {len(errors)} published runs like this one" in told.words


def test_other_ways_on_the_same_gpu_are_said_to_be_others() -> None:
    told = likely(Kind("H100", "transformer", "replicated"))
    assert told.share == likely(Kind("H100", "transformer", "sharded")).share
    assert "none is replicated" in told.words


def test_few_runs_give_the_worst_and_none_give_nothing() -> None:
    kind = Kind("A100", "convolution", "alone")
    errors = sizes([row for row in TRAINED if row.kind == kind])
    assert 0 < len(errors) < published.SMALL
    assert likely(kind).share == max(errors)
    assert "the worst of" in likely(kind).words
    nothing = likely(Kind("P100", "convolution", "replicated"))
    assert (nothing.share, nothing.runs) == (None, 0)
    assert "unknown" in nothing.words


def test_command_shows_the_interval_and_what_is_not_modelled(tmp_path: Path) -> None:
    out = Console(file=io.StringIO(), width=200)
    plan = Plan(cluster="dgx-a100", gpus=(8,), model="mpt-125m", strategy="fsdp")
    assert report.run(plan, tmp_path, out) == 0
    told = likely(Kind("A100", "transformer", "sharded"))
    said = out.file.getvalue()  # type: ignore[attr-defined]
    assert f"±{told.share:.0%}" in said
    assert told.words in said
    assert "not modelled: reading the data" in said
    (path,) = (p for p in tmp_path.glob("*.json") if "timeline" not in p.name)
    data = json.loads(path.read_text())
    assert data["rows"][0]["error"] == told.share
    assert data["rows"][0]["likely"]["runs"] == told.runs
    assert data["not_modelled"] == report.not_modelled(plan)
