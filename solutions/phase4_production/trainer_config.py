"""The trainer's configuration: one frozen dataclass. ``config_sources`` reads it.

Defaults are the recipe for the digits (``configs/digits.yaml`` names the same values). A wrong
value gives one sentence, before anything is loaded or sent. For a misspelt field it names the
nearest one, for a wrong type the right one, and for a wrong combination the reason.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

Model = Literal["small_cnn", "resnet18", "resnet50", "vit_b_16", "gpt"]
Strategy = Literal["auto", "ddp", "zero1", "zero2", "fsdp", "hybrid", "mesh"]
Pattern = Literal["auto", "ring", "tree", "halving_doubling", "hierarchical"]
Compression = Literal["none", "topk", "randomk", "powersgd", "int8", "onebit", "bf16"]
Auto = Literal["auto"]
TEXT_MODELS = ("gpt",)
BUCKETED = ("ddp", "zero1")  # gradients travel in buckets, so hooks apply
SHARDED = ("fsdp", "hybrid")
AXES = ("shard", "tensor", "pipeline", "context")  # of a mesh, beside data
UNMESHED = ("label_smoothing", "activation_checkpointing", "compile", "memory_gb")
RESIDUALS = ("topk", "randomk", "powersgd", "onebit")  # these keep the part that they have not sent


class ConfigError(ValueError):
    """An error in the configuration, in one sentence."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Everything that a run depends on. Batches are in samples (images, or sequences of text), over
    all ranks unless said otherwise."""

    # data: a folder with train/CLASS/*.png and val/CLASS/*.png (of gpt: train/*.txt and val/*.txt),
    # or "synthetic"
    data: str = ".distlab/digits"
    image_size: int = 8
    augment: Literal["none", "shift", "crop_flip"] = "shift"
    length: int = 64  # tokens of a sequence
    workers: int = 1  # processes per rank that read samples
    prefetch: int = 8  # batches per worker that are read ahead
    # model
    model: Model = "small_cnn"
    layers: int = 4  # of gpt, and the next two
    width: int = 64
    heads: int = 4
    compile: bool = False
    channels_last: bool = False
    activation_checkpointing: bool = False
    # recipe
    epochs: int = 18
    global_batch: int = 64
    micro_batch: int | Auto = "auto"  # per rank and forward
    optimizer: Literal["sgd", "adamw"] = "sgd"
    base_lr: float = 0.1  # for batches of base_batch samples
    base_batch: int = 64
    warmup_epochs: float = 1.0
    momentum: float = 0.9
    weight_decay: float = 0.0005
    label_smoothing: float = 0.05
    mixup: float = 0.0  # alpha of the Beta distribution, 0: no mixup
    ema_decay: float = 0.0  # 0: no average of the weights
    max_norm: float | None = None
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    seed: int = 0
    # parallelism
    parallel: Literal["course", "torch"] = "course"
    strategy: Strategy = "ddp"
    pattern: Pattern = "auto"
    compression: Compression = "none"
    compression_ratio: float = 0.01  # of topk and randomk: the share that is sent
    compression_rank: int = 2  # of powersgd
    offload: bool = False
    node_size: int | Auto = "auto"  # ranks that hold one copy under "hybrid"
    shard: int = 1  # ranks on the axes of "mesh"; the data axis takes what is left
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    schedule: Literal["gpipe", "1f1b", "zero-bubble"] = "1f1b"  # of the pipeline
    sequence_parallel: bool = False  # between the layers the tensor ranks share the positions
    memory_gb: float | None = None  # per rank; None: the GPU's, on a CPU no limit
    device: Literal["auto", "cpu", "cuda"] = "auto"
    # running
    checkpoints: str = ".distlab/train/checkpoints"
    save_every: int = 100  # optimizer steps; 0: at the end of the run only
    keep: int = 3
    async_save: bool = True
    resume: bool = True
    max_steps: int | None = None  # stop after so many, as a preempted job would
    logs: str = ".distlab/train/logs"
    log_every: int = 10
    evaluate_every: int = 1  # epochs
    metrics_port: int | None = None  # rank 0 serves Prometheus there
    metrics_host: str = "127.0.0.1"  # 0.0.0.0 lets other machines read, too
    profile_at: int | None = None  # step at which a Chrome trace is recorded
    watchdog_seconds: float = 600.0  # a rank that is silent for so long counts as hung

    def __post_init__(self) -> None:
        kinds = typing.get_type_hints(type(self))
        for name in FIELDS:
            object.__setattr__(self, name, converted(name, getattr(self, name), kinds[name]))
        self._check_numbers()
        self._check_combinations()

    def _check_numbers(self) -> None:
        """Ranges of single fields."""
        least = {
            **dict.fromkeys(("image_size", "epochs", "global_batch", "base_batch", "prefetch"), 1),
            **dict.fromkeys(("micro_batch", "node_size", "compression_rank", "keep"), 1),
            **dict.fromkeys(("log_every", "evaluate_every", "max_steps"), 1),
            **dict.fromkeys(("length", "layers", "width", "heads", *AXES), 1),
            **dict.fromkeys(("workers", "warmup_epochs", "momentum", "weight_decay"), 0),
            **dict.fromkeys(("mixup", "save_every", "metrics_port", "seed", "profile_at"), 0),
        }
        for name, limit in least.items():
            value = getattr(self, name)
            if isinstance(value, (int, float)) and not limit <= value < math.inf:
                raise ConfigError(f"{name} must be at least {limit}, got {value}")
        for name in ("base_lr", "max_norm", "memory_gb", "watchdog_seconds", "compression_ratio"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"{name} must be positive, got {value}")
        for name in ("label_smoothing", "ema_decay"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"{name} must be from 0 to below 1, got {getattr(self, name)}")
        if self.metrics_port is not None and self.metrics_port > 65535:
            raise ConfigError(f"metrics_port must be at most 65535, got {self.metrics_port}")
        if self.compression_ratio > 1:
            raise ConfigError(f"compression_ratio must be at most 1, got {self.compression_ratio}")

    def _check_combinations(self) -> None:
        """Fields that can't go together."""
        hooked = [n for n in ("pattern", "compression") if getattr(self, n) not in ("auto", "none")]
        if len(hooked) == 2:
            raise ConfigError(
                f"pattern {self.pattern} and compression {self.compression} both say how a bucket "
                "is reduced: choose one"
            )
        if hooked and self.strategy not in (*BUCKETED, "auto"):
            raise ConfigError(
                f"{hooked[0]} {getattr(self, hooked[0])} reduces buckets of gradients, which "
                f"strategy {self.strategy} has none of: use ddp or zero1"
            )
        if self.precision == "fp16" and self.compression in RESIDUALS:
            raise ConfigError(
                f"compression {self.compression} keeps what it has not sent, and an overflow of "
                "fp16 would stay in there: use bf16"
            )
        if self.offload and self.strategy not in (*SHARDED, "auto"):
            raise ConfigError(f"offload needs strategy fsdp or hybrid, not {self.strategy}")
        if self.parallel == "torch":
            if self.pattern != "auto" or self.compression not in ("none", "bf16", "powersgd"):
                raise ConfigError(
                    "parallel torch takes compression none, bf16 or powersgd, and no pattern"
                )
            if self.precision == "fp16":
                raise ConfigError("fp16 needs the loss scale of parallel course; use bf16")
        self.check_compile(self.strategy)
        self._check_model()
        self._check_mesh()

    def _check_model(self) -> None:
        """Fields that don't suit the model."""
        if self.model in VIT_SIZES and self.image_size % VIT_SIZES[self.model]:
            raise ConfigError(
                f"image_size {self.image_size} does not divide into the patches of "
                f"{VIT_SIZES[self.model]} pixels of {self.model}"
            )

        if self.model not in TEXT_MODELS:
            return
        for name in ("mixup", "channels_last"):
            if getattr(self, name):
                raise ConfigError(f"{name} is for images, and model {self.model} reads text")
        if self.width % self.heads:
            raise ConfigError(f"width {self.width} does not divide by {self.heads} heads")

    def _check_mesh(self) -> None:
        """Fields that don't suit a mesh, and fields of a mesh without one."""
        if self.strategy != "mesh":
            for axis in AXES:
                if getattr(self, axis) > 1:
                    size = getattr(self, axis)
                    raise ConfigError(f"{axis} {size} needs strategy mesh, not {self.strategy}")
            return
        if self.model not in TEXT_MODELS:
            raise ConfigError(f"strategy mesh cuts the layers of gpt, not of {self.model}")
        for name in UNMESHED:
            if getattr(self, name):
                raise ConfigError(f"strategy mesh does not take {name} {getattr(self, name)}")
        if self.parallel != "course" or self.precision != "fp32":
            raise ConfigError("strategy mesh takes parallel course and precision fp32 alone")

    def check_compile(self, strategy: str) -> None:
        """ConfigError if the work of ``strategy`` (``auto`` may have chosen it) can't be compiled.
        """
        if self.compile and self.parallel == "course" and strategy in SHARDED:
            raise ConfigError(
                f"compile: the hooks of strategy {strategy} are called by Python between layers; "
                "use ddp, zero1 or zero2, or parallel torch"
            )


VIT_SIZES = {"vit_b_16": 16}
FIELDS = {field.name: field for field in dataclasses.fields(Config)}


def converted(name: str, value: Any, kind: Any) -> Any:
    """``value`` as the annotation ``kind`` wants it; ConfigError names the expected type."""
    union = typing.get_origin(kind) in (typing.Union, types.UnionType)
    choices: list[Any] = []
    for each in typing.get_args(kind) if union else (kind,):
        if typing.get_origin(each) is Literal:
            choices += typing.get_args(each)
            if value in typing.get_args(each):
                return value
        elif each is float and not isinstance(value, bool):
            try:
                return float(value)  # YAML 1.1 reads 1e-3 as a string
            except (TypeError, ValueError):
                pass
        elif type(value) is each:
            return value
    words = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}
    plain = typing.get_args(kind) if union else (kind,)
    expected = [words[each] for each in plain if each in words] + [str(c) for c in choices]
    hint = nearest(str(value), [str(choice) for choice in choices])
    raise ConfigError(f"{name} must be {' or '.join(expected)}, not {value!r}{hint}")


def nearest(word: str, known: Sequence[str]) -> str:
    """A question that names the most similar of ``known``, or nothing."""
    found = difflib.get_close_matches(word, known, 1)
    return f"; did you mean {found[0]}?" if found else ""
