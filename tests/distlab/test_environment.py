"""The environment step: keeps what fits, says how much it will download and what is wrong."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import runpy
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from distlab.course.catalogue import root

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module, at work in a folder of the test's own."""
    file = root() / "scripts" / "environment.py"
    spec = importlib.util.spec_from_file_location("environment", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    (tmp_path / "pyproject.toml").write_bytes((root() / "pyproject.toml").read_bytes())
    monkeypatch.setattr(module, "ROOT", tmp_path)
    return module


@pytest.fixture
def environment(script: ModuleType) -> Any:
    """The environment in .venv, of which only the folder for programs is there."""
    found = script.Environment()
    found.python.parent.mkdir(parents=True)
    return found


def test_dependencies_are_those_of_pyproject(script: ModuleType) -> None:
    project = tomllib.loads((root() / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert script.dependencies() == project["dependencies"]
    for group, wanted in project["optional-dependencies"].items():
        assert script.dependencies(group) == wanted


def test_stale_when_dependencies_or_place_change(
    script: ModuleType, environment: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not environment.up_to_date()
    environment.python.symlink_to(sys.executable)
    environment.stamp_file.write_text(environment.stamp())
    assert environment.up_to_date()
    monkeypatch.setattr(script, "dependencies", lambda: ["torch>=9"])
    assert not environment.up_to_date()
    assert environment.usable()  # only lacks something: it is kept
    environment.stamp_file.write_text("/somewhere/else\n")
    assert not environment.usable()  # its scripts name the old place


@pytest.mark.parametrize(
    ("version", "kept", "by_oldest"),
    [
        ("2.8.0", True, True),
        ("2.15+cpu", True, False),
        ("2.8.0a0+nv25", True, True),
        ("2.7.1", False, False),
        ("", False, False),
    ],
)
def test_torch_in_range_is_kept(
    script: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    version: str,
    kept: bool,
    by_oldest: bool,
) -> None:
    monkeypatch.setattr(script, "version_of", lambda python, package: version)
    assert script.Environment().torch_of("python3") == (version if kept else "")
    assert script.Environment(oldest=True).torch_of("python3") == (version if by_oldest else "")


def test_oldest_asks_for_the_torch_that_the_course_begins_with(script: ModuleType) -> None:
    oldest = script.Environment(oldest=True)
    assert oldest.folder.name == ".venv-oldest"
    changed = set(oldest.requirements()) - set(script.dependencies())
    assert changed == {"torch==2.8.*"}


def test_oldest_takes_the_oldest_python_where_there_is_one(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    oldest = script.Environment(oldest=True)
    monkeypatch.setattr(script.Environment, "torch_of", lambda self, python: "")
    monkeypatch.setattr(script.sys, "version_info", (3, 12, 1))
    monkeypatch.setattr(script.shutil, "which", lambda name: None)
    assert oldest.suitable_python() == sys.executable
    there = {"python3.10": sys.executable}
    monkeypatch.setattr(script.shutil, "which", there.get)
    assert oldest.suitable_python() == there["python3.10"]
    monkeypatch.setattr(script.shutil, "which", lambda name: None)
    monkeypatch.setattr(script.sys, "version_info", (3, 14, 0))
    with pytest.raises(SystemExit, match=r"^environment: Python 3\.10 to 3\.13 is needed, .*$"):
        oldest.suitable_python()


def test_old_python_is_one_line(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "OLDEST_PYTHON", (4, 0))
    monkeypatch.setattr(script.shutil, "which", lambda name: None)
    with pytest.raises(SystemExit, match=r"^environment: Python 4\.0 or newer is needed, .*$"):
        script.Environment().suitable_python()


def test_environment_of_an_old_python_is_not_deleted(
    script: ModuleType, environment: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment.python.symlink_to(sys.executable)
    monkeypatch.setattr(script, "OLDEST_PYTHON", (4, 0))
    with pytest.raises(SystemExit, match=r"^environment: \.venv has Python 3\.\d+, and 4\.0 or .*"):
        environment.usable()


@pytest.mark.parametrize("stamp", [None, "/somewhere/else\n", "this"])
def test_an_environment_behind_a_link_stays(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stamp: str | None
) -> None:
    """Making or refreshing it through the link would destroy what another folder works with."""
    theirs = tmp_path / "another course" / ".venv"
    (theirs / "bin").mkdir(parents=True)
    (theirs / "bin" / "python").symlink_to(sys.executable)
    (tmp_path / ".venv").symlink_to(theirs)
    ours = script.Environment()
    if stamp:
        ours.stamp_file.write_text(ours.stamp() if stamp == "this" else stamp)
    monkeypatch.setattr(script.Environment, "pip", lambda *_: pytest.fail("pip changes it"))
    if stamp == "this":
        script.main([])  # nothing to do: it may be used
        return
    for arguments in ([], ["--cpu"]):
        refused = r"^environment: \.venv is a link, and what is behind it would change: rm \.venv, "
        with pytest.raises(SystemExit, match=refused):
            script.main(arguments)
    assert (theirs / "bin" / "python").is_symlink()


def test_failing_pip_is_one_line(environment: Any) -> None:
    program = "#!/bin/sh\necho 'WARNING: retrying' >&2\necho 'ERROR: no network' >&2\nexit 1\n"
    environment.python.write_text(program)
    environment.python.chmod(0o755)
    with pytest.raises(SystemExit, match=r"^environment: pip could not .*: ERROR: no network$"):
        environment.pip("torch")


# -- what will be downloaded ----------------------------------------------------------------------
def test_download_is_told_with_cuda(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script.platform, "system", lambda: "Linux")
    everything = [script.name_of(requirement) for requirement in script.dependencies()]
    assert re.match(
        r"about 3\.2 GB to download \(5 GB on disk\), .*\n.*`make cpu` first: .* 200 MB\.$",
        script.download(everything),
    )


@pytest.mark.parametrize(
    ("system", "missing", "told"),
    [
        ("Darwin", ["torch", "torchvision"], "about 215 MB to download: torch, torchvision"),
        ("Linux", ["rich"], "about 1 MB to download: rich"),
        (
            "Linux",
            ["jupyter", "rich", "ruff", "pyyaml", "pytest", "numpy"],
            "about 86 MB to download: jupyter, rich, ruff, pyyaml and 2 more",
        ),
        ("Linux", [], "nothing to download"),
    ],
)
def test_download_is_told(
    script: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    system: str,
    missing: list[str],
    told: str,
) -> None:
    monkeypatch.setattr(script.platform, "system", lambda: system)
    assert script.download(missing) == told


def test_sizes_are_those_of_dependencies(script: ModuleType) -> None:
    every = [*script.dependencies(), *script.dependencies("site"), *script.dependencies("browser")]
    assert set(script.MEGABYTES) <= set(map(script.name_of, every))


def test_missing_is_what_is_absent_or_too_old(environment: Any) -> None:
    environment.python.symlink_to(sys.executable)
    environment.python = sys.executable
    asked = ["pytest>=8", "pytest>=999", "no-such-package-here", "tomli; python_version < '3'"]
    assert environment.missing(asked) == ["pytest", "no-such-package-here"]
    environment.python = "/nowhere/python"
    assert environment.missing(["pytest>=8"]) == ["pytest"]


# -- the CPU build, with stand-ins for torch, torchvision and their two indexes -------------------
BACKEND = """
import zipfile
def build_editable(folder, config_settings=None, metadata_directory=None):
    name = "distlab-1-py3-none-any.whl"
    with zipfile.ZipFile(folder + "/" + name, "w") as wheel:
        wheel.writestr("distlab-1.dist-info/METADATA", "Metadata-Version: 2.1\\nName: distlab\\nVersion: 1\\n")
        wheel.writestr("distlab-1.dist-info/WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        wheel.writestr("distlab-1.dist-info/RECORD", "")
    return name
"""  # noqa: E501


def put(index: Path, name: str, version: str, needs: str = "") -> None:
    """A wheel of ``name`` in a package index that is a folder; importing it imports its needs."""
    folder, info = index / name, f"{name}-{version}.dist-info"
    folder.mkdir(parents=True, exist_ok=True)
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    code = f"__version__ = {version!r}\n"
    if needs:
        metadata += f"Requires-Dist: {needs}\n"
        module, wanted = needs.split("==")
        build = version.partition("+")[2]
        wanted += "+" + build if build else ""
        code += f"import {module}\nassert {module}.__version__ == {wanted!r}\n"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}/__init__.py", code)
        wheel.writestr(f"{info}/METADATA", metadata)
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")
    links = [f'<a href="{file.name}">{file.name}</a>' for file in sorted(folder.glob("*.whl"))]
    (folder / "index.html").write_text("<!DOCTYPE html>" + "<br>".join(links))


@pytest.fixture
def course(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script in a small course whose packages come from folders: PyPI has the newest torch,
    PyTorch's index the CPU build of the one before."""
    pypi = tmp_path / "pypi"
    put(pypi, "torch", "2.15.0")
    put(pypi, "torch", "2.16.0")
    put(pypi, "torchvision", "0.29.0", "torch==2.15.0")
    put(pypi, "torchvision", "0.30.0", "torch==2.16.0")
    put(pypi, "setuptools", "99")
    put(pypi, "rich", "1.0")
    put(pypi, "more", "1.0")
    put(tmp_path / "whl" / "cpu", "torch", "2.15.0+cpu")
    put(tmp_path / "whl" / "cpu", "torchvision", "0.29.0+cpu", "torch==2.15.0")
    monkeypatch.setattr(script, "INDEX", f"file://{tmp_path}/whl/")
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_CONSTRAINT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_INDEX_URL", f"file://{pypi}")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
    (tmp_path / "backend.py").write_text(BACKEND)
    depend(tmp_path, "torch>=2.8", "torchvision", "rich")
    return script


def depend(folder: Path, *requirements: str) -> None:
    """Write the course's pyproject.toml."""
    lines = "".join(f'    "{requirement}",\n' for requirement in requirements)
    (folder / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
        f'[project]\nname = "distlab"\nversion = "1"\ndependencies = [\n{lines}]\n'
    )


@pytest.fixture
def own(course: ModuleType) -> Callable[..., str]:
    """A .venv as a user makes it: ``own(*arguments)`` runs its pip, and says what is there then."""
    found = course.Environment()
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", found.folder], check=True)
    purelib = course.ask(found.python, "import sysconfig; print(sysconfig.get_path('purelib'))")
    # making one takes seconds; importing it here would take setuptools' distutils from others
    pip = importlib.metadata.distribution("pip").locate_file("pip")
    (Path(purelib) / "pip").symlink_to(pip)

    def run(*arguments: str) -> str:
        if arguments:
            found.pip(*arguments)
        names = ("torch", "torchvision", "rich", "more")
        return " ".join(course.version_of(found.python, name) or "-" for name in names)

    return run


def test_cpu_build_is_installed_and_kept(
    course: ModuleType,
    own: Callable[..., str],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    course.main(["--cpu"])
    assert own() == "2.15.0+cpu 0.29.0+cpu 1.0 -"
    assert capfd.readouterr().out.splitlines() == [
        "refreshing .venv",
        "about 200 MB to download for torch and torchvision (CPU)",
        "about 2 MB to download: setuptools, rich",
    ]
    course.main([])  # `make demo`: nothing is left to do
    assert capfd.readouterr() == ("", "")
    put(tmp_path / "pypi", "torchvision", "0.29.1", "torch==2.15.0")
    put(tmp_path / "pypi", "more", "2.0", "torchvision==0.29.1")  # not of the CPU's build
    depend(tmp_path, "torch>=2.8", "torchvision", "rich", "more")
    course.main([])
    assert own() == "2.15.0+cpu 0.29.0+cpu 1.0 1.0"
    assert "about 1 MB to download: more\n" in capfd.readouterr().out
    course.main(["--cpu"])
    told = ".venv has torch 2.15.0+cpu; for another one remove it first (rm -r .venv)\n"
    assert capfd.readouterr().out == told


def test_what_some_commands_need_is_installed_when_they_ask(
    course: ModuleType,
    own: Callable[..., str],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with (tmp_path / "pyproject.toml").open("a") as project:
        project.write('[project.optional-dependencies]\nsite = [\n    "more",\n]\n')
    course.main([])
    assert own() == "2.16.0 0.30.0 1.0 -"
    capfd.readouterr()
    monkeypatch.setitem(sys.modules, "environment", course)
    extras = runpy.run_path(str(root() / "scripts" / "extras.py"))["main"]
    extras(["site"])
    assert own() == "2.16.0 0.30.0 1.0 1.0"
    assert capfd.readouterr().out == "about 1 MB to download: more\n"
    extras(["site"])  # nothing is left to do
    assert capfd.readouterr() == ("", "")


def command_in(line: str) -> list[str]:
    """The arguments of the pip command in a line's parentheses."""
    found = re.search(r"\(\.venv/bin/pip install (.*)\)$", line)
    assert found is not None
    return found.group(1).split()


def test_torchvision_that_is_absent_or_does_not_fit_is_told(
    course: ModuleType,
    own: Callable[..., str],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """PyPI's fits PyPI's torch only; for another build one line names the command that helps."""
    monkeypatch.chdir(course.ROOT)
    assert own("torch", "--index-url", course.INDEX + "cpu") == "2.15.0+cpu - - -"
    course.main([])
    assert own() == "2.15.0+cpu - 1.0 -"
    last = capfd.readouterr().out.splitlines()[-1]
    assert last.startswith("environment: torch 2.15.0+cpu has no torchvision beside it, which ")
    assert own(*command_in(last)) == "2.15.0+cpu 0.29.0+cpu 1.0 -"
    found = course.Environment()
    assert found.torchvision_problem() == ""
    own("torchvision===0.29.0", "--force-reinstall", "--no-deps")
    problem = found.torchvision_problem()
    assert problem.startswith("torch 2.15.0+cpu does not fit torchvision 0.29.0, which ")
    assert own(*command_in(problem)) == "2.15.0+cpu 0.29.0+cpu 1.0 -"
    assert found.torchvision_problem() == ""


def test_pypi_torch_gets_its_torchvision(
    course: ModuleType, own: Callable[..., str], capfd: pytest.CaptureFixture[str]
) -> None:
    assert own("torch==2.15.0") == "2.15.0 - - -"
    course.main([])
    assert own() == "2.15.0 0.29.0 1.0 -"
    assert "environment:" not in capfd.readouterr().out


def test_a_lock_is_kept_to_with_the_cpu_build(
    course: ModuleType, own: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`make cpu LOCKED=1` sets these variables: versions of the lock, from both indexes."""
    (tmp_path / "requirements.lock").write_text("torch==2.15.0\ntorchvision==0.29.0\nrich==0.9\n")
    put(tmp_path / "pypi", "rich", "0.9")
    put(tmp_path / "whl" / "cpu", "torch", "2.16.0+cpu")
    monkeypatch.setenv("PIP_CONSTRAINT", str(tmp_path / "requirements.lock"))
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", f"file://{tmp_path}/pypi")
    course.main(["--cpu"])
    assert own() == "2.15.0+cpu 0.29.0+cpu 0.9 -"


def test_wheels_of_a_folder_are_enough(
    course: ModuleType,
    own: Callable[..., str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """`make wheels` with a network, `make cpu WHEELS=…` without one."""
    monkeypatch.setitem(sys.modules, "environment", course)
    wheels = runpy.run_path(str(root() / "scripts" / "wheels.py"))
    own()
    wheels["main"]([str(tmp_path / "wheels")])
    assert f"4 wheels, 0 MB, in {tmp_path / 'wheels'}\n" in capfd.readouterr().out
    names = sorted(path.name.split("-py3")[0] for path in (tmp_path / "wheels").iterdir())
    assert names == ["rich-1.0", "setuptools-99", "torch-2.15.0+cpu", "torchvision-0.29.0+cpu"]
    monkeypatch.setattr(course, "INDEX", "http://127.0.0.1:9/")  # nobody answers there
    monkeypatch.delenv("PIP_INDEX_URL")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    course.main(["--cpu"])
    assert own() == "2.15.0+cpu 0.29.0+cpu 1.0 -"
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nothing"))
    with pytest.raises(SystemExit, match="the wheels could not be had"):
        wheels["main"]([str(tmp_path / "more")])
