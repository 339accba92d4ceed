"""``python -m scripts.website``: its answers."""

from __future__ import annotations

import socket
from pathlib import Path
from types import ModuleType

import pytest

from tests.site.conftest import need_sphinx


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The command; the site is built already."""
    need_sphinx()
    from scripts.website import __main__

    monkeypatch.setattr(__main__, "build", lambda out: 0)
    return __main__


def test_where_the_site_is_told(
    command: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(["--out", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"The site is built: open {tmp_path}/index.html\n"


def test_warnings_are_a_failure(
    command: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "build", lambda out: 1)
    assert command.main([]) == 1
    assert capsys.readouterr().out == ""


def test_port_that_is_taken_is_one_line(
    command: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        assert command.main(["--out", str(tmp_path), "--serve", "--port", port]) == 2
    assert capsys.readouterr().err.startswith(f"site: port {port} can't be used")


def test_broken_link_is_one_line(
    command: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(out: Path) -> int:
        raise ValueError("docs/a.md links to b.md, which is not there")

    monkeypatch.setattr(command, "build", broken)
    assert command.main([]) == 2
    assert capsys.readouterr().err == "site: docs/a.md links to b.md, which is not there\n"
