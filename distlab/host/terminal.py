"""Prose in the terminal: lines break between words, and a command to copy stays whole."""

from __future__ import annotations

import io
import sys
import textwrap
from pathlib import Path
from typing import IO

from rich.console import Console
from rich.text import Text


def say(out: Console, text: str, style: str = "", *, label: str = "", indent: str = "") -> None:
    """Print ``text`` after ``label``, wrapped at words to the terminal's width.

    Lines after the first are indented further. A word that is longer than a line, such as a path,
    stays whole. Where the output is no terminal, each line of ``text`` stays one line.
    """
    for number, line in enumerate(text.split("\n")):
        first = number == 0
        own = line[: len(line) - len(line.lstrip())]
        begin = indent if first else f"{indent}  {own}"
        body = (label if first else "") + line.lstrip()
        if out.is_terminal:
            body = textwrap.fill(
                body,
                out.width,
                initial_indent=begin,
                subsequent_indent=f"{indent}  {own}" + ("" if first else "  "),
                break_long_words=False,
                break_on_hyphens=False,
            )
        else:
            body = begin + body
        shown = Text(body, style)
        if first and label:
            shown.stylize("cyan", len(begin), len(begin) + len(label))
        out.print(shown, soft_wrap=True)


def command(out: Console, label: str, text: str) -> None:
    """Print a command to copy: one line, however long it is."""
    out.print(Text(label + text), soft_wrap=True)


def console(file: IO[str] | None = None) -> Console:
    """A console that is plain when its output is not a terminal, and can print any text."""
    for stream in (sys.stdout, sys.stderr, file):
        if isinstance(stream, io.TextIOWrapper):  # shows what it can't encode as an escape
            stream.reconfigure(errors="backslashreplace")
    plain = Console(file=file)
    return plain if plain.is_terminal else Console(file=file, width=100, color_system=None)


def short(path: Path) -> str:
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
