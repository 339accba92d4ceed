# for: 3.34
"""Written differently: an object per fragment, torch's SGD outside, levels by distance."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F

from .local_sgd import LocalSGD


def sizes_on(device):
    """The largest first: it wins ties."""
    return F.pad(torch.ldexp(torch.ones(7, device=device), -torch.arange(7, device=device)), (0, 1))


def pack_e3m0(x):
    rows = F.pad(x.detach().float(), (0, -x.numel() % 32)).view(-1, 32).double()
    powers = 2.0 ** torch.arange(127, -127, -1, dtype=torch.float64, device=x.device)
    most = rows.abs().amax(1)
    place = (most[:, None] - powers).abs().nan_to_num(0.0, 0.0).argmin(1)
    sizes = sizes_on(x.device).double() * powers[place][:, None]
    level = (rows.abs()[:, :, None] - sizes[:, None, :]).abs().nan_to_num(0.0, 0.0).argmin(2)
    code = (level | (rows < 0).long() << 3).to(torch.uint8)
    exponent = torch.where(most.isfinite(), place, 255).to(torch.uint8)[:, None]
    return torch.cat([exponent, code[:, ::2] | code[:, 1::2] << 4], 1).view(-1)


def unpack_e3m0(packed, n):
    rows = packed.view(-1, 17)
    place, pairs = rows[:, :1].double(), rows[:, 1:].long()
    code = torch.stack([pairs & 15, pairs >> 4], dim=-1).flatten(1)
    sign = 1.0 - 2.0 * (code >> 3).double()
    scale = torch.where(place == 255, torch.inf - torch.inf, 2.0 ** (127 - place))
    return (sign * sizes_on(packed.device).double()[code & 7] * scale).flatten()[:n].float()


def strided(units, fragments):
    if fragments not in range(1, len(units) + 1):
        raise ValueError(f"{fragments} fragments of {len(units)} units")
    first = {}
    for unit in units:
        for p in unit.parameters():
            first.setdefault(p, unit)
    result = []
    for start in range(fragments):
        own = units[start::fragments]
        result.append([p for u in own for p in u.parameters() if p.requires_grad and first[p] is u])
    return result


class Piece:
    """One fragment: its θ is what torch's optimizer steps."""

    def __init__(self, parameters, lr, momentum, bits, group):
        self.parameters, self.bits, self.group = parameters, bits, group
        self.common = [p.detach().clone() for p in parameters]
        nesterov = momentum > 0
        self.outer = torch.optim.SGD(self.common, lr=lr, momentum=momentum, nesterov=nesterov)
        self.message = None

    @property
    def velocity(self):
        states = [self.outer.state.get(c, {}).get("momentum_buffer") for c in self.common]
        pairs = zip(states, self.common, strict=True)
        return [torch.zeros_like(c) if s is None else s for s, c in pairs]

    @torch.no_grad()
    def send(self):
        flat = torch.cat(
            [(c - p).flatten().float() for c, p in zip(self.common, self.parameters, strict=True)]
        )
        if self.bits == 4:
            packed = pack_e3m0(flat).view(1, -1)
            out = packed.new_empty(dist.get_world_size(self.group), packed.shape[1])
            work = dist.all_gather_into_tensor(out, packed, group=self.group, async_op=True)
        else:
            out = flat / dist.get_world_size(self.group)
            work = dist.all_reduce(out, group=self.group, async_op=True)
        self.message = work, out, flat.numel()

    @torch.no_grad()
    def receive(self, mix):
        (work, out, n), self.message = self.message, None
        work.wait()
        if self.bits == 4:
            out = torch.stack([unpack_e3m0(row.contiguous(), n) for row in out]).sum(0) / len(out)
        for c, part in zip(self.common, out.split([c.numel() for c in self.common]), strict=True):
            c.grad = part.view_as(c).to(c.dtype)
        self.outer.step()
        self.outer.zero_grad()
        for p, c in zip(self.parameters, self.common, strict=True):
            p.mul_(mix).add_(c, alpha=1 - mix)

    @torch.no_grad()
    def take(self):
        for p, c in zip(self.parameters, self.common, strict=True):
            p.copy_(c)


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
        if bits not in (4, 32) or not lr > 0 or not 0 <= momentum < 1 or not 0 <= mix < 1:
            raise ValueError("bits, lr, momentum or mix is wrong")
        if delay not in range(every) or len(fragments) > every or any(not f for f in fragments):
            raise ValueError("delay, every or the number of fragments is wrong")
        together, left = [p for f in fragments for p in f], set(model.parameters())
        left = {p for p in left if p.requires_grad}
        for p in together:
            if p not in left:
                raise ValueError("a parameter is in two fragments, frozen, or of another model")
            left.remove(p)
        if left:
            raise ValueError("a parameter is in no fragment")
        super().__init__(model, every=every, group=group)
        self.pieces = [Piece(list(f), lr, momentum, bits, group) for f in fragments]
        self.group, self.period, self.late, self.keep = group, every, delay, mix
        self.count = 0

    @property
    def common(self):
        return [piece.common for piece in self.pieces]

    @property
    def velocity(self):
        return [piece.velocity for piece in self.pieces]

    def turn(self, count):
        size = len(self.pieces)
        for k, piece in enumerate(self.pieces):
            if count > 0 and (count - (k + 1) * self.period // size) % self.period == 0:
                return piece
        return None

    def step(self):
        self.count += 1
        leaving = self.turn(self.count)
        if leaving:
            leaving.send()
        coming = self.turn(self.count - self.late)
        if coming:
            coming.receive(self.keep)
        return coming is not None

    def finish(self):
        if self.count == 0:
            return False
        for before in range(self.late - 1, -1, -1):
            piece = self.turn(self.count - before)
            if piece and piece.message:
                piece.receive(self.keep)
        behind = [piece for piece in self.pieces if piece is not self.turn(self.count)]
        for piece in behind:
            piece.send()
        for piece in behind:
            piece.receive(0.0)
        for piece in self.pieces:
            piece.take()
        self.count = 0
        return True
