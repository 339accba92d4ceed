"""``distlab simulate``: predict how training scales; its options are the fields of ``Plan``."""

from __future__ import annotations

import argparse
from dataclasses import Field, fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

from rich.console import Console

from ..simulate.plan import Plan
from ..simulate.report import load_plan, run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    types = get_type_hints(Plan)
    for field in fields(Plan):
        parser.add_argument(f"--{field.name.replace('_', '-')}", **_argument(field, types))
    parser.add_argument("--config", type=Path, help="a YAML file with these options")
    parser.add_argument("--out", type=Path, default=Path(".distlab/simulate"), help="folder")


def _argument(field: Field[Any], types: dict[str, Any]) -> dict[str, Any]:
    """The arguments for argparse that describe a field. Its default is None, because
    a YAML file may set it."""
    kind, default = types[field.name], field.default
    if kind is bool:
        return {"action": "store_true", "default": None, "help": field.metadata["help"]}
    shown = " ".join(map(str, default)) if isinstance(default, tuple) else default
    return {
        "type": next(each for each in (kind, *get_args(kind)) if each in (int, float, str)),
        "nargs": "+" if isinstance(default, tuple) else None,
        "metavar": field.metadata["metavar"],
        "help": field.metadata["help"] + (f" ({shown})" if shown else ""),
    }


def main(options: argparse.Namespace, out: Console) -> int:
    """Predict step time, efficiency and memory for several numbers of GPUs."""
    given = {field.name: getattr(options, field.name) for field in fields(Plan)}
    return run(load_plan(options.config, given), options.out, out)
