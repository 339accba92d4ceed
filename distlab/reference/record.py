"""Record reference runs: ``python -m distlab.record [--device cpu|cuda] [--workload NAME]``."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

import torch

from ..course.catalogue import root
from .compare import record, reference_path
from .workloads import WORKLOADS


def main() -> int:
    """Train each canonical workload with one process on one device and write what it did."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=default, choices=["cpu", "cuda"])
    parser.add_argument("--workload", choices=sorted(WORKLOADS), help="default: all")
    parser.add_argument("--out", type=Path, default=root() / "references", help="folder")
    options = parser.parse_args()
    if int(os.environ.get("RANK", "0")):
        return 0  # under torchrun one process records, as the yardstick is one device
    if options.device == "cuda" and not torch.cuda.is_available():
        print("record: this machine has no CUDA device; use --device cpu", file=sys.stderr)
        return 2
    torch.set_num_threads(1)
    for name in [options.workload] if options.workload else sorted(WORKLOADS):
        data = record(WORKLOADS[name], options.device)
        path = reference_path(options.device, name, options.out)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            print(f"record: {path} can't be written: {error.strerror}", file=sys.stderr)
            return 2
        print(f"{path}: {len(data['losses'])} steps, last loss {data['losses'][-1]:.4f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
