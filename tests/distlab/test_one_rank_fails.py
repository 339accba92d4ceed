"""One rank of a program raises: all ranks end by themselves, and what was raised is shown.

No launcher is there to end the others: each one waits for the rank that has failed until its own
operation fails, because that rank has given its group up. The limit in ``run_forked`` only ends
what hangs.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.at_exit.expected import run_forked
from tests.phase4.image_runs import few_digits

PHASE1, PHASE3 = "solutions.phase1_data_parallel", "solutions.phase3_multi_node"
PHASE4 = "solutions.phase4_production"
CPU = "--device=cpu"
STEPS = ["--cnn-steps=20", "--gpt-steps=10", "--interface=lo"]
PROGRAMS = {
    "trainer": [f"{PHASE1}.trainer", CPU, "--epochs=9"],
    "collectives": [f"{PHASE1}.collectives", CPU, "--sizes", "400"],
    "train_gpt": ["solutions.phase2_advanced.train_gpt", CPU, "--pipeline=3", "--batch=12"],
    "allreduce_choice": [f"{PHASE3}.allreduce_choice", CPU],
    "hierarchical_allreduce": [f"{PHASE3}.hierarchical_allreduce", CPU],
    "train_mesh": [f"{PHASE3}.train_mesh", CPU, "--shard=3", "--batch=12"],
    "train_two_nodes": [f"{PHASE3}.train_two_nodes", *STEPS],
    "train_elastic": [f"{PHASE4}.train_elastic"],
    "imagenet_trainer": [f"{PHASE4}.imagenet_trainer", CPU],
}
RANKS = {"trainer": 4}  # its batch does not divide by 3
CASES = {  # a bug in any program, and what is told in a line, in those that do so on their own
    **dict.fromkeys([(name, "RuntimeError") for name in PROGRAMS], 1),
    ("trainer", "ValueError"): 1,
    ("train_elastic", "ValueError"): 78,
    ("imagenet_trainer", "ValueError"): 78,
}
FAILED = "rank 1 fails on purpose"


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[int]]]:
    """Where the ranks of all programs have printed, and how they ended."""
    folder = tmp_path_factory.mktemp("programs")
    data, wanted = few_digits(folder), []
    for name, kind in CASES:
        own = folder / f"files of {name} {kind}"
        added = {
            "train_elastic": [f"--folder={own}"],
            "imagenet_trainer": [f"--data={data}", f"--checkpoints={own}/c", f"--logs={own}/l"],
        }
        command = [*PROGRAMS[name], *added.get(name, [])]
        wanted.append([f"{name} {kind}", RANKS.get(name, 3), kind, *command])
    return folder, run_forked(folder, wanted)


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_no_rank_waits_for_one_that_raised(name: str, kind: str, ended) -> None:
    folder, statuses = ended
    found = statuses[f"{name} {kind}"]
    place = folder / f"{name} {kind}"
    said = [(place / f"output{rank}").read_text() for rank in range(len(found))]
    assert all(status > 0 for status in found), (found, said)
    assert found[1] == CASES[name, kind]
    shown = f"{kind}: {FAILED}" if kind == "RuntimeError" else f"{name}: {FAILED}"
    assert shown in said[1]
