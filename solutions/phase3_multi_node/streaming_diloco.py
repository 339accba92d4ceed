"""Streaming DiLoCo: the outer steps of DiLoCo in fragments, beside compute, with 4 bits per number.

DiLoCo (exercise 3.25) sends seldom, but then everything at once, and all ranks wait for it. Here
the model is cut into F fragments, each with an outer optimizer of its own. Every fragment is
synchronised once in H steps, but they take turns:

    send      fragment k after the steps t = ⌊(k+1)·H/F⌋ + 0, H, 2H, …:  Δ_r = θ - θ_r, to all ranks
    receive   τ steps later:   Δ = 1/W Σ_r Δ_r,   v ← μ·v + Δ,   θ ← θ - η·(Δ + μ·v)
    mix       θ_r ← α·θ_r + (1-α)·θ

Between send and receive the ranks go on with their inner steps: the message has the time of τ steps
to travel. The new θ does not know these τ steps. α keeps a part of them.

Numbers of e3m0 have a sign, 3 bits of exponent and no mantissa: 0 and ±2^-6 … ±1, times a power of
two that 32 numbers share. No all-reduce can add such numbers up, so every rank gathers those of
all, and adds them up in float32. Bytes that a rank sends, of n numbers:

    all-reduce, float32     2(W-1)/W·4n     once in H steps, no step beside it        (DiLoCo)
    all-gather, e3m0        (W-1)·17⌈n/F/32⌉ for each of F fragments, beside τ steps  (here)

For two ranks that is 7.5 times less, and from 16 ranks on it is more: it is meant for few.
Invariant: θ and v of each fragment are equal on all ranks, although the models are not.
Sources: Douillard et al. 2025 (Streaming DiLoCo, arXiv 2501.18512), algorithm 2 and section 2. A
power of two that 32 numbers share: OCP Microscaling Formats (MX) v1.0, E8M0.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from given.agreement import Group

from .local_sgd import LocalSGD

BLOCK = 32  # numbers that share an exponent
ROW = BLOCK // 2 + 1  # bytes of a block: two numbers per byte, and the exponent


def pack_e3m0(x: Tensor) -> Tensor:
    """``x`` (n,) in 4 bits per number: (17·⌈n/32⌉,) uint8. ``x`` is kept.

    Each 32 numbers, in order, share the power of two that is nearest to their largest absolute
    value, from 2^-126 to 2^127. A number becomes the nearest of 0 and ±2^-6, ±2^-5, … ±1 times that
    power. Where two are equally near, the larger absolute value is taken, in both cases. ``x`` has
    any real dtype, and counts as float32.
    """
    # --- exercise 3.34: start
    # Step 1: fill up to whole blocks. frexp gives the exponent of each block's largest value
    # Step 2: the byte b stands for 2^(b - 127), see `power_of`: 255 for what is
    #         not finite
    # Step 3: a number's code counts the middles between two levels that it has reached
    rows = F.pad(x.float(), (0, -len(x) % BLOCK)).view(-1, BLOCK)
    largest = rows.abs().amax(1, keepdim=True)
    mantissa, exponent = torch.frexp(largest)
    byte = (exponent + 126 + (mantissa >= 0.75)).clamp(1, 254)
    byte.masked_fill_(~largest.isfinite(), 255)
    levels = levels_on(x.device)
    middles = (levels[1:] + levels[:-1]) / 2
    code = torch.bucketize(rows.abs() / power_of(byte), middles, right=True) + 8 * (rows < 0)
    low, high = code.view(-1, BLOCK // 2, 2).unbind(2)
    return torch.cat([low + 16 * high, byte], 1).to(torch.uint8).flatten()
    # --- exercise 3.34: end


def unpack_e3m0(packed: Tensor, n: int) -> Tensor:
    """(n,) float32: the numbers in ``packed``, a result of ``pack_e3m0`` for n numbers.

    A number that was not finite makes all numbers of its block not finite, and no others.
    """
    # --- exercise 3.34: start
    # Step 4: two codes per byte; the fourth bit is the sign
    rows = packed.view(-1, ROW)
    codes, byte = rows[:, :-1].int(), rows[:, -1:]
    levels = levels_on(packed.device)
    values = torch.cat([levels, -levels])[torch.stack([codes & 15, codes >> 4], 2).view(-1, BLOCK)]
    return (values * power_of(byte)).view(-1)[:n]
    # --- exercise 3.34: end


def power_of(byte: Tensor) -> Tensor:
    """2^(b - 127) in float32 for integers b from 1 to 254, exactly; infinity for 255.

    b is the exponent of a float32 whose other bits are zero.
    """
    return (byte.int() << 23).view(torch.float32)


def levels_on(device: torch.device) -> Tensor:
    """(8,) what 3 bits stand for: 0, 2^-6, 2^-5, … 1. No host waits, since nothing is copied."""
    return F.pad(power_of(torch.arange(121, 128, device=device)), (1, 0))


def strided(units: Sequence[nn.Module], fragments: int) -> list[list[nn.Parameter]]:
    """The trainable parameters of each fragment: unit i belongs to fragment i mod ``fragments``.

    So a fragment has layers from the whole depth of the model. Within a fragment parameters are in
    the order of the units. A parameter of several units belongs to the first of them. Raises
    ValueError unless 1 <= ``fragments`` <= number of units.
    """
    # --- exercise 3.34: start
    # Step 5: deal the units out like cards; a tied parameter goes to its first unit only
    if not 1 <= fragments <= len(units):
        raise ValueError(f"{len(units)} units can't be dealt out to {fragments} fragments")
    dealt: list[list[nn.Parameter]] = [[] for _ in range(fragments)]
    seen: set[nn.Parameter] = set()
    for index, unit in enumerate(units):
        own = [p for p in unit.parameters() if p.requires_grad and p not in seen]
        dealt[index % fragments] += own
        seen.update(own)
    return dealt
    # --- exercise 3.34: end


class StreamingDiLoCo(LocalSGD):
    """DiLoCo whose fragments are synchronised in turn while the ranks train on.

    ``fragments``: the parameters of each, real, in the same order on all ranks. ``every`` (H),
    ``lr`` (η) and ``momentum`` (μ) are DiLoCo's. ``delay`` (τ): steps from sending to receiving.
    ``mix`` (α): the share of its own values that a rank keeps. ``bits``: 4 sends e3m0, 32 float32.
    One fragment with τ = 0, α = 0 and 32 bits is DiLoCo, but for buffers.

    A new object gives all ranks the model of the group's rank 0, and refuses models that differ and
    ranks outside of ``group``, as `LocalSGD` does. Then call ``step()`` after each step of the
    inner optimizer, and ``finish()`` at the end, equally often on all ranks. Parameters are written
    in place; inner optimizers and buffers stay each rank's own.

    The lists ``common`` (θ) and ``velocity`` (v) have a list of tensors for each fragment, beside
    its parameters, in their dtypes. They have no autograd history and the same bits on all ranks,
    and take 2P bytes together. Raises ValueError on every rank, before any communication, unless
    each trainable parameter of ``model`` is in exactly one fragment, and no fragment is empty. The
    same holds unless number of fragments <= ``every``, 0 <= ``delay`` < ``every``, 0 <= ``mix`` <
    1, ``lr`` > 0, 0 <= ``momentum`` < 1, and ``bits`` is 4 or 32.
    """

    def __init__(
        self,
        model: nn.Module,
        fragments: Sequence[Sequence[nn.Parameter]],
        *,
        every: int,
        delay: int = 1,
        mix: float = 0.5,
        lr: float = 0.7,
        momentum: float = 0.9,
        bits: int = 4,
        group: Group = None,
    ) -> None:
        # --- exercise 3.34: start
        # Step 6: refuse settings, then fragments, before anything is sent
        # Step 7: start from one model; each fragment has its own θ and v, and its own turn
        if not (0 <= delay < every and 0 <= mix < 1 and lr > 0 and 0 <= momentum < 1):
            raise ValueError(
                "expected 0 <= delay < every, 0 <= mix < 1, lr > 0 and 0 <= momentum < 1, got "
                f"delay={delay}, every={every}, mix={mix}, lr={lr}, momentum={momentum}"
            )
        if bits not in (4, 32):
            raise ValueError(f"a number is sent with 4 or 32 bits, not {bits}")
        held = [p for fragment in fragments for p in fragment]
        trained = {p for p in model.parameters() if p.requires_grad}
        if len(held) != len(trained) or set(held) != trained:
            raise ValueError("each trainable parameter has to be in one fragment, and no others")
        if not all(fragments) or len(fragments) > every:
            raise ValueError(f"{every} steps can't send {len(fragments)} fragments, none empty")
        super().__init__(model, every=every, group=group)
        self.group, self.every, self.delay, self.mix = group, every, delay, mix
        self.lr, self.momentum, self.bits = lr, momentum, bits
        self.fragments = [list(fragment) for fragment in fragments]
        self.common = [[p.detach().clone() for p in fragment] for fragment in fragments]
        self.velocity = [[torch.zeros_like(c) for c in common] for common in self.common]
        self.turns = [(k + 1) * every // len(fragments) for k in range(len(fragments))]
        self.steps = 0
        self.under_way: dict[int, tuple[dist.Work, Tensor]] = {}
        # --- exercise 3.34: end

    def step(self) -> bool:
        """Note that the inner optimizer has stepped; True if a fragment was received after it.

        Of t steps since the start or since ``finish()``, the one with t = ⌊(k+1)·H/F⌋ + i·H sends
        fragment k (from 0), i = 0, 1, …: one asynchronous message. Nothing is waited for before the
        step that receives it, τ steps later. Other steps communicate nothing. No step lets the
        host wait for a GPU.
        """
        # --- exercise 3.34: start
        # Step 8: count; send the fragment whose turn it is, receive the one that was sent τ before
        self.steps += 1
        for k in self._due(0):
            self._send(k)
        arrived = [k for k in self._due(self.delay) if k in self.under_way]
        for k in arrived:
            self._receive(k)
        return bool(arrived)
        # --- exercise 3.34: end

    def _due(self, delay: int) -> list[int]:
        """The fragments whose turn was ``delay`` steps ago."""
        # --- exercise 3.34: start
        # Step 9: turns repeat every H steps
        since = self.steps - delay
        return [k for k, turn in enumerate(self.turns) if (since - turn) % self.every == 0]
        # --- exercise 3.34: end

    @torch.no_grad()
    def _send(self, k: int) -> None:
        """Begin to send fragment k's differences to θ, as float32 or packed, in one message.

        ``bits`` = 32: an all-reduce of 4n bytes. 4: an all-gather of 17·⌈n/32⌉ bytes per rank.
        """
        # --- exercise 3.34: start
        # Step 10: one vector of all differences; with 32 bits divide it by the number of ranks
        # Step 11: keep the handle and the tensor that is filled
        world_size = dist.get_world_size(self.group)
        pairs = zip(self.common[k], self.fragments[k], strict=True)
        flat = torch.cat([(common - p).flatten().float() for common, p in pairs])
        if self.bits == 32:
            flat /= world_size
            work = dist.all_reduce(flat, group=self.group, async_op=True)
        else:
            mine = pack_e3m0(flat)
            flat = mine.new_empty(world_size * len(mine))
            work = dist.all_gather_into_tensor(flat, mine, group=self.group, async_op=True)
        self.under_way[k] = work, flat
        # --- exercise 3.34: end

    @torch.no_grad()
    def _receive(self, k: int) -> None:
        """Wait for fragment k, take its outer step, and mix θ into the parameters."""
        # --- exercise 3.34: start
        # Step 12: unpack all ranks' numbers and take their mean, in the order of the ranks
        # Step 13: take the outer step of 3.25 from θ, which has not changed since the last one
        # Step 14: keep the share α of the rank's own values
        work, received = self.under_way.pop(k)
        work.wait()
        numels = [common.numel() for common in self.common[k]]
        if self.bits == 4:
            ranks = received.view(dist.get_world_size(self.group), -1)
            received = torch.stack([unpack_e3m0(row, sum(numels)) for row in ranks]).mean(0)
        parts = received.split(numels)
        tensors = zip(self.fragments[k], self.common[k], self.velocity[k], parts, strict=True)
        for p, common, velocity, part in tensors:
            delta = part.view(common.shape).to(common.dtype)
            velocity.mul_(self.momentum).add_(delta)
            common.sub_(delta.add(velocity, alpha=self.momentum), alpha=self.lr)
            p.lerp_(common, 1 - self.mix)
        # --- exercise 3.34: end

    def finish(self) -> bool:
        """Give all ranks the same model; True if there was a step since the last time, else False.

        First, all messages under way are received as usual. Then every fragment that has had a step
        since it was sent is sent and received, with all messages of this kind under way at once. At
        the end all parameters are θ, with the same bits on all ranks, and t begins anew. Without a
        step since the last ``finish()``, or since the start, nothing is sent or changed.
        """
        # --- exercise 3.34: start
        # Step 15: receive what is under way, synchronise what is behind, and take θ without mixing
        if self.steps == 0:
            return False
        for k in list(self.under_way):
            self._receive(k)
        late = [k for k in range(len(self.fragments)) if k not in self._due(0)]
        for k in late:
            self._send(k)
        for k in late:
            self._receive(k)
        with torch.no_grad():
            for fragment, common in zip(self.fragments, self.common, strict=True):
                for p, c in zip(fragment, common, strict=True):
                    p.copy_(c)
        self.steps = 0
        return True
        # --- exercise 3.34: end
