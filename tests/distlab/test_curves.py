"""Scale curves: formulas hold for the bytes that ranks send, and fits find what they are fed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import curves, machine
from benchmarks.curve_programs import Curve, Setting
from benchmarks.curve_programs import curves as all_curves
from benchmarks.curves_fit import Measured, exponent, fitted, growth
from benchmarks.curves_picture import draw, panels

SMALL = {"nbytes": 2**12, "width": 16}
VIRTUAL = [each for each in all_curves() if each.cluster]


@pytest.mark.parametrize("curve", VIRTUAL, ids=lambda curve: curve.what)
def test_bytes_are_those_of_the_formula(curve: Curve) -> None:
    """Also where the ranks are no power of two, and where a model has one tensor."""
    for ranks, tensors in ((2, 1), (4, 3), (8, 2)):
        setting = Setting(ranks, tensors=tensors, **SMALL)
        sent, seconds = curves.counted(curve, setting)
        assert sent == pytest.approx(curve.sent(setting))
        assert seconds > 0
    if curve.what.startswith("all-reduce"):
        setting = Setting(5, nbytes=4 * 5 * 12)
        assert curves.counted(curve, setting)[0] == pytest.approx(curve.sent(setting))


def test_time_of_a_virtual_ring_is_the_formula() -> None:
    """α and β are the cluster's, so two points tell the third."""
    ring = next(each for each in VIRTUAL if each.what == "all-reduce, ring")
    points = [Setting(ranks, nbytes=2**16) for ranks in (2, 4, 16)]
    taken = [curves.counted(ring, each)[1] for each in points]
    constants = fitted([ring.terms(each) for each in points[:2]], taken[:2])
    told = sum(c * t for c, t in zip(constants, ring.terms(points[2]), strict=True))
    assert told == pytest.approx(taken[2], rel=0.05)


def test_real_ranks_run_every_program() -> None:
    for curve in {each.what: each for each in all_curves() if not each.cluster}.values():
        assert curves.seconds(curve, Setting(2, nbytes=2**10, width=16)) > 0


def test_exponents_and_constants_come_back() -> None:
    x = [2, 4, 8, 16]
    assert exponent(x, [3 * each**1.5 for each in x]) == pytest.approx(1.5)
    terms = [(1.0, float(each)) for each in x]
    starts = [[2 + 0.5 * each] * 3 for each in x]
    found = growth(x, starts, terms)
    assert found.constants == pytest.approx((2, 0.5))
    assert found.measured == found.low == found.high == pytest.approx(found.formula)
    assert found.error == pytest.approx(0, abs=1e-9)
    assert min(fitted(terms, [1, 1, 1, 0.1])) >= 0


def test_a_start_that_was_disturbed_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every second start was disturbed; what the file has is not measured again."""
    monkeypatch.setattr(curves, "FILE", tmp_path / "curves.json")
    alone = iter(lambda: True, False)
    answers = (number % 2 == 0 for number, _ in enumerate(alone))
    monkeypatch.setattr(machine.Load, "alone", property(lambda load: next(answers)))
    monkeypatch.setattr(curves, "seconds", lambda curve, setting: 1.0)
    first = all_curves()[0]
    one = replace(first, points=first.points[:1])
    said: list[str] = []
    for _ in range(2):
        curves.measure_points([one], said.append)
    (point,) = curves.read()["curves"][one.name].values()
    assert point["seconds"] == [1.0] * curves.STARTS
    assert len(said) == 2
    assert curves.measured() == []  # no curve has all its points


def test_recorded_curves_follow_their_formulas() -> None:
    """Bytes to the last one, but for sizes that do not divide; virtual times as well."""
    found = curves.measured()
    assert {each.curve.name for each in found} >= {each.name for each in VIRTUAL}
    for each in found:
        assert each.off < 0.01, each.curve.name
        if each.curve.cluster and each.curve.what.startswith("all-reduce"):
            assert each.growth.measured == pytest.approx(each.growth.formula, abs=0.05)


def test_table_and_picture_show_all_curves(tmp_path: Path) -> None:
    found = curves.measured()
    assert len(curves.table().rows) == len(found)
    assert sum(map(len, panels(found).values())) == len(found)
    draw(found, 2, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 10_000


def test_curves_with_few_starts_are_shown_as_they_are() -> None:
    curve = replace(all_curves()[0], points=all_curves()[0].points[:3])
    starts = ((1.0, 1.1), (2.0, 2.1), (3.0, 3.3))
    each = Measured(curve, (2, 3, 4), starts, tuple(int(curve.sent(s)) for s in curve.points))
    assert curves.row(each, 2)[1] == "2 … 4 ranks (more than 2 cores)"
