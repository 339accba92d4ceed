"""Players of all-reduces that are written from messages: ring, tree, halving and doubling.

The solutions run on virtual ranks. The ledger says which message went when; ``contents`` says what
it carried, and what each rank held before and after.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from distlab.course.catalogue import load_course
from distlab.grading.implementation import solution
from distlab.hardware.clusters import Cluster, load_cluster
from distlab.observe.log import Event
from distlab.player.cells import Message, Round, Walk, bits, cell_name, scene_of_walk
from distlab.player.scene import Choice, Scene, document
from distlab.player.words import amount, duration
from distlab.ranks.context import RankContext
from distlab.virtual.reports import VirtualResults
from distlab.virtual.run import run_virtual

from .contents import brought, looked_at

SIZES = (96, 480_000)  # elements of 8 bytes: 2, 3, 4 and 8 ranks divide them
RANKS = (2, 3, 4, 8)
CLUSTER = "dgx-h100"


def module_of(phase: int, name: str) -> Any:
    """A solution."""
    return solution(load_course().phase(phase), name)


def ring(ctx: RankContext, tensor: Any) -> None:
    """Exercises 3.1 and 3.2, which make 3.3."""
    module = module_of(3, "ring_allreduce")
    with ctx.region("Reduce-scatter"):
        module.ring_reduce_scatter(tensor)
    with ctx.region("All-gather"):
        module.ring_all_gather(tensor)


def tree(ctx: RankContext, tensor: Any) -> None:
    """Exercise 3.5."""
    module = module_of(3, "tree_allreduce")
    with ctx.region("Up the tree"):
        module.climb(tensor, 0, "sum", None)
    with ctx.region("Down the tree"):
        module.tree_broadcast(tensor, 0)


def halving_doubling(ctx: RankContext, tensor: Any) -> None:
    """Exercise 3.6."""
    module_of(3, "halving_doubling").halving_doubling_all_reduce(tensor)


def body(
    ctx: RankContext, run: Callable[[RankContext, Any], object], numel: int, pieces: int
) -> list[Any]:
    """One rank: what it held at each communication, and in the end."""
    tensor = brought(ctx.rank, numel)
    with looked_at(tensor, pieces) as looks:
        run(ctx, tensor)
    return [looks, [int(piece[0]) for piece in tensor.view(pieces, -1)], tensor.unique().tolist()]


@dataclass(frozen=True)
class Passed:
    """A message of a run with the events at its two ends."""

    message: Message
    send: Event
    receive: Event

    @property
    def ends(self) -> tuple[tuple[int, Event], tuple[int, Event]]:
        """(rank, event) of both ends."""
        return (self.message.sender, self.send), (self.message.receiver, self.receive)

    @property
    def seconds(self) -> float:
        """When both ends are done with it."""
        return max(ended(self.send), ended(self.receive))


def ended(event: Event) -> float:
    """When it was done."""
    assert event.end is not None, "every handle was waited for"
    return event.end


def messages_of(results: VirtualResults) -> list[Passed]:
    """The messages of a run, in order of time."""
    arrivals: dict[tuple[int | None, int], list[Event]] = defaultdict(list)
    for log in results.logs:
        for event in log.events:
            if event.op == "recv":
                arrivals[event.peer, log.rank].append(event)
    found = []
    for log in results.logs:
        for event, (given, parts, _) in zip(log.events, results[log.rank][0], strict=True):
            if event.op == "send" and event.peer is not None:
                message = Message(log.rank, event.peer, tuple(given), parts[0])
                found.append(Passed(message, event, arrivals[log.rank, event.peer].pop(0)))
    return sorted(found, key=lambda each: (each.send.start, each.message.sender))


def rounds_of(messages: Sequence[Passed]) -> list[list[Passed]]:
    """The messages by rounds: one is in the round after all that its ranks had waited for."""
    number: dict[int, int] = {}
    for passed in sorted(messages, key=lambda each: max(e.start for _, e in each.ends)):
        before = [
            number[id(other)]
            for other in messages
            for rank, event in passed.ends
            for its_rank, its_event in other.ends
            if rank == its_rank and id(other) in number and ended(its_event) <= event.start + 1e-12
        ]
        number[id(passed)] = 1 + max(before, default=-1)
    rounds = range(1 + max(number.values()))
    return [[m for m in messages if number[id(m)] == each] for each in rounds]


def held(results: VirtualResults, rank: int, moment: float) -> list[int]:
    """Whose parts a rank's pieces have when all that arrived until ``moment`` is added up."""
    looks, last, _ = results[rank]
    for event, look in zip(results.logs[rank].events, looks, strict=True):
        if event.start >= moment - 1e-12:
            return list(look[2])
    return list(last)


def walk_of(results: VirtualResults, piece: str, cluster: Cluster, nodes: Any = ()) -> Walk:
    """The rounds of a run of messages."""
    ranks = range(len(results))
    walk = Walk([held(results, rank, 0.0) for rank in ranks], piece, nodes=nodes)
    sent, crossed, seconds = [0] * len(ranks), 0, 0.0
    state = walk.state
    for now in rounds_of(messages_of(results)):
        state = [list(row) for row in state]
        done: dict[int, float] = defaultdict(float)
        for passed in now:
            sender, receiver = passed.message.sender, passed.message.receiver
            sent[sender] += passed.send.sent
            crossed += passed.send.sent * (cluster.node(sender) != cluster.node(receiver))
            for rank, event in passed.ends:
                done[rank] = max(done[rank], ended(event))
        for rank, moment in done.items():
            state[rank] = held(results, rank, moment)
        seconds = max(seconds, *(passed.seconds for passed in now))
        sending = [passed.message for passed in now]
        region = now[0].send.region
        walk.rounds.append(Round(region, sending, state, seconds, max(sent), crossed))
    return walk


def finished(scene: Scene, results: VirtualResults) -> Scene:
    """The scene with what its run ended with, by the ranks' own values and clocks."""
    ranks = len(results)
    for rank, (_, cells, values) in enumerate(results):
        assert values == [(1 << ranks) - 1], "the sum of all ranks"
        for piece, parts in enumerate(cells):
            scene.ended[cell_name(rank, piece)] = bits(parts, ranks)
    scene.ended["time"] = duration(max(ended(e) for log in results.logs for e in log.events))
    scene.ended["sent"] = amount(max(log.sent for log in results.logs))
    return scene


def recorded(run: Callable[..., object], ranks: int, numel: int, pieces: int, piece: str) -> Scene:
    """The scene of one run on equal links."""
    cluster = load_cluster(CLUSTER)
    results = run_virtual(body, ranks, run, numel, pieces, cluster=cluster)
    return finished(scene_of_walk(walk_of(results, piece, cluster)), results)


def player(
    title: str,
    about: str,
    run: Callable[..., object],
    pieces: Callable[[int], int],
    piece: str,
    ranks: Sequence[int] = RANKS,
) -> dict[str, Any]:
    """A player with world sizes and tensor sizes to choose."""
    sizes = {amount(8 * numel): numel for numel in SIZES}
    scenes: dict[tuple[str, ...], Scene] = {
        (str(count), size): recorded(run, count, numel, pieces(count), piece)
        for count in ranks
        for size, numel in sizes.items()
    }
    choices = [Choice("ranks", tuple(map(str, ranks))), Choice("tensor", tuple(sizes))]
    return document(title, about, choices, scenes, ("4", amount(8 * SIZES[-1])))


def core(ranks: int) -> int:
    """The largest power of two that is at most ``ranks``."""
    return 1 << (ranks.bit_length() - 1)


PLAYERS: dict[str, Callable[[], dict[str, Any]]] = {
    "ring": functools.partial(
        player,
        "Ring all-reduce",
        "Each rank sends to its right neighbour only. A column is a rank, a row a chunk of the "
        "tensor. A strip of a cell is filled when that rank's numbers are in the sum.",
        ring,
        lambda ranks: ranks,
        "chunk",
    ),
    "tree": functools.partial(
        player,
        "Tree all-reduce",
        "The whole tensor climbs a binomial tree to rank 0, then the sum goes down again. A strip "
        "of a cell is filled when that rank's numbers are in the sum.",
        tree,
        lambda ranks: 1,
        "tensor",
    ),
    "halving-doubling": functools.partial(
        player,
        "Recursive halving and doubling",
        "Two partners divide what they share: each keeps one half. Then the results go back the "
        "same way. A strip of a cell is filled when that rank's numbers are in the sum.",
        halving_doubling,
        core,
        "piece",
    ),
}
