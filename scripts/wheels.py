"""Get all that ``make cpu`` installs into a folder, for machines without a network.

    make wheels                  # here, with a network: some 400 MB into wheels/
    make cpu WHEELS=wheels       # there, without one: nothing is downloaded

Both machines need the same system, the same processor and the same Python (3.12, say): a wheel is
built for one of each. ``make wheels CUDA=1`` takes torch's build for NVIDIA GPUs, which is 3 GB
larger; there it is installed by ``make env WHEELS=wheels``. With LOCKED=1 the versions are those of
requirements.lock.
"""

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

import environment  # the script beside this one


def get(python, folder, *arguments):
    """Download wheels into ``folder``; what has none is built here."""
    command = [str(python), "-m", "pip", "wheel", "--wheel-dir", str(folder), *arguments]
    settings = dict(os.environ, PIP_DISABLE_PIP_VERSION_CHECK="1")
    done = subprocess.run(command, env=settings, stderr=subprocess.PIPE, check=False)
    if done.returncode:
        lines = done.stderr.decode(errors="replace").splitlines() or ["no message"]
        errors = [line for line in lines if line.startswith("ERROR")] or lines
        environment.stop("the wheels could not be had (is there a network?): " + errors[-1])


def constraints(folder):
    """The versions of torch and torchvision whose wheels are in ``folder``, as pip takes them."""
    names = [path.name for path in sorted(folder.glob("torch*.whl"))]
    found = [re.match(r"(torch|torchvision)-([^-]+)-", name) for name in names]
    return ["==".join(match.groups()) for match in found if match]


def main(arguments=None):
    """Fill the folder, and say how it is used."""
    parser = argparse.ArgumentParser(description="Get all wheels for a machine without a network.")
    parser.add_argument("folder", nargs="?", type=Path, default=environment.ROOT / "wheels")
    parser.add_argument("--cuda", action="store_true", help="torch's build for NVIDIA GPUs")
    options = parser.parse_args(arguments)
    course = environment.Environment()
    python = course.python if course.python.exists() else sys.executable
    wanted = ["setuptools>=70.1", *course.requirements()]
    options.folder.mkdir(parents=True, exist_ok=True)
    limits = []
    if not options.cuda:
        builds = [w for w in wanted if environment.name_of(w) in ("torch", "torchvision")]
        get(python, options.folder, *builds, "--index-url", environment.INDEX + "cpu")
        limits = constraints(options.folder)
    file = options.folder / "constraints.txt"
    file.write_text("".join(line + "\n" for line in limits), encoding="utf-8")
    get(python, options.folder, *wanted, "--find-links", str(options.folder), "-c", str(file))
    file.unlink()
    sizes = [path.stat().st_size for path in options.folder.glob("*.whl")]
    target = "env" if options.cuda else "cpu"
    print(f"{len(sizes)} wheels, {sum(sizes) / 1e6:.0f} MB, in {options.folder}")
    print(f"without a network, with the same system and Python: make {target} WHEELS=FOLDER")


if __name__ == "__main__":
    main()
