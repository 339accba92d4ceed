"""A job of the checks of 4.5 and 4.14 counts as hung if it sleeps, not if it is only slow."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from distlab.host.system import tells_of_processes
from tests.phase4.jobs import Stillness

SPINS = "while True: pass"
WAITS = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {SPINS!r}])"
SLEEPS = "import time; time.sleep(600)"


def still_seconds(program: str, folder: Path, enough: float, limit: float) -> float:
    """Of a process and its descendants, looked at until it is enough, or for ``limit`` seconds."""
    process = subprocess.Popen([sys.executable, "-c", program], start_new_session=True)
    try:
        time.sleep(1.0)
        clock, end = Stillness(process.pid, folder), time.monotonic() + limit
        while time.monotonic() < end and clock.look() < enough:
            time.sleep(0.05)
        return clock.seconds
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_a_job_that_computes_is_not_still(tmp_path: Path) -> None:
    assert still_seconds(WAITS, tmp_path, enough=1.0, limit=1.5) < 0.5


@pytest.mark.skipif(not tells_of_processes(), reason="no /proc that tells what threads do")
def test_a_job_that_sleeps_is_still(tmp_path: Path) -> None:
    assert still_seconds(SLEEPS, tmp_path, enough=0.5, limit=60.0) >= 0.5
