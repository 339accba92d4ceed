"""Records on disk: JSON with a hash over all of it, so that a changed record is noticed."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any


def digest(data: object) -> str:
    """SHA-256 of data's canonical JSON."""
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def write(path: Path, data: dict[str, Any]) -> None:
    """Write a record with its hash; its folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(data | {"hash": digest(data)}, indent=1)
    path.write_text(text + "\n", encoding="utf-8")


def read(path: Path, what: str, again: str) -> dict[str, Any]:
    """A record without its hash; the hash matches.

    Otherwise ValueError says in one line what is wrong with ``what``, and ``again``: the command
    that records it anew.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        claimed = data.pop("hash")
        sound = claimed == digest(data)
        if "configuration" in data:
            sound = sound and data["configuration_hash"] == digest(data["configuration"])
    except FileNotFoundError:
        raise ValueError(f"no {what}: record it anew: {again}") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{what} can't be read ({error}): record it anew: {again}") from None
    if not sound:
        raise ValueError(f"{what} is corrupt (its hash differs): record it anew: {again}")
    return data
