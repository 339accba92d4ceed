"""``distlab lab``: find the bug, and the other kinds of labs."""

from __future__ import annotations

import argparse
from types import ModuleType

from rich.console import Console

from ..labs.debug import command as debug
from ..labs.review import command as review
from ..labs.written import command as written
from . import lab_map

# kinds of labs, with ``add_arguments`` and ``main`` of their own
KINDS: dict[str, tuple[str, ModuleType]] = {
    "debug": ("find the bug in a program, and mend it", debug),
    "tests": ("write checks that wrong implementations fail", written),
    "review": ("approve a change, or find its defect", review),
    "list": ("all labs, with your points", lab_map),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of all kinds."""
    kinds = parser.add_subparsers(dest="kind", title="kinds", required=True)
    for name, (about, module) in KINDS.items():
        module.add_arguments(kinds.add_parser(name, help=about))


def main(options: argparse.Namespace, out: Console) -> int:
    """Do what the kind's options ask for; the exit status."""
    return int(KINDS[options.kind][1].main(options, out))
