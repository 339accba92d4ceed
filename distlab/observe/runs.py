"""Recorded runs as files: what each rank communicated, with the values that it passed in.

A run of several ranks is one file (``write_run``), or a folder with a file per rank, which each
rank of any program writes by itself:

    with recorded("runs/today"):  # in every process that torchrun has started
        train()

A value is what went in, so an operator that sums in another order shows at the next communication.
Times are left out: they are others in every run.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from .lines import source_line
from .log import Event
from .recorder import Ledger

FORMAT = 1
KEPT = ("op", "group", "peer", "numel", "dtype", "payload", "tag", "group_name", "region", "value")
NEEDED = {"op": str, "group": list, "numel": int, "dtype": str, "payload": int, "line": str}


@dataclass(frozen=True)
class RankRun:
    """The communications of one rank, in order, and the line of each."""

    rank: int
    events: list[Event]


def write_run(path: Path, ranks: Sequence[tuple[int, Sequence[Event]]], title: str) -> Path:
    """Write the events of these ranks as one file."""
    told = [{"rank": rank, "events": [_told(event) for event in events]} for rank, events in ranks]
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = {"distlab_run": FORMAT, "title": title, "ranks": told}
    path.write_text(json.dumps(whole), encoding="utf-8")
    return path


@contextlib.contextmanager
def recorded(folder: str | Path) -> Iterator[None]:
    """Record what this process communicates inside, and write it to ``folder`` as its rank's file.

    The process group may be made inside; it must still be there at the end, or nothing is written.
    """
    ledger = Ledger()
    ledger.values = True
    with ledger:
        try:
            yield
        finally:  # a run that fails is one to be compared
            if dist.is_initialized():
                rank = dist.get_rank()
                write_run(Path(folder) / f"rank-{rank}.json", [(rank, ledger.events)], "")


def read_run(path: Path) -> list[RankRun]:
    """The ranks of a run, from its file or from the files of a folder.

    ValueError with one line that names the file if it is not a recorded run.
    """
    files = sorted(path.glob("*.json")) if path.is_dir() else [path]
    found = {run.rank: run for file in files for run in _read(file)}
    if not found:
        raise ValueError(f"{path} has no recorded rank: write one with distlab trace --record FILE")
    return [found[rank] for rank in sorted(found)]


def _told(event: Event) -> dict[str, Any]:
    return {name: getattr(event, name) for name in KEPT} | {"line": source_line(event.line)}


def _read(file: Path) -> list[RankRun]:
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(data, dict) or "distlab_run" not in data:
            raise ValueError("no run was recorded there")
        if data["distlab_run"] != FORMAT:
            raise ValueError(f"it has format {data['distlab_run']}, this version reads {FORMAT}")
        return [
            RankRun(
                int(each["rank"]), [_event(fields, k) for k, fields in enumerate(each["events"])]
            )
            for each in data["ranks"]
        ]
    except OSError as error:
        raise ValueError(f"{file} can't be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        reason = f"there is no {error}" if isinstance(error, KeyError) else error
        raise ValueError(f"{file} is not a recorded run: {reason}") from None


def _event(fields: dict[str, Any], index: int) -> Event:
    for name, kind in NEEDED.items():
        if not isinstance(fields[name], kind):
            raise ValueError(f"{name} of a communication is {fields[name]!r}")
    value = fields.get("value")
    if value is not None and not {"digest", "first", "sum"} <= {*value}:
        raise ValueError(f"the value of a communication is {value!r}")
    own: dict[str, Any] = {n: fields.get(n, getattr(Event, n, None)) for n in KEPT}
    own |= {"group": tuple(own["group"]), "line": fields["line"], "index": index}
    return Event(**own, sent=0, received=0, start=0.0)
