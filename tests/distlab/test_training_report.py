"""The report of a run names its bottleneck and shows the numbers; also of a run that was killed."""

from __future__ import annotations

import sys
from pathlib import Path

import forked_commands
import pytest

from distlab.course.catalogue import root
from given.step_metrics import RankMetrics
from solutions.phase4_production.sinks import JsonLines
from solutions.phase4_production.stragglers import ClusterMetrics, Straggler
from solutions.phase4_production.training_report import write_report

SLOW = Straggler(rank=2, factor=2.0, seconds=1.0, since=20, phase="backward")


def metrics(step: int, kind: str) -> ClusterMetrics:
    """A report of four ranks of which each step takes 2.1 s, for each kind of bottleneck."""
    ranks = []
    for rank in range(4):
        slow = kind == "straggler" and rank == 2
        data = 1.0 if kind == "data" else 0.1
        waits = {"communication": 1.1, "straggler": 0.1 if slow else 1.1}.get(kind, 0.0)
        own = 2.1 - waits
        busy = own - data
        ranks.append(
            RankMetrics(
                samples=10,
                tokens=0,
                flops=1e9,
                seconds=2.1 * 10,
                loss=2.0 / (step + 1),
                own=own,
                exposed=waits,
                hidden=0.2,
                memory_share=0.97 if kind == "memory" else 0.4,
                phases=(data, 0.3 * busy, 0.6 * busy, 0.1 * busy),
            )
        )
    found = [SLOW] if kind == "straggler" else []
    return ClusterMetrics(
        step=step, steps=10, ranks=ranks, peak_flops=1e12, gpu_utilisation=None, stragglers=found
    )


SENTENCES = {
    "compute": "95.2% of each step is forward, backward and optimizer",
    "data": "47.6% of each step is spent waiting for batches",
    "communication": "52.4% of each step is spent waiting for communication",
    "memory": "97.0% of the memory is in use",
    "straggler": "Rank 2 takes 2.00 times as long as the others since step 21. "
    "The others wait 47.6%",
}


@pytest.mark.parametrize("kind", SENTENCES)
def test_report_names_the_bottleneck(kind: str, tmp_path: Path) -> None:
    sink = JsonLines(tmp_path / "metrics.jsonl")
    for step in range(9, 59, 10):
        evaluation = {"top1": 0.975} if step == 29 else {}
        sink.write(step, metrics(step, kind).as_dict() | evaluation)
    sink.file.write('{"step": 69, "lo')  # killed
    sink.close()
    page = write_report(tmp_path)
    text = page.read_text()
    assert f"**Bottleneck: {kind}.**" in text
    assert SENTENCES[kind] in text
    assert "10 to 50, on 4 ranks" in text
    assert "| GPU utilisation | n/a |" in text
    assert f"| data | {1.0 / 2.1 if kind == 'data' else 0.1 / 2.1:.1%} |" in text
    assert "top-1 accuracy of the last evaluation | 97.50% |" in text
    plots = sorted(tmp_path.glob("*.png"))
    assert len(plots) == 4
    for plot in plots:
        assert plot.read_bytes()[:4] == b"\x89PNG"
        assert f"({plot.name})" in text


def test_missing_metrics_are_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "solutions.phase4_production.training_report", str(tmp_path)]
    done = forked_commands.run(command, cwd=root(), timeout=120)
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        f"{tmp_path / 'metrics.jsonl'} does not exist: nothing to report on"
    ]
