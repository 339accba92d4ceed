"""Predictions for what is saved: state dicts, snapshots, checkpoints, and who reads which files."""

from __future__ import annotations

import os
import shutil
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...grading.implementation import Implementation
from ...observe.memory import PeakMemory, storage_bytes
from ...ranks.context import RankContext
from .case import Case, draws
from .models import MODEL, drawn, layers, model_bytes
from .scene import Found, Quantity, Scene, Seen, Work, held

HEADERS: dict[str, Any] = {
    "tolerance": 0.02,
    "why": "2 %: names and hashes are written, too",
}


def _folder() -> Path:
    """Of this run: virtual ranks are threads of one process, and each run has its own."""
    return Path(tempfile.gettempdir()) / f"distlab-predict-{os.getpid()}"


def _full(ctx: RankContext, impl: Implementation, case: Case) -> Work:
    model = layers(case)
    sharded = impl.module("fsdp").FSDP(model, [*model])
    return lambda: impl.full_state_dict(sharded) and None


def _arrived(case: Case) -> float:
    return (case["W"] - 1) / case["W"] * model_bytes(case)


def _pieces(ctx: RankContext, impl: Implementation, case: Case) -> Work:
    model = layers(case)
    sharded = impl.module("fsdp").FSDP(model, [*model])
    optimizer = torch.optim.Adam(sharded.parameters())
    sharded(torch.ones(2, case["D"])).sum().backward()
    optimizer.step()

    def work() -> Found:
        pieces = impl.sharded_state_dict(sharded, optimizer)["pieces"]
        values = [
            value for piece in pieces for value in (piece["values"], *piece["state"].values())
        ]
        return {"written": float(storage_bytes(v for v in values if isinstance(v, Tensor)))}

    return work


def _copied(ctx: RankContext, impl: Implementation, case: Case) -> Work:
    snapshot = impl.Snapshot()
    tree = {"shared": dict(layers(case).state_dict()), "own": torch.ones(case["Q"] // 4)}

    def work() -> Found:
        with PeakMemory() as memory:
            first = snapshot.take(tree)
            before = memory.current
            again = snapshot.take(tree)
            after = memory.current
        del first, again
        return {"first": float(before), "again": float(after - before)}

    return work


def _stored(ctx: RankContext, impl: Implementation, case: Case) -> Work:
    shared, own = dict(layers(case).state_dict()), {"own": torch.ones(case["Q"] // 4)}
    path = _folder()

    def work() -> Found:
        store = impl.CheckpointStore(path)
        folder = store.save(1, shared, own)
        if ctx.rank:
            return {"disk": 0.0, "files": 0.0}
        files = [each for each in Path(folder).rglob("*") if each.is_file()]
        found = {"disk": float(sum(each.stat().st_size for each in files))}
        shutil.rmtree(path)
        return found | {"files": float(len(files))}

    return work


def _kept(ctx: RankContext, impl: Implementation, case: Case) -> Work:
    path = _folder()

    def work() -> Found:
        folder = impl.CheckpointFolder(path)
        for step in range(case["saves"]):
            name = folder.begin(step)
            folder.finish(name, {"step": step, "score": -float(step), "files": {}})
            folder.prune(case["keep"], case["best"])
        left = folder.steps()
        shutil.rmtree(path)
        return {"left": float(len(left)), "oldest": float(left[0])}

    return work


class _Saved:
    """A checkpoint of ``old`` ranks; notes which of their files are read."""

    def __init__(self, impl: Implementation, case: Case) -> None:
        self.impl, self.case, self.world_size = impl, case, case["old"]
        self.asked: list[int] = []

    def own(self, rank: int) -> Any:
        """The shard of one of the old ranks."""
        self.asked.append(rank)
        numel, old = self.case["n"], self.case["old"]
        mine = self.impl.chunk_of(numel, old, rank)
        return self.impl.cut(torch.ones(len(mine)), numel, old, rank)


def _recut(ctx: RankContext, impl: Implementation, case: Case) -> Work:
    saved = _Saved(impl, case)

    def work() -> Found:
        impl.recut(saved, case["W"], ctx.rank)
        return {"files": float(len(set(saved.asked)))}

    return work


def _overlapping(case: Case) -> int:
    """The most old shards that one new shard overlaps."""
    new, old = -(-case["n"] // case["W"]), -(-case["n"] // case["old"])
    ends = [(r * new, min((r + 1) * new, case["n"])) for r in range(case["W"])]
    return max((end - 1) // old - begin // old + 1 for begin, end in ends if begin < end)


def _on_disk(name: str, value: Any, formula: str, **more: Any) -> Quantity:
    return held(name, value, formula, by="disk", **more)


def _received_by_first(seen: Seen) -> float:
    return seen.logs[0].received


SCENES = (
    Scene(
        exercise="3.20",
        tells=f"{MODEL}, sharded by FSDP with a unit per layer. Rank 0 makes the full state dict.",
        draw=partial(drawn, "3.20"),
        prepare=_full,
        quantities=(
            Quantity(
                name="arrived",
                asks="bytes that arrive at rank 0",
                unit="bytes",
                formula="(W-1)/W·P",
                value=_arrived,
                answers={"ledger": _received_by_first, "clock": lambda seen: seen.volume},
                tolerance=0.01,
                why="1 %: padding",
            ),
        ),
        doubled="Rank 0 receives hardly more: it is the bottleneck, whatever W is.",
    ),
    Scene(
        exercise="3.28",
        tells=f"{MODEL}, sharded by FSDP with a unit per layer. After a step of Adam each rank "
        "makes its sharded state dict.",
        draw=partial(drawn, "3.28"),
        prepare=_pieces,
        quantities=(
            held(
                "written",
                lambda c: 3 * model_bytes(c) / c["W"],
                "3P/W",
                asks="bytes that a rank writes: weights and Adam's moments",
                tolerance=0.01,
                why="1 %: Adam's count of steps",
            ),
        ),
        doubled="Each rank writes half; no message at all.",
    ),
    Scene(
        exercise="4.1",
        tells="One process saves {saves} checkpoints, at steps 0, 1, 2 … The score is best at step "
        "0, and falls. After each save it keeps the last {keep}, and the {best} with the best "
        "score.",
        draw=draws("4.1", [1], saves=[3, 6, 9], keep=[1, 2, 3], best=[1, 2]),
        prepare=_kept,
        quantities=(
            _on_disk(
                "left",
                lambda c: min(c["saves"], c["keep"] + c["best"]),
                "min(saves, keep + best)",
                asks="checkpoints that are left",
                unit="checkpoints",
            ),
        ),
        doubled="One process saves, whatever W is.",
    ),
    Scene(
        exercise="4.15",
        tells=f"{MODEL}. They save a checkpoint: the weights are shared, and each rank has "
        "Q = {Q:,} bytes of its own.",
        draw=lambda random_: drawn("4.15", random_, Q=[40_000, 400_000]),
        prepare=_stored,
        quantities=(
            _on_disk(
                "disk",
                lambda c: model_bytes(c) + c["W"] * c["Q"],
                "P + W·Q",
                asks="bytes of all files of the checkpoint",
                unit="bytes",
                **HEADERS,
            ),
            _on_disk(
                "files",
                lambda c: c["W"] + 3,
                "W + 3: shared, manifest, marker",
                asks="files of the checkpoint",
                unit="files",
            ),
        ),
        doubled="The shared part stays, the ranks' own part doubles.",
    ),
    Scene(
        exercise="4.3",
        tells=f"{MODEL}. Rank 0 takes a snapshot of its weights and of Q = {{Q:,}} bytes of its "
        "own, and a second one after the next step.",
        draw=lambda random_: drawn("4.3", random_, Q=[40_000, 400_000]),
        prepare=_copied,
        quantities=(
            held(
                "first",
                lambda c: model_bytes(c) + c["Q"],
                "P + Q",
                asks="bytes of memory that the first snapshot takes",
            ),
            held("again", lambda c: 0, "0", asks="bytes that the second snapshot takes more"),
        ),
        doubled="Each rank copies its own state, whatever W is.",
    ),
    Scene(
        exercise="4.4",
        tells="old = {old} ranks have saved a flat tensor of n = {n:,} elements in shards. A run "
        "of W = {W} ranks goes on.",
        draw=draws("4.4", [2, 3, 4, 6], old=[5, 7, 8], n=[1000, 1001]),
        prepare=_recut,
        quantities=(
            held(
                "files",
                _overlapping,
                "the old shards of ⌈n/old⌉ elements that one of ⌈n/W⌉ overlaps, at most",
                asks="files that the busiest of the new ranks reads",
                unit="files",
                by="reads",
            ),
        ),
        doubled="Shards halve, so each rank reads about half as many files.",
    ),
)
