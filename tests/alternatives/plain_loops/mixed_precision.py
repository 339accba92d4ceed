# for: 2.5
"""Written from the docstrings alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from given.agreement import Group
from given.hooks import weakly

from .gradient_accumulation import MicroBatch, train_window

FP32_MODULES = (
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RMSNorm,
    nn.modules.batchnorm._NormBase,
    nn.Softmax,
    nn.LogSoftmax,
)


def _to_float32(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:

    def cast(value):
        floating = isinstance(value, Tensor) and value.is_floating_point()
        return value.to(torch.float32) if floating else value

    return (tuple(map(cast, args)), {name: cast(value) for name, value in kwargs.items()})


def check_precision(model: nn.Module, dtype: torch.dtype) -> None:
    if dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"dtype must be bfloat16 or float16, not {dtype}")
    devices = set()
    for name, p in nn.Module.named_parameters(model):
        if p.is_floating_point() and p.dtype != torch.float32:
            raise ValueError(
                f"parameter {name} is {p.dtype}, not float32: it has been rounded before"
            )
        devices.add(p.device)
    for device in devices:
        one = torch.ones(1, 1, dtype=dtype, device=device)
        try:
            torch.matmul(one, one)
        except RuntimeError as error:
            raise ValueError(f"{device} does not multiply matrices of {dtype}") from error


class MixedPrecision(nn.Module):
    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        check_precision(model, dtype)
        super().__init__()
        self.model, self.dtype = (model, dtype)
        self.masters: dict[nn.Parameter, nn.Parameter] = {}

        def to_dtype(module: nn.Module, args: tuple, output: Tensor) -> Tensor:
            return output.to(dtype) if output.is_floating_point() else output

        kept: set[int] = set()
        for module in model.modules():
            if isinstance(module, FP32_MODULES):
                module.register_forward_pre_hook(_to_float32, with_kwargs=True)
                module.register_forward_hook(to_dtype)
                kept.update(id(t) for t in (*module.parameters(), *module.buffers()))
        for module in model.modules():
            for b in module._buffers.values():
                if b is not None and b.is_floating_point() and (id(b) not in kept):
                    b.data = b.data.to(dtype)
        for p in nn.Module.parameters(model):
            if id(p) in kept or not p.is_floating_point():
                continue
            if p.requires_grad:
                master = nn.Parameter(p.detach().clone())
                master.grad, p.grad = (p.grad, None)
                self.masters[p] = master
            p.data = p.data.to(dtype)
            if p.requires_grad:
                p.register_post_accumulate_grad_hook(weakly(self._collect))

    def _collect(self, p: Tensor) -> None:
        master, gradient = (self.masters[p], p.grad.detach())
        p.grad = None
        if master.grad is None:
            master.grad = gradient.to(torch.float32)
        else:
            master.grad.add_(gradient)

    def forward(self, inputs: Tensor) -> Tensor:
        if inputs.is_floating_point():
            inputs = inputs.to(self.dtype)
        return self.model(inputs).to(torch.float32)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        for name, p in self.model.named_parameters(prefix, recurse, remove_duplicate):
            yield (name, self.masters.get(p, p))

    @torch.no_grad()
    def write_back(self) -> None:
        for p, master in self.masters.items():
            p.copy_(master)


def mixed_step(
    model: MixedPrecision,
    optimizer: torch.optim.Optimizer,
    window: Sequence[MicroBatch],
    *,
    max_norm: float | None = None,
    group: Group = None,
) -> tuple[float, float]:
    result = train_window(model, optimizer, window, max_norm=max_norm, group=group)
    model.write_back()
    return result
