"""The models that ``distlab simulate`` knows, each with its inputs, optimizer and usual batch."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..reference.workloads import GPT, mlp

Inputs = Callable[[int, str | torch.device, torch.dtype], tuple[Tensor, Tensor]]


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """How to build a model and one batch for it; ``batch`` is the usual number of samples per GPU.

    ``per_sample`` is how many units of throughput (``unit``) a sample has: 1 image, or the tokens
    of a sequence.
    """

    name: str
    build: Callable[[], nn.Module]
    inputs: Inputs
    batch: int
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
    dtype: str
    unit: str = "images"
    per_sample: int = 1


def _sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def _adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4)


def _images(batch: int, device: str | torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    images = torch.empty(batch, 3, 224, 224, device=device, dtype=dtype)
    return images, torch.empty(batch, dtype=torch.int64, device=device)


def _digits(batch: int, device: str | torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    images = torch.empty(batch, 1, 8, 8, device=device, dtype=dtype)
    return images, torch.empty(batch, dtype=torch.int64, device=device)


def _tokens(length: int) -> Inputs:
    def inputs(batch: int, device: str | torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        tokens = torch.empty(batch, length, dtype=torch.int64, device=device)
        return tokens, torch.empty(batch * length, dtype=torch.int64, device=device)

    return inputs


def _torchvision(name: str) -> nn.Module:
    import torchvision

    model: nn.Module = getattr(torchvision.models, name)()
    return model


def _gpt(name: str, layers: int, width: int, heads: int, length: int, batch: int) -> ModelSpec:
    return ModelSpec(
        name=name,
        build=lambda: GPT(50_304, length, layers, width, heads),
        inputs=_tokens(length),
        batch=batch,
        optimizer=_adamw,
        dtype="bfloat16",
        unit="tokens",
        per_sample=length,
    )


MODELS = {
    spec.name: spec
    for spec in (
        ModelSpec(name="mlp", build=mlp, inputs=_digits, batch=64, optimizer=_sgd, dtype="float32"),
        ModelSpec(
            name="resnet50",
            build=lambda: _torchvision("resnet50"),
            inputs=_images,
            batch=32,
            optimizer=_sgd,
            dtype="float32",
        ),
        ModelSpec(
            name="vit_b16",
            build=lambda: _torchvision("vit_b_16"),
            inputs=_images,
            batch=64,
            optimizer=_adamw,
            dtype="bfloat16",
        ),
        _gpt("gpt-1b", 24, 2048, 16, 2048, 4),  # 1.3 billion parameters, as GPT-3 XL
        _gpt("gpt-7b", 32, 4096, 32, 2048, 1),  # 6.7 billion parameters, as GPT-3 6.7B
    )
}


def model_spec(name: str) -> ModelSpec:
    """The model called ``name``; ValueError with the nearest name."""
    if name not in MODELS:
        near = difflib.get_close_matches(name, MODELS, 1, 0.3)
        guess = f"; did you mean {near[0]}?" if near else ";"
        raise ValueError(f"no model {name!r}{guess} There are: {', '.join(MODELS)}")
    return MODELS[name]


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The repeated parts that a model lists: a transformer's blocks, those of a ResNet's stages.

    None inside another; empty for a model that is itself a plain sequence.
    """
    found: list[nn.Module] = []
    for child in model.children():
        if isinstance(child, (nn.ModuleList, nn.Sequential)):
            found += [part for part in child if any(True for _ in part.parameters())]
        else:
            found += blocks_of(child)
    return found
