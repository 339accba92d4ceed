"""Checks of exercises 3.23 and 3.24: no update lost, no wait for the slow, bounded staleness."""

from __future__ import annotations

import time

import torch
import torch._dynamo  # torch.optim imports it when an optimizer is made: once here, not per rank
import torch.distributed as dist
from torch import nn

from distlab.grading import exercise, expect_close, expect_equal, expect_refused, fail, refusal
from tests.phase3.bad_input import check_models_that_differ
from tests.phase3.serving import LR, SIZES, batches, gathered, in_rounds, network, served, zeros

INFINITY = float("inf")


def ones() -> dict[str, torch.Tensor]:
    return {k: torch.ones(shape) for k, shape in SIZES.items()}


def token(send_to: int | None = None, receive_from: int | None = None) -> None:
    """A message between workers, so that one can't go on before the other is so far."""
    if send_to is not None:
        dist.send(torch.zeros(3), send_to)
    if receive_from is not None:
        dist.recv(torch.zeros(3), receive_from)


def serving(impl, staleness):
    if staleness == INFINITY:
        return impl.serve_asynchronous
    return lambda server: impl.serve_bounded(server, staleness)


def count_up(run, impl, servers, counts, staleness, **options):
    """Workers push gradients of 1 with lr 1; at each pull they note [clock, versions, values]."""

    def body(ctx):
        def worker(client, number):
            seen = []
            for clock in range(counts[number]):
                values = client.pull(SIZES)
                spread = [[float(v.min()), float(v.max())] for v in values.values()]
                places = [client.place[k] for k in values]
                seen.append([clock, list(client.versions), spread, places])
                client.push(ones(), 1 + number)
            client.leave()
            return seen

        return served(impl, ctx, zeros(), servers, serving(impl, staleness), worker, lr=1.0)

    return run(body, servers + len(counts), **options)


def expect_total(results, servers, total, what) -> None:
    """Every server has applied every push, each exactly once."""
    for rank in range(servers):
        values, version, _ = results[rank]
        lowest = min(float(v.min()) for v in values.values())
        highest = max(float(v.max()) for v in values.values())
        if not lowest == highest == -total:
            fail(
                f"{what}: {total} pushes of 1 with lr 1 leave {-total} in every element, server "
                f"{rank} has {lowest:g} … {highest:g}",
                cause="lost-update",
                rank=rank,
            )
        expect_equal(version, total, what=f"{what}: updates", rank=rank, cause="versions")


def expect_snapshots(results, servers, what) -> None:
    """What a pull gives is one version, the one that it names."""
    for rank in range(servers, len(results)):
        for clock, versions, spread, places in results[rank]:
            for (low, high), place in zip(spread, places, strict=True):
                if not low == high == -versions[place]:
                    fail(
                        f"{what}: the pull at clock {clock} names version {versions[place]} and "
                        f"brings values of {low:g} … {high:g}, not {-versions[place]}",
                        cause="torn-read",
                        rank=rank,
                    )


@exercise("3.23", "virtual gloo")
def test_no_update_is_lost(impl, run, seed, cases):
    """Every push counts once, whatever the order and the delays; a pull is one whole version."""
    for servers, counts in cases((2, [4, 3, 5]), (1, [5]), (3, [2, 2])):
        what = f"{servers} servers, workers push {counts} times"
        results = count_up(run, impl, servers, counts, INFINITY, delays=True)
        expect_total(results, servers, sum(counts), what)
        expect_snapshots(results, servers, what)


@exercise("3.23", "virtual gloo")
def test_nobody_waits_for_a_slow_worker(impl, run, seed):
    """One worker computes its gradient until another has done all its steps."""

    def body(ctx):
        def worker(client, number):
            for _ in range(1 if number else 5):
                client.pull(["a"])
                if number:
                    token(receive_from=1)
                client.push({"a": torch.ones(SIZES["a"])})
            if not number:
                client.pull(["a"])
                token(send_to=2)
            client.leave()
            return list(client.versions)

        return served(impl, ctx, zeros(), 1, impl.serve_asynchronous, worker, lr=1.0)

    (values, version, _), fast, _ = run(body, 3)
    expect_equal([version, fast], [6, [5]], what="updates, what the fast worker reads at its end")
    expect_close(values["a"], torch.full(SIZES["a"], -6.0), what="a after 6 pushes of 1")


@exercise("3.23", "virtual")
def test_a_dead_worker_corrupts_nothing(impl, run, seed):
    """A worker dies between any two messages: the others' pushes count, its own whole or not."""
    for when in (1, 3, 8, 11):
        check_death(run, impl, INFINITY, when)


def check_death(run, impl, staleness, when) -> None:
    results = count_up(run, impl, 2, [3, 3, 3], staleness, lose=(4, when), survivable=True)
    what = f"3 workers, the last lost at its message {when}"
    for rank in (0, 1):
        values, version, lost = results[rank]
        expect_equal(lost, [4], what=f"{what}: server.lost", rank=rank, cause="death-unnoticed")
        elements = {float(x) for v in values.values() for x in v.flatten()}
        if elements != {-float(version)} or not 6 <= version <= 9:
            fail(
                f"{what}: server {rank} made {version} updates and holds {sorted(elements)}: the "
                "others pushed 6 times",
                cause="corrupted",
                rank=rank,
            )
    expect_equal([len(r) for r in results[2:4]], [3, 3], what=f"{what}: the others' pulls")


@exercise("3.24", "virtual gloo")
def test_nobody_reads_too_far_ahead(impl, run, seed, cases):
    """At every pull at clock c the slowest worker has pushed c - s times at least."""
    for servers, staleness in cases((1, 1), (2, 0), (1, 0), (1, 2)):
        counts = [6, 6, 6]
        results = count_up(run, impl, servers, counts, staleness, delays=True)
        what = f"{servers} servers, 3 workers, s={staleness}"
        expect_total(results, servers, sum(counts), what)
        expect_snapshots(results, servers, what)
        for rank in range(servers, servers + 3):
            for clock, versions, _, _ in results[rank]:
                least = clock + 2 * max(0, clock - staleness)
                if min(versions) < least:
                    fail(
                        f"{what}: a worker at clock {clock} reads version {min(versions)}; with "
                        f"the others at {clock - staleness} or more it is {least} at least",
                        cause="too-stale",
                        rank=rank,
                    )


@exercise("3.24", "virtual gloo")
def test_the_bound_is_used_up(impl, run, seed, cases):
    """A worker may be s pushes ahead of one that has not pushed yet, without waiting."""
    for staleness in cases(2, 0, 1):

        def body(ctx, s=staleness):
            def worker(client, number):
                for step in range(s + 3):
                    client.pull(["a"])
                    if number and step == 0:
                        token(receive_from=1)
                    client.push({"a": torch.ones(SIZES["a"])})
                    if not number and step == s:
                        token(send_to=2)
                client.leave()

            return served(impl, ctx, zeros(), 1, serving(impl, s), worker, lr=1.0)

        _, version, _ = run(body, 3)[0]
        expect_equal(version, 2 * (staleness + 3), what=f"updates with s={staleness}")


@exercise("3.24", "virtual gloo")
def test_who_has_left_holds_nobody_back(impl, run, seed, cases):
    """Workers with few steps leave; the others finish theirs."""
    for servers, counts, staleness in cases((1, [1, 6, 5], 0), (2, [0, 4], 1), (1, [0], 0)):
        what = f"{servers} servers, workers push {counts} times, s={staleness}"
        results = count_up(run, impl, servers, counts, staleness)
        expect_total(results, servers, sum(counts), what)


@exercise("3.24", "virtual gloo")
def test_leaving_releases_who_waits(impl, run, seed):
    """A worker's pull is held for a slow one; that one leaves without a push: it is answered."""

    def body(ctx):
        def worker(client, number):
            if number:
                token(receive_from=1)
                for _ in range(5):
                    client.pull(["a"])
            else:
                client.pull(["a"])
                client.push({"a": torch.ones(SIZES["a"])})
                token(send_to=2)
                client.pull(["a"])
            client.leave()
            return list(client.versions)

        return served(impl, ctx, zeros(), 1, serving(impl, 0), worker, lr=1.0)

    (_, version, _), waited, slow = run(body, 3, delays=True)
    expect_equal([version, waited, slow], [1, [1], [1]], what="updates, versions of the last pulls")


@exercise("3.24", "virtual")
def test_a_dead_worker_holds_nobody_back(impl, run, seed):
    """A worker dies between any two messages while others wait for it to catch up."""
    for staleness, when in ((0, 1), (1, 3), (0, 8), (0, 11), (1, 12)):
        check_death(run, impl, staleness, when)


@exercise("3.24", "virtual")
def test_fit_refuses_on_every_rank(impl, run, seed):
    """A negative staleness and impossible roles: ValueError everywhere, nothing sent."""
    wrong = [{"staleness": -1}, {"staleness": float("nan")}, {"servers": 7}, {"servers": 3}]

    def body(ctx):
        said = []
        for settings in wrong:
            options = {"servers": 1, "lr": 0.1, **settings}
            said.append(refusal(impl.fit, network(seed), batches(seed, ctx.rank, 1), **options))
        said.append(refusal(impl.fit, nn.Linear(5, 3, bias=False), [], servers=2, lr=0.1))
        server = impl.Server(zeros(), servers=1, lr=0.1)
        return [*said, refusal(impl.serve_bounded, server, -1)]

    calls = [(f"fit({settings}) on 3 ranks", ()) for settings in wrong]
    calls.append(("fit() with 2 servers for 1 key on 3 ranks", ()))
    expect_refused(run(body, 3), [*calls, ("serve_bounded with a staleness of -1", ())])


@exercise("3.24", "virtual")
def test_models_that_differ_are_refused(impl, run):
    """One rank has another model: fit() raises ValueError on every rank, servers and workers."""
    check_models_that_differ(run, lambda model: impl.fit(model, [], servers=1, lr=0.1))


@exercise("3.24", "virtual")
def test_fit_trains_in_all_three_ways(impl, run, seed):
    """fit() with each kind of server, in a group: every batch counts, the loss goes down."""

    def body(ctx, staleness, lr):
        group = dist.new_group([1, 2, 3, 4])
        if ctx.rank == 0:
            return [{}]
        own = batches(seed, ctx.rank % 2, 4)
        options = {"servers": 2, "lr": lr, "staleness": staleness, "group": group}
        return [impl.fit(network(seed), own, **options)]

    # small steps go down in any order; after large ones the loss may be higher
    for staleness, lr in ((None, LR), (INFINITY, LR / 10), (1, LR / 10)):
        got = gathered(run(body, 5, staleness, lr)[1:], 2)
        expect_equal(len(got), 6, what=f"keys that fit(staleness={staleness}) returns on servers")
        model = network(seed)
        data = [batch for worker in (0, 1) for batch in batches(seed, worker, 4)]
        inputs, targets = (torch.cat(part) for part in zip(*data, strict=True))
        losses = []
        for values in (None, got):
            if values:
                model.load_state_dict(values)
            losses.append(float(torch.nn.functional.cross_entropy(model(inputs), targets)))
        if staleness is not None and not losses[1] < losses[0]:
            problem = f"fit(staleness={staleness}): loss {losses[0]:.4f} before, {losses[1]:.4f}"
            fail(problem, cause="not-learning")
        for name, value in in_rounds(seed, [4, 4])[0].items() if staleness is None else ():
            what = f"{name} after fit(staleness=None): 4 rounds of 2 workers"
            expect_close(got[name], value, what=what, rtol=1e-4, atol=1e-5)


@exercise("3.24", "virtual gloo")
def test_fit_lets_nobody_wait_or_all(impl, run, seed, cases):
    """fit(): with an infinite staleness the fast worker ends alone, with 1 it waits for the slow.

    The slow worker's samples alone have a third feature: only its pushes change those weights.
    """
    for staleness in cases(INFINITY, 1):

        def body(ctx, staleness=staleness):
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                model = nn.Linear(3, 2)
            third = lambda: model.weight[:, 2].detach().clone()
            before, seen = third(), []

            def own():
                for step in range(4):
                    if ctx.rank == 2:
                        if staleness == INFINITY and step == 0:
                            token(receive_from=1)
                        time.sleep(0.05)
                    x = torch.ones(1, 3)
                    x[0, 2] = float(ctx.rank == 2)
                    yield x, torch.zeros(1, dtype=torch.int64)
                    seen.append(third())
                if ctx.rank == 1 and staleness == INFINITY:
                    token(send_to=2)

            impl.fit(model, own(), servers=1, lr=0.5, staleness=staleness)
            return before, seen

        before, seen = run(body, 3)[1]
        fast = [torch.equal(weights, before) for weights in seen]
        want = [True] * 4 if staleness == INFINITY else [True, True, False, False]
        what = f"fit(staleness={staleness}): which of 4 pulls come before any push of the slow one"
        expect_equal(fast[2:], want[2:], what=what, rank=1, cause="wrong-server")
