"""Prove that a folder shows nothing of a solution's regions.

The regions are those of the generator. No telling line of a region stands in the folder, and no 20
of its tokens in a row, with whatever spaces and line breaks. Fewer tokens are idioms that anybody
writes: twelve tokens in a row of some region stand in half of all checks.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from . import templates
from .catalogue import Course
from .regions import regions_of

WINDOW = 20  # tokens
TELLING = 40  # characters of a line
TOKEN = re.compile(r"\w+|\"[^\"\n]*\"|'[^'\n]*'|[^\w\s]")
COMMENT = re.compile(r"(?<!\S)#.*$", re.M)
READ = (".py", ".md", ".toml", ".json", ".ipynb", ".yaml", ".txt", "")

STREAMS = "PyTorch's documentation times a GPU's stream in these words"
IDIOM = "anybody calls PyTorch like this"
EXPECTED = "the check computes what it expects"
# anybody who ends a process that may be gone writes this line
IDIOMS = ("with contextlib.suppress(ProcessLookupError):",)
# files that may show a part of an exercise's region, and why
SHARED = {
    ("distlab/observe/gpu_clock.py", "4.10"): STREAMS,
    ("distlab/reference/workloads.py", "2.17"): "the GPT whose layers the exercise cuts",
    ("tests/phase2/test_parallel_transformer.py", "2.17"): EXPECTED,
    ("tests/phase2/pipeline_orders.py", "2.9"): EXPECTED,
    ("tests/phase2/test_gradient_accumulation_clipping.py", "2.6"): IDIOM,
    ("tests/phase2/test_model_parallel_stages.py", "1.5"): IDIOM,
    ("tests/phase2/test_model_parallel_stages.py", "3.25"): IDIOM,
    ("tests/phase3/rounds.py", "2.6"): IDIOM,
    ("tests/phase3/serving.py", "3.22"): "the other side of the messages that docstrings describe",
    ("tests/phase3/test_allreduce_choice.py", "3.29"): EXPECTED,
    ("tests/phase3/test_ddp.py", "2.5"): IDIOM,
    ("tests/phase3/test_overlap.py", "2.5"): IDIOM,
    ("tests/phase3/test_strategy_memory.py", "3.27"): EXPECTED,
    ("tests/phase4/compression.py", "3.9"): EXPECTED,
    ("tests/phase4/test_stragglers.py", "4.11"): EXPECTED,
    ("notebooks/phase3_multi_node.py", "3.26"): IDIOM,
}
FOR_ALL = "given/"  # what solutions and learners both import


@dataclass(frozen=True)
class Secret:
    """Lines and windows of regions, each with its exercise."""

    lines: dict[str, str] = field(default_factory=dict)
    windows: dict[tuple[str, ...], str] = field(default_factory=dict)


def leaks(course: Course, folder: Path, released: Collection[str] = ()) -> list[str]:
    """The parts of the course's regions that ``folder`` shows; each line names the file and the
    exercise. ``released``: exercises whose solutions may be shown."""
    secret = secret_of(course)
    found = []
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and path.suffix in READ and not name.startswith(FOR_ALL):
            text = path.read_text(encoding="utf-8")
            for exercise, shown in sorted(shown_in(text, secret).items()):
                if (name, exercise) not in SHARED and exercise not in released:
                    found.append(f"{name} shows a part of exercise {exercise}: {shown}")
    return found


def shown_in(text: str, secret: Secret) -> dict[str, str]:
    """Exercises of which the text shows a part, each with the first such part."""
    lines = (" ".join(line.split()) for line in text.splitlines())
    found: dict[str, str] = {}
    for line in lines:
        if line in secret.lines:
            found.setdefault(secret.lines[line], line)
    for window in _windows(text):
        if window in secret.windows:
            found.setdefault(secret.windows[window], " ".join(window))
    return found


def _windows(text: str) -> Iterator[tuple[str, ...]]:
    """All tokens that stand ``WINDOW`` in a row, comments left out."""
    tokens = TOKEN.findall(COMMENT.sub("", text))
    return zip(*(tokens[start:] for start in range(WINDOW)), strict=False)


def secret_of(course: Course) -> Secret:
    """The secret part of a text: a line that a template shows elsewhere is no secret."""
    found = Secret()
    for exercise in templates.files_of(course):
        text = exercise.solution_path.read_text(encoding="utf-8")
        every = text.splitlines()
        for region in regions_of(text):
            body = every[region.start : region.end - 1]
            for line in (" ".join(each.split()) for each in body):
                if len(line) >= TELLING and not line.startswith("#"):
                    found.lines.setdefault(line, region.exercise)
            for window in _windows("\n".join(body)):
                found.windows.setdefault(window, region.exercise)
    for exercise in templates.files_of(course):
        public = templates.template_of(exercise)
        for line in public.splitlines():
            found.lines.pop(" ".join(line.split()), None)
        for window in _windows(public):
            found.windows.pop(window, None)
    for line in IDIOMS:
        found.lines.pop(line, None)
    return found
