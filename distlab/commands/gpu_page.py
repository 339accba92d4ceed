"""The page of ``distlab doctor --cuda``: a record for human readers, to be sent in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

GIB = 2**30


def page(data: dict[str, Any]) -> str:
    """The record as markdown: where it ran, the outcome of each part, and the
    tables that parts made."""
    lines = [
        f"# The solutions on {len(data['gpus'])} x {data['gpus'][0]}",
        "",
        "Written by `distlab doctor --cuda`. Open a pull request that adds this page and the JSON "
        "file beside it, whatever they say: a part that failed is what the project wants to know.",
        "",
        *_machine(data),
        "",
        *_table(
            ("part", "backend", "status", "seconds", "what came of it"),
            [
                (p["name"], p["backend"], p["status"], f"{p['seconds']:.0f}", p["message"])
                for p in data["parts"]
            ],
        ),
    ]
    if not data["complete"]:
        lines += ["", "The run was interrupted: parts are missing."]
    for part in data["parts"]:
        lines += _details(part)
    return "\n".join(lines) + "\n"


def _machine(data: dict[str, Any]) -> Iterator[str]:
    yield f"- driver {data['driver']}, which lists these GPUs:"
    for gpu in data["machine"]:
        memory = f"{gpu['memory_bytes'] / GIB:.1f} GiB"
        yield f"  - {gpu['name']}, {memory}, NVLink connections that are up: {gpu['nvlinks']}"
    versions = (f"{name} {data[name.lower()]}" for name in ("torch", "CUDA", "NCCL", "Python"))
    yield f"- {', '.join(versions)}; {data['cores']} cores"
    yield f"- commit {data['commit'] or 'unknown'}, {data['date']}"


def _details(part: dict[str, Any]) -> Iterator[str]:
    """The tables of a part, its failures, and its last output if it broke."""
    result = part["result"]
    title = f"{part['name']} ({part['backend']})"
    if "table" in result:
        yield from ("", f"## {title}", "")
        if result.get("note"):
            yield from (result["note"], "")
        yield from _table(result["header"], result["table"])
    if result.get("failures"):
        yield from ("", f"## {title}: failures", "")
        header = ("exercise", "check", "verdict", "message")
        yield from _table(header, [[f[key] for key in header] for f in result["failures"]])
    if result.get("said"):
        yield from ("", f"## {title}: what it said last", "", "```text", result["said"], "```")


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield "| " + " | ".join(header) + " |"
    yield "|" + " --- |" * len(header)
    for row in rows:
        yield "| " + " | ".join(str(cell).replace("|", "\\|").split("\n")[0] for cell in row) + " |"
