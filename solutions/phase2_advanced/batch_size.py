"""Batch size: the largest micro-batch that fits into memory, and a learning rate for the batch.

With W ranks that each take m micro-batches of b samples per optimizer step, the global batch is
W·m·b. Memory limits b. The wanted global batch gives m. The *linear rule* gives the learning rate.
For a batch k times larger than the one that η was tuned for it is

    k·η, reached from η in equal increments over the first steps (gradual warm-up)

The reason: one step of k·η on the mean gradient of k batches is nearly k steps of η. That holds as
long as the weights, and with them the gradients, hardly change in between. Early in training they
change a lot; therefore the warm-up. The argument is about SGD. For Adam √k·η is the usual rule.

The search for the largest b doubles until one size does not fit, then it bisects: at most
2·log2(upper) + 2 trials, none larger than twice the answer. After each trial the ranks agree by an
all-reduce (minimum) of one integer. So all ranks try the same sizes, and no rank waits for one that
ran out of memory. Invariant: the size `fits` was tried and fits on all ranks; the size `fails` does
not fit or is beyond the limit.
Sources: Goyal et al. 2017 (arXiv 1706.02677), sections 2.1 (linear rule) and 2.2 (warm-up);
Malladi et al. 2022 (arXiv 2205.10287) for Adam.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from given.agreement import Group

Trial = Callable[[int], float]  # forward and backward of so many samples; the bytes at their peak
Measure = Callable[[Callable[[], object]], float]  # calls its argument; bytes at its peak
# texts of errors that are no torch.OutOfMemoryError: CPU allocator, cuBLAS workspace
OUT_OF_MEMORY = ("can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")


def scaled_learning_rate(
    step: int, *, base_lr: float, base_batch: int, global_batch: int, warmup_steps: int
) -> float:
    """The learning rate of optimizer step ``step`` (0 is the first) by linear rule and warm-up.

    ``base_lr`` (η) was tuned for batches of ``base_batch`` samples; the batch over all ranks now
    has ``global_batch``, k times as many. Step 0 takes η, each further step takes the same amount
    more, and from step ``warmup_steps`` on the rate is k·η. Without warm-up, or for a batch that is
    not larger than ``base_batch``, the rate is k·η at once. k need not be a whole number. Raises
    ValueError if ``step`` or ``warmup_steps`` is negative or a batch is less than 1.
    """
    # --- exercise 2.4: start
    # Step 1: the linear rule gives the rate after the warm-up
    # Step 2: the warm-up begins with the tuned rate and adds the same increment at each step
    if min(step, warmup_steps) < 0 or min(base_batch, global_batch) < 1:
        raise ValueError(
            f"steps can't be negative, batches have at least 1 sample: got step {step}, "
            f"{warmup_steps} warm-up steps, batches of {base_batch} and {global_batch}"
        )
    peak_lr = base_lr * global_batch / base_batch
    if step >= warmup_steps or global_batch <= base_batch:
        return peak_lr
    return base_lr + (peak_lr - base_lr) * step / warmup_steps
    # --- exercise 2.4: end


def accumulation_steps(global_batch: int, micro_batch: int, world_size: int) -> int:
    """How many micro-batches of ``micro_batch`` samples each rank takes per optimizer step.

    global_batch / (micro_batch · world_size), as an int. Raises ValueError if one of the three is
    less than 1 or if the quotient is not whole. A rounded number would train with another batch
    size than the one that the learning rate is for.
    """
    # --- exercise 2.4: start
    # Step 3: divide, and refuse to round
    if min(global_batch, micro_batch, world_size) < 1 or global_batch % (micro_batch * world_size):
        raise ValueError(
            f"a global batch of {global_batch} samples is no multiple of {world_size} ranks times "
            f"micro-batches of {micro_batch}"
        )
    return global_batch // (micro_batch * world_size)
    # --- exercise 2.4: end


def cuda_peak(run: Callable[[], object]) -> int:
    """Call ``run`` and return the peak of bytes that tensors held on the current CUDA device."""
    torch.cuda.reset_peak_memory_stats()
    run()
    return torch.cuda.max_memory_allocated()


def make_trial(
    model: nn.Module, loss_of: Callable[[int], Tensor], measure: Measure = cuda_peak
) -> Trial:
    """A trial for ``largest_micro_batch``: ``loss_of(size)``, its backward, and no trace of either.

    ``loss_of(size)`` runs ``model`` forward on that many samples and gives a scalar loss.
    ``measure(run)`` calls ``run()`` and returns its peak in bytes (torch has no such counter for
    the CPU). The trial returns that peak. Afterwards, also after an error, every ``p.grad`` is as
    before: the same unchanged tensor, or None. That holds for frozen parameters, too. All buffers
    (BatchNorm's statistics, non-persistent ones too) are the same tensors with the values from
    before. A buffer that forward replaces by a new tensor stays replaced.
    PyTorch's random state is as before: nothing has been trained. The error comes out. The forward
    begins without gradients, as a step does. A trial must not communicate: pass the bare model, not
    one that reduces its gradients in backward.
    """
    # --- exercise 2.4: start
    # Step 4: put aside what forward and backward change. Set gradients to None, because backward
    #         adds to a gradient that is there
    # Step 5: measure forward and backward together: the peak is somewhere in backward
    # Step 6: put everything back, whatever happened
    def trial(size: int) -> float:
        parameters, buffers = list(model.parameters()), list(model.buffers())
        gradients = [p.grad for p in parameters]
        values = [b.clone() for b in buffers]
        devices = {p.device for p in parameters if p.is_cuda}
        with torch.random.fork_rng(devices=list(devices)):
            for p in parameters:
                p.grad = None
            try:
                return measure(lambda: loss_of(size).backward())
            finally:
                for p, gradient in zip(parameters, gradients, strict=True):
                    p.grad = gradient
                for buffer, value in zip(buffers, values, strict=True):
                    buffer.detach().copy_(value)

    return trial
    # --- exercise 2.4: end


def is_out_of_memory(error: BaseException) -> bool:
    """Whether ``error`` says that memory ran out: of a GPU, of Python, or of the CPU allocator.

    The CPU allocator raises a plain RuntimeError with one of the texts OUT_OF_MEMORY in it. Any
    other RuntimeError (shapes that don't fit, say) is a mistake in the program.
    """
    # --- exercise 2.4: start
    # Step 7: decide by the error's type where it has one of its own, else by its text
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in OUT_OF_MEMORY)
    # --- exercise 2.4: end


def fits_everywhere(
    trial: Trial, size: int, budget_bytes: float, device: torch.device | str, group: Group
) -> bool:
    """Whether ``trial(size)`` fits on every rank of ``group``: the same answer on all of them.

    A trial fits if it does not run out of memory and returns at most ``budget_bytes``. When the
    call returns, the memory that the trial held is free; on CUDA the device has it back. Any other
    error of the trial comes out unchanged on its rank, after the all-reduce. The ranks without an
    error then raise RuntimeError, so that no rank goes on alone. One all-reduce of one integer, on
    ``device``.
    """
    # --- exercise 2.4: start
    # Step 8: try the size; tell a lack of memory from other errors
    # Step 9: clean up after the except clause. Inside it the error's traceback still holds the
    #         frames of the trial, and the frames hold its tensors
    # Step 10: every rank comes to the all-reduce, whatever happened to it. Give an error a lower
    #          number than "does not fit": the minimum then tells all ranks of it
    failed = None
    try:
        fits = int(trial(size) <= budget_bytes)
    except Exception as error:
        fits = 0 if is_out_of_memory(error) else -1
        failed = None if is_out_of_memory(error) else error
    gc.collect()  # frames and errors that refer to each other
    if torch.device(device).type == "cuda":
        torch.cuda.empty_cache()
    everywhere = torch.tensor(fits, device=device)
    dist.all_reduce(everywhere, op=dist.ReduceOp.MIN, group=group)
    if failed is not None:
        raise failed
    if everywhere < 0:
        raise RuntimeError(f"the trial of {size} samples failed on another rank")
    return bool(everywhere)
    # --- exercise 2.4: end


def largest_micro_batch(
    trial: Trial,
    upper: int,
    *,
    budget_bytes: float = math.inf,
    device: torch.device | str = "cpu",
    group: Group = None,
) -> int:
    """The largest size from 1 to ``upper`` that fits on every rank of ``group``; equal on all.

    ``trial(size)`` runs a micro-batch of that size on this rank and returns the bytes at its peak;
    it fits if they are at most ``budget_bytes`` and memory does not run out. If a size fits, all
    smaller sizes are taken to fit. ``device``: where the rank's tensors are (one integer per trial
    is all-reduced there). All ranks try the same sizes, at most 2·log2(upper) + 2 of them, none
    larger than ``upper`` or twice the answer. No tensor of a trial is alive when the next one
    begins. The size that is returned has been tried.

    What the optimizer allocates at its first step counts as well: search after that step, or
    subtract it from the budget. If a trial has an error that is no lack of memory, the search ends
    on all ranks: the error comes out unchanged, and ranks without an error raise RuntimeError.
    Raises ValueError on every rank if ``upper`` < 1 (before any trial or message) or if not even 1
    fits. One all-reduce of one integer per trial, nothing else.
    """
    # --- exercise 2.4: start
    # Step 11: start with 1 and double while the size fits. On a CPU nothing stops an attempt that
    #          is far too large, and it can take the whole machine down
    # Step 12: bisect between the largest size that fits and the smallest that does not
    if upper < 1:
        raise ValueError(f"the largest micro-batch to try must be at least 1, got {upper}")
    fits, fails = 0, 1
    while fails <= upper and fits_everywhere(trial, fails, budget_bytes, device, group):
        fits, fails = fails, 2 * fails
    if not fits:
        raise ValueError(f"not even 1 fits into memory and {budget_bytes:,.0f} bytes on all ranks")
    fails = min(fails, upper + 1)
    while fails - fits > 1:
        middle = (fits + fails) // 2
        if fits_everywhere(trial, middle, budget_bytes, device, group):
            fits = middle
        else:
            fails = middle
    return fits
    # --- exercise 2.4: end
