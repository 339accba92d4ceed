"""Whether ratios tell what is slower, and what is equal: ``python -m benchmarks.tell``, alone.

DDP that sleeps for a millisecond per bucket against DDP: every run must say "slower". DDP against
itself: of 20 runs 19 must say "equal". A run is measured like a row of a table, with as many fresh
starts as its interval needs. What was measured goes to ``benchmarks/tell.json``; a program that was
interrupted goes on where it was, on the same machine. It takes an hour. ``benchmarks.run --page``
shows it. The exit status is 1 if one of the two does not hold.
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
from .common import Table
from .ddp import compare
from .machine import described, fingerprint
from .pairs import Case, Paired, Start
from .ratio import MOST_STARTS

FILE = Path(__file__).with_name("tell.json")
TITLE = "Do the words tell the truth?"
# The GPT's step waits for its buckets. The MLP's hides the pause behind other work: it takes 1.02
# of the time, which still counts as equal.
MODEL, RANKS, PAUSE = "GPT, 4 layers", 2, 1e-3
ROUNDS = 45  # a start tells more, so fewer are needed: with 15 rounds 9 starts left "unknown"
TRIAL = {"model": MODEL, "ranks": RANKS, "rounds": ROUNDS}
RUNS = {"slowed": 3, "the same": 20}
Found = list[dict[str, Any]]
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


def words(runs: Found) -> str:
    """How often the runs said each word."""
    counts = Counter(each["word"] for each in runs).most_common()
    return ", ".join(f"{count} {word}" for word, count in counts)


def told(runs: Found, what: str) -> tuple[bool, str]:
    """Whether the runs say what they must, and a line about it."""
    word, least = WANTED[what]
    holds = sum(each["word"] == word for each in runs) >= least
    return holds, f"DDP against {what}: {words(runs)} of {len(runs)} runs (wanted: {least} {word})"


def summary() -> Table | None:
    """What the runs said, for the page; None before the first run."""
    if not FILE.exists():
        return None
    kept = json.loads(FILE.read_text(encoding="utf-8"))
    rows = []
    for what, (word, least) in WANTED.items():
        runs = kept["runs"][what]
        medians = [each["ratio"]["median"] for each in runs if each["ratio"]]
        spread = f"{min(medians):.3f} to {max(medians):.3f}" if medians else ""
        wanted = f"{least} of {RUNS[what]} {word}"
        rows.append([what, str(len(runs)), words(runs), spread, wanted])
    note = (
        "A trial of the method: a DDP against DDP, {model} on {ranks} ranks, {rounds} rounds per "
        "start, as many starts as a row needs. The slowed one sleeps for 1 ms before it sends a "
        "bucket. Measured on {machine}."
    ).format(**kept["trial"], machine=described(kept["machine"]))
    return Table(TITLE, ["DDP", "runs", "words", "medians", "wanted"], rows, note)


def main() -> int:
    """Measure what the file lacks; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--starts", type=int, default=MOST_STARTS, metavar="N")
    options = parser.parse_args()
    torch.set_num_threads(1)
    kept: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}
    begun = {"machine": fingerprint(), "trial": TRIAL}
    if {key: kept.get(key) for key in begun} != begun:
        kept = {**begun, "runs": {what: [] for what in RUNS}}
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
