# Exercises 2.5: replace every `raise NotImplementedError` by your code.
# The docstrings say what is asked for. Test with: python test_phase2.py 2.5
# It counts as a shortcut to call PyTorch's own DistributedSampler, DistributedDataParallel, FSDP,
# ZeroRedundancyOptimizer, pipelining, DTensor, autocast, GradScaler, distributed checkpoint, model
# averaging, communication hooks, collectives with gradients, synchronisation of module states, the
# key-value store.
"""Mixed precision: 16-bit matrix products, fp32 wherever a rounding error would stay.

Which tensor lives in which type (Ψ parameters; T is bfloat16 or float16):

===================================  =====  =====  ============================================
tensor                               type   bytes  why
===================================  =====  =====  ============================================
weights that matrix products read    T      2Ψ     half the traffic, the fast units of the chip
activations and their gradients      T             the same
norms and softmaxes, inside          fp32          sums of many squares and exponentials
logits and loss                      fp32          the same, and the loss scale fits
a weight's gradient, in backward     T             one parameter's at a time
its sum over micro-batches, ranks    fp32   4Ψ     a small term vanishes in a large 16-bit sum
master weights                       fp32   4Ψ     lr·g below half an ulp would vanish
optimizer state (Adam)               fp32   8Ψ     as the masters, which it steps
===================================  =====  =====  ============================================

bfloat16 has float32's range and 8 significant bits. Between 1 and 2 its numbers are 2^-7 apart, so
adding less than 2^-8 to 1 changes nothing. float16 has 11 significant bits, but no number above
65504 and no positive one below 2^-24. Gradients that small are common; ``loss_scaling`` keeps them
(2.6). fp32 logits keep the loss from rounding. They don't bring back what the last 16-bit product
has rounded away.

Communication per step and rank: as in exercise 2.2 one all-reduce of the gradients, here in fp32,
2(W-1)/W·4Ψ bytes. (An all-reduce of 16 bits would send half, but add its W terms in 16 bits.)
Invariant: masters and optimizer state are equal on all ranks; the 16-bit weights are the
masters, rounded. Sources: Micikevicius et al. 2018 (arXiv 1710.03740), section 3; Kalamkar et al.
2019 (arXiv 1905.12322) for bfloat16; Rajbhandari et al. 2020 (arXiv 1910.02054), section 3.1.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from given.agreement import Group

from .template_gradient_accumulation import (
    MicroBatch,
    train_window,
)

# _NormBase: batch and instance norms of every dimension
FP32_MODULES = (
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RMSNorm,
    nn.modules.batchnorm._NormBase,
    nn.Softmax,
    nn.LogSoftmax,
)


def check_precision(model: nn.Module, dtype: torch.dtype) -> None:
    """Raise ValueError unless ``model`` can compute in ``dtype``; changes nothing.

    ``dtype`` must be bfloat16 or float16. Every floating parameter, frozen ones too, must still be
    float32: a weight that was rounded before can give no exact master. A model that is wrapped
    already is refused, and so is its wrapper. The device of the parameters must be able to multiply
    matrices of ``dtype``; the function tries it with a matrix of one element.
    """
    # Step 1: check the type, then the parameters, then the device; name what is wrong. Ask
    #         nn.Module's named_parameters: a wrapper's own would show its float32 masters
    raise NotImplementedError("exercise 2.5")


class MixedPrecision(nn.Module):
    """``model`` computing in 16 bits, with fp32 masters as its parameters.

    Wraps ``model`` (``model(inputs)`` gives logits) and casts it in place. Seen from outside it is
    a float32 model: logits are float32, ``parameters()`` and ``named_parameters()`` give the
    masters under the names that the weights have in ``model``, and backward adds to ``p.grad`` of
    the masters. So an optimizer that is made over ``parameters()`` steps and keeps state in
    float32. ``state_dict`` and ``to`` are left open.

    Inside, every matrix product of forward and backward reads ``dtype``. The modules of
    FP32_MODULES compute in float32, and keep their parameters and buffers. Forward of the other
    modules finds all floating parameters and buffers, frozen and non-persistent ones too, in
    ``dtype``; integers stay integers. No torch.autocast.

    Gradients of several micro-batches add up in float32. No 16-bit gradient is left after backward.
    Tied weights stay tied, with one master. A frozen parameter has no master; it stands for itself.
    Masters equal the weights from before, to the last bit. Several models may be wrapped at once.

    After the masters have changed, ``write_back`` must follow before the next forward.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        """Take over ``model``. Raises as ``check_precision`` does, before anything is changed."""
        # Step 2: for norms and softmaxes: hooks cast their input to float32 and their output to
        #         dtype; their parameters and buffers stay
        # Step 3: copy every other trainable weight, then cast the parameter itself. It stays the
        #         same object, so that tied weights stay tied
        # Step 4: as soon as backward has a weight's gradient, add it to the master's and forget it
        raise NotImplementedError("exercise 2.5")

    def _collect(self, p: Tensor) -> None:
        """Move the gradient that backward has just made for weight ``p`` to its master."""
        # Step 5: add up in float32
        raise NotImplementedError("exercise 2.5")

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits in float32; floating inputs are cast to ``dtype``, others (tokens) pass."""
        # Step 6: cast at both ends, so that the loss that follows is computed in float32
        raise NotImplementedError("exercise 2.5")

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """The model's names with their masters; a parameter without one stands for itself.

        ``prefix``, ``recurse`` and ``remove_duplicate`` mean what they mean for any module.
        """
        # Step 7: parameters(), zero_grad() and so the optimizer go by this method
        raise NotImplementedError("exercise 2.5")

    @torch.no_grad()
    def write_back(self) -> None:
        """Round the masters into the weights that forward reads (to nearest, ties to even)."""
        # Step 8: copy in place into the model's own tensors; never copy the other way round
        raise NotImplementedError("exercise 2.5")


def mixed_step(
    model: MixedPrecision,
    optimizer: torch.optim.Optimizer,
    window: Sequence[MicroBatch],
    *,
    max_norm: float | None = None,
    group: Group = None,
) -> tuple[float, float]:
    """``train_window`` (exercise 2.3) in mixed precision, without loss scaling: for bfloat16.

    ``optimizer`` is one over ``model.parameters()``. Afterwards forward reads the new weights.
    Returns (global mean loss, gradient norm before clipping), the same on every rank of ``group``.
    Communication is that of ``train_window``: one all-reduce of the float32 gradients, and at most
    two of single numbers.
    """
    # Step 9: seen from outside the model is float32, so the step of exercise 2.3 does it
    # Step 10: then the weights follow their masters
    raise NotImplementedError("exercise 2.5")
