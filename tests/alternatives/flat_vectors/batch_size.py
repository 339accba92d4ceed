# for: 2.4
"""Written from the docstrings alone."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from given.agreement import Group

Trial = Callable[[int], float]
Measure = Callable[[Callable[[], object]], float]
OUT_OF_MEMORY = ("can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")


def scaled_learning_rate(
    step: int, *, base_lr: float, base_batch: int, global_batch: int, warmup_steps: int
) -> float:
    for name, value, least in (
        ("step", step, 0),
        ("warmup_steps", warmup_steps, 0),
        ("base_batch", base_batch, 1),
        ("global_batch", global_batch, 1),
    ):
        if not value >= least:
            raise ValueError(f"{name} must be {least} or more, not {value}")
    k = global_batch / base_batch
    done = 1.0 if warmup_steps == 0 or k <= 1 else min(step / warmup_steps, 1.0)
    return k * base_lr if done == 1.0 else base_lr * (1 + (k - 1) * done)


def accumulation_steps(global_batch: int, micro_batch: int, world_size: int) -> int:
    for number in (global_batch, micro_batch, world_size):
        if number < 1:
            raise ValueError(f"{number} is less than 1")
    at_once = micro_batch * world_size
    if global_batch % at_once != 0:
        raise ValueError(f"{global_batch} is no multiple of {at_once}")
    return int(global_batch // at_once)


def cuda_peak(run: Callable[[], object]) -> int:
    torch.cuda.reset_peak_memory_stats()
    run()
    return torch.cuda.max_memory_allocated()


def _forward_backward(loss_of: Callable[[int], Tensor], size: int) -> None:
    loss = loss_of(size)
    loss.backward()


def make_trial(
    model: nn.Module, loss_of: Callable[[int], Tensor], measure: Measure = cuda_peak
) -> Trial:

    def trial(size: int) -> float:
        generators = [torch.default_generator]
        if any(p.is_cuda for p in model.parameters()):
            torch.cuda.init()
            generators += torch.cuda.default_generators
        states = [g.get_state() for g in generators]
        grads = {p: p.grad for p in model.parameters()}
        buffers = []
        for module in model.modules():
            for name, b in module._buffers.items():
                buffers.append((module._buffers, name, b, None if b is None else b.clone()))
        model.zero_grad(set_to_none=True)
        for p in grads:
            p.grad = None
        try:
            return measure(lambda: _forward_backward(loss_of, size))
        finally:
            for p, g in grads.items():
                p.grad = g
            for table, name, b, value in buffers:
                table[name] = b
                if b is not None:
                    b.data.copy_(value)
            for g, state in zip(generators, states, strict=True):
                g.set_state(state)

    return trial


def is_out_of_memory(error: BaseException) -> bool:
    match error:
        case torch.OutOfMemoryError() | MemoryError():
            return True
        case RuntimeError():
            message = str(error)
            return OUT_OF_MEMORY[0] in message or OUT_OF_MEMORY[1] in message
    return False


def fits_everywhere(
    trial: Trial, size: int, budget_bytes: float, device: torch.device | str, group: Group
) -> bool:
    other: list[BaseException] = []
    bytes_at_peak = None
    try:
        bytes_at_peak = trial(size)
    except BaseException as error:
        if not is_out_of_memory(error):
            other.append(error)
    gc.collect()
    if "cuda" in str(device):
        torch.cuda.empty_cache()
    mine = bytes_at_peak is not None and bytes_at_peak <= budget_bytes
    votes = torch.full((1,), -1 if other else 1 if mine else 0, dtype=torch.int32, device=device)
    dist.all_reduce(votes, op=dist.ReduceOp.MIN, group=group)
    if other:
        raise other.pop()
    if votes.item() < 0:
        raise RuntimeError("another rank's trial has an error")
    return votes.item() == 1


def largest_micro_batch(
    trial: Trial,
    upper: int,
    *,
    budget_bytes: float = math.inf,
    device: torch.device | str = "cpu",
    group: Group = None,
) -> int:
    if upper < 1:
        raise ValueError("upper must be positive")

    def fit(size: int) -> bool:
        return fits_everywhere(trial, size, budget_bytes, device, group)

    if not fit(1):
        raise ValueError("one sample is too much")
    low, high = (1, upper + 1)
    doubling = True
    while high - low > 1:
        middle = 2 * low if doubling and 2 * low < high else (low + high) // 2
        doubling = doubling and 2 * low < high
        if fit(middle):
            low = middle
        else:
            high, doubling = (middle, False)
    return low
