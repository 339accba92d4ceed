"""The closing run of phase 3: what crosses the link, what a rank holds, and what is refused."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from torch.distributed import distributed_c10d

from distlab.netcluster import Network, cluster_obstacle, run_cluster
from distlab.ranks import RankContext, run_ranks
from solutions.phase3_multi_node import train_two_nodes
from tests.at_exit import sitecustomize as at_exit
from tests.at_exit.expected import environment, no_threads_left
from tests.forked_agents import start

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
    ("streaming DiLoCo", "DiLoCo"),
]
MOST = {  # bytes sent over the formula's, at most; 1.3 for the others
    "FSDP": 1.9,  # its reduce-scatter is gloo's
    # the three steps that a worker measures may begin before the server has sent the answers of
    # the step before to the other node: four steps' answers
    "parameter server": 1.3 * 4 / 3,
    # beside the two messages of a round: the last one of the round before, which is under way when
    # the count begins, and that of finish(), which other ranks may send before a late rank reads
    "streaming DiLoCo": 1.3 * 4 / 2,
}
LEAST = {"streaming DiLoCo": 0.9 / 2}  # the round's last message is under way; 0.9 for the others
STATE = {  # bytes per parameter on the fullest rank; the units' padding is the slack
    "ring DDP": 16,
    "hierarchical DDP": 16,
    "hierarchical, bf16": 16,
    "FSDP": 4,
    "hybrid sharding": 8,
    "parameter server": 12,
    "DiLoCo": 24,
    "streaming DiLoCo": 24,
}
OTHER_STEPS = ("hierarchical, bf16", "DiLoCo", "streaming DiLoCo")


def trained(arguments: list[str], rate: str, ends: Path) -> str:
    """What two nodes of two ranks print, all forked; ``ends``: what was left of their groups."""
    environ = environment(ends)
    with Network(2, rate=rate) as network:
        environ |= {"MASTER_ADDR": network.addresses[0], "MASTER_PORT": "29500"}

        def body(ctx: RankContext) -> None:
            os.environ.update(environ, RANK=str(ctx.rank), WORLD_SIZE="4")
            sys.argv = [MODULE, *arguments]
            watch = at_exit.Watch()
            watch.start(distributed_c10d)
            train_two_nodes.main()
            watch.write(str(ends))

        placed = network.placement((0, 0, 1, 1))
        done = run_ranks(body, 4, enter=placed, process_group=False, ledger=False, timeout=240.0)
    return "".join(done.output)


@needs_cluster
def test_knowing_the_nodes_saves_bytes(tmp_path: Path) -> None:
    """Bytes by the link's counter, not times: those depend on what else the machine does."""
    numbers, picture = tmp_path / "nodes.json", tmp_path / "nodes.png"
    arguments = ["--every=3", "--cnn-steps=6", "--gpt-steps=6"]
    files = [f"--json={numbers}", f"--plot={picture}"]
    printed = trained([*arguments, *files], "500mbit", tmp_path / "ends")
    no_threads_left(tmp_path / "ends", 4)
    assert "of the bytes and" in printed
    assert picture.read_bytes()[:4] == b"\x89PNG"
    tables = json.loads(numbers.read_text())["tables"]
    assert list(tables) == list(PARAMETERS)
    for name, rows in tables.items():
        found = {row["strategy"]: row for row in rows}
        assert list(found) == list(STATE)
        for less, more in FEWER:
            assert found[less]["sent"] < 0.85 * found[more]["sent"], (name, less, more)
        for strategy, row in found.items():
            least, most = LEAST.get(strategy, 0.9), MOST.get(strategy, 1.3)
            assert least < row["sent"] / row["formula"] < most, (name, row)
            assert row["state"] / PARAMETERS[name] == pytest.approx(STATE[strategy], rel=0.02)
        exact = [s for s in STATE if s not in OTHER_STEPS]
        scores = [found[strategy]["score"] for strategy in exact]
        assert max(scores) - min(scores) < 0.02, (name, scores)


@needs_cluster
def test_one_node_is_refused_in_one_line() -> None:
    command = ["python", "-m", MODULE, "--cnn-steps=20"]
    done = run_cluster(command, nodes=1, ranks_per_node=1, timeout=60)
    assert done.status != 0
    assert "train_two_nodes: needs two or more nodes of equally many ranks" in done.stderr


def test_it_says_how_it_is_started(tmp_path: Path) -> None:
    outside = {name: value for name, value in os.environ.items() if name != "RANK"}
    said = tmp_path / "said"
    assert start([sys.executable, "-m", MODULE], said, outside).wait(60) == 1
    assert said.read_text().startswith("start it with: distlab cluster run")
