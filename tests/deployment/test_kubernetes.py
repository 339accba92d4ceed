"""The manifests for Kubernetes and Kubeflow: against the real schemas, and against each other."""

from __future__ import annotations

import copy
from collections.abc import Callable

import kubernetes_validate
import pytest
from kubeflow_trainer_api import models
from kubernetes_validate.utils import all_versions
from manifests import DEPLOYMENT, Document, config_of, documents, is_under, launcher_variables, one
from torch.distributed.run import parse_args as torchrun_arguments

from distlab.course import root

OLDEST = (1, 33)  # in which backoffLimitPerIndex is stable
VERSIONS = [
    f"{major}.{minor}"
    for major, minor in sorted({tuple(map(int, v.split(".")[:2])) for v in all_versions()})
    if (major, minor) >= OLDEST
]


@pytest.fixture
def manifests() -> list[Document]:
    return documents("kubernetes.yaml")


@pytest.fixture
def job(manifests: list[Document]) -> Document:
    return one(manifests, "Job")


@pytest.fixture
def pod(job: Document) -> Document:
    return job["spec"]["template"]["spec"]


@pytest.fixture
def container(pod: Document) -> Document:
    (container,) = pod["containers"]
    return container


def environment(container: Document) -> dict[str, str]:
    return {each["name"]: each["value"] for each in container["env"] if "value" in each}


def ports(container: Document) -> dict[str, int]:
    return {each["name"]: each["containerPort"] for each in container["ports"]}


def check_storage(pod: Document, arguments: list[str], claims: set[str]) -> None:
    """What the trainer writes is on a claim, what it reads is mounted, /dev/shm is memory."""
    (container,) = pod["containers"]
    volumes = {each["name"]: each for each in pod["volumes"]}
    mounts = {each["mountPath"]: each for each in container["volumeMounts"]}
    assert {each["name"] for each in mounts.values()} == set(volumes)
    assert volumes[mounts["/dev/shm"]["name"]]["emptyDir"]["medium"] == "Memory"
    config = config_of(arguments)
    for path, writable in ((config.checkpoints, True), (config.logs, True), (config.data, False)):
        (mount,) = [each for where, each in mounts.items() if is_under(path, where)]
        assert mount.get("readOnly", False) is not writable
        assert volumes[mount["name"]]["persistentVolumeClaim"]["claimName"] in claims


def check_hardened(pod: Document) -> None:
    """Not root, nothing gained later, a root file system that nobody writes to."""
    (container,) = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert f"USER {pod['securityContext']['runAsUser']}\n" in dockerfile()
    assert pod["automountServiceAccountToken"] is False
    own = container["securityContext"]
    assert own["allowPrivilegeEscalation"] is False
    assert own["readOnlyRootFilesystem"] is True
    assert own["capabilities"] == {"drop": ["ALL"]}


def dockerfile() -> str:
    return (DEPLOYMENT / "Dockerfile").read_text(encoding="utf-8")


@pytest.mark.parametrize("version", VERSIONS)
def test_every_document_fits_the_schema(manifests: list[Document], version: str) -> None:
    kinds = [document["kind"] for document in manifests]
    assert sorted(kinds) == sorted(
        ["Service", "NetworkPolicy", "PersistentVolumeClaim", "PersistentVolumeClaim", "Job"]
    )
    for document in manifests:
        kubernetes_validate.validate(document, version, strict=True)


def misspell(job: Document) -> None:
    job["spec"]["backofLimitPerIndex"] = job["spec"].pop("backoffLimitPerIndex")


def deep(job: Document) -> None:
    job["spec"]["template"]["spec"]["containers"][0]["volumeMount"] = []


def text_for_number(job: Document) -> None:
    job["spec"]["completions"] = "two"


def without_containers(job: Document) -> None:
    del job["spec"]["template"]["spec"]["containers"]


@pytest.mark.parametrize("spoil", [misspell, deep, text_for_number, without_containers])
def test_a_mistake_is_refused(job: Document, spoil: Callable[[Document], None]) -> None:
    spoil(job)
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(job, VERSIONS[-1], strict=True)


def test_nodes_meet_at_the_first_one(
    manifests: list[Document], job: Document, pod: Document, container: Document
) -> None:
    service, spec = one(manifests, "Service"), job["spec"]
    given = environment(container)
    assert spec["completionMode"] == "Indexed"
    assert int(given["NNODES"]) == spec["completions"] == spec["parallelism"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True
    assert pod["subdomain"] == service["metadata"]["name"]
    assert given["MASTER_ADDR"] == f"{job['metadata']['name']}-0.{pod['subdomain']}"
    assert int(given["MASTER_PORT"]) == ports(container)["rendezvous"]
    (rank,) = [each for each in container["env"] if each["name"] == "NODE_RANK"]
    index = "metadata.labels['batch.kubernetes.io/job-completion-index']"
    assert rank["valueFrom"]["fieldRef"]["fieldPath"] == index
    wanted = {"NNODES", "NODE_RANK", "NPROC_PER_NODE", "MASTER_ADDR", "MASTER_PORT", "MAX_RESTARTS"}
    assert wanted <= launcher_variables()
    assert wanted <= {each["name"] for each in container["env"]}


def test_selectors_find_the_pods(manifests: list[Document], job: Document, pod: Document) -> None:
    labels = job["spec"]["template"]["metadata"]["labels"].items()
    assert one(manifests, "Service")["spec"]["selector"].items() <= labels
    policy = one(manifests, "NetworkPolicy")["spec"]
    assert policy["podSelector"]["matchLabels"].items() <= labels
    assert set(policy["policyTypes"]) == {"Ingress", "Egress"}
    (apart,) = pod["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert apart["labelSelector"]["matchLabels"].items() <= labels


def test_ports_are_the_same_everywhere(
    manifests: list[Document], job: Document, container: Document
) -> None:
    own = ports(container)
    for port in one(manifests, "Service")["spec"]["ports"]:
        assert own[port["targetPort"]] == port["port"]
    (metrics,) = one(manifests, "NetworkPolicy")["spec"]["ingress"][1]["ports"]
    assert metrics["port"] in own
    notes = job["spec"]["template"]["metadata"]["annotations"]
    assert notes["prometheus.io/scrape"] == "true"
    config = config_of(container["args"])
    assert config.metrics_port == own["metrics"] == int(notes["prometheus.io/port"])
    assert config.metrics_host == "0.0.0.0"  # on loopback nobody else could read them
    assert f"EXPOSE {own['rendezvous']} {own['metrics']}\n" in dockerfile()


def test_a_rank_per_gpu(container: Document) -> None:
    resources = container["resources"]
    gpus = resources["limits"]["nvidia.com/gpu"]
    assert resources["requests"]["nvidia.com/gpu"] == gpus
    assert environment(container)["NPROC_PER_NODE"] == gpus


def test_what_is_written_is_kept(
    manifests: list[Document], pod: Document, container: Document
) -> None:
    claims = {
        each["metadata"]["name"]: each["spec"]["accessModes"]
        for each in manifests
        if each["kind"] == "PersistentVolumeClaim"
    }
    assert set(map(tuple, claims.values())) == {("ReadWriteMany",)}
    check_storage(pod, container["args"], set(claims))


def test_preemption_is_no_failure(job: Document, pod: Document, container: Document) -> None:
    spec = job["spec"]
    first = spec["podFailurePolicy"]["rules"][0]
    assert first["action"] == "Ignore"
    assert first["onPodConditions"][0]["type"] == "DisruptionTarget"
    assert pod["restartPolicy"] == "Never"  # what a failure policy asks for
    assert spec["podReplacementPolicy"] == "Failed"
    assert spec["backoffLimitPerIndex"] > 0
    for rule in spec["podFailurePolicy"]["rules"][1:]:
        assert rule["onExitCodes"]["containerName"] == container["name"]
    wait = int(environment(container)["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"])
    assert pod["terminationGracePeriodSeconds"] > wait


def test_probes_call_what_the_image_has(container: Document) -> None:
    config = config_of(container["args"])
    for probe in ("startupProbe", "livenessProbe"):
        script, folder, seconds = container[probe]["exec"]["command"]
        assert (root() / script).stat().st_mode & 0o111
        assert folder == config.logs
        assert int(seconds) > config.watchdog_seconds  # the trainer's own comes first


def test_pods_are_hardened(pod: Document) -> None:
    check_hardened(pod)


# -- Kubeflow: custom resources, whose models drop what they don't know
@pytest.fixture
def kubeflow() -> list[Document]:
    return documents("kubeflow.yaml")


def understood(document: Document) -> Document:
    model = getattr(models, "TrainerV1alpha1" + document["kind"])
    return model.from_dict(copy.deepcopy(document)).to_dict()


def test_kubeflow_loses_nothing(kubeflow: list[Document]) -> None:
    assert [document["kind"] for document in kubeflow] == ["TrainingRuntime", "TrainJob"]
    for document in kubeflow:
        assert document["apiVersion"] == "trainer.kubeflow.org/v1alpha1"
        assert understood(document) == document


@pytest.mark.parametrize("name", ["numNodes", "numProcPerNode", "resourcesPerNode"])
def test_kubeflow_mistake_is_seen(kubeflow: list[Document], name: str) -> None:
    trainer = kubeflow[1]["spec"]["trainer"]
    trainer[name + "s"] = trainer.pop(name)
    assert understood(kubeflow[1]) != kubeflow[1]


def test_kubeflow_trains_as_kubernetes_does(
    kubeflow: list[Document], manifests: list[Document], job: Document, container: Document
) -> None:
    runtime, run = kubeflow
    trainer = run["spec"]["trainer"]
    assert run["spec"]["runtimeRef"] == {
        "apiGroup": runtime["apiVersion"].partition("/")[0],
        "kind": runtime["kind"],
        "name": runtime["metadata"]["name"],
    }
    assert config_of(trainer["args"]) == config_of(container["args"])
    assert trainer["command"][0] == "torchrun"
    parsed = torchrun_arguments([*trainer["command"][1:], *trainer["args"]])
    assert parsed.module
    assert (root() / (parsed.training_script.replace(".", "/") + ".py")).is_file()
    assert parsed.training_script_args == trainer["args"]
    assert trainer["numNodes"] == runtime["spec"]["mlPolicy"]["numNodes"]
    assert trainer["numNodes"] == job["spec"]["completions"]
    assert str(trainer["numProcPerNode"]) == container["resources"]["limits"]["nvidia.com/gpu"]
    assert trainer["resourcesPerNode"] == container["resources"]
    (replicated,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    template = replicated["template"]["spec"]["template"]
    (its,) = template["spec"]["containers"]
    assert its["name"] == "node"  # the name by which Kubeflow finds it
    assert its["image"] == trainer["image"] == container["image"]
    assert template["metadata"]["annotations"] == (
        job["spec"]["template"]["metadata"]["annotations"]
    )
    claims = {
        each["metadata"]["name"] for each in manifests if each["kind"] == "PersistentVolumeClaim"
    }
    check_storage(template["spec"], trainer["args"], claims)
    check_hardened(template["spec"])


def test_kubeflow_pods_are_in_the_policy_and_the_service(
    kubeflow: list[Document], manifests: list[Document]
) -> None:
    """JobSet gives pods names in a Service of the run's name: the one that is there already."""
    runtime, run = kubeflow
    (replicated,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    labels = replicated["template"]["spec"]["template"]["metadata"]["labels"]
    policy, service = one(manifests, "NetworkPolicy"), one(manifests, "Service")
    assert service["metadata"]["name"] == run["metadata"]["name"]
    assert service["spec"]["selector"].items() <= labels.items()
    assert policy["spec"]["podSelector"]["matchLabels"].items() <= labels.items()
