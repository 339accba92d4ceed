"""Checks of exercise 3.26: keys placed by size, the messages of a worker, its training."""

from __future__ import annotations

import torch
import torch._dynamo  # torch.optim imports it when an optimizer is made: once here, not per rank
import torch.distributed as dist
import torch.nn.functional as F

from distlab.grading import (
    exercise,
    expect_close,
    expect_equal,
    expect_refused,
    fail,
    refusal,
    trace,
)
from tests.phase3.bad_input import check_non_members
from tests.phase3.serving import (
    LEAVE,
    PULL,
    PUSH,
    SIZES,
    answered,
    batches,
    network,
    parameters,
    zeros,
)


@exercise("3.26", "gloo")
def test_keys_are_placed_by_size(impl, run, seed):
    """Each key on one server, none empty; fullest and emptiest differ by one key at most."""

    generator, asked = torch.Generator().manual_seed(seed), []
    for keys in (5, 9, 16):
        sizes = torch.randint(1, 1000, (keys,), generator=generator).tolist()
        sizes[keys // 2] = 2500
        asked += [(sizes, servers) for servers in (1, 2, 3, 5)]

    def body(ctx):
        found = []
        for sizes, servers in asked:
            given = {f"k{n}": torch.empty(size, 1) for n, size in enumerate(sizes)}
            place = impl.place_keys(given, servers)
            found.append({str(k): int(s) for k, s in place.items()})
        return found

    found = run(body, 1, process_group=False)[0]
    for (sizes, servers), place in zip(asked, found, strict=True):
        what = f"{len(sizes)} keys of {sizes} elements on {servers} servers"
        expect_equal(set(place), {f"k{n}" for n in range(len(sizes))}, what=f"{what}: keys")
        loads = [0] * servers
        for n, size in enumerate(sizes):
            loads[place[f"k{n}"]] += size
        if min(loads) == 0 or max(loads) - min(loads) > max(sizes):
            fail(
                f"{what} hold {loads}: they may differ by the largest key, {max(sizes)}",
                cause="unbalanced",
            )


@exercise("3.26", "virtual")
def test_impossible_roles_are_refused(impl, run):
    """More servers than keys, none, no worker, two dtypes: ValueError everywhere, nothing sent."""
    wrong = (6, 0, -1)  # more than keys, none, a negative number

    def body(ctx):
        ends = {
            "Client": lambda servers: impl.Client(zeros(), servers=servers),
            "place_keys": lambda servers: impl.place_keys(zeros(), servers),
        }
        said = [refusal(ends[end], servers) for end, servers in calls]
        mixed = {"a": torch.zeros(2), "b": torch.zeros(2, dtype=torch.float64)}
        return [*said, refusal(impl.place_keys, mixed, 1)]

    calls = [(end, n) for end in ("Client", "place_keys") for n in wrong] + [("Client", 3)]
    asked = [(f"{end} with {servers} servers of 3 ranks and 5 keys", ()) for end, servers in calls]
    expect_refused(run(body, 3), [*asked, ("keys of two dtypes", ("float32", "float64"))])


@exercise("3.26", "virtual")
def test_workers_outside_the_group_are_refused(impl, run):
    """A rank outside the group can't work: a ValueError that says so."""
    check_non_members(run, {"Client": lambda group: impl.Client(zeros(), servers=1, group=group)})


@exercise("3.26", "virtual gloo")
def test_requests_follow_the_protocol(impl, run, seed):
    """Every server hears of every request, and of chosen keys what lives there; in a group."""
    servers, pulled = 2, ["e", "a"]
    pushed = {"d": 4.0, "a": 2.0}

    def body(ctx):
        group = dist.new_group([1, 2, 3, 4])
        if ctx.rank == 0:
            return None
        values, rank = parameters(seed), dist.get_rank(group)
        if rank < servers:
            return answered(values, impl.place_keys(values, servers), servers, group)
        client = impl.Client(values, servers=servers, group=group)
        got = client.pull(pulled if rank == 2 else [])
        versions = list(client.versions)
        gradients = {k: torch.full(SIZES[k][::-1], g).t() for k, g in pushed.items()}
        client.push(gradients if rank == 2 else {}, 3)
        client.pull(["b"])
        client.leave()
        return {"got": got, "versions": versions, "place": impl.place_keys(values, servers)}

    _, *ranks = run(body, 5)
    values, worker = parameters(seed), ranks[2]
    expect_equal(sorted(worker["got"]), sorted(pulled), what="keys that a pull gives", cause="keys")
    for key in pulled:
        expect_close(worker["got"][key], values[key], what=f"pull of {key}", rtol=0, atol=0)
    expect_equal(ranks[2]["versions"], [0, 0], what="client.versions", cause="versions")
    expect_equal(ranks[3]["versions"], [1, 1], what="client.versions", cause="versions")
    for server in range(servers):
        mine = [k for k in values if k in pushed and worker["place"][k] == server]
        vector = [pushed[k] for k in mine for _ in range(values[k].numel())]
        asked = [key for key in values if key in pulled]
        given = [key for key in values if key in pushed]
        want = [
            [2, PULL, 0, 0, asked, []],
            [3, PULL, 0, 0, [], []],
            [2, PUSH, 0, 3, given, vector],
            [3, PUSH, 0, 3, [], []],
            [2, PULL, 1, 0, ["b"], []],
            [3, PULL, 1, 0, ["b"], []],
            [2, LEAVE, 1, 0, [], []],
            [3, LEAVE, 1, 0, [], []],
        ]
        what = f"[worker, kind, clock, samples, keys, gradients] that server {server} hears"
        expect_equal(ranks[server], want, what=what, rank=server, cause="protocol")


@exercise("3.26", "virtual")
def test_only_chosen_keys_travel(impl, run):
    """A worker neither asks for, nor sends, a large key that it does not use."""

    def body(ctx):
        values = {"small": torch.ones(4), "large": torch.ones(20_000)}
        if ctx.rank == 0:
            return answered(values, impl.place_keys(values, 1), 1)
        client = impl.Client(values, servers=1)
        for _ in range(2):
            client.pull(["small"])
            client.push({"small": torch.ones(4)})
        client.leave()
        return None

    results = run(body, 3)
    for log in results.logs:
        log.all_waited()
        log.sent_at_most(4000, "four small values or gradients for each of 2 workers, and headers")


@exercise("3.26", "virtual gloo")
def test_a_worker_expects_empty_keys(impl, run, cases):
    """Empty parameters are keys like others: an empty vector comes, and goes."""
    values = {"a": torch.zeros(0), "b": torch.ones(3), "c": torch.zeros(0, 4)}

    def body(ctx, servers):
        if ctx.rank < servers:
            return answered(values, impl.place_keys(values, servers), servers)
        client = impl.Client(values, servers=servers)
        got = client.pull(values)
        client.push({k: torch.full_like(v, 2.0) for k, v in got.items()})
        client.leave()
        return {k: tuple(v.shape) for k, v in got.items()}

    for servers in cases(3, 2):
        *heard, shapes = run(body, servers + 1, servers)
        want = {"a": (0,), "b": (3,), "c": (0, 4)}
        what = f"shapes of a pull from {servers} servers, keys of 0, 3 and 0 elements"
        expect_equal(shapes, want, what=what, rank=servers)
        sent = sorted(tuple(request[5]) for requests in heard for request in requests)
        expect_equal(sent[-1], (2.0, 2.0, 2.0), what="the gradient of b", cause="protocol")


@exercise("3.26", "virtual gloo")
def test_training_uses_what_it_pulled(impl, run, seed, cases):
    """Forward and backward with the servers' values, the batch's gradients pushed, then a leave."""
    for count in cases(2, 0):
        check_training(run, impl, seed, count)


def check_training(run, impl, seed: int, count: int) -> None:
    def body(ctx):
        values = dict(network(seed).named_parameters())
        if ctx.rank == 0:
            return answered(values, impl.place_keys(values, 1), 1)
        model = network(seed + 1)
        model.append(torch.nn.Linear(3, 3))  # the servers know nothing of it
        model[-1].requires_grad_(False)
        client = impl.Client(values, servers=1)
        loss = float(impl.train(client, model, batches(seed, 0, count)))
        return loss, {name: p.detach() for name, p in model.named_parameters()}

    heard, (loss, ended) = run(body, 2)
    kinds = [PULL, PUSH] * count + [LEAVE]
    what = f"{count} batches: kinds of the requests (PULL, PUSH, LEAVE = 0, 1, 2)"
    expect_equal([request[1] for request in heard], kinds, what=what, cause="protocol")
    model, last = network(seed + 1), network(seed)
    model.append(torch.nn.Linear(3, 3)).load_state_dict(ended)
    want_loss = 0.0
    pushes = [request for request in heard if request[1] == PUSH]
    for (inputs, targets), push in zip(batches(seed, 0, count), pushes, strict=True):
        last.zero_grad()
        value = F.cross_entropy(model[-1](last(inputs)), targets)
        value.backward()
        want_loss = value.item()
        gradient = torch.cat([p.grad.flatten() for p in last.parameters()])
        expect_equal(push[3], len(targets), what="samples of a push", cause="samples")
        what = "a push, computed with the pulled values"
        expect_close(torch.tensor(push[5]), gradient, what=what, rtol=1e-4, atol=1e-5)
    if not abs(loss - want_loss) < 1e-3:
        fail(f"the last loss is {want_loss:.4f}, got {loss:.4f}", cause="loss-value", rank=1)
    for name, value in last.named_parameters() if count else ():
        expect_close(ended[name], value.detach(), what=f"{name} of the model at the end")


@exercise("3.26", "virtual")
def test_a_worker_that_fails_leaves(impl, run, seed):
    """An exception between two batches: the server hears LEAVE, and the exception comes out."""

    def body(ctx):
        values = dict(network(seed).named_parameters())
        if ctx.rank == 0:
            return answered(values, impl.place_keys(values, 1), 1)

        def failing():
            yield batches(seed, 0, 1)[0]
            raise OSError("no more data")

        try:
            impl.train(impl.Client(values, servers=1), network(seed), failing())
        except OSError:
            return "OSError"
        return "none"

    heard, raised = run(body, 2)
    expect_equal(raised, "OSError", what="what train raises", rank=1, cause="swallowed")
    expect_equal([r[1] for r in heard], [PULL, PUSH, LEAVE], what="kinds", cause="protocol")


@trace("3.26")
def trace_requests(impl):
    """Two workers pull, compute and push; a server answers and applies nothing."""

    def body(ctx):
        values = dict(network(0).named_parameters())
        if ctx.rank == 0:
            answered(values, impl.place_keys(values, 1), 1)
            return
        client = impl.Client(values, servers=1)
        impl.train(client, network(0), batches(0, ctx.rank - 1, 3))

    return body
