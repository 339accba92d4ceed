"""The GPU clusters in clouds.

AWS: formatted, valid, and planned against a provider that is made up. Google Cloud and Nebius:
formatted, their templates filled in, and their text held against what they promise.
"""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from distlab.course.catalogue import root
from given.parent import end_with_parent
from tests.deployment.manifests import DEPLOYMENT, Document, config_of
from tests.deployment.starters import UNIT

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


needs_terraform = pytest.mark.skipif(shutil.which("terraform") is None, reason="needs terraform")
needs_provider = pytest.mark.skipif(
    shutil.which("terraform") is None or mirror() is None,
    reason="needs terraform and the AWS provider "
    "(`terraform providers mirror ~/.terraform.d/plugins` in deployment/terraform)",
)


def environment() -> dict[str, str]:
    """Nothing of this machine's configuration; programs in Go don't collect their garbage, which
    takes them longer than their work."""
    kept = {name: each for name, each in os.environ.items() if not name.startswith("TF_")}
    return {**kept, "CHECKPOINT_DISABLE": "1", "GOGC": "off", "GOMEMLIMIT": "2GiB"}


def terraform(
    folder: Path, *arguments: str, provider: str | None = None
) -> subprocess.CompletedProcess[str]:
    """Call Terraform, which starts its own providers or takes ``provider``, which runs already."""
    empty = folder / "empty.tfrc"
    empty.touch()
    running = {} if provider is None else {"TF_REATTACH_PROVIDERS": provider}
    return subprocess.run(
        ["terraform", arguments[0], "-no-color", *arguments[1:]],
        cwd=folder,
        env={**environment(), **running, "TF_CLI_CONFIG_FILE": str(empty)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )


CLOUDS = (".", "gcp", "nebius")
ROOTS = [folder for cloud in CLOUDS for folder in (cloud, f"{cloud}/storage")]


@pytest.fixture(scope="session")
def initialised(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of all modules, those for AWS ready to be planned."""
    folder = tmp_path_factory.mktemp("terraform") / "all"
    shutil.copytree(TERRAFORM, folder, ignore=shutil.ignore_patterns(".terraform*", "*.tfstate*"))
    for root_module in (folder, folder / "storage"):
        done = terraform(root_module, "init", "-backend=false", f"-plugin-dir={mirror()}")
        assert done.returncode == 0, done.stdout
    return folder


@pytest.fixture(scope="session")
def provider(initialised: Path) -> Iterator[str]:
    """The AWS provider that ``init`` chose, as TF_REATTACH_PROVIDERS names it.

    Terraform would hash its 700 MB and start it for every plan, which takes longer than the plan.
    For plans with ``mock_provider`` only: one that is configured serves a single plan.
    """
    providers = initialised / ".terraform" / "providers" / "registry.terraform.io"
    (program,) = providers.glob("hashicorp/aws/*/*/terraform-provider-aws_*")
    with subprocess.Popen(
        [program, "-debug"],
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,  # its log: a pipe that nobody reads would stop it
        text=True,
        preexec_fn=end_with_parent,
    ) as process:
        assert process.stdout is not None
        try:
            printed = iter(process.stdout.readline, "")
            found = (re.search("TF_REATTACH_PROVIDERS='(.*)'", line) for line in printed)
            named = next(filter(None, found), None)
            assert named is not None, "the provider has ended"
            yield named[1]
        finally:
            process.kill()


@pytest.fixture
def module(initialised: Path, tmp_path: Path) -> Path:
    """The nodes' module, to be spoilt."""
    return shutil.copytree(initialised, tmp_path / "terraform", symlinks=True)


@pytest.fixture
def storage(module: Path) -> Path:
    """The storage's module, to be spoilt."""
    return module / "storage"


def code(root_module: str) -> str:
    files = sorted((TERRAFORM / root_module).glob("*.tf"))
    return "".join(file.read_text(encoding="utf-8") for file in files)


@needs_terraform
def test_is_formatted(tmp_path: Path) -> None:
    done = terraform(tmp_path, "fmt", "-check", "-recursive", "-diff", str(TERRAFORM))
    assert (done.returncode, done.stdout) == (0, "")


def check_tested(folder: Path, tests: str, provider: str) -> None:
    """`terraform test` validates, too."""
    planned = terraform(folder, "test", provider=provider)
    assert planned.returncode == 0, planned.stdout
    runs = (folder / "tests" / tests).read_text(encoding="utf-8").count("\nrun ")
    assert runs
    assert f"{runs} passed, 0 failed." in planned.stdout


@needs_provider
def test_is_valid_and_plans_as_it_should(module: Path, provider: str) -> None:
    check_tested(module, "cluster.tftest.hcl", provider)


# -- checkpoints outlive a `terraform destroy` ----------------------------------------------------
@needs_provider
def test_storage_is_valid_and_plans_as_it_should(storage: Path, provider: str) -> None:
    check_tested(storage, "storage.tftest.hcl", provider)


FILE_SYSTEMS = {
    ".": "aws_fsx_lustre_file_system",
    "gcp": "google_filestore_instance",
    "nebius": "nebius_compute_v1_filesystem",
}
STATE = {  # what Terraform knows after an apply
    "version": 4,
    "terraform_version": "1.11.0",
    "serial": 1,
    "lineage": "made-up",
    "outputs": {},
    "resources": [
        {
            "mode": "managed",
            "type": "aws_fsx_lustre_file_system",
            "name": "shared",
            "provider": 'provider["registry.terraform.io/hashicorp/aws"]',
            "instances": [{"schema_version": 0, "attributes": {"id": "fs-00000000000000000"}}],
        }
    ],
}
NO_ACCOUNT = """provider "aws" {
  region                      = var.region
  access_key                  = "none"
  secret_key                  = "none"
  skip_credentials_validation = true
  skip_metadata_api_check     = true
  skip_region_validation      = true
  skip_requesting_account_id  = true
}
"""


@needs_provider
def test_destroy_is_refused_where_the_checkpoints_are(storage: Path) -> None:
    """Terraform with a state in which the file system exists; nothing is asked of AWS."""
    (storage / "offline_override.tf").write_text(NO_ACCOUNT)
    (storage / "terraform.tfstate").write_text(json.dumps(STATE))
    destroy = ("plan", "-destroy", "-refresh=false", "-input=false")
    refused = terraform(storage, *destroy)
    assert refused.returncode == 1
    assert "Instance cannot be destroyed" in refused.stdout
    assert "aws_fsx_lustre_file_system.shared has lifecycle.prevent_destroy" in refused.stdout
    main = storage / "main.tf"
    main.write_text(main.read_text(encoding="utf-8").replace("prevent_destroy = true", ""))
    allowed = terraform(storage, *destroy)
    assert allowed.returncode == 0, allowed.stdout
    assert "0 to add, 0 to change, 1 to destroy" in allowed.stdout


@pytest.mark.parametrize("cloud", CLOUDS)
def test_nodes_have_no_file_system_that_a_destroy_could_delete(cloud: str) -> None:
    kind = FILE_SYSTEMS[cloud]
    nodes, storage = code(cloud), code(f"{cloud}/storage")
    assert f'resource "{kind}"' not in nodes
    (found,) = re.findall(rf'resource "{kind}" "shared" {{\n(.*?)\n}}\n', storage, re.DOTALL)
    assert re.search(r"lifecycle \{\s+prevent_destroy = true", found)
    theirs = {"gcp": "deletion_protection_enabled = true", "nebius": "forbid_deletion = true"}
    assert theirs.get(cloud, "") in re.sub(" +", " ", found)
    template = (TERRAFORM / cloud / "cloud-init.yaml.tftpl").read_text(encoding="utf-8")
    assert "/shared/checkpoints" in template


@pytest.mark.parametrize("cloud", CLOUDS)
def test_nodes_take_what_the_storage_gives(cloud: str) -> None:
    (taken,) = re.findall(r'variable "storage" \{.*?object\(\{(.*?)\}\)\n', code(cloud), re.DOTALL)
    output = code(f"{cloud}/storage").partition('output "cluster"')[2].partition("\n}\n")[0]
    (given,) = re.findall(r"\bstorage = \{(.*)\}", output, re.DOTALL)
    names = r"(?:^|[\s{])(\w+) += "
    without_nested = re.sub(r"object\(.*?\)", "", taken)
    assert re.findall(names, without_nested) == re.findall(names, given)


@needs_provider
def test_ssh_from_everywhere_is_found(module: Path, provider: str) -> None:
    network = module / "network.tf"
    text = network.read_text(encoding="utf-8")
    spoilt = text.replace("= var.ssh_cidr", '= "0.0.0.0/0"')
    assert spoilt != text
    network.write_text(spoilt)
    done = terraform(module, "test", "-filter=tests/cluster.tftest.hcl", provider=provider)
    assert done.returncode == 1
    assert "the only rule that names addresses is SSH from ssh_cidr" in done.stdout


@needs_provider
def test_misspelt_argument_is_found(module: Path) -> None:
    """Without help: Terraform starts the provider that ``init`` has locked."""
    nodes = module / "nodes.tf"
    text = nodes.read_text(encoding="utf-8")
    nodes.write_text(text.replace("placement_group  ", "placement_grup  "))
    done = terraform(module, "validate")
    assert done.returncode == 1
    assert "placement_grup" in done.stdout


def test_nodes_call_the_trainer_rightly() -> None:
    text = UNIT.read_text(encoding="utf-8")
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


@pytest.mark.parametrize("folder", ROOTS)
def test_variables_are_declared_and_used(folder: str) -> None:
    text = code(folder)
    declared = set(re.findall(r'^variable "(\w+)"', text, re.MULTILINE))
    assert set(re.findall(r"\bvar\.(\w+)", text)) == declared
    if not folder.endswith("storage"):
        wanted = {"cluster_size", "training_epochs", "save_frequency", "instance_type", "region"}
        assert wanted <= declared


@pytest.mark.parametrize("folder", [".", "storage"])
def test_example_sets_variables_that_exist(folder: str) -> None:
    example = (TERRAFORM / folder / "terraform.tfvars.example").read_text(encoding="utf-8")
    names = re.findall(r"^(\w+) +=", example, re.MULTILINE)
    assert names
    assert all(f'variable "{name}"' in code(folder) for name in names)


# -- Google Cloud and Nebius: no provider here to ask ---------------------------------------------
@pytest.mark.parametrize("folder", [each for each in ROOTS if each.startswith(("gcp", "nebius"))])
def test_what_was_not_validated_says_so(folder: str) -> None:
    assert "neither validated" in code(folder).partition("\nterraform {")[0]
    versions = re.findall(r'^ +version = "(.+)"', code(folder), re.MULTILINE)
    assert versions in (["~> 6.50.0"], ["0.6.32"])  # a line of fixes at most


GIVEN = {
    **{"repository": "https://example.com/course.git", "revision": "main", "nodes": "2"},
    **{"rank": "1", "ranks": "8", "head": "10.30.0.16", "requirement": "requirements.txt"},
    **{"first_card": "enp0s12", "gpu_cards": "enp6s0,enp7s0", "storage": "10.0.0.2:/shared"},
    **{"key": "ssh-ed25519 AAAA you@laptop", "unit": "[Unit]\nWants=x\n\n[Service]\nUser=x\n"},
}
UNITS = "/etc/systemd/system"


def filled(tmp_path: Path, cloud: str, **values: object) -> Document:
    """cloud-init's file as Terraform itself makes it of the template."""
    template = TERRAFORM / cloud / "cloud-init.yaml.tftpl"
    given = json.dumps({**GIVEN, **values})
    expression = f'templatefile("{template}", {given})'
    done = subprocess.run(
        ["terraform", "console"],
        cwd=tmp_path,
        env={**os.environ, "TF_CLI_CONFIG_FILE": os.devnull, "CHECKPOINT_DISABLE": "1"},
        input=f"jsonencode({expression})\n",
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    text = json.loads(json.loads(done.stdout))
    assert text.startswith("#cloud-config\n")
    return yaml.safe_load(text)


@needs_terraform
@pytest.mark.parametrize("cloud", ["gcp", "nebius"])
def test_cloud_init_is_yaml_with_the_unit(tmp_path: Path, cloud: str) -> None:
    made = filled(tmp_path, cloud, dataset=None)
    files = {each["path"]: each["content"] for each in made["write_files"]}
    assert set(files) == {"/etc/training.env", f"{UNITS}/training.service"}
    assert files[f"{UNITS}/training.service"].rstrip() == GIVEN["unit"].rstrip()
    assert "NODE_RANK=1\n" in files["/etc/training.env"]
    assert any("--require-hashes" in line for line in made["runcmd"])


@needs_terraform
@pytest.mark.parametrize("rank", [0, 1])
def test_first_node_copies_the_images_and_the_others_wait(tmp_path: Path, rank: int) -> None:
    made = filled(tmp_path, "gcp", dataset="gs://bucket/imagenet", rank=rank)
    files = {each["path"]: each["content"] for each in made["write_files"]}
    copying = files[f"{UNITS}/dataset.service"]
    command = "gcloud storage rsync --recursive gs://bucket/imagenet /shared/imagenet"
    assert (command in copying) is (rank == 0)
    assert "imagenet.complete" in copying
    assert "Requires=dataset.service" in files[f"{UNITS}/training.service.d/dataset.conf"]


def test_google_nodes_have_every_card_of_their_machine() -> None:
    text = code("gcp")
    (names,) = re.findall(r"gpu_cards += \[(.*?)\]", text)
    assert len(set(names.split(", "))) == 8
    assert text.count("network_interface {") + text.count('dynamic "network_interface"') == 2
    assert "for_each = google_compute_subnetwork.gpu" in text
    for kind in ("network", "subnetwork", "firewall"):
        assert f'"google_compute_{kind}" "gpu" {{\n  count = length(local.gpu_cards)\n' in text
    assert 'condition     = var.instance_type == "a3-megagpu-8g"' in text


def test_versions_on_google_nodes_fit_each_other() -> None:
    """Ubuntu 24.04 has Python 3.12; CUDA 13 needs driver 580 (NVIDIA, CUDA Compatibility)."""
    image = re.search(r"ubuntu-accelerator-(\d+)-amd64-with-nvidia-(\d+)-v\d{8}", code("gcp"))
    assert image is not None
    pinned = (DEPLOYMENT / "requirements.txt").read_text(encoding="utf-8")
    assert image[1] == "2404"
    assert "--python-version 3.12 " in pinned
    assert re.search(r"^cuda-toolkit==13\.", pinned, re.MULTILINE)
    assert int(image[2]) >= 580


def test_nebius_takes_its_credentials_from_the_environment() -> None:
    for folder in ("nebius", "nebius/storage"):
        (block,) = re.findall(r'provider "nebius" \{\n(.*?)\n\}\n', code(folder), re.DOTALL)
        fields = re.findall(r"^ +(\w+) += \S", block, re.MULTILINE)
        assert fields.pop(0) == "service_account"
        assert len(fields) == 3
        assert all(field.endswith("_env") for field in fields)


def test_nebius_nodes_share_a_fabric_and_a_filesystem() -> None:
    text = re.sub(" +", " ", code("nebius"))
    assert "id = nebius_compute_v1_gpu_cluster.nodes.id" in text
    assert "existing_filesystem = { id = var.storage.filesystem }" in text
    (tag,) = re.findall(r'mount_tag = "(\w+)"', text)
    template = (TERRAFORM / "nebius" / "cloud-init.yaml.tftpl").read_text(encoding="utf-8")
    assert f"echo '{tag} /shared virtiofs " in template
    assert "NCCL_NET=IB\n" in template
