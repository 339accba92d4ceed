"""What the tests of the site share: the site, built once."""

from __future__ import annotations

import fcntl
import os
import warnings
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site. One process of tests builds it, and the others wait for that."""
    pytest.importorskip("myst_nb", reason="no Sphinx here: run make site once")
    from scripts.website.build import build

    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    done = shared / "site-is-built"
    with open(shared / "site-lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of Sphinx's and torch's coming releases
                done.write_text(str(build(shared / "site")))
    assert done.read_text() == "0", "the site has warnings: make site shows them"
    return shared / "site"
