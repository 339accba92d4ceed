"""Checks of exercise 4.2: interrupted and resumed equals uninterrupted, bit for bit."""

from __future__ import annotations

import copy

import torch
from torch import nn

from distlab.grading import exercise, expect_equal, expect_refused, fail, refusal, trace
from given.safe_format import pack
from tests.phase4.checkpoints import difference, store_in
from tests.phase4.small_training import (
    BATCH,
    EPOCHS,
    Augmented,
    Training,
    Wrapped,
    facts,
    network,
    network_of,
    next_draws,
)

POINTS = (4, 6, 8)  # within the first epoch, at its end, within the second


# -- the whole ------------------------------------------------------------------------------------
@exercise("4.2", "gloo cuda")
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


@exercise("4.2", "gloo")
def test_loader_workers_go_on_with_the_same_samples(impl, run, seed):
    """Samples and their noise do not depend on who loads them: 0 or 2 workers, resumed or not."""

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

        whole = samples(0, impl.Position())
        resumed = {"epoch": 0, "seed": 0, "consumed": 3 * BATCH}
        return [
            whole,
            samples(2, impl.Position()),
            samples(2, impl.Position(step=3, epoch=0, batch=3), resumed),
        ]

    [[whole, with_workers, resumed]] = run(body, 1, ledger=False, timeout=40)
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
@exercise("4.2", "gloo")
def test_what_is_shared_and_what_is_own(impl, run, seed):
    """Random streams, sampler and named parts are the rank's; a model has its plain names."""

    def body(ctx):
        training, position = Training(impl, ctx, seed, own=["average"]), impl.Position()
        training.train(position, until=4)
        shared, own = training.state.capture(position)
        data, tensors = pack({"shared": shared, "own": own})
        names = sorted(shared["parts"]["model"])
        return [sorted(shared["parts"]), sorted(own["parts"]), names, own["sampler"], len(tensors)]

    for rank, got in enumerate(run(body, 2)):
        shared, own, names, sampler, _ = got
        want = ["model", "optimizer", "scaler", "schedule"]
        expect_equal(shared, want, what="shared parts", rank=rank, cause="shared")
        expect_equal(own, ["average", "mixup"], what="own parts", rank=rank, cause="own")
        plain = sorted(network().state_dict())
        expect_equal(names, plain, what="the wrapped model's names", rank=rank, cause="prefix")
        want = {"epoch": 0, "seed": 0, "consumed": 4 * BATCH // 2}
        expect_equal(sampler, want, what="the sampler's state", rank=rank, cause="samples")


@exercise("4.2", "gloo")
def test_what_does_not_fit_is_refused(impl, run, seed, folder):
    """Another model, other parts, another world size: one line that names it, nothing changed."""

    def one(ctx):
        training, position = Training(impl, ctx, seed), impl.Position()
        training.train(position, until=2)
        store_in(impl, folder).save(2, *training.state.capture(position))

    def body(ctx):
        saved = store_in(impl, folder).load()
        plain = Training(impl, ctx, seed + 1)
        others = []
        for last in (nn.Linear(8, 3), nn.Identity(), nn.Sequential(nn.Linear(8, 1))):
            other = Training(impl, ctx, seed + 1)
            other.model.module[3] = last
            others.append(other)
        fewer = impl.TrainingState(sampler=plain.loader.batch_sampler, model=plain.model)
        before = [facts(t) for t in others]
        out = [refusal(t.state.restore, saved) for t in others]
        out.append(refusal(fewer.restore, saved))
        after = [facts(t) for t in others]
        unknown = refusal(impl.TrainingState, sampler=None, own=["shards"], model=plain.model)
        return [*out, unknown], before, after

    run(one, 1)
    calls = [
        ("a model with 3 outputs", ["3.weight [1, 8] for [3, 8]"]),
        ("a model without its last layer", ["2 unknown", "3.weight"]),
        ("a model with other names", ["2 missing", "3.0.weight", "2 unknown", "3.weight"]),
        ("fewer parts", ["optimizer"]),
        ("own='shards', which is no part", ["shards"]),
    ]
    results = run(body, 1, ledger=False)
    flat = copy.copy(results)
    flat[:] = [refusals for refusals, *_ in results]
    expect_refused(flat, calls)
    for refusals, before, after in results:
        lines = [text for text in refusals if "\n" in text]
        expect_equal(lines, [], what="messages of more than one line", cause="unclear-message")
        same = [had == has for had, has in zip(before, after, strict=True)]
        expect_equal(same, [True] * 3, what="parts unchanged by a refusal", cause="half-restored")

    def two(ctx):
        saved = store_in(impl, folder).load()
        state = Training(impl, ctx, seed).state
        with ctx.region("restore"):
            return refusal(state.restore, saved)

    for rank, text in enumerate(run(two, 2)):
        if text.startswith("!") or "1" not in text or "2" not in text:
            message = f"saved by 1 rank, restored by 2, rank {rank}: expected a ValueError that "
            fail(message + f"names both, but {text.lstrip('!')}", cause="accepted", rank=rank)


@exercise("4.2", "gloo")
def test_a_single_process_needs_no_process_group(impl, run, seed, folder):
    """Captured and restored where nobody has called init_process_group."""

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


@exercise("4.2", "gloo")
def test_wrapped_and_plain_models_exchange_checkpoints(impl, run, seed, folder):
    """Saved from a wrapped model, restored into a plain one, and the other way round."""

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
        return out

    [results] = run(body, 1)
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
