"""Checks of exercise 4.2: interrupted and resumed equals uninterrupted, bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from distlab.grading import exercise, expect_equal, expect_refusals, fail, refusal, trace
from given.safe_format import pack
from tests.phase4.checkpoints import difference, store_in
from tests.phase4.small_training import (
    BATCH,
    EPOCHS,
    Augmented,
    Training,
    Wrapped,
    facts,
    first_draws,
    network,
    network_of,
    next_draws,
    seed_streams,
)

POINTS = (4, 6, 8)  # within the first epoch, at its end, within the second


# -- the whole ------------------------------------------------------------------------------------
@exercise("4.2", "gloo cuda", asserts="goes-on as-captured streams position")
def test_interrupted_and_resumed_equals_uninterrupted(impl, run, seed, folder):
    """Stopped at the first step, within epochs and at their ends, resumed by new processes."""

    def first(ctx):
        whole = Training(impl, ctx, seed)
        whole.train(impl.Position())
        captured = []
        for point in POINTS:
            part, position = Training(impl, ctx, seed), impl.Position()
            part.train(position, until=point)
            shared, own = part.state.capture(position)
            store_in(impl, folder / str(point)).save(point, shared, own)
            captured.append([part.log, facts(part), next_draws(ctx.device)])
        return whole.summary(), captured

    def second(ctx):
        out = []
        for point in POINTS:
            part = Training(impl, ctx, seed + 1)  # everything is different
            position = part.state.restore(store_in(impl, folder / str(point)).load())
            now, seeds = facts(part), impl.module("sample_seeds")
            streams = copy.deepcopy(seeds.random_state(ctx.device))
            draws = next_draws(ctx.device)
            seeds.set_random_state(streams, ctx.device)
            part.train(position)
            out.append([vars(position), now, draws, part.summary()])
        return out

    results = [run(each, 2, ledger=False, timeout=40) for each in (first, second)]
    for rank, (before, after) in enumerate(zip(*results, strict=True)):
        for point, (_, had, draws), (_, now, got, _) in zip(POINTS, before[1], after, strict=True):
            what = f"rank {rank}, interrupted after step {point}"
            for part, state in had.items():
                if now[part] != state:
                    fail(f"{what}: {part} is not as it was captured", cause=part, rank=rank)
            for stream, numbers in draws.items():
                if got[stream] != numbers:
                    message = f"{what}: {stream} goes on with {got[stream]}, not with {numbers}"
                    fail(message, cause="random", rank=rank)
    for rank, (before, after) in enumerate(zip(*results, strict=True)):
        whole, captured = before
        for point, (log, *_), (position, *_, resumed) in zip(POINTS, captured, after, strict=True):
            what = f"rank {rank}, interrupted after step {point}"
            want, got = whole["log"], log + resumed["log"]
            if [entry[:2] for entry in got] != [entry[:2] for entry in want]:
                seen, wanted = got[len(log) :][:1], want[point:][:1]
                message = f"{what}: expected to go on with [step, samples, …] {wanted}, got {seen}"
                fail(message, cause="samples", rank=rank)
            for (step, _, loss), (_, _, correct) in zip(got, want, strict=True):
                if loss != correct:
                    message = f"{what}: loss of step {step} is {loss!r}, not {correct!r}"
                    fail(message, cause="loss-curve", rank=rank)
            same = torch.equal(resumed["weights"], whole["weights"])
            expect_equal(same, True, what=f"{what}: weights equal at the end", cause="weights")
            expect_equal(resumed["numbers"], whole["numbers"], what=f"{what}: scale, rate, updates")
            end = {"step": 12, "epoch": EPOCHS, "batch": 0}
            expect_equal(position, end, what=f"{what}: the position at the end", cause="position")


@exercise("4.2", "gloo", asserts="goes-on handed-out epoch-told position draws-nothing randomness")
def test_loader_workers_go_on_with_the_same_samples(impl, run, seed):
    """Samples and their noise do not depend on the loading process: 0 or 2
    workers, resumed or not."""

    def body(ctx):
        def samples(workers: int, position, sampler=None):
            loader = impl.solution(1, "data_loader").build_loader(
                impl.module("sample_seeds").SampleSeeds(Augmented(), seed),
                rank=0,
                world_size=1,
                global_batch_size=BATCH,
                num_workers=workers,
            )
            if sampler is not None:
                loader.batch_sampler.sampler.load_state_dict(sampler)
            found = []
            for indices, features in impl.batches(loader, position, 2):
                found.append([position.step, indices.tolist(), features.sum(1).tolist()])
            return found

        def draws(stop: int, generator: torch.Generator) -> list[list[float]]:
            """The random numbers of training after step ``stop``, after which it is
            interrupted, or isn't."""
            sampler = impl.module("elastic_sampler").ElasticSampler(
                9, global_batch_size=3, rank=0, world_size=1
            )
            given = None if generator is torch.default_generator else generator
            loader = DataLoader(range(9), batch_sampler=sampler, generator=given)
            kind, position, state = impl.Position, {"epoch": 0, "batch": 0}, generator.get_state()
            whole, drawn = kind(), []
            for _ in impl.batches(loader, whole, 2):
                drawn.append(torch.rand((), generator=generator).item())
                if whole.step == stop:
                    position, state = dict(vars(whole)), generator.get_state()
            sampler.set_epoch(position["epoch"])
            numbers = {"seed": 0, "dataset_size": 9, "batch_size": 3, "epoch": position["epoch"]}
            sampler.load_state_dict(numbers | {"consumed": 3 * position["batch"]})
            generator.set_state(state)
            resumed = impl.batches(loader, kind(**position), 2)
            rest = [torch.rand((), generator=generator).item() for _ in resumed]
            return [drawn[stop:], rest]

        plain = DataLoader(list(range(9)), batch_sampler=NamedEpochs(9))
        out, position = [], impl.Position(step=50)
        # a data set that has no epochs
        every = impl.batches(plain, position, 2)
        out += ([batch.tolist(), dict(vars(position))] for batch in every)
        out.append([list(impl.batches(plain, position, 2)), dict(vars(position))])
        within = next(impl.batches(plain, impl.Position(step=4, epoch=1, batch=1), 2)).tolist()
        whole = samples(0, impl.Position())
        resumed = {"epoch": 0, "seed": 0, "consumed": 3 * BATCH}
        return [
            whole,
            samples(2, impl.Position()),
            samples(2, impl.Position(step=3, epoch=0, batch=3), resumed),
            [*out, [within, {}]],
            [
                [stop, draws(stop, torch.default_generator), draws(stop, torch.Generator())]
                for stop in (1, 3, 5)
            ],
        ]

    [[whole, with_workers, resumed, out, dropout]] = run(body, 1, ledger=False, timeout=40)
    for stop, *both in dropout:
        for whose, (wanted, found) in zip(("torch's", "loader.generator's"), both, strict=True):
            what = f"resumed after {stop} steps of 6: what training draws in the steps after it, "
            what += f"from {whose} stream, from which iter(loader) draws, too"
            expect_equal(found, wanted, what=what, cause="moved")
    want = [
        [[3 * k, 3 * k + 1, 3 * k + 2], {"step": 51 + 3 * e + k, "epoch": e, "batch": k + 1}]
        for e in range(2)
        for k in range(3)
    ]
    want += [[[], {"step": 56, "epoch": 2, "batch": 0}], [[0, 1, 2], {}]]
    for got, wanted in zip(out, want, strict=False):
        if got[0] == [0]:
            message = "batches of an epoch were drawn before set_epoch was called"
            fail(f"{message}: it would have the order of the epoch before", cause="same-order")
        expect_equal(got, wanted, what="a batch, and the position then", cause="position")
    expect_equal(len(out), 8, what="six batches, and a loop when all are done", cause="position")
    if [entry[1] for entry in whole[:6]] == [entry[1] for entry in whole[6:]]:
        fail("the second epoch has the order of the first", cause="same-order")
    first, second = (
        {i: noise for _, indices, sums in epoch for i, noise in zip(indices, sums, strict=True)}
        for epoch in (whole[:6], whole[6:])
    )
    same = [i for i in first if first[i] == second[i]]
    if same:
        message = f"samples {same} have the noise of the first epoch in the second: a data set with"
        fail(f"{message} set_epoch is told the epoch, too", cause="same-noise")
    for what, got, want in (
        ("2 workers instead of none", with_workers, whole),
        ("resumed after 3 batches, with 2 workers", resumed, whole[3:]),
    ):
        ids = [g[:2] for g in got]
        expect_equal(ids, [w[:2] for w in want], what=f"{what}: (step, samples)", cause="samples")
        if got != want:
            fail(f"{what}: the same samples, but other noise", cause="worker-random")


# -- the parts ------------------------------------------------------------------------------------
@exercise("4.2", "gloo", asserts="shared own plain-names consumed live changes-nothing")
def test_what_is_shared_and_what_is_own(impl, run, seed):
    """Random streams, sampler and named parts are the rank's; a model has its plain names."""

    def body(ctx):
        training, position = Training(impl, ctx, seed, own=["average"]), impl.Position()
        training.train(position, until=4)
        before = facts(training)
        shared, own = training.state.capture(position)
        draws = next_draws(ctx.device)
        again = training.state.capture(position)
        data, tensors = pack({"shared": shared, "own": own})
        names = sorted(shared["parts"]["model"])
        live = {p.data_ptr() for p in training.model.parameters()}
        live |= {t.data_ptr() for s in training.optimizer.state.values() for t in s.values()}
        found = {t.data_ptr() for t in pack({"s": shared})[1].values()}
        position.step = position.batch = 99
        shapes = [sorted(shared), sorted(own), sorted(shared["parts"]), sorted(own["parts"])]
        facts_of = [shared["position"], len(live - found), before == facts(training)]
        return shapes, names, own["sampler"], again[1]["sampler"], facts_of, draws

    def drawn(ctx):
        training, position = Training(impl, ctx, seed), impl.Position()
        training.train(position, until=4)
        return next_draws(ctx.device)

    expected = run(drawn, 2)
    for rank, got in enumerate(run(body, 2)):
        shapes, names, sampler, again, [position, copies, same], draws = got
        for kind, found, want in zip(
            ("shared state", "own state", "shared parts", "own parts"),
            shapes,
            (
                ["parts", "position"],
                ["parts", "random", "sampler"],
                ["model", "optimizer", "scaler", "schedule"],
                ["average", "mixup"],
            ),
            strict=True,
        ):
            cause = kind.partition(" ")[0]
            expect_equal(found, want, what=kind, rank=rank, cause=cause)
        plain = sorted(network().state_dict())
        expect_equal(names, plain, what="the wrapped model's names", rank=rank, cause="prefix")
        want = {"epoch": 0, "seed": 0, "consumed": 4 * BATCH // 2}
        expect_equal(sampler, want, what="the sampler's state", rank=rank, cause="samples")
        expect_equal(again, want, what="the sampler's state, captured again", rank=rank)
        want = {"step": 4, "epoch": 0, "batch": 4}
        what = "the position captured, after training went on"
        expect_equal(position, want, what=what, rank=rank, cause="position")
        what = "tensors of model and optimizer of which capture gave a copy"
        expect_equal(copies, 0, what=what, rank=rank, cause="copies")
        expect_equal(same, True, what="parts unchanged by capture", rank=rank, cause="changed")
        what = "the random streams after capture"
        expect_equal(draws, expected[rank], what=what, rank=rank, cause="moved")


def strange(seed: int) -> nn.Module:
    """Tied, frozen, strided, in several dtypes; buffers of integers, and one that isn't saved."""
    draw = torch.Generator().manual_seed(seed)

    def values(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(shape, generator=draw).to(dtype)

    model = nn.Module()
    model.module = nn.Linear(3, 4)  # the first child; beside it are others: no wrapper
    model.module.weight = nn.Parameter(values(3, 4).t())
    model.module.bias = nn.Parameter(values(4), requires_grad=False)
    model.tied = nn.Linear(3, 4, bias=False)
    model.tied.weight = model.module.weight
    for name, dtype in (("f16", torch.float16), ("b16", torch.bfloat16), ("f64", torch.float64)):
        model.register_parameter(name, nn.Parameter(values(2, 3, dtype=dtype)))
    model.register_buffer("count", torch.tensor((1 << 53) + 1 + seed))
    model.register_buffer("none", torch.empty(0, 2))
    model.register_buffer("hidden", torch.tensor(float(seed)), persistent=False)
    return model


class Compiled(nn.Module):
    """The change that torch.compile makes to names."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._orig_mod = module


class Drawing:
    """A part that draws random numbers as it loads, and keeps the tensor given."""

    def __init__(self, value: float) -> None:
        self.value = torch.tensor([value])

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        next_draws(torch.device("cpu"))
        self.value = state["value"]


class NamedEpochs(torch.utils.data.BatchSampler):
    """Batches of 3 in order; one sample alone if no epoch was named since the last pass."""

    def __init__(self, size: int) -> None:
        self.size, self.named = size, False

    def set_epoch(self, epoch: int) -> None:
        self.named = True

    def __len__(self) -> int:
        return self.size // 3

    def __iter__(self) -> Iterator[list[int]]:
        if not self.named:
            return iter([[0]])
        self.named = False
        return iter([[k, k + 1, k + 2] for k in range(0, self.size, 3)])


def contents(model: nn.Module) -> list[torch.Tensor]:
    """A copy of all that it has, also of the tensors that its state dict leaves out."""
    return [t.detach().clone() for t in (*model.parameters(), *model.buffers())]


@exercise(
    "4.2",
    "virtual",
    asserts="group own-of-rank stays-the-same no-aliases again "
    "streams-last wrappers dtype layout parameters life resources cost messages as-captured",
)
def test_groups_and_strange_models(impl, run, seed):
    """Ranks 1 and 2, then 3 and 1, capture, and restore twice; all kinds of parameters."""
    board: dict[tuple[int, int], object] = {}

    def body(ctx):
        out = []
        for number, members in enumerate(([1, 2], [3, 1])):
            group = dist.new_group(members)
            if ctx.rank not in members:
                continue
            me = dist.get_rank(group)
            kind = impl.solution(1, "data_loader").build_loader

            def made(salt: int, around, me=me, group=group, kind=kind):
                loader = kind(range(22), rank=me, world_size=2, global_batch_size=4, num_workers=0)
                model, box = strange(seed + salt), Drawing(10.0 * ctx.rank + salt)
                weights = [model.module.weight, model.f64]
                optimizer = torch.optim.Adam(weights, lr=0.1)
                state = impl.TrainingState(
                    sampler=loader.batch_sampler,
                    own=["box"],
                    group=group,
                    model=around(model),
                    box=box,
                    optimizer=optimizer,
                    draws=ctx.generator(salt),
                )
                return state, model, box, optimizer, weights

            state, model, box, optimizer, weights = made(0, lambda m: Wrapped(Compiled(m)))
            step(optimizer, weights)
            seed_streams(ctx.rank)
            with ctx.region("capture"):
                shared, own = state.capture(impl.Position(9, 2, 3))
            board[number, me] = own = copy.deepcopy(own)
            names = sorted(shared["parts"]["model"])
            shared = copy.deepcopy(shared)
            dist.barrier(group)
            reads = []

            def own_of(rank: int, number=number, reads=reads, own=own):
                reads.append(rank)
                return board.get((number, rank), own)  # a rank of another group: told by ``reads``

            saved = SimpleNamespace(world_size=2, shared=shared, own=own_of)
            had = [contents(model), box.value.clone(), optimizer_state(optimizer)]
            other, fresh, crate, adam, mine = made(1, Compiled)
            objects = [id(t) for t in (*fresh.parameters(), *fresh.buffers())]
            memory = [t.data_ptr() for t in (*fresh.parameters(), *fresh.buffers())]
            for _ in range(2):
                seed_streams(77)
                with ctx.region("restore"):
                    position = other.restore(saved)
                draws = next_draws(ctx.device)
                now = [contents(fresh), crate.value.clone(), optimizer_state(adam)]
                after = [*fresh.parameters(), *fresh.buffers()]
                same = [id(t) for t in after] == objects and memory == [t.data_ptr() for t in after]
                parameters = fresh.module.weight is fresh.tied.weight
                grads = [p.requires_grad for p in fresh.parameters()]
                sampler = other.sampler.sampler.state_dict(6)
                out.append(
                    [
                        members,
                        difference(now[0][:-1], had[0][:-1]),
                        now[0][-1].item(),
                        difference(now[1:], had[1:]),
                        same,
                        parameters,
                        grads,
                        dict(vars(position)),
                        draws,
                        list(reads),
                        sampler,
                        names,
                    ]
                )
                step(adam, mine)  # training goes on; then it is restored once more
                crate.value += 1
        return out

    def step(optimizer, weights):
        for number, p in enumerate(weights):
            p.grad = torch.full_like(p, 1.0 + number)
        optimizer.step()

    def optimizer_state(optimizer):
        return [[t.clone() for t in s.values()] for s in optimizer.state.values()]

    results = run(body, 4)
    plain = sorted(strange(0).state_dict())
    for rank, every in enumerate(results):
        for number, entry in enumerate(every):
            members, model, hidden, others, same, tied, grads, position, draws, reads, *more = entry
            sampler, names = more
            again = " once more" if number % 2 else ""
            what = f"group {members}, restored{again}"
            cause = "aliased" if again else "as-captured"
            expect_equal(names, plain, what="the wrapped model's names", rank=rank, cause="prefix")
            expect_equal(model, "", what=f"{what}: the model differs", rank=rank, cause=cause)
            expect_equal(others, "", what=f"{what}: another part differs", rank=rank, cause=cause)
            expect_equal(hidden, seed + 1.0, what=f"{what}: a buffer not saved", rank=rank)
            facts_of = [same, tied, grads]
            want = [True, True, [p.requires_grad for p in strange(0).parameters()]]
            said = f"{what}: parameters are the same objects; are tied; which require a gradient"
            expect_equal(facts_of, want, what=said, rank=rank, cause="other-objects")
            want = {"step": 9, "epoch": 2, "batch": 3}
            expect_equal(position, want, what=f"{what}: the position", rank=rank, cause="position")
            want = {"epoch": 0, "seed": 0, "consumed": 6}
            expect_equal(sampler, want, what=f"{what}: the sampler", rank=rank, cause="samples")
            for stream, numbers in first_draws(rank).items():
                message = f"{what}: {stream} goes on with {draws[stream]}, not with {numbers}"
                if draws[stream] != numbers:
                    fail(message, cause="random", rank=rank)
            own = sorted(members).index(rank)
            expect_equal({*reads}, {own}, what=f"{what}: own states read", rank=rank, cause="group")
    for log in results.logs:
        for region in ("capture", "restore"):
            log.select(region=region).sent_at_most(0, "neither of them communicates")


@exercise("4.2", "gloo", asserts="refusals unchanged-by-refusal wrappers alone")
def test_what_does_not_fit_is_refused(impl, run, seed, folder):
    """Another model, other parts, another world size: refused, and nothing changed."""

    def one(ctx):
        training, position = Training(impl, ctx, seed), impl.Position()
        training.train(position, until=2)
        store_in(impl, folder).save(2, *training.state.capture(position))

    def body(ctx):
        saved = store_in(impl, folder).load()
        plain = Training(impl, ctx, seed + 1)
        others = []
        transposed = nn.Linear(8, 1)
        transposed.weight = nn.Parameter(torch.zeros(8, 1))
        scalar = nn.Linear(8, 1)
        scalar.bias = nn.Parameter(torch.zeros(()))
        lasts = [nn.Linear(8, 3), nn.Identity(), nn.Sequential(nn.Linear(8, 1)), transposed, scalar]
        lasts += [nn.Linear(8, 1, bias=False), nn.BatchNorm1d(8)]
        for last in lasts:
            other = Training(impl, ctx, seed + 1)
            other.model.module[3] = last
            others.append(other)
        others.append(Training(impl, ctx, seed + 1))
        others[-1].model.module.append(nn.Linear(1, 1))
        unlike = {"model": plain.model, "optimizer": plain.optimizer}
        sampler = plain.loader.batch_sampler
        fewer = impl.TrainingState(sampler=sampler, **unlike)
        parts = {"scaler": plain.scaler, "schedule": plain.schedule, "mixup": plain.mixup}
        parts |= {"average": plain.average, "extra": Drawing(1.0)}
        more = impl.TrainingState(sampler=sampler, **unlike, **parts)
        state, streams = plain.state, impl.module("sample_seeds")
        before = [facts(t) for t in (*others, plain)], sampler.sampler.state_dict(0)
        kept = streams.random_state(ctx.device)
        out = [refusal(t.state.restore, saved) for t in others]
        out += [refusal(fewer.restore, saved), refusal(more.restore, saved)]
        smaller = SimpleNamespace(world_size=3, shared=saved.shared, own=saved.own)
        out.append(refusal(state.restore, smaller))
        parts = {name: part for name, part in parts.items() if name != "extra"}
        parts |= {"optimizer": plain.optimizer, "model": others[0].model}
        last = impl.TrainingState(sampler=sampler, **parts)
        out.append(refusal(last.restore, saved))
        shared = copy.copy(saved.shared)
        shared["parts"] = {k: v for k, v in shared["parts"].items() if k != "model"}
        own = saved.own(0)
        own["parts"] = own["parts"] | {"model": saved.shared["parts"]["model"]}
        sharded = SimpleNamespace(world_size=1, shared=shared, own=lambda rank: own)
        last = impl.TrainingState(sampler=sampler, own=["model"], **parts)
        out.append(refusal(last.restore, sharded))
        draws = next_draws(ctx.device)
        after = [facts(t) for t in (*others, plain)], sampler.sampler.state_dict(0)
        unknown = refusal(impl.TrainingState, sampler=None, own=["shards"], model=plain.model)
        fits, each = network().state_dict(), {}
        for name, value in fits.items():  # each of them alone has another shape
            strange = fits | {name: torch.zeros(*value.shape, 1)}
            each[name] = refusal(impl.check_model_state, network(), strange)
        each["none"] = refusal(impl.check_model_state, plain.model, fits)
        streams.set_random_state(kept, ctx.device)
        return [*out, unknown], before, after, draws, next_draws(ctx.device), each

    run(one, 1)
    calls = [
        "a model with 3 outputs",
        "a model without its last layer",
        "a model with other names",
        "a model whose last weight is transposed",
        "a model whose last bias has no dimension",
        "a model without the last bias",
        "a model whose last layer has buffers",
        "a model with one layer more",
        "fewer parts",
        "a part more",
        "a checkpoint of 3 ranks",
        "a model with 3 outputs that is the last part",
        "a model with 3 outputs that is the last part, and own",
        "own='shards', which is no part",
    ]
    results = run(body, 1, ledger=False)
    for refusals, before, after, draws, wanted, each in results:
        expect_refusals(refusals, calls, rank=0)
        fits = each.pop("none")
        expect_equal(fits, "!it was accepted", what="a state that fits", rank=0, cause="refused")
        names = [f"a state in which {name} alone has another shape" for name in each]
        expect_refusals([*each.values()], names, rank=0)
        for what, had, has in zip(calls, before[0], after[0], strict=False):
            changed = [name for name in had if had[name] != has[name]]
            expect_equal(changed, [], what=f"{what}: parts that changed", cause="half-restored")
        expect_equal(after[1], before[1], what="the sampler after refusals", cause="half-restored")
        expect_equal(draws, wanted, what="random streams after refusals", cause="half-restored")

    def two(ctx):
        saved = store_in(impl, folder).load()
        state = Training(impl, ctx, seed).state
        with ctx.region("restore"):
            return refusal(state.restore, saved)

    for rank, text in enumerate(run(two, 2)):
        what = ["saved by 1 rank, restored by 2"]
        expect_refusals([text], what, rank=rank)


@exercise("4.2", "gloo", asserts="as-captured")
def test_a_single_process_needs_no_process_group(impl, run, seed, folder):
    """Captured and restored without a call of init_process_group."""

    def body(ctx):
        sampler = Training(impl, ctx, seed).loader.batch_sampler
        source, target = network_of(seed), network()
        captured = impl.TrainingState(sampler=sampler, model=source).capture(impl.Position(5, 0, 5))
        store = store_in(impl, folder)
        store.save(5, *captured)
        state = impl.TrainingState(sampler=sampler, model=target)
        problem = refusal(state.restore, store.load())
        return problem, target[0].weight.detach()

    [[problem, weight]] = run(body, 1, process_group=False)
    if problem != "!it was accepted":
        fail(f"restore without a process group: {problem.lstrip('!')}", cause="group-needed")
    same = not difference(weight, network_of(seed)[0].weight)
    expect_equal(same, True, what="weights taken over", cause="weights")


@exercise("4.2", "gloo", asserts="wrappers plain-names")
def test_wrapped_and_plain_models_exchange_checkpoints(impl, run, seed, folder):
    """Saved from a wrapped model, restored into a plain model, and the other way round."""

    def body(ctx):
        sampler, out = Training(impl, ctx, seed).loader.batch_sampler, []
        for number, (times_saved, times_loaded) in enumerate(((1, 0), (0, 1), (2, 1))):

            def state(model, times: int):
                for _ in range(times):
                    model = Wrapped(model)
                return impl.TrainingState(sampler=sampler, model=model)

            source, target = network_of(seed), network()
            store = store_in(impl, folder / str(number))
            store.save(1, *state(source, times_saved).capture(impl.Position()))
            problem = refusal(state(target, times_loaded).restore, store.load())
            out.append([problem, [p.detach() for p in target.parameters()]])
        pairs = []
        for children in (("module", "head"), ("head", "_orig_mod")):
            pair = nn.Module()
            for name in children:
                pair.add_module(name, nn.Linear(2, 2))
            around = impl.TrainingState(sampler=sampler, model=Wrapped(pair))
            shared, _ = around.capture(impl.Position())
            pairs.append([sorted(shared["parts"]["model"]), sorted(pair.state_dict())])
        return out, pairs

    [[results, pairs]] = run(body, 1)
    for names, plain in pairs:
        what = "the names of a model with two children, one of which is called as in a wrapper"
        expect_equal(names, plain, what=what, cause="prefix")
    want = [*network_of(seed).parameters()]
    for what, (problem, got) in zip(("wrapped", "plain", "wrapped twice"), results, strict=True):
        if problem != "!it was accepted":
            fail(f"saved {what}: restore refused it: {problem}", cause="prefix")
        same = not difference(got, want)
        expect_equal(same, True, what=f"saved {what}: weights taken over", cause="prefix")


@trace("4.2")
def trace_resume(impl):
    """Six steps, of which the last three are done by a resumed run."""

    def body(ctx):
        training, position = Training(impl, ctx, 0), impl.Position()
        training.train(position, until=1)
        ctx.start_picture()
        training.train(position, until=3)
        with ctx.span("capture"):
            training.state.capture(position)
        training.train(position, until=6)

    return body
