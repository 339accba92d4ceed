"""Diagrams of phase 2: which operators' outputs of a transformer block are worth keeping."""

from __future__ import annotations

from .registry import diagram
from .shapes import Cell, columns
from .sheet import Sheet
from .times import Bar, lanes

D, HEAD, S, B = 512, 64, 1024, 2  # width, width of a head, tokens, bytes per number
LIMIT = 100  # FLOPs per byte
SCORES = S // HEAD  # in units of A, the bytes of the block's input

# operator, the inner dimension of a product, its output, and what autograd saves of it, in A
OPERATORS = (
    ("norm", 0, 1, 1),
    ("QKV", D, 3, 3),
    ("scores", HEAD, SCORES, 0),
    ("softmax", 0, SCORES, SCORES),
    ("times values", S, 1, 1),
    ("out", D, 1, 1),
    ("norm", 0, 1, 1),
    ("up", D, 4, 4),
    ("GELU", 0, 4, 4),
    ("down", 4 * D, 1, 0),
)


def held(size: int, last: bool = False) -> Cell:
    """What is held of an operator's output; 0: it is computed again, or nobody needs it."""
    if size:
        return Cell(f"{size} A", "blue", True)
    return Cell("–") if last else Cell("again", hatch=True)


@diagram("2.27", "Keep what is costly to compute, and small")
def keeping(sheet: Sheet) -> None:
    last = len(OPERATORS) - 1
    saves = [2 * inner // B for _, inner, _, _ in OPERATORS]
    kept = [
        out if flops >= LIMIT and index != last else 0
        for index, (flops, (_, _, out, _)) in enumerate(zip(saves, OPERATORS, strict=True))
    ]
    plain = [saved for *_, saved in OPERATORS]
    block = Cell("A", "purple", True)
    cells: list[list[Cell | None]] = [
        [None, *(Cell(f"{n}", "green" if n >= LIMIT else "plain", n >= LIMIT) for n in saves)],
        [block, *(held(n) if n else Cell("–") for n in plain)],
        [block, *(held(0, index == last) for index in range(len(OPERATORS)))],
        [block, *(held(n, index == last) for index, n in enumerate(kept))],
    ]
    heads = [
        "FLOPs/byte",
        f"none: {1 + sum(plain)} A",
        "full: 1 A",
        f"selective: {1 + sum(kept)} A",
    ]
    names = ["input", *(name for name, *_ in OPERATORS)]
    columns(sheet, names, heads, cells, label=110, apart=16, h=20, below=4)
    sheet.note(
        "The last three columns: what is held after forward, in units of the input's bytes A. "
        f"Hatched: computed again in backward. D = {D}, heads of {HEAD}, S = {S} tokens, {B} bytes "
        f"per number. Selective keeps what saves at least {LIMIT} FLOPs per byte. Backward does "
        "not need the last output, so it is neither kept nor computed again."
    )


def bars(sheet: Sheet, title: str, values: dict[str, float], unit: str, tone: str) -> None:
    """One bar for each choice, with its number behind it."""
    sheet.note(title, bold=True)
    rows = {name: [Bar(0, value, "", tone)] if value else [] for name, value in values.items()}
    where = lanes(sheet, rows, max(values.values()), label=110, right=60, h=18, base=False)
    for value, middle in zip(values.values(), where.middle, strict=True):
        sheet.text(where.x(value) + 6, middle, f"{value:g} {unit}")


@diagram("2.27-2", "What each limit holds, and what it computes again")
def limits(sheet: Sheet) -> None:
    needed = OPERATORS[:-1]  # backward needs nothing of the last output
    total = sum(inner * out for _, inner, out, _ in OPERATORS)
    held = {"no segment": 1.0 + sum(saved for *_, saved in OPERATORS)}
    again = {"no segment": 0.0}
    for limit in (64, 512, 1024, 2048):
        kept = [(inner, out) for _, inner, out, _ in needed if inner and 2 * inner // B >= limit]
        left = sum(i * out for _, i, out, _ in needed) - sum(i * out for i, out in kept)
        name = f"at_least({limit})" if kept else "full"
        held[name] = 1.0 + sum(out for _, out in kept)
        again[name] = 100 * left / total
    bars(sheet, "Held after forward, in inputs A", held, "A", "blue")
    sheet.gap(6)
    bars(sheet, "FLOPs computed again, of a forward's", again, "%", "orange")
    sheet.note(
        "The block of the table above. Between no segment and full, each limit keeps fewer outputs "
        "and computes more again. at_least(512) keeps 10 A, and saves five sixths of full's FLOPs."
    )
