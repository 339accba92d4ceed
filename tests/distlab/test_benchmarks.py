"""The benchmarks run and their page is well formed; their numbers are not tested."""

from __future__ import annotations

import pytest

from benchmarks import common, hierarchical, ranks, run, trainer
from distlab.netcluster import cluster_obstacle


def test_ranks_and_trainer_still_run() -> None:
    ranks.forked(2)
    rates = trainer.compare("digits MLP", 2, epochs=1)
    assert {name: len(values) for name, values in rates.items()} == {"solution": 1, "DDP": 1}
    assert all(rate > 0 for values in rates.values() for rate in values)


@pytest.mark.skipif(cluster_obstacle() is not None, reason="needs a cluster on this machine")
def test_hierarchical_sends_less_between_nodes() -> None:
    samples = hierarchical.compare((0, 0, 1, 1), 1_000_000, repeats=2)
    (_, flat), (_, ours) = samples["gloo"][0], samples["solution"][0]
    assert 0.9e6 < ours < 1.2e6
    assert 1.4e6 < flat < 1.7e6


def test_hierarchical_says_why_it_was_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hierarchical, "cluster_obstacle", lambda: "no permission")
    assert "needs a cluster on this machine (no permission)" in hierarchical.measure(1).markdown()


def test_contestants_take_turns() -> None:
    order: list[str] = []

    def note(name: str) -> float:
        order.append(name)
        return float(len(order))

    values = common.in_turn({"a": lambda: note("a"), "b": lambda: note("b")}, 2)
    assert order == ["a", "b", "a", "b"]
    assert values == {"a": [1.0, 3.0], "b": [2.0, 4.0]}
    assert common.spread([3.0, 1.0, 2.0], 1) == "2.0 (1.0 … 3.0)"


def test_page_names_the_machine() -> None:
    page = run.page([common.Table("Title", ["a", "b"], [["1", "2"]], "a note")])
    assert "Machine: " in page
    assert "### Title\n\na note\n\n| a | b |\n| --- | --- |\n| 1 | 2 |\n" in page
