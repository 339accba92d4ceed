"""The models that ``distlab simulate`` knows, each with its inputs, optimizer and usual batch."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from ..reference.workloads import GPT, mlp
from .llama import Llama

Inputs = Callable[[int, str | torch.device, torch.dtype], tuple[Tensor, Tensor]]


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """How to build a model and one batch for it; ``batch`` is the usual number of samples per GPU.

    ``per_sample`` is how many units of throughput (``unit``) a sample has: 1 image, or the tokens
    of a sequence. ``family``: models of one family spend their time in the same kinds of kernels.
    ``layers``: the equal blocks of a language model.
    """

    name: str
    family: str
    build: Callable[..., nn.Module]
    inputs: Inputs
    batch: int
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
    dtype: str
    unit: str = "images"
    per_sample: int = 1
    layers: int = 0


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


def _gpt(
    name: str,
    layers: int,
    width: int,
    heads: int,
    length: int,
    batch: int,
    vocabulary: int = 50_304,
) -> ModelSpec:
    def build(positions: int = length, depth: int = layers) -> nn.Module:
        return GPT(vocabulary, positions, depth, width, heads)

    return _language(name, build, length, batch, layers)


def _llama(name: str, vocabulary: int, length: int, layers: int, *sizes: int) -> ModelSpec:
    def build(_: int = length, depth: int = layers) -> nn.Module:  # positions without parameters
        return Llama(vocabulary, depth, *sizes)

    return _language(name, build, length, 1, layers)


def _language(
    name: str, build: Callable[..., nn.Module], length: int, batch: int, layers: int
) -> ModelSpec:
    return ModelSpec(
        layers=layers,
        name=name,
        family="transformer",
        build=build,
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
        ModelSpec(
            name="mlp",
            family="mlp",
            build=mlp,
            inputs=_digits,
            batch=64,
            optimizer=_sgd,
            dtype="float32",
        ),
        *(
            ModelSpec(
                name=name,
                family="convolution",
                build=partial(_torchvision, name),
                inputs=_images,
                batch=batch,
                optimizer=_sgd,
                dtype="float32",
            )
            for name, batch in {"resnet50": 32, "vgg16": 64}.items()
        ),
        ModelSpec(
            name="vit_b16",
            family="transformer",
            build=lambda: _torchvision("vit_b_16"),
            inputs=_images,
            batch=64,
            optimizer=_adamw,
            dtype="bfloat16",
        ),
        _gpt("gpt-1b", 24, 2048, 16, 2048, 4),  # 1.3 billion parameters, as GPT-3 XL
        _gpt("gpt-7b", 32, 4096, 32, 2048, 1),  # 6.7 billion parameters, as GPT-3 6.7B
        *(
            _gpt(f"mpt-{name}", *sizes, 2048, 4, vocabulary=50_368)
            for name, sizes in {  # layers, width, heads: llm-foundry, scripts/train/yamls/pretrain
                "125m": (12, 768, 12),
                "350m": (24, 1024, 16),
                "760m": (24, 1536, 12),
                "1b": (24, 2048, 16),
                "3b": (32, 2560, 20),
                "7b": (32, 4096, 32),
                "13b": (40, 5120, 40),
                "30b": (48, 7168, 56),
                "70b": (80, 8192, 64),
            }.items()
        ),
        *(
            _gpt(f"gpt-{name}", *sizes, 2048, 1, vocabulary=51_200)
            for name, sizes in {  # layers, width, heads
                # Narayanan et al. 2021 (arXiv 2104.04473), table 1
                "3.6b": (30, 3072, 32),
                "18b": (40, 6144, 48),
                "39b": (48, 8192, 64),
                "76b": (60, 10_240, 80),
                "145b": (80, 12_288, 96),
                "310b": (96, 16_384, 128),
                "1t": (128, 25_600, 160),
                # Korthikanti et al. 2022 (arXiv 2205.05198), table 3
                "22b": (48, 6144, 64),
                "175b": (96, 12_288, 96),
                "530b": (105, 20_480, 128),
            }.items()
        ),
        # layers, width, heads of queries, of keys, hidden
        _llama("llama-8b", 128_256, 8192, 32, 4096, 32, 8, 14_336),
        _llama("llama-70b", 128_256, 8192, 80, 8192, 64, 8, 28_672),
        _llama("llama2-70b", 32_000, 4096, 80, 8192, 64, 8, 28_672),
    )
}


def model_spec(name: str, length: int = 0, layers: int = 0) -> ModelSpec:
    """The model called ``name``; of a language model so many ``layers``, and sequences of
    ``length`` tokens, if these are not 0.

    Raises ValueError with the nearest name, or if the model has no sequences.
    """
    if name not in MODELS:
        near = difflib.get_close_matches(name, MODELS, 1, 0.3)
        guess = f"; did you mean {near[0]}?" if near else ";"
        raise ValueError(f"no model {name!r}{guess} There are: {', '.join(MODELS)}")
    spec = MODELS[name]
    if not length and not layers:
        return spec
    if spec.unit != "tokens":
        raise ValueError(f"{name} has no sequences: leave out --length and --layers")
    length, layers = length or spec.per_sample, layers or spec.layers
    return dataclasses.replace(
        spec,
        build=partial(spec.build, length, layers),
        inputs=_tokens(length),
        per_sample=length,
        layers=layers,
    )


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
