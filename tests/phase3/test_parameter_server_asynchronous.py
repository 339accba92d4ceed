"""Checks of exercises 3.23 and 3.24: no update lost, no wait for the slow, bounded staleness."""

from __future__ import annotations

import time

import torch
import torch._dynamo  # torch.optim imports it when an optimizer is made: once here, not per rank
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from distlab.grading import exercise, expect_close, expect_equal, expect_refused, fail, refusal
from tests.phase3.bad_input import check_models_that_differ
from tests.phase3.serving import LR, SIZES, batches, gathered, in_rounds, network, served, zeros

INFINITY = float("inf")
FAST = 40  # steps of a worker, while another one takes its first


def ones() -> dict[str, torch.Tensor]:
    return {k: torch.ones(shape) for k, shape in SIZES.items()}


def token(send_to: int | None = None, receive_from: int | None = None) -> None:
    """A message between workers, so that one can't go on before the other has come as far."""
    if send_to is not None:
        dist.send(torch.zeros(3), send_to)
    if receive_from is not None:
        dist.recv(torch.zeros(3), receive_from)


def serving(impl, staleness):
    if staleness == INFINITY:
        return impl.serve_asynchronous
    return lambda server: impl.serve_bounded(server, staleness)


def count_up(run, impl, servers, counts, staleness, beside=0, **options):
    """Workers push gradients of 1 with lr 1; at each pull they note [clock, versions, values].

    ``beside``: how many ranks, the first ones, are outside the group, and do nothing.
    """

    def body(ctx):
        world = range(beside, ctx.world_size)
        group = dist.new_group([*world]) if beside else None
        if ctx.rank < beside:
            return None

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

        serve = serving(impl, staleness)
        return served(impl, ctx, zeros(), servers, serve, worker, lr=1.0, group=group)

    results = run(body, beside + servers + len(counts), **options)
    return [results[rank] for rank in range(beside, len(results))]


def expect_total(results, servers, total, what) -> None:
    """Every server has applied every push, each exactly once."""
    for rank in range(servers):
        values, version, *_ = results[rank]
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
    """A pull gives one version, the one that it names."""
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


@exercise("3.23", "virtual gloo", asserts="applied group cost")
def test_no_update_is_lost(impl, run, seed, cases):
    """Every push counts once, whatever the order and the delays; a pull is one whole version."""
    for servers, counts in cases((2, [4, 3, 5]), (1, [5]), (3, [2, 2])):
        what = f"{servers} servers, workers push {counts} times"
        results = count_up(run, impl, servers, counts, INFINITY, servers, delays=True)
        expect_total(results, servers, sum(counts), what)
        expect_snapshots(results, servers, what)


@exercise("3.23", "virtual gloo", asserts="at-once cost")
def test_nobody_waits_for_a_slow_worker(impl, run, seed):
    """One worker computes its gradient until another has done all its steps."""

    def body(ctx):
        def worker(client, number):
            for _ in range(1 if number else FAST):
                client.pull(["a"])
                if number:
                    token(receive_from=1)
                client.push({"a": torch.ones(SIZES["a"])})
            if not number:
                client.push({})  # a version all the same
                client.pull(["a"])
                token(send_to=2)
            client.leave()
            return list(client.versions)

        return served(impl, ctx, zeros(), 1, impl.serve_asynchronous, worker, lr=1.0)

    (values, version, *_), fast, _ = run(body, 3)
    want = [FAST + 2, [FAST + 1]]
    what = "updates, one of them by a push of nothing; what the fast worker reads at its end"
    expect_equal([version, fast], want, what=what, cause="lost-update")
    after = torch.full(SIZES["a"], -FAST - 1.0)
    expect_close(values["a"], after, what=f"a after {FAST + 1} pushes of 1")


@exercise("3.23", "virtual", asserts="applied alone life")
def test_a_dead_worker_corrupts_nothing(impl, run, seed):
    """A worker dies between any two messages: the others' pushes count, its own
    push wholly or not at all."""
    for when in (1, 3, 8, 11):
        check_death(run, impl, INFINITY, when)


def check_death(run, impl, staleness, when) -> None:
    results = count_up(run, impl, 2, [3, 3, 3], staleness, lose=(4, when), survivable=True)
    what = f"3 workers, the last lost at its message {when}"
    for rank in (0, 1):
        values, version, lost, _ = results[rank]
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


@exercise("3.24", "virtual gloo", asserts="bound group")
def test_nobody_reads_too_far_ahead(impl, run, seed, cases):
    """At every pull at clock c the slowest worker has pushed c - s times at least."""
    for servers, staleness in cases((1, 1), (2, 0), (1, 0), (1, 2)):
        counts = [6, 6, 6]
        results = count_up(run, impl, servers, counts, staleness, servers, delays=True)
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


@exercise("3.24", "virtual gloo", asserts="bound cost")
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

        _, version, *_ = run(body, 3)[0]
        expect_equal(version, 2 * (staleness + 3), what=f"updates with s={staleness}")


@exercise("3.24", "virtual gloo", asserts="gone alone")
def test_who_has_left_holds_nobody_back(impl, run, seed, cases):
    """Workers with few steps leave; the other workers finish their steps."""
    for servers, counts, staleness in cases((1, [1, 6, 5], 0), (2, [0, 4], 1), (1, [0], 0)):
        what = f"{servers} servers, workers push {counts} times, s={staleness}"
        results = count_up(run, impl, servers, counts, staleness)
        expect_total(results, servers, sum(counts), what)


@exercise("3.24", "virtual gloo", asserts="gone life")
def test_leaving_releases_who_waits(impl, run, seed):
    """A worker's pull is held for a slow worker. When that worker leaves without a
    push, the pull is answered."""

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

    (_, version, *_), waited, slow = run(body, 3, delays=True)
    expect_equal([version, waited, slow], [1, [1], [1]], what="updates, versions of the last pulls")


@exercise("3.24", "virtual", asserts="gone alone")
def test_a_dead_worker_holds_nobody_back(impl, run, seed):
    """A worker dies between any two messages while others wait for it to catch up."""
    for staleness, when in ((0, 1), (1, 3), (0, 8), (0, 11), (1, 12)):
        check_death(run, impl, staleness, when)


@exercise("3.24", "virtual", asserts="refused refusals")
def test_fit_refuses_on_every_rank(impl, run, seed):
    """A negative staleness and impossible roles: ValueError everywhere, nothing sent."""
    wrong = [{"staleness": -1}, {"staleness": float("nan")}, {"servers": 7}, {"servers": 3}]

    def body(ctx):
        said = []
        for settings in wrong:
            options = {"servers": 1, "lr": 0.1, **settings}
            said.append(refusal(impl.fit, network(seed), batches(seed, ctx.rank, 1), **options))
        said.append(refusal(impl.fit, nn.Linear(5, 3, bias=False), [], servers=2, lr=0.1))
        group = [dist.new_group(members) for members in ([1, 2], [0])][ctx.rank == 0]
        servers = dist.get_world_size(group)
        said.append(refusal(impl.fit, network(seed), [], servers=servers, lr=0.1, group=group))
        server = impl.Server(zeros(), servers=1, lr=0.1)
        return [*said, refusal(impl.serve_bounded, server, -1)]

    calls = [f"fit({settings}) on 3 ranks" for settings in wrong]
    calls += ["fit() with 2 servers for 1 key on 3 ranks", "fit() in a group of servers alone"]
    expect_refused(run(body, 3), [*calls, "serve_bounded with a staleness of -1"])


@exercise("3.24", "virtual", asserts="refused refusals")
def test_models_that_differ_are_refused(impl, run):
    """One rank has another model: fit() raises ValueError on every rank, servers and workers."""
    check_models_that_differ(run, lambda model: impl.fit(model, [], servers=1, lr=0.1))


def unread():
    """A server's batches."""
    raise AssertionError("fit() has read the batches of a server")
    yield


@exercise("3.24", "virtual", asserts="fits parameters group dtype layout")
def test_fit_trains_in_all_three_ways(impl, run, seed):
    """fit() with each kind of server, in a group: every batch counts, the loss goes down."""

    def body(ctx, staleness, lr):
        group = dist.new_group([1, 2, 4, 5])
        if ctx.rank in (0, 3):
            return [{}]
        own = batches(seed, ctx.rank % 2, 4)
        options = {"servers": 2, "lr": lr, "staleness": staleness, "group": group}
        model = network(seed).to(torch.float64 if staleness == 0 else torch.float32)
        own = [(x.to(model[0].weight), y) for x, y in own]
        model[0].weight.data = model[0].weight.data.t().contiguous().t()
        other = torch.ones(ctx.rank, dtype=torch.float16)  # what is frozen stays each rank's own
        model.register_parameter("still", nn.Parameter(other, requires_grad=False))
        return [impl.fit(model, own if ctx.rank > 2 else unread(), **options)]

    # with small steps each push subtracts lr times nearly the same gradient; rounds take the mean
    for staleness, lr in ((None, LR), (INFINITY, LR / 50), (1, LR / 50), (0, LR / 50)):
        results = run(body, 6, staleness, lr)
        for rank in (4, 5):
            what = f"what fit(staleness={staleness}) returns on a worker"
            expect_equal(results[rank][0], {}, what=what, rank=rank, cause="worker-returns")
        got = gathered(results[1:], 2)
        names = sorted(name for name, _ in network(seed).named_parameters())
        what = f"keys that fit(staleness={staleness}) returns on servers"
        expect_equal(sorted(got), names, what=what, cause="keys")
        model = network(seed)
        for inputs, targets in (b for worker in (0, 1) for b in batches(seed, worker, 4)):
            F.cross_entropy(model(inputs), targets).backward()  # all 8 pushes
        want, moved = (
            torch.cat([t.double().flatten() for t in parts])
            for parts in (
                [p.grad for p in model.parameters()],
                [(p.detach() - got[n]) / lr for n, p in model.named_parameters()],
            )
        )
        if staleness is not None and not float((moved - want).norm()) < 0.25 * float(want.norm()):
            share = float(moved @ want / (want @ want))
            said = f"fit(staleness={staleness}) of 2 workers with 4 batches each moves the values "
            said += f"by {share:.2f} of lr times the sum of the 8 gradients, expected about 1: "
            said += "each push is an update of its own, in rounds their mean is"
            fail(said, cause="wrong-server")
        for name, value in in_rounds(seed, [4, 4])[0].items() if staleness is None else ():
            what = f"{name} after fit(staleness=None): 4 rounds of 2 workers"
            expect_close(got[name], value, what=what, rtol=1e-4, atol=1e-5)


@exercise("3.24", "virtual gloo", asserts="fits")
def test_fit_lets_nobody_wait_or_all(impl, run, seed):
    """fit(): with an infinite staleness the fast worker ends alone, with 1 it waits for the slow.

    The slow worker's samples alone have a third feature: only its pushes change those weights.
    """
    for staleness in (INFINITY, 1):

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

        in_time = getattr(run, "simulate", run)  # virtual ranks in the order of virtual time
        before, seen = (run if staleness == INFINITY else in_time)(body, 3)[1]
        fast = [torch.equal(weights, before) for weights in seen]
        want = [True] * 4 if staleness == INFINITY else [True, True, False, False]
        what = f"fit(staleness={staleness}): which of 4 pulls come before any push of the slow one"
        expect_equal(fast[2:], want[2:], what=what, rank=1, cause="wrong-server")
