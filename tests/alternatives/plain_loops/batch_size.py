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
    if step < 0 or warmup_steps < 0:
        raise ValueError(f"step {step} and warmup_steps {warmup_steps} must not be negative")
    if base_batch < 1 or global_batch < 1:
        raise ValueError(f"batches of {base_batch} and {global_batch} samples")
    target = base_lr * global_batch / base_batch
    if step >= warmup_steps or global_batch <= base_batch:
        return target
    return base_lr + (target - base_lr) * step / warmup_steps


def accumulation_steps(global_batch: int, micro_batch: int, world_size: int) -> int:
    if min(global_batch, micro_batch, world_size) < 1:
        raise ValueError(f"{global_batch}, {micro_batch} and {world_size} must be at least 1")
    steps, rest = divmod(global_batch, micro_batch * world_size)
    if rest:
        raise ValueError(
            f"a batch of {global_batch} is not for {world_size} ranks with {micro_batch} each"
        )
    return steps


def cuda_peak(run: Callable[[], object]) -> int:
    torch.cuda.reset_peak_memory_stats()
    run()
    return torch.cuda.max_memory_allocated()


def make_trial(
    model: nn.Module, loss_of: Callable[[int], Tensor], measure: Measure = cuda_peak
) -> Trial:
    parameters = list(model.parameters())
    cuda = sorted({p.device.index for p in parameters if p.device.type == "cuda"})

    def trial(size: int) -> float:
        gradients = [(p, p.grad) for p in model.parameters()]
        places = [(m, name, b) for m in model.modules() for name, b in m._buffers.items()]
        values = [(b, b.detach().clone()) for b in model.buffers()]
        for p, _ in gradients:
            p.grad = None

        def run() -> None:
            loss_of(size).backward()

        try:
            with torch.random.fork_rng(devices=cuda):
                return measure(run)
        finally:
            for p, gradient in gradients:
                p.grad = gradient
            for module, name, b in places:
                module._buffers[name] = b
            with torch.no_grad():
                for b, value in values:
                    b.copy_(value)

    return trial


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in OUT_OF_MEMORY)


def fits_everywhere(
    trial: Trial, size: int, budget_bytes: float, device: torch.device | str, group: Group
) -> bool:
    device = torch.device(device)
    fits, failure = (False, None)
    try:
        fits = bool(trial(size) <= budget_bytes)
    except Exception as error:
        if not is_out_of_memory(error):
            failure = error
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    answer = torch.tensor(
        -1 if failure is not None else int(fits), dtype=torch.int64, device=device
    )
    dist.all_reduce(answer, dist.ReduceOp.MIN, group=group)
    if failure is not None:
        try:
            raise failure
        finally:
            del failure
    if answer.item() == -1:
        raise RuntimeError("the trial failed on another rank")
    return bool(answer)


def largest_micro_batch(
    trial: Trial,
    upper: int,
    *,
    budget_bytes: float = math.inf,
    device: torch.device | str = "cpu",
    group: Group = None,
) -> int:
    if upper < 1:
        raise ValueError(f"the upper limit must be at least 1, not {upper}")
    fits, fails = (0, upper + 1)
    size = 1
    while size < fails:
        if fits_everywhere(trial, size, budget_bytes, device, group):
            fits = size
            size = upper if fits < upper < 2 * fits else 2 * fits
        else:
            fails = size
    while fails - fits > 1 and fits:
        size = (fits + fails) // 2
        if fits_everywhere(trial, size, budget_bytes, device, group):
            fits = size
        else:
            fails = size
    if not fits:
        raise ValueError("not even a micro-batch of one sample fits into memory")
    return fits
