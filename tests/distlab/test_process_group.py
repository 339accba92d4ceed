"""Every program leaves its group so that no thread of gloo is left, and the helper keeps its word.

Other programs are looked at where their tests run them: train_gpt, train_two_nodes, train_elastic
and imagenet_trainer.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from distlab.course import root
from tests.at_exit.expected import environment, needs_proc, no_threads_left, reports

WRONG = "tests.at_exit.destroys_only"
PHASE1, PHASE3 = "solutions.phase1_data_parallel", "solutions.phase3_multi_node"
PROGRAMS = {
    f"{PHASE1}.trainer": ["--workload=digits_mlp", "--device=cpu", "--epochs=1"],
    f"{PHASE1}.collectives": ["--sizes", "400"],
    f"{PHASE3}.tree_allreduce": [],
    f"{PHASE3}.topology": [],
    WRONG: [],
}
RANKS = 2


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[int]]]:
    """Where the ranks of all programs have reported, and how they ended."""
    folder = tmp_path_factory.mktemp("programs")
    wanted = [[RANKS, name, *arguments] for name, arguments in PROGRAMS.items()]
    script = root() / "tests" / "at_exit" / "forked.py"
    paths = os.pathsep.join([str(root()), environment(folder)["PYTHONPATH"]])
    with subprocess.Popen(
        [sys.executable, str(script), str(folder), json.dumps(wanted)],
        cwd=root(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    ) as process:
        try:
            output, errors = process.communicate(timeout=120)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # ranks that hang, and the store's server
    assert process.returncode == 0, errors
    return folder, json.loads(output)


@needs_proc
@pytest.mark.parametrize("program", [name for name in PROGRAMS if name != WRONG])
def test_a_program_leaves_no_thread(program: str, ended) -> None:
    folder, statuses = ended
    assert statuses[program] == [0] * RANKS
    no_threads_left(folder / program, RANKS)


@needs_proc
def test_threads_that_are_left_are_seen(ended) -> None:
    """A plain destroy after a late import, on any torch: otherwise the tests here prove nothing."""
    found = reports(ended[0] / WRONG)
    assert sorted(found) == list(range(RANKS))
    for each in found.values():
        assert [len(report["left"]) for report in each] == [report["made"] for report in each]
