"""Checks of exercise 3.29: the cost model, its fit, and the choice of a pattern by size."""

from __future__ import annotations

import torch
import torch.distributed as dist

from distlab.grading import exercise, expect_equal, fail, trace
from tests.phase3.reductions import check_all_reduce, check_refusals, distinct, warm_and_drawn

PATTERNS = ("tree", "halving_doubling", "ring")
WORLDS = (1, 2, 3, 4, 6, 8, 256)
LINKS = {"tree": (40e-6, 1e-9), "halving_doubling": (50e-6, 0.8e-9), "ring": (60e-6, 0.5e-9)}


def path(pattern: str, w: int, n: int) -> tuple[float, float]:
    """(messages, bytes) one after another."""
    up = (w - 1).bit_length()
    core = 1 << (w.bit_length() - 1)
    extra = 0 if w == core else 2
    return {
        "tree": (2 * up, 2 * up * n),
        "halving_doubling": (
            2 * (core.bit_length() - 1) + extra,
            (2 * (core - 1) / core + extra) * n,
        ),
        "ring": (2 * (w - 1), 2 * (w - 1) / w * n),
    }[pattern]


def seconds(pattern: str, w: int, n: int, alpha: float, beta: float) -> float:
    messages, nbytes = path(pattern, w, n)
    return messages * alpha + nbytes * beta


@exercise("3.29")
def test_critical_path_and_prediction(impl, run):
    """messages·α + bytes·β for each pattern, W and size; unknown patterns are refused."""

    def body(ctx):
        links = {p: impl.Link(*link) for p, link in LINKS.items()}
        out = {}
        for p in PATTERNS:
            for w in WORLDS:
                messages, nbytes = impl.critical_path(p, w, 12_000)
                out[f"{p} {w}"] = [messages, nbytes, impl.predict(p, w, 12_000, links)]
        try:
            impl.critical_path("star", 4, 8)
            return out, False
        except ValueError:
            return out, True

    out, refused = run(body, 1, process_group=False)[0]
    for p in PATTERNS:
        for w in WORLDS:
            want = [*path(p, w, 12_000), seconds(p, w, 12_000, *LINKS[p])]
            names = ("messages", "bytes", "predicted seconds")
            for name, a, b in zip(names, out[f"{p} {w}"], want, strict=True):
                if abs(a - b) > 1e-9 * max(1.0, b):
                    cause = "formula" if name != "predicted seconds" else "prediction"
                    fail(f"{p}, {w} ranks, 12,000 bytes: {name} {b}, got {a}", cause=cause)
    expect_equal(refused, True, what="ValueError for an unknown pattern", cause="accepted")


def timed(noise: float) -> list[tuple[str, int, int, float]]:
    """What ``measure`` would find on LINKS, the largest tensors ``noise`` times slower."""
    sizes = (4, 400, 40_000, 4_000_000, 400_000_000)
    return [
        (p, w, n, seconds(p, w, n, *LINKS[p]) * (noise if n == sizes[-1] else 1))
        for n in sizes
        for p in PATTERNS
        for w in (1, 3, 4)
    ]


@exercise("3.29")
def test_fit_finds_alpha_and_beta(impl, run):
    """Exact times give the exact line for each pattern; noise on large tensors moves β, not α."""
    falling = [("tree", 2, n, 1e-3 / (1 + n)) for n in (1, 10)]
    bent = [("tree", 2, n, 1e-9 * n**2) for n in (10, 100)]
    given = [timed(1.0), timed(1.3), falling, bent]

    def body(ctx):
        def fitted(timings):
            links = impl.fit([impl.Timing(*timing) for timing in timings])
            return {p: list(link) for p, link in links.items()}

        try:
            fitted([("ring", w, 4, 1e-4) for w in (2, 4)])
            refused = False
        except ValueError:
            refused = True
        return *map(fitted, given), refused

    exact, noisy, falling, bent, refused = run(body, 1, process_group=False)[0]
    expect_equal(sorted(exact), sorted(PATTERNS), what="the patterns that were fitted")
    for p in PATTERNS:
        for name, got, want in zip("αβ", exact[p], LINKS[p], strict=True):
            if abs(got - want) > 1e-6 * want:
                fail(f"{p}: {name} is {want:g}, the fit says {got:g}", cause="fit")
        error = abs(noisy[p][0] / LINKS[p][0] - 1)
        if error > 0.2:
            fail(
                f"{p}: a time of 400 MB that is 30 % longer moves α by {error:.0%}: weigh relative "
                "errors, or large tensors decide what small ones cost",
                cause="absolute-errors",
            )
    for what, names, (value, zero), (least, most) in (
        ("that fall with the size", "α and β", falling["tree"], (1e-3 / 11 / 2, 1e-3 / 2 / 2)),
        (
            "that grow like its square",
            "β and α",
            bent["tree"][::-1],
            (1e-9 * 10 / 2, 1e-9 * 100 / 2),
        ),
    ):
        if value < 0 or zero < 0:
            text = f"times {what}: {names} are {value:g} and {zero:g}; neither can be negative"
            fail(text, cause="negative")
        if zero or not 0.999 * least <= value <= 1.001 * most:
            fail(
                f"times {what}: {names} are {value:g} and {zero:g}. The second explains nothing "
                f"and is 0; then the first is between {least:g} and {most:g}",
                cause="negative",
            )
    expect_equal(refused, True, what="ValueError for one size only", cause="accepted")


@exercise("3.29")
def test_choice_is_the_smallest_prediction(impl, run):
    """The pattern that is predicted to be fastest, among those of links."""
    sizes = [4 * 10**k for k in range(9)]
    given = [(patterns, w) for patterns in (PATTERNS, PATTERNS[:0:-1]) for w in (3, 4)]

    def body(ctx):
        links = [{p: impl.Link(*LINKS[p]) for p in patterns} for patterns, _ in given]
        found = [
            [impl.choose(w, n, few) for n in sizes]
            for few, (_, w) in zip(links, given, strict=True)
        ]
        return found, impl.choose(1, 8, links[0])

    found, alone = run(body, 1, process_group=False)[0]
    for (patterns, w), chosen in zip(given, found, strict=True):
        for n, got in zip(sizes, chosen, strict=True):
            times = {p: seconds(p, w, n, *LINKS[p]) for p in patterns}
            want = min(times, key=times.get)
            text = f"the choice for {n:,} bytes on {w} ranks among {', '.join(patterns)}"
            expect_equal(got, want, what=text, cause="choice")
    expect_equal(alone, "tree", what="the choice where all predictions are 0", cause="tie")


@exercise("3.29", "virtual gloo cuda")
def test_auto_sends_what_the_best_pattern_sends(impl, run):
    """all_reduce runs the pattern that is named, or with "auto" the one that links make fastest."""
    fast, slow = (1e-9, 1e-12), (1.0, 1e-3)

    def body(ctx):
        for best in PATTERNS:
            links = {p: impl.Link(*(fast if p == best else slow)) for p in PATTERNS}
            for region, more in ((f"auto {best}", {"links": links}), (best, {"pattern": best})):
                with ctx.region(region):
                    impl.all_reduce(distinct(ctx)[:960], **more)

    results = run(body, 4)
    want = {"tree": 2 * 3, "halving_doubling": 4 * 2 * 2, "ring": 4 * 2 * 3}
    for best in PATTERNS:
        for region in (best, f"auto {best}"):
            sent = sum(log.select(region=region).messages for log in results.logs)
            text = f"messages of all 4 ranks by {region}"
            expect_equal(sent, want[best], what=text, cause="not-chosen")


@exercise("3.29", "virtual gloo cuda")
def test_all_reduce_with_any_pattern(impl, run, seed, cases):
    """auto with its own links and check=True, on any length and W; unknown patterns are refused."""
    call = lambda tensor, op: impl.all_reduce(tensor, op, check=True)
    check_all_reduce(run, seed, cases(3, 1, 2, 4), call)
    unknown = lambda: impl.all_reduce(torch.ones(3), pattern="star")
    check_refusals(run, {"the pattern star": unknown})


@exercise("3.29", "virtual")
def test_all_reduce_checks_first(impl, run):
    """With check=True ranks with different lengths raise, whatever each would have chosen."""

    def body(ctx):
        try:
            impl.all_reduce(torch.ones(1 if ctx.rank else 10_000_000), check=True)
            return ""
        except ValueError as error:
            return str(error)

    said = run(body, 3)
    for rank, text in enumerate(said):
        if not text:
            fail("no ValueError for 10,000,000 and 1 elements", cause="accepted", rank=rank)
        expect_equal(text, said[0], what="the message", rank=rank, cause="messages")


@exercise("3.29", "gloo")
def test_measured_times_make_a_choice(impl, run):
    """measure, fit and choose fit together on this machine, alike on all ranks."""

    def body(ctx):
        sizes = [4, 40_000, 400_000]
        timings = impl.measure(sizes, repeats=3)
        links = impl.fit(timings)
        chosen = [impl.choose(ctx.world_size, n, links) for n in sizes]
        return [t.seconds for t in timings], sorted(links), chosen

    results = run(body, 2, ledger=False)
    for rank, (times, patterns, chosen) in enumerate(results):
        expect_equal(times, results[0][0], what="the timings", rank=rank)
        expect_equal(patterns, sorted(PATTERNS), what="the patterns measured", rank=rank)
        expect_equal(chosen, results[0][2], what="the choice", rank=rank)


@trace("3.29")
def trace_patterns(impl):
    """Tree, halving and doubling, and ring on 8 MB, then what is chosen for 4 kB."""

    def body(ctx):
        tensor = torch.ones(2_000_000)
        for _ in warm_and_drawn(ctx):
            for pattern in ("tree", "halving_doubling", "ring"):
                with ctx.region(pattern):
                    impl.all_reduce(tensor, pattern=pattern)
                dist.barrier()
            with ctx.region("auto"):
                impl.all_reduce(tensor[:1_000])

    return body
