"""Checks of exercise 3.26: keys placed by size, the messages of a worker, its training."""

from __future__ import annotations

from unittest import mock

import torch
import torch._dynamo  # torch.optim imports it when an optimizer is made: once here, not per rank
import torch.distributed as dist
import torch.nn.functional as F

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


@exercise("3.26", "gloo", asserts="placed")
def test_keys_are_placed_by_size(impl, run, seed):
    """Each key on one server, none empty; fullest and emptiest differ by at most the largest."""

    generator, asked = torch.Generator().manual_seed(seed), []
    for keys in (5, 9, 16):
        sizes = torch.randint(1, 1000, (keys,), generator=generator).tolist()
        sizes[keys // 2] = 2500
        asked += [(sizes, servers) for servers in (1, 2, 3, 5)]
    asked += [([0, 3, 0], 3), ([0, 0, 0, 0], 4), ([900, 1] * 8, 2)]  # in turn: 7,200 and 8

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
        if {*place.values()} != {*range(servers)}:
            fail(f"{what}: a server is without a key: {place}", cause="unbalanced")
        if max(loads) - min(loads) > max(sizes):
            fail(
                f"{what} hold {loads}: they may differ by the largest key, {max(sizes)}",
                cause="unbalanced",
            )


@exercise("3.26", "virtual", asserts="refused refusals dtype")
def test_impossible_roles_are_refused(impl, run):
    """More servers than keys, none, no worker, two dtypes: ValueError everywhere, nothing sent."""
    wrong = (6, 0, -1)  # more than keys, none, a negative number
    mixed = [torch.float32] * 3 + [torch.float64], [torch.float16, torch.bfloat16]

    def body(ctx):
        ends = {
            "Client": lambda servers: impl.Client(zeros(), servers=servers),
            "place_keys": lambda servers: impl.place_keys(zeros(), servers),
        }
        said = [refusal(ends[end], servers) for end, servers in calls]
        for dtypes in mixed:
            keys = {f"k{n}": torch.zeros(2, dtype=dtype) for n, dtype in enumerate(dtypes)}
            said.append(refusal(impl.place_keys, keys, 1))
        return said

    calls = [(end, n) for end in ("Client", "place_keys") for n in wrong] + [("Client", 3)]
    asked = [f"{end} with {servers} servers of 3 ranks and 5 keys" for end, servers in calls]
    expect_refused(run(body, 3), [*asked, *(f"keys of dtypes {dtypes}" for dtypes in mixed)])


@exercise("3.26", "gloo", asserts="refused refusals")
def test_a_backend_that_takes_no_cpu_tensors_is_refused(impl, run):
    """Where the group's backend is NCCL alone: ValueError everywhere, nothing sent."""

    def body(ctx):
        group = dist.new_group([0, 1])
        nccl = {
            "get_backend": lambda asked=None: "nccl" if asked is group else "gloo",
            "get_backend_config": lambda asked=None: "cuda:nccl" if asked is group else "cpu:gloo",
        }
        with mock.patch.multiple(dist, **nccl):
            return [refusal(impl.Client, zeros(), servers=1, group=group)]

    expect_refused(run(body, 2), ["a group of NCCL alone"])


@exercise("3.26", "virtual", asserts="placed")
def test_all_ranks_place_alike(impl, run):
    """Keys of one size, made in another order on each rank: all ranks place them alike."""

    def body(ctx):
        names = [f"k{n}" for n in range(9)]
        made = {name: torch.zeros(4) for name in (names[ctx.rank :] + names[: ctx.rank])[::-1]}
        place = impl.place_keys({name: made[name] for name in names}, 3)
        return {str(k): int(s) for k, s in place.items()}

    results = run(body, 4)
    for rank, place in enumerate(results):
        what = "the servers of nine keys of one size, as rank 0 places them"
        expect_equal(place, results[0], what=what, rank=rank, cause="placed-differently")


@exercise("3.26", "virtual", asserts="roles refused refusals group")
def test_workers_outside_the_group_are_refused(impl, run):
    """A rank outside the group can't work; in a group, the workers are those of the group."""
    make = lambda group: impl.Client(zeros(), servers=1, group=group)

    def roles(group):
        return impl.check_roles(0, group) if hasattr(impl, "check_roles") else make(group)

    check_non_members(run, {"Client": make, "check_roles": roles})

    def body(ctx):
        group = [dist.new_group(members) for members in ([1, 3, 4], [0, 2])][ctx.rank in (0, 2)]
        if not hasattr(impl, "check_roles"):
            return None
        full = refusal(impl.check_roles, dist.get_world_size(group), group)
        return impl.check_roles(1, group), impl.check_roles(3), full

    for rank, got in enumerate(run(body, 5)):
        if got is not None:
            own = 1 if rank in (0, 2) else 2
            what = "workers beside 1 server in groups [1, 3, 4] and [0, 2], and beside 3 of 5 ranks"
            expect_equal(list(got[:2]), [own, 2], what=what, rank=rank, cause="roles")
            expect_refusals([got[2]], ["as many servers as the group has ranks"], rank=rank)


@exercise(
    "3.26", "virtual gloo", asserts="protocol pulled pushed versions left group dtype layout cost"
)
def test_requests_follow_the_protocol(impl, run, seed):
    """Every server gets every request, and of chosen keys those that live there; in a group."""
    servers, pulled = 2, ["e", "c", "a"]  # not in the order of the parameters
    pushed = {"d": 4.0, "c": 1.0, "b": 3.0, "a": 2.0}

    def body(ctx):
        group = dist.new_group([1, 2, 3, 5])
        if ctx.rank in (0, 4):
            return None
        values, rank = parameters(seed, torch.float64), dist.get_rank(group)
        if rank < servers:
            return answered(values, impl.place_keys(values, servers), servers, group)
        client = impl.Client(values, servers=servers, group=group)
        with ctx.region("pull"):
            got = client.pull(iter([*pulled, *pulled]) if rank == 2 else [])
        versions = list(client.versions)
        gradients = {
            k: torch.full(SIZES[k][::-1], g, dtype=torch.float64).t() for k, g in pushed.items()
        }
        client.push(gradients if rank == 2 else {}, 70_003)
        client.pull(["b"])
        client.leave()
        return {"got": got, "versions": versions, "place": impl.place_keys(values, servers)}

    results = run(body, 6)
    ranks = [results[rank] for rank in (1, 2, 3, 5)]
    values, worker = parameters(seed, torch.float64), ranks[2]
    events = results.logs[3].select(region="pull").events
    ends = [e.end for e in events if e.op == "recv" and e.end is not None]
    starts = [e.start for e in events if e.op == "send"]
    if len(starts) < servers or max(starts) >= min(ends):
        fail(
            "a pull has waited for one server's answer before it asked the other. All requests go "
            "out first, then the servers work at the same time",
            cause="one-by-one",
            rank=3,
        )
    expect_equal(sorted(worker["got"]), sorted(pulled), what="keys that a pull gives", cause="keys")
    for key in pulled:
        expect_close(worker["got"][key], values[key], what=f"pull of {key}", rtol=0, atol=0)
    expect_equal(ranks[2]["versions"], [0, 10], what="client.versions", cause="versions")
    expect_equal(ranks[3]["versions"], [1, 11], what="client.versions", cause="versions")
    for server in range(servers):
        mine = [k for k in values if k in pushed and worker["place"][k] == server]
        vector = [pushed[k] for k in mine for _ in range(values[k].numel())]
        asked = [key for key in values if key in pulled]
        given = [key for key in values if key in pushed]
        want = [
            [2, PULL, 0, 0, asked, []],
            [3, PULL, 0, 0, [], []],
            [2, PUSH, 0, 70_003, given, vector],
            [3, PUSH, 0, 70_003, [], []],
            [2, PULL, 1, 0, ["b"], []],
            [3, PULL, 1, 0, ["b"], []],
            [2, LEAVE, 1, 0, [], []],
            [3, LEAVE, 1, 0, [], []],
        ]
        heard = ranks[server]
        for k, right in enumerate(want):
            what = "[worker, kind (PULL, PUSH, LEAVE = 0, 1, 2), clock, samples, keys, gradients] "
            what += f"of request {k} that server {server} hears"
            got = heard[k] if k < len(heard) else None
            expect_equal(got, right, what=what, rank=server, cause="protocol")
        expect_equal(len(heard), len(want), what="requests", rank=server, cause="protocol")


@exercise("3.26", "virtual", asserts="pulled pushed cost resources")
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
    samples = [request[3] for request in results[0] if request[1] == PUSH]
    expect_equal(samples, [1] * 4, what="samples of push() without a number", cause="samples")
    for log in results.logs:
        log.all_waited()
        log.sent_at_most(4000, "four small values or gradients for each of 2 workers, and headers")


@exercise("3.26", "virtual gloo", asserts="protocol pulled")
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


@exercise("3.26", "virtual gloo", asserts="trained parameters")
def test_training_uses_what_it_pulled(impl, run, seed, cases):
    """Forward and backward with the servers' values, the batch's gradients pushed, then a leave."""
    for count in cases(2, 0):
        check_training(run, impl, seed, count)


class Spare(torch.nn.Module):
    """Has a key that no batch uses, one whose gradients are zero, and one that is frozen here."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = torch.nn.Parameter(torch.ones(3))
        self.zeros = torch.nn.Parameter(torch.ones(2))
        self.still = torch.nn.Parameter(torch.ones(4), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 0.0 * self.zeros.sum()


def grown(seed: int) -> torch.nn.Module:
    """The network, a frozen layer that the servers do not know, and a key without gradients."""
    return network(seed).append(torch.nn.Linear(3, 3).requires_grad_(False)).append(Spare())


def check_training(run, impl, seed: int, count: int) -> None:
    def body(ctx):
        model = grown(seed + ctx.rank)
        values = {n: p for n, p in model.named_parameters() if n[0] != "5"}
        if ctx.rank == 0:
            for p in model[-1].parameters():
                p.data.fill_(3.0)
            return answered(values, impl.place_keys(values, 1), 1)
        for p in model.parameters():
            p.grad = torch.ones_like(p) if p.requires_grad else None  # of before
        client = impl.Client(values, servers=1)
        loss = float(impl.train(client, model, batches(seed, 0, count)))
        return loss, {name: p.detach() for name, p in model.named_parameters()}

    heard, (loss, ended) = run(body, 2)
    kinds = [PULL, PUSH] * count + [LEAVE]
    what = f"{count} batches: kinds of the requests (PULL, PUSH, LEAVE = 0, 1, 2)"
    expect_equal([request[1] for request in heard], kinds, what=what, cause="protocol")
    model, last = grown(seed), network(seed)
    model.load_state_dict(ended)
    names = [*(name for name, _ in last.named_parameters()), "6.zeros"]
    want_loss = 0.0
    pushes = [request for request in heard if request[1] == PUSH]
    for (inputs, targets), push in zip(batches(seed, 0, count), pushes, strict=True):
        last.zero_grad()
        value = F.cross_entropy(model[-2](last(inputs)), targets)
        value.backward()
        want_loss = value.item()
        gradient = torch.cat([*(p.grad.flatten() for p in last.parameters()), torch.zeros(2)])
        if "6.spare" in push[4]:
            said = "a push has a gradient for a key that its batch does not use: one of before, or "
            fail(f"{said}zeros, is left", cause="old-gradients", rank=1)
        expect_equal(push[3], len(targets), what="samples of a push", cause="samples")
        expect_equal(push[4], names, what="keys of a push, of those with a gradient", cause="keys")
        what = "a push, computed with the pulled values"
        expect_close(torch.tensor(push[5]), gradient, what=what, rtol=1e-4, atol=1e-5)
    if not abs(loss - want_loss) < 1e-3:
        fail(f"the last loss is {want_loss:.4f}, got {loss:.4f}", cause="loss-value", rank=1)
    pulled = [*last.named_parameters(), ("6.spare", torch.full((3,), 3.0))]
    pulled += [("6.zeros", torch.full((2,), 3.0)), ("6.still", torch.full((4,), 3.0))]
    for name, value in pulled if count else ():
        expect_close(ended[name], value.detach(), what=f"{name} of the model at the end")


@exercise("3.26", "virtual", asserts="left trained life alone")
def test_a_worker_that_fails_leaves(impl, run, seed, cases):
    """No more data, or a batch that raises: the server hears LEAVE, and the exception comes out."""
    for broken, last in cases(("data", [LEAVE]), ("forward", [PULL, LEAVE])):

        def body(ctx):
            values = dict(network(seed).named_parameters())
            if ctx.rank == 0:
                return answered(values, impl.place_keys(values, 1), 1)

            def failing():
                yield batches(seed, 0, 1)[0]
                if broken == "data":
                    raise OSError("no more data")
                yield torch.ones(2, 5), torch.zeros(2, dtype=torch.int64)

            model, calls = network(seed), []

            def look(*_):
                calls.append(1)
                if len(calls) == 2:
                    raise KeyboardInterrupt

            model.register_forward_pre_hook(look)
            try:
                impl.train(impl.Client(values, servers=1), model, failing())
            except (OSError, KeyboardInterrupt) as error:
                return type(error).__name__
            return "none"

        heard, raised = run(body, 2)
        want = "OSError" if broken == "data" else "KeyboardInterrupt"
        expect_equal(raised, want, what="what train raises", rank=1, cause="swallowed")
        kinds = [request[1] for request in heard]
        what = f"kinds (PULL, PUSH, LEAVE = 0, 1, 2), {broken} of the second batch fails"
        expect_equal(kinds, [PULL, PUSH, *last], what=what, cause="protocol")


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
