# for: 2.5
"""Written from the docstrings alone."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from given.agreement import Group

from .gradient_accumulation import MicroBatch, train_window

FP32_MODULES = (
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RMSNorm,
    nn.modules.batchnorm._NormBase,
    nn.Softmax,
    nn.LogSoftmax,
)


def _fp32_forward(forward, dtype: torch.dtype, *args, **kwargs):

    def cast(value):
        return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value

    result = forward(*[cast(a) for a in args], **{k: cast(v) for k, v in kwargs.items()})
    return result.to(dtype)


def _own_parameters(model: nn.Module) -> dict[int, tuple[str, nn.Parameter]]:
    found: dict[int, tuple[str, nn.Parameter]] = {}
    for path, module in model.named_modules():
        for name, p in module._parameters.items():
            if p is not None:
                found.setdefault(id(p), (f"{path}.{name}", p))
    return found


def check_precision(model: nn.Module, dtype: torch.dtype) -> None:
    if dtype is not torch.bfloat16 and dtype is not torch.float16:
        raise ValueError(f"{dtype} is no 16-bit type to compute in")
    parameters = _own_parameters(model).values()
    wrong = [name for name, p in parameters if p.is_floating_point() and p.dtype != torch.float32]
    if wrong:
        raise ValueError(f"not float32: {', '.join(wrong)}")
    for device in dict.fromkeys((p.device for _, p in parameters)):
        try:
            torch.zeros(1, 1, dtype=dtype, device=device) @ torch.zeros(
                1, 1, dtype=dtype, device=device
            )
        except RuntimeError:
            raise ValueError(f"no matrix products of {dtype} on {device}") from None


class MixedPrecision(nn.Module):
    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        check_precision(model, dtype)
        super().__init__()
        self.model = model
        self.dtype = dtype
        self.pairs: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
        stays: set[int] = set()
        for module in model.modules():
            if isinstance(module, FP32_MODULES):
                module.forward = functools.partial(_fp32_forward, module.forward, dtype)
                for tensor in [*module.parameters(), *module.buffers()]:
                    stays.add(id(tensor))
        me = weakref.ref(self)

        def collect(p: Tensor) -> None:
            wrapper = me()
            if wrapper is not None:
                wrapper._collect(p)

        for key, (_, p) in _own_parameters(model).items():
            if key in stays or not p.is_floating_point():
                continue
            whole = p.data
            p.data = whole.to(dtype)
            if p.requires_grad:
                master = nn.Parameter(whole)
                master.grad = p.grad
                p.grad = None
                self.pairs[key] = (p, master)
                p.register_post_accumulate_grad_hook(collect)
        for module in model.modules():
            for b in list(module._buffers.values()):
                if b is not None and b.is_floating_point() and (id(b) not in stays):
                    b.data = b.detach().to(dtype)

    def _collect(self, p: Tensor) -> None:
        master = self.pairs[id(p)][1]
        found = p.grad.detach().float()
        p.grad = None
        if master.grad is not None:
            found.add_(master.grad)
            master.grad.copy_(found)
        else:
            master.grad = found

    def forward(self, inputs: Tensor) -> Tensor:
        x = inputs.to(self.dtype) if torch.is_floating_point(inputs) else inputs
        y = self.model(x)
        return y.float()

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        nothing = (None, None)
        for name, p in nn.Module.named_parameters(self.model, prefix, recurse, remove_duplicate):
            master = self.pairs.get(id(p), nothing)[1]
            yield (name, p if master is None else master)

    @torch.no_grad()
    def write_back(self) -> None:
        for p, master in self.pairs.values():
            p.data.copy_(master.data)


def mixed_step(
    model: MixedPrecision,
    optimizer: torch.optim.Optimizer,
    window: Sequence[MicroBatch],
    *,
    max_norm: float | None = None,
    group: Group = None,
) -> tuple[float, float]:
    loss, norm = train_window(model, optimizer, window, max_norm=max_norm, group=group)
    model.write_back()
    return (loss, norm)
