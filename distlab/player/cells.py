"""The scene of a collective: a grid of pieces and ranks, and in each cell whose parts it holds.

A column is a rank, a row a piece of the tensor: so a piece travels along its row. A cell has one
strip for each rank, filled if that rank's numbers are in the sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from .scene import WIDTH, Move, Scene, Shape, Step
from .words import amount, duration, several

LEFT, RIGHT, HEAD = 70.0, 6.0, 34.0  # for names of pieces; at the right; for names of ranks
CELL, ARC = 26.0, 26.0  # heights of a cell and of the room above it, where messages pass
BETWEEN, FOOT = 22.0, 64.0  # more room between two nodes; for the clock and the bytes
MOST_COLUMN = 86.0


@dataclass(frozen=True)
class Message:
    """Pieces that travel from one rank to another, and whose parts each holds (as bits)."""

    sender: int
    receiver: int
    pieces: tuple[int, ...]
    parts: int


@dataclass
class Round:
    """What happens at the same time, and what every rank holds afterwards.

    ``state[rank][piece]``: the ranks whose parts are in it, as bits. ``sent``: bytes so far of the
    rank that has sent most; ``crossed``: bytes so far that left their node.
    """

    name: str
    messages: list[Message]
    state: list[list[int]]
    seconds: float
    sent: float
    crossed: float = 0.0
    say: str = ""


@dataclass
class Walk:
    """A collective from its begin to its end. ``state``: before the first round."""

    state: list[list[int]]
    piece: str  # what a piece is called
    rounds: list[Round] = field(default_factory=list)
    nodes: Sequence[Sequence[int]] = ()


class _Grid:
    """Where the columns and rows are."""

    def __init__(self, walk: Walk) -> None:
        ranks, gaps = len(walk.state), max(0, len(walk.nodes) - 1)
        self.column = min(MOST_COLUMN, (WIDTH - LEFT - RIGHT - gaps * BETWEEN) / ranks)
        node_of = {rank: k for k, node in enumerate(walk.nodes) for rank in node}
        self.left = [LEFT + r * self.column + node_of.get(r, 0) * BETWEEN for r in range(ranks)]
        self.cell = self.column - min(14.0, 0.2 * self.column)
        self.head = HEAD + (26.0 if walk.nodes else 0.0)
        self.bottom = self.head + len(walk.state[0]) * (CELL + ARC)

    def middle(self, rank: int) -> float:
        return self.left[rank] + self.column / 2

    def top(self, piece: int) -> float:
        return self.head + piece * (CELL + ARC) + ARC


def bits(parts: int, ranks: int) -> str:
    """``0b0110`` of 4 ranks as ``"0110"`` read from rank 0 on."""
    return "".join("1" if parts >> rank & 1 else "0" for rank in range(ranks))


def scene_of_walk(walk: Walk) -> Scene:
    """The scene of a collective."""
    grid, ranks, pieces = _Grid(walk), len(walk.state), len(walk.state[0])
    scene = Scene(grid.bottom + FOOT - (0 if walk.nodes else 22))
    for number, node in enumerate(walk.nodes):
        left = grid.left[node[0]] - 4
        width = grid.left[node[-1]] + grid.column + 4 - left
        scene.add(Shape("box", "frame", left, 4, width, grid.bottom + 4))
        scene.write(left + width / 2, 22, f"node {number}", "middle soft")
    scene.write(2, grid.head - 10, "rank")
    for rank in range(ranks):
        scene.write(grid.middle(rank), grid.head - 10, str(rank), "middle strong")
        bar = (grid.middle(rank) - grid.cell / 2, grid.head - 5, grid.cell, 5.0)
        scene.add(Shape("box", f"rank{rank}", *bar))
    for piece in range(pieces):
        name = walk.piece if pieces == 1 else f"{walk.piece} {piece}"
        scene.write(2, grid.top(piece) + 18, name)
        for rank in range(ranks):
            text = bits(walk.state[rank][piece], ranks)
            place = (grid.middle(rank) - grid.cell / 2, grid.top(piece), grid.cell, CELL)
            scene.add(Shape("cell", "", *place, text), cell_name(rank, piece))
    _foot(scene, grid, bool(walk.nodes))
    scene.steps.append(Step("Start: every rank holds its own numbers."))
    before = walk.state
    for round_ in walk.rounds:
        scene.steps.append(_step(walk, round_, before, grid))
        before = round_.state
    scene.legend = [(f"rank{r}", f"numbers of rank {r}") for r in range(ranks)]
    scene.still = 1
    return scene


def cell_name(rank: int, piece: int) -> str:
    """The name of a cell's shape."""
    return f"rank {rank}, piece {piece}"


def _foot(scene: Scene, grid: _Grid, nodes: bool) -> None:
    y = grid.bottom + 34
    scene.write(2, y, "time", "soft")
    scene.write(LEFT, y, "0 µs", name="time")
    scene.write(LEFT + 98, y, "most sent by a rank", "soft")
    scene.write(WIDTH - 2, y, "0 B", "end", name="sent")
    if nodes:
        scene.write(LEFT + 98, y + 22, "sent between nodes", "soft")
        scene.write(WIDTH - 2, y + 22, "0 B", "end", name="crossed")


def _step(walk: Walk, round_: Round, before: list[list[int]], grid: _Grid) -> Step:
    ranks = len(walk.state)
    texts = {
        cell_name(rank, piece): bits(parts, ranks)
        for rank, row in enumerate(round_.state)
        for piece, parts in enumerate(row)
        if parts != before[rank][piece]
    }
    texts |= {"time": duration(round_.seconds), "sent": amount(round_.sent)}
    if walk.nodes:
        texts["crossed"] = amount(round_.crossed)
    node_of = {rank: k for k, node in enumerate(walk.nodes) for rank in node}
    moves = []
    for message in round_.messages:
        far = node_of.get(message.sender) != node_of.get(message.receiver)
        looks = f"rank{message.sender}" + (" far" if far else "")
        ends = grid.middle(message.sender), grid.middle(message.receiver)
        moves += [Move(_arc(*ends, grid.top(piece)), looks) for piece in message.pieces]
    return Step(_said(walk, round_), texts, moves)


def _arc(begin: float, end: float, y: float) -> str:
    """From the top of one cell to the top of another; two that cross begin apart."""
    aside = 4.0 if end > begin else -4.0
    return (
        f"M{begin + aside:.0f} {y - 1:.0f}Q{(begin + end) / 2:.0f} {y - 1.8 * ARC:.0f} "
        f"{end - aside:.0f} {y - 2:.0f}"
    )


def _said(walk: Walk, round_: Round) -> str:
    ranks = len(walk.state)
    total = (1 << ranks) - 1
    text = round_.say
    if not text:
        shown = [_told(walk, m, total) for m in round_.messages]
        more = len(shown) - 1
        text = shown[0] if len(shown) != 2 else "; ".join(shown)
        if more > 1:
            text += f"; {more} other messages travel at the same time"
    text = f"{round_.name}: {text}" if round_.name else text[0].upper() + text[1:]
    done = all(parts == total for row in round_.state for parts in row)
    return text + (". Now every rank holds the complete sum." if done else ".")


def _told(walk: Walk, message: Message, total: int) -> str:
    """One message in words."""
    pieces = message.pieces
    what = f"{walk.piece} {pieces[0]}"
    if len(walk.state[0]) == 1:
        what = f"its {walk.piece}"
    elif len(pieces) > 1:
        what = f"{walk.piece}s {pieces[0]} to {pieces[-1]}"
    holds = f"the sum of {several(bin(message.parts).count('1'), 'rank')}"
    if message.parts == total:
        holds = "the complete sum"
    elif message.parts == 1 << message.sender:
        holds = "its own numbers"
    return f"rank {message.sender} sends {what}, {holds}, to rank {message.receiver}"
