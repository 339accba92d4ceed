"""Find submissions with common code that hardly anybody else has: a hint where to look.

copydetect takes names, texts, spaces and comments out of code and hashes the rest, ``K`` characters
at a time (Schleimer, Wilkerson & Aiken 2003). Code that everybody was given does not count:
templates, given code, solutions. A hash that several students have counts less with each of them,
and nothing if a fifth of the class has it. One product of sparse matrices scores all pairs.
Passages are looked for only in the pairs that are shown.
"""

from __future__ import annotations

import copy
import functools
import io
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from copydetect import CodeFingerprint, compare_files
from copydetect.utils import filter_code, hashed_kgrams
from scipy.sparse import csr_matrix

from ..course.catalogue import Course, load_course
from .page import render

K = 35  # characters of filtered code: about two lines
COMMON = 0.2  # of the class: code that so many have in common is an idiom
COMMON_LEAST = 8  # students, in a small class
LEAST_SCORE = 60.0  # characters that only two have in common: about three lines more than K
MOST_PAIRS = 25
MOST_BYTES = 400_000
CONTEXT = 1  # lines around a passage


@dataclass(frozen=True)
class Passage:
    """Lines of one file in two submissions: number, text, whether it is in both."""

    file: str
    left: tuple[tuple[int, str, bool], ...]
    right: tuple[tuple[int, str, bool], ...]


@dataclass(frozen=True)
class Pair:
    """Two students. ``score``: rare characters in common; ``share``: their part of the own code of
    the student who has less of it."""

    left: str
    right: str
    score: float
    share: float
    passages: tuple[Passage, ...]

    @property
    def lines(self) -> int:
        """The left one's lines that have common code."""
        return sum(common for p in self.passages for _, _, common in p.left)


@dataclass(frozen=True)
class Likeness:
    """The pairs worth a look, the highest score first, and the scores of all pairs."""

    pairs: tuple[Pair, ...]
    students: int
    usual: tuple[float, float]  # median and the 99th percentile of all pairs


def likeness(folders: Mapping[str, Path], course: Course | None = None) -> Likeness:
    """Compare the submissions, each by its folder with the phases' folders in it."""
    course = course or load_course()
    works = {student: _files(folder, course) for student, folder in sorted(folders.items())}
    handed_in = {Path(name).parent.name for work in works.values() for name in work}
    given = _unique(_hashes(text) for text in _given(course, handed_in))
    hashes = [np.setdiff1d(_unique(map(_hashes, w.values())), given) for w in works.values()]
    students = list(works)
    if len(students) < 2 or not any(len(h) for h in hashes):
        return Likeness((), len(students), (0.0, 0.0))
    scores, own, rare = _scores(hashes)
    rows, columns = np.triu_indices(len(students), 1)
    each = scores[rows, columns]
    usual = (float(np.median(each)), float(np.percentile(each, 99)))
    order = np.lexsort((columns, rows, -each))[:MOST_PAIRS]
    pairs = []
    for a, b in zip(rows[order], columns[order], strict=True):
        if scores[a, b] < LEAST_SCORE:
            break
        left, right = students[a], students[b]
        shared = set(np.intersect1d(np.intersect1d(hashes[a], hashes[b]), rare).tolist())
        passages = _passages(works[left], works[right], shared)
        share = float(scores[a, b] / min(own[a], own[b]))
        pairs.append(Pair(left, right, float(scores[a, b]), share, passages))
    return Likeness(tuple(pairs), len(students), usual)


def _files(folder: Path, course: Course) -> dict[str, str]:
    """The Python files in the folders of the phases, by their path in the submission."""
    found = {}
    for phase in course.phases:
        for path in sorted((folder / phase.folder).glob("*.py")):
            if path.is_symlink() or not path.is_file() or path.stat().st_size > MOST_BYTES:
                continue
            found[f"{phase.folder}/{path.name}"] = path.read_text(
                encoding="utf-8", errors="replace"
            )
    return found


def _given(course: Course, folders: set[str]) -> Iterable[str]:
    """Code that is no student's own: the templates and solutions of these
    phases, and given code."""
    mine = {e.solution_path: e for e in course.exercises if e.phase.folder in folders}.values()
    paths = [p for e in mine for p in (e.template_path, e.solution_path)]
    if course.exercises:
        paths += sorted((course.exercises[0].folder / "given").glob("*.py"))
    for path in paths:
        if path.is_file():
            yield path.read_text(encoding="utf-8", errors="replace")


@functools.lru_cache(maxsize=2000)  # many hand in the same file: the template, or a copy
def _hashes(text: str) -> np.ndarray:
    """The hashes of all K characters in a row. They don't depend on how Python
    hashes in this process."""
    filtered, _ = filter_code(text, "", "python")
    return np.unique(hashed_kgrams(filtered, K).astype(np.int64))


def _unique(arrays: Iterable[np.ndarray]) -> np.ndarray:
    return np.unique(np.concatenate([np.empty(0, np.int64), *arrays]))


def _scores(hashes: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The common hashes of each pair, the hashes of each student, and the hashes that count."""
    every, columns, counts = np.unique(
        np.concatenate(hashes), return_inverse=True, return_counts=True
    )
    limit = max(COMMON_LEAST, COMMON * len(hashes))
    weights = np.where(counts > limit, 0.0, 1 / np.maximum(counts - 1, 1))
    starts = np.cumsum([0, *(len(h) for h in hashes)])
    shape = (len(hashes), len(every))
    has = csr_matrix((np.ones(len(columns)), columns, starts), shape=shape)
    weighted = csr_matrix((weights[columns], columns, starts), shape=shape)
    return (weighted @ has.T).toarray(), weighted.sum(axis=1).A1, every[weights > 0]


def _passages(
    left: Mapping[str, str], right: Mapping[str, str], shared: set[int]
) -> tuple[Passage, ...]:
    """The lines with the shared code, file by file; the two files may have different names."""
    prints = [
        {name: _fingerprint(text, shared) for name, text in work.items()} for work in (left, right)
    ]
    found = []
    for mine, a in prints[0].items():
        for other, b in prints[1].items():
            if not a.hashes & b.hashes:
                continue
            _, _, (ours, theirs) = compare_files(a, b)
            name = mine if mine == other else f"{mine} and {other}"
            found.append(Passage(name, _lines(a.raw_code, ours), _lines(b.raw_code, theirs)))
    return tuple(found)


def _fingerprint(text: str, shared: set[int]) -> CodeFingerprint:
    found = copy.copy(_all_of(text))
    found.hashes = found.hashes & shared
    return found


@functools.lru_cache(maxsize=50)  # a few megabytes each
def _all_of(text: str) -> CodeFingerprint:
    return CodeFingerprint("", K, 1, language="python", fp=io.StringIO(text))


def _lines(text: str, slices: np.ndarray) -> tuple[tuple[int, str, bool], ...]:
    """The lines with the slices, and a few lines around them. Blank lines alone are not marked."""
    starts = [0, *(m.end() for m in re.finditer("\n", text))]
    marked: set[int] = set()
    for start, end in slices.T.astype(int):
        first, last = np.searchsorted(starts, [start, max(start, end - 1)], side="right")
        marked.update(range(int(first), int(last) + 1))
    near = {n + d for n in marked for d in range(-CONTEXT, CONTEXT + 1)}
    lines = text.split("\n")
    return tuple((n, lines[n - 1], n in marked) for n in sorted(near) if 1 <= n <= len(lines))


def page(found: Likeness) -> str:
    """The pairs with their passages side by side, as HTML."""
    limits = {"common": COMMON, "least": COMMON_LEAST, "most": MOST_PAIRS}
    return render("similar.html", found=found, **limits)
