"""The guide to running the trainer: what it names exists, and what it calls would be understood."""

from __future__ import annotations

import json
import re
import shlex
import typing

import pytest

from distlab.course.catalogue import root
from solutions.phase4_production import exit_codes
from solutions.phase4_production.deployment.slurm_cluster import PACKAGES
from solutions.phase4_production.trainer_config import FIELDS, Strategy
from tests.deployment.manifests import DEPLOYMENT, config_of, documents, launcher_variables

GUIDE = DEPLOYMENT.parent / "README.md"
TEXT = GUIDE.read_text(encoding="utf-8")
LAUNCHER = "./launch_training.sh"


def commands() -> list[list[str]]:
    """The words of each command in the guide's blocks, without comments and settings before it."""
    found = []
    for block in re.findall(r"```bash\n(.*?)```", TEXT, re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            for part in " ".join(shlex.split(line, comments=True)).split(" && "):
                words = part.split()
                while words and re.match(r"[A-Z_]+=", words[0]):
                    words.pop(0)
                if words:
                    found.append(words)
    return found


def calls(*begin: str) -> list[list[str]]:
    """What follows in the commands that begin so; there is at least one."""
    found = [words[len(begin) :] for words in commands() if words[: len(begin)] == list(begin)]
    assert found, f"no command begins with {begin}"
    return found


def test_links_lead_somewhere() -> None:
    links = re.findall(r"\]\((?!http)([^)]+)\)", TEXT)
    assert links
    for link in links:
        assert (GUIDE.parent / link).exists(), link


def test_trainer_understands_its_arguments() -> None:
    for words in calls(LAUNCHER):
        if words[0].isdigit():
            assert words[1] in typing.get_args(Strategy)
            assert int(words[2]) > 0
        else:
            config_of([word for word in words if word != "--dry-run"])


def test_jobs_are_submitted_rightly() -> None:
    directives = (DEPLOYMENT / "slurm.sbatch").read_text(encoding="utf-8")
    for words in calls("sbatch"):
        (place,) = [index for index, word in enumerate(words) if word.endswith("slurm.sbatch")]
        assert (root() / words[place]).samefile(DEPLOYMENT / "slurm.sbatch")
        for option in words[:place]:  # they replace a line of the file
            assert f"#SBATCH {option.partition('=')[0]}=" in directives
        config_of(words[place + 1 :])


def test_files_exist() -> None:
    named = [
        words[place + 1]
        for words in commands()
        for place, word in enumerate(words)
        if word in ("--file", "--filename") and words[place + 1] != "-"
    ]
    assert len(named) >= 5
    assert all((root() / file).is_file() for file in named)
    (folder,) = calls("cd")
    assert all((root() / folder[0] / copy[0]).is_file() for copy in calls("cp"))
    for words in commands():
        if words[0] == "terraform" and words[1].startswith("-chdir="):
            assert (root() / folder[0] / words[1].partition("=")[2] / "main.tf").is_file()
    (overlay,) = calls("kubectl", "kustomize")
    assert (root() / overlay[1] / "kustomization.yaml").is_file()
    for module, *_ in calls("python", "-m"):
        assert (root() / (module.replace(".", "/") + ".py")).is_file()


def test_names_are_those_of_the_manifests() -> None:
    job = next(each for each in documents("kubernetes.yaml") if each["kind"] == "Job")
    run = next(each for each in documents("kubeflow.yaml") if each["kind"] == "TrainJob")
    arguments = calls("kubectl", "--namespace", "training")
    assert ["logs", "--follow", f"job/{job['metadata']['name']}"] in arguments
    assert ["get", "trainjob", run["metadata"]["name"]] in arguments
    assert calls("apt", "install") == [PACKAGES.split()]


def test_claims_can_be_made_before_the_training() -> None:
    """The selector finds the claims and nothing else."""
    (selector,) = re.findall(r"--selector (\S+)=(\S+)", TEXT)
    found = [
        each["kind"]
        for each in documents("kubernetes.yaml")
        if each["metadata"]["labels"].get(selector[0]) == selector[1]
    ]
    assert found == ["PersistentVolumeClaim"] * 2
    job = next(each for each in documents("kubernetes-data.yaml") if each["kind"] == "Job")
    assert f"job/{job['metadata']['name']}" in TEXT
    secret = job["spec"]["template"]["spec"]["containers"][0]["envFrom"][0]["secretRef"]["name"]
    assert f"create secret generic {secret} " in TEXT


def test_patch_for_name_servers_is_of_the_rule_for_names() -> None:
    (patch,) = re.findall(r"--patch='(\[.*\])'", TEXT)
    (change,) = json.loads(patch)
    (policy,) = [each for each in documents("kubernetes.yaml") if each["kind"] == "NetworkPolicy"]
    *path, end = change["path"].strip("/").split("/")
    place = policy
    for part in path:
        place = place[int(part)] if part.isdigit() else place[part]
    assert (change["op"], end) == ("add", "-")
    assert change["value"].keys() == place[-1].keys() == {"ipBlock"}


def test_table_of_exit_codes_has_them_all() -> None:
    rows = "".join(re.findall(r"^\| (\d[\d, ]*)", TEXT, re.MULTILINE))
    told = {int(code) for code in re.findall(r"\d+", rows)}
    assert told - {126, 127} == set(exit_codes.MEANING)


@pytest.mark.parametrize("variable", re.findall(r"export ((?:[A-Z_]+=\S+ ?)+)", TEXT)[0].split())
def test_launcher_reads_what_is_exported(variable: str) -> None:
    assert variable.partition("=")[0] in launcher_variables()


def test_options_in_sentences_exist() -> None:
    known = {f"--{name.replace('_', '-')}" for name in FIELDS}
    others = {"--config", "--dry-run", "--field", "--file", "--logdir"}
    mentioned = set(re.findall(r"`(--[a-z-]+)", TEXT))
    assert "--data" in mentioned
    assert mentioned <= known | others
