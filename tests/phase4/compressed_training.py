"""Compression hooks as training uses them: two models, several buckets under way, two groups."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distlab.grading import fail
from distlab.observe.log import readable
from distlab.observe.memory import PeakMemory
from distlab.ranks import RankContext
from tests.phase4.compression import Bucket, Run, at_once, gradient

GROUPS = ((4, 1, 3), (2, 0))  # of five ranks; the second one takes a step less
STEPS, MODELS = 4, 2
PRIMES = [p for p in range(5, 114) if all(p % d for d in range(2, p))]  # 28 of them
# of a model's buckets: two are of one size and dtype, and under way at the same time
BUCKETS = (torch.float64, torch.float32, torch.float16, torch.float64)
SIZES = {torch.float64: (229, "large"), torch.float32: (229, "large"), torch.float16: (25, "small")}
SHAPES = {"large": ((9, 12), (10, 3, 2, 2)), "small": ((3, 4), (3, 2, 2, 1))}
GroupMake = Callable[[Sequence[nn.Parameter], Any], Any]  # a hook for parameters and a group


@dataclass(frozen=True)
class Sums:
    """One bucket of one model in one group: what each rank put in and what each one got."""

    what: str
    dtype: torch.dtype
    ranks: list[int]
    own: list[list[Tensor]]  # of each rank, in the order of the group: its gradient of each step
    got: list[list[Tensor]]


def model() -> tuple[list[nn.Parameter], list[Bucket]]:
    """Transposed, 0-d, channels-last and frozen parameters, and the four ``BUCKETS``.

    The buckets hold them in another order than they are given in.
    """
    parameters, buckets = [], []
    for index, dtype in enumerate(BUCKETS):
        flat, images = SHAPES[SIZES[dtype][1]]
        turned = nn.Parameter(torch.zeros(flat, dtype=dtype).T)
        frozen = nn.Parameter(torch.zeros(3, dtype=dtype), requires_grad=False)
        frozen.grad = torch.ones(3, dtype=dtype)
        single = nn.Parameter(torch.zeros((), dtype=dtype))
        last = torch.zeros(images, dtype=dtype).to(memory_format=torch.channels_last)
        filters = nn.Parameter(last)
        parameters += [single, frozen, filters, turned]
        buckets.append(Bucket(index, [turned, filters, single]))
    return parameters, buckets


def put_in(place: int, seed: int, number: int, rank: int, step: int) -> Tensor:
    """What ``rank`` puts into the bucket ``place`` of the model ``number``.

    Rank 3 alone has nothing but zeros in step 2.
    In 16 bits: integers that stay apart however often they are added up, and whose sums are exact.
    """
    dtype, number = BUCKETS[place], number + MODELS * (place // 3)
    numel = SIZES[dtype][0]
    bucket = Bucket(0, [nn.Parameter(torch.zeros(numel, dtype=dtype))])
    if (rank, step) == (3, 2):
        return torch.zeros(numel, dtype=dtype)
    if dtype != torch.float16:
        return gradient(bucket, seed + 31 * number, rank, step)
    generator = torch.Generator().manual_seed(seed * 77 + 13 * number + rank)
    order = torch.randperm(len(PRIMES), generator=generator)[:numel]
    signs = torch.randint(2, (numel,), generator=generator) * 2 - 1
    return (torch.tensor(PRIMES)[order] * signs).to(dtype)


def _trained(make: GroupMake, seed: int, rank: int, group: Any, steps: int) -> dict[str, Any]:
    models = [model() for _ in range(MODELS)]
    hooks = [make(parameters, group) for parameters, _ in models]
    torch.manual_seed(rank)
    before = torch.get_rng_state()
    got = _steps(hooks, [buckets for _, buckets in models], seed, rank, steps)
    parameters = [p for listed, _ in models for p in listed]
    trained = [p for p in parameters if p.requires_grad]
    touched = [p for p in parameters if p.detach().any()]
    touched += [p for p in trained if p.grad is not None]
    refs = [weakref.ref(bucket) for _, buckets in models for bucket in buckets]
    del models
    if any(ref() is not None for ref in refs):
        gc.collect()
    return {
        "got": got,
        "random": not torch.equal(before, torch.get_rng_state()),
        "touched": [tuple(p.shape) for p in touched],
        "kept": sum(ref() is not None for ref in refs),
    }


def _steps(
    hooks: Sequence[Any], models: Sequence[Sequence[Bucket]], seed: int, rank: int, steps: int
) -> list[list[list[Tensor]]]:
    """Of each model and each of its buckets: what every step gives."""
    got: list[list[list[Tensor]]] = [[[] for _ in BUCKETS] for _ in models]
    for step in range(steps):
        for number, (hook, buckets) in enumerate(zip(hooks, models, strict=True)):
            values = [put_in(place, seed, number, rank, step) for place in range(len(BUCKETS))]
            for place, out in enumerate(at_once(hook, buckets, values)):
                got[number][place].append(out)
    return got


def check_training(run: Run, make: GroupMake, seed: int, expect: Callable[[Sums], None]) -> None:
    """Two models in two groups at once; ``expect`` judges each bucket of each model and group."""

    def body(ctx: RankContext) -> dict[str, Any]:
        groups = [dist.new_group([*ranks]) for ranks in GROUPS]
        which = 0 if ctx.rank in GROUPS[0] else 1
        return _trained(make, seed, ctx.rank, groups[which], STEPS - which)

    results = run(body, 5)
    for which, members in enumerate(GROUPS):
        ranks = sorted(members)
        for number in range(MODELS):
            for place, dtype in enumerate(BUCKETS):
                own = [
                    [put_in(place, seed, number, rank, step) for step in range(STEPS - which)]
                    for rank in ranks
                ]
                got = [results[rank]["got"][number][place] for rank in ranks]
                name = str(dtype).removeprefix("torch.")
                what = f"model {number}, bucket {place} of {name}, group {ranks} of 5 ranks"
                _expect_alike(what, dtype, ranks, own, got)
                expect(Sums(what, dtype, ranks, own, got))
    for rank, found in enumerate(results):
        _expect_untouched(found, rank)


def _expect_alike(
    what: str,
    dtype: torch.dtype,
    ranks: list[int],
    own: list[list[Tensor]],
    got: list[list[Tensor]],
) -> None:
    for rank, steps in zip(ranks, got, strict=True):
        for step, (mine, first) in enumerate(zip(steps, got[0], strict=True)):
            if not torch.equal(mine, first):
                fail(
                    f"{what}: step {step} leaves other bits on rank {rank} than on rank {ranks[0]}",
                    cause="ranks-differ",
                    rank=rank,
                )


def _expect_untouched(found: dict[str, Any], rank: int) -> None:
    if found["random"]:
        fail(
            f"rank {rank}'s global random numbers are elsewhere after training: dropout and data "
            "would differ from a run without the hook",
            cause="global-random",
            rank=rank,
        )
    if found["touched"]:
        fail(
            f"the hook has changed parameters of shapes {found['touched']}, or their .grad, on "
            f"rank {rank}: only the bucket's buffer is its own",
            cause="parameters-changed",
            rank=rank,
        )
    if found["kept"]:
        fail(
            f"{found['kept']} of {MODELS * len(BUCKETS)} buckets are still alive on rank {rank} "
            "after the program has dropped them: the hook keeps them, with their buffers",
            cause="bucket-kept",
            rank=rank,
        )


def check_memory(run: Run, make: GroupMake, copies: float) -> None:
    """What the hook keeps is ``copies`` of the gradients, also after buckets are made anew."""
    numel = 20_000

    def body(ctx: RankContext) -> list[int]:
        parameters = [nn.Parameter(torch.zeros(numel // 100, 50)) for _ in range(2)]
        layouts = [[Bucket(0, parameters)], [Bucket(k, [p]) for k, p in enumerate(parameters)]]
        kept = []
        with PeakMemory() as memory:
            hook = make(parameters, None)
            for step in range(5):
                for bucket in layouts[step > 1]:
                    bucket.buffer.fill_(1.0 + ctx.rank)
                    handle = hook(bucket)
                    handle.wait()
                    del handle
                kept.append(memory.current)
        return kept

    for rank, kept in enumerate(run(body, 2)):
        limit = int(copies * numel * 4) + 4096
        if max(kept) > limit:
            fail(
                f"rank {rank} keeps {readable(max(kept))} after step {kept.index(max(kept))}, "
                f"expected {copies:g} copies of the gradients, {readable(copies * numel * 4)}",
                cause="too-much-memory",
                rank=rank,
            )
