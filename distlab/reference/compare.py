"""Recorded training runs: the real results of one process on one device, to compare others with.

A record holds the workload's configuration and its hash, and the data's hash: some data differ
between versions of Python, and then nothing can be compared. It holds the loss and gradient norm of
every step, and a float64 sum and norm of every parameter at the end. It also holds speed, memory,
machine and versions, and a hash over all of that. Runs are in float64: in float32 the order of
summation, different on each device, moves the loss of digits_mlp by 7e-3 within 345 steps. A GPU's
run is the yardstick. The CPU's run stands in where no GPU run has the data of this machine.
"""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..course.catalogue import root
from . import sealed
from .provenance import peak_memory, provenance
from .sealed import digest
from .workloads import DATA, Workload, build_model, build_optimizer, data_hash, epoch_order

# float32 on CPU ranks against the record: rounding (6e-8 per operation) grows with each step of
# training. Measured against float64: digits_mlp (SGD) 1.3e-6 over all 345 steps. On an H100 1.5e-6
# over 140 and 7e-3 over all, because one ReLU falls to the other side. digits_cnn (AdamW, whose
# steps follow the sign of tiny gradients) 2e-5 over 46 steps and 5e-3 over 230. So compare it over
# few steps, or in float64.
LOSS_TOLERANCE = 1e-4


class OtherData(ValueError):
    """The record was made with other data than this machine has: nothing
    can be compared with it."""


def global_batches(chosen: Workload, epochs: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The global batches in order: (inputs, targets) of at most ``global_batch_size`` samples."""
    return islice(_all_batches(chosen, epochs), chosen.steps)


def _all_batches(chosen: Workload, epochs: int) -> Iterator[tuple[Tensor, Tensor]]:
    inputs, targets = DATA[chosen.data]().tensors
    for epoch in range(epochs):
        order = epoch_order(len(targets), chosen.seed, epoch)
        for start in range(0, len(order), chosen.global_batch_size):
            batch = order[start : start + chosen.global_batch_size]
            yield inputs[batch], targets[batch]


def train_alone(
    chosen: Workload,
    *,
    epochs: int,
    steps: int | None = None,
    device: str = "cpu",
    dtype: torch.dtype = torch.float64,
) -> tuple[list[float], list[float], torch.nn.Module]:
    """(losses, gradient norms, trained model) of one process: the plain loop, of ``steps`` steps
    at most."""
    model = build_model(chosen.model, chosen.seed, dtype).to(device)
    optimizer = build_optimizer(chosen, model)
    losses, norms = [], []
    for inputs, targets in islice(global_batches(chosen, epochs), steps):
        optimizer.zero_grad()
        inputs = inputs.to(device, dtype) if inputs.is_floating_point() else inputs.to(device)
        loss = F.cross_entropy(model(inputs), targets.to(device).flatten())
        loss.backward()
        grads = [p.grad.double().norm() for p in model.parameters() if p.grad is not None]
        norms.append(torch.stack(grads).norm().item())
        optimizer.step()
        losses.append(loss.item())
    return losses, norms, model


def record(chosen: Workload, device: str) -> dict[str, Any]:
    """Train the workload with one process on one device and return its record."""
    dtype = torch.float64
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    begun = time.perf_counter()
    losses, norms, model = train_alone(chosen, epochs=chosen.epochs, device=device, dtype=dtype)
    seconds = time.perf_counter() - begun
    samples = sum(len(targets) for _, targets in global_batches(chosen, chosen.epochs))
    configuration = asdict(chosen)
    data = {
        "configuration": configuration,
        "configuration_hash": digest(configuration),
        "data_hash": data_hash(chosen.data),
        "losses": losses,
        "gradient_norms": norms,
        "parameters": {
            name: {"sum": p.double().sum().item(), "norm": p.double().norm().item()}
            for name, p in model.named_parameters()
        },
        "dtype": str(dtype).removeprefix("torch."),
        "samples_per_second": samples / seconds,
        "peak_memory_bytes": peak_memory(device),
    }
    return data | provenance(device)


def reference_path(device: str, name: str, folder: Path | None = None) -> Path:
    """The path of the record of a workload on a device."""
    return (folder or root() / "references") / device / f"{name}.json"


def load(device: str, name: str, folder: Path | None = None) -> dict[str, Any]:
    """A record whose hashes match; otherwise ValueError says in one line what is wrong with it."""
    again = f"distlab record --device {device} --workload {name}"
    path = reference_path(device, name, folder)
    return sealed.read(path, f"reference run {device}/{path.name}", again)


def expect_same_data(reference: dict[str, Any]) -> None:
    """Raise OtherData unless the record was made with the data of this machine."""
    name, data = (reference["configuration"][key] for key in ("name", "data"))
    if reference["data_hash"] != data_hash(data):
        raise OtherData(
            f"the reference run of {name} can't be compared: its {data} differs from the one here "
            f"(recorded with Python {reference['python']}, this is {platform.python_version()})"
        )


def best(name: str) -> tuple[dict[str, Any], str]:
    """The GPU record if there is one with these data, else the CPU's, and a note that names it.

    Raises OtherData if the training data differ from the data here.
    """
    data, note = _best(name)
    expect_same_data(data)
    return data, note


def _best(name: str) -> tuple[dict[str, Any], str]:
    if reference_path("cuda", name).exists():
        data = load("cuda", name)
        if data["data_hash"] == data_hash(data["configuration"]["data"]):
            return data, f"recorded on {data['device_name']} in float64"
    return load("cpu", name), "recorded on a CPU in float64; no GPU run has these data"


def compare(reference: dict[str, Any], losses: Sequence[float], tolerance: float) -> list[str]:
    """The first step, in words, at which ``losses`` leave the record by more than ``tolerance``."""
    for step, (got, want) in enumerate(zip(losses, reference["losses"], strict=False)):
        if not math.isclose(got, want, rel_tol=tolerance, abs_tol=tolerance):
            return [
                f"step {step}: loss {got:.6f}, the reference run has {want:.6f} "
                f"(tolerance {tolerance:g})"
            ]
    return []


def compare_parameters(
    reference: dict[str, Any], model: torch.nn.Module, tolerance: float
) -> list[str]:
    """Parameters whose norm leaves the record by more than ``tolerance``, relatively."""
    problems = []
    for name, p in model.named_parameters():
        want, got = reference["parameters"][name]["norm"], p.detach().double().norm().item()
        if not math.isclose(got, want, rel_tol=tolerance):
            problems.append(f"{name}: norm {got:.9g}, the reference run has {want:.9g}")
    return problems
