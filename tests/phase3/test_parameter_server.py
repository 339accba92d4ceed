"""Checks of exercise 3.22: synchronous rounds, sparse updates, deaths."""

from __future__ import annotations

from unittest import mock

import torch
import torch._dynamo  # torch.optim imports it when an optimizer is made: once here, not per rank
import torch.distributed as dist

from distlab.grading import (
    exercise,
    expect_close,
    expect_equal,
    expect_refused,
    fail,
    refusal,
    trace,
)
from distlab.reference.workloads import build_model, digits
from tests.phase3.bad_input import check_non_members
from tests.phase3.serving import (
    LR,
    SIZES,
    batches,
    gathered,
    in_rounds,
    network,
    parameters,
    served,
    zeros,
)


@exercise("3.22", "virtual", asserts="refused refusals")
def test_impossible_servers_are_refused(impl, run):
    """More servers than keys, none, no worker: ValueError on every rank, nothing sent."""
    counts = (6, 0, -1, 3)  # more than keys, none, a negative number, no worker

    def body(ctx):
        make = lambda servers: impl.Server(zeros(), servers=servers, lr=LR)
        return [refusal(make, servers) for servers in counts]

    asked = [f"Server with {servers} servers of 3 ranks and 5 keys" for servers in counts]
    expect_refused(run(body, 3), asked)


@exercise("3.22", "virtual", asserts="refused refusals")
def test_who_is_no_member_is_refused(impl, run):
    """A rank outside the group can't serve: a ValueError that says so."""
    calls = {"Server": lambda group: impl.Server(zeros(), servers=1, lr=LR, group=group)}
    check_non_members(run, calls)


@exercise("3.22", "virtual gloo", asserts="rounds values mean alone")
def test_rounds_equal_one_process(impl, run, seed, cases):
    """Synchronous training with uneven workers equals one process on all their batches."""
    for servers, counts in cases((2, [3, 2]), (1, [2, 4, 0]), (3, [2]), (1, [3, 3, 3, 3])):
        check_rounds(run, impl, seed, servers, counts)


def check_rounds(run, impl, seed, servers, counts) -> None:
    """Workers begin with other weights than the servers, and have batches of other sizes."""

    def body(ctx):
        def worker(client, number):
            model = network(seed + 1 + number)
            return float(
                impl.module("parameter_client").train(
                    client, model, batches(seed, number, counts[number])
                )
            )

        values = dict(network(seed).named_parameters())
        return served(impl, ctx, values, servers, impl.serve_synchronous, worker)

    results = run(body, servers + len(counts))
    got, (want, losses) = gathered(results, servers), in_rounds(seed, counts)
    what = f"{servers} servers, workers with {counts} batches"
    expect_equal(sorted(got), sorted(want), what=f"{what}: keys on the servers", cause="keys")
    for rank in range(servers):
        values, updates, _, given = results[rank]
        order = [name for name, _ in network(seed).named_parameters() if name in values]
        what_order = f"{what}: keys of server.values, in the order of the parameters"
        expect_equal(list(values), order, what=what_order, rank=rank, cause="order")
        expect_equal(updates, max(counts), what=f"{what}: updates", rank=rank, cause="versions")
        for name, p in network(seed).named_parameters():
            if not torch.equal(given[name], p.detach()):
                problem = f"{what}: {name} of the server's model has changed: values are a copy"
                fail(problem, cause="no-copy", rank=rank)
    wrong, _ = in_rounds(seed, counts, over_workers=True)
    over_workers = all(torch.allclose(got[n], v, rtol=1e-4, atol=1e-5) for n, v in wrong.items())
    for name, value in want.items():
        if over_workers and not torch.allclose(got[name], value, rtol=1e-4, atol=1e-5):
            said = f"{what}: {name} follows the mean over workers; the mean is over their samples"
            fail(said, cause="over-workers")
        before = dict(network(seed).named_parameters())[name].detach()
        expect_close(got[name], value, what=f"{what}: {name}", before=before, rtol=1e-4, atol=1e-5)
    for rank, loss in enumerate(losses, servers):
        if not abs(results[rank] - loss) < 1e-3:
            message = f"{what}: the last loss on rank {rank} is {loss:.4f}, got {results[rank]:.4f}"
            fail(message, cause="loss-value", rank=rank)


@exercise("3.22", "virtual gloo", asserts="rounds members group life")
def test_a_group_keeps_to_itself(impl, run, seed):
    """Servers and workers are numbered in the group, global ranks 1, 3 and 4; two runs in a row."""

    def body(ctx):
        group = dist.new_group([1, 3, 4])
        if ctx.rank in (0, 2):
            return None

        def worker(client, number):
            return float(
                impl.module("parameter_client").train(
                    client, network(seed), batches(seed, number, 2)
                )
            )

        found = []
        for _ in range(2):
            values = dict(network(seed).named_parameters())
            serve = impl.serve_synchronous
            found.append(served(impl, ctx, values, 1, serve, worker, group=group))
        return found

    results = run(body, 5)
    for again in range(2):
        got = gathered([results[1][again]], 1)
        for name, value in in_rounds(seed, [2, 2])[0].items():
            what = f"{name}, trained by the ranks 1, 3 and 4, run {again + 1}"
            expect_close(got[name], value, what=what, rtol=1e-4, atol=1e-5)


def broken(*_, **__):
    """In the place of ``dist.recv``."""
    raise RuntimeError("Connection closed by peer")


@exercise("3.22", "virtual gloo", asserts="receive members group any")
def test_requests_of_any_worker(impl, run, seed):
    """receive(None) names the worker by its rank of the group, and brings
    the keys that live here."""

    def body(ctx):
        group = dist.new_group([1, 3, 4])
        if ctx.rank in (0, 2) or not hasattr(impl.Server, "receive"):
            return None
        values = parameters(seed)
        if ctx.rank == 1:
            server, heard = impl.Server(values, servers=1, lr=LR, group=group), []
            with mock.patch.multiple(dist, recv=broken, irecv=broken):
                try:
                    said = f"gives {server.receive(None)}"
                except Exception as error:
                    said = f"raises {type(error).__name__}"
            while server.live:
                r = server.receive(None)
                if r.kind == 0:
                    server.answer(r)
                    other = impl.Server(values, servers=1, lr=LR, group=group)
                    with mock.patch.multiple(dist, send=broken, isend=broken):
                        other.answer(r)
                    gone = [list(other.live), sorted(other.lost)]
                gradients = {k: g.tolist() for k, g in r.gradients.items()}
                heard.append([r.worker, r.kind, r.clock, r.samples, list(r.keys), gradients])
            return heard, server.live, said, gone
        client = impl.module("parameter_client").Client(values, servers=1, group=group)
        if ctx.rank == 3:
            client.pull(["e", "b"])
        client.push({"e": torch.full((1,), float(ctx.rank))}, ctx.rank)
        client.leave()
        return None

    found = run(body, 5)[1]
    if found is None:  # a server of another making
        return
    heard, live, said, gone = found
    what = "live and lost after an answer to worker 1 of 1 and 2 broke"
    expect_equal(gone, [[2], [1]], what=what, rank=1, cause="death-unnoticed")
    what = "receive(None), when a receive from any worker raises RuntimeError,"
    expect_equal(said, "raises RuntimeError", what=what, rank=1, cause="hidden-error")
    expect_equal(live, [], what="server.live at the end", rank=1, cause="live")
    for number, rank in ((1, 3), (2, 4)):
        got = [request for request in heard if request[0] == number]
        want = [[number, 0, 0, 0, ["b", "e"], {}]] if rank == 3 else []
        want.append([number, 1, 0, rank, ["e"], {"e": [float(rank)]}])
        what = f"[worker, kind, clock, samples, keys, gradients] of rank {rank} of 1, 3, 4"
        same = [[*r[:4], sorted(r[4]), r[5]] for r in got[: len(want)]]
        expect_equal(same, want, what=what, rank=1, cause="request")
        expect_equal([r[1] for r in got[len(want) :]], [2], what=f"{what}: then", cause="request")


@exercise("3.22", "virtual gloo", asserts="rounds version alone")
def test_leaving_after_a_pull(impl, run, seed, cases):
    """A worker that pulls and leaves does not count, and no other worker's push is lost by it."""
    for pushing in cases([1, 2], []):

        def body(ctx):
            def worker(client, number):
                client.pull(["a"])
                if number in pushing:
                    client.push({"a": torch.full(SIZES["a"], 2.0 * number)}, 1)
                client.leave()

            return served(impl, ctx, zeros(), 1, impl.serve_synchronous, worker, lr=1.0)

        values, version, lost, _ = run(body, 4)[0]
        what = f"3 workers pull, {len(pushing)} of them push, all leave"
        got = [version, lost]
        expect_equal(got, [int(bool(pushing)), []], what=f"{what}: updates, lost", cause="versions")
        mean = -3.0 if pushing else 0.0
        for number in pushing:
            if bool((values["a"] == -2.0 * number).all()):
                fail(f"{what}: only the push of {2 * number} counts", cause="push-lost")
        expect_close(values["a"], torch.full(SIZES["a"], mean), what=f"{what}: a, pushes 2 and 4")


@exercise(
    "3.22", "virtual gloo", asserts="mean values receive cost parameters dtype layout resources"
)
def test_only_what_is_used_travels(impl, run, seed, cases):
    """A pull and a push move the chosen keys only; a key's mean is over the
    workers that pushed it."""
    for dtype in cases(torch.float32, torch.float64):
        check_only_used(run, impl, seed, dtype)


def check_only_used(run, impl, seed, dtype) -> None:
    """The third worker's gradient is NaN, of no samples: it counts for nothing."""
    pulled = (["a", "e"], [], ["c", "b"])  # by worker
    pushed = ({"a": 2.0, "d": 4.0}, {"a": 6.0}, {"a": float("nan"), "c": 1.0})
    samples = (1, 3, 0)

    def body(ctx):
        def worker(client, number):
            with ctx.region("pull"):
                got = client.pull(pulled[number])
            gradients = {
                k: torch.full(SIZES[k][::-1], g, dtype=dtype).t() for k, g in pushed[number].items()
            }
            with ctx.region("push"):
                client.push(gradients, samples[number])
            client.pull([])  # a round of pushes that change nothing: a version all the same
            client.push({"a": gradients["a"]} if number else {}, 0)
            client.leave()
            return got

        return served(impl, ctx, parameters(seed, dtype), 2, impl.serve_synchronous, worker)

    results = run(body, 5)
    start = parameters(seed, dtype)
    small = 5 * 3 * 64 * 2  # headers and versions for two servers
    for number, keys in enumerate(pulled):
        rank = number + 2
        got, log = results[rank], results.logs[rank]
        expect_equal(sorted(got), sorted(keys), what="keys that a pull gives", rank=rank)
        for key in keys:
            what = f"pull of {key}"
            expect_close(got[key], start[key], what=what, rank=rank, rtol=0, atol=0)
        log.all_waited()
        most = sum(start[k].nbytes for k in pushed[number]) + small
        log.select(region="push").sent_at_most(most, "the pushed keys and the headers")
    expect_equal([results[r][1] for r in (0, 1)], [2, 2], what="updates after two rounds")
    means = {"a": (1 * 2.0 + 3 * 6.0) / 4, "d": 4.0}
    for key, value in gathered(results, 2).items():
        if value.dtype != dtype:
            fail(f"{key} of {dtype} is {value.dtype} on its server", cause="wrong-dtype")
        parts = [(n, g[key]) for n, g in zip(samples, pushed, strict=True) if n and key in g]
        if key == "d" and torch.allclose(value, start[key] - LR * 4 * 1 / 4):
            fail("d was pushed by 1 of 4 samples; it is divided by 4", cause="divided-by-all")
        expect_close(
            (start[key] - value) / LR,
            torch.full(SIZES[key], means.get(key, 0.0), dtype=dtype),
            what=f"what was subtracted from {key}, over lr",
            contributions=[torch.full(SIZES[key], g, dtype=dtype) for _, g in parts],
            weights=[n for n, _ in parts],
            rtol=1e-4,
            atol=1e-4,
        )


@exercise("3.22", "virtual", asserts="answers version cost rounds")
def test_no_byte_for_other_keys(impl, run, seed):
    """All workers have pulled before one pushes; a large key that no worker asks for stays."""

    def body(ctx):
        values = {"small": torch.ones(4), "large": torch.ones(20_000)}

        def worker(client, number):
            read = []
            for _ in range(2):
                client.pull(["small"])
                read.append(list(client.versions))
                if number:  # all have pulled before the first of them pushes
                    dist.send(torch.zeros(1), 1)
                    dist.recv(torch.zeros(1), 1)
                else:
                    dist.recv(torch.zeros(1), 2)
                    dist.send(torch.zeros(1), 2)
                client.push({"small": torch.ones(4)})
            client.leave()
            return read

        return served(impl, ctx, values, 1, impl.serve_synchronous, worker)

    results = run(body, 3)
    for rank in (1, 2):
        what = "client.versions after the first and the second pull"
        expect_equal(results[rank], [[0], [1]], what=what, rank=rank, cause="versions")
    for log in results.logs:
        log.sent_at_most(4000, "four small values or gradients for each of 2 workers, and headers")


@exercise("3.22", "virtual gloo", asserts="answers layout")
def test_keys_without_elements(impl, run, seed, cases):
    """Empty parameters are keys like others: spread over servers, pulled and pushed, no hang."""

    def body(ctx, servers):
        values = {"a": torch.zeros(0), "b": torch.zeros(3), "c": torch.zeros(0, 4)}

        def worker(client, number):
            for _ in range(2):
                got = client.pull(values)
                client.push({k: torch.ones_like(v) for k, v in got.items()})
            client.leave()
            return {k: tuple(v.shape) for k, v in got.items()}

        return served(impl, ctx, values, servers, impl.serve_synchronous, worker, lr=1.0)

    for servers in cases(3, 2):
        results = run(body, servers + 1, servers)
        what = f"{servers} servers, keys of 0, 3 and 0 elements"
        empty = [rank for rank in range(servers) if not results[rank][0]]
        expect_equal(empty, [], what=f"{what}: servers without a key", cause="unbalanced")
        got, shapes = gathered(results, servers), {"a": (0,), "b": (3,), "c": (0, 4)}
        expect_equal(results[servers], shapes, what=f"{what}: shapes of a pull", rank=servers)
        expect_close(got["b"], torch.full((3,), -2.0), what=f"{what}: b after 2 rounds of 1")


@exercise("3.22", "virtual", asserts="rounds deaths alone")
def test_a_dead_worker_stops_nobody(impl, run, seed):
    """A worker dies at some message: the rounds go on, and its last push counts whole or not."""
    counts = [3, 3, 3]
    sums = [in_rounds(seed, [3, 3, done])[0] for done in range(4)]
    for when in (1, 4, 7, 8, 12):  # 8: between the header of a push and its gradients
        check_death(run, impl, seed, counts, sums, when)


def check_death(run, impl, seed, counts, sums, when) -> None:
    def body(ctx):
        def worker(client, number):
            impl.module("parameter_client").train(
                client, network(seed), batches(seed, number, counts[number])
            )

        values = dict(network(seed).named_parameters())
        return served(impl, ctx, values, 2, impl.serve_synchronous, worker)

    results = run(body, 5, lose=(4, when), survivable=True)
    what = f"3 workers, the last lost at its message {when}"
    for rank in (0, 1):
        values, version, lost, _ = results[rank]
        expect_equal(version, 3, what=f"{what}: updates", rank=rank, cause="rounds")
        expect_equal(lost, [4], what=f"{what}: server.lost", rank=rank, cause="death-unnoticed")
        if not any(
            all(torch.allclose(v, s[k], rtol=1e-4, atol=1e-5) for k, v in values.items())
            for s in sums
        ):
            fail(
                f"{what}: server {rank} holds what no number of its pushes gives. The mean of a "
                "round is over the workers that took part in it",
                cause="corrupted",
                rank=rank,
            )


@exercise("3.22", "gloo", asserts="deaths resources")
def test_a_broken_connection_is_survived(impl, run, seed):
    """On real connections: a worker closes its own without a word after one round."""

    def body(ctx):
        def worker(client, number):
            for step in range(3):
                client.pull(["a"])
                client.push({"a": torch.ones(SIZES["a"])})
                if number == 1 and step == 0:
                    dist.destroy_process_group()
                    return
            client.leave()

        return served(impl, ctx, zeros(), 1, impl.serve_synchronous, worker, lr=1.0)

    values, version, lost, _ = run(body, 3)[0]
    expect_equal([version, lost], [3, [2]], what="updates, lost workers", cause="death-unnoticed")
    expect_close(values["a"], torch.full(SIZES["a"], -3.0), what="a after 3 rounds of 1")


def busy(*_) -> None:
    """Work that makes a worker slow."""
    for _ in range(8):
        torch.ones(300, 300).mm(torch.ones(300, 300))


def training(impl, staleness: float | None):
    """Three workers, one of them slow, and a server, on the digits."""
    digits()

    def body(ctx):
        images, labels = digits()[ctx.rank :: ctx.world_size]
        own = list(zip(images.split(32), labels.split(32), strict=True))[:6]
        model = build_model("mlp", 0)
        if ctx.rank == 3:
            model.register_forward_hook(busy)
        ctx.start_picture()
        impl.fit(model, own, servers=1, lr=0.1, staleness=staleness)

    return body


@trace("3.22", measures="waiting")
def trace_synchronous(impl):
    """Synchronous rounds with one slow worker: all wait for it."""
    return training(impl, None)


@trace("3.23", measures="waiting")
def trace_asynchronous(impl):
    """One slow worker: the other workers go on without it."""
    return training(impl, float("inf"))


@trace("3.24", measures="waiting")
def trace_bounded(impl):
    """One slow worker: the other workers get at most one step ahead."""
    return training(impl, 1)
