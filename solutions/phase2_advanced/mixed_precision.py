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

from .gradient_accumulation import (
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
    # --- exercise 2.5: start
    # Step 1: check the type, then the parameters, then the device; name what is wrong. Ask
    #         nn.Module's named_parameters: a wrapper's own would show its float32 masters
    if dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"dtype must be torch.bfloat16 or torch.float16, not {dtype!r}")
    for name, p in nn.Module.named_parameters(model):
        if p.is_floating_point() and p.dtype != torch.float32:
            raise ValueError(f"{name} is {p.dtype}: masters are made of torch.float32 weights")
    device = next(model.parameters()).device
    try:
        one = torch.ones(1, 1, dtype=dtype, device=device)
        one @ one
    except RuntimeError as error:
        raise ValueError(f"device {device} can't multiply matrices of {dtype}: {error}") from error
    # --- exercise 2.5: end


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
        # --- exercise 2.5: start
        # Step 2: for norms and softmaxes: hooks cast their input to float32 and their output to
        #         dtype; their parameters and buffers stay
        # Step 3: copy every other trainable weight, then cast the parameter itself. It stays the
        #         same object, so that tied weights stay tied
        # Step 4: as soon as backward has a weight's gradient, add it to the master's and forget it
        super().__init__()
        check_precision(model, dtype)
        self.model, self.dtype = model, dtype
        self.master_of: dict[nn.Parameter, nn.Parameter] = {}
        for module in model.modules():
            if isinstance(module, FP32_MODULES):
                module.register_forward_pre_hook(lambda _, args: tuple(a.float() for a in args))
                module.register_forward_hook(lambda _, args, output: output.to(dtype))
                continue
            for name, buffer in module.named_buffers(recurse=False):
                if buffer.is_floating_point():
                    setattr(module, name, buffer.to(dtype))
            for p in module.parameters(recurse=False):
                if p.requires_grad and p not in self.master_of:
                    self.master_of[p] = nn.Parameter(p.detach().clone())
                    p.register_post_accumulate_grad_hook(self._collect)
                if p.is_floating_point():
                    p.data = p.data.to(dtype)
        # --- exercise 2.5: end

    def _collect(self, p: Tensor) -> None:
        """Move the gradient that backward has just made for weight ``p`` to its master."""
        # --- exercise 2.5: start
        # Step 5: add up in float32
        master = self.master_of[p]
        if master.grad is None:
            master.grad = p.grad.float()
        else:
            master.grad += p.grad
        p.grad = None
        # --- exercise 2.5: end

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits in float32; floating inputs are cast to ``dtype``, others (tokens) pass."""
        # --- exercise 2.5: start
        # Step 6: cast at both ends, so that the loss that follows is computed in float32
        if inputs.is_floating_point():
            inputs = inputs.to(self.dtype)
        return self.model(inputs).float()
        # --- exercise 2.5: end

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """The model's names with their masters; a parameter without one stands for itself.

        ``prefix``, ``recurse`` and ``remove_duplicate`` mean what they mean for any module.
        """
        # --- exercise 2.5: start
        # Step 7: parameters(), zero_grad() and so the optimizer go by this method
        for name, p in self.model.named_parameters(prefix, recurse, remove_duplicate):
            yield name, self.master_of.get(p, p)
        # --- exercise 2.5: end

    @torch.no_grad()
    def write_back(self) -> None:
        """Round the masters into the weights that forward reads (to nearest, ties to even)."""
        # --- exercise 2.5: start
        # Step 8: copy in place into the model's own tensors; never copy the other way round
        if self.master_of:
            torch._foreach_copy_(list(self.master_of), list(self.master_of.values()))
        # --- exercise 2.5: end


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
    # --- exercise 2.5: start
    # Step 9: seen from outside the model is float32, so the step of exercise 2.3 does it
    # Step 10: then the weights follow their masters
    loss, norm = train_window(model, optimizer, window, max_norm=max_norm, group=group)
    model.write_back()
    return loss, norm
    # --- exercise 2.5: end
