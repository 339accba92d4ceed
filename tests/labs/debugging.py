"""What the tests of debugging labs share: a lab's folder, and a learner who asks for things."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from pathlib import Path

import pytest

from distlab.course import progress
from distlab.grading.warm import WarmGrader
from distlab.host.terminal import console
from distlab.labs.debug import chosen, command, folder, sources

LABS = {lab.id: lab for lab in chosen.all_labs()}
TRIED = LABS["D1.02"]  # its run is the shortest
SOURCES = sources.sources_of(TRIED)


@pytest.fixture(scope="module")
def grader() -> Iterator[WarmGrader]:
    with WarmGrader() as warm:
        yield warm


@pytest.fixture
def learner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A learner who has no points yet, in an empty folder."""
    monkeypatch.setattr(progress, "progress_file", lambda: tmp_path / ".distlab" / "progress.json")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def once(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of one lab."""
    made = folder.write_lab(TRIED, 5, tmp_path_factory.mktemp("made") / "lab")
    return {path.name: path.read_bytes() for path in made.iterdir()}


@pytest.fixture
def made(once: dict[str, bytes], learner: Path) -> Path:
    """A folder as it was handed out."""
    (learner / "lab").mkdir()
    for name, data in once.items():
        (learner / "lab" / name).write_bytes(data)
    return learner / "lab"


def asked_for(line: str) -> Namespace:
    parser = ArgumentParser()
    command.add_arguments(parser)
    return parser.parse_args(line.split())


def ask(line: str) -> int:
    return command.main(asked_for(line), console())
