"""Checks of exercise 3.28: sharded state, saved and loaded by any number of ranks."""

from __future__ import annotations

import copy
import io
import weakref
from typing import Any

import torch
import torch._dynamo  # torch.optim imports it when an optimizer is made: once here, not per rank
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_leaves

from distlab.grading import exercise, expect_equal, expect_refusals, fail, refusal, trace
from tests.phase3.fsdp_models import Stack, net, values_of
from tests.phase3.fsdp_states import compare, expect_state, odds, steps, wrapped


def changed(before: Any, now: Any, name: str = "state") -> list[str]:
    """The names of the tensors that differ."""
    if isinstance(now, torch.Tensor):
        return [] if torch.equal(before, now) else [name]
    if not isinstance(now, dict | list | tuple):
        return []
    keys = now if isinstance(now, dict) else range(len(now))
    return [found for key in keys for found in changed(before[key], now[key], f"{name}[{key!r}]")]


@exercise(
    "3.28", "virtual gloo", asserts="saved-silent loaded other-units own-state copies life cost"
)
def test_training_goes_on_at_another_world_size(impl, run, seed):
    """Saved by 4 ranks, loaded by 2, 3 and 1, AdamW's moments too: as if nothing had happened."""

    def save(ctx):
        model, inner, optimizer = wrapped(impl, seed)
        steps(model, optimizer, seed, 0, range(3))
        with ctx.region("save"):
            saved = impl.sharded_state_dict(model, optimizer)
        before = copy.deepcopy(saved)
        steps(model, optimizer, seed, 0, range(3, 5))
        inner.offset.fill_(9.0)  # a copy was asked for
        return saved, changed(before, saved)

    first = run(save, 4)
    saved = [state for state, _ in first]
    for rank, (_, names) in enumerate(first):
        if names:
            text = f"what rank {rank} has saved changes while training goes on: {names[0]} is the "
            fail(f"{text}model's or the optimizer's own tensor", cause="not-a-copy", rank=rank)
    for log in first.logs:
        if log.select(region="save").events:
            fail("saving shards sent messages", cause="communicated")
    alone = net(seed)
    steps(alone, torch.optim.AdamW(alone.parameters(), lr=0.05), seed, 0, range(5))
    want = values_of(alone, alone)

    def load(ctx):
        units = None if ctx.world_size != 2 else lambda inner: list(inner.blocks)[1:]
        model, inner, optimizer = wrapped(impl, seed + 1, units=units)
        steps(model, optimizer, seed, 0, range(1))  # its own moments must go
        with ctx.region("load"):
            impl.load_sharded_state_dict(model, iter(saved), optimizer)
        steps(model, optimizer, seed, 0, range(3, 5))
        return values_of(model, inner), inner.offset.clone()

    sizes = (3, 2, 1, 4)
    for world_size, results in zip(sizes, run.worlds(load, sizes), strict=True):
        for rank, (got, offset) in enumerate(results):
            what = f"saved by 4 ranks, trained on by {world_size}"
            expect_equal(offset.tolist(), [1.0, 1.0], what="the buffer when saved", cause="buffers")
            compare(got, want, what, rank, rtol=1e-9)
        for log in results.logs:
            if log.select(region="load").events:
                fail("loading shards sent messages", cause="communicated")


class Keeping(torch.optim.Optimizer):
    """State like the shard, in float64, under names that pieces use; and state that is whole."""

    def __init__(self, parameters, factor: float = 1.0) -> None:
        super().__init__(parameters, {})
        for shard in self.param_groups[0]["params"]:
            if shard.requires_grad:
                kept = shard.detach().double() * factor
                self.state[shard] = {"values": kept, "first": kept * 3, "step": torch.tensor(7.0)}
                self.state[shard] |= {"table": torch.full((2, 2), 5), "count": 4, "word": "w"}


def pieces_of(plain: dict, ranks: int, rank: int) -> dict[str, tuple]:
    """A rank's part of ``odds``, by first name: first number and values."""
    found = {}
    for part in ("root", "one", "two"):
        for kind in (("turned", "scalar", "empty"), ("wide",), ("coarse",), ("numbers",)):
            values = [plain[f"{part}.{name}"] for name in kind]
            total = sum(v.numel() for v in values)
            chunk, begin = -(-total // ranks), 0
            for name, value in zip(kind, values, strict=True):
                low = max(begin, rank * chunk)
                high = min(begin + value.numel(), (rank + 1) * chunk)
                if low < high:
                    mine = value.flatten()[low - begin : high - begin]
                    found[f"{part}.{name}"] = (low - begin, mine)
                begin += value.numel()
    return found


def judge_pieces(state: Any, plain: dict, ranks: int, rank: int, factor: float, what: str) -> None:
    """Check that a rank's state is its part of ``plain`` times ``factor``, with the optimizer's."""
    where = f"{what}, {rank} of {ranks} ranks"
    got = {piece["names"][0]: piece for piece in state["pieces"] if len(piece["values"])}
    want = pieces_of(plain, ranks, rank)
    expect_equal(sorted(got), sorted(want), what=f"{where}: pieces", cause="pieces")
    shapes = {n: list(v.shape) for n, v in plain.items() if not n.endswith(("count", "mean"))}
    expect_equal(dict(state["shapes"]), shapes, what=f"{where}: shapes", cause="shapes")
    buffers = {n: v for n, v in plain.items() if n.endswith(("count", "mean"))}
    expect_state(state["buffers"], buffers, f"{where}: buffers")
    for name, (first, values) in want.items():
        piece = got[name]
        names = [name] + [name.replace("wide", "tied")] * name.endswith("wide")
        facts = [sorted(piece["names"]), piece["shape"], piece["first"]]
        right = [sorted(names), list(plain[name].shape), first]
        expect_equal(facts, right, what=f"{where}: names, shape, first of {name}", cause="piece")
        expect_state({name: piece["values"]}, {name: values}, where)
        kept = values.double() * factor
        state_of = {"values": kept, "first": kept * 3, "step": torch.tensor(7.0)}
        state_of |= {"table": torch.full((2, 2), 5)}
        plainly = {"count": 4, "word": "w"}
        if name.endswith("numbers"):
            state_of, plainly = {}, {}
        tensors = {k: v for k, v in piece["state"].items() if isinstance(v, torch.Tensor)}
        others = {k: v for k, v in piece["state"].items() if k not in tensors}
        expect_state(tensors, state_of, f"{where}: the optimizer's state of {name}")
        expect_equal(others, plainly, what=f"{where}: other state of {name}", cause="state")


def file_of(state: Any) -> bytes:
    """The bytes that ``torch.save`` writes."""
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def kept_alive(state: Any) -> tuple[int, int]:
    """Bytes of the storages of a state's vectors, and of the vectors; of any state, right or not.
    On the rank: results arrive as copies."""
    vectors = [v for v in tree_leaves(state) if isinstance(v, torch.Tensor) and v.dim() == 1]
    storages = {v.untyped_storage()._cdata: v.untyped_storage().nbytes() for v in vectors}
    return sum(storages.values()), sum(v.nbytes for v in vectors)


@exercise(
    "3.28",
    "virtual",
    asserts="pieces copies cut-or-whole shapes loaded own-state merged read-once group dtype "
    "layout parameters alone life resources",
)
def test_odd_parameters_and_state(impl, run, seed):
    """In a group: four dtypes, tied, empty, 0-d; any state; saved, merged, loaded, saved again."""

    def save(ctx):
        groups = [dist.new_group([3, 1]), dist.new_group([0, 2, 4])]
        mine = ctx.rank % 2 == 0
        inner = odds(seed + mine)
        model = impl.module("fsdp").FSDP(inner, inner.units(), group=groups[mine])
        optimizer = Keeping(model.parameters())
        saved = impl.sharded_state_dict(model, optimizer)
        with torch.no_grad():  # training goes on: what was saved must not change
            for shard in model.parameters():
                shard.zero_()
            for state in optimizer.state.values():
                for value in state.values():
                    if isinstance(value, torch.Tensor):
                        value.zero_()
            inner.one.count.zero_()
        return saved, kept_alive(saved)

    results = list(run(save, 5))
    members = {0: [1, 3], 1: [0, 2, 4]}
    groups = {which: [results[r][0] for r in ranks] for which, ranks in members.items()}
    for which, states in groups.items():
        plain = odds(seed + which).state_dict()
        for rank, state in enumerate(states):
            judge_pieces(state, plain, len(states), rank, 1.0, "saved")
            kept, needed = results[members[which][rank]][1]
            if kept > needed:
                text = f"saved, {rank} of {len(states)} ranks: pieces of {needed} B keep {kept} B "
                fail(f"{text}in memory and file: copy the piece, not the shard", cause="too-large")

    files = [file_of(state) for state in groups[1]]

    def load(ctx):
        inner = odds(seed + 5)
        model = impl.module("fsdp").FSDP(inner, inner.units())
        shards = [shard for shard in model.parameters() if shard.requires_grad]
        stranger = nn.Parameter(torch.ones(3))  # of another model
        optimizer = Keeping([*shards, stranger], 2.0)
        for shard in shards:
            optimizer.state[shard]["old"] = torch.ones(1)
        without = [piece["state"] for piece in impl.sharded_state_dict(model)["pieces"]]
        alive: list[Any] = []
        most = 0

        def lazily():
            nonlocal most
            for state in files:
                most = max(most, sum(tensor() is not None for tensor in alive))
                new = torch.load(io.BytesIO(state), weights_only=True)
                alive.append(weakref.ref(new["pieces"][0]["values"]))
                yield new
                del new

        impl.load_sharded_state_dict(model, lazily(), optimizer)
        optimizer.state_dict()  # raises for a shard that is not the optimizer's
        merged = impl.merge(iter(groups[1])) if ctx.rank == 0 else {}
        impl.load_sharded_state_dict(model, iter(groups[1]))
        others = optimizer.state[stranger].get("values", torch.zeros(3)).tolist()
        return impl.sharded_state_dict(model, optimizer), merged, most, any(without), others

    plain = odds(seed + 1).state_dict()
    for world_size, loaded in zip((2, 4), run.worlds(load, (2, 4)), strict=True):
        for rank, (state, merged, most, without, others) in enumerate(loaded):
            what = "the optimizer's state of a parameter that is none of the model's shards"
            expect_equal(others, [2.0] * 3, what=what, rank=rank, cause="other-state")
            what = "state of an optimizer that was not passed"
            expect_equal(without, False, what=what, rank=rank, cause="state")
            judge_pieces(state, plain, world_size, rank, 1.0, "loaded from 3 ranks, saved again")
            if rank == 0:
                expect_state(merged, plain, "merged")
            if most > 1:
                text = f"rank {rank} keeps {most} states when it reads the next one"
                fail(f"{text}: take what is needed from each, then let it go", cause="all-kept")


@exercise("3.28", "virtual", asserts="lacking-refused merge-refused refusals alone")
def test_what_lacks_elements_is_refused(impl, run, seed):
    """States that are missing, twice there instead, or of another model; nothing has changed."""

    def save(ctx):
        inner = nn.Sequential(nn.Linear(2, 3, bias=False), nn.Linear(3, 2, bias=False))
        with torch.no_grad():
            for k, parameter in enumerate(inner.parameters()):
                parameter.fill_(k + 1.0)
        inner.register_buffer("offset", torch.ones(2))
        model = impl.module("fsdp").FSDP(inner)  # each of two ranks has one parameter
        other = impl.module("fsdp").FSDP(nn.Sequential(nn.Linear(3, 2, bias=False)))
        tall = nn.Sequential(nn.Linear(3, 2, bias=False), nn.Linear(2, 3, bias=False))
        tall.register_buffer("offset", torch.ones(2))
        tall = impl.module("fsdp").FSDP(tall)
        return [impl.sharded_state_dict(m, Keeping(m.parameters())) for m in (model, other, tall)]

    (one, short, tall), (two, shorter, taller) = run(save, 2)
    thirds = [states[0] for states in run(save, 3)]
    bad = {
        "nothing": [],
        "the first rank's alone": [one],
        "the second rank's alone": [two],
        "the first rank's twice": [one, one],
        "the first two of three": thirds[:2],
        "the last two of three": thirds[1:],
        "another model's": [short, shorter],
        "a model's with transposed weights": [tall, taller],
        "the first of one model, the second of another": [one, taller],
        "the same the other way round": [tall, two],
        "those without a buffer": [{**state, "buffers": {}} for state in (one, two)],
    }

    def load(ctx):
        inner = nn.Sequential(nn.Linear(2, 3, bias=False), nn.Linear(3, 2, bias=False))
        inner.register_buffer("offset", torch.zeros(2))
        model = impl.module("fsdp").FSDP(inner)
        (shard,) = model.parameters()
        with torch.no_grad():
            shard.fill_(9.0)
        optimizer = Keeping([shard], 2.0)
        refusals = [
            refusal(impl.load_sharded_state_dict, model, iter(states), optimizer)
            for states in bad.values()
        ]
        some = list(bad.values())[:6]
        merges = [refusal(impl.merge, iter(states)) for states in some]
        state = {
            key: value.unique().tolist() if isinstance(value, torch.Tensor) else value
            for key, value in optimizer.state[shard].items()
        }
        after = [shard.detach().tolist(), inner.offset.tolist()]
        return refusals + merges, after, state

    def own_part(ctx):
        inner = nn.Sequential(nn.Linear(2, 3, bias=False), nn.Linear(3, 2, bias=False))
        inner.register_buffer("offset", torch.zeros(2))
        model = impl.module("fsdp").FSDP(inner)
        refused = refusal(impl.load_sharded_state_dict, model, iter([(one, two)[ctx.rank]]))
        return refused, [s.detach().tolist() for s in model.parameters()]

    calls = [f"loading {name}" for name in bad] + [f"merging {name}" for name in list(bad)[:6]]
    (refusals, after, state) = run(load, 1)[0]
    expect_refusals(refusals, calls)
    want = [[9.0] * 12, [0.0, 0.0]]
    expect_equal(after, want, what="parameters and buffer after refusals", cause="half-loaded")
    want = {"values": [18.0], "first": [54.0], "step": [7.0], "table": [5], "count": 4, "word": "w"}
    expect_equal(state, want, what="the optimizer's state then", cause="half-loaded")
    for rank, (refused, values) in enumerate(run(own_part, 2)):
        if not refused.startswith("!"):
            text = f"rank {rank} refuses a state with all that it needs, of another rank's "
            fail(f"{text}elements nothing: {refused}", cause="refused", rank=rank)
        what = "parameters of a rank that loads all it needs from one state of two"
        expect_equal(values, [[rank + 1.0] * 6], what=what, rank=rank, cause="refused")


@exercise("3.28", "virtual", asserts="own-state other-units life")
def test_elements_without_state_get_zeros(impl, run, seed):
    """Only one unit's optimizer state was saved, or none; loaded by a model of one unit."""

    def layers():
        return nn.Sequential(nn.Linear(2, 3, bias=False), nn.Linear(3, 2, bias=False))

    def save(ctx):
        inner = layers()
        model = impl.module("fsdp").FSDP(inner, list(inner))
        shards = list(model.parameters())
        optimizer = torch.optim.SGD(shards)
        bare = impl.sharded_state_dict(model, optimizer)
        optimizer.state[shards[0]] = {"kept": torch.full_like(shards[0].detach(), 2.0)}
        return impl.sharded_state_dict(model, optimizer), bare

    saved, bare = ([states[k] for states in run(save, 2)] for k in (0, 1))

    def load(ctx):
        model = impl.module("fsdp").FSDP(layers())
        (shard,) = model.parameters()
        optimizer = torch.optim.SGD([shard])
        impl.load_sharded_state_dict(model, iter(saved), optimizer)
        kept = {name: value.clone() for name, value in optimizer.state[shard].items()}
        impl.load_sharded_state_dict(model, iter(bare), optimizer)
        return kept, sorted(optimizer.state.get(shard, {}))

    kept, left = run(load, 1)[0]
    want = {"kept": torch.tensor([2.0] * 6 + [0.0] * 6)}
    expect_state(kept, want, "the optimizer's state of one unit of two")
    expect_equal(left, [], what="state after loading what has none", cause="old-state")


@trace("3.28")
def trace_sharded_state(impl):
    """Two steps, and shards that are saved and loaded again: no message."""

    def body(ctx):
        torch.manual_seed(0)
        inner = Stack(width=256)
        model = impl.module("fsdp").FSDP(inner, list(inner.layers))
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in ctx.steps(2):
            model(torch.ones(32, 2)).sum().backward()
            optimizer.step()
        saved = impl.sharded_state_dict(model, optimizer)
        pieces = sum(len(piece["values"]) for piece in saved["pieces"])
        print(f"rank {ctx.rank}: {len(saved['pieces'])} pieces of {pieces} elements")

    return body
