"""Record all players again: ``python -m scripts.players [NAME …]`` writes docs/players."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from distlab.player.page import folder
from distlab.player.still import still

from . import collectives, hierarchical, local_sgd, overlap, parameter_server, pipelines, sharding

PLAYERS: dict[str, Callable[[], dict[str, Any]]] = {
    **collectives.PLAYERS,
    "hierarchical": hierarchical.player,
    "overlap": overlap.player,
    "pipeline": pipelines.player,
    "sharding": sharding.player,
    "local-sgd": local_sgd.player,
    "parameter-server": parameter_server.player,
}
STILL_STEP = dict.fromkeys((*collectives.PLAYERS, "hierarchical"), 1)  # others: the last


def written(found: dict[str, Any], name: str) -> dict[str, str]:
    """The files of a player, by their suffix."""
    lines = ",\n".join(
        f"{json.dumps(key)}:{json.dumps(scene, ensure_ascii=False, separators=(',', ':'))}"
        for key, scene in found["scenes"].items()
    )
    head = json.dumps({k: v for k, v in found.items() if k != "scenes"}, ensure_ascii=False)
    text = f'{head[:-1]},\n"scenes": {{\n{lines}\n}}}}\n'
    picture = still(found, " | ".join(found["start"]), STILL_STEP.get(name, -1), name)
    return {".json": text, ".svg": picture}


def main(names: list[str], target: Path) -> int:
    """Write the players of these names, or all."""
    unknown = [name for name in names if name not in PLAYERS]
    if unknown:
        print(f"no player {unknown[0]!r}. There are: {', '.join(PLAYERS)}", file=sys.stderr)
        return 2
    target.mkdir(parents=True, exist_ok=True)
    for name in names or PLAYERS:
        for suffix, text in written(PLAYERS[name](), name).items():
            (target / f"{name}{suffix}").write_text(text, encoding="utf-8")
        print(f"wrote {name}: {(target / f'{name}.json').stat().st_size:,} B", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], folder()))
