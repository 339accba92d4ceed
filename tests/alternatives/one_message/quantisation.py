# for: 4.9
"""Written differently: Bernoulli rounding, pieces as lists, numpy bits, sums of stacked parts."""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist


def quantise(x, generator):
    """int8 and a float32 scale, in one row of bytes."""
    largest = x.abs().max().float().view(1)
    scale = torch.where(largest == 0, torch.ones_like(largest), largest / 127)
    y = (x.float() / scale).clamp(-127, 127)
    low = y.floor()
    up = torch.bernoulli((y - low).nan_to_num(0.5).cpu(), generator=generator).to(x.device)
    return torch.cat([(low + up).nan_to_num().to(torch.int8).view(torch.uint8), bytes_of(scale)])


def bytes_of(number):
    return number.float().view(torch.uint8)


def number_of(row):
    return row.clone().view(torch.float32)


def restore(row, dtype):
    return (row[:-4].clone().view(torch.int8).float() * number_of(row[-4:])).to(dtype)


def pack_int8(x, generator):
    return torch.stack([quantise(row, generator) for row in x]).view(torch.int8)


def unpack_int8(packed, dtype):
    return torch.stack([restore(row, dtype) for row in packed.view(torch.uint8)])


class Wait:
    def __init__(self, first, then):
        self.first, self.then = first, then

    def wait(self):
        self.first.wait()
        self.then()


class Int8:
    def __init__(self, group=None, seed=0):
        self.group = group
        self.generator = torch.Generator().manual_seed(1009 * seed + 31 * dist.get_rank(group) + 1)

    def __call__(self, bucket):
        n, world_size = bucket.buffer.numel(), dist.get_world_size(self.group)
        if n == 0:
            return None
        short = -n % world_size
        whole = torch.cat([bucket.buffer, bucket.buffer.new_zeros(short)])
        rows = torch.stack([quantise(x, self.generator) for x in whole.chunk(world_size)])
        mine = torch.empty_like(rows)
        work = dist.all_to_all_single(mine, rows, group=self.group, async_op=True)

        def then():
            total = torch.stack([restore(row, torch.float32) for row in mine]).sum(0)
            packed = quantise(total, self.generator)
            parts = [torch.empty_like(packed) for _ in range(world_size)]
            dist.all_gather(parts, packed, group=self.group)
            bucket.buffer.copy_(torch.cat([restore(p, whole.dtype) for p in parts])[:n])

        return Wait(work, then)

    def state_dict(self):
        return {"random": self.generator.get_state().tolist()}

    def load_state_dict(self, state):
        self.generator.set_state(torch.tensor(state["random"], dtype=torch.uint8))


class OneBit:
    def __init__(self, parameters, group=None):
        self.group, self.parameters = group, list(parameters)
        self.owed = [torch.zeros_like(p.detach()) for p in self.parameters]

    def place(self, p):
        (found,) = [place for place, known in enumerate(self.parameters) if known is p]
        return found

    def __call__(self, bucket):
        n = bucket.buffer.numel()
        if n == 0:
            return None
        places = [self.place(p) for p in bucket.parameters]
        v = torch.cat([self.owed[k].flatten() for k in places]) + bucket.buffer
        size, bits = v.abs().float().mean().view(1), pack_signs(v)
        left = v - unpack_signs(bits, n, v.dtype) * size.to(v.dtype)
        for k, part in zip(places, left.split([p.numel() for p in bucket.parameters]), strict=True):
            self.owed[k] = part.clone().view(self.owed[k].shape)
        message = torch.cat([bits, bytes_of(size)])
        everyone = [torch.empty_like(message) for _ in range(dist.get_world_size(self.group))]
        work = dist.all_gather(everyone, message, group=self.group, async_op=True)

        def then():
            sizes = torch.cat([number_of(m[-4:]) for m in everyone]).to(v.dtype)
            signs = torch.stack([unpack_signs(m[:-4], n, v.dtype) for m in everyone])
            bucket.buffer.copy_((sizes.unsqueeze(1) * signs).sum(0))

        return Wait(work, then)

    def state_dict(self):
        return {str(place): owed.tolist() for place, owed in enumerate(self.owed)}

    def load_state_dict(self, state):
        if sorted(map(str, range(len(self.owed)))) != sorted(state):
            raise ValueError(f"saved for {len(state)} parameters")
        for place, owed in enumerate(self.owed):
            if torch.tensor(state[str(place)]).numel() != owed.numel():
                raise ValueError(f"parameter {place} had another size")
        self.owed = [owed.new_tensor(state[str(place)]) for place, owed in enumerate(self.owed)]


def pack_signs(v):
    bits = np.packbits((v >= 0).cpu().numpy(), bitorder="little")
    return torch.from_numpy(bits).to(v.device)


def unpack_signs(packed, n, dtype):
    bits = np.unpackbits(packed.cpu().numpy(), count=n, bitorder="little")
    return torch.from_numpy(bits).to(device=packed.device, dtype=dtype) * 2 - 1
