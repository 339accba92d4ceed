"""The closing run of phase 3: what crosses the link, what a rank holds, and what is refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import forked_commands
import pytest

from distlab.course import root
from distlab.netcluster import cluster_obstacle, run_cluster
from tests.at_exit.expected import environment, no_threads_left

OBSTACLE = cluster_obstacle()
needs_cluster = pytest.mark.skipif(OBSTACLE is not None, reason=f"needs a cluster: {OBSTACLE}")
MODULE = "solutions.phase3_multi_node.train_two_nodes"
PARAMETERS = {"digits_cnn": 15_270, "tiny_gpt": 210_304}
FEWER = [
    ("hierarchical DDP", "ring DDP"),
    ("hierarchical, bf16", "hierarchical DDP"),
    ("hybrid sharding", "FSDP"),
    ("hybrid sharding", "ring DDP"),
    ("DiLoCo", "hierarchical DDP"),
]
STATE = {  # bytes per parameter on the fullest rank; the units' padding is the slack
    "ring DDP": 16,
    "hierarchical DDP": 16,
    "hierarchical, bf16": 16,
    "FSDP": 4,
    "hybrid sharding": 8,
    "parameter server": 12,
    "DiLoCo": 24,
}


@needs_cluster
def test_knowing_the_nodes_saves_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes by the link's counter, not times: those depend on what else the machine does."""
    for name, value in environment(tmp_path / "ends").items():
        monkeypatch.setenv(name, value)
    numbers, picture = tmp_path / "nodes.json", tmp_path / "nodes.png"
    command = ["python", "-m", MODULE, "--every=5", "--cnn-steps=10", "--gpt-steps=10"]
    done = run_cluster(
        [*command, f"--json={numbers}", f"--plot={picture}"], rate="500mbit", timeout=240
    )
    assert done.status == 0, done.stderr
    no_threads_left(tmp_path / "ends", 4)
    assert "of the bytes and" in done.stdout
    assert picture.read_bytes()[:4] == b"\x89PNG"
    tables = json.loads(numbers.read_text())["tables"]
    assert list(tables) == list(PARAMETERS)
    for name, rows in tables.items():
        found = {row["strategy"]: row for row in rows}
        assert list(found) == list(STATE)
        for less, more in FEWER:
            assert found[less]["sent"] < 0.85 * found[more]["sent"], (name, less, more)
        for strategy, row in found.items():
            most = 1.9 if strategy == "FSDP" else 1.3  # its reduce-scatter is gloo's
            assert 0.9 < row["sent"] / row["formula"] < most, (name, row)
            assert row["state"] / PARAMETERS[name] == pytest.approx(STATE[strategy], rel=0.02)
        exact = [s for s in STATE if s not in ("hierarchical, bf16", "DiLoCo")]
        scores = [found[strategy]["score"] for strategy in exact]
        assert max(scores) - min(scores) < 0.02, (name, scores)


@needs_cluster
def test_one_node_is_refused_in_one_line() -> None:
    done = run_cluster(["python", "-m", MODULE, "--cnn-steps=20"], nodes=1, timeout=60)
    assert done.status != 0
    assert "train_two_nodes: it takes two or more equal nodes" in done.stderr


def test_it_says_how_it_is_started() -> None:
    command = [sys.executable, "-m", MODULE]
    alone = forked_commands.run(command, cwd=root(), timeout=60)
    assert alone.returncode == 1
    assert alone.stderr.startswith("start it with: distlab cluster run")
