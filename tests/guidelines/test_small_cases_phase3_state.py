"""The answers to phase 3's small cases of sharded state, strategies, servers and local SGD."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from distlab.ranks import RankContext
from distlab.virtual import run_virtual
from given.step_profile import Phase, Profile
from solutions.phase3_multi_node.fsdp import FlatParameter
from solutions.phase3_multi_node.fsdp_checkpoint import parts_of
from solutions.phase3_multi_node.local_sgd import DiLoCo
from solutions.phase3_multi_node.mesh import Grid, Spec, bytes_leaving
from solutions.phase3_multi_node.parameter_client import LEAVE, PULL, PUSH, place_keys
from solutions.phase3_multi_node.parameter_server import Request, Server, serve_bounded
from solutions.phase3_multi_node.per_parameter_sharding import PerParameterFSDP
from solutions.phase3_multi_node.sharding_strategies import Links, choose_strategy, traffic
from solutions.phase3_multi_node.strategy_memory import memory_of
from tests.guidelines.folded import answer, says

MB = 10**6
UNITS = (0, MB, MB, MB, MB)  # the root has nothing
PHASES = (
    *(Phase(unit=k, backward=False, activations=k * MB // 2, of_root=0) for k in (1, 2, 3, 4)),
    *(Phase(unit=k, backward=True, activations=k * MB // 2 + MB, of_root=0) for k in (4, 3, 2, 1)),
)  # in backward the largest gradient of a unit is among the activations
PROFILE = Profile(
    parameters=UNITS, gradients=UNITS, largest=UNITS, buffers=0, state=2.0, saved=2 * MB,
    phases=PHASES,
)  # fmt: skip


def virtual(body: Callable[[RankContext], Any], ranks: int) -> list[Any]:
    return [*run_virtual(body, ranks, learner_files=(__file__,))]


def test_3_19() -> None:
    profile = Profile(
        parameters=(0, 8 * MB), gradients=(0, 8 * MB), largest=(0, 8 * MB), buffers=0, state=2.0,
        saved=0, phases=PHASES[:1],
    )  # fmt: skip
    _, hybrid, _ = traffic(profile, "hybrid", 2, 4, Links(), 1)
    says(3, "3.19", f"four ranks {hybrid / MB:.0f} MB")
    says(3, "3.19", f"3·7/8·8 = {3 * 7 / 8 * 8:.0f} MB")  # without prefetching's kept unit


def pieces(world_size: int, sizes: dict[str, int]) -> list[list[tuple[str, int, int]]]:
    """For each rank the (name, first element, last element) of its pieces."""

    def body(ctx: RankContext) -> list[tuple[str, int, int]]:
        module = nn.Module()
        for name, numel in sizes.items():
            module.register_parameter(name, nn.Parameter(torch.zeros(numel)))
        places = {p: [(module, n, n)] for n, p in module.named_parameters()}
        flat = FlatParameter(places, None, torch.device("cpu"))
        found = [(names[0], first, own.stop - own.start) for names, _, first, own in parts_of(flat)]
        return [(name, first, first + count - 1) for name, first, count in found]

    return virtual(body, world_size)


def test_3_20() -> None:
    for rank, found in enumerate(pieces(3, {"w": 8, "b": 3})):
        says(3, "3.20", *(f"Rank {rank}: elements {a} to {b} of {name}" for name, a, b in found))


def test_3_28() -> None:
    saved = [found[0] for found in pieces(3, {"w": 11})]
    for rank, [(_, low, high)] in enumerate(pieces(2, {"w": 11})):
        text = answer(3, "3.28").split(f"Rank {rank} needs {low} to ")[-1].split("Rank 1")[0]
        if rank == 0:
            assert f"elements {low} to {high}" in answer(3, "3.28")
        for k, (_, begin, end) in enumerate(saved):
            first, last = max(low, begin), min(high, end)
            if first <= last:
                joint = "and" if last - first == 1 else "to"
                assert f"piece {k} elements {first} {joint} {last}" in text


def test_3_32() -> None:
    def body(ctx: RankContext) -> tuple[list[int], int, int, int]:
        unit = nn.ParameterList([nn.Parameter(torch.zeros(4, 2)), nn.Parameter(torch.zeros(2))])
        flat = FlatParameter({p: [] for p in unit}, None, torch.device("cpu"))
        model = PerParameterFSDP(unit)
        message = sum(part.numel for unit in model.units for f in unit.flats for part in f.parts)
        kept = [shard.numel() for shard in model.parameters()]
        return kept, message, flat.chunk, flat.shard.numel()

    results = virtual(body, 3)
    assert [kept for kept, *_ in results] == [[4, 1], [4, 1], [0, 0]]
    _, message, chunk, _ = results[0]
    says(3, "3.32", f"3 · (4 + 1) = {3 * message} elements", f"the flat vector 3 · 4 = {3 * chunk}")
    says(3, "3.32", "keep {}, {} and {} elements".format(*(sum(kept) for kept, *_ in results)))
    says(3, "3.32", "{}, {} and {} of the flat vector".format(*(own for *_, own in results)))


def test_3_33() -> None:
    sent = {"shard": 100.0, "expert": 60.0}
    near, far = Grid({"expert": 2, "shard": 16}), Grid({"shard": 16, "expert": 2})
    alone = bytes_leaving(near, sent | {"expert": 0.0}, 8)
    says(3, "3.33", f"100 = {alone:.0f} MB", f"{bytes_leaving(near, sent, 8) - alone:.0f} MB")
    says(3, "3.33", f"Together {bytes_leaving(near, sent, 8):.0f} MB")
    says(3, "3.33", f"100 = {bytes_leaving(far, sent, 8):.0f} MB")
    rank = next(r for r in range(32) if near.coordinates(r) == {"expert": 1, "shard": 1})
    (first, end), _ = Spec(shape=(6, 4), cut={"expert": 0, "shard": 0}).bounds(near, rank)
    says(3, "3.33", f"= {end - first} row goes to each shard: row {first}")


def test_3_27() -> None:
    for strategy in ("ddp", "fsdp"):
        peak = memory_of(PROFILE, strategy, 1, 4).peak
        says(3, "3.27", f"{peak / MB:g} MB")


def test_3_21() -> None:
    peak = memory_of(PROFILE, "ddp", 1, 4).peak
    assert choose_strategy(PROFILE, peak, 1, 4).strategy == "ddp"
    assert choose_strategy(PROFILE, peak - 1, 1, 4).strategy == "zero2"
    says(3, "3.21", f"From {peak / MB:.0f} MB on", "ZeRO-2 is chosen")


def test_3_26() -> None:
    sizes = dict(zip("abcde", (5, 4, 3, 3, 3), strict=True))
    placed = place_keys({k: torch.zeros(n) for k, n in sizes.items()}, 2)
    loads = [sum(n for k, n in sizes.items() if placed[k] == s) for s in range(2)]
    without_last = [loads[0], loads[1] - 3]
    says(3, "3.26", "{} against {}".format(*without_last), "{} and {}".format(*loads))
    says(3, "3.26", f"differ by {max(loads) - min(loads)}")


def test_3_22() -> None:
    def body(ctx: RankContext) -> list[float]:
        found = []
        for names in ((1, 2), (1, 2, 3)):
            if ctx.rank:
                continue
            server = Server.__new__(Server)
            server.values, server.lr, server.version = {"x": torch.zeros(1)}, 1.0, 0
            pushes = {1: (3.0, 1), 2: (6.0, 1), 3: (9.0, 2)}
            server.update(
                [
                    Request(w, PUSH, samples=n, gradients={"x": torch.tensor([g])})
                    for w, (g, n) in pushes.items()
                    if w in names
                ]
            )
            found.append(-server.values["x"].item())
        return found

    for subtracted in virtual(body, 1)[0]:
        says(3, "3.22", f"{subtracted:g}")
    says(3, "3.22", f"only {(3 + 6) / 4:g}")


def stale(lr: float, steps: int) -> list[float]:
    xs = [1.0, 1.0 - lr]
    while len(xs) < steps:
        xs.append(xs[-1] - lr * xs[-2])
    return xs


def test_3_23() -> None:
    for lr in (0.5, 2.0):
        says(3, "3.23", ", ".join(f"{x:g}" for x in stale(lr, 7)))
    growth = abs(stale(2.0, 60)[-1] ** 2 + stale(2.0, 60)[-2] ** 2)
    before = abs(stale(2.0, 58)[-1] ** 2 + stale(2.0, 58)[-2] ** 2)
    assert 1.2 < (growth / before) ** 0.25 < 1.7  # about √2 per step
    says(3, "3.23", "√2")


class Asked:
    """A server for `serve_bounded` that gets these requests and notes whom it answers."""

    def __init__(self, requests: list[Request]) -> None:
        self.requests, self.live, self.answered = requests, [1, 2, 3], []

    def receive(self, worker: int | None) -> Request:
        request = self.requests.pop(0)
        if request.kind == LEAVE:
            self.live.remove(request.worker)
        return request

    def answer(self, request: Request) -> None:
        self.answered.append(request.worker)

    def update(self, pushes: list[Request]) -> None:
        pass


def test_3_24() -> None:
    clocks = {1: 6, 2: 4, 3: 3}
    pushes = [Request(w, PUSH, clock=c - 1) for w, c in clocks.items()]
    pulls = [Request(w, PULL) for w in clocks]
    server = Asked([*pushes, *pulls, Request(3, LEAVE)])
    before = []
    take = server.receive

    def receive(worker: int | None) -> Request:
        if len(server.requests) == 1:
            before.extend(server.answered)
        if not server.requests:
            server.live.clear()
            return Request(1, LEAVE)
        return take(worker)

    server.receive = receive  # type: ignore[method-assign]
    serve_bounded(server, 2)  # type: ignore[arg-type]
    assert sorted(clocks[w] for w in before) == [3, 4]
    assert clocks[server.answered[2]] == 6
    says(3, "3.24", "4 and 3 may, 6 is held", "6 may read, too")


def test_3_25() -> None:
    def body(ctx: RankContext) -> list[float]:
        model = nn.Linear(1, 1, bias=False)
        with torch.no_grad():
            model.weight.fill_(10.0)
        rounds = DiLoCo(model, every=1, lr=1.0, momentum=0.5)
        found = []
        for deltas in ((2.0, 4.0), (3.0, 3.0)):
            with torch.no_grad():
                model.weight.sub_(deltas[ctx.rank])
            rounds.step()
            found.append(model.weight.item())
        return found

    first, second = virtual(body, 2)[0]
    says(3, "3.25", f"= {first:g}", f"= {second:g}", f"v = {0.5 * 3 + 3 - 1.5:g}", f"= {1.5 + 3:g}")
