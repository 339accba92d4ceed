"""Synchronous data-parallel training: every rank holds the model, each trains on its own samples.

In one step each rank runs forward and backward on its own samples, averages the gradients over all
ranks, and takes the same optimizer step. Equal weights, equal gradients and equal optimizer state
give equal weights again. So the replicas never drift apart, and with

    gradient = Σ_r n_r·g_r / Σ_r n_r      (g_r: gradient of rank r's mean loss over n_r samples)

W ranks do, to rounding, what one process would do with the union of their batches. That holds for
models that treat each sample by itself and draw no random numbers. BatchNorm takes its statistics
from a rank's own samples, and dropout draws other numbers on each rank.

Per step and rank, with P bytes of trainable parameters: a ring all-reduce sends 2(W-1)/W·P bytes
in 2(W-1) messages. At the start the state is broadcast once: P bytes (plus buffers).
Sources: Li et al. 2020 (arXiv 2006.15704); Goyal et al. 2017 (arXiv 1706.02677), section 3, Remark
3, for why the mean must be over the global batch, and section 2.3 for BatchNorm.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from given.agreement import Group
from given.devices import CHOICES
from given.launched import launched
from given.parent import end_with_parent

from .data_loader import build_loader
from .evaluation import evaluate, print_once

if TYPE_CHECKING:
    from distlab.reference.workloads import Workload

OnStep = Callable[[int, float, int], None]


def broadcast_model_state(model: nn.Module, src: int = 0, group: Group = None) -> None:
    """Give every rank the parameters and buffers of global rank ``src``, in place.

    Parameters count whether they require grad or not, and buffers whether persistent or not. Any
    dtype works, also one that the backend does not know, such as int16. Tensors may be empty or
    strided, on each rank in another way. They stay the same objects in the same memory, with the
    gradients that they have. No gradient is recorded. A tensor that the model holds under several
    names (tied, or a parameter that is a buffer, too) is sent once. The source sends the bytes of
    parameters and buffers once to all, or once to each rank. Only ranks of ``group`` take part. The
    host never waits for a GPU.
    """
    # --- exercise 1.3: start
    # Step 1: model.parameters() and model.buffers() each name a tied tensor once (state_dict() does
    #         not, and it leaves out non-persistent buffers); one may be in both
    # Step 2: broadcast a contiguous copy of each, as bytes, and write it back into the tensor that
    #         the model and the optimizer hold
    with torch.no_grad():
        for tensor in dict.fromkeys((*model.parameters(), *model.buffers())):
            flat = tensor.clone(memory_format=torch.contiguous_format)
            dist.broadcast(flat.view(-1).view(torch.uint8), src, group=group)
            tensor.copy_(flat)
    # --- exercise 1.3: end


def average_gradients(
    parameters: Iterable[nn.Parameter], num_samples: int, group: Group = None
) -> None:
    """Replace each gradient of a local mean loss by that of the global mean loss, on every rank.

    All ranks pass the same parameters in the same order. ``num_samples`` is the number of samples
    behind this rank's gradients. Ranks may differ, some may have 0, and together there may be
    billions. After the call ``p.grad`` is Σ_r n_r·g_r / Σ_r n_r on every rank, to the rounding of
    the dtype of ``p``, without autograd history. A rank with 0 samples adds zero, even where its
    gradients are nan. Gradients are weighted before the sum, so that 16-bit ones do not overflow on
    the way. They may be strided, on each rank in another way. A gradient that is None counts as
    zero. If it is None on every rank, it stays None. With no samples at all gradients become zero.
    Parameters with ``requires_grad=False`` are neither sent nor changed, nor is their gradient. A
    tied parameter is sent once. All ranks issue the same communication in the same order, whatever
    gradients they have; without trainable parameters none. Nothing is kept for the next call.

    Cost per rank: 2(W-1)/W of the bytes of all trainable parameters with a gradient on some rank.
    To agree on samples and missing gradients costs the same share of at most 8 bytes per parameter
    and 8 more. The host waits for a GPU three times at most, however many parameters there are.
    """
    # --- exercise 1.4: start
    # Step 1: keep the trainable parameters, each once (dict.fromkeys keeps the order)
    # Step 2: one small all-reduce tells all ranks the number of samples and which gradients exist
    # Step 3: weight the local gradients by this rank's share of the samples, missing ones by zero
    # Step 4: join gradients of one dtype and device to one flat tensor, sum it over the ranks:
    #         few large messages are faster than many small ones
    # Step 5: cut the sum again, into p.grad
    trainable = [p for p in dict.fromkeys(parameters) if p.requires_grad]
    if not trainable:
        return
    known = [num_samples] + [p.grad is not None for p in trainable]
    facts = torch.tensor(known, dtype=torch.int64, device=trainable[0].device)
    dist.all_reduce(facts, group=group)
    total, *holders = facts.tolist()
    share = num_samples / max(total, 1)
    buckets: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
    for p, count in zip(trainable, holders, strict=True):
        if count:
            buckets.setdefault((p.dtype, p.device), []).append(p)
    for bucket in buckets.values():
        parts = [
            p.new_zeros(p.numel())  # not gradients times zero: nan would stay nan
            if p.grad is None or not share
            else p.grad.detach().flatten() * share
            for p in bucket
        ]
        flat = torch.cat(parts)
        dist.all_reduce(flat, group=group)
        for p, part in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
            p.grad = part.view(p.shape)
    # --- exercise 1.4: end


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    inputs: Tensor,
    targets: Tensor,
    group: Group = None,
) -> float:
    """One synchronous step on this rank's part of the global batch, which may be empty.

    The loss is cross-entropy, averaged over the global batch. Returns that global mean loss (before
    the step) as a float, the same number on every rank. Gradients from before do not count, for any
    parameter of ``model``, whether ``optimizer`` holds it or not. Every rank takes the optimizer
    step. A parameter that no rank uses has no gradient in it. If no rank has a sample the loss is
    0.0, and no parameter has a gradient. Only gradients and a few numbers travel, and only within
    ``group``. The host waits for a GPU at most six times: three times in ``average_gradients``, and
    three times for the loss.
    """
    # --- exercise 1.5: start
    # Step 1: forget the last step's gradients (to None, so that unused ones are seen)
    # Step 2: forward and backward on the own samples, if there are any
    # Step 3: the global loss needs the sums over the ranks, not rank 0's own mean. Start that
    #         all-reduce now and wait for it last, so that it costs no time of its own. Sums stay on
    #         the device: to read a number the host waits for all queued work
    # Step 4: average the gradients, weighted by samples, then step on every rank
    model.zero_grad(set_to_none=True)
    sums = torch.zeros(2, dtype=torch.float64, device=inputs.device)  # of losses; of samples
    if len(targets):
        loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        sums[0].add_(loss.detach(), alpha=len(targets))
        sums[1] = len(targets)
    pending = dist.all_reduce(sums, group=group, async_op=True)  # travels beside the gradients
    average_gradients(model.parameters(), len(targets), group)
    optimizer.step()
    pending.wait()
    return (sums[0] / sums[1].clamp(min=1)).item()
    # --- exercise 1.5: end


def train(
    model: nn.Module,
    loader: DataLoader[tuple[Tensor, Tensor]],
    optimizer: torch.optim.Optimizer,
    *,
    epochs: int,
    group: Group = None,
    device: torch.device | str = "cpu",
    on_step: OnStep | None = None,
) -> list[float]:
    """Train for ``epochs`` epochs and return the global mean loss of every step.

    ``model`` is on ``device`` and may differ between the ranks: all begin with the state of the
    group's first rank. Each step runs in training mode, also after an ``on_step`` that left another
    mode. ``loader.batch_sampler.set_epoch`` is called with 0, 1, … before each epoch.
    ``on_step(step, loss, samples)`` is called after each step, with this rank's number of samples.
    Steps count from 1 through all epochs. The result equals the training of one process on the same
    global batches, to rounding, if the model treats each sample by itself and draws no random
    numbers.
    """
    # --- exercise 1.5: start
    # Step 5: begin with equal weights
    # Step 6: every epoch needs its own order; then, in training mode, one train_step per batch
    src = dist.get_process_group_ranks(group)[0]
    broadcast_model_state(model, src, group)
    losses: list[float] = []
    for epoch in range(epochs):
        loader.batch_sampler.set_epoch(epoch)
        for inputs, targets in loader:
            inputs = inputs.to(device, non_blocking=True)
            targets = targets.to(device, non_blocking=True)
            model.train()
            losses.append(train_step(model, optimizer, inputs, targets, group))
            if on_step:
                on_step(len(losses), losses[-1], len(targets))
    return losses
    # --- exercise 1.5: end


def weight_hash(model: nn.Module) -> str:
    """SHA-256, as 64 hexadecimal digits, over the bytes of all parameters, then of all buffers.

    Tensors count in the order of ``model.parameters()`` and ``model.buffers()``, the elements of
    each in their logical order, whatever its dtype and strides. Replicas with equal bytes have
    equal hashes.
    """
    # --- exercise 1.5: start
    # Step 7: hash the raw bytes, not rounded numbers: drift begins in the last bit
    digest = hashlib.sha256()
    for tensor in (*model.parameters(), *model.buffers()):
        data = tensor.cpu().flatten().view(torch.uint8)
        digest.update(data.numpy().tobytes())
    return digest.hexdigest()
    # --- exercise 1.5: end


def run(chosen: Workload, epochs: int, device: torch.device, save: str | None) -> None:
    """Train the workload on all ranks, with progress and the test accuracy on rank 0."""
    from rich.progress import Progress, TextColumn

    from distlab.reference.workloads import build_model, build_optimizer, digits

    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = build_model(chosen.model, chosen.seed + rank).to(device)  # broadcast makes it equal
    optimizer = build_optimizer(chosen, model)
    common = {
        "rank": rank,
        "world_size": world_size,
        "global_batch_size": chosen.global_batch_size,
        "device": device,
    }
    loader = build_loader(digits(), **common, seed=chosen.seed, remainder="keep")
    tests = build_loader(digits(train=False), **common, shuffle=False)
    columns = [*Progress.get_default_columns(), TextColumn("{task.fields[state]}")]
    with Progress(*columns, disable=rank != 0) as progress:
        task = progress.add_task("training", total=epochs * len(loader), state="")
        begun, accuracy = time.perf_counter(), 0.0

        def show(step: int, loss: float, samples: int) -> None:
            nonlocal accuracy
            if step % len(loader) == 0:  # all ranks come here after the same step
                _, accuracy = evaluate(model, tests, device=device)
            rate = step * chosen.global_batch_size / (time.perf_counter() - begun)
            state = f"loss {loss:.4f}  accuracy {accuracy:.1%}  {rate:,.0f} samples/s"
            progress.update(task, completed=step, state=state)

        losses = train(model, loader, optimizer, epochs=epochs, device=device, on_step=show)
        seconds = time.perf_counter() - begun
    loss, accuracy = evaluate(model, tests, device=device)
    rate = epochs * len(digits()) / seconds
    print_once(
        f"{chosen.name}: {world_size} ranks on {device.type}, {epochs} epochs, "
        f"test loss {loss:.4f}, test accuracy {accuracy:.2%}, {rate:,.0f} samples/s"
    )
    if save and rank == 0:
        torch.save({"losses": losses, "model": model.state_dict()}, save)


def main() -> None:
    """Train a workload under torchrun, with progress, and print its test accuracy."""
    end_with_parent()
    from distlab.reference.workloads import WORKLOADS

    parser = argparse.ArgumentParser(description="Data-parallel training of a digits classifier.")
    names = sorted(w.name for w in WORKLOADS.values() if w.data == "digits")
    parser.add_argument("--workload", default="digits_mlp", choices=names)
    parser.add_argument("--epochs", type=int, help="default: the workload's")
    parser.add_argument("--device", default="auto", choices=CHOICES)
    parser.add_argument("--save", help="file for losses and weights, written by rank 0")
    options = parser.parse_args()
    chosen = WORKLOADS[options.workload]
    epochs = chosen.epochs if options.epochs is None else options.epochs
    if "RANK" not in os.environ:
        sys.exit(
            "start it with: torchrun --nproc-per-node 4 -m solutions.phase1_data_parallel.trainer"
        )
    with launched("trainer", options.device) as rank:
        run(chosen, epochs, rank.device, options.save)


if __name__ == "__main__":
    main()
