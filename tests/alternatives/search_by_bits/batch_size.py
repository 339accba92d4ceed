# for: 2.4
"""Written differently: the answer digit by digit, flags gathered, autograd.grad."""

from __future__ import annotations

import copy
import gc
import math
from fractions import Fraction

import torch
import torch.distributed as dist


def scaled_learning_rate(step, *, base_lr, base_batch, global_batch, warmup_steps):
    for number, least in ((step, 0), (warmup_steps, 0), (base_batch, 1), (global_batch, 1)):
        if number < least:
            raise ValueError(f"{number} is less than {least}")
    factor = global_batch / base_batch
    done = 1.0 if factor <= 1 or not warmup_steps else min(step, warmup_steps) / warmup_steps
    return base_lr * ((1 - done) + done * factor)


def accumulation_steps(global_batch, micro_batch, world_size):
    numbers = f"{global_batch} samples, micro-batches of {micro_batch}, {world_size} ranks"
    if min(global_batch, micro_batch, world_size) <= 0:
        raise ValueError(f"all must be positive: {numbers}")
    steps = Fraction(global_batch, micro_batch * world_size)
    if steps.denominator != 1:
        raise ValueError(f"not a whole number of micro-batches: {numbers}")
    return int(steps)


def make_trial(model, loss_of, measure):
    def trial(size):
        state = copy.deepcopy(dict(model.named_buffers()))
        random = torch.get_rng_state()
        trainable = [p for p in model.parameters() if p.requires_grad]
        try:
            return measure(lambda: torch.autograd.grad(loss(size), trainable))
        finally:
            torch.set_rng_state(random)
            for name, buffer in model.named_buffers():
                buffer.data.copy_(state[name])

    def loss(size):
        kept = {p: p.grad for p in model.parameters()}  # the caller's loss may call backward
        for p in kept:
            p.grad = None
        try:
            return loss_of(size)
        finally:
            for p, gradient in kept.items():
                p.grad = gradient

    return trial


def largest_micro_batch(trial, upper, *, budget_bytes=math.inf, device="cpu", group=None):
    if upper <= 0:
        raise ValueError(f"nothing to try up to {upper}")

    def attempt(size):
        try:
            return trial(size) <= budget_bytes
        except MemoryError:
            return False
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError) or "allocate memory" in str(error):
                return False
            raise

    def all_fit(size):
        mistake = None
        try:
            flag = not attempt(size)
        except Exception as error:
            flag, mistake = 2, error
        mine = torch.tensor([flag], dtype=torch.uint8, device=device)
        gc.collect()
        theirs = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
        dist.all_gather(theirs, mine, group=group)
        if mistake is not None:
            raise mistake
        if 2 in torch.cat(theirs):
            raise RuntimeError(f"size {size}: another rank has made a mistake")
        return not torch.cat(theirs).any()

    bit = 1
    while bit <= upper and all_fit(bit):
        bit *= 2
    answer = bit = bit // 2
    if not answer:
        raise ValueError(f"1 sample does not fit into {budget_bytes:.0f} bytes on some rank")
    while bit > 1:  # the answer's binary digits, from the highest to the lowest
        bit //= 2
        if answer + bit <= upper and all_fit(answer + bit):
            answer += bit
    return answer
