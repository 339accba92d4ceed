"""What the tests of the site share: the site, built once."""

from __future__ import annotations

import fcntl
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from distlab.course.catalogue import root


def need_sphinx() -> None:
    """Skip the test where Sphinx is absent; importing it would change what later tests see."""
    if importlib.util.find_spec("myst_nb") is None:
        pytest.skip("no Sphinx here: run make site once")


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site. One process of tests has it built, and the others wait for that."""
    need_sphinx()
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    done = shared / "site-is-built"
    with open(shared / "site-lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            # in a process of its own: what Sphinx leaves in sys.meta_path is no test's business
            command = [sys.executable, "-m", "scripts.website", "--out", str(shared / "site")]
            run = subprocess.run(command, cwd=root(), capture_output=True, text=True)
            done.write_text(str(run.returncode) if not run.returncode else run.stderr)
    assert done.read_text() == "0"
    return shared / "site"
