"""How long the sentences of the texts are: ``python -m scripts.readability [FILES]``.

It prints one line per file: the number of sentences, the median and the 90th percentile of words
per sentence, and the longest sentence with its line. Without FILES it reads all texts of the
project. Code, tables and formulas are left out. An inline code counts as one word, a formula as
none.

``--over N`` prints every sentence of more than N words instead. ``--kind docstring`` chooses the
texts of one kind: prose (Markdown), docstring, comment, message, or hint.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import io
import itertools
import os
import re
import statistics
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import sentencex
from markdown_it import MarkdownIt
from markdown_it.token import Token

from distlab.course.catalogue import load_course, root

ROOT = root()
MEANT, MOST = 22, 40  # words: the 90th percentile, and the longest sentence
FOLDERS = ("distlab", "given", "solutions", "scripts", "notebooks", "docs", "benchmarks")
PAGES = ("README.md", "CONTRIBUTING.md", "SECURITY.md")
LISTS = ("docs/pytorch_scenarios.md",)  # generated from a table
OPERATORS = re.compile(r"[=≈≤≥<>·×Σ⌈⌊√^+→←∇∪⋃−*|\\]|^[^\w]*$")
SUMMARY = re.compile(r"<summary>(.*?)</summary>", re.DOTALL)
UNREAD = re.compile(r"^#\s*(---|%%|type:|noqa|fmt:|for: \d|!|jupyter|ruff:)")
TELLS = {"print", "exit", "warn", "fail", "error", "add_argument", "ArgumentParser"}
MARKDOWN = MarkdownIt("commonmark").enable("table").disable("lheading")


@dataclass(frozen=True)
class Sentence:
    """A sentence, the line on which it begins, and the kind of its text."""

    text: str
    line: int
    kind: str

    @property
    def words(self) -> int:
        return sum(not OPERATORS.search(word) for word in self.text.split())


def plain(children: Iterable[Token]) -> str:
    """A paragraph without its marks, and without the words in bold that head it."""
    parts: list[str] = []
    heads = False
    for token in children:
        if token.type == "strong_open":
            heads = not parts
        elif token.type == "strong_close" and heads and parts[-1].endswith((".", "?")):
            parts.clear()
        elif token.type == "code_inline":
            parts.append("code")
        elif token.type in ("softbreak", "hardbreak"):
            parts.append("\n")
        elif token.type == "text" and token.content:
            parts.append(token.content)
    return "".join(parts)


def paragraphs(text: str) -> Iterator[tuple[int, str]]:
    """(line, text) of each paragraph of Markdown; headings, tables and code are none."""
    skipped = 0
    before = ""
    for token in MARKDOWN.parse(text):
        if token.type in ("table_open", "table_close"):
            skipped += token.nesting
        begin = token.map[0] if token.map else 0
        if token.type == "html_block":
            yield from ((begin, words) for words in SUMMARY.findall(token.content))
        elif token.type == "inline" and not skipped and before != "heading_open":
            lines = token.content.splitlines()
            if not any(line.startswith("===") for line in lines):  # a table of reStructuredText
                yield begin, plain(token.children or ())
        before = token.type


def sentences_in(text: str, line: int, kind: str) -> Iterator[Sentence]:
    """The sentences of Markdown that begins on ``line``."""
    for begin, paragraph in paragraphs(text):
        at = line + begin
        for part in sentencex.segment("en", paragraph):
            sentence = Sentence(" ".join(part.split()), at + leading(part), kind)
            at += part.count("\n")
            if sentence.words:
                yield sentence


def leading(part: str) -> int:
    """How many lines end before a part's first word."""
    return part[: len(part) - len(part.lstrip())].count("\n")


def docstrings(tree: ast.AST) -> Iterator[Sentence]:
    """The sentences of all docstrings of a program."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(tree):
        if isinstance(node, kinds) and (text := ast.get_docstring(node, clean=False)):
            clean = inspect.cleandoc(text).replace("``", "`")
            yield from sentences_in(clean, node.body[0].lineno, "docstring")


def comments(text: str) -> Iterator[Sentence]:
    """The sentences of comments: lines that follow each other are one text, a step begins anew."""
    run: list[str] = []
    begin = last = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type != tokenize.COMMENT or UNREAD.match(token.string):
            continue
        alone = not token.line[: token.start[1]].strip()
        words = token.string.lstrip("#").strip()
        step = re.match(r"Step \d+: ", words)
        if not (alone and token.start[0] == last + 1) or step:
            yield from sentences_in("\n".join(run), begin, "comment")
            run, begin = [], token.start[0]
        run.append(words[step.end() :] if step else words)
        last = token.start[0] if alone else 0
    yield from sentences_in("\n".join(run), begin, "comment")


def called(node: ast.Call) -> str:
    """The last part of the name of what is called."""
    return getattr(node.func, "attr", None) or getattr(node.func, "id", "")


def messages(tree: ast.AST) -> Iterator[Sentence]:
    """The sentences that a program says: its exceptions, prints and helps; a value is a word."""
    raised = [n.exc for n in ast.walk(tree) if isinstance(n, ast.Raise) and n.exc]
    told = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and called(n) in TELLS]
    for call in (*raised, *told):
        inner = {
            id(part) for f in ast.walk(call) if isinstance(f, ast.JoinedStr) for part in f.values
        }
        for node in ast.walk(call):
            text = ""
            if isinstance(node, ast.JoinedStr):
                text = "".join(
                    getattr(v, "value", 0) if isinstance(v, ast.Constant) else "value"
                    for v in node.values
                )
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                text = "" if id(node) in inner else node.value
            if len(text.split()) > 3:
                for part in sentencex.segment("en", text):
                    yield Sentence(" ".join(part.split()), node.lineno, "message")


def hints(text: str, phase: int | None = None) -> Iterator[Sentence]:
    """The sentences of the map's hints, of one phase or of all."""
    lines = text.splitlines()
    for exercise in load_course().exercises:
        if phase in (None, exercise.phase.number):
            for hint in exercise.hints:
                quoted = hint.replace("\\", "\\\\").replace('"', '\\"')[:30]
                line = next((n for n, each in enumerate(lines, 1) if quoted in each), 0)
                yield from (
                    Sentence(" ".join(part.split()), line, "hint")
                    for part in sentencex.segment("en", hint)
                )


def sentences(path: Path) -> list[Sentence]:
    """All sentences of a file: Markdown, Python, or the map."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".toml":
        return [*hints(text)]
    if path.suffix == ".md":
        return [*sentences_in(text, 1, "prose")]
    tree = ast.parse(text)
    return [*docstrings(tree), *comments(text), *messages(tree)]


def all_texts() -> list[Path]:
    """Every file that a reader of the project meets; generated ones are left out."""
    inside = [
        p for folder in FOLDERS for p in (ROOT / folder).rglob("*") if p.suffix in (".md", ".py")
    ]
    phases = [ROOT / phase.folder / "guidelines.md" for phase in load_course().phases]
    checks = [*(ROOT / "tests").glob("phase[1-9]/test_*.py")]
    pages = [ROOT / page for page in PAGES]
    found = [*phases, ROOT / "course.toml", *pages, *sorted(inside), *sorted(checks)]
    return [path for path in found if path.relative_to(ROOT).as_posix() not in LISTS]


def p90(counts: list[int]) -> float:
    """The 90th percentile."""
    return statistics.quantiles(counts, n=10, method="inclusive")[8] if counts[1:] else counts[0]


def row(name: str, found: list[Sentence]) -> str:
    """A file's line in the table."""
    counts = [sentence.words for sentence in found]
    longest = max(found, key=lambda sentence: sentence.words)
    return (
        f"{name:60}{len(found):6}{statistics.median(counts):8.0f}{p90(counts):8.0f}"
        f"{longest.words:8}  line {longest.line}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="How long the sentences of the texts are.")
    parser.add_argument("files", nargs="*", type=Path, help="Markdown, Python, or course.toml")
    parser.add_argument("--over", type=int, help="print the sentences of more words than this")
    parser.add_argument("--kind", help="prose, docstring, comment, message or hint")
    options = parser.parse_args()
    every: list[Sentence] = []
    if options.over is None:
        print(f"{'file':60}{'sent.':>6}{'median':>8}{'p90':>8}{'longest':>8}")
    for path in options.files or all_texts():
        found = [s for s in sentences(path) if options.kind in (None, s.kind)]
        name = os.path.relpath(path, ROOT)
        if options.over is None and found:
            print(row(name, found))
        for sentence in found:
            if options.over is not None and sentence.words > options.over:
                print(f"{name}:{sentence.line}: {sentence.words} words: {sentence.text}")
        every += found
    if options.over is None:
        by_kind = sorted(every, key=lambda sentence: sentence.kind)
        for kind, group in itertools.groupby(by_kind, key=lambda sentence: sentence.kind):
            print(row(f"all: {kind}", [*group]))


if __name__ == "__main__":
    main()
