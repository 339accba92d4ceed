"""Make or refresh the virtual environment in .venv; standard library only, any Python 3 can run it.

A torch that the calling Python already has (an instructor's container) is kept: the environment
sees that Python's packages, torch is left out of what is installed, and a constraint keeps the
other packages from pulling in another one.
"""

import hashlib
import os
import re
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


def stop(message):
    """End with one line that says what to do."""
    sys.exit("environment: " + message)


def ask(python, code):
    """What ``python`` prints for ``code``; empty if it can't."""
    try:
        found = subprocess.run(
            [python, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return ""
    return found.stdout.decode().strip()


def suitable_python():
    """This Python if it is new enough, else the newest on the path that is and that runs."""
    if sys.version_info >= OLDEST:
        return sys.executable
    for minor in range(20, OLDEST[1] - 1, -1):
        found = shutil.which("python3.{}".format(minor))  # noqa: UP032 (this runs on old Pythons)
        if found and ask(found, "print(1)"):
            return found
    wanted = ".".join(map(str, OLDEST))
    version = sys.version.split()[0]
    return stop("Python " + wanted + " or newer is needed, this is " + version)


def dependencies():
    """The requirements in pyproject.toml, in order."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    block = re.search(r"^dependencies = \[\n(.*?)^\]", text, re.MULTILINE | re.DOTALL)
    assert block, "pyproject.toml has no list of dependencies"
    return re.findall(r'^ *"([^"]+)"', block.group(1), re.MULTILINE)


def stamp():
    """What the environment was made for: the place (scripts name it) and the dependencies."""
    digest = hashlib.sha256("\n".join(dependencies()).encode()).hexdigest()
    return str(ROOT) + "\n" + digest + "\n"


def up_to_date():
    """Whether .venv was made from these dependencies, in this place, and its Python is there."""
    return PYTHON.exists() and STAMP.exists() and STAMP.read_text() == stamp()


def usable():
    """Whether .venv can be kept and only lacks something: its Python runs, in the place it is."""
    moved = STAMP.exists() and not STAMP.read_text().startswith(str(ROOT) + "\n")
    return not moved and bool(ask(str(PYTHON), "import pip; print(1)"))


def torch_of(python):
    """The version of torch that ``python`` has, if it is in range; empty otherwise."""
    version = ask(python, "import importlib.metadata as m; print(m.version('torch'))")
    numbers = re.match(r"(\d+)\.(\d+)", version)
    return version if numbers and tuple(map(int, numbers.groups())) >= TORCH_OLDEST else ""


def make(python, torch_version):
    """Make the bare environment; with a torch to keep, it sees the packages of ``python``."""
    options = ["--clear", *(["--system-site-packages"] if torch_version else [])]
    if subprocess.run([python, "-m", "venv", *options, str(VENV)], check=False).returncode:
        stop(python + " can't make a virtual environment; on Debian: apt install python3-venv")
    if torch_version and not torch_of(str(PYTHON)):
        # the environment of an environment sees the base's packages only: name the caller's
        purelib = "import sysconfig; print(sysconfig.get_path('purelib'))"
        theirs, ours = ask(python, purelib), ask(str(PYTHON), purelib)
        (Path(ours) / "caller.pth").write_text(theirs + "\n")


def pip(arguments):
    """Run pip in the environment; its progress is shown in a terminal, a failure in one line."""
    quiet = [] if sys.stdout.isatty() else ["--quiet"]
    environment = dict(os.environ, PIP_DISABLE_PIP_VERSION_CHECK="1")
    command = [str(PYTHON), "-m", "pip", "install", *quiet, *arguments]
    done = subprocess.run(command, env=environment, stderr=subprocess.PIPE, check=False)
    if done.returncode:
        lines = done.stderr.decode(errors="replace").splitlines()
        errors = [line for line in lines if line.startswith("ERROR")] or lines or ["no message"]
        stop("pip could not install the dependencies (is there a network?): " + errors[-1])


def install():
    """Install what is missing, and the course itself in place; a torch that is there stays."""
    wanted, constraint, torch_version = dependencies(), [], torch_of(str(PYTHON))
    if torch_version:
        wanted = [name for name in wanted if not re.match(r"torch\b", name)]
        file = VENV / "constraints.txt"
        file.write_text("torch==" + torch_version + "\n")
        constraint = ["--constraint", str(file)]
    pip(["setuptools>=70.1", *wanted, *constraint])
    pip(["--no-deps", "--no-build-isolation", "--editable", str(ROOT)])
    torchrun = VENV / "bin" / "torchrun"
    if not torchrun.exists():  # that of a kept torch would start ranks with the other Python
        code = "from torch.distributed.run import main\nmain()\n"
        torchrun.write_text("#!" + str(PYTHON) + "\n" + code)
        torchrun.chmod(0o755)


def warn_of_torchvision():
    """A torch and a torchvision of different builds don't work together; phase 4 needs both."""
    if not ask(str(PYTHON), "import torch, torchvision; print(1)"):
        print(
            "environment: torch and torchvision don't fit together, which phase 4 will need: "
            "install both from one index (.venv/bin/pip install --force-reinstall …)"
        )


def main():
    """Make the environment if it is missing or stale."""
    if up_to_date():
        return
    if usable():
        print("refreshing .venv", flush=True)
    else:
        python = suitable_python()
        torch_version = torch_of(python)
        kept = "with this machine's torch " + torch_version
        size = "(torch and the rest: 5 GB, some minutes)"
        print("making .venv " + (kept if torch_version else size), flush=True)
        make(python, torch_version)
    install()
    warn_of_torchvision()
    STAMP.write_text(stamp())


if __name__ == "__main__":
    main()
