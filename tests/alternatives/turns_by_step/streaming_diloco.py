# for: 3.34
"""Written differently: a table of turns, scales before all codes, lists gathered."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist

from .local_sgd import LocalSGD


def pack_e3m0(x):
    count = -(-x.numel() // 32)
    blocks = torch.zeros(count, 32, dtype=torch.float64, device=x.device)
    blocks.view(-1)[: x.numel()] = x.to(torch.float32)
    largest = blocks.abs().amax(1, keepdim=True)
    power = nearest_power(largest).clamp(-126, 127)
    sizes = torch.ldexp(blocks.abs(), -power)
    codes = torch.zeros(count, 32, dtype=torch.uint8, device=x.device)
    for level in range(-6, 1):
        low = 2.0 ** (level - 1) * (1.0 if level == -6 else 1.5)
        codes += (sizes >= low).to(torch.uint8)
    codes |= blocks.signbit().to(torch.uint8) << 3
    scales = torch.where(largest.isfinite(), power + 127, 255).to(torch.uint8)
    halves = codes[:, :16] << 4 | codes[:, 16:]
    return torch.cat([scales.flatten(), halves.flatten()])


def nearest_power(size):
    power = size.log2().floor().nan_to_num(0.0, 0.0, 0.0).int()
    power -= (torch.ldexp(torch.ones_like(size), power) > size).int()
    return power + (size >= torch.ldexp(torch.full_like(size, 1.5), power)).int()


def unpack_e3m0(packed, n):
    count = packed.numel() // 17
    scales = packed[:count].double()
    powers = torch.where(scales == 255, torch.nan, 2.0 ** (scales - 127))
    halves = packed[count:].view(count, 16)
    codes = torch.cat([halves >> 4, halves & 15], dim=1).double()
    sizes = codes % 8
    values = torch.where(sizes == 0, 0.0, 2.0 ** (sizes - 7)) * powers[:, None]
    return torch.where(codes >= 8, -values, values).flatten()[:n].float()


def strided(units, fragments):
    if fragments < 1 or fragments > len(units):
        raise ValueError(f"1 to {len(units)} fragments, not {fragments}")
    owner = {}
    for index, unit in enumerate(units):
        for p in unit.parameters():
            if p.requires_grad:
                owner.setdefault(p, index % fragments)
    return [[p for p, k in owner.items() if k == number] for number in range(fragments)]


class StreamingDiLoCo(LocalSGD):
    def __init__(
        self,
        model,
        fragments,
        *,
        every,
        delay=1,
        mix=0.5,
        lr=0.7,
        momentum=0.9,
        bits=4,
        group=None,
    ):
        good = lr > 0 and 0.0 <= momentum < 1.0 and 0.0 <= mix < 1.0 and bits in (4, 32)
        if not (good and 0 <= delay < every and len(fragments) <= every):
            raise ValueError("settings out of range")
        places = [id(p) for fragment in fragments for p in fragment]
        wanted = [id(p) for p in model.parameters() if p.requires_grad]
        if sorted(places) != sorted(wanted) or any(len(fragment) == 0 for fragment in fragments):
            raise ValueError("the fragments are no partition of the trainable parameters")
        super().__init__(model, every=every, group=group)
        self.bits, self.alpha, self.tau, self.eta, self.mu = bits, mix, delay, lr, momentum
        self.world, self.process_group, self.h = dist.get_world_size(group), group, every
        self.parts = fragments
        self.common = [[p.detach().clone() for p in part] for part in fragments]
        self.velocity = [[torch.zeros_like(p.detach()) for p in part] for part in fragments]
        places = [math.floor((k + 1) * every / len(fragments)) for k in range(len(fragments))]
        self.turn_of_step = {place % every: k for k, place in enumerate(places)}
        self.t, self.flying = 0, []

    def step(self):
        self.t += 1
        number = self.turn_of_step.get(self.t % self.h)
        if number is not None:
            self.flying.append((self.t + self.tau, number, *self.launch(number)))
        came = False
        while self.flying and self.flying[0][0] == self.t:
            _, *landed = self.flying.pop(0)
            self.land(*landed, self.alpha)
            came = True
        return came

    def launch(self, number):
        with torch.no_grad():
            pairs = zip(self.common[number], self.parts[number], strict=True)
            flat = torch.cat([(c - p).reshape(-1).to(torch.float32) for c, p in pairs])
            if self.bits == 32:
                return dist.all_reduce(flat, group=self.process_group, async_op=True), [flat]
            mine = pack_e3m0(flat)
            every = [torch.empty_like(mine) for _ in range(self.world)]
            return dist.all_gather(every, mine, group=self.process_group, async_op=True), every

    def land(self, number, work, arrived, alpha):
        work.wait()
        total = sum(p.numel() for p in self.parts[number])
        if self.bits == 4:
            mean = sum(unpack_e3m0(each, total) for each in arrived) / self.world
        else:
            mean = arrived[0] / self.world
        start = 0
        with torch.no_grad():
            for k, p in enumerate(self.parts[number]):
                delta = mean[start : start + p.numel()].reshape(p.shape).to(p.dtype)
                start += p.numel()
                speed = self.mu * self.velocity[number][k] + delta
                self.velocity[number][k].copy_(speed)
                self.common[number][k] -= self.eta * (delta + self.mu * speed)
                p.copy_(alpha * p + (1 - alpha) * self.common[number][k])

    def finish(self):
        if not self.t:
            return False
        for _, *landed in self.flying:
            self.land(*landed, self.alpha)
        just = self.turn_of_step.get(self.t % self.h)
        behind = [number for number in range(len(self.parts)) if number != just]
        launched = [(number, *self.launch(number)) for number in behind]
        for each in launched:
            self.land(*each, 0.0)
        if just is not None:
            with torch.no_grad():
                for p, c in zip(self.parts[just], self.common[just], strict=True):
                    p.copy_(c)
        self.t, self.flying = 0, []
        return True
