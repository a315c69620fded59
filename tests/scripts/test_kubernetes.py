"""`scripts/kubernetes`: the manifests are valid, and fit what lmi does.

Kubernetes' own objects, and the pods inside a LeaderWorkerSet, are held against Kubernetes' schemas in strict mode. For
LeaderWorkerSet and ScaledObject no package has schemas, so the fields that their documentation names stand here.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal

import kubernetes_validate
import msgspec
import pytest
import yaml

from lmi.settings.config import ServerConfig
from lmi.settings.values import OTHER_ENV, find, key_of_env

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "scripts" / "kubernetes"
FILES = sorted(FOLDER.glob("*.yaml"))
ROUTE = re.compile(r'\("(/[^"]*)", \[[^\]]*"GET"')  # a row of a table of routes
PATHS = {path for file in (ROOT / "lmi/server/routes").glob("*.py") for path in ROUTE.findall(file.read_text())}
RELEASES = ("1.32", "1.37")  # the oldest that the manifests are meant for, and the newest that the package knows
LWS_VARIABLES = {"LWS_LEADER_ADDRESS", "LWS_GROUP_SIZE", "LWS_WORKER_INDEX"}  # which its controller adds to each pod
WORKER_INDEX = "leaderworkerset.sigs.k8s.io/worker-index"
END_S = 5  # for a server to end after its drain


class Strict(msgspec.Struct, forbid_unknown_fields=True):
    """An object in which an unknown field is a fault."""


class Metadata(Strict):
    name: str
    labels: dict[str, str] = {}


class LeaderWorkerTemplate(Strict):
    size: int
    workerTemplate: dict[str, Any]
    leaderTemplate: dict[str, Any] | None = None
    restartPolicy: Literal["RecreateGroupOnPodRestart", "None"] = "RecreateGroupOnPodRestart"


class LeaderWorkerSetSpec(Strict):
    leaderWorkerTemplate: LeaderWorkerTemplate
    replicas: int = 1
    startupPolicy: Literal["LeaderCreated", "LeaderReady"] = "LeaderCreated"


class LeaderWorkerSet(Strict):
    apiVersion: Literal["leaderworkerset.x-k8s.io/v1"]
    kind: Literal["LeaderWorkerSet"]
    metadata: Metadata
    spec: LeaderWorkerSetSpec


class ScaleTarget(Strict):
    name: str
    apiVersion: str = "apps/v1"
    kind: str = "Deployment"


class PrometheusTrigger(Strict):
    serverAddress: str
    query: str
    threshold: str


class Trigger(Strict):
    type: Literal["prometheus"]
    metadata: PrometheusTrigger
    name: str = ""
    metricType: Literal["AverageValue", "Value"] = "AverageValue"


class HpaConfig(Strict):
    behavior: dict[str, Any]


class Advanced(Strict):
    horizontalPodAutoscalerConfig: HpaConfig


class ScaledObjectSpec(Strict):
    scaleTargetRef: ScaleTarget
    triggers: list[Trigger]
    minReplicaCount: int = 0
    maxReplicaCount: int = 100
    pollingInterval: int = 30
    advanced: Advanced | None = None


class ScaledObject(Strict):
    apiVersion: Literal["keda.sh/v1alpha1"]
    kind: Literal["ScaledObject"]
    metadata: Metadata
    spec: ScaledObjectSpec


CUSTOM = {"LeaderWorkerSet": LeaderWorkerSet, "ScaledObject": ScaledObject}


def manifests(path: Path) -> list[dict[str, Any]]:
    return [document for document in yaml.safe_load_all(path.read_text()) if document]


ALL = [pytest.param(each, id=f"{path.stem}-{each['kind']}") for path in FILES for each in manifests(path)]
OBJECTS = {(each["kind"], each["metadata"]["name"]): each for path in FILES for each in manifests(path)}
DEPLOYMENT, NODES = OBJECTS["Deployment", "lmi"], OBJECTS["LeaderWorkerSet", "lmi-nodes"]
TEMPLATES = {
    "Deployment": DEPLOYMENT["spec"]["template"],
    "LeaderWorkerSet": NODES["spec"]["leaderWorkerTemplate"]["workerTemplate"],
}
SCALED = msgspec.convert(OBJECTS["ScaledObject", "lmi"], ScaledObject)


def as_kubernetes_own(manifest: dict[str, Any]) -> dict[str, Any]:
    """The part of a manifest that Kubernetes' schemas describe."""
    if manifest["kind"] == "LeaderWorkerSet":
        template = manifest["spec"]["leaderWorkerTemplate"]["workerTemplate"]
        return {"apiVersion": "v1", "kind": "PodTemplate", "metadata": manifest["metadata"], "template": template}
    if manifest["kind"] == "ScaledObject":
        behavior = manifest["spec"]["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
        target = {"kind": "Deployment", "name": "lmi"}
        spec = {"scaleTargetRef": target, "maxReplicas": 1, "behavior": behavior}
        return {"apiVersion": "autoscaling/v2", "kind": "HorizontalPodAutoscaler", "spec": spec}
    return manifest


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("manifest", ALL)
def test_a_manifest_fits_kubernetes_schemas(manifest: dict[str, Any], release: str) -> None:
    kubernetes_validate.validate(as_kubernetes_own(manifest), release, strict=True)


@pytest.mark.parametrize("manifest", [each for each in ALL if each.values[0]["kind"] in CUSTOM])
def test_a_custom_object_has_documented_fields_only(manifest: dict[str, Any]) -> None:
    msgspec.convert(manifest, CUSTOM[manifest["kind"]])


def test_the_schemas_find_a_misspelt_field() -> None:
    misspelt = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "lmi"}, "spec": {"selektor": {}}}
    with pytest.raises(kubernetes_validate.ValidationError, match="selektor"):
        kubernetes_validate.validate(misspelt, RELEASES[-1], strict=True)
    with pytest.raises(msgspec.ValidationError, match="replica"):
        msgspec.convert({**NODES, "spec": {**NODES["spec"], "replica": 1}}, LeaderWorkerSet)


@pytest.fixture(params=TEMPLATES)
def pod(request: pytest.FixtureRequest) -> dict[str, Any]:
    spec: dict[str, Any] = TEMPLATES[request.param]["spec"]
    return spec


@pytest.fixture
def container(pod: dict[str, Any]) -> dict[str, Any]:
    [only] = pod["containers"]
    return dict(only)


def variables(container: dict[str, Any]) -> dict[str, str]:
    return {each["name"]: each.get("value", "") for each in container["env"]}


def test_every_probe_asks_a_route_at_the_port_that_the_container_opens(container: dict[str, Any]) -> None:
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    assert ports["http"] == ServerConfig().port
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["port"] == "http"
        assert container[probe]["httpGet"]["path"] in PATHS


def test_only_a_lost_server_is_restarted(container: dict[str, Any]) -> None:
    """/ping is 503 while an engine is started again, so liveness asks the route that is 200 then."""
    assert container["startupProbe"]["httpGet"]["path"] == container["readinessProbe"]["httpGet"]["path"] == "/ping"
    assert container["livenessProbe"]["httpGet"]["path"] == "/v2/health/live"
    startup = container["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] == 3600


def test_a_pod_has_time_for_its_pause_its_drain_and_its_end(pod: dict[str, Any], container: dict[str, Any]) -> None:
    pause_s = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    drain_s = float(variables(container)["SERVING_DRAIN_TIMEOUT"])
    assert pod["terminationGracePeriodSeconds"] >= pause_s + drain_s + END_S
    readiness = container["readinessProbe"]
    assert pause_s >= readiness["periodSeconds"] * readiness["failureThreshold"]


def test_every_variable_is_one_that_lmi_its_engine_or_the_hub_reads(container: dict[str, Any]) -> None:
    for name in variables(container).keys() - {"HF_TOKEN", "HF_HOME", "HF_MODEL_ID", "VLLM_HOST_IP"}:
        key = key_of_env(name)
        known = find(key) is not None or key in ("option.master_port", "download_dir")
        assert name.startswith(("OPTION_", "SERVING_")) and known, name


def test_what_is_written_has_a_volume_since_the_root_is_read_only(
    pod: dict[str, Any], container: dict[str, Any]
) -> None:
    assert container["securityContext"]["readOnlyRootFilesystem"] and pod["securityContext"]["runAsNonRoot"]
    mounts = {each["mountPath"]: each["name"] for each in container["volumeMounts"]}
    assert mounts.keys() == {"/tmp", "/cache", "/dev/shm"}
    assert set(mounts.values()) == {each["name"] for each in pod["volumes"]}
    for name in ("HF_HOME", "SERVING_DOWNLOAD_DIR"):
        assert variables(container)[name].startswith("/cache/")


@pytest.mark.parametrize(
    ("name", "kind", "added"), [("lmi", "Deployment", {}), ("lmi-leaders", "LeaderWorkerSet", {WORKER_INDEX: "0"})]
)
def test_a_service_selects_the_pods_that_answer(name: str, kind: str, added: dict[str, str]) -> None:
    service = OBJECTS["Service", name]["spec"]
    assert service["selector"] == {**TEMPLATES[kind]["metadata"]["labels"], **added}
    assert [port["targetPort"] for port in service["ports"]] == ["http"]


def test_no_service_has_the_name_that_the_controller_gives_to_its_own() -> None:
    assert ("Service", NODES["metadata"]["name"]) not in OBJECTS


def test_the_parallel_degrees_multiply_to_the_gpus_of_a_group() -> None:
    [container] = TEMPLATES["LeaderWorkerSet"]["spec"]["containers"]
    environ = variables(container)
    num_gpus = NODES["spec"]["leaderWorkerTemplate"]["size"] * int(container["resources"]["limits"]["nvidia.com/gpu"])
    degrees = (environ["OPTION_TENSOR_PARALLEL_DEGREE"], environ["OPTION_PIPELINE_PARALLEL_DEGREE"])
    assert int(degrees[0]) * int(degrees[1]) == num_gpus
    assert int(environ["OPTION_MASTER_PORT"]) in {port["containerPort"] for port in container["ports"]}


def test_lmi_reads_what_the_controller_of_the_leaderworkerset_adds() -> None:
    read = {OTHER_ENV[name] for name in LWS_VARIABLES}
    assert read == {"option.master_addr", "option.nnodes", "option.node_rank"}
    assert LWS_VARIABLES.isdisjoint(variables(TEMPLATES["LeaderWorkerSet"]["spec"]["containers"][0]))
    assert NODES["spec"]["startupPolicy"] == "LeaderCreated", "the leader is ready only when its workers have joined"


def test_the_scaled_object_asks_for_metrics_that_lmi_writes_about_the_pods_that_it_scales() -> None:
    written = (ROOT / "lmi/server/metrics.py").read_text()
    target = OBJECTS[SCALED.spec.scaleTargetRef.kind, SCALED.spec.scaleTargetRef.name]
    assert target["apiVersion"] == SCALED.spec.scaleTargetRef.apiVersion
    for trigger in SCALED.spec.triggers:
        match = re.fullmatch(r'sum\((lmi_\w+)\{app_kubernetes_io_name="(\S+)"\}\)', trigger.metadata.query)
        assert match and re.search(f'"{match[1]}["{{]', written)
        assert target["spec"]["template"]["metadata"]["labels"]["app.kubernetes.io/name"] == match[2]
    assert SCALED.spec.minReplicaCount >= 1, "nobody counts waiting requests where no pod runs"


def test_no_pod_is_called_for_while_the_pods_that_run_have_room() -> None:
    [container] = DEPLOYMENT["spec"]["template"]["spec"]["containers"]
    running = next(each for each in SCALED.spec.triggers if each.name == "running")
    assert 0 < int(running.metadata.threshold) < int(variables(container)["OPTION_MAX_ROLLING_BATCH_SIZE"])


def test_the_pods_say_where_their_metrics_are() -> None:
    for template in TEMPLATES.values():
        annotations = template["metadata"]["annotations"]
        assert annotations["prometheus.io/port"] == str(ServerConfig().port)
        assert annotations["prometheus.io/path"] in PATHS


def test_readme_names_every_manifest() -> None:
    text = (FOLDER / "README.md").read_text()
    assert all(path.name in text for path in FILES)
