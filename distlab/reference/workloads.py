"""The data and the models that every phase trains on: real and small.

Random numbers for weights and the split are drawn on the CPU, so that runs on any device start
equal. The digits are 1,797 real 8×8 images (Alpaydin & Kaynak 1998, CC BY 4.0), as shipped with
scikit-learn: the same everywhere. The text is the documentation that every Python has in its
``pydoc_data.topics`` (Python Software Foundation), about 460,000 characters. It differs a little
between versions of Python, so trainings on it are compared by ``data_hash`` first.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

TEST_SIZE = 360
CHARACTERS = "\n" + "".join(map(chr, range(32, 127)))  # 96: divides by 2, 4, 8
CONTEXT = 64  # tokens


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One canonical training run; ``global_batch_size`` samples per optimizer step.

    ``steps``: optimizer steps, where they are fewer than ``epochs`` have.
    """

    name: str
    model: str
    data: str
    optimizer: str
    lr: float
    momentum: float = 0.0
    weight_decay: float = 0.0
    global_batch_size: int = 64
    epochs: int = 20
    steps: int | None = None
    seed: int = 0


WORKLOADS = {
    w.name: w
    for w in (
        Workload(
            name="digits_mlp",
            model="mlp",
            data="digits",
            optimizer="sgd",
            lr=0.1,
            momentum=0.9,
            epochs=15,
        ),
        Workload(
            name="digits_cnn",
            model="cnn",
            data="digits",
            optimizer="adamw",
            lr=3e-3,
            weight_decay=0.01,
            epochs=10,
        ),
        Workload(
            name="tiny_gpt",
            model="tiny_gpt",
            data="text",
            optimizer="adamw",
            lr=1e-3,
            weight_decay=0.01,
            global_batch_size=16,
            epochs=1,
            steps=100,
        ),
    )
}


def workload(name: str) -> Workload:
    """The workload called ``name``; ValueError lists the known names."""
    if name not in WORKLOADS:
        raise ValueError(f"no workload {name!r}: there are {', '.join(WORKLOADS)}")
    return WORKLOADS[name]


@functools.cache
def _digits_table() -> Tensor:
    """(1797, 65): 64 pixels of 0 … 16 and the label; read without importing scikit-learn (1 s)."""
    spec = importlib.util.find_spec("sklearn")
    if spec is None or spec.origin is None:
        raise RuntimeError("the digits come with scikit-learn: pip install scikit-learn")
    file = Path(spec.origin).parent / "datasets" / "data" / "digits.csv.gz"
    return torch.from_numpy(np.loadtxt(file, delimiter=","))


@functools.cache
def digits(train: bool = True) -> TensorDataset:
    """Images (n, 1, 8, 8) float32 in -1 … 1 and labels (n,) int64; 1,437 to train, 360 to test."""
    table = _digits_table()
    order = torch.randperm(len(table), generator=torch.Generator().manual_seed(1797))
    chosen = order[TEST_SIZE:] if train else order[:TEST_SIZE]
    images = (table[chosen, :64] / 8 - 1).float().view(-1, 1, 8, 8)
    return TensorDataset(images, table[chosen, 64].long())


@functools.cache
def _table() -> Tensor:
    """(128,) the token of each ASCII code."""
    table = torch.full((128,), CHARACTERS.index("?"))
    table[[ord(c) for c in CHARACTERS]] = torch.arange(len(CHARACTERS))
    return table


def encode(string: str) -> Tensor:
    """The tokens (len(string),) int64: indices in CHARACTERS, that of ``?`` for all others."""
    return _table()[torch.tensor(list(string.encode("ascii", "replace")), dtype=torch.int64)]


def decode(tokens: Tensor) -> str:
    """The string of tokens of any shape."""
    return "".join(CHARACTERS[token] for token in tokens.flatten().tolist())


@functools.cache
def text(train: bool = True) -> TensorDataset:
    """Tokens (n, 64) int64 and for each the token that comes next (n, 64), from this Python's docs.

    All topics stand one after the other by name; the last tenth is for the test. Windows don't
    overlap.
    """
    from pydoc_data.topics import topics

    tokens = encode("\n\n".join(topics[name] for name in sorted(topics)))
    border = len(tokens) * 9 // 10
    part = tokens[:border] if train else tokens[border:]
    count = (len(part) - 1) // CONTEXT
    inputs, targets = part[: count * CONTEXT], part[1 : count * CONTEXT + 1]
    return TensorDataset(inputs.view(count, CONTEXT), targets.view(count, CONTEXT))


DATA = {"digits": digits, "text": text}


@functools.cache
def data_hash(name: str) -> str:
    """SHA-256 of the training samples of a data set: it proves which data a run has trained on."""
    found = hashlib.sha256()
    for tensor in DATA[name]().tensors:
        found.update(str(tuple(tensor.shape)).encode() + tensor.numpy().tobytes())
    return found.hexdigest()


def mlp() -> nn.Module:
    """64-128-64-10 with ReLU: 17,226 parameters."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(64, 128),
        nn.ReLU(),
        nn.Linear(128, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def cnn() -> nn.Module:
    """Two convolutions and two linear layers: 15,270 parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(512, 20),
        nn.ReLU(),
        nn.Linear(20, 10),
    )


class Block(nn.Module):
    """One layer of the GPT: attention and a four times wider MLP, each after a layer norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """(batch, time, width) to the same."""
        q, k, v = self.qkv(self.norm_attention(x_BTD)).chunk(3, dim=-1)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BTD = x_BTD + self.out(mixed.transpose(1, 2).flatten(2))
        return x_BTD + self.down(F.gelu(self.up(self.norm_mlp(x_BTD))))


class GPT(nn.Module):
    """A decoder-only transformer with learned positions and tied embeddings.

    12·layers·width² + (vocabulary + length)·width parameters, about. Source: Radford et al. 2019
    (GPT-2).
    """

    def __init__(self, vocabulary: int, length: int, layers: int, width: int, heads: int) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"width {width} does not divide by {heads} heads")
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Tokens (batch, time) to logits (batch · time, vocabulary)."""
        places_T = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        x_BTD = self.tokens(tokens_BT) + self.places(places_T)
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return self.head(self.norm(x_BTD)).flatten(0, 1)


def tiny_gpt() -> nn.Module:
    """Four layers of width 64 with 4 heads over 96 characters: 210,304 parameters."""
    return GPT(len(CHARACTERS), CONTEXT, layers=4, width=64, heads=4)


MODELS = {"mlp": mlp, "cnn": cnn, "tiny_gpt": tiny_gpt}


def build_model(name: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The model ``name`` with weights drawn on the CPU from ``seed``; the global RNG is kept."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return MODELS[name]().to(dtype)


def build_optimizer(chosen: Workload, model: nn.Module) -> torch.optim.Optimizer:
    """The workload's optimizer over the model's parameters."""
    if chosen.optimizer == "sgd":
        return torch.optim.SGD(
            model.parameters(),
            lr=chosen.lr,
            momentum=chosen.momentum,
            weight_decay=chosen.weight_decay,
        )
    return torch.optim.AdamW(model.parameters(), lr=chosen.lr, weight_decay=chosen.weight_decay)


def epoch_order(size: int, seed: int, epoch: int) -> Tensor:
    """The order in which an epoch visits the samples: the definition of exercise 1.1."""
    generator = torch.Generator().manual_seed(seed + epoch)
    return torch.randperm(size, generator=generator)
