"""What all tests share."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator

import pytest

from tests.browser import browser as browser

# the trainer under test runs on the Python that runs the tests, whatever .venv has
os.environ["LAUNCH_PYTHON"] = sys.executable


def pytest_configure(config: pytest.Config) -> None:
    """Tests of which the record of verdicts may speak (tests/verdicts)."""
    config.addinivalue_line("markers", "verdict: the result follows from files alone")


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Ctrl-C ends what a test starts, also where a shell has started pytest with ``&``."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
