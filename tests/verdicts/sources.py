"""The files that a test rests on: what its own files import or name, over any number of files.

Three kinds of names count: imports (late ones as well), modules in strings (programs that are
started, ``impl.module("buckets")``), and data in strings (``root() / "clusters"``). Names in
docstrings and messages do not. A name too many costs a test that nobody needed; a name too few
would hide a test that somebody needs. So a string that may be a name is one.
"""

from __future__ import annotations

import ast
import hashlib
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.distlab import rooms

PACKAGES = ("distlab", "given", "solutions", "tests", "scripts", "benchmarks")
IN_PARTS = ("course.toml", "pyproject.toml")  # a test rests on its own part of them
LOCAL = (".git", ".distlab", ".venv", "build")  # of one checkout
FOR_READERS = (".md", ".svg", ".png")
_NAME = re.compile(r"[\w-][\w./-]*|\.\w+")  # no absolute path
_MODULE = re.compile(rf"\b(?:{'|'.join(PACKAGES)})(?:\.\w+)+")


class Sources:
    """The course's files as they are now; each is read once."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._modules: dict[str, Path] = {}
        for package in PACKAGES:
            self._modules |= rooms.modules(root / package)
        self._names = {path: name for name, path in self._modules.items()}
        self._solved: dict[str, list[Path]] = {}
        for path in sorted((root / "solutions").glob("*/*.py")):
            self._solved.setdefault(path.stem, []).append(path)
        self._read: dict[Path, tuple[int, int]] = {}
        self._digests: dict[Path, str] = {}
        self._entries: dict[Path, tuple[str, str]] = {}
        self._named: dict[Path, frozenset[Path]] = {}

    def rests_on(self, begin: Iterable[Path], words: Iterable[str] = ()) -> frozenset[Path]:
        """These files and all that they rest on. ``words``: strings that name some, as in them."""
        found, left = set[Path](), [*begin]
        left += (path for word in words for path in self._in_string(word, self.root))
        while left:
            path = left.pop()
            if path not in found:
                found.add(path)
                left += self.named(path)
        return frozenset(found)

    def named(self, path: Path) -> frozenset[Path]:
        """The files that one file names."""
        self._look(path)
        return self._named[path]

    def digest(self, path: Path) -> str:
        """A hash of the file's bytes; of a program of the toolkit, without docstrings and comments.

        A check may read a docstring of a solution, and a wrong implementation replaces text.
        """
        self._look(path)
        return self._digests[path]

    def entry(self, path: Path) -> tuple[str, str]:
        """The file's name in the course, and its digest."""
        if path not in self._entries:
            self._entries[path] = str(path.relative_to(self.root)), self.digest(path)
        return self._entries[path]

    def unchanged(self, paths: Iterable[Path]) -> bool:
        """Whether these files are still those that were read."""
        return all(path.is_file() and self._read.get(path) == _stamp(path) for path in paths)

    def _look(self, path: Path) -> None:
        if path in self._read:
            return
        self._read[path] = _stamp(path)
        content = path.read_bytes()
        self._named[path] = frozenset()
        if path.suffix == ".py":
            tree = ast.parse(content)
            _drop_docstrings(tree)
            self._named[path] = frozenset(self._in_program(path, tree))
            if path.is_relative_to(self.root / "distlab"):
                content = ast.dump(tree).encode()
        self._digests[path] = hashlib.sha256(content).hexdigest()

    def _in_program(self, path: Path, tree: ast.Module) -> Iterator[Path]:
        name = self._names.get(path, "")
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        parts = package.split(".")
        for end in range(1, len(parts) + 1):  # a package runs before what is in it
            yield from self._module(".".join(parts[:end]))
        for node in ast.walk(tree):
            if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
                for part in (node.left, node.right):
                    if isinstance(part, ast.Constant) and isinstance(part.value, str):
                        yield from self._data(part.value)
            elif isinstance(node, ast.Import | ast.ImportFrom):
                yield from self._imported(node, package)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield from self._in_string(node.value, path)

    def _imported(self, node: ast.Import | ast.ImportFrom, package: str) -> Iterator[Path]:
        targets = rooms.targets(node, package, self._modules)
        yield from (self._modules[target] for target in targets)
        if isinstance(node, ast.ImportFrom) and node.level and not targets:
            # an alternative: it is put beside solutions
            for name in [node.module] if node.module else [alias.name for alias in node.names]:
                yield from self._solutions(name)

    def _in_string(self, text: str, path: Path) -> Iterator[Path]:
        toolkit = path.is_relative_to(self.root / "distlab")  # it starts modules, and no texts
        for name in _MODULE.findall(text):
            if name == text or not toolkit:
                yield from self._module(name)
        if not _may_name(text):
            return
        if not toolkit:
            yield from self._solutions(text)
        beside = path.parent / text
        if beside.suffix and beside.is_file():
            yield beside
        elif "/" in text:
            yield from self._data(text)

    def _data(self, text: str) -> Iterator[Path]:
        """A file or a folder of data, without programs, and texts and pictures for readers."""
        below = self.root / text
        if not _may_name(text) or text in IN_PARTS or text.partition("/")[0] in LOCAL:
            return
        if below.is_dir() and text.partition("/")[0] in PACKAGES:
            return
        for each in sorted(below.rglob("*")) if below.is_dir() else [below]:
            if each.is_file() and each.suffix not in (".py", ".pyc", *FOR_READERS):
                yield each

    def _module(self, name: str) -> Iterator[Path]:
        """The module of this name, or the one that it is a name in."""
        for known in (name, name.rpartition(".")[0]):
            if known in self._modules:
                yield self._modules[known]
                return

    def _solutions(self, text: str) -> Iterator[Path]:
        """The solutions' modules of this name, of any phase."""
        yield from self._solved.get(text.rpartition(".")[2], ())


def _may_name(text: str) -> bool:
    """Whether it can be a module or a file of the course."""
    return len(text) < 100 and ".." not in text and _NAME.fullmatch(text) is not None


def _stamp(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_mtime_ns, found.st_size


def _drop_docstrings(tree: ast.Module) -> None:
    owners = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(tree):
        if isinstance(node, owners) and ast.get_docstring(node, clean=False) is not None:
            node.body[:1] = [ast.Pass()]
