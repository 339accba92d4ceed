"""Pin every package that the course needs: ``make lock`` writes ``requirements.lock``.

pyproject.toml has ranges, which are for using the course: pip takes the newest. The lock has one
version of each package, for reproducing what somebody has seen: ``make cpu LOCKED=1``. One file
holds for Linux and macOS and for Python 3.10 and newer; markers say what is for which. There are no
hashes in it: torch's builds for the CPU have the version of the others, and hashes of their own.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "requirements.lock"
HEADER = """\
# Every package of the course with its version, written by `make lock` from pyproject.toml.
# To install exactly these: `make cpu LOCKED=1`. pyproject.toml has the ranges that work.
"""
OPTIONS = ("--universal", "--python-version", "3.10", "--upgrade", "--no-annotate", "--no-header")


def main() -> None:
    """Resolve and write."""
    uv = shutil.which("uv") or str(Path(sys.executable).with_name("uv"))
    command = [uv, "pip", "compile", "--quiet", *OPTIONS, "pyproject.toml"]
    settings = {k: v for k, v in os.environ.items() if not k.startswith(("PIP_", "UV_"))}
    try:
        done = subprocess.run(command, cwd=ROOT, env=settings, capture_output=True, check=True)
    except FileNotFoundError:
        sys.exit("lock: uv resolves the versions, and is not there: .venv/bin/pip install uv")
    except subprocess.CalledProcessError as error:
        sys.exit("lock: " + error.stderr.decode(errors="replace").strip())
    LOCK.write_text(HEADER + done.stdout.decode(), encoding="utf-8")
    print(f"{LOCK.name}: {len(done.stdout.splitlines())} pinned versions")


if __name__ == "__main__":
    main()
