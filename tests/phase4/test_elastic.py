"""Checks of exercise 4.4: state is cut anew for another number of ranks."""

from __future__ import annotations

import torch

from distlab.grading import exercise, expect_close, expect_equal, expect_refused, fail, refusal
from tests.phase4.memory_checkpoints import fake_saved


def padded(vector: torch.Tensor, world_size: int, rank: int) -> torch.Tensor:
    """What ``rank`` holds of a flat tensor: as many elements as every other rank."""
    shard = -(-len(vector) // world_size)
    filled = torch.cat([vector, vector.new_full((shard * world_size - len(vector),), 9.0)])
    return filled[rank * shard : (rank + 1) * shard]


def cut_of(impl, vector: torch.Tensor, world_size: int, rank: int):
    return impl.cut(padded(vector, world_size, rank), len(vector), world_size, rank)


def tree_of(impl, vectors, world_size: int, rank: int, step: int):
    """An own tree with shards at several depths; what a rank holds is padded with 9s."""
    parts = {name: cut_of(impl, vector, world_size, rank) for name, vector in vectors.items()}
    names = sorted(parts)
    return {
        "optimizer": {"state": [{"momentum": parts[names[0]], "step": step}, parts[names[1]]]},
        "more": {name: parts[name] for name in names[2:]},
        "note": "the same on all ranks",
    }


def vectors_of(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    sizes = {"a": 23, "b": 4, "c": 1, "d": 0, "e": 3, "f": 64}
    return {name: torch.randn(n, generator=generator) for name, n in sizes.items()}


@exercise("4.4", "virtual")
def test_shards_are_cut_anew(impl, run, seed):
    """State of 4 ranks for 1, 2, 3, 5 and back: what each of them would have saved itself."""
    vectors = vectors_of(seed)
    moves = [(4, v) for v in (1, 2, 3, 4, 5)] + [(1, 4), (3, 2), (2, 7)]

    def body(ctx):
        found = []
        for old, new in moves:
            saved, _ = fake_saved([tree_of(impl, vectors, old, r, 5) for r in range(old)])
            got = [impl.recut(saved, new, r) for r in range(new)]
            found.append((got, [tree_of(impl, vectors, new, r, 5) for r in range(new)]))
        return found

    for (old, new), (got, want) in zip(moves, run(body, 1)[0], strict=True):
        whole: dict[str, list[torch.Tensor]] = {}
        for rank in range(new):
            expect_tree(got[rank], want[rank], f"saved by {old} ranks, cut for {new}", rank)
            collect(got[rank], whole, "")
        for path, shards in whole.items():
            key = {"/optimizer/state/0/momentum": "a", "/optimizer/state/1": "b"}.get(
                path, path[-1]
            )
            expect_close(
                torch.cat(shards), vectors[key], what=f"{path} put together from {new} ranks"
            )


def collect(tree, found: dict[str, list[torch.Tensor]], path: str) -> None:
    items = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for key, value in items:
        if key == "chunk":
            found.setdefault(path, []).append(value)
        elif isinstance(value, (dict, list)):
            collect(value, found, f"{path}/{key}")


def expect_tree(got, want, what: str, rank: int, path: str = "") -> None:
    if isinstance(want, torch.Tensor):
        expect_close(got, want, what=f"{what}: {path}", rank=rank)
    elif isinstance(want, (dict, list)):
        if type(got) is not type(want) or len(got) != len(want):
            fail(f"{what}: {path} on rank {rank}: expected {want!r}, got {got!r}", cause="tree")
        items = want.items() if isinstance(want, dict) else enumerate(want)
        for key, value in items:
            expect_tree(got[key], value, what, rank, f"{path}/{key}")
    else:
        expect_equal(got, want, what=f"{what}: {path}", rank=rank, cause="tree")


@exercise("4.4", "virtual")
def test_only_what_overlaps_is_read(impl, run, seed):
    """A rank reads few of the old ranks' files, each once; a shard that is short is refused."""
    vector = torch.arange(960.0)

    def body(ctx):
        found = []
        for old, new in ((8, 4), (8, 2), (4, 8), (6, 4)):
            saved, reads = fake_saved([{"m": cut_of(impl, vector, old, r)} for r in range(old)])
            for rank in range(new):
                reads.clear()
                impl.recut(saved, new, rank)
                found.append((old, new, rank, sorted(reads)))
        trees = [{"m": cut_of(impl, vector, 4, r)} for r in range(4)]
        trees[2]["m"]["chunk"] = trees[2]["m"]["chunk"][:-1]
        shares = trees[1]["m"]["chunk"].untyped_storage().nbytes()
        return found, refusal(impl.recut, fake_saved(trees)[0], 2, 1), shares

    found, refused, shares = run(body, 1)[0]
    for old, new, rank, reads in found:
        if len(set(reads)) != len(reads):
            fail(f"{old} → {new}: rank {rank} reads {reads}: one of them twice", cause="read-twice")
        want = [r for r in range(old) if r * new < (rank + 1) * old and (r + 1) * new > rank * old]
        expect_equal(
            reads,
            want,
            what=f"saved by {old} ranks: the trees that rank {rank} of {new} reads",
            cause="reads-too-much",
        )
    if refused.startswith("!"):
        fail(
            f"a shard that is one short: expected a ValueError, but {refused[1:]}", cause="accepted"
        )
    expect_equal(shares, 240 * 4, what="bytes behind a shard of 240", cause="view")


@exercise("4.4", "virtual")
def test_no_ranks_are_refused(impl, run, seed):
    """A checkpoint for 0 ranks: ValueError."""

    def body(ctx):
        return [refusal(impl.adapt, fake_saved([{}])[0], 0)]

    expect_refused(run(body, 1), [("a checkpoint for 0 ranks", [0])])
