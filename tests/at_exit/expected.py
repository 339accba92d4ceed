"""For tests that run a program: its ranks have left their groups, and no thread of gloo is left."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from distlab.course.catalogue import root

HERE = Path(__file__).parent
HANGS = 240.0  # seconds
needs_proc = pytest.mark.skipif(
    not Path("/proc/self/task").exists(), reason="needs /proc/self/task, which Linux has"
)


def environment(folder: Path) -> dict[str, str]:
    """What a program needs in its environment for its ranks to report to ``folder``."""
    folder.mkdir(exist_ok=True)
    paths = [str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"THREADS_AT_EXIT": str(folder), "PYTHONPATH": os.pathsep.join(paths)}


def reports(folder: Path) -> dict[int, list[dict]]:
    """What the ranks have written, each process one; by rank."""
    found: dict[int, list[dict]] = {}
    for path in sorted(folder.glob("rank*.json")):
        rank = int(path.name.removeprefix("rank").partition("-")[0])
        found.setdefault(rank, []).append(json.loads(path.read_text()))
    return found


def no_threads_left(folder: Path, ranks: int) -> None:
    """Each of ``ranks`` ranks came to a good end, and then left no thread of gloo.

    A group makes three at least: one for the network, two for collectives. A rank that fails (its
    neighbour was killed) can't wait for them.
    """
    if sys.platform != "linux":
        return
    found = reports(folder)
    assert sorted(found) == list(range(ranks))
    for rank, ended in found.items():
        well = [report for report in ended if not report["failed"]]
        assert well, f"rank {rank} has failed"
        for report in well:
            assert report["made"] >= 3
            assert not report["left"], f"rank {rank} has left {Counter(report['left'])}"


def run_forked(folder: Path, wanted: Sequence[Sequence[object]]) -> dict[str, list[int]]:
    """The exit statuses of the ranks of each program that ``forked.py`` is to run."""
    paths = os.pathsep.join([str(root()), environment(folder)["PYTHONPATH"]])
    with subprocess.Popen(
        [sys.executable, str(HERE / "forked.py"), str(folder), json.dumps(wanted)],
        cwd=root(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    ) as process:
        try:
            said = process.communicate(timeout=HANGS)[0]
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # ranks that hang, and the store's server
    assert process.returncode == 0, said
    return json.loads((folder / "statuses.json").read_text())
