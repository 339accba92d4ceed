"""What tests of sandboxes share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from distlab.course.catalogue import root
from distlab.sandbox import Limits, Sandbox, obstacle

SMALL = Limits(
    seconds=60,
    memory_bytes=3 << 30,
    processes=100,
    file_bytes=2 << 20,
    tmp_bytes=8 << 20,
    answer_bytes=4 << 20,
)
LEARNER = """
import torch.distributed as dist


def send_to_nobody(x):
    dist.recv(x, 1)


def sum_all(x):
    dist.all_reduce(x)


def divide(x):
    print("dividing")
    return x / 0
"""


@pytest.fixture(scope="session")
def submission(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A learner's folder of phase 1, in which no exercise is solved."""
    folder = tmp_path_factory.mktemp("submission")
    (folder / "learner.py").write_text(LEARNER, encoding="utf-8")
    return folder


@pytest.fixture(scope="package")
def sandbox(submission: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sandbox]:
    """One for all tests that leave it as it was."""
    if obstacle():
        pytest.skip(f"no sandbox can be made here: {obstacle()}")
    shared = tmp_path_factory.mktemp("shared")
    with Sandbox(root(), submission, SMALL, shared=shared) as place:
        yield place
