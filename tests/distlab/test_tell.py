"""The trial of the ratios: how runs are judged, and that both contestants train."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import machine, tell
from benchmarks.pairs import Start


def words(*said: str) -> list[dict[str, str]]:
    return [{"word": word} for word in said]


def test_nineteen_of_twenty_must_be_equal() -> None:
    assert tell.told(words(*["equal"] * 19, "slower"), "the same")[0]
    holds, line = tell.told(words(*["equal"] * 18, "slower", "unknown"), "the same")
    assert not holds
    assert line.endswith("18 equal, 1 slower, 1 unknown of 20 runs (wanted: 19 equal)")


def test_each_slowed_run_must_be_slower() -> None:
    assert tell.told(words("slower", "slower", "slower"), "slowed")[0]
    assert not tell.told(words("slower", "slower", "equal"), "slowed")[0]


def test_a_pause_per_bucket_shows_in_one_start() -> None:
    """The pause is of five buckets, on both ranks, beside a step of some ten milliseconds."""
    found = tell.start("slowed", rounds=3, number=0)
    assert min(found.values["first"]) > 5 * tell.PAUSE * 1e3
    assert len(found.values["second"]) == 3


def test_a_run_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Twice as slow is slower, and the second call measures nothing."""
    ratios = {"slowed": 2.0, "the same": 1.0}
    calls: list[str] = []

    def start(what: str, rounds: int, number: int) -> Start:
        calls.append(what)
        return Start({"first": [ratios[what]] * rounds, "second": [1.0] * rounds})

    monkeypatch.setattr(tell, "start", start)
    monkeypatch.setattr(tell, "FILE", tmp_path / "tell.json")
    monkeypatch.setattr(machine.Load, "alone", property(lambda load: True))
    monkeypatch.setattr("sys.argv", ["tell", "--starts", "9"])
    assert tell.summary() is None
    assert tell.main() == 0
    first = len(calls)
    assert tell.main() == 0
    assert len(calls) == first
    assert "20 equal of 20 runs" in capsys.readouterr().out
    kept = json.loads((tmp_path / "tell.json").read_text())
    assert [len(kept["runs"][what]) for what in tell.RUNS] == [3, 20]
    shown = tell.summary()
    assert shown is not None
    assert shown.rows == [
        ["slowed", "3", "3 slower", "2.000 to 2.000", "3 of 3 slower"],
        ["the same", "20", "20 equal", "1.000 to 1.000", "19 of 20 equal"],
    ]
    monkeypatch.setattr(tell, "fingerprint", lambda: {**machine.fingerprint(), "cpu": "another"})
    assert tell.main() == 0
    assert len(calls) == 2 * first
    monkeypatch.setattr(tell, "TRIAL", {**tell.TRIAL, "rounds": 1})
    assert tell.main() == 0
    assert len(calls) == 3 * first
