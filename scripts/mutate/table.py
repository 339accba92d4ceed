"""The committed tables: how many changes were tried, and why each survivor breaks no promise.

``tests/mutants/table/phase1_trainer.toml`` for the exercises of ``trainer.py``:

    ["1.4"]
    tried = 61
    changes = "0123456789ab"          # a hash: another one means that the solution has changed
    survivors = [
        ["average_gradients: … -> … in …", "why no promise is broken"],
    ]
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from distlab.course.catalogue import Exercise, root

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FOLDER = root() / "tests" / "mutants" / "table"


@dataclass
class Entry:
    """One exercise: ``survivors`` maps the name of a change to the reason (empty: unexplained)."""

    tried: int = 0
    changes: str = ""
    survivors: dict[str, str] = field(default_factory=dict)

    @property
    def unexplained(self) -> list[str]:
        """Survivors without a reason."""
        return [name for name, reason in self.survivors.items() if not reason.strip()]


def path_of(exercise: Exercise) -> Path:
    """The table that the exercise is in: one for each solution file."""
    return FOLDER / f"phase{exercise.phase.number}_{exercise.file}.toml"


def read(exercise: Exercise) -> dict[str, Entry]:
    """The table that the exercise is in; empty where there is none yet."""
    path = path_of(exercise)
    if not path.is_file():
        return {}
    data: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    return {name: Entry(e["tried"], e["changes"], dict(e["survivors"])) for name, e in data.items()}


def write(exercise: Exercise, entry: Entry) -> None:
    """Write the exercise's entry into its table; exercises in the order of their numbers."""
    entries = read(exercise) | {exercise.id: entry}
    lines = ["# Changes that pass all checks, and why they break no promise: see scripts/mutate"]
    for name in sorted(entries, key=lambda e: int(e.split(".")[1])):
        entry = entries[name]
        lines += ["", f'["{name}"]', f"tried = {entry.tried}"]
        lines += [f"changes = {_quoted(entry.changes)}", "survivors = ["]
        for change, reason in entry.survivors.items():
            lines += [f"    [{_quoted(change)},", f"     {_quoted(reason)}],"]
        lines.append("]")
    path_of(exercise).parent.mkdir(exist_ok=True)
    path_of(exercise).write_text("\n".join(lines) + "\n", encoding="utf-8")


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
