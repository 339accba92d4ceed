"""The benchmarks run and their page is well formed; their numbers are not tested."""

from __future__ import annotations

from benchmarks import common, local_sgd, parameter_server, ranks, run, trainer


def test_ranks_and_trainer_still_run() -> None:
    ranks.forked(2)
    rates = trainer.compare("digits MLP", 2, epochs=1)
    assert {name: len(values) for name, values in rates.items()} == {"solution": 1, "DDP": 1}
    assert all(rate > 0 for values in rates.values() for rate in values)


def test_rounds_divide_the_bytes() -> None:
    sent = local_sgd.bytes_per_step(2)
    ddp = sent.pop("torch DDP")
    assert len(sent) == 3
    assert all(abs(each * local_sgd.H / ddp - 1) < 0.01 for each in sent.values())


def test_servers_still_run(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(parameter_server, "BUDGET", 0.2)
    table = parameter_server.measure(1)
    assert [row[0] for row in table.rows] == ["torch DDP", *parameter_server.WAYS]
    parameter_server.plot(tmp_path / "losses.png")
    assert (tmp_path / "losses.png").read_bytes()[:4] == b"\x89PNG"


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
