"""The wrong program, which the tests must notice: it builds an optimizer between joining and a
plain destroy, or rather imports what building one imports."""

from __future__ import annotations

import importlib
import sys

import torch
import torch.distributed as dist


def main() -> None:
    dist.init_process_group("gloo")
    sys.modules.pop("torch.distributed.nn.functional", None)
    importlib.import_module("torch.distributed.nn.functional")
    dist.all_reduce(torch.ones(1))
    dist.destroy_process_group()
