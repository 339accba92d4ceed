"""Pairs of submissions with code in common: what counts, what does not, and what is said of it."""

from __future__ import annotations

import html
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from distlab import cli
from distlab.course.catalogue import load_course, root

similarity = pytest.importorskip("distlab.classes.similarity", reason="needs copydetect")

FOLDER = "phase1_data_parallel"
WAYS = (
    "for p in sorted(model.parameters(), key=id):\n        total += p.grad.sum() * {n}",
    "while len(queue) > {n}:\n        total = queue.pop() - total // 2",
    "total = {{k: v for k, v in zip(range({n}), queue) if v is not None}}",
    "with torch.no_grad():\n        total = [torch.ones(3) for _ in queue][{n}:]",
    "try:\n        total = queue[{n}]\n    except IndexError:\n        return None",
    "total = lambda x: x if x > {n} else -x\n    queue.append(total)",
)


def own(student: int) -> str:
    """A function that nobody else would write: each takes another order of the ways."""
    lines = [WAYS[(student * 5 + i * (1 + student % 4)) % len(WAYS)] for i in range(8)]
    body = "\n    ".join(line.format(n=student) for line in lines)
    return f"\n\ndef helper_{student}(model, queue, total=0):\n    {body}\n    return total\n"


def handed_in(folder: Path, own_code: Mapping[str, str]) -> dict[str, Path]:
    """Each student's folder: a template as it was handed out, and code below."""
    exercise = load_course().exercise("1.8")
    template = exercise.template_path.read_text(encoding="utf-8")
    found = {}
    for student, text in own_code.items():
        found[student] = folder / student
        path = found[student] / FOLDER / exercise.template_path.name
        path.parent.mkdir(parents=True)
        path.write_text(template + text, encoding="utf-8")
    return found


def renamed(text: str) -> str:
    """The same code with other names, comments and spaces."""
    for old, new in (("model", "net"), ("queue", "line_up"), ("total", "answer"), ("helper", "h")):
        text = re.sub(rf"\b{old}\b", new, text)
    return text.replace("\n    return", "\n\n    # and back\n    return")


@pytest.fixture(scope="module")
def class_(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Twelve; ``copy`` is ``s03`` with other names."""
    works = {f"s{i:02}": own(i) for i in range(11)}
    works["copy"] = renamed(works["s03"])
    return handed_in(tmp_path_factory.mktemp("class"), works)


def test_a_copy_with_other_names_comes_first(class_: dict[str, Path]) -> None:
    found = similarity.likeness(class_)
    first = found.pairs[0]
    assert {first.left, first.right} == {"copy", "s03"}
    assert first.share > 0.9
    assert all(pair.score < first.score / 2 for pair in found.pairs[1:])
    (passage,) = first.passages
    for side in (passage.left, passage.right):
        marked = "\n".join(text for _, text, common in side if common)
        assert "return" in marked
        # the template is no student's own, but for the end of its last line
        assert marked.count("raise NotImplementedError") <= 1
    assert found.usual[0] < similarity.LEAST_SCORE


def test_nothing_depends_on_how_python_hashes(class_: dict[str, Path]) -> None:
    two = {name: class_[name] for name in ("copy", "s03", "s04")}
    said = [(p.left, p.right, p.score, p.share) for p in similarity.likeness(two).pairs]
    program = (
        "from pathlib import Path; from distlab.classes.similarity import likeness; "
        f"f = { ({k: str(v) for k, v in two.items()})!r}; "
        "f = {k: Path(v) for k, v in f.items()}; "
        "print([(p.left, p.right, p.score, p.share) for p in likeness(f).pairs])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONHASHSEED": "12345", "PATH": "/usr/bin:/bin", "PYTHONPATH": str(root())},
        capture_output=True,
        text=True,
        check=True,
    )
    assert said
    assert done.stdout.strip() == repr(said)


def test_templates_and_solutions_are_no_hint(tmp_path: Path) -> None:
    solution = load_course().exercise("1.8").solution_path.read_text(encoding="utf-8")
    blank = handed_in(tmp_path / "a", dict.fromkeys(("a", "b", "c"), ""))
    solved = handed_in(tmp_path / "b", dict.fromkeys(("d", "e"), "\n" + solution))
    assert similarity.likeness(blank | solved).pairs == ()


def test_what_many_have_is_an_idiom(tmp_path: Path) -> None:
    """The same code is a hint between two, and none if all of a class of ten have it."""
    idiom = own(1)
    assert (
        len(similarity.likeness(handed_in(tmp_path / "two", {"a": idiom, "b": idiom})).pairs) == 1
    )
    many = {f"s{i}": idiom + (own(i + 2) if i < 2 else "") for i in range(10)}
    assert similarity.likeness(handed_in(tmp_path / "many", many)).pairs == ()


@pytest.mark.parametrize("names", [(), ("solo",)])
def test_a_class_without_pairs(tmp_path: Path, names: tuple[str, ...]) -> None:
    found = similarity.likeness(handed_in(tmp_path, dict.fromkeys(names, own(1))))
    assert found.pairs == ()
    assert "No pair of submissions" in similarity.page(found)


def test_the_page_is_a_hint_and_escapes(tmp_path: Path) -> None:
    evil = own(1).replace("return total", 'return "</pre><script>"')
    page = similarity.page(similarity.likeness(handed_in(tmp_path, {"<a>": evil, "b": evil})))
    assert "<script" not in page
    assert "&lt;a&gt;" in page
    text = " ".join(
        html.unescape(re.sub(r"<style>.*?</style>|<[^>]+>", " ", page, flags=re.S)).split()
    )
    assert "It is no finding and no verdict." in text
    assert "ask both students" in text
    assert not re.search(r"plagiar|cheat|guilty|suspect|offen[cd]", page, re.I)


def test_the_command_writes_the_page(
    class_: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    submissions = tmp_path / "in"
    submissions.mkdir()
    for name in ("copy", "s03", "s04"):
        (submissions / name).symlink_to(class_[name])
    out = tmp_path / "similar.html"
    assert cli.main(["class", "similar", str(submissions), "--out", str(out)]) == 0
    assert "1 pair of submissions to look at, of 3" in capsys.readouterr().out
    assert "copy and s03" in out.read_text(encoding="utf-8")
    assert cli.main(["class", "similar", str(submissions), "--out", str(tmp_path)]) == 2
    assert "is a folder" in capsys.readouterr().err
