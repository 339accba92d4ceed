"""Make or refresh the virtual environment in .venv; standard library only.

A torch that the calling Python already has (an instructor's container) is kept: the environment
then sees the system's packages, and a constraint keeps pip from replacing torch.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / "distlab-stamp"
OLDEST = (3, 10)
TORCH_OLDEST = (2, 8)


def stop(message: str) -> None:
    """End with one line that says what to do."""
    sys.exit(f"environment: {message}")


def suitable_python() -> str:
    """This Python if it is new enough, else the newest on the path that is."""
    if sys.version_info >= OLDEST:
        return sys.executable
    for minor in range(20, OLDEST[1] - 1, -1):
        found = shutil.which(f"python3.{minor}")
        if found:
            return found
    stop(f"Python {OLDEST[0]}.{OLDEST[1]} or newer is needed, this is {sys.version.split()[0]}")
    raise AssertionError


def torch_of(python: str) -> str:
    """The version of torch that ``python`` has, if it is in range; empty otherwise."""
    code = "import importlib.metadata as m; print(m.version('torch'))"
    found = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    version = found.stdout.strip()
    numbers = version.split("+")[0].split(".")[:2]
    if found.returncode or not all(n.isdigit() for n in numbers):
        return ""
    return version if tuple(map(int, numbers)) >= TORCH_OLDEST else ""


def fingerprint() -> str:
    """Changes when the dependencies change."""
    text = (ROOT / "pyproject.toml").read_bytes() + str(ROOT).encode()
    return hashlib.sha256(text).hexdigest()


def up_to_date() -> bool:
    """Whether .venv was made from these dependencies, in this place."""
    return PYTHON.exists() and STAMP.exists() and STAMP.read_text() == fingerprint()


def main() -> None:
    """Make the environment if it is missing or stale."""
    if up_to_date():
        return
    python = suitable_python()
    torch_version = torch_of(python)
    print(
        "making the environment in .venv "
        + (f"with this machine's torch {torch_version}" if torch_version else "(5 GB, minutes)"),
        flush=True,
    )
    options = ["--system-site-packages"] if torch_version else []
    if subprocess.run([python, "-m", "venv", *options, str(VENV)], check=False).returncode:
        stop(f"{python} can't make a virtual environment; on Debian: apt install python3-venv")
    command = [str(PYTHON), "-m", "pip", "install", "--quiet", "--editable", str(ROOT)]
    if torch_version:
        constraint = VENV / "constraints.txt"
        constraint.write_text(f"torch=={torch_version}\n")
        command += ["--constraint", str(constraint)]
    quiet = os.environ | {"PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    if subprocess.run(command, env=quiet, check=False).returncode:
        stop("pip could not install the dependencies (see above); mend that and run it again")
    check_torchvision()
    STAMP.write_text(fingerprint())


def check_torchvision() -> None:
    """A torch and a torchvision of different builds don't work together: say so now."""
    code = "import torch, torchvision, json; print(json.dumps([torch.__version__]))"
    found = subprocess.run([str(PYTHON), "-c", code], capture_output=True, text=True, check=False)
    if found.returncode:
        last = (found.stderr.strip().splitlines() or ["unknown error"])[-1]
        stop(
            f"torch and torchvision don't fit together ({last}); install both from one index, "
            "for example: .venv/bin/pip install --force-reinstall torch torchvision"
        )
    assert json.loads(found.stdout)


if __name__ == "__main__":
    main()
