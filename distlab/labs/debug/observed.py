"""Run a lab's program on virtual ranks, and tell what can be seen of the run."""

from __future__ import annotations

import importlib.util
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...grading import implementation as under_test
from ...grading import sources
from ...grading.wrong import fill
from ...observe.log import Log
from ...ranks.results import RankFailure
from ...virtual import run_virtual
from .chosen import DebugLab

LIMIT = 20.0  # seconds of one run, and of the virtual clock
Row = tuple[str, int, int, int]  # operator, how often, bytes sent, bytes received


@dataclass
class Seen:
    """What one run has shown. ``values``: for each rank what the program returned, by name.

    ``failure``: how the run ended, if not well, and where each rank was.
    """

    values: list[Mapping[str, Any]] = field(default_factory=list)
    ledger: list[list[Row]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    peaks: list[int] = field(default_factory=list)
    logs: list[Log] = field(default_factory=list)
    failure: str = ""
    at_the_end: list[str] = field(default_factory=list)

    def result(self, rank: int) -> Any:
        """What the report shows of a rank's values."""
        if self.failure:
            return self.failure
        return {name: rounded(value) for name, value in self.values[rank].items()}

    def cost(self, rank: int) -> Any:
        """What the report shows of a rank's messages, time and memory."""
        if self.failure:
            return self.failure
        peak = self.peaks[rank] if self.peaks else 0
        return self.ledger[rank], f"{self.seconds[rank]:.3g}", peak


def rounded(value: Any) -> Any:
    """As the report writes it: numbers with six digits."""
    if isinstance(value, list):
        return [rounded(each) for each in value]
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    return f"{value:.6g}" if isinstance(value, float) else value


def differing(wrong: Seen, right: Seen, world: int) -> tuple[int, ...]:
    """The ranks whose values differ between two reports; if none do, those whose costs differ."""
    every = range(world)
    values = tuple(r for r in every if wrong.result(r) != right.result(r))
    return values or tuple(r for r in every if wrong.cost(r) != right.cost(r))


def program_of(path: Path) -> Callable[..., Any]:
    """The function ``program`` of a lab's program."""
    spec = importlib.util.spec_from_file_location(f"lab_program_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    program: Callable[..., Any] = module.program
    return program


def observe(lab: DebugLab, text: str, seed: int, world: int = 0) -> Seen:
    """Run the lab's program with ``text`` as its file, on its ranks (or ``world`` of them)."""
    program = program_of(lab.program_path)
    under_test.protect_this_process()
    with tempfile.TemporaryDirectory(prefix="distlab-lab-") as name:
        folder = Path(name)
        (folder / f"{lab.about.file}.py").write_text(text, encoding="utf-8")
        fill(folder, lab.about.solution_path.parent)
        source = sources.find_source(str(folder), lab.about.phase)
        code = under_test.Implementation(source, lab.about.file)

        def body(ctx: Any) -> Any:
            return program(ctx, code)

        options = {"base_seed": seed, "timeout": LIMIT, "patience": LIMIT} | dict(lab.run)
        try:
            results = run_virtual(body, world or lab.world, learner_files=source.files(), **options)
        except RankFailure as failure:
            return _failed(failure, lab)
    return Seen(
        values=list(results),
        ledger=[_ledger(log) for log in results.logs],
        seconds=results.clocks,
        peaks=results.peaks,
        logs=_renamed(results.logs, lab),
    )


def _ledger(log: Log) -> list[Row]:
    found: dict[str, list[int]] = {}
    for event in log.events:
        row = found.setdefault(event.op, [0, 0, 0])
        row[0] += 1
        row[1] += event.sent
        row[2] += event.received
    return [(op, *row) for op, row in found.items()]  # type: ignore[misc]


def _renamed(logs: Iterable[Log], lab: DebugLab) -> list[Log]:
    logs = list(logs)
    for event in (event for log in logs for event in log.events):
        event.line = _as_told(event.line, lab)
    return logs


def _failed(failure: RankFailure, lab: DebugLab) -> Seen:
    """The words of a failure, each line once, without the tool's guess at what led to it."""
    message, line = _as_told(failure.message, lab), _as_told(failure.line, lab)
    told = message if line in message else f"{message} at {line}"
    lines = [(r, _as_told(r.line, lab)) for r in failure.reports]
    states = [
        f"rank {r.rank}: {r.state}" + (f" ({where})" if where not in told else "")
        for r, where in lines
    ]
    return Seen(failure=f"{failure.kind}: {told}", at_the_end=states)


def _as_told(text: str, lab: DebugLab) -> str:
    return re.sub(rf"(?:/\S*/)?\b{lab.about.file}\.py", lab.file, text)
