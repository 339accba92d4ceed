"""Published measurements beside predictions: ``docs/validation.md`` and what it rests on.

``python -m benchmarks.predictions`` predicts every row of ``published/measured.csv`` whose inputs
have changed since it was recorded, keeps each in ``published/predicted.json`` when it is done, and
writes the page. ``--again ROW …`` predicts these anew, ``--minutes`` ends in time. ``--fit`` prints
the constants that the recorded rows lead to (``prediction_fit.py``).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections.abc import Sequence
from typing import Any

import torch

from distlab.simulate.lines import times
from distlab.simulate.plan import Plan
from distlab.simulate.published import RECORD, Row, digest, predict_collective, recorded, rows
from distlab.simulate.stages import all_stages

from . import prediction_fit, predictions_page

EXACT = 8  # digits that are kept


def plan_of(row: Row) -> Plan:
    """How a training run is simulated."""
    fields = {name: value for name, value in row.run.items() if name != "reads"}
    fields |= {"gpus": (row.run["gpus"],), "fused": tuple(row.run.get("fused", ()))}
    return Plan(**fields)


def predict(row: Row) -> dict[str, Any]:
    """An entry of the record."""
    if row.is_collective:
        return {"predicted": _short(predict_collective(row))}
    plan = plan_of(row)
    if plan.model_ranks > 1:
        return {"predicted": _short(of_split(row, plan))}
    found = times(plan)
    step = sum(found.values())
    units = plan.samples * plan.accumulate * plan.spec.per_sample
    predicted = step if row.unit == "s" else units / step
    if row.unit == "ratio":  # to the rate of one GPU
        predicted = sum(times(dataclasses.replace(plan, gpus=(1,))).values()) / step
    parts = {part: _short(seconds) for part, seconds in sorted(found.items()) if part != "waits"}
    return {"predicted": _short(predicted), "parts": parts, "waits": _short(found["waits"])}


def of_split(row: Row, plan: Plan) -> float:
    """The prediction of a run with tensor or pipeline parallelism, in the row's unit."""
    found = all_stages(plan)
    if row.is_memory:
        return (found.least if row.run["reads"] == "state" else found.kept) / 2**30
    if row.unit == "s":
        return found.step
    return hardware_flops(plan) / plan.gpus[0] / found.step / 1e12


def hardware_flops(plan: Plan) -> float:
    """FLOPs of a step on all GPUs with full recomputation: arXiv 2104.04473, section 5.1."""
    with torch.device("meta"):
        model: Any = plan.spec.build()
    vocabulary, width = model.tokens.weight.shape
    length, layers = plan.spec.per_sample, plan.spec.layers
    samples = plan.samples * plan.gpus[0] // plan.model_ranks
    more = 1 + length / (6 * width) + vocabulary / (16 * layers * width)
    return float(96 * samples * length * layers * width**2 * more)


def _short(value: float) -> float:
    return float(f"{value:.{EXACT}g}")


def stale(known: dict[str, dict[str, Any]]) -> list[Row]:
    """The rows to predict, whose record is missing or rests on other inputs."""
    can = [row for row in rows() if row.run]
    return [row for row in can if known.get(row.id, {}).get("digest") != digest(row)]


def record(again: Sequence[str], until: float) -> dict[str, dict[str, Any]]:
    """Predict what is stale, until a time."""
    torch.set_num_threads(1)
    known = dict(recorded()) if RECORD.exists() else {}
    chosen = [row for row in rows() if row.id in again] if again else stale(known)
    for row in chosen:
        if time.time() > until:
            break
        begun = time.perf_counter()
        known[row.id] = {"digest": digest(row), **predict(row)}
        write(known)
        error = known[row.id]["predicted"] / row.value - 1
        print(
            f"{row.id} {row.config[:60]}: {error:+.1%}, {time.perf_counter() - begun:.0f} s",
            flush=True,
        )
    return known


def write(known: dict[str, dict[str, Any]]) -> None:
    """Keep the record, one row to a line, with the errors of rows left out of the fit."""
    order = [row.id for row in rows() if row.id in known]
    lines = ",\n".join(f'"{each}": {json.dumps(known[each])}' for each in order)
    RECORD.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")
    recorded.cache_clear()


def main() -> None:
    """Record, then write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--again", nargs="+", default=[], metavar="ROW")
    parser.add_argument("--minutes", type=float, default=600.0, help="begin no row after these")
    parser.add_argument("--fit", action="store_true", help="print the constants to fit")
    options = parser.parse_args()
    known = record(options.again, time.time() + 60 * options.minutes)
    if options.fit:
        for name in prediction_fit.FITTED:
            print(name, *(f"{value:.3f}" for value in prediction_fit.fit(name, known)))
    for row_id, predicted in prediction_fit.held_out(known).items():
        known[row_id]["held_out"] = _short(predicted)
    write(known)
    print(predictions_page.write())


if __name__ == "__main__":
    main()
