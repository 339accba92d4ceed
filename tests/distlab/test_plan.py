"""``distlab plan``: memory, the rows that are shown, failures, errors, and wrong calls."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torchvision  # noqa: F401 (here, once: not in every process that simulates)

from distlab.cli import main
from distlab.hardware.failures import all_observed, daly, goodput, observed, young
from distlab.simulate import search as searching
from distlab.simulate.estimate import Estimator
from distlab.simulate.job import Job
from distlab.simulate.layouts import Layout, layouts, plan_of
from distlab.simulate.lines import run
from distlab.simulate.masters import can_be
from distlab.simulate.plan import Plan
from distlab.simulate.published import Kind, of_kind
from distlab.simulate.search import SLACK, Row, operation, pareto, search, simulated

pytestmark = pytest.mark.verdict

SMALL = Job(model="mpt-125m", cluster="dgx-h100", gpus=16, tokens=1e9, batch=2**17, length=1024)
WAYS = [  # of SMALL: one layout of each kind that is simulated
    {"strategy": "fsdp", "shards": 16, "batch": 2, "micro_batches": 4},
    {"strategy": "fsdp", "shards": 16, "batch": 8, "recompute": "full"},
    {"strategy": "hybrid", "shards": 8, "batch": 8, "recompute": "selective"},
    {"strategy": "ddp", "batch": 8},
    {"strategy": "zero1", "shards": 16, "batch": 8},
    {"strategy": "zero2", "shards": 16, "batch": 4, "micro_batches": 2},
    {"strategy": "ddp", "tensor": 2, "batch": 4, "micro_batches": 4, "recompute": "full"},
    {"strategy": "ddp", "tensor": 2, "pipeline": 4, "batch": 4, "micro_batches": 16},
]
split = pytest.mark.skipif(not can_be(), reason="torch before 2.10 has no gradients of that dtype")


@functools.cache
def formula(job: Job) -> Estimator:
    return Estimator(job)


@functools.cache
def found_by_simulation(layout: Layout) -> tuple[float, float]:
    return simulated(SMALL, layout)


@split
@pytest.mark.parametrize("way", WAYS, ids=lambda way: " ".join(map(str, way.values())))
def test_formula_is_near_the_simulation(way: dict) -> None:
    """So near in memory that what the formula prunes would not fit in the simulation either."""
    layout = Layout(gpus=16, **way)
    assert layout in set(layouts(SMALL))
    assert not layout.not_simulated
    step, memory = found_by_simulation(layout)
    assert memory / SLACK < formula(SMALL).memory(layout) < memory * SLACK
    # the formula has the whole head on the last stage
    assert formula(SMALL).seconds(layout) == pytest.approx(step, rel=0.3)


def test_few_layers_tell_the_memory_of_all() -> None:
    layout = Layout(gpus=16, **WAYS[0])
    whole = run(plan_of(SMALL, layout))
    step, memory = found_by_simulation(layout)
    assert step == pytest.approx(whole.step, rel=1e-6)
    assert memory == pytest.approx(whole.memory, rel=1e-6)


# -- the rows that are shown ----------------------------------------------------------------------
def made(seed: int) -> list[Row]:
    """Rows with few values each, so that many are equal in some aims."""
    draw = random.Random(seed)
    return [
        Row(
            job=dataclasses.replace(SMALL, gpus=draw.choice([8, 16])),
            layout=Layout(gpus=16, strategy="ddp"),
            simulated=draw.random() < 0.5,
            step=draw.choice([0.1, 0.2, 0.3, 0.4]),
            memory=draw.choice([20e9, 40e9, 60e9]),
            error=draw.choice([None, 0.09, 0.2]),
            told="",
            goodput=draw.choice([0.9, 0.95]),
        )
        for _ in range(40)
    ]


def beats(one: Row, other: Row) -> bool:
    """Whether one row is at least as good in all that the table shows, and better in something."""
    pairs = [
        (one.days, other.days),
        (one.hours, other.hours),
        (-one.left, -other.left),
        (one.error if one.error is not None else 9, other.error if other.error is not None else 9),
        (-one.goodput, -other.goodput),
        (not one.simulated, not other.simulated),
    ]
    return all(a <= b for a, b in pairs) and any(a < b for a, b in pairs)


@pytest.mark.parametrize("seed", range(5))
def test_no_dominated_row_is_shown_and_each_other_one_is_dominated(seed: int) -> None:
    rows = made(seed)
    shown = pareto(rows)
    assert 1 < len(shown) < len(rows)
    for row in rows:
        assert (row in shown) == (not any(beats(other, row) for other in rows))


def test_a_small_search_shows_what_brute_force_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the formula's numbers in place of the simulation's, of every layout."""
    known = formula(SMALL)
    monkeypatch.setattr(
        searching, "simulated", lambda _, layout: (known.seconds(layout), known.memory(layout))
    )
    monkeypatch.setattr(searching, "Estimator", formula)
    every = [each for each in layouts(SMALL) if each.model_ranks <= 2]
    monkeypatch.setattr(searching, "layouts", lambda _: every)
    for most in ("EACH", "SPLIT"):
        monkeypatch.setattr(searching, most, len(every))
    found = search(SMALL, operation(SMALL), len(every))
    assert len(found.rows) == found.layouts - found.too_large == len(every)
    shown = pareto(found.rows)
    for row in found.rows:
        worse = any(
            all(a <= b for a, b in zip(other.aims(), row.aims(), strict=True)) for other in shown
        )
        assert worse
        if row in shown:
            assert not any(beats(other, row) and other.aims() != row.aims() for other in shown)
    assert found.best.days == min(row.days for row in found.rows if row.simulated)


def test_rows_do_not_depend_on_the_number_of_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the layouts, the best one among them, turn out not to fit."""
    ranked = [Layout(gpus=16, **way) for way in WAYS]
    large = set(ranked[::2])
    monkeypatch.setattr(
        searching, "simulated", lambda _, layout: (1.0, 90e9 if layout in large else 70e9)
    )
    found = []
    for cores in (1, 2, 5):
        monkeypatch.setattr(searching, "cores", lambda count=cores: count)
        with ThreadPoolExecutor(cores) as pool:
            tell: list[str] = []
            given = (SMALL, operation(SMALL), ranked, 4, 80e9, tell.append, pool)
            found.append(([row.layout for row in searching._simulated(*given)], tell))
    assert found[0] == found[1] == found[2]
    assert found[0][0] == ranked[1::2]


def test_layouts_that_may_come_next_are_begun_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(searching, "cores", lambda: 3)
    one, other, third = (
        Layout(gpus=16, strategy="ddp", tensor=2, micro_batches=count) for count in (1, 2, 4)
    )
    plain = Layout(gpus=16, strategy="fsdp", shards=16)
    # one of them may have tensor ranks: the others come only if it does not fit
    assert searching.Taken(8).following([one, other, plain, third]) == [one, plain, other]
    assert searching.Taken(1).following([one, other, plain]) == [one, other, plain]
    full = searching.Taken(1)
    full.add(plain)
    assert full.following([one, other]) == []


def test_a_formula_hides_no_simulated_row_and_has_no_error() -> None:
    common = {"job": SMALL, "layout": Layout(gpus=16, strategy="fsdp"), "told": "", "goodput": 0.9}
    slow = Row(simulated=True, step=2.0, memory=50e9, error=None, **common)
    fast = Row(simulated=False, step=1.0, memory=10e9, error=None, **common)
    assert pareto([slow, fast]) == [fast, slow]


def test_errors_are_those_of_published_runs_of_exactly_this_kind() -> None:
    sharded = of_kind(Kind("H100", "transformer", "sharded"))
    assert sharded.share is not None
    assert of_kind(Kind("H100", "transformer", "split")).share is None
    for way, kind in ((WAYS[0], sharded.share), (WAYS[3], None)):
        with ThreadPoolExecutor(1) as pool:
            (row,) = searching._simulated(
                SMALL, operation(SMALL), [Layout(gpus=16, **way)], 1, 80e9, lambda _: None, pool
            )
        assert row.simulated
        assert row.error == kind


# -- failures -------------------------------------------------------------------------------------
def lived(save: float, between: float, restart: float, interval: float, seed: int) -> float:
    """The share of progress of a job that fails at random moments, over 20,000 failures."""
    draw = random.Random(seed)
    clock = kept = 0.0
    for _ in range(20_000):
        life = draw.expovariate(1 / between)
        clock += life
        kept += max(0.0, life - restart) // (interval + save) * interval
    return kept / clock


@pytest.mark.parametrize(
    ("save", "between", "restart"),
    [(20.0, 3600.0, 300.0), (60.0, 86_400.0, 600.0), (5.0, 100.0, 0)],
)
def test_goodput_is_that_of_a_job_that_fails_at_random(
    save: float, between: float, restart: float
) -> None:
    best = daly(save, between)
    for interval in (best / 2, best, 2 * best):
        told = goodput(save, between, restart, interval)
        assert lived(save, between, restart, interval, seed=7) == pytest.approx(told, rel=0.02)
    most = max(goodput(save, between, restart, best * 1.02**n) for n in range(-60, 61))
    assert goodput(save, between, restart, best) > most - 1e-4
    assert goodput(save, between, restart, young(save, between)) > most - 0.01


def test_intervals_by_hand() -> None:
    assert young(2.0, 100.0) == 20.0
    assert daly(2.0, 100.0) == pytest.approx(20 * (1 + 0.1 / 3 + 0.01 / 9) - 2)
    assert daly(300.0, 100.0) == 100.0
    assert daly(1.0, 1e9) == pytest.approx(young(1.0, 1e9), rel=1e-3)


def test_failures_are_observed_ones_with_a_source() -> None:
    for row in all_observed():
        assert "arXiv" in row.source
        assert row.kind == "measured"
    assert observed("H100 SXM 80 GB").hours == pytest.approx(16_384 * 54 * 24 / 419)
    assert observed("A100").gpu == "A100"
    assert observed("B200").system == observed("H100").system
    jobs = [dataclasses.replace(SMALL, gpus=gpus) for gpus in (16, 4096)]
    shares = [operation(job).goodput(job) for job in jobs]
    assert 1 > shares[0] > shares[1]


# -- what the simulator runs for it ---------------------------------------------------------------
@split
def test_a_split_llama_has_all_parameters_and_all_work() -> None:
    common = {"model": "llama-8b", "layers": 4, "length": 1024, "precision": "mixed"}
    whole = Job(model="llama-8b", cluster="dgx-h100", gpus=1, tokens=1e9).sizes.all_of(4)
    one, four = (
        run(Plan(gpus=(ranks,), tensor=ranks, copy_batch=4, micro_batches=1, **common))
        for ranks in (2, 4)
    )
    assert 2 * one.states[0] / 18 == pytest.approx(whole, rel=1e-3)  # norms are on both
    work = [answer.mfu * answer.step * answer.gpus for answer in (one, four)]
    assert work[0] == pytest.approx(work[1], rel=1e-3)
    staged = run(Plan(gpus=(4,), tensor=2, pipeline=2, copy_batch=4, micro_batches=4, **common))
    assert sum(staged.states) / 18 == pytest.approx(whole, rel=1e-3)
    assert staged.bubble > 0


@split
def test_a_llama_that_can_not_be_split_says_why() -> None:
    for options, words in (
        ({"tensor": 16, "gpus": (16,)}, "8 heads of keys and values"),
        ({"pipeline": 3, "gpus": (3,), "layers": 4}, "4 layers don't divide into 3 stages"),
    ):
        plan = Plan(model="llama-8b", precision="mixed", length=64, copy_batch=2, **options)
        with pytest.raises(Exception, match=words):
            run(plan)


def test_hybrid_sharding_in_mixed_precision_sums_over_the_nodes() -> None:
    common = {"model": "mpt-125m", "batch": 1, "gpus": (32,), "layers": 2}
    plain, mixed = (
        run(Plan(strategy="hybrid", precision=precision, **common)) for precision in ("", "mixed")
    )
    assert mixed.bytes_per_link["between"] == plain.bytes_per_link["between"] > 0
    wide = run(Plan(strategy="hybrid", precision="mixed", shards=16, **common))
    assert wide.memory < mixed.memory


# -- the command ----------------------------------------------------------------------------------
def test_command_shows_table_and_writes_files(tmp_path: Path, capsys) -> None:
    data = tmp_path / "rows.json"
    arguments = ["--model", "mpt-125m", "--gpus", "8", "--tokens", "1e9", "--length", "1024"]
    arguments += ["--top", "2", "--price", "3", "--json", str(data), "--out", str(tmp_path)]
    assert main(["plan", *arguments]) == 0
    said = " ".join(capsys.readouterr().out.split())
    told = ("1e9 tokens", "on 8 GPUs of", "GPU hours", "left/GPU", "±", "The job fails every")
    for words in (*told, "not modelled"):
        assert words in said
    entries = json.loads(data.read_text())["rows"]
    simulated_rows = [entry for entry in entries if entry["simulated"]]
    assert len(simulated_rows) == 2
    for entry in entries:
        assert entry["cost"] == pytest.approx(3 * entry["gpu_hours"])
        assert entry["gpu_hours"] == pytest.approx(24 * 8 * entry["days"])
        assert entry["simulated"] or (entry["error"] is None and entry["why_not"])
        assert math.isfinite(entry["days"])
    (timeline,) = tmp_path.glob("*-timeline.png")
    assert timeline.read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "llama-7b"], "did you mean llama-"),
        (["--model", "resnet50"], "resnet50 is no language model"),
        (["--cluster", "dgx-h10"], "did you mean dgx-h100?"),
        (["--gpus", "0"], "must be positive"),
        (["--tokens", "-1"], "must be positive"),
        (["--batch", "100"], "has no sequence of 2,048 tokens"),
        (["--gpus", "7"], "no layout divides 256 sequences of a step among 7 GPUs"),
        (["--price", "-1"], "--price must not be negative"),
        (["--top", "0"], "--top must be at least 1"),
        (
            ["--model", "gpt-7b", "--gpus", "1", "--cluster", "p4d-a100"],
            "no layout fits 1 GPUs of 40 GB",
        ),
    ],
)
def test_wrong_calls_get_one_line(arguments: list[str], words: str, tmp_path: Path, capsys) -> None:
    given = {"--model": "mpt-125m", "--gpus": "8", "--tokens": "1e9", "--out": str(tmp_path)}
    given |= dict(zip(arguments[::2], arguments[1::2], strict=True))
    assert main(["plan", *(word for pair in given.items() for word in pair)]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert said.count("\n") == 1
