"""Whether ratios tell what is slower, and what is equal: ``python -m benchmarks.tell``, alone.

DDP that sleeps for a millisecond per bucket against DDP: every run must say "slower". DDP against
itself: of 20 runs 19 must say "equal". A run is measured like a row of a table, with as many fresh
starts as its interval needs. What was measured goes to ``benchmarks/tell.json``; a program that was
interrupted goes on where it was. The exit status is 1 if one of the two does not hold.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from distlab.course import progress
from solutions.phase3_multi_node.ddp import DDP

from . import book
from .ddp import compare
from .machine import fingerprint
from .pairs import Case, Paired, Start
from .ratio import MOST_STARTS

FILE = Path(__file__).with_name("tell.json")
MODEL, RANKS, ROUNDS, PAUSE = "MLP, 8.5 M", 2, 5, 1e-3
RUNS = {"slowed": 3, "the same": 20}
WANTED = {"slowed": ("slower", 3), "the same": ("equal", 19)}  # the word, and in how many runs


def slowed(module: nn.Module) -> nn.Module:
    """DDP that sleeps before it sends a bucket."""
    net = DDP(module)
    send = net.hook

    def late(bucket: Any) -> Any:
        time.sleep(PAUSE)
        return send(bucket)

    net.register_comm_hook(late)
    return net


CONTESTANTS: dict[str, Callable[[nn.Module], nn.Module]] = {"slowed": slowed, "the same": DDP}


def start(what: str, rounds: int, number: int) -> Start:
    """One start of the ranks."""
    first, second = compare(MODEL, (CONTESTANTS[what], DDP), RANKS, rounds, number=number)
    return Start({"first": first[0], "second": second[0]})


def table(what: str) -> Paired:
    """The table with the one case."""
    cases = [Case((MODEL, what), partial(start, what))]
    pairs = [("first", "second")]
    return Paired(f"DDP, {what}", ("model", ""), "ms", pairs, lambda: cases, ROUNDS, "")


def run(what: str, most: int) -> dict[str, Any]:
    """One run: its word, its ratio, and its starts."""
    paired = table(what)
    (case,) = paired.cases()
    found = book.measured_apart(paired, case, "", most)
    ratio = found.ratio(case.name, *paired.pairs[0])
    word = ratio.word if ratio is not None else "disturbed"
    return {"word": word, "ratio": ratio and asdict(ratio), "starts": found.cases[case.name]}


def told(runs: list[dict[str, Any]], what: str) -> tuple[bool, str]:
    """Whether the runs say what they must, and a line about it."""
    word, least = WANTED[what]
    words = Counter(each["word"] for each in runs)
    counts = ", ".join(f"{count} {each}" for each, count in words.most_common())
    holds = words[word] >= least
    return holds, f"DDP against {what}: {counts} of {len(runs)} runs (wanted: {least} {word})"


def main() -> int:
    """Measure what the file lacks; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--starts", type=int, default=MOST_STARTS, metavar="N")
    options = parser.parse_args()
    torch.set_num_threads(1)
    kept: dict[str, Any] = json.loads(FILE.read_text()) if FILE.exists() else {}
    kept = kept or {"machine": fingerprint(), "runs": {what: [] for what in RUNS}}
    held = []
    for what, count in RUNS.items():
        runs = kept["runs"][what]
        while len(runs) < count:
            runs.append(run(what, options.starts))
            progress.write(FILE, kept)
            print(f"{what}: {runs[-1]['word']} {runs[-1]['ratio']}", flush=True)
        holds, line = told(runs, what)
        held.append(holds)
        print(line, flush=True)
    return 0 if all(held) else 1


if __name__ == "__main__":
    sys.exit(main())
