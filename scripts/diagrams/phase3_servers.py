"""Diagrams of phase 3: parameter servers and local SGD."""

from __future__ import annotations

from itertools import pairwise

import torch

from solutions.phase3_multi_node.parameter_client import place_keys

from .plots import axes
from .registry import diagram
from .sheet import RANKS, Sheet
from .times import Bar, Message, ladder, lanes

Push = tuple[str, float, float, int, int]  # worker, pulled, pushed, version read, version made


@diagram("3.26", "The worker asks all servers; each answers for its own keys")
def client(sheet: Sheet) -> None:
    sizes = {"a": 3, "b": 2, "c": 2, "d": 2}
    server_of = place_keys({name: torch.zeros(size) for name, size in sizes.items()}, 2)
    wanted = ("a", "c")
    header = " ".join(str(int(name in wanted)) for name in sizes)
    owned = [[name for name in sizes if server_of[name] == server] for server in range(2)]
    vectors = [
        " ".join(name for name in wanted if name in mine for _ in range(sizes[name]))
        for mine in owned
    ]
    names = [f"server 0: {', '.join(owned[0])}", "worker", f"server 1: {', '.join(owned[1])}"]
    messages = []
    for server, row in ((0, 0), (1, 2)):
        gradients = " ".join(f"g{name}" for name in vectors[server].split())
        messages += [
            Message(0.1, 1, row, f"PULL {header}", "blue", 0.8),
            Message(1.15, row, 1, f"v, {vectors[server]}", "green", 0.7),
            Message(2.9, 1, row, f"PUSH {header}, {gradients}", "orange", 1.0),
        ]
    where = ladder(sheet, names, messages, 4.1, label=104, apart=76)
    left, right = where.x(1.9), where.x(2.85)
    sheet.box(left, where.middle[1] - 20, right - left, 40, "forward,\nbackward", "grey")
    sheet.gap(6)
    sheet.note(
        "Needed are the keys a and c: the header 1 0 1 0 says so to every server, v is the "
        "version. A server without a chosen key still gets the header."
    )


@diagram("3.22", "One round: all read one version, one mean makes the next")
def synchronous(sheet: Sheet) -> None:
    names = ["worker 0", "server", "worker 1"]
    messages = [
        Message(0.1, 0, 1, "PULL", "blue", 0.6),
        Message(0.4, 2, 1, "PULL", "blue", 0.6),
        Message(1.2, 1, 0, "v", "green", 0.6),
        Message(1.5, 1, 2, "v", "green", 0.6),
        Message(4.1, 0, 1, "PUSH", "orange", 0.7),
        Message(3.6, 2, 1, "PUSH", "orange", 0.7),
    ]
    where = ladder(sheet, names, messages, 6.8, label=84, apart=66)
    for row, start, end in ((0, 1.9, 4.0), (2, 2.2, 3.5)):
        x = where.x(start)
        words = "forward, backward" if row == 0 else "fwd, bwd"
        sheet.box(x, where.middle[row] - 14, where.x(end) - x, 28, words, RANKS[row // 2])
    x = where.x(4.95)
    sheet.box(
        x,
        where.middle[1] - 22,
        where.x(6.8) - x,
        44,
        "mean, step,\nversion v + 1",
        "grey",
        strong=True,
    )
    sheet.gap(4)
    sheet.note(
        "All pulls of a round are answered before the first push is taken. The mean is over the "
        "samples of those that pushed."
    )


def asynchronous(compute: dict[str, float], until: float) -> tuple[list[Push], list[float]]:
    """All pushes until then, and when the versions began."""
    pulled = dict.fromkeys(compute, (0.0, 0))
    versions = [0.0]
    pushes: list[Push] = []
    while True:
        name = min(compute, key=lambda n: pulled[n][0] + compute[n])
        start, read = pulled[name]
        now = start + compute[name]
        if now > until:
            return pushes, versions
        versions.append(now)
        pushes.append((name, start, now, read, len(versions) - 1))
        pulled[name] = (now, len(versions) - 1)


@diagram("3.23", "Nobody waits; a slow worker's gradient is stale")
def stale(sheet: Sheet) -> None:
    pushes, versions = asynchronous({"fast": 2.0, "slow": 7.0}, 9.9)
    span = 9.9
    rows: dict[str, list[Bar]] = {"fast": [], "server": [], "slow": []}
    for name, start, end, read, _ in pushes:
        rows[name].append(
            Bar(start + 0.15, end, f"reads v{read}", "blue" if name == "fast" else "orange")
        )
    for number, (start, end) in enumerate(pairwise([*versions, span])):
        rows["server"].append(Bar(start, end, f"v{number}", "grey"))
    where = lanes(sheet, rows, span, apart=26, h=28)
    half = 14
    for name, _, end, _, _ in pushes:
        row = 0 if name == "fast" else 2
        start = where.middle[row] + (half if row == 0 else -half)
        target = where.middle[1] + (-half if row == 0 else half)
        sheet.arrow([(where.x(end), start), (where.x(end), target)], k=name == "slow")
    slow = next(push for push in pushes if push[0] == "slow")
    sheet.gap(-12)
    sheet.note(
        f"An arrow is a push. The slow worker's gradient was computed at v{slow[3]} and is "
        f"applied to v{slow[4] - 1}, to make v{slow[4]}. One loop takes one request after "
        "another, so no update is lost."
    )


def bounded(compute: list[float], bound: int, until: float) -> list[list[Bar]]:
    """Lanes of workers that read at clock c only when all have reached c - bound."""
    clock, ready = [0] * len(compute), [0.0] * len(compute)
    started: list[float | None] = [None] * len(compute)
    rows: list[list[Bar]] = [[] for _ in compute]
    now = 0.0
    while now < until:
        for rank, length in enumerate(compute):
            if started[rank] is None and clock[rank] - bound <= min(clock):
                if now > ready[rank]:
                    words = "held" if now - ready[rank] > 1 else ""
                    rows[rank].append(Bar(ready[rank], now, words, "grey", dashed=True))
                started[rank] = now
                rows[rank].append(
                    Bar(
                        now,
                        min(now + length, until),
                        f"{clock[rank]} → {clock[rank] + 1}",
                        RANKS[rank],
                    )
                )
        now, rank = min(
            (start + compute[r], r) for r, start in enumerate(started) if start is not None
        )
        clock[rank] += 1
        ready[rank], started[rank] = now, None
    for rank, start in enumerate(started):
        if start is None and ready[rank] < until:
            rows[rank].append(Bar(ready[rank], until, "", "grey", dashed=True))
    return rows


@diagram("3.24", "Run ahead, but not too far: the server holds the answer")
def held(sheet: Sheet) -> None:
    for bound in (0, 1, 3):
        sheet.note(
            f"s = {bound}" + (": everybody waits for everybody" if not bound else ""), bold=True
        )
        fast, slow = bounded([2.0, 5.0], bound, 15.0)
        lanes(sheet, {"fast": fast, "slow": slow}, 15.0, label=50)
        sheet.gap(8)
    sheet.note(
        "c → c + 1: the worker's clock counts its pushes. At clock c it reads only when every "
        "live worker has reached c - s. Dashed: its pull is held. s = ∞ is asynchronous."
    )


@diagram("3.25", "H steps alone, then all agree on one model")
def local(sheet: Sheet) -> None:
    steps, rounds, rate, start = 5, 3, 0.12, 8.0
    goals = (1.0, 5.0)
    paths: list[list[tuple[float, float]]] = [[(0.0, start)] for _ in goals]
    common = [start]
    for turn in range(rounds):
        ends = []
        for rank, goal in enumerate(goals):
            theta = common[-1]
            paths[rank].append((turn * steps, theta))
            for step in range(steps):
                theta -= rate * (theta - goal)
                paths[rank].append((turn * steps + step + 1, theta))
            ends.append(theta)
        common.append(sum(ends) / len(ends))
    plot = axes(sheet, (0, steps * rounds), (1.8, 8.2), height=190, left=40, right=20)
    plot.frame(
        {steps * k: f"{steps * k}" for k in range(rounds + 1)}, {n: str(n) for n in (2, 4, 6, 8)},
        f"step, H = {steps} per round", "a weight θ",
    )  # fmt: skip
    for turn in range(1, rounds + 1):
        plot.line([(steps * turn, 1.8), (steps * turn, 8.2)], "grey", dashed=True, k=False)
        sheet.circle(*plot.at(steps * turn, common[turn]), 5, "green")
    for rank, path in enumerate(paths):
        tone = ("orange", "blue")[rank]
        plot.line(path, tone, dashed=bool(rank))
        x, y = path[3]
        plot.word(
            x,
            y,
            f"rank {rank}",
            tone,
            anchor="end" if not rank else "start",
            up=-14 if not rank else 16,
        )
    sheet.note(
        "Dashed grey: one all-reduce. Both ranks go on from the mean (dot). Between, no message "
        "is sent; the ranks drift apart."
    )
    sheet.note(
        "DiLoCo takes Δ = mean(θ - θ_r) as a gradient for an outer SGD with Nesterov momentum. "
        "Its η = 1, μ = 0 is the mean drawn here."
    )
