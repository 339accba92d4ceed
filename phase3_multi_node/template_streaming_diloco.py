# Exercises 3.34: replace every `raise NotImplementedError` by your code.
# The docstrings say what is asked for. Test with: python test_phase3.py 3.34
# It counts as a shortcut to call PyTorch's own DistributedSampler, DistributedDataParallel, FSDP,
# ZeroRedundancyOptimizer, pipelining, DTensor, distributed checkpoint, model averaging,
# communication hooks, collectives with gradients, synchronisation of module states, the key-value
# store.
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

from .template_local_sgd import LocalSGD

BLOCK = 32  # numbers that share an exponent
ROW = BLOCK // 2 + 1  # bytes of a block: two numbers per byte, and the exponent


def pack_e3m0(x: Tensor) -> Tensor:
    """``x`` (n,) in 4 bits per number: (17·⌈n/32⌉,) uint8. ``x`` is kept.

    Each 32 numbers, in order, share the power of two that is nearest to their largest absolute
    value, from 2^-126 to 2^127. A number becomes the nearest of 0 and ±2^-6, ±2^-5, … ±1 times that
    power. Where two are equally near, the larger absolute value is taken, in both cases. ``x`` has
    any real dtype, and counts as float32.
    """
    # Step 1: fill up to whole blocks. frexp gives the exponent of each block's largest value
    # Step 2: the byte b stands for 2^(b - 127), see `power_of`: 255 for what is
    #         not finite
    # Step 3: a number's code counts the middles between two levels that it has reached
    raise NotImplementedError("exercise 3.34")


def unpack_e3m0(packed: Tensor, n: int) -> Tensor:
    """(n,) float32: the numbers in ``packed``, a result of ``pack_e3m0`` for n numbers.

    A number that was not finite makes all numbers of its block not finite, and no others.
    """
    # Step 4: two codes per byte; the fourth bit is the sign
    raise NotImplementedError("exercise 3.34")


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
    # Step 5: deal the units out like cards; a tied parameter goes to its first unit only
    raise NotImplementedError("exercise 3.34")


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
        # Step 6: refuse settings, then fragments, before anything is sent
        # Step 7: start from one model; each fragment has its own θ and v, and its own turn
        raise NotImplementedError("exercise 3.34")

    def step(self) -> bool:
        """Note that the inner optimizer has stepped; True if a fragment was received after it.

        Of t steps since the start or since ``finish()``, the one with t = ⌊(k+1)·H/F⌋ + i·H sends
        fragment k (from 0), i = 0, 1, …: one asynchronous message. Nothing is waited for before the
        step that receives it, τ steps later. Other steps communicate nothing. No step lets the
        host wait for a GPU.
        """
        # Step 8: count; send the fragment whose turn it is, receive the one that was sent τ before
        raise NotImplementedError("exercise 3.34")

    def _due(self, delay: int) -> list[int]:
        """The fragments whose turn was ``delay`` steps ago."""
        # Step 9: turns repeat every H steps
        raise NotImplementedError("exercise 3.34")

    @torch.no_grad()
    def _send(self, k: int) -> None:
        """Begin to send fragment k's differences to θ, as float32 or packed, in one message.

        ``bits`` = 32: an all-reduce of 4n bytes. 4: an all-gather of 17·⌈n/32⌉ bytes per rank.
        """
        # Step 10: one vector of all differences; with 32 bits divide it by the number of ranks
        # Step 11: keep the handle and the tensor that is filled
        raise NotImplementedError("exercise 3.34")

    @torch.no_grad()
    def _receive(self, k: int) -> None:
        """Wait for fragment k, take its outer step, and mix θ into the parameters."""
        # Step 12: unpack all ranks' numbers and take their mean, in the order of the ranks
        # Step 13: take the outer step of 3.25 from θ, which has not changed since the last one
        # Step 14: keep the share α of the rank's own values
        raise NotImplementedError("exercise 3.34")

    def finish(self) -> bool:
        """Give all ranks the same model; True if there was a step since the last time, else False.

        First, all messages under way are received as usual. Then every fragment that has had a step
        since it was sent is sent and received, with all messages of this kind under way at once. At
        the end all parameters are θ, with the same bits on all ranks, and t begins anew. Without a
        step since the last ``finish()``, or since the start, nothing is sent or changed.
        """
        # Step 15: receive what is under way, synchronise what is behind, and take θ without mixing
        raise NotImplementedError("exercise 3.34")
