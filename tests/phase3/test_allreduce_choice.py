"""Checks of exercise 3.29: the cost model, its fit, and the choice of a pattern by size."""

from __future__ import annotations

import torch
import torch.distributed as dist

from distlab.grading import exercise, expect_equal, fail, trace
from tests.phase3.reductions import (
    bad_arguments,
    check_all_reduce,
    check_layouts,
    check_refusals,
    check_subgroup,
    distinct,
    warm_and_drawn,
    whole,
)

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


@exercise("3.29", asserts="path alone-path path-refused predicted refusals")
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
    """The times that ``measure`` would find on LINKS, with the largest tensors
    ``noise`` times slower."""
    sizes = (4, 400, 40_000, 4_000_000, 400_000_000)
    return [
        (p, w, n, seconds(p, w, n, *LINKS[p]) * (noise if n == sizes[-1] else 1))
        for n in sizes
        for p in PATTERNS
        for w in (1, 3, 4)
    ]


@exercise("3.29", asserts="fitted relative not-negative one-rank fit-refused refusals")
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
                f"{p}: a time of 400 MB that is 30 % longer moves α by {error:.0%}. Weigh relative "
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


@exercise("3.29", asserts="chosen tie")
def test_choice_is_the_smallest_prediction(impl, run):
    """The pattern with the fastest prediction, among those of links."""
    sizes = [4 * 10**k for k in range(9)]
    given = [(patterns, w) for patterns in (PATTERNS, PATTERNS[:0:-1]) for w in (3, 4)]
    equal = dict.fromkeys(reversed(PATTERNS), (0.0, 0.0))

    def body(ctx):
        links = [{p: impl.Link(*LINKS[p]) for p in patterns} for patterns, _ in given]
        found = [
            [impl.choose(w, n, few) for n in sizes]
            for few, (_, w) in zip(links, given, strict=True)
        ]
        same = {p: impl.Link(*link) for p, link in equal.items()}
        return found, [impl.choose(1, 8, links[0]), impl.choose(4, 8, same)]

    found, ties = run(body, 1, process_group=False)[0]
    for (patterns, w), chosen in zip(given, found, strict=True):
        for n, got in zip(sizes, chosen, strict=True):
            times = {p: seconds(p, w, n, *LINKS[p]) for p in patterns}
            want = min(times, key=times.get)
            text = f"the choice for {n:,} bytes on {w} ranks among {', '.join(patterns)}"
            expect_equal(got, want, what=text, cause="choice")
    what = "the choice where all predictions are 0, links in the order of PATTERNS and against it"
    expect_equal(ties, ["tree", "tree"], what=what, cause="tie")


@exercise("3.29", "virtual gloo cuda", asserts="pattern links cost")
def test_auto_sends_what_the_best_pattern_sends(impl, run):
    """all_reduce runs the named pattern, or with "auto" the pattern that is
    fastest on these links."""
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


@exercise("3.29", "virtual gloo cuda", asserts="reduction refused refusals dtype any-tensor alone")
def test_all_reduce_with_any_pattern(impl, run, seed, cases):
    """auto with its own links and check=True, on any length and W; unknown patterns are refused."""
    call = lambda tensor, op: impl.all_reduce(tensor, op, check=True)
    check_all_reduce(run, seed, cases(3, 1, 2, 4), call)
    unknown = lambda: impl.all_reduce(torch.ones(3), pattern="star")
    check_refusals(run, {"the pattern star": unknown} | bad_arguments(impl_call(impl)))


def impl_call(impl):
    return lambda tensor, op="sum", group=None: impl.all_reduce(tensor, op, group, pattern="ring")


@exercise("3.29", "virtual", asserts="group any-tensor layout life alone")
def test_all_reduce_in_groups_and_on_views(impl, run, seed):
    """The world size of the choice, and the ranks, are the group's; any strides are reduced."""
    check_subgroup(run, seed, lambda t, op, g: impl.all_reduce(t, op, g, check=True), whole)
    check_layouts(run, seed, lambda t, op, g: impl.all_reduce(t, op, g), whole)
    link = {"tree": (1.0, 0.0), "ring": (0.9, 0.0)}  # 2 messages each on 2 ranks, more on 4

    def body(ctx):
        groups = [dist.new_group([0, 2]), dist.new_group([3, 1])]
        links = {p: impl.Link(*one) for p, one in link.items()}
        with ctx.region("two"):
            impl.all_reduce(distinct(ctx), "sum", groups[ctx.rank % 2], links=links)
        with ctx.region("four"):
            impl.all_reduce(distinct(ctx), links=links)

    results = run(body, 4)
    two = sum(log.select(region="two").messages for log in results.logs)
    expect_equal(two, 2 * 4, what="messages of two rings of 2 ranks each", cause="not-chosen")
    four = sum(log.select(region="four").messages for log in results.logs)
    expect_equal(four, 6, what="messages of a tree of 4 ranks", cause="not-chosen")


@exercise("3.29", "virtual", asserts="bytes-choose dtype")
def test_choice_goes_by_bytes(impl, run):
    """8 bytes per element can make another choice than 2; a choice counts bytes, not elements."""
    link = {"tree": (1e-9, 1e-9), "ring": (1.5e-6, 1e-12)}  # equal at about 1,000 bytes

    def body(ctx):
        links = {p: impl.Link(*one) for p, one in link.items()}
        for dtype in (torch.bfloat16, torch.float64):
            with ctx.region(str(dtype)):
                impl.all_reduce(torch.ones(9_000, dtype=dtype)[:500], links=links)

    results = run(body, 4)
    for dtype, size in ((torch.bfloat16, 2), (torch.float64, 8)):
        best = min(link, key=lambda p: seconds(p, 4, 500 * size, *link[p]))
        sent = sum(log.select(region=str(dtype)).messages for log in results.logs)
        want = {"tree": 6, "ring": 24}[best]
        what = f"messages of 500 elements of {dtype} ({best} is faster)"
        expect_equal(sent, want, what=what, cause="not-chosen")


@exercise("3.29", asserts="least-squares not-negative")
def test_least_squares(impl, run):
    """The smallest sum of squares with α, β >= 0, in three cases: both, α alone, β alone."""
    given = [
        [(2.0, 10.0, 3.0), (2.0, 1000.0, 30.0), (6.0, 500.0, 20.0)],
        [(2.0, 10.0, 3.0), (2.0, 1000.0, 1.0), (6.0, 500.0, 8.0)],
        [(2.0, 10.0, 0.01), (2.0, 1000.0, 9.0), (6.0, 500.0, 2.0)],
    ]

    def body(ctx):
        return [list(map(float, impl.least_squares(rows))) for rows in given]

    for rows, got in zip(given, run(body, 1, process_group=False)[0], strict=True):
        m, b, t = torch.tensor(rows, dtype=torch.float64).unbind(1)
        both = torch.linalg.lstsq(torch.stack([m, b], 1), t[:, None]).solution.flatten().tolist()
        options = [both, [float(m @ t / (m @ m)), 0.0], [0.0, float(b @ t / (b @ b))]]
        allowed = [one for one in options if min(one) >= 0]
        want = min(allowed, key=lambda one: float(((m * one[0] + b * one[1] - t) ** 2).sum()))
        for name, x, y in zip("αβ", got, want, strict=True):
            if abs(x - y) > 1e-9 * max(want):
                fail(f"{rows}: {name} is {y:.9g}, got {x:.9g}", cause="fit")


@exercise("3.29", "virtual", asserts="check alone")
def test_all_reduce_checks_first(impl, run):
    """With check=True ranks with different lengths raise, whatever each would have chosen."""

    def body(ctx):
        try:
            impl.all_reduce(torch.ones(1 if ctx.rank else 10_000_000), check=True)
            return ""
        except ValueError:
            return "refused"

    for rank, text in enumerate(run(body, 3)):
        if not text:
            fail("no ValueError for 10,000,000 and 1 elements", cause="accepted", rank=rank)


@exercise("3.29", "gloo", asserts="same-everywhere")
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
    """Tree, halving and doubling, and ring on 8 MB, then the choice for 4 kB."""

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
