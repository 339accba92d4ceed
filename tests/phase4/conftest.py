"""What the checks of phase 4 share."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def folder() -> Iterator[Path]:
    """An empty folder that is gone after the check."""
    with tempfile.TemporaryDirectory(prefix="distlab-") as name:
        yield Path(name)
