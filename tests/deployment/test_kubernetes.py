"""The manifests for Kubernetes and Kubeflow: against the real schemas, and against each other."""

from __future__ import annotations

import copy
import os
import re
import shutil
import subprocess
from collections.abc import Callable

import kubernetes_validate
import pytest
import yaml
from kubeflow_trainer_api import models
from kubernetes_validate.utils import all_versions

from distlab.course.catalogue import root
from solutions.phase4_production import exit_codes
from tests.deployment.manifests import (
    DEPLOYMENT,
    Document,
    after_exit,
    config_of,
    documents,
    is_under,
    launcher_variables,
    one,
)

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


DISRUPTED = {"type": "DisruptionTarget", "status": "True"}


def check_failure_policy(spec: Document) -> None:
    """A Job's rules are about its own container, and do with each exit code what it says."""
    pod = spec["template"]["spec"]
    assert pod["restartPolicy"] == "Never"  # what a failure policy asks for
    for rule in spec["podFailurePolicy"]["rules"]:
        if "onExitCodes" in rule:
            codes = rule["onExitCodes"]
            assert codes["containerName"] == pod["containers"][0]["name"]
            assert codes["values"] == sorted(set(codes["values"]))  # Kubernetes refuses others
    assert after_exit(spec, exit_codes.REFUSED) == "FailJob"
    assert after_exit(spec, exit_codes.PREEMPTED) == "Ignore"
    assert after_exit(spec, exit_codes.CRASHED) == "Count"
    assert after_exit(spec, exit_codes.HUNG) == "Count"


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
    assert {"action": "Ignore", "onPodConditions": [DISRUPTED]} in spec["podFailurePolicy"]["rules"]
    check_failure_policy(spec)
    assert spec["podReplacementPolicy"] == "Failed"
    assert spec["backoffLimitPerIndex"] > 0
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


# -- names can be looked up, also where the node itself has a cache for them
def check_names_can_be_looked_up(policy: Document) -> None:
    """One rule lets the pods ask the cluster's name servers and the node's own cache."""
    ports = [{"protocol": "UDP", "port": 53}, {"protocol": "TCP", "port": 53}]
    (rule,) = [each for each in policy["spec"]["egress"] if each.get("ports") == ports]
    system = {"kubernetes.io/metadata.name": "kube-system"}
    assert {"namespaceSelector": {"matchLabels": system}} in rule["to"]
    assert {"ipBlock": {"cidr": "169.254.20.10/32"}} in rule["to"]  # NodeLocal DNSCache's address


def test_names_can_be_looked_up(manifests: list[Document]) -> None:
    check_names_can_be_looked_up(one(manifests, "NetworkPolicy"))


# -- the Job that fills the data claim
@pytest.mark.parametrize("version", VERSIONS)
def test_data_job_fits_the_schema(version: str) -> None:
    for document in documents("kubernetes-data.yaml"):
        kubernetes_validate.validate(document, version, strict=True)


def test_data_job_fills_what_the_trainer_reads(pod: Document, container: Document) -> None:
    filled = documents("kubernetes-data.yaml")
    copying = one(filled, "Job")["spec"]["template"]["spec"]
    (its,) = copying["containers"]
    claims = [
        {
            volume["name"]: volume["persistentVolumeClaim"]["claimName"]
            for volume in each["volumes"]
            if "persistentVolumeClaim" in volume
        }
        for each in (copying, pod)
    ]
    command, source, target = its["args"][:3]
    assert command == "copy"  # deletes nothing
    assert source.startswith("bucket:")
    (written,) = [each for each in its["volumeMounts"] if each["mountPath"] == target]
    (read,) = [each for each in container["volumeMounts"] if each["mountPath"] == "/data"]
    assert claims[0][written["name"]] == claims[1][read["name"]]
    assert not written.get("readOnly", False)
    check_hardened(copying)
    assert copying["securityContext"]["fsGroup"] == pod["securityContext"]["fsGroup"]
    assert [list(each) for each in its["envFrom"]] == [["secretRef"]]  # no key in the file


def test_data_job_reaches_the_bucket_and_nothing_reaches_it() -> None:
    filled = documents("kubernetes-data.yaml")
    policy, job = one(filled, "NetworkPolicy"), one(filled, "Job")
    labels = job["spec"]["template"]["metadata"]["labels"]
    assert policy["spec"]["podSelector"]["matchLabels"] == labels
    assert policy["spec"]["policyTypes"] == ["Ingress", "Egress"]
    assert "ingress" not in policy["spec"]
    check_names_can_be_looked_up(policy)
    assert {"ports": [{"protocol": "TCP", "port": 443}]} in policy["spec"]["egress"]
    training = one(documents("kubernetes.yaml"), "Service")["spec"]["selector"]
    assert not training.items() <= labels.items()  # no rendezvous is looked for there


# -- RDMA: an overlay
@pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl")
def test_rdma_overlay_adds_devices_and_changes_nothing_else(manifests: list[Document]) -> None:
    done = subprocess.run(
        ["kubectl", "kustomize", "--load-restrictor=LoadRestrictionsNone", "kubernetes-rdma"],
        cwd=DEPLOYMENT,
        env={**os.environ, "KUBECONFIG": "/dev/null"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    overlaid = list(yaml.safe_load_all(done.stdout))
    for document in overlaid:
        kubernetes_validate.validate(document, VERSIONS[-1], strict=True)
    (its,) = one(overlaid, "Job")["spec"]["template"]["spec"]["containers"]
    for wanted in ("requests", "limits"):
        assert its["resources"][wanted].pop("rdma/hca_shared_devices_a") == "1"
    assert its["securityContext"]["capabilities"].pop("add") == ["IPC_LOCK"]
    ours = {each["name"]: each for each in its["env"] if each["name"].startswith("NCCL_")}
    assert ours["NCCL_NET"]["value"] == "IB"
    its["env"] = [each for each in its["env"] if each["name"] not in ours]

    def unordered(found: list[Document]) -> list[Document]:
        return sorted(found, key=lambda each: (each["kind"], each["metadata"]["name"]))

    assert unordered(overlaid) == unordered(manifests)


def test_image_has_what_rdma_needs() -> None:
    for package in ("libibverbs1=", "ibverbs-providers="):  # NCCL loads them at run time
        assert package in dockerfile()


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
    assert "exec ./launch_training.sh" in trainer["command"][2]
    given = {each["name"] for each in trainer["env"]}
    set_there = set(re.findall(r"([A-Z_]+)=\$PET_\1", trainer["command"][2])) | given
    assert {each["name"] for each in container["env"]} == set_there
    assert trainer["numNodes"] == runtime["spec"]["mlPolicy"]["numNodes"]
    assert trainer["numNodes"] == job["spec"]["completions"]
    assert str(trainer["numProcPerNode"]) == container["resources"]["limits"]["nvidia.com/gpu"]
    assert trainer["resourcesPerNode"] == container["resources"]
    (replicated,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    template = replicated["template"]["spec"]["template"]
    (its,) = template["spec"]["containers"]
    assert its["name"] == "node"  # the name by which Kubeflow finds it
    assert its["image"] == trainer["image"] == container["image"]
    assert (
        template["metadata"]["annotations"] == (job["spec"]["template"]["metadata"]["annotations"])
    )
    claims = {
        each["metadata"]["name"] for each in manifests if each["kind"] == "PersistentVolumeClaim"
    }
    check_storage(template["spec"], trainer["args"], claims)
    check_hardened(template["spec"])


def test_kubeflow_does_not_begin_a_refused_run_again(kubeflow: list[Document]) -> None:
    """The Job of the nodes fails for a reason of its own, and the set of Jobs with it."""
    spec = kubeflow[0]["spec"]["template"]["spec"]
    (replicated,) = spec["replicatedJobs"]
    check_failure_policy(replicated["template"]["spec"])
    first = spec["failurePolicy"]["rules"][0]
    assert (first["action"], first["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])
    job = {"apiVersion": "batch/v1", "kind": "Job", **replicated["template"]}
    job["metadata"] = {"name": "node", **job["metadata"]}
    kubernetes_validate.validate(job, VERSIONS[-1], strict=True)


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
