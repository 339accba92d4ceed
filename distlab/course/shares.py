"""The parts of the course's files that belong to some exercises: texts for a hand-out."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from . import templates
from .catalogue import Course, check_files

LINKED = re.compile(r"\]\((?:\.\./)?(docs/)?([\w/.-]+\.(?:md|svg|png))(?:#[\w-]*)?\)")
BESIDE = re.compile(r"^\s*from \.template_(\w+) import ", re.M)  # of a template
TARGETS = ("env", "cpu")  # of the Makefile: the targets that a hand-out has
README = "docs/handout_readme.md"


def map_of(part: Course, text: str) -> str:
    """``course.toml`` with the phases and exercises of ``part`` only, and the tracks in them."""
    ids = {e.id for e in part.exercises}
    numbers = {str(p.number) for p in part.phases}
    tracks = {t.name for t in part.tracks if t.name == "all" or {*t.exercises} <= ids}

    def kept(block: str) -> bool:
        exercise = re.match(r'\[\[exercise\]\]\nid = "([\d.]+)"', block)
        phase = re.match(r"\[\[phase\]\]\nnumber = (\d+)", block)
        track = re.match(r'\[\[track\]\]\nname = "(\w+)"', block)
        return all(
            not found or found[1] in some
            for found, some in ((exercise, ids), (phase, numbers), (track, tracks))
        )

    return "".join(filter(kept, re.split(r"^(?=\[\[)", text, flags=re.M)))


def templates_of(course: Course, part: Course) -> dict[str, str]:
    """The blank templates by path, with the templates that they import. A
    file is handed out whole."""
    files = {(e.phase.number, e.file): e for e in templates.files_of(course)}
    todo = [(e.phase.number, e.file) for e in templates.files_of(part)]
    found: dict[str, str] = {}
    while todo:
        exercise = files[todo.pop()]
        name = f"{exercise.phase.folder}/{exercise.template_path.name}"
        if name not in found:
            found[name] = templates.template_of(exercise)
            todo += [(exercise.phase.number, each) for each in BESIDE.findall(found[name])]
    return found


def guidelines_of(part: Course, text: str) -> str:
    """Guidelines without the sections of other exercises; general sections stay."""
    ids = {e.id for e in part.exercises}

    def kept(section: str) -> bool:
        heading = re.match(r"## (\d+\.\d+) ", section)
        return heading is None or heading[1] in ids

    return "".join(filter(kept, re.split(r"^(?=## )", text, flags=re.M)))


def labs_page_of(text: str) -> str:
    """A page about labs without the lab that it solves: that shows a part of a solution."""
    return "".join(p for p in re.split(r"^(?=## )", text, flags=re.M) if p[:10] != "## Solved:")


def makefile_of(text: str) -> str:
    """The Makefile with the targets that need no solutions."""
    paragraphs = text.split("\n\n")
    kept = [p for p in paragraphs if re.search(rf"^({'|'.join(TARGETS)}):", p, re.M)]
    settings = [line for line in paragraphs[0].splitlines() if re.match(r"\w+ [?:]?= ", line)]
    return "\n\n".join(["\n".join([*settings, f".PHONY: {' '.join(TARGETS)}"]), *kept]) + "\n"


def readme_of(part: Course, source: Path, version: str) -> str:
    """The first page for a learner."""
    first = part.exercises[0]
    rows = [f"| {e.id} | {e.title} | {e.points} |" for e in part.exercises]
    guides = [f"[`{p.folder}/guidelines.md`]({p.folder}/guidelines.md)" for p in part.phases]
    text = (source / README).read_text(encoding="utf-8")
    for name, value in {
        "version": version,
        "first": first.id,
        "phase": str(first.phase.number),
        "guidelines": ", ".join(guides),
        "exercises": "\n".join(rows),
    }.items():
        text = text.replace(f"{{{name}}}", value)
    return text


# -- checks ---------------------------------------------------------------------------------------
def checks_of(course: Course, part: Course, source: Path) -> dict[str, str]:
    """The checks of the exercises, with the helpers that they import; by path."""
    ids = {e.id for e in part.exercises}
    others = {e.id for e in course.exercises} - ids
    found: dict[str, str] = {}
    todo = [path for e in part.exercises for path in check_files(e)]
    todo += [source / "tests" / "conftest.py"]
    todo += [source / f"tests/phase{p.number}/conftest.py" for p in part.phases]
    while todo:
        path = todo.pop()
        name = path.relative_to(source).as_posix()
        if name not in found and path.is_file():
            found[name] = without_checks(path.read_text(encoding="utf-8"), others)
            todo += [source / f"{module.replace('.', '/')}.py" for module in _imported(found[name])]
    for e in part.exercises:
        name = f"tests/phase{e.phase.number}/contract/{e.file}.toml"
        if (source / name).is_file():
            found[name] = (source / name).read_text(encoding="utf-8")
    return found


def _imported(text: str) -> Iterable[str]:
    """The modules of ``tests`` that a text imports."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("tests"):
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("tests."))


def without_checks(text: str, others: set[str]) -> str:
    """A file of checks without those of other exercises."""
    lines: list[str | None] = [*text.splitlines(keepends=True)]
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef) and _marked(node) & others:
            first = min(each.lineno for each in node.decorator_list) - 1
            lines[first : node.end_lineno] = [None] * ((node.end_lineno or 0) - first)
    return re.sub(r"\n{4,}", "\n\n\n", "".join(line for line in lines if line is not None))


def _marked(node: ast.FunctionDef) -> set[str]:
    """The exercises that a function's decorators name first, as ``@exercise("1.4", …)`` does."""
    calls = [each for each in node.decorator_list if isinstance(each, ast.Call) and each.args]
    values = [each.args[0] for each in calls if getattr(each.func, "id", "") in MARKS]
    return {str(value.value) for value in values if isinstance(value, ast.Constant)}


MARKS = ("exercise", "trace")


# -- pages ----------------------------------------------------------------------------------------
def notebooks_of(course: Course, part: Course, source: Path) -> dict[str, str]:
    """The notebooks of phases that are handed out whole; they use the learner's own files.

    One that imports solutions itself stays behind.
    """
    ids = {e.id for e in part.exercises}
    whole = {
        p.number for p in part.phases if {e.id for e in course.phase(p.number).exercises} <= ids
    }
    found = {}
    for path in sorted((source / "notebooks").glob("*.py")):
        text = path.read_text(encoding="utf-8")
        used = {int(number) for number in re.findall(r"^\w+ = Notebook\((\d)", text, re.M)}
        if used <= whole and "from solutions" not in text:
            found[f"notebooks/{path.name}"] = _on_templates(text)
            cells = path.with_suffix(".ipynb").read_text(encoding="utf-8")
            found[f"notebooks/{path.stem}.ipynb"] = _cells_on_templates(cells)
    return found


def _on_templates(text: str) -> str:
    return text.replace('IMPL = "solutions"', 'IMPL = "templates"')


def _cells_on_templates(text: str) -> str:
    """A notebook's cells, without the output of the solutions."""
    data = json.loads(text)
    for cell in data["cells"]:
        cell["source"] = [_on_templates(line) for line in cell["source"]]
        if cell["cell_type"] == "code":
            cell |= {"outputs": [], "execution_count": None}
    return json.dumps(data, indent=1, ensure_ascii=False) + "\n"


def pages_of(texts: Mapping[str, str], source: Path) -> dict[str, str]:
    """The pages of ``docs/`` that the other texts link to, and the pages that
    these link to in turn."""
    found: dict[str, str] = {}
    todo = [text for name, text in texts.items() if name.endswith(".md")]
    while todo:
        for path in _linked(todo.pop(), source):
            name = path.relative_to(source).as_posix()
            if path.suffix == ".md" and name not in found:
                found[name] = path.read_text(encoding="utf-8")
                todo.append(found[name])
    return found


def pictures_of(texts: Mapping[str, str], source: Path) -> list[Path]:
    """The pictures that pages show."""
    pages = [text for name, text in texts.items() if name.endswith(".md")]
    found = {path for text in pages for path in _linked(text, source) if path.suffix != ".md"}
    return sorted(found)


def _linked(text: str, source: Path) -> list[Path]:
    """Files of ``docs/`` that a page links to."""
    every = [source / "docs" / match[2] for match in LINKED.finditer(text)]
    return [path for path in every if path.is_file()]
