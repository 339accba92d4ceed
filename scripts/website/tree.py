"""The source folder of the site: which text of the course becomes which page, and their order."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from distlab.course.catalogue import load_course
from distlab.player import page as player

from . import exercises, gallery, labs, reference
from .links import Places

NOTEBOOKS = "notebooks"
LEFT_OUT = {"docs/handout_readme.md"}  # has places to be filled in
# the parts of the navigation: files of the course, and pages that are made
PARTS = {
    "Begin": ["docs/start.md", "exercises", "docs/glossary.md"],
    "Course": [],  # the phases
    "Labs": ["labs"],  # and a page for each phase
    "Pictures and notebooks": ["pictures"],  # and the notebooks
    "Reference": [
        "reference/given",
        "reference/commands",
        "docs/nccl_rules.md",
        "docs/gpu_only.md",
        "solutions/phase4_production/README.md",
    ],
    "Measurements": [
        "benchmarks/README.md",
        "docs/validation.md",
        "docs/scaling.md",
        "benchmarks/soak.md",
    ],
    "For instructors": [
        "docs/instructors.md",
        "docs/classes.md",
        "docs/class_places.md",
        "docs/handouts.md",
        "SECURITY.md",
    ],
    "For contributors": [
        "CONTRIBUTING.md",
        "docs/structure.md",
        "reference/checks",
        "docs/pytorch_scenarios.md",
        "CHANGELOG.md",
    ],  # and all other texts of docs/
}


def page_of(file: str) -> str:
    """The name of the page that a text of the course becomes."""
    return "index" if file == "README.md" else file.rpartition(".")[0]


def navigation(root: Path) -> dict[str, list[str]]:
    """What stands in which part, in order; a file is there if it is in the course."""
    parts = {title: list(entries) for title, entries in PARTS.items()}
    parts["Course"] = [f"{phase.folder}/guidelines.md" for phase in load_course(root).phases]
    parts["Labs"] += [f"{phase.folder}/labs.md" for phase in load_course(root).phases]
    notebooks = sorted((root / NOTEBOOKS).glob("*.ipynb"))
    parts["Pictures and notebooks"] += [f"{NOTEBOOKS}/{path.name}" for path in notebooks]
    named = {name for entries in parts.values() for name in entries} | LEFT_OUT
    texts = [path.relative_to(root).as_posix() for path in sorted((root / "docs").rglob("*.md"))]
    parts["For contributors"] += [name for name in texts if name not in named]
    return {
        title: [name for name in names if "." not in name or (root / name).is_file()]
        for title, names in parts.items()
    }


def pages(root: Path) -> tuple[dict[str, str], list[str]]:
    """The text of every page by its file in the source folder, and the pictures that they show."""
    course, parts = load_course(root), navigation(root)
    files = [name for names in parts.values() for name in names if "." in name]
    into = {name: page_of(name) for name in ["README.md", *files]}
    targets = Places(root, into, player.fragment, course.address)
    found = exercises.pages(course, root, targets) | reference.pages(root)
    for name in ["README.md", *files]:
        if page_of(name) not in found and name.endswith(".md"):
            text = (root / name).read_text(encoding="utf-8")
            found[page_of(name)] = targets.rewritten(text, name, page_of(name))
    for phase in course.phases:
        found[f"{phase.folder}/labs"] += labs.table(phase)
    found["labs"] = labs.page(course)
    shown = list(targets.pictures)
    moving = [player.fragment(name) for name in player.names()]
    found["pictures"] = gallery.page(moving, shown, found)
    for title, names in parts.items():
        entries = [page_of(name) if "." in name else name for name in names]
        found["index"] += "\n" + exercises.toctree(entries, title)
    texts = {f"{name}.md": text for name, text in found.items()}
    for name in files:
        if name.endswith(".ipynb"):
            texts[name] = notebook(root / name, name, targets)
    return texts, sorted({each.file for each in targets.pictures})


def notebook(path: Path, name: str, targets: Places) -> str:
    """A notebook as it was committed, outputs included, with the site's links."""
    cells = json.loads(path.read_text(encoding="utf-8"))
    for cell in cells["cells"]:
        if cell["cell_type"] == "markdown":
            cell["source"] = targets.rewritten("".join(cell["source"]), name, page_of(name))
    return json.dumps(cells, ensure_ascii=False)


def write(root: Path, out: Path) -> None:
    """Make ``out`` the source folder; what is the same stays, so that Sphinx can leave it alone."""
    texts, pictures = pages(root)
    for path in out.rglob("*"):
        if path.is_file() and path.relative_to(out).as_posix() not in {*texts, *pictures}:
            path.unlink()
    for name, text in texts.items():
        path = out / name
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    for name in pictures:
        path = out / name
        if not path.is_file() or path.read_bytes() != (root / name).read_bytes():
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(root / name, path)
