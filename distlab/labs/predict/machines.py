"""Whole runs on machines that nobody owns: the answers come from formulas and the simulator."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch._dynamo  # torch.optim imports it when an optimizer is made

from given.step_profile import Phase, Profile, profile

from ...course.catalogue import load_course, need_solutions, root
from ...grading.implementation import solution
from ...hardware.clusters import load_cluster
from ...hardware.collectives import collective_time
from ...ranks.context import RankContext
from ...reference.workloads import GPT
from ...simulate import Plan, simulate
from ...virtual.run import run_virtual
from ..frame import read_toml
from .case import link_in_words

GB = 1e9
SHAPES = {"gpt-1b": (24, 2048, 16), "gpt-7b": (32, 4096, 32)}  # layers, width, heads
WORDS = 50_304
NODE = 8
MOST = 4096  # ranks that are looked at


@dataclass(frozen=True)
class Question:
    """A question in words; ``unit`` and ``tolerance`` belong to the function that answers it."""

    id: str
    asks: str
    by: str
    numbers: dict[str, Any]

    @property
    def text(self) -> str:
        """The question with its numbers, those of the model and those of the machine."""
        told = self.asks.format(**self.numbers)
        if self.numbers.get("model") in SHAPES:
            layers, width, heads = SHAPES[self.numbers["model"]]
            told += f" {self.numbers['model']} has {layers} layers of width {width:,} with {heads} "
            told += f"heads, and {WORDS:,} words."
        if "cluster" in self.numbers:
            told += f" {_machine(self.numbers['cluster'])}"
        return told

    @property
    def unit(self) -> str:
        """What the answer is counted in."""
        return ANSWERS[self.by].unit

    @property
    def tolerance(self) -> float:
        """By which share an answer may be wrong."""
        return ANSWERS[self.by].tolerance

    def answer(self) -> float:
        """The answer, computed now; 1 is yes and 0 is no."""
        need_solutions(f"question {self.id}")
        return float(ANSWERS[self.by].compute(**self.numbers))


@dataclass(frozen=True)
class Answer:
    """How a kind of question is answered, and how closely."""

    compute: Callable[..., float]
    unit: str
    tolerance: float
    why: str
    formula: str


def questions() -> dict[str, Question]:
    """All whole-run questions by their ids; none in a hand-out without them."""
    path = root() / "labs" / "predict" / "machines.toml"
    if not path.exists():
        return {}
    data = read_toml(path)
    return {
        q["id"]: Question(q["id"], q["asks"], q["by"], dict(q["with"])) for q in data["question"]
    }


def question_named(name: str) -> Question:
    """The whole-run question; ValueError if there is none."""
    known = questions()
    if name in known:
        return known[name]
    if not known:
        raise ValueError("this hand-out has no questions about whole runs: ask your instructor")
    raise ValueError(f"there is no question {name!r}: they are {min(known)} to {max(known)}")


def _machine(cluster: str) -> str:
    """The numbers of a cluster that a prediction needs."""
    c = load_cluster(cluster)
    return (
        f"A node of {cluster} has {c.gpus_per_node} GPUs. Inside a node {link_in_words(c.inside)}; "
        f"between nodes {link_in_words(c.between)} per network card; "
        f"network cards in a node: {c.nics_per_node}."
    )


def _phase(number: int, module: str) -> Any:
    return solution(load_course().phase(number), module)


@functools.cache
def _profile(model: str, length: int) -> Profile:
    """One step of a sequence on fake tensors, in bfloat16 with Adam; a unit per block.

    In a rank of its own: a process that has run backward can't fork ranks any more.
    """
    *fields, phases = run_virtual(_measure, 1, model, length, ledger=False, timeout=120.0)[0]
    values: list[Any] = [*fields, tuple(Phase(*phase) for phase in phases)]
    return Profile(*values)


def _measure(_: RankContext, model: str, length: int) -> tuple[Any, ...]:
    layers, width, heads = SHAPES[model]
    with torch.device("meta"):
        gpt = GPT(WORDS, length, layers, width, heads).to(torch.bfloat16)
    tokens = torch.empty(1, length, dtype=torch.int64, device="meta")
    found = profile(gpt, (tokens, tokens.flatten()), torch.optim.Adam, units=[*gpt.blocks])
    return dataclasses.astuple(found)


def _memory(model: str, strategy: str, gpus: int, length: int) -> Any:
    nodes, each = max(1, gpus // NODE), min(gpus, NODE)
    return _phase(3, "strategy_memory").memory_of(_profile(model, length), strategy, nodes, each)


def _peak(**numbers: Any) -> float:
    return float(_memory(**numbers).peak / GB)


def _fits(card: float, **numbers: Any) -> float:
    return float(_peak(**numbers) <= card)


def _kept(**numbers: Any) -> float:
    memory = _memory(**numbers)
    return float((memory.parameters + memory.gradients + memory.optimizer) / GB)


def _estimate(model: str, strategy: str, gpus: int, length: int) -> Any:
    estimate = _phase(3, "sharding_strategies").estimate
    return estimate(_profile(model, length), strategy, max(1, gpus // NODE), min(gpus, NODE))


def _sent(**numbers: Any) -> float:
    return float(_estimate(**numbers).sent / GB)


def _across(**numbers: Any) -> float:
    return float(_estimate(**numbers).across / GB)


def _tree_from(nbytes: int, cluster: str) -> int:
    choice, link = _phase(3, "allreduce_choice"), load_cluster(cluster).between
    links = {name: choice.Link(link.alpha, link.beta) for name in ("tree", "ring")}

    def tree_wins(w: int) -> bool:
        tree, ring = (choice.predict(name, w, nbytes, links) for name in ("tree", "ring"))
        return bool(tree < ring)

    return 1 + max(w for w in range(2, MOST) if not tree_wins(w))


def _schedule(schedule: str, p: int, m: int, v: int) -> Any:
    return _phase(2, "pipeline_parallel").make_schedule(schedule, p, m, v)


def _bubble(**numbers: Any) -> float:
    return float(_phase(2, "pipeline_schedules").replay(_schedule(**numbers)).bubble)


def _micro_batches(p: int, most: float) -> int:
    return next(
        m for m in range(1, MOST) if _bubble(schedule="1f1b", p=p, m=m, v=1) <= most + 1e-12
    )


def _kept_micro_batches(**numbers: Any) -> float:
    return float(_phase(2, "pipeline_schedules").peak_live(_schedule(**numbers))[0])


def _all_reduce(gigabytes: float, gpus: int, cluster: str) -> float:
    machine = dataclasses.replace(load_cluster(cluster), in_network=None)
    return collective_time("all_reduce", gigabytes * GB, tuple(range(gpus)), machine, "ring")


def _top_k_loses_from(ratio: float) -> int:
    """(W-1)·k·8 bytes against 2(W-1)/W·4n, as ``gradient_compression`` says."""
    n = 1_000_000
    k = _phase(4, "gradient_compression").count_for(ratio, n)
    return next(w for w in range(2, MOST) if (w - 1) * k * 8 > 2 * (w - 1) / w * 4 * n)


def step_of(gpus: int, **numbers: Any) -> float:
    """Seconds of a simulated step."""
    return next(simulate(Plan(gpus=(gpus,), **numbers))).step


def _efficiency(alone: float, **numbers: Any) -> float:
    """``alone``: milliseconds of a step on one GPU, as the question tells them."""
    return alone / 1e3 / step_of(**numbers)


def _local_share(every: int, steps: int) -> float:
    return math.ceil(steps / every) / steps


EXACT = "none, it is counted"
ROUGH = "10 %: an estimate is rounded"
WORDS_COUNT = "5 %: the words' embedding is part of the model"
MEMORY = "what is kept, the activations, and what a step gathers (exercise 3.27)"
LONGEST = "2⌈log₂ W⌉·(α + N·β) < 2(W-1)·(α + N/W·β), for this W and all above"
SLOWEST = (
    "launch + 2(W-1)·(α + N/W·β), β of the link inside a node or of a node's network cards together"
)
EXPOSED = "the time of a step on one GPU, divided by that on many (`distlab simulate`)"
ANSWERS = {
    "fits": Answer(_fits, "yes or no", 0.0, EXACT, MEMORY),
    "peak": Answer(_peak, "GB", 0.1, ROUGH, MEMORY),
    "kept": Answer(
        _kept, "GB", 0.05, WORDS_COUNT, "4Ψ + 4Ψ/W bytes with ZeRO-1, 8Ψ/W with FSDP, in bfloat16"
    ),
    "tree_from": Answer(_tree_from, "ranks", 0.0, EXACT, LONGEST),
    "bubble": Answer(
        _bubble, "share", 0.03, "3 %: three digits are enough", "(p-1)/(v·m + p-1), GPipe: v = 1"
    ),
    "micro_batches": Answer(
        _micro_batches,
        "micro-batches",
        0.0,
        EXACT,
        "the least m for which (p-1)/(m + p-1) is at most the limit",
    ),
    "kept_micro_batches": Answer(_kept_micro_batches, "micro-batches", 0.0, EXACT, "min(m, p)"),
    "all_reduce": Answer(_all_reduce, "seconds", 0.1, ROUGH, SLOWEST),
    "sent": Answer(_sent, "GB", 0.05, WORDS_COUNT, "(W-1)/W·(3P - P_last - P_root), P = 2Ψ bytes"),
    "across": Answer(_across, "GB", 0.05, WORDS_COUNT, "2(M-1)/M·P for M nodes, P = 2Ψ bytes"),
    "top_k_loses_from": Answer(
        _top_k_loses_from, "ranks", 0.0, EXACT, "(W-1)·8k > 2(W-1)/W·4n, so W > n/k"
    ),
    "efficiency": Answer(_efficiency, "share", 0.05, "5 %: an estimate is rounded", EXPOSED),
    "local_share": Answer(_local_share, "share", 0.01, "1 %: rounding", "⌈steps/H⌉/steps"),
}
TIMED_ANSWERS = ("tree_from", "all_reduce", "efficiency")  # they rest on the α-β model
