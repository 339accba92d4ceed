"""What the checks of the mixture of experts share: the router's rules, token by token."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tests.phase2.parallel_values import values

TOKENS = (7, 0, 4, 6)  # of each rank; rank 1 has none


def first_choices(experts: list[list[int]], room: int) -> list[list[bool]]:
    """Which choices find room: all first choices by token, then all second ones."""
    taken: dict[int, int] = {}
    kept = [[False] * len(row) for row in experts]
    for place in range(len(experts[0]) if experts else 0):
        for token, row in enumerate(experts):
            taken[row[place]] = taken.get(row[place], 0) + 1
            kept[token][place] = taken[row[place]] <= room
    return kept


def best(scores: list[float], top_k: int) -> list[int]:
    """The experts with the largest scores; of equal ones the smaller number."""
    return sorted(range(len(scores)), key=lambda e: (-scores[e], e))[:top_k]


def room_for(tokens: int, experts: int, top_k: int, factor: float | None) -> int:
    """The capacity of an expert for one rank's tokens."""
    return tokens if factor is None else math.ceil(factor * top_k * tokens / experts)


def route(x: Tensor, weight: Tensor, bias: Tensor, top_k: int, factor: float | None):
    """Experts, weights, kept and probabilities of one rank's tokens; autograd sees all of it."""
    probabilities = (x @ weight.T).softmax(-1)
    scores = (probabilities.detach() + bias).tolist()
    experts = [best(row, top_k) for row in scores]
    room = room_for(len(x), len(weight), top_k, factor)
    kept = torch.tensor(first_choices(experts, room), dtype=torch.bool).view(len(x), top_k)
    chosen = torch.tensor(experts, dtype=torch.int64).view(len(x), top_k)
    weights = probabilities.gather(1, chosen)
    if top_k > 1:
        weights = weights / weights.sum(1, keepdim=True)
    return chosen, weights * kept, kept, probabilities


def load_of(chosen: list[Tensor], experts: int) -> Tensor:
    """Choices of each expert on all ranks."""
    every = torch.cat([c.flatten() for c in chosen])
    return torch.stack([(every == e).sum() for e in range(experts)])


def balance(probabilities: list[Tensor], load: Tensor) -> Tensor:
    """E·Σ f·P of one process with the tokens of all ranks."""
    share = load.double() / load.sum()
    return len(load) * (share * torch.cat(probabilities).mean(0)).sum()


def tokens_of(seed: int, rank: int, width: int) -> Tensor:
    """One rank's tokens; they lean to one side, so that some experts are liked better."""
    return values(seed, 50 + rank, TOKENS[rank % 4], width) + 0.5
