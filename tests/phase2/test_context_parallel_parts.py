"""Checks of exercise 2.22: the parts of attention around a ring, one by one."""

from __future__ import annotations

import torch
import torch.distributed as dist

from distlab.grading import exercise, expect_close, expect_equal
from tests.phase2.attention import drawn, zigzag
from tests.phase2.parallel_values import values

EXACT = {"rtol": 1e-9, "atol": 1e-10}
DOCUMENTS = ([5, 16, 1, 7], [23], [12, 12])


@exercise("2.22", "virtual", asserts="positions")
def test_positions_are_dealt_from_both_ends(impl, run):
    """Chunks r and 2W-1-r of each document; every position once, padding at the documents' ends."""

    def body(ctx):
        return [
            (impl.chunk_sizes(lengths, w), [impl.own_positions(lengths, r, w) for r in range(w)])
            for lengths in DOCUMENTS
            for w in (1, 2, 3, 4)
        ]

    cases = [(lengths, w) for lengths in DOCUMENTS for w in (1, 2, 3, 4)]
    for (lengths, w), (sizes, ranks) in zip(cases, run(body, 1)[0], strict=True):
        right = [-(-length // (2 * w)) for length in lengths]
        expect_equal([*sizes], right, what=f"chunk sizes of {lengths}, {w} ranks")
        for rank, found in enumerate(ranks):
            what = f"own_positions({lengths}, {rank}, {w})"
            expect_equal(found.dtype, torch.int64, what=f"the dtype of {what}", cause="type")
            want = zigzag(lengths, rank, w).tolist()
            expect_equal(found.tolist(), want, what=what, cause="positions")


@exercise("2.22", "virtual", asserts="visible")
def test_parts_cover_what_the_mask_shows(impl, run):
    """Each pair that the mask shows is in one part, with the mask where it is needed."""
    lengths = [9, 20]

    def body(ctx):
        pairs = [(w, r, s) for w in (1, 2, 3) for r in range(w) for s in range(w)]
        found = []
        for w, rank, source in pairs:
            sizes = [-(-length // (2 * w)) for length in lengths]
            parts = impl.visible(rank, source, sizes)
            plain = [(q.indices(99)[:2], k.indices(99)[:2], bool(m)) for q, k, m in parts]
            found.append((w, rank, source, plain))
        return found

    for w, rank, source, parts in run(body, 1)[0]:
        sizes = [-(-length // (2 * w)) for length in lengths]
        document = [d for d, n in enumerate(sizes) for _ in range(2 * n)]
        mine, theirs = (
            torch.tensor([c * n + i for n in sizes for c in (r, 2 * w - 1 - r) for i in range(n)])
            for r in (rank, source)
        )
        place = torch.tensor(document)
        want = (mine[:, None] >= theirs) & (place[:, None] == place)
        got = torch.zeros_like(want, dtype=torch.int64)
        for (a, b), (c, d), masked in parts:
            part = torch.ones(b - a, d - c, dtype=torch.int64)
            got[a:b, c:d] += part.tril(d - c - (b - a)) if masked else part
        what = (
            f"how often pairs of queries of rank {rank} and keys of rank {source} of {w} are used"
        )
        expect_equal(got.tolist(), want.long().tolist(), what=what, cause="parts")


@exercise("2.22", "virtual", asserts="scores attend merge")
def test_parts_of_keys_merge_exactly(impl, run, seed):
    """Attention to two sets of keys, merged, is attention to both, also for scores of 1,000."""

    def body(ctx):
        found = []
        for scale in (0.3, 300.0):
            q, k, v, _ = drawn(seed, 9, 2, 2)
            out, lse = torch.zeros_like(q), torch.full_like(q[..., :1], -torch.inf)
            same = out, lse
            impl.merge_(out, lse, *impl.attend(q, k, v, True, scale))
            late = slice(4, 9)  # the last five queries see four more keys
            more = impl.attend(q[:, :, late], k[:, :, :4], v[:, :, :4], False, scale)
            impl.merge_(out[:, :, late], lse[:, :, late], *more)
            hidden = impl.scores(q[:, :, late], k[:, :, :7], True, scale)
            found.append((same[0], same[1], hidden))
        return found

    q, k, v, _ = drawn(seed, 9, 2, 2)
    seen = torch.ones(9, 9).tril().bool()
    for scale, (out, lse, hidden) in zip((0.3, 300.0), run(body, 1)[0], strict=True):
        every = q @ k.mT * scale
        every = torch.cat([every.masked_fill(~seen, -torch.inf), every[..., :4]], -1)
        every[:, :, :4, 9:] = -torch.inf
        want = every.softmax(-1) @ torch.cat([v, v[:, :, :4]], 2)
        what = f"with scale {scale:g}"
        expect_close(out, want, what=f"merged results {what}", **EXACT)
        right = every.logsumexp(-1, keepdim=True)
        expect_close(lse, right, what=f"merged logarithms {what}", **EXACT)
        shape = torch.ones(5, 7).tril(2).bool()
        expect_equal(hidden.isfinite().all(0).all(0).tolist(), shape.tolist(), what="the mask")
        want = (q[:, :, 4:] @ k[:, :, :7].mT * scale).masked_fill(~shape, 0.0)
        got = hidden.masked_fill(~hidden.isfinite(), 0.0)
        expect_close(got, want, what=f"scores {what}", **EXACT)


@exercise("2.22", "virtual", asserts="merge")
def test_a_pair_over_no_keys_weighs_nothing(impl, run, seed):
    """Either pair may be over no keys, with any finite mean: the other pair is the result."""
    means = [values(seed, 50 + n, 2, 2, 6, 3) for n in range(2)]
    lses = [values(seed, 52 + n, 2, 2, 6, 1) for n in range(2)]
    queries = {"the first pair is over no keys": slice(2), "the second pair is": slice(2, 4)}
    for lse, empty in zip(lses, queries.values(), strict=True):
        lse[:, :, empty] = -torch.inf

    def body(ctx):
        (out, more), (lse, more_lse) = ([t.clone() for t in pair] for pair in (means, lses))
        impl.merge_(out, lse, more, more_lse)
        return out, lse

    out, lse = run(body, 1)[0]
    both = torch.stack(lses)
    want = (both.softmax(0) * torch.stack(means)).sum(0)
    for what, rows in (*queries.items(), ("both have keys", slice(4, 6))):
        for name, got, right in (("results", out, want), ("logarithms", lse, both.logsumexp(0))):
            what_of = f"merged {name} where {what}"
            expect_close(got[:, :, rows], right[:, :, rows], what=what_of, **EXACT)


def one_part(seed: int):
    """q and the result's gradient, k and v of this part, and other keys and values."""
    shapes = [(2, 2, 3, 5, 6)] * 2 + [(2, 2, 1, 5, 6)] * 2 + [(2, 2, 1, 4, 6)] * 2
    return [values(seed, 40 + n, *shape) for n, shape in enumerate(shapes)]


@exercise("2.22", "virtual", asserts="gradients grouped")
def test_gradients_of_one_part(impl, run, seed):
    """What some keys add to the gradients of q, k and v, if the softmax is over more keys."""
    names, scale = ("gradient of q", "gradient of k", "gradient of v"), 0.4
    hidden = ~torch.ones(5, 5).tril().bool()

    def whole(masked):
        """q, k and v, the result and its gradient, and the logarithm over all keys."""
        q, grad, k, v, other_k, other_v = one_part(seed)
        leaves = [t.requires_grad_() for t in (q, k, v)]
        mine = q @ k.mT * scale
        mine = mine.masked_fill(hidden, -torch.inf) if masked else mine
        every = torch.cat([mine, q.detach() @ other_k.mT * scale], -1)  # of the part's keys alone
        result = every.softmax(-1) @ torch.cat([v, other_v], -2)
        return leaves, grad, result, every.logsumexp(-1, keepdim=True)

    def body(ctx):
        found = []
        for masked in (False, True):
            q, grad, k, v, _, _ = one_part(seed)
            _, _, out, lse = whole(masked)
            rest = (grad * out).sum(-1, keepdim=True)
            given = (t.detach() for t in (q, grad, lse, rest, k, v))
            found.append(impl.gradients(*given, masked, scale))
        return found

    for masked, got in zip((False, True), run(body, 1)[0], strict=True):
        leaves, grad, out, _ = whole(masked)
        for name, mine, right in zip(
            names, got, torch.autograd.grad(out, leaves, grad), strict=True
        ):
            expect_close(mine, right, what=f"{name}, masked={masked}", **EXACT)


@exercise("2.22", "virtual gloo", asserts="around pass group")
def test_blocks_come_from_left_to_left(impl, run, seed):
    """Each rank sees its own block first, then that of its left neighbour, and so on."""

    def body(ctx):
        mine = dist.new_group([2, 0, 3])
        if ctx.rank == 1:
            return None
        block = values(seed, ctx.rank, 2, 3)
        with ctx.region("around"):
            found = [(source, got.clone()) for source, got in impl.around(block, mine)]
        received = impl.start_pass(block, mine)()
        return found, received, torch.equal(block, values(seed, ctx.rank, 2, 3))

    members = [0, 2, 3]  # a group has its ranks in ascending order
    results = run(body, 4)
    for place, rank in enumerate(members):
        found, received, kept = results[rank]
        order = [(place - step) % 3 for step in range(3)]
        what = "the ranks of the blocks"
        expect_equal([source for source, _ in found], order, what=what, rank=rank, cause="order")
        for source, got in found:
            right = values(seed, members[source], 2, 3)
            expect_close(got, right, what=f"the block of rank {source}", rank=rank)
        right = values(seed, members[place - 1], 2, 3)
        expect_close(received, right, what="what start_pass received", rank=rank)
        expect_equal(kept, True, what="the own block is kept", rank=rank, cause="input-changed")
        messages = results.logs[rank].select(region="around").messages
        expect_equal(messages, 2, what="messages of around", rank=rank, cause="message-count")
