# alternative for: 1.3, 1.5
"""The whole state in one message of bytes to each rank; the loss is reduced after the step."""

from __future__ import annotations

import hashlib

import torch
import torch.distributed as dist
import torch.nn.functional as F

from solutions.phase1_data_parallel.trainer import *


def broadcast_model_state(model, src=0, group=None):
    named = {id(t): t for t in (*model.parameters(), *model.buffers()) if t.numel()}
    tensors = list(named.values())
    if not tensors:
        return
    me, device = dist.get_rank(group), tensors[0].device
    sizes = [t.numel() * t.element_size() for t in tensors]
    with torch.no_grad():
        if dist.get_rank() == src:
            flat = torch.cat([bytes_of(t).to(device) for t in tensors])
            peers = [peer for peer in range(dist.get_world_size(group)) if peer != me]
            for handle in [dist.isend(flat, group=group, group_dst=peer) for peer in peers]:
                handle.wait()
            return
        flat = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
        dist.recv(flat, src=src, group=group)
        for t, piece in zip(tensors, flat.split(sizes), strict=True):
            whole = torch.empty(t.shape, dtype=t.dtype, device=t.device)
            whole.reshape(-1).view(torch.uint8).copy_(piece)
            t.copy_(whole)


def bytes_of(tensor):
    whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
    return whole.reshape(-1).view(torch.uint8)


def train_step(model, optimizer, inputs, targets, group=None):
    for p in [*model.parameters(), *(p for g in optimizer.param_groups for p in g["params"])]:
        p.grad = None
    known = torch.zeros(2, dtype=torch.float64, device=inputs.device)
    if len(targets) > 0:
        loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        known += known.new_tensor([loss.item() * len(targets), len(targets)])
    average_gradients(iter(model.parameters()), len(targets), group=group)
    optimizer.step()
    dist.all_reduce(known, group=group)
    return (known[0] / known[1]).item() if known[1] else 0.0


def train(model, loader, optimizer, *, epochs, group=None, device="cpu", on_step=None):
    broadcast_model_state(model, dist.get_process_group_ranks(group)[0], group=group)
    losses, step = [], 0
    for epoch in range(epochs):
        loader.batch_sampler.set_epoch(epoch)
        batches = iter(loader)
        while (batch := next(batches, None)) is not None:
            inputs, targets = (part.to(device, non_blocking=True) for part in batch)
            step += 1
            model.train(True)
            losses.append(train_step(model, optimizer, inputs, targets, group=group))
            if on_step is not None:
                on_step(step, losses[-1], targets.size(0))
    return losses


def weight_hash(model):
    joined = bytearray()
    for tensors in (model.parameters(), model.buffers()):
        for tensor in tensors:
            joined += memoryview(bytes_of(tensor.detach().cpu()).numpy())
    return hashlib.sha256(bytes(joined)).hexdigest()
