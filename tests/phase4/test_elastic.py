"""Checks of exercise 4.4: state is cut anew for another number of ranks."""

from __future__ import annotations

import copy

import torch

from distlab.grading import (
    exercise,
    expect_close,
    expect_equal,
    expect_refusals,
    expect_refused,
    fail,
    refusal,
)
from tests.phase4.checkpoints import difference
from tests.phase4.memory_checkpoints import fake_saved


def padded(vector: torch.Tensor, world_size: int, rank: int) -> torch.Tensor:
    """The part of a flat tensor that ``rank`` holds: as many elements as on every other rank."""
    shard = -(-len(vector) // world_size)
    filled = torch.cat([vector, vector.new_full((shard * world_size - len(vector),), 9.0)])
    return filled[rank * shard : (rank + 1) * shard]


def cut_of(impl, vector: torch.Tensor, world_size: int, rank: int):
    return impl.cut(padded(vector, world_size, rank), len(vector), world_size, rank)


def tree_of(impl, vectors, world_size: int, rank: int, step: int):
    """An own tree with shards at several depths; a rank's shards are padded with 9s."""
    parts = {name: cut_of(impl, vector, world_size, rank) for name, vector in vectors.items()}
    names = sorted(parts)
    return {
        "optimizer": {"state": [{"momentum": parts[names[0]], "step": step}, parts[names[1]]]},
        "more": {name: parts[name] for name in names[2:]},
        "note": "the same on all ranks",
        "others": (1, None, {0: torch.arange(3), "numel": 4}, (), [0.1, True]),
        "looks alike": {"numel": 3, "chunk": torch.ones(2), "more": 1},
    }


def vectors_of(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    sizes = {"a": 23, "b": 4, "c": 1, "d": 0, "e": 3, "f": 64}
    dtypes = {"b": torch.bfloat16, "e": torch.float64, "f": torch.float16}
    vectors = {
        name: torch.randn(n, generator=generator).to(dtypes.get(name, torch.float32))
        for name, n in sizes.items()
    }
    return vectors | {"g": torch.arange(1 << 53, (1 << 53) + 9)}


@exercise("4.4", "virtual", asserts="put-together taken-from-one dtype stays life")
def test_shards_are_cut_anew(impl, run, seed):
    """State of 4 ranks for 1, 2, 3, 5 and back: the state that each rank
    would have saved itself."""
    vectors = vectors_of(seed)
    moves = [(4, v) for v in (1, 2, 3, 4, 5)] + [(1, 4), (3, 2), (2, 7)]

    def body(ctx):
        found = []
        for old, new in moves:
            saved, _ = fake_saved([tree_of(impl, vectors, old, r, 5) for r in range(old)])
            before = copy.deepcopy([saved.own(r) for r in range(old)])
            got = [impl.recut(saved, new, r) for r in range(new)]
            kept = copy.deepcopy(got)
            for tree in got:  # training goes on with them
                tree["optimizer"]["state"][0]["momentum"]["chunk"].zero_()
            changed = difference([saved.own(r) for r in range(old)], before)
            found.append((kept, [tree_of(impl, vectors, new, r, 5) for r in range(new)], changed))
        return found

    for (old, new), (got, want, changed) in zip(moves, run(body, 1)[0], strict=True):
        what = f"saved by {old} ranks, cut for {new}: what was saved"
        expect_equal(changed, "", what=what, cause="changed")
        whole: dict[str, list[torch.Tensor]] = {}
        for rank in range(new):
            expect_tree(got[rank], want[rank], f"saved by {old} ranks, cut for {new}", rank)
            collect(got[rank], whole, "")
        for path, shards in whole.items():
            key = {"/optimizer/state/0/momentum": "a", "/optimizer/state/1": "b"}.get(
                path, path[-1]
            )
            what = f"{path} put together from {new} ranks"
            expect_close(torch.cat(shards), vectors[key], what=what)
            kinds = {shard.dtype for shard in shards} - {vectors[key].dtype}
            expect_equal(kinds, set(), what=f"{what}: other dtypes", cause="dtype")


def collect(tree, found: dict[str, list[torch.Tensor]], path: str) -> None:
    items = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for key, value in items:
        if key == "chunk" and tree.keys() == {"numel", "chunk"}:
            found.setdefault(path, []).append(value)
        elif isinstance(value, (dict, list)):
            collect(value, found, f"{path}/{key}")


def expect_tree(got, want, what: str, rank: int, path: str = "") -> None:
    if isinstance(want, torch.Tensor):
        expect_close(got, want, what=f"{what}: {path}", rank=rank)
    elif isinstance(want, (dict, list, tuple)):
        if type(got) is not type(want) or len(got) != len(want):
            fail(f"{what}: {path} on rank {rank}: expected {want!r}, got {got!r}", cause="tree")
        if isinstance(want, dict) and got.keys() != want.keys():
            message = f"{what}: {path} on rank {rank}: expected the keys {[*want]}, got {[*got]}"
            fail(message, cause="tree", rank=rank)
        items = want.items() if isinstance(want, dict) else enumerate(want)
        for key, value in items:
            expect_tree(got[key], value, what, rank, f"{path}/{key}")
    else:
        expect_equal(got, want, what=f"{what}: {path}", rank=rank, cause="tree")
        expect_equal(type(got), type(want), what=f"{what}: {path}", rank=rank, cause="tree")


@exercise("4.4", "virtual", asserts="shard no-padding detached-copy dtype layout alone")
def test_what_a_rank_saves_of_its_shard(impl, run, seed):
    """Shards of ceil(n / W), the last ones shorter or empty; a copy of them, without padding."""
    sizes = [(n, w) for n in (0, 1, 2, 7, 8, 9, 23, 1 << 54) for w in (1, 2, 3, 5, 8)]
    values = vectors_of(seed)

    def body(ctx):
        shards = [[[r.start, r.stop] for r in of_all(n, w)] for n, w in sizes]
        cuts = []
        for vector in values.values():
            for unpadded in (False, True):
                room = torch.zeros(2, 40, dtype=vector.dtype)  # what it has is strided
                own = room.t()[: -(-len(vector) // 3), 0]
                own.copy_(padded(vector, 3, 1))
                if unpadded:
                    own = own[: max(0, min(len(vector) - len(own), len(own)))]
                if vector.is_floating_point():
                    own = own.clone().requires_grad_()
                before = own.detach().clone()
                tree = impl.cut(own, len(vector), 3, 1)
                chunk = tree["chunk"]
                facts = [sorted(tree), tree["numel"], chunk.requires_grad, chunk.is_leaf]
                kept = chunk.clone()
                chunk.zero_()
                cuts.append((facts, kept, torch.equal(own, before)))
        return shards, cuts

    def of_all(n, w):
        return [impl.chunk_of(n, w, r) for r in range(w)]

    shards, cuts = run(body, 1)[0]
    for (n, w), got in zip(sizes, shards, strict=True):
        size = -(-n // w)
        for rank, (start, stop) in enumerate(got):
            want = [min(rank * size, n), min((rank + 1) * size, n)]
            found = [start, stop] if start < stop or want[0] < want[1] else want
            expect_equal(
                found,
                want,
                what=f"shard of rank {rank} of {w}, {n} elements: start, end",
                rank=rank,
                cause="shard",
            )
    for number, (facts, chunk, same) in enumerate(cuts):
        vector = [*values.values()][number // 2]
        size = -(-len(vector) // 3)
        want = [["chunk", "numel"], len(vector), False, True]
        what = f"cut of {len(vector)} elements"
        said = f"{what}: keys, numel, requires_grad, is_leaf"
        expect_equal(facts, want, what=said, cause="chunk")
        expect_close(chunk, vector[size : 2 * size], what=what)
        expect_equal(chunk.dtype, vector.dtype, what=f"{what}: the dtype", cause="dtype")
        expect_equal(same, True, what=f"{what}: the rank's own values stay", cause="view")


@exercise("4.4", "virtual", asserts="reads-few wrong-length detached-copy resources cost refusals")
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
        shares = trees[1]["m"]["chunk"].untyped_storage().nbytes()
        right = trees[2]["m"]["chunk"]
        refused = []
        for wrong in (right[:-1], torch.cat([right, right[:1]]), right[:0]):
            trees[2]["m"]["chunk"] = wrong
            refused += [refusal(impl.recut, fake_saved(trees)[0], 2, 1)]
            refused += [refusal(impl.recut, fake_saved(trees)[0], 3, 1)]
        return found, refused, shares

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
    wrong = ("a shard that is one short", "a shard with one too many", "a shard that is missing")
    expect_refusals(refused, [f"{w}, {h} used" for w in wrong for h in ("all", "partly")])
    expect_equal(shares, 240 * 4, what="bytes behind a shard of 240", cause="view")


@exercise("4.4", "virtual", asserts="refusals")
def test_no_ranks_are_refused(impl, run, seed):
    """A checkpoint for 0 or -1 ranks: ValueError."""

    def body(ctx):
        return [refusal(impl.adapt, fake_saved([{}])[0], number) for number in (0, -1)]

    expect_refused(run(body, 1), ["a checkpoint for 0 ranks", "a checkpoint for -1 ranks"])
