"""What comes out of a sandbox is read as data, or not at all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from distlab.observe.log import Event, Log
from distlab.ranks import RankFailure, RankReport, RankResults
from distlab.sandbox import files, wire

SHOWN = wire.Reader(("/mine/learner.py", "/course/tests/"), most=1000)


def answer(line: str = "/mine/learner.py:3", output: str = "said") -> bytes:
    event = Event("send", (0, 1), 1, 3, "float32", 12, 12, 0, 0.5, 0.75, line)
    log = Log(0, [event], [("forward", 0.0, 1.5)], 0.25, frozenset({0}))
    return wire.packed([RankResults([{"x": (1, None)}], [log], [output])])


def test_results_come_back() -> None:
    (results,) = SHOWN.results(answer(), [1])
    assert results[0] == {"x": (1, None)}
    assert results.output == ["said"]
    assert vars(results.logs[0]) | {"events": None} == {
        "rank": 0,
        "events": None,
        "spans": [("forward", 0.0, 1.5)],
        "picture_from": 0.25,
        "on_gpu": frozenset({0}),
    }
    (event,) = results.logs[0].events
    assert event == Event(
        "send", (0, 1), 1, 3, "float32", 12, 12, 0, 0.5, 0.75, "/mine/learner.py:3"
    )


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("/etc/shadow:1", "shadow:1"),
        ("/course/tests/../solutions/ddp.py:7", "ddp.py:7"),
        ("/course/tests/test_ddp.py:7", "/course/tests/test_ddp.py:7"),
        ("learner.py:3: x = 1", "learner.py:3: x = 1"),
    ],
)
def test_lines_of_other_files_are_not_looked_up(line: str, told: str) -> None:
    """The grader shows the text of a line: a rank may not choose of which file."""
    (results,) = SHOWN.results(answer(line), [1])
    assert results.logs[0].events[0].line == told


def test_a_failure_comes_back() -> None:
    reports = [RankReport(1, "raised", "learner.py:3: x", "said\x1b[2J", {"type": "ValueError"})]
    failure = RankFailure(
        "no \x1b", kind="exception", cause="summed", rank=1, line="l:1", reports=reports
    )
    failure.interleaving = 7
    with pytest.raises(RankFailure, match=r"no \\x1b") as caught:
        SHOWN.results(wire.packed_failure(failure), [2])
    told = caught.value
    assert (told.kind, told.cause, told.rank, told.line) == ("exception", "summed", 1, "l:1")
    assert told.interleaving == 7
    assert told.reports[0].output == "said\\x1b[2J"
    with pytest.raises(RuntimeError, match="ValueError: no such rank"):
        SHOWN.results(wire.packed_error(ValueError("no such rank")), [2])


def changed(path: str, value: object) -> bytes:
    """An answer with one field as it must not be."""
    text, values = wire.parted(answer())
    data = json.loads(text)
    *above, last = path.split(".")
    place = data
    for key in above:
        place = place[int(key) if key.isdigit() else key]
    place[int(last) if last.isdigit() else last] = value
    return wire.joined(json.dumps(data).encode(), values)


@pytest.mark.parametrize(
    "bad",
    [
        b"",
        b"\xff" * 40,
        wire.joined(b"[" * 100_000),
        wire.joined(b"{}"),
        answer()[:-40],
        wire.joined(b'{"runs": []}', b"cos\nsystem\n(S'true'\ntR."),
        changed("runs", []),
        changed("runs.0.logs", []),
        changed("runs.0.logs.0.rank", "0"),
        changed("runs.0.logs.0.spans", [["forward", 0.0]]),
        changed("runs.0.logs.0.events.0", {}),
        changed("runs.0.logs.0.events.0.sent", 1.5),
        changed("runs.0.logs.0.events.0.sent", True),
        changed("runs.0.logs.0.events.0.group", ["0"]),
        changed("runs.0.logs.0.events.0.op", "x" * 1_000_000),
        changed("runs.0.output", None),
    ],
)
def test_what_is_no_answer_is_not_read(bad: bytes) -> None:
    with pytest.raises(wire.Unreadable):
        SHOWN.results(bad, [1])


def test_tensors_without_memory_of_their_own_are_counted() -> None:
    """A view of one element may say that it has billions."""
    values = [torch.ones(1).expand(10, 100)], [{"x": torch.ones(2, 3)}]
    large, small = (wire.packed([RankResults(list(v), [Log(0, [], [])], [""])]) for v in values)
    assert len(large) < 5000
    with pytest.raises(wire.Unreadable, match="more than 1,000 bytes"):
        SHOWN.results(large, [1])
    assert SHOWN.results(small, [1])[0][0]["x"].shape == (2, 3)


def packed(*entries: dict[str, object]) -> bytes:
    full = [{"size": -1, "mode": 0o755, "changed": 0} | entry for entry in entries]
    return wire.joined(json.dumps(full).encode(), b"content")


def test_files_come_back(tmp_path: Path) -> None:
    """With their folders, modes and times, in place of what was there; not through links."""
    one, other, kept = tmp_path / "one", tmp_path / "other", tmp_path / "other" / "kept"
    for folder in (one / "inner" / "empty", other, kept):
        folder.mkdir(parents=True)
    (one / "inner" / "file").write_bytes(b"content")
    (one / "inner" / "file").chmod(0o640)
    (one / "link").symlink_to("/etc")
    (other / "before").write_text("gone")
    (other / "link").symlink_to(one)
    files.unpacked(files.packed(one), other, {kept})
    names = [str(path.relative_to(other)) for path in sorted(other.rglob("*"))]
    assert names == ["inner", "inner/empty", "inner/file", "kept"]
    before, after = (folder / "inner" / "file" for folder in (one, other))
    assert after.read_bytes() == b"content"
    assert after.stat().st_mtime_ns == before.stat().st_mtime_ns
    assert after.stat().st_mode == before.stat().st_mode
    assert files.packed(kept) == b""
    (one / "inner" / "file").chmod(0o400)
    (one / "inner").chmod(0o500)
    files.unpacked(files.packed(one), other, {kept})
    modes = [(other / "inner" / name).stat().st_mode & 0o777 for name in ("", "file")]
    assert modes == [0o700, 0o600]  # they can be packed and removed again


@pytest.mark.parametrize(
    "bad",
    [
        b"\xff" * 40,
        packed({"name": "../out"}),
        packed({"name": "/out"}),
        packed({"name": "a/../../out"}),
        packed({"name": "."}),
        packed({"name": "a", "size": "7"}),
        packed({"name": ["a"]}),
        packed({}),
    ],
)
def test_files_stay_in_their_folder(tmp_path: Path, bad: bytes) -> None:
    """And those that were there stay, where names are wrong."""
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "before").touch()
    with pytest.raises((ValueError, LookupError, TypeError)):
        files.unpacked(bad, folder)
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]
    assert [path.name for path in folder.iterdir()] == ["before"]


def test_too_many_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MOST", 3)
    for number in range(4):
        (tmp_path / str(number)).touch()
    with pytest.raises(files.TooMuch):
        files.packed(tmp_path)
    deep = tmp_path / "/".join("d" * (files.DEEPEST + 2))
    deep.mkdir(parents=True)
    with pytest.raises(files.TooMuch):
        files.packed(tmp_path / "d")
