"""``docs/pytorch_scenarios.md`` from its table: PyTorch's distributed tests beside the course's.

python -m scripts.pytorch_scenarios
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

DOCS = Path(__file__).resolve().parents[1] / "docs"
TABLE, PAGE = DOCS / "pytorch_scenarios.toml", DOCS / "pytorch_scenarios.md"
VERDICTS = ("same", "limit", "not applicable")
FEW = 6  # names that are written out in the page; the table has all
INTRODUCTION = """# PyTorch's own distributed tests

Written by `python -m scripts.pytorch_scenarios` from
[`pytorch_scenarios.toml`](pytorch_scenarios.toml), which has every name.

PyTorch tests its distributed parts with more than a thousand tests. They show the situations that
users have met. This page goes through them and gives each scenario a verdict:

- **same**: the scenario is ported, in own words, to `tests/pytorch_scenarios/`. There it runs on
  the solution and on torch's implementation in the same ranks (gloo, CPU), and the results are
  compared. That was done with torch 2.15 and 2.8. A scenario in which 2.8 gives another answer is
  skipped there.
- **limit**: the solution does something else on purpose, and a docstring says so. The page quotes
  it.
- **not applicable**: CUDA and NCCL, RPC, DTensor layouts, private options, PyTorch's own
  collectives and torchrun's own agent.

Names are those of the versions below. `distributed_test.py` is the file of release 2.9.1. No copy
of that release could be read of the other files. So each has the commit whose names are listed.
Most of these commits are a public copy of the main branch after 2.9. A name stands for all its
parameters. Files that are not listed were not read.
"""


def load() -> dict[str, Any]:
    """The table."""
    return tomllib.loads(TABLE.read_text(encoding="utf-8"))


def answer(row: dict[str, Any]) -> str:
    """The text of the last column."""
    if row["verdict"] == "same":
        return "<br>".join(f"`{name}`" for name in row["ported"])
    if row["verdict"] == "limit":
        return f"“{row['says']}”"
    return str(row["reason"])


def names(row: dict[str, Any]) -> str:
    """The tests' names; of many the first ones."""
    shown = [f"`{name}`" for name in row["names"][:FEW]]
    more = len(row["names"]) - len(shown)
    return "<br>".join([*shown, *([f"and {more} more"] if more else [])])


def section(file: str, at: str, rows: list[dict[str, Any]]) -> str:
    """One file of PyTorch's."""
    lines = [f"## {file.removeprefix('test/distributed/')}", "", f"`{file}` at `{at}`", ""]
    lines += ["| tests | scenario | exercises | verdict | where |", "|---|---|---|---|---|"]
    for row in rows:
        exercises = ", ".join(row.get("exercises", []))
        cells = (names(row), row["scenario"], exercises, row["verdict"], answer(row))
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def page(table: dict[str, Any]) -> str:
    """The whole page."""
    rows, tests = Counter[str](), Counter[str]()
    for row in table["row"]:
        rows[row["verdict"]] += 1
        tests[row["verdict"]] += len(row["names"])
    total = ["| verdict | scenarios | PyTorch's tests |", "|---|---|---|"]
    total += [f"| {v} | {rows[v]} | {tests[v]} |" for v in VERDICTS]
    total.append(f"| together | {rows.total()} | {tests.total()} |")
    parts = [INTRODUCTION, "\n".join(total) + "\n"]
    for file, at in table["sources"].items():
        parts.append(section(file, at, [row for row in table["row"] if row["file"] == file]))
    return "\n".join(parts)


def main() -> None:
    """Write the page."""
    PAGE.write_text(page(load()), encoding="utf-8")


if __name__ == "__main__":
    main()
