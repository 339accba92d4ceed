"""How benchmarks tell: ratios over fresh starts, words, disturbed starts, runs, claims."""

from __future__ import annotations

import os
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import book, common, machine, page, run
from benchmarks.claims import Claim, broken
from benchmarks.pairs import Case, Paired, Start
from benchmarks.ratio import LEAST_STARTS, MOST_STARTS, Ratio, of_start, over_starts


def test_interval_holds_the_true_ratio() -> None:
    """In at least 92 % of 300 draws of starts that differ by 1.5 %."""
    draw = random.Random(0)
    held = 0
    for _ in range(300):
        found = over_starts([1.1 * draw.gauss(1, 0.015) for _ in range(LEAST_STARTS)])
        held += found.low <= 1.1 <= found.high
    assert held >= 0.92 * 300


def test_one_start_tells_nothing() -> None:
    assert over_starts([0.5]).word == "unknown"
    assert not over_starts([0.5]).told


@pytest.mark.parametrize(
    ("low", "high", "word"),
    [
        (0.97, 1.03, "equal"),
        (0.98, 0.99, "equal"),
        (0.90, 0.99, "faster"),
        (1.01, 1.20, "slower"),
        (0.96, 1.02, "unknown"),
        (0.99, 1.04, "unknown"),
    ],
)
def test_words(low: float, high: float, word: str) -> None:
    assert Ratio((low + high) / 2, low, high, 9).word == word


def test_starts_end_when_the_interval_is_narrow_wherever_it_lies() -> None:
    assert Ratio(2.0, 1.98, 2.02, LEAST_STARTS).told
    assert not Ratio(1.0, 0.9, 1.1, LEAST_STARTS).told
    assert not Ratio(0.5, 0.4, 0.6, LEAST_STARTS).told  # though it is clearly faster
    assert not Ratio(1.0, 1.0, 1.0, LEAST_STARTS - 1).told
    assert Ratio(1.0, 0.9, 1.1, MOST_STARTS).told


def test_a_start_is_the_median_of_its_pairs() -> None:
    """A moment that slows both in one round does not count."""
    assert of_start([1.0, 50.0, 3.0], [2.0, 100.0, 6.0]) == 0.5
    with pytest.raises(ValueError, match="zip"):
        of_start([1.0], [1.0, 2.0])


def test_contestants_take_turns_in_alternating_order() -> None:
    assert [*common.turns("ab", 3)] == ["a", "b", "b", "a", "a", "b"]
    assert [*common.turns("ab", 2, number=1)] == ["b", "a", "a", "b"]
    order: list[str] = []
    values = common.in_turn(
        {name: lambda name=name: order.append(name) or float(len(order)) for name in "ab"}, 2
    )
    assert order == ["a", "b", "b", "a"]
    assert values == {"a": [1.0, 4.0], "b": [2.0, 3.0]}


class Ranks:
    """A start that takes no time: ``ratio`` of one, with noise that a seed draws."""

    def __init__(self, ratio: float, noise: float = 0.0) -> None:
        self.ratio, self.noise, self.numbers = ratio, noise, list[int]()

    def start(self, rounds: int, number: int) -> Start:
        self.numbers.append(number)
        of_this = 1 + self.noise * random.Random(number).gauss(0, 1)
        return Start({"ours": [self.ratio * of_this] * rounds, "theirs": [1.0] * rounds})


def table(**ranks: Ranks) -> Paired:
    cases = [Case((name,), each.start) for name, each in ranks.items()]
    pairs = [("ours", "theirs")]
    return Paired("A table: of two", ("case",), "ms", pairs, lambda: cases, 3, "a note")


busy_seconds = machine._busy_seconds  # the fixture below puts another one there
PASS = "to measure"  # the end of the line that begins a pass over the rows


def ratios_in(told: list[str]) -> list[str]:
    """The lines about ratios, without those that begin a pass."""
    return [line for line in told if not line.endswith(PASS)]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results go to a folder of their own, and the machine is otherwise idle."""
    (tmp_path / "benchmarks").mkdir()
    monkeypatch.setattr(book, "root", lambda: tmp_path)
    monkeypatch.setattr(book, "sources", lambda module: "as they are")
    monkeypatch.setattr(machine, "_busy_seconds", lambda: 0.0)


def test_a_run_goes_on_where_it_was_interrupted() -> None:
    steady, noisy = Ranks(0.5), Ranks(1.0, noise=0.1)
    told: list[str] = []
    book.measure({"module": table(steady=steady)}, "run", MOST_STARTS, told.append)
    book.measure({"module": table(steady=steady, noisy=noisy)}, "run", MOST_STARTS, told.append)
    assert steady.numbers == [*range(LEAST_STARTS)]
    assert noisy.numbers == [*range(MOST_STARTS)]
    steady_once, steady_again, noisy_once = ratios_in(told)
    assert steady_once == steady_again == "steady: ours : theirs 0.50 [0.50, 0.50] faster"
    assert noisy_once.startswith("noisy: ours : theirs 1.")
    assert noisy_once.endswith("unknown")


def test_rows_of_all_tables_take_turns() -> None:
    """So that each one sees all hours of a run; one that is told leaves the others to go on."""
    order: list[str] = []

    def noted(name: str, noise: float) -> Paired:
        ranks = Ranks(1.0, noise)

        def start(rounds: int, number: int) -> Start:
            order.append(name)
            return ranks.start(rounds, number)

        return replace(table(), title=name, cases=lambda: [Case((name,), start)])

    tables = {"one": noted("steady", 0.0), "other": noted("noisy", 0.1)}
    told: list[str] = []
    book.measure(tables, "run", MOST_STARTS, told.append)
    together, alone = ["steady", "noisy"], ["noisy"]
    assert order == together * LEAST_STARTS + alone * (MOST_STARTS - LEAST_STARTS)
    passes = [line for line in told if line.endswith(PASS)]
    both, one = ["2 cases to measure"], ["1 case to measure"]
    assert passes == both * (LEAST_STARTS + 1) + one * (MOST_STARTS - LEAST_STARTS)


def test_a_run_that_ended_early_has_no_ratio() -> None:
    """Two starts have an interval, but too wide a one to be shown or judged."""
    pair = table(case=Ranks(0.5))
    found = book.new_book(pair)
    found.cases["case"] = {"sources": "", "starts": []}
    for number in range(LEAST_STARTS):
        assert found.ratio("case", "ours", "theirs") is None
        assert "None" not in book.told(found, pair, pair.cases()[0])
        found.cases["case"]["starts"].append(book.one_start(pair.cases()[0], 3, number))
    assert found.ratio("case", "ours", "theirs") == Ratio(0.5, 0.5, 0.5, LEAST_STARTS)


def test_a_case_is_measured_anew_when_its_sources_change(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(0.5)
    book.measure({"module": table(case=ranks)}, "run", MOST_STARTS, lambda line: None)
    monkeypatch.setattr(book, "sources", lambda module: "changed")
    book.measure({"module": table(case=ranks)}, "run", MOST_STARTS, lambda line: None)
    assert ranks.numbers == [*range(LEAST_STARTS)] * 2


def test_disturbed_starts_are_kept_and_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another program works in every second start, and makes ours look slow."""
    ranks = Ranks(1.0)
    clock = [0.0]

    def start(rounds: int, number: int) -> Start:
        found = ranks.start(rounds, number)
        if number % 2:
            clock[0] += 1000.0
            return Start({"ours": [9.0] * rounds, "theirs": [1.0] * rounds})
        return found

    monkeypatch.setattr(machine, "_busy_seconds", lambda: clock[0])
    pair = table(case=ranks)
    lazy = Paired(**{**vars(pair), "cases": lambda: [Case(("case",), start)]})
    told: list[str] = []
    book.measure({"module": lazy}, "run", MOST_STARTS, told.append)
    found = book.read("run", lazy)
    starts = found.cases["case"]["starts"]
    assert [s["alone"] for s in starts] == [n % 2 == 0 for n in range(2 * LEAST_STARTS - 1)]
    assert starts[1]["others"] > machine.BUSY
    ratio = found.ratio("case", "ours", "theirs")
    assert ratio is not None
    assert (ratio.median, ratio.starts) == (1.0, LEAST_STARTS)
    disturbed = f"case: ours : theirs {ratio} ({LEAST_STARTS - 1} starts disturbed)"
    assert ratios_in(told) == [disturbed]


def test_load_of_others_is_what_this_process_did_not_use(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([10.0, 10.5])
    monkeypatch.setattr(machine, "_busy_seconds", lambda: next(seconds))
    monkeypatch.setattr(machine, "_own_seconds", lambda: 0.0)
    monkeypatch.setattr(machine.time, "monotonic", iter([0.0, 1.0]).__next__)
    with machine.Load() as load:
        pass
    assert load.others == 0.5
    assert not load.alone


def test_a_processor_that_another_machine_has_is_busy(tmp_path: Path) -> None:
    """user, nice, system, idle, iowait, irq, softirq, steal, guest (which user has already)."""
    stat, tick = tmp_path / "stat", os.sysconf("SC_CLK_TCK")
    free = 1000 * tick
    counts = [tick, tick, tick, free, free, 0, 0, 4 * tick, tick, 0]
    all_of_them, first = " ".join(map(str, counts)), "1 1 1 9 9 0 0 1 1 0"
    stat.write_text(f"cpu  {all_of_them}\ncpu0 {first}\n", encoding="ascii")
    assert busy_seconds(stat) == 7
    assert busy_seconds(tmp_path / "another system") == 0


def test_processors_of_one_name_have_different_fingerprints(tmp_path: Path) -> None:
    """Virtual machines call two generations "AMD EPYC"; one of them takes 30 times as long for
    bfloat16."""
    told = []
    for model in (1, 17):
        cpuinfo = tmp_path / f"{model}"
        core = f"cpu family\t: 25\nmodel\t\t: {model}\nmodel name\t: AMD EPYC\n\n"
        cpuinfo.write_text(2 * core, encoding="utf-8")
        told.append(machine.cpu_generation(cpuinfo))
    vectors = torch.backends.cpu.get_cpu_capability()
    assert told == [f"family 25, model {model}, {vectors}" for model in (1, 17)]
    assert machine.cpu_generation(tmp_path / "another system") == vectors
    here = machine.fingerprint()
    assert here["generation"] == machine.cpu_generation()
    digests = {machine.name_of(here | {"generation": each}) for each in told}
    assert len(digests) == 2
    older = {name: value for name, value in here.items() if name != "generation"}
    assert machine.described(older).startswith(f"{here['cpu']}, ")
    assert machine.described(here).startswith(f"{here['cpu']} ({here['generation']}), ")


def test_a_run_of_another_machine_does_not_go_on_here(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["run", "--run", "2026-01-01-aaaaaaaa", "ddp"])
    with pytest.raises(SystemExit) as ended:
        run.main()
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert "2026-01-01-aaaaaaaa: a run goes on where it began" in told
    assert f"this machine's is {book.this_machine()}" in told


def test_the_page_shows_what_most_starts_counted() -> None:
    def starts(*facts: str) -> list[dict[str, Any]]:
        return [{"facts": {"fact": fact}} for fact in facts]

    assert page.fact(starts("tree", "ring", "tree"), "fact") == "tree (2 of 3 starts)"
    assert page.fact(starts("tree", "tree"), "fact") == "tree"
    assert page.fact(starts("9.5%", "10.5%", "9.9%"), "fact") == "9.9%"
    assert page.fact(starts("tree"), "another") == ""


def test_the_page_shows_the_newest_runs_and_keeps_other_tables() -> None:
    pair = table(quick=Ranks(0.5))
    names = [f"2026-01-0{day}-aaaa" for day in range(1, page.SHOWN + 2)]
    for name in names:
        book.measure({"module": pair}, name, MOST_STARTS, lambda line: None)
    old = page.page("", [], [common.Table("Another", ["a"], [["1"]], "its note")])
    text = page.page(old, [pair], [])
    assert text.count("0.50 [0.50, 0.50] faster") == page.SHOWN
    assert "| case | ours, ms | theirs, ms |" in text
    assert f"\n{', '.join(names[1:])}: " in text  # one machine, one line
    assert f"ours : theirs, {names[0]}" not in text
    assert f"| {names[0]} | {names[1]} | 1 |" in text  # all runs are compared
    assert "## Another\n\nits note\n\n| a |\n| --- |\n| 1 |\n\nMeasured on " in text
    assert page.page(text, [pair], []) == text


def test_modules_have_tables_that_fit_together() -> None:
    tables = [run.paired(name) for name in run.PAIRED]
    assert len({each.slug for each in tables}) == len(tables)
    for each in tables:
        cases = each.cases()
        assert len({case.name for case in cases}) == len(cases) > 0
        assert all(len(case.labels) == len(each.labels) for case in cases)


def test_a_claim_breaks_by_the_upper_end_of_its_interval() -> None:
    claim = Claim("README.md", "as fast", "ddp", "case", "ours", "theirs", 1.1)
    found = book.new_book(table())
    found.cases[claim.case] = {"sources": "", "starts": []}
    assert broken(claim, found) is None  # not measured
    for number in range(LEAST_STARTS):
        slow = claim.most * (1.02 if number % 2 else 0.98)
        values = {claim.ours: [slow], claim.theirs: [1.0]}
        found.cases[claim.case]["starts"].append({"alone": True, "values": values, "facts": {}})
    told = broken(claim, found)
    assert told is not None
    assert told.startswith(f"claimed: at most {claim.most}; measured: ")
