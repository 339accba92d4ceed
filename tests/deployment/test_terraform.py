"""The GPU cluster on AWS: formatted, valid, and planned against a provider that is made up."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from manifests import DEPLOYMENT, config_of

from distlab.course import root

TERRAFORM = DEPLOYMENT / "terraform"
MIRRORS = [  # where Terraform's own defaults and common practice put providers
    Path.home() / ".terraform.d" / "plugins",
    Path("/usr/local/share/terraform/plugins"),
    Path("/usr/share/terraform/plugins"),
    *sorted(Path("/opt").glob("*")),
]


@functools.cache
def mirror() -> Path | None:
    """A local folder that holds the AWS provider."""
    aws = Path("registry.terraform.io") / "hashicorp" / "aws"
    return next((folder for folder in MIRRORS if (folder / aws).is_dir()), None)


needs_terraform = pytest.mark.skipif(
    shutil.which("terraform") is None, reason="needs terraform"
)
needs_provider = pytest.mark.skipif(
    shutil.which("terraform") is None or mirror() is None,
    reason="needs terraform and the AWS provider "
    "(`terraform providers mirror ~/.terraform.d/plugins` in deployment/terraform)",
)


def terraform(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Call Terraform with nothing of this machine's configuration."""
    empty = folder / "empty.tfrc"
    empty.touch()
    environment = {name: each for name, each in os.environ.items() if not name.startswith("TF_")}
    return subprocess.run(
        ["terraform", arguments[0], "-no-color", *arguments[1:]],
        cwd=folder,
        env={**environment, "TF_CLI_CONFIG_FILE": str(empty), "CHECKPOINT_DISABLE": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.fixture
def module(tmp_path: Path) -> Path:
    """A copy of the module, ready to be planned."""
    folder = tmp_path / "terraform"
    shutil.copytree(TERRAFORM, folder, ignore=shutil.ignore_patterns(".terraform*", "*.tfstate*"))
    done = terraform(folder, "init", "-backend=false", f"-plugin-dir={mirror()}")
    assert done.returncode == 0, done.stdout
    return folder


@needs_terraform
def test_is_formatted(tmp_path: Path) -> None:
    done = terraform(tmp_path, "fmt", "-check", "-recursive", "-diff", str(TERRAFORM))
    assert (done.returncode, done.stdout) == (0, "")


@needs_provider
def test_is_valid_and_plans_as_it_should(module: Path) -> None:
    valid = terraform(module, "validate")
    assert valid.returncode == 0, valid.stdout
    planned = terraform(module, "test")
    assert planned.returncode == 0, planned.stdout
    runs = (TERRAFORM / "tests" / "cluster.tftest.hcl").read_text(encoding="utf-8").count("\nrun ")
    assert f"{runs} passed, 0 failed." in planned.stdout


@needs_provider
def test_ssh_from_everywhere_is_found(module: Path) -> None:
    network = module / "network.tf"
    text = network.read_text(encoding="utf-8")
    spoilt = text.replace("= var.ssh_cidr", '= "0.0.0.0/0"')
    assert spoilt != text
    network.write_text(spoilt)
    done = terraform(module, "test", "-filter=tests/cluster.tftest.hcl")
    assert done.returncode == 1
    assert "the only rule that names addresses is SSH from ssh_cidr" in done.stdout


@needs_provider
def test_misspelt_argument_is_found(module: Path) -> None:
    storage = module / "storage.tf"
    text = storage.read_text(encoding="utf-8")
    storage.write_text(text.replace("storage_capacity", "storage_capacty"))
    done = terraform(module, "validate")
    assert done.returncode == 1
    assert "storage_capacty" in done.stdout


@pytest.mark.parametrize("cloud", [".", "gcp"])
def test_nodes_call_the_trainer_rightly(cloud: str) -> None:
    text = (TERRAFORM / cloud / "cloud-init.yaml.tftpl").read_text(encoding="utf-8")
    values = {
        **{"config": "configs/resnet50_imagenet.yaml", "data": "/shared/imagenet"},
        **{"epochs": "7", "save_every": "11"},
    }
    command = re.search(r"ExecStart=/opt/trainer/(\S+) (.*)", text)
    assert command is not None
    assert (root() / command[1]).is_file()
    words = re.sub(r"\$\{(\w+)\}", lambda match: values[match[1]], command[2]).split()
    config = config_of(words)
    assert (config.epochs, config.save_every) == (7, 11)
    assert config.checkpoints.startswith("/shared/")
    assert config.metrics_host == "127.0.0.1"  # read through SSH


def test_variables_that_were_promised() -> None:
    for folder in (TERRAFORM, TERRAFORM / "gcp"):
        text = "".join(file.read_text(encoding="utf-8") for file in folder.glob("*.tf"))
        declared = set(re.findall(r'^variable "(\w+)"', text, re.MULTILINE))
        wanted = {"cluster_size", "training_epochs", "save_frequency", "instance_type", "region"}
        assert wanted <= declared
        assert set(re.findall(r"\bvar\.(\w+)", text)) == declared


def test_example_sets_variables_that_exist() -> None:
    variables = (TERRAFORM / "variables.tf").read_text(encoding="utf-8")
    example = (TERRAFORM / "terraform.tfvars.example").read_text(encoding="utf-8")
    names = re.findall(r"^(\w+) +=", example, re.MULTILINE)
    assert names
    assert all(f'variable "{name}"' in variables for name in names)
