"""The toolkit's rooms and what their imports must keep to, read with ``ast``."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# a room imports from the rooms before it
ROOMS = (
    "host",
    "observe",
    "course",
    "explain",
    "ranks",
    "hardware",
    "virtual",
    "sandbox",
    "picture",
    "player",
    "netcluster",
    "reference",
    "grading",
    "simulate",
    "labs",
    "classes",
    "commands",
    "cli",
)
ENTRIES = ("__init__", "__main__", "record")  # beside the rooms; nothing imports them
REASON = "start-up time"  # the comment that a late import needs, on its line or above
LINES = 300  # of a file
FUNCTION = 50  # lines of a function


@dataclass(frozen=True)
class Import:
    """One imported module of the package, and where it is imported."""

    path: Path
    source: str  # module names with dots
    target: str
    line: int
    text: str
    late: bool  # inside a function
    typing: bool  # under ``if TYPE_CHECKING``
    explained: bool

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.text}"


def modules(home: Path) -> dict[str, Path]:
    """Every module of the package in ``home`` by its dotted name, a package by its own."""
    found = {}
    for path in sorted(home.rglob("*.py")):
        parts = [home.name, *path.relative_to(home).with_suffix("").parts]
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(home: Path) -> list[Import]:
    """All imports of the package's own modules, wherever they stand."""
    known = modules(home)
    return [each for name in known for each in _imports_of(name, home, known)]


_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


def _imports_of(name: str, home: Path, known: dict[str, Path]) -> Iterator[Import]:
    path = known[name]
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node, around in _nodes(ast.parse(text), ()):
        for target in targets(node, package, known):
            yield Import(
                path=path.relative_to(home.parent),
                source=name,
                target=target,
                line=node.lineno,
                text=lines[node.lineno - 1].strip(),
                late=any(isinstance(n, _FUNCTIONS) for n in around),
                typing=any(isinstance(n, ast.If) and _is_typing(n) for n in around),
                explained=_explained(lines, node),
            )


def _nodes(
    node: ast.AST, around: tuple[ast.AST, ...]
) -> Iterator[tuple[ast.Import | ast.ImportFrom, tuple[ast.AST, ...]]]:
    """Import statements, each with the nodes that it stands in."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.Import, ast.ImportFrom)):
            yield child, (*around, node)
        else:
            yield from _nodes(child, (*around, node))


def _is_typing(node: ast.If) -> bool:
    return "TYPE_CHECKING" in ast.unparse(node.test)


def targets(node: ast.Import | ast.ImportFrom, package: str, known: dict[str, Path]) -> list[str]:
    """The modules in ``known`` that a statement in a module of ``package`` imports."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names if alias.name in known]
    base = package.split(".")
    base = base[: len(base) - node.level + 1] if node.level else []
    name = ".".join([*base, *([node.module] if node.module else [])])
    inner = [f"{name}.{alias.name}" for alias in node.names]
    found = (each if each in known else name for each in inner)
    return [each for each in dict.fromkeys(found) if each in known]


def _explained(lines: list[str], node: ast.stmt) -> bool:
    """Whether a comment gives the reason: on the line, or above the imports that it is one of."""
    if REASON in lines[node.lineno - 1].partition("#")[2]:
        return True
    above = (line.strip() for line in reversed(lines[: node.lineno - 1]))
    first = next((line for line in above if not line.startswith(("from ", "import "))), "")
    return first.startswith("#") and REASON in first


def room(module: str) -> str:
    """The room that a module is in; the module itself where it lies at the top."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def strangers(home: Path, rooms: tuple[str, ...] = ROOMS) -> list[str]:
    """Files and folders beside the rooms."""
    return [
        f"{path.relative_to(home.parent)}: not a room"
        for name, path in modules(home).items()
        if room(name) not in (*rooms, *ENTRIES)
    ]


def upward(found: list[Import], rooms: tuple[str, ...] = ROOMS) -> list[str]:
    """Imports from a later room, late ones and those for types as well."""
    order = {name: place for place, name in enumerate(rooms)}
    last = len(rooms)
    return [
        f"{each}  ({room(each.source)} comes before {room(each.target)})"
        for each in found
        if room(each.source) != room(each.target)
        and order.get(room(each.source), last) <= order.get(room(each.target), last)
    ]


def circles(found: list[Import]) -> list[str]:
    """Modules that import each other, also over others, and also late."""
    after: dict[str, set[str]] = {}
    for each in found:
        after.setdefault(each.source, set()).add(each.target)

    def reached(begin: str) -> set[str]:
        seen, left = set[str](), [*after.get(begin, ())]
        while left:
            name = left.pop()
            if name not in seen:
                seen.add(name)
                left += after.get(name, ())
        return seen

    inside = {name: reached(name) for name in after}
    return [
        f"{each}  (a circle: {each.target} imports {each.source}, perhaps over others)"
        for each in found
        if each.source in inside.get(each.target, ())
    ]


def for_types(found: list[Import]) -> list[str]:
    """Imports of the package that only a type checker sees."""
    return [str(each) for each in found if each.typing]


def unexplained(found: list[Import]) -> list[str]:
    """Imports inside functions whose comment does not say that they save start-up time."""
    return [str(each) for each in found if each.late and not each.explained]


def too_long(home: Path) -> list[str]:
    """Files over 300 lines and functions over 50."""
    problems = []
    for path in sorted(home.rglob("*.py")):
        text, name = path.read_text(encoding="utf-8"), path.relative_to(home.parent)
        count = len(text.splitlines())
        if count > LINES:
            problems.append(f"{name}: {count} lines, at most {LINES}")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                size = (node.end_lineno or 0) - node.lineno + 1
                if size > FUNCTION:
                    where = f"{name}:{node.lineno}: {node.name}"
                    problems.append(f"{where} has {size} lines, at most {FUNCTION}")
    return problems
