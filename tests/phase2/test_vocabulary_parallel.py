"""Checks of exercise 2.16: embedding, tied head and cross-entropy with a shared vocabulary."""

from __future__ import annotations

import weakref
from itertools import pairwise, product
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from distlab.explain.case import Case, Diagnosis
from distlab.grading import (
    exercise,
    expect_close,
    expect_equal,
    expect_refusals,
    expect_refused,
    fail,
    refusal,
    trace,
)
from distlab.observe.memory import PeakMemory, storage_bytes
from distlab.observe.operators import tensors_in

EXACT = {"rtol": 1e-10, "atol": 1e-12}
WIDTH = 6


def values(seed: int, salt: int, *shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed * 1009 + salt)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def table(seed: int, vocabulary: int) -> nn.Embedding:
    embedding = nn.Embedding(vocabulary, WIDTH, dtype=torch.float64)
    embedding.weight.data = values(seed, 1, vocabulary, WIDTH)
    return embedding


def cut(vocabulary: int, world_size: int) -> list[int]:
    """The borders of the ranks' words: 0 … vocabulary."""
    return [vocabulary * rank // world_size for rank in range(world_size + 1)]


def border_words(vocabulary: int, world_size: int) -> torch.Tensor:
    """The first and the last word of every rank, and some of them again: (2, …)."""
    borders = cut(vocabulary, world_size)
    words = [w for a, b in pairwise(borders) for w in (a, b - 1)]
    return torch.tensor([words, words[::-1]])


def rows_of(full: torch.Tensor, rank: int, world_size: int) -> torch.Tensor:
    borders = cut(len(full), world_size)
    return full[borders[rank] : borders[rank + 1]]


def columns_of(full: torch.Tensor, rank: int, world_size: int) -> torch.Tensor:
    return rows_of(full.movedim(-1, 0), rank, world_size).movedim(0, -1).contiguous()


class Largest(TorchDispatchMode):
    """The largest number of elements of any tensor that an operator makes inside the context."""

    def __init__(self) -> None:
        super().__init__()
        self.numel, self.shape, self.op = 0, (), ""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tensors_in([out]):
            if tensor.numel() > self.numel:
                self.numel, self.shape, self.op = tensor.numel(), tuple(tensor.shape), str(func)
        return out


@exercise("2.16", "virtual", asserts="range rows silent")
def test_words_are_shared_out(impl, run, seed):
    """The ranks' ranges cover the vocabulary, differ by a word at most, and hold those rows."""
    worlds, sizes = (1, 2, 3, 4), (4, 7, 12, 13, 2**60 + 3)

    def body(ctx):
        ranges = [list(impl.vocabulary_range(n)) for n in sizes]
        embedding = impl.VocabParallelEmbedding(table(seed, 13))
        held = storage_bytes(embedding.parameters())
        return ranges, embedding.weight.detach(), [embedding.first, embedding.end], held

    for w, results in zip(worlds, run.worlds(body, worlds), strict=True):
        for rank, (ranges, weight, own, held) in enumerate(results):
            for n, got in zip(sizes, ranges, strict=True):
                want = cut(n, w)[rank : rank + 2]
                what = f"first and end of {n} words over {w} ranks"
                expect_equal(got, want, what=what, rank=rank, cause="range")
            want = rows_of(table(seed, 13).weight, rank, w)
            expect_close(weight, want, what=f"rows of 13 words, {w} ranks", rank=rank, **EXACT)
            expect_equal(own, cut(13, w)[rank : rank + 2], what="embedding.first, .end", rank=rank)
            if held > weight.numel() * 8:
                text = f"{held} bytes held for {len(weight)} of 13 rows: is it a view of the whole?"
                fail(text, cause="too-much-memory", rank=rank)
            if results.logs[rank].events:
                fail("sharding a table needs no communication", cause="too-many-messages")


@exercise("2.16", "virtual gloo cuda", asserts="vectors")
def test_embedding_equals_one_process(impl, run, seed, cases):
    """Words at the borders of the ranks, some of them twice: vectors and gradients."""
    sizes = cases((3, 13), (1, 5), (2, 7), (4, 12), (4, 4))
    for w, vocabulary in sizes:

        def body(ctx, vocabulary=vocabulary):
            embedding = impl.VocabParallelEmbedding(table(seed, vocabulary).to(ctx.device))
            words = border_words(vocabulary, ctx.world_size).to(ctx.device)
            out = embedding(words)
            (out * values(seed, 2, *out.shape).to(ctx.device)).sum().backward()
            return out.detach().cpu(), embedding.weight.grad.cpu()

        whole, words = table(seed, vocabulary), border_words(vocabulary, w)
        want = whole(words)
        (want * values(seed, 2, *want.shape)).sum().backward()
        for rank, (out, grad) in enumerate(run(body, w)):
            what = f"{vocabulary} words over {w} ranks: "
            wrong = out.shape == want.shape and (out - want).abs().amax(-1) > 1e-9
            if out.shape == want.shape and wrong.any():
                bad, mine = sorted(set(words[wrong].tolist())), cut(vocabulary, w)
                fail(
                    f"{what}the vectors of words {bad} are wrong on rank {rank}; the ranks' words "
                    f"begin at {mine[:-1]}",
                    cause="wrong-vectors",
                    rank=rank,
                )
            expect_close(out, want, what=what + "vectors", rank=rank, **EXACT)
            right = rows_of(whole.weight.grad, rank, w)
            expect_close(grad, right, what=what + "gradient of the rows", rank=rank, **EXACT)


def targets_of(seed: int, vocabulary: int, world_size: int) -> torch.Tensor:
    """Border words and tokens that don't count: (2, …)."""
    words = border_words(vocabulary, world_size)
    words[1, ::2] = -100
    return words


def logits_of(seed: int, targets: torch.Tensor, vocabulary: int, world_size: int) -> torch.Tensor:
    """Logits that differ from rank to rank, of a size that exp can't bear, of either sign."""
    owner = torch.bucketize(torch.arange(vocabulary), torch.tensor(cut(vocabulary, world_size)[1:]))
    sign = torch.tensor([1.0, -1.0]).repeat(targets.shape[-1])[: targets.shape[-1], None]
    return values(seed, 3, *targets.shape, vocabulary) + 3.0 * owner + 900.0 * sign


def own_words_only(logits: torch.Tensor, targets: torch.Tensor, rank: int, world_size: int):
    """A rule: the softmax is over this rank's words alone."""
    place = targets.clamp(min=0).unsqueeze(-1)
    own = columns_of(logits, rank, world_size).logsumexp(-1) - logits.gather(-1, place).squeeze(-1)

    def rule(case: Case) -> Diagnosis | None:
        if not case.fits(own.masked_fill(targets < 0, 0)):
            return None
        text = f"the sum of exponentials is over the words of rank {rank} alone"
        return Diagnosis("local-normaliser", text)

    return (rule,)


@exercise("2.16", "virtual gloo cuda", asserts="loss unchanged")
def test_loss_equals_one_process(impl, run, seed, cases):
    """Losses and gradients of large, uneven logits, with uncounted tokens, equal cross_entropy."""
    sizes = cases((3, 13), (1, 5), (2, 7), (4, 12), (4, 4), (1, 1))
    for w, vocabulary in sizes:
        targets = targets_of(seed, vocabulary, w)
        whole = logits_of(seed, targets, vocabulary, w).requires_grad_()

        def body(ctx, vocabulary=vocabulary, targets=targets, whole=whole):
            logits = columns_of(whole.detach(), ctx.rank, ctx.world_size).to(ctx.device)
            logits.requires_grad_()
            losses = impl.vocab_parallel_cross_entropy(logits, targets.to(ctx.device), vocabulary)
            (losses * values(seed, 4, *targets.shape).to(ctx.device)).sum().backward()
            return losses.detach().cpu(), logits.grad.cpu(), logits.detach().cpu()

        want = F.cross_entropy(whole.flatten(0, 1), targets.flatten(), reduction="none")
        want = want.view(targets.shape)
        (want * values(seed, 4, *targets.shape)).sum().backward()
        for rank, (losses, grad, after) in enumerate(run(body, w)):
            what = f"{vocabulary} words over {w} ranks: "
            expect_close(
                losses,
                want,
                what=what + "losses",
                rank=rank,
                rules=own_words_only(whole.detach(), targets, rank, w),
                rtol=1e-9,
                atol=1e-9,
            )
            right = columns_of(whole.grad, rank, w)
            expect_close(
                grad, right, what=what + "gradient of the logits", rank=rank, rtol=1e-9, atol=1e-9
            )
            kept = torch.equal(after, columns_of(whole.detach(), rank, w))
            expect_equal(kept, True, what="logits unchanged", rank=rank, cause="input-changed")


@exercise("2.16", "virtual", asserts="loss-dtype dtype")
def test_loss_in_sixteen_bits(impl, run, seed):
    """bfloat16 logits: computed in float32, losses float32, gradient bfloat16."""
    targets = torch.tensor([0, 5, -1, 11])

    def body(ctx):
        logits = columns_of(values(seed, 5, 4, 12).bfloat16(), ctx.rank, 2).requires_grad_()
        losses = impl.vocab_parallel_cross_entropy(logits, targets, 12, ignore_index=-1)
        losses.sum().backward()
        return losses.detach(), logits.grad

    whole = values(seed, 5, 4, 12).bfloat16().float().requires_grad_()
    want = F.cross_entropy(whole, targets, ignore_index=-1, reduction="none")
    want.sum().backward()
    for rank, (losses, grad) in enumerate(run(body, 2)):
        what = "bfloat16 logits, ignore_index -1: "
        expect_close(losses, want, what=what + "losses", rank=rank)
        right = columns_of(whole.grad, rank, 2).bfloat16()
        expect_close(grad, right, what=what + "gradient", rank=rank)


@exercise("2.16", "virtual gloo", asserts="logits vectors loss")
def test_tied_head_equals_one_process(impl, run, seed):
    """Embedding, a layer and the tied head: one weight collects the gradients of both uses."""
    words, targets = border_words(13, 3), border_words(13, 3).roll(1, 1)

    def model(embed, head, loss):
        hidden = torch.tanh(embed(words))
        return loss(head(hidden)), hidden

    def body(ctx):
        embedding = impl.VocabParallelEmbedding(table(seed, 13))
        loss = lambda z: impl.vocab_parallel_cross_entropy(z, targets, 13).sum()
        total, hidden = model(embedding, embedding.logits, loss)
        hidden.retain_grad()
        total.backward()
        return [t.detach() for t in (total, hidden.grad, embedding.weight.grad)]

    whole = table(seed, 13)
    loss = lambda z: F.cross_entropy(z.flatten(0, 1), targets.flatten(), reduction="sum")
    total, hidden = model(whole, lambda x: F.linear(x, whole.weight), loss)
    hidden.retain_grad()
    total.backward()
    for rank, got in enumerate(run(body, 3)):
        want = [total, hidden.grad, rows_of(whole.weight.grad, rank, 3)]
        names = ["loss", "gradient before the head", "gradient of the tied rows"]
        for name, a, b in zip(names, got, want, strict=True):
            expect_close(a, b, what=name, rank=rank, **EXACT)


REGIONS = ("embedding", "head", "loss", "loss backward", "head backward")


@exercise("2.16", "virtual gloo", asserts="embedding-bytes head-bytes loss-bytes largest cost")
def test_no_rank_sees_all_logits(impl, run, seed):
    """Three numbers per token are sent, and no tensor is larger than this rank's logits."""
    n, vocabulary, w, dtypes = 50, 400, 4, (torch.float32, torch.bfloat16)

    def body(ctx):
        words = torch.arange(n)
        with Largest() as largest:
            for dtype in dtypes:
                whole = table(seed, vocabulary).to(dtype)
                embedding = impl.VocabParallelEmbedding(whole)
                largest.numel = 0  # what cuts the table is not counted
                with ctx.region(f"embedding {dtype}"):
                    x = embedding(words)
                with ctx.region(f"head {dtype}"):
                    logits = embedding.logits(x)
                with ctx.region(f"loss {dtype}"):
                    losses = impl.vocab_parallel_cross_entropy(logits, words, vocabulary)
                with ctx.region(f"loss backward {dtype}"):
                    grad = torch.autograd.grad(losses.sum(), logits, retain_graph=True)[0]
                with ctx.region(f"head backward {dtype}"):
                    torch.autograd.backward(logits, grad)
        return largest.numel, list(largest.shape), largest.op

    results = run(body, w)
    share = vocabulary // w * n
    for rank, (numel, shape, op) in enumerate(results):
        if numel > share:
            fail(
                f"rank {rank} makes a tensor of shape {shape} ({op.removeprefix('aten.')}): this "
                f"rank's logits are {n}·{vocabulary // w}, nothing may be larger",
                cause="full-logits",
                rank=rank,
            )
    ring = 2 * (w - 1) / w
    for log, dtype in product(results.logs, dtypes):
        log.all_waited()
        part = {name: log.select(region=f"{name} {dtype}") for name in REGIONS}
        messages = part["loss"].messages
        if messages > 2:
            text = f"rank {log.rank} issues {messages} collectives for a loss, two are enough"
            fail(text, cause="too-many-messages", rank=log.rank)
        part["head"].sent_at_most(0, "nothing")
        part["loss"].sent_at_most(3 * n * ring * 4, "2(W-1)/W·3 numbers of float32 per token")
        part["loss backward"].sent_at_most(0, "nothing")
        for region in ("embedding", "head backward"):
            formula = f"one all-reduce of N·D numbers of {dtype}"
            part[region].sent_at_most(n * WIDTH * ring * dtype.itemsize, formula)


def whole_numbers(seed: int, salt: int, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """-2 … 2: short sums of their products are exact in every dtype."""
    generator = torch.Generator().manual_seed(seed * 1009 + salt)
    return torch.randint(-2, 3, shape, generator=generator).to(dtype)


ODD = (  # dtype, frozen, shape of the words, ignore_index; the words are stored the other way round
    (torch.float16, False, (2, 3), 3),
    (torch.float32, True, (5,), -1),
    (torch.bfloat16, False, (), -100),
    (torch.float64, False, (0, 2), 12),
)


def odd_inputs(seed: int, number: int, vocabulary: int) -> tuple[torch.Tensor, ...]:
    """Table, words, gradients of their vectors, logits (some -inf), gradients of the losses."""
    dtype, _, shape, ignored = ODD[number]
    generator = torch.Generator().manual_seed(seed + number)
    words = torch.randint(0, vocabulary - 1, shape, generator=generator)
    if number == 0:
        words[0, 0] = ignored  # no negative number is ignored there
    words = words.movedim(0, -1).contiguous().movedim(-1, 0) if words.ndim else words
    rows = whole_numbers(seed, number, dtype, vocabulary, WIDTH)
    of_vectors = whole_numbers(seed, 10 + number, dtype, *shape, WIDTH)
    logits = whole_numbers(seed, 20 + number, dtype, *shape, vocabulary)
    if number == 1:
        logits[..., : vocabulary // 2] = -torch.inf
        words = words.clamp(min=vocabulary // 2)
    wide = torch.promote_types(dtype, torch.float32)
    return rows, words, of_vectors, logits, whole_numbers(seed, 30 + number, wide, *shape)


def turned(x: torch.Tensor) -> torch.Tensor:
    """The same values behind other strides."""
    return x.movedim(0, -1).contiguous().movedim(-1, 0)


def infinite_inputs(seed: int, vocabulary: int) -> tuple[torch.Tensor, ...]:
    """Table with rows that no word needs, words, logits and targets, of which two are ignored."""
    rows, logits = values(seed, 40, vocabulary, WIDTH), values(seed, 41, 7, vocabulary)
    words = torch.tensor([1, vocabulary // 2 + 1, vocabulary - 2])
    for first in (0, vocabulary // 2):
        rows[first], rows[first + 2] = torch.nan, torch.inf
    rows[vocabulary - 1] = -torch.inf
    targets = torch.tensor([0, -100, vocabulary - 1, -100, -100, 1, vocabulary - 2])
    logits[1], logits[3], logits[4, 0] = torch.nan, -torch.inf, torch.inf
    logits[5, 1], logits[6, 0] = -torch.inf, torch.nan  # of a target, beside a target
    return rows, words, logits, targets


def check_infinite(got: tuple[torch.Tensor, ...], seed: int, vocabulary: int, rank: int) -> None:
    """NaN in rows of other words and in logits of ignored tokens shows
    nowhere; any other NaN shows."""
    rows, words, logits, targets = infinite_inputs(seed, vocabulary)
    ignored = targets == -100
    logits = logits.masked_fill(ignored.unsqueeze(-1), 0).requires_grad_()
    losses = F.cross_entropy(logits, targets, reduction="none")
    losses.sum().backward()
    want = rows[words], losses.detach(), columns_of(logits.grad, int(rank > 1), 2)
    names = (
        "vectors, where rows of other words are NaN or infinite",
        "losses, where logits of ignored tokens and of counted ones are NaN or infinite",
        "gradient of the logits, of which some are NaN or infinite",
    )
    for name, a, b in zip(names, got, want, strict=True):
        expect_close(a, b, what=name, rank=rank, **EXACT)


NAMES = ("vectors", "gradient of the rows", "logits", "gradient of x", "losses", "their gradient")


@exercise(
    "2.16",
    "virtual",
    asserts="vectors rows own-parameter logits loss loss-dtype ignored unchanged any-shape group "
    "dtype layout parameters life alone resources",
)
def test_every_kind_of_words_in_groups(impl, run, seed):
    """16 bits, frozen, strided, no words, one rank all -inf, used twice: in two groups at once."""

    def body(ctx):
        even = ctx.rank in (0, 2)
        mine = [dist.new_group(ranks) for ranks in ([3, 1], [0, 2])][even]
        place, vocabulary, seeds = int(ctx.rank > 1), 13 - even, seed + even
        out = []
        for number in range(len(ODD))[::-1] if even else range(len(ODD)):
            _, frozen, _, ignored = ODD[number]
            rows, words, of_vectors, whole, of_losses = odd_inputs(seeds, number, vocabulary)
            with PeakMemory() as memory:
                full = nn.Embedding(vocabulary, WIDTH, _weight=rows.clone())
                full.weight.grad = torch.ones_like(rows)
                full.requires_grad_(not frozen)
                embedding, alive = impl.VocabParallelEmbedding(full, mine), weakref.ref(full)
                facts = [full.weight.grad is None, embedding.weight.grad, embedding.first]
                facts.append(embedding.weight.requires_grad)
                del full
            facts.append(alive() is None and memory.current <= storage_bytes([embedding.weight]))
            vectors = embedding(words)
            if not frozen:
                (embedding(words) + vectors).backward(of_vectors)
            got = [vectors.detach(), embedding.weight.grad]
            x = of_vectors.clone().requires_grad_()
            logits = embedding.logits(x)
            of_logits = columns_of(whole, place, 2).nan_to_num(0, 0, 0)
            got += [logits.detach(), torch.autograd.grad(logits, x, of_logits)[0]]
            share = turned(columns_of(whole, place, 2)).requires_grad_()
            targets = words.clone()
            options = {"ignore_index": ignored, "group": mine}
            losses = impl.vocab_parallel_cross_entropy(share, targets, vocabulary, **options)
            for _ in range(2):
                losses.backward(of_losses, retain_graph=True)
            quiet = share.detach().clone()  # where no gradient is needed
            impl.vocab_parallel_cross_entropy(quiet, targets, vocabulary, **options)
            facts.append(torch.equal(targets, words) and torch.equal(quiet, share))
            out.append(([*got, losses.detach(), share.grad], facts))
        rows, words, logits, targets = infinite_inputs(seeds, vocabulary)
        full = nn.Embedding(vocabulary, WIDTH, _weight=rows)
        vectors = impl.VocabParallelEmbedding(full, mine)(words).detach()
        share = columns_of(logits, place, 2).requires_grad_()
        losses = impl.vocab_parallel_cross_entropy(share, targets, vocabulary, group=mine)
        losses.backward(torch.ones_like(losses))
        out = out[::-1] if even else out
        return [*out, (vectors, losses.detach(), share.grad)]

    for rank, results in enumerate(run(body, 4)):
        even, place = rank in (0, 2), int(rank > 1)
        vocabulary = 13 - even
        check_infinite(results.pop(), seed + even, vocabulary, rank)
        for number, (got, facts) in enumerate(results):
            dtype, frozen, shape, ignored = ODD[number]
            rows, words, of_vectors, logits, of_losses = odd_inputs(seed + even, number, vocabulary)
            what = f"words {shape} of {vocabulary}, {dtype}, ignore_index {ignored}: "
            what += "the first rank's logits are all -inf: " if number == 1 else ""
            first = cut(vocabulary, 2)[place]
            text = f"{what}whole changed, stale gradient, first, trainable, freed, inputs stay"
            expect_equal(facts, [False, None, first, not frozen, True, True], what=text, rank=rank)
            weight = rows.clone().requires_grad_()
            vectors = F.embedding(words, weight)
            vectors.backward(2 * of_vectors)
            x = of_vectors.clone().requires_grad_()
            head = F.linear(x, rows)
            head.backward(logits.nan_to_num(0, 0, 0))
            wide = logits.to(of_losses.dtype).requires_grad_()
            losses = F.cross_entropy(
                wide.view(-1, vocabulary),
                words.reshape(-1),
                ignore_index=ignored,
                reduction="none",
            ).view(shape)
            losses.backward(2 * of_losses)
            want = [vectors, None if frozen else rows_of(weight.grad, place, 2)]
            want += [columns_of(head, place, 2), x.grad, losses]
            want.append(columns_of(wide.grad, place, 2).to(dtype))
            for name, a, b in zip(NAMES, got, want, strict=True):
                if b is None:
                    expect_equal(a, None, what=what + name, rank=rank, cause="frozen")
                else:
                    expect_close(a, b.detach(), what=what + name, rank=rank)


@exercise("2.16", "virtual", asserts="few-words bad-word bad-target options refusals")
def test_vocabulary_refuses_bad_input(impl, run, seed):
    """Too few words, foreign words or targets, wrong shapes: ValueError before anything is sent."""

    def body(ctx):
        embedding = impl.VocabParallelEmbedding(table(seed, 13))
        logits = torch.zeros(2, embedding.end - embedding.first)
        options = {"padding_idx": 0}, {"max_norm": 1.0}, {"sparse": True}
        options += ({"scale_grad_by_freq": True},)
        group = dist.new_group([0, 1])
        loss, good = impl.vocab_parallel_cross_entropy, torch.tensor([0, 12])
        outside = [
            lambda group: impl.vocabulary_range(13, group),
            lambda group: impl.VocabParallelEmbedding(table(seed, 13), group),
            lambda group: loss(logits, good, 13, group=group),
        ]
        return [
            refusal(impl.vocabulary_range, 2),
            refusal(impl.VocabParallelEmbedding, nn.Embedding(2, WIDTH)),
            *(refusal(impl.VocabParallelEmbedding, nn.Embedding(13, WIDTH, **o)) for o in options),
            refusal(embedding, torch.tensor([3, 13])),
            refusal(embedding, torch.tensor([-1, 3])),
            refusal(loss, logits, torch.tensor([13, 0]), 13),
            refusal(loss, logits, torch.tensor([0, -7]), 13),
            refusal(loss, logits[:, 1:], good, 13),
            refusal(loss, logits[:1], good, 13),
            refusal(loss, logits.t(), good, 13),
            refusal(loss, logits, torch.tensor([0, -100]), 13, ignore_index=-1),
            *([refusal(call, group) for call in outside] if ctx.rank == 2 else []),
            *([refusal(loss, logits[:, 1:], good, 13)] if ctx.rank == 1 else []),
        ]

    calls = [
        "2 words for 3 ranks",
        "an embedding of 2 words for 3 ranks",
        "an embedding with padding_idx",
        "an embedding with max_norm",
        "a sparse embedding",
        "an embedding with scale_grad_by_freq",
        "word 13 of 13",
        "word -1",
        "target 13 of 13",
        "target -7",
        "a logit too few",
        "a token too few",
        "transposed logits",
        "target -100 with another ignore_index",
    ]
    results = run(body, 3)
    names = [f"{name} outside of the group" for name in ("a range", "an embedding", "a loss")]
    expect_refusals(results[2][len(calls) :], names, rank=2)
    expect_refusals(results[1][len(calls) :], ["a logit too few on this rank alone"], rank=1)
    results[1:] = [each[: len(calls)] for each in results[1:]]
    expect_refused(results, calls)


@trace("2.16")
def trace_vocabulary(impl):
    """Two steps of a tied embedding and head with 2,000 words and 512 tokens."""

    def body(ctx):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            whole = nn.Embedding(2000, 128)
        embedding = impl.VocabParallelEmbedding(whole)
        words = torch.arange(512) * 3
        for _ in ctx.steps(3):
            with ctx.region("embedding"):
                x = embedding(words)
            with ctx.region("head and loss"):
                logits = embedding.logits(x)
                losses = impl.vocab_parallel_cross_entropy(logits, words.roll(-1), 2000)
            with ctx.region("backward"):
                losses.mean().backward()

    return body
