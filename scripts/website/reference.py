"""The toolkit's reference, from docstrings and from the command line's own help.

Modules are read, not imported. Docstrings of the course are plain text with code in backticks.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import os
import re
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from distlab import cli

Definition = ast.FunctionDef | ast.ClassDef
WIDTH = "88"
# what a check is written with: the modules, all that is public in them
CHECKS = {
    "Writing checks": "distlab/grading/checks.py",
    "What a rank knows": "distlab/ranks/context.py",
    "What ranks did": "distlab/observe/log.py",
}
FIXTURES = "distlab/grading/plugin.py"


def pages(root: Path) -> dict[str, str]:
    """The text of the reference's pages, by name."""
    return {
        "reference/given": given(root),
        "reference/checks": checks(root),
        "reference/commands": commands(),
    }


def parsed(path: Path) -> ast.Module:
    """The module in a file."""
    return ast.parse(path.read_text(encoding="utf-8"))


def given(root: Path) -> str:
    """What templates and solutions import and nobody writes."""
    package = root / "given"
    text = ["# Given code\n", documented(parsed(package / "__init__.py"))]
    for path in sorted(package.glob("[a-z]*.py")):
        text += [f"## given.{path.stem}\n", *module(path)]
    return "\n".join(text)


def checks(root: Path) -> str:
    """What checks are written with: fixtures, expectations, a rank's context, logs."""
    text = ["# What checks are made of\n", "## Fixtures\n"]
    for node in parsed(root / FIXTURES).body:
        if isinstance(node, ast.FunctionDef) and "fixture" in map(_name, node.decorator_list):
            text += [f"### {node.name}\n", documented(node)]
    for title, path in CHECKS.items():
        text += [f"## {title}\n", *module(root / path)]
    return "\n".join(text)


def _name(node: ast.expr) -> str:
    """The last name of a decorator."""
    return ast.unparse(node).partition("(")[0].rpartition(".")[2]


def module(path: Path) -> Iterator[str]:
    """The docstring of a module, and of all in it that is public."""
    tree = parsed(path)
    yield documented(tree)
    for node in tree.body:
        if isinstance(node, Definition) and not node.name.startswith("_"):
            yield f"### {node.name}\n"
            yield f"```python\n{signature(node)}\n```\n"
            yield documented(node)
            if isinstance(node, ast.ClassDef):
                yield from methods(node)


def methods(node: ast.ClassDef) -> Iterator[str]:
    """The public methods of a class."""
    for method in node.body:
        if isinstance(method, ast.FunctionDef) and not method.name.startswith("_"):
            yield f"#### {node.name}.{method.name}\n"
            yield f"```python\n{signature(method)}\n```\n"
            yield documented(method)


def signature(node: Definition) -> str:
    """How it begins; of a class also its fields."""
    if isinstance(node, ast.FunctionDef):
        result = f" -> {ast.unparse(node.returns)}" if node.returns else ""
        return f"def {node.name}({ast.unparse(node.args)}){result}"
    bases = ", ".join(map(ast.unparse, node.bases))
    fields = [
        f"    {ast.unparse(each)}"
        for each in node.body
        if isinstance(each, ast.AnnAssign) and not ast.unparse(each.target).startswith("_")
    ]
    return "\n".join([f"class {node.name}({bases})" if bases else f"class {node.name}", *fields])


def documented(node: Definition | ast.Module) -> str:
    """A docstring as Markdown."""
    text = inspect.cleandoc(ast.get_docstring(node) or "")
    return re.sub(r"(`+.*?`+)|<(?=\w)", lambda found: found[1] or "&lt;", text) + "\n"


def commands() -> str:
    """The help of every command."""
    text = ["# Commands\n", "What `distlab COMMAND --help` prints.\n"]
    with mock.patch.dict(os.environ, COLUMNS=WIDTH, NO_COLOR="1"):
        # a parser has the options of one command that imports torch, so each is asked for its own
        names = [name for name, _ in subcommands(cli._parser(""))]
        for name in names:
            parsers = dict(subcommands(cli._parser(name)))
            for title, parser in everything(f"distlab {name}", parsers[name]):
                text.append(f"## {title}\n\n```text\n{parser.format_help().rstrip()}\n```\n")
    return "\n".join(text)


def everything(
    title: str, parser: argparse.ArgumentParser
) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """A command and the commands below it."""
    yield title, parser
    for name, below in subcommands(parser):
        yield from everything(f"{title} {name}", below)


def subcommands(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """The commands of a parser."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield from action.choices.items()
