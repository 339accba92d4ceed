"""Quantisation: all entries travel, with few bits each.

A quantised vector has integers q and a scale s, and stands for s·q. Two ways keep errors from
adding up:

- **unbiased** (`Int8`): x/s is rounded up or down at random, up with the probability of its
  fraction, so that E[s·q] = x. Errors of many steps and ranks cancel, and no residual is needed.
- **error feedback** (`OneBit`): a sign and a mean size are far too coarse to be unbiased. The error
  goes into the next step's gradient (``gradient_compression``).

Integers of two ranks have different scales, so no all-reduce can add them up. And a sum of 8-bit
numbers does not fit into 8 bits. Bytes that a rank sends, of n numbers:

    all-reduce   2(W-1)/W·4n                  float32
    Int8         2(W-1)(⌈n/W⌉ + 4)            all-to-all of pieces, sum, all-gather of the sums
    1 bit        (W-1)(⌈n/8⌉ + 4)             all-gather of everything: right for few ranks only

Invariant: every rank decodes the same bytes in the same order, so all end with the same bits.
Random rounding: Alistarh et al. 2017 (QSGD, arXiv 1610.02132), section 3.1. One bit with error
feedback: Seide et al. 2014, "1-Bit Stochastic Gradient Descent", sections 3.1 and 3.2. The scale:
Karimireddy et al. 2019 (arXiv 1901.09847). Signs alone: Bernstein et al. 2018 (arXiv 1802.04434).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from given.agreement import Group
from given.bucket_hooks import Bucket, Handle, Then

from .gradient_compression import PerParameter, State

STEPS = 127  # of int8 to each side of zero; -128 is not used
SCALE_BYTES = 4  # a float32


class Int8:
    """A hook that sends 8 bits per number, rounded at random so that the mean is right.

    The buffer is cut into W pieces of ⌈n/W⌉, padded with zeros. Piece i of every rank goes to rank
    i, which adds them up in float32. The sums are quantised again and go to all. A piece has one
    scale, its largest absolute value / 127. A piece of zeros stays zeros. A number that is not
    finite spoils its piece on all ranks, but no other piece.

    Both roundings of every number draw new random numbers, at each call: equal ones would make
    errors add up. Ranks draw different ones, from ``seed`` and the rank; ``seed`` is the same on
    all ranks. Cost: two messages, 2(W-1)(⌈n/W⌉ + 4) bytes per bucket and rank. Only the state of
    the random numbers is kept. W counts the ranks of ``group``, and no other rank takes part.
    """

    def __init__(self, group: Group = None, seed: int = 0) -> None:
        self.group = group
        self.generator = torch.Generator().manual_seed(
            seed * dist.get_world_size(group) + dist.get_rank(group)
        )

    def __call__(self, bucket: Bucket) -> Handle | None:
        """Begin to send the pieces; ``wait`` adds up, gathers the sums, and fills the buffer.

        All ranks get the same bits. Several buckets may be under way, and are waited for in the
        order in which they were begun. An empty bucket sends nothing. Global random numbers and
        parameters stay as they are.
        """
        # --- exercise 4.9: start
        # Step 1: cut into W rows, a piece for each rank, and pack each with its own scale
        # Step 2: begin to send the rows: row i goes to rank i
        # Step 3: then add up the received pieces, in float32; pack the sum
        # Step 4: gather the packed sums of all ranks, and every rank unpacks the same bytes
        n, world_size = bucket.buffer.numel(), dist.get_world_size(self.group)
        if not n:
            return None
        rows = bucket.buffer.new_zeros(world_size, -(-n // world_size))
        rows.view(-1)[:n] = bucket.buffer
        packed = pack_int8(rows, self.generator)
        theirs = torch.empty_like(packed)
        work = dist.all_to_all_single(theirs, packed, group=self.group, async_op=True)

        def add_up() -> None:
            total = unpack_int8(theirs, torch.float32).sum(0, keepdim=True)
            mine = pack_int8(total, self.generator)
            dist.all_gather_into_tensor(packed, mine, group=self.group)
            bucket.buffer.copy_(unpack_int8(packed, bucket.buffer.dtype).view(-1)[:n])

        return Then(work, add_up)
        # --- exercise 4.9: end

    def state_dict(self) -> State:
        """The state of this rank's random numbers."""
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state: State) -> None:
        """Go on from a ``state_dict`` of this rank."""
        self.generator.set_state(state["generator"])


class OneBit:
    """A hook that sends one bit per number, its sign, and one scale per bucket.

    v ← residual + gradient. The rank sends s·sign(v) with s = mean |v| and sign(0) = 1; the error
    stays in the residual. Each rank has its own s, which is part of its message as a float32:
    (W-1)(⌈n/8⌉ + 4) bytes per bucket and rank, in one message. A number that is not finite on one
    rank spoils the bucket on all. Memory: a copy of the gradients. W counts the ranks of ``group``,
    and no other rank takes part. ``parameters``: those of the model, on the device where they will
    stay, as for an optimizer.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], group: Group = None) -> None:
        self.group = group
        self.residual = PerParameter(parameters)

    def __call__(self, bucket: Bucket) -> Handle | None:
        """Begin to send; once ``wait`` is done the buffer holds Σ s·sign(v) over the ranks.

        All ranks get the same bits. The message is under way when it returns. Several buckets may
        be under way. They are waited for in the order in which they were begun. An empty bucket
        sends nothing. Random numbers and parameters stay as they are.
        """
        # --- exercise 4.9: start
        # Step 5: add the new gradient to the residual; pack the signs behind the scale's bytes
        # Step 6: begin to gather the messages of all ranks; take the sent values from the residual
        # Step 7: then add up all ranks' signs, each with *its* scale, in the order of the ranks
        n, world_size = bucket.buffer.numel(), dist.get_world_size(self.group)
        if not n:
            return None
        v = self.residual.beside(bucket).add_(bucket.buffer)
        scale = v.abs().float().mean()
        packed = pack_signs(v)
        message = torch.cat([scale.view(1).view(torch.uint8), packed]).view(1, -1)
        everyone = message.new_empty(world_size, message.numel())
        work = dist.all_gather_into_tensor(everyone, message, self.group, async_op=True)
        v.sub_(unpack_signs(packed, n, v.dtype).mul_(scale))

        def add_up() -> None:
            bucket.buffer.zero_()
            for theirs in everyone:
                size = theirs[:SCALE_BYTES].clone().view(torch.float32)
                signs = unpack_signs(theirs[SCALE_BYTES:], n, bucket.buffer.dtype)
                bucket.buffer.add_(signs.mul_(size))

        return Then(work, add_up)
        # --- exercise 4.9: end

    def state_dict(self) -> State:
        """A copy of this rank's residuals; every rank has its own."""
        # --- exercise 4.9: start
        # Step 8: without it, a resumed run loses all that was not sent yet
        return {"residual": self.residual.state_dict()}
        # --- exercise 4.9: end

    def load_state_dict(self, state: State) -> None:
        """Go on from a ``state_dict`` of this rank, to the bit; ``state`` stays as it is.

        Raises ValueError, and changes nothing, if it is of other parameters.
        """
        # --- exercise 4.9: start
        # Step 9: the same in the other direction
        self.residual.load_state_dict(state["residual"])
        # --- exercise 4.9: end


def pack_int8(x: Tensor, generator: torch.Generator) -> Tensor:
    """Each row of ``x`` (rows, c) as int8 (rows, c + 4): 8 bits per number, its scale behind them.

    The scale is the row's largest absolute value / 127, as the bytes of a float32. Integers lie in
    -127 … 127. Each is rounded up or down at random, independently, so that the mean is ``x``.
    """
    # --- exercise 4.9: start
    # Step 10: the largest absolute value becomes 127; a row of zeros must not be divided by zero
    # Step 11: ⌊x/s + u⌋ with u uniform in [0, 1) is x/s rounded up with its fraction's probability
    scale = x.abs().amax(1, keepdim=True).float() / STEPS  # too small for 16 bits, maybe
    scale.clamp_min_(torch.finfo(torch.float32).tiny)
    uniform = torch.rand(x.shape, generator=generator).to(x.device)
    q = (x / scale + uniform).floor_().clamp_(-STEPS, STEPS)  # 127 + u may be rounded to 128
    return torch.cat([q.to(torch.int8), scale.view(torch.int8)], 1)
    # --- exercise 4.9: end


def unpack_int8(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """(rows, c) of ``dtype`` from ``packed`` (rows, c + 4): each row's integers times its scale.

    The product is made in float32: a scale may be too small for 16 bits where the products aren't.
    """
    # --- exercise 4.9: start
    # Step 12: the last bytes of a row are its scale
    scale = packed[:, -SCALE_BYTES:].reshape(-1).clone().view(torch.float32)  # a copy is aligned
    return (packed[:, :-SCALE_BYTES] * scale.unsqueeze(1)).to(dtype)
    # --- exercise 4.9: end


def pack_signs(v: Tensor) -> Tensor:
    """(⌈n/8⌉,) uint8 from ``v`` (n,): bit j of byte i is 1 where v[8i + j] >= 0, and 0 behind n."""
    # --- exercise 4.9: start
    # Step 13: fill up to whole bytes, and give each of eight signs its power of two
    bits = torch.zeros(-(-len(v) // 8) * 8, dtype=torch.uint8, device=v.device)
    torch.ge(v, 0, out=bits[: len(v)])
    powers = 2 ** torch.arange(8, dtype=torch.uint8, device=v.device)
    return (bits.view(-1, 8) * powers).sum(1, dtype=torch.uint8)
    # --- exercise 4.9: end


def unpack_signs(packed: Tensor, n: int, dtype: torch.dtype) -> Tensor:
    """(n,) of 1 and -1, of ``dtype``, from the result of ``pack_signs``."""
    # --- exercise 4.9: start
    # Step 14: bit 1 becomes 1, bit 0 becomes -1; the padding is left out
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    bits = (packed.unsqueeze(1) >> shifts) & 1
    return bits.view(-1)[:n].to(dtype).mul_(2).sub_(1)
    # --- exercise 4.9: end
