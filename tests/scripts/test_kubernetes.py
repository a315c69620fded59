"""`scripts/kubernetes`: the manifests are valid, and fit what lmi does.

Kubernetes' own objects, and the pods inside other projects' objects, are held against Kubernetes'
schemas in strict mode. For those projects' objects no package has schemas, so the fields that their
documentation names stand here. promtool, of Debian's prometheus, reads the alert rules.
"""

from __future__ import annotations

import copy
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any, Literal

import kubernetes_validate
import msgspec
import pytest
import yaml

from lmi.settings.config import ServerConfig
from lmi.settings.given import OTHER_ENV, key_of_env
from lmi.settings.table import find

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "scripts" / "kubernetes"
FILES = sorted(FOLDER.glob("*.yaml"))
LLM_D = FOLDER / "llm-d" / "values.yaml"  # of a chart
# A row of a table of routes
ROUTE = re.compile(r'\("(/[^"]*)", \[[^\]]*"GET"')
PATHS = {
    path
    for file in (ROOT / "lmi/server/routes").glob("*.py")
    for path in ROUTE.findall(file.read_text())
}
# The oldest that the manifests are meant for, and the newest that the package knows
RELEASES = (
    "1.32",
    "1.37",
)
# Which its controller adds to each pod
LWS_VARIABLES = {
    "LWS_LEADER_ADDRESS",
    "LWS_GROUP_SIZE",
    "LWS_WORKER_INDEX",
}
NAME = "app.kubernetes.io/name"
PART_OF = "app.kubernetes.io/part-of"
WORKER_INDEX = "leaderworkerset.sigs.k8s.io/worker-index"
# For a server to end after its drain
END_S = 5


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


class SecretKey(Strict):
    name: str
    key: str


class Authorization(Strict):
    credentials: SecretKey


class PodMetricsEndpoint(Strict):
    port: str
    path: str
    interval: str
    authorization: Authorization


class LabelSelector(Strict):
    matchLabels: dict[str, str]


class PodMonitorSpec(Strict):
    selector: LabelSelector
    podMetricsEndpoints: list[PodMetricsEndpoint]
    podTargetLabels: list[str] = []


class PodMonitor(Strict):
    apiVersion: Literal["monitoring.coreos.com/v1"]
    kind: Literal["PodMonitor"]
    metadata: Metadata
    spec: PodMonitorSpec


class Alert(Strict):
    alert: str
    expr: str
    labels: dict[str, str]
    annotations: dict[str, str]
    duration: str = msgspec.field(default="0s", name="for")


class AlertGroup(Strict):
    name: str
    rules: list[Alert]


class PrometheusRuleSpec(Strict):
    groups: list[AlertGroup]


class PrometheusRule(Strict):
    apiVersion: Literal["monitoring.coreos.com/v1"]
    kind: Literal["PrometheusRule"]
    metadata: Metadata
    spec: PrometheusRuleSpec


class PortNumber(Strict):
    number: int


class EndpointPicker(Strict):
    name: str
    port: PortNumber
    failureMode: Literal["FailOpen", "FailClose"] = "FailClose"


class InferencePoolSpec(Strict):
    selector: LabelSelector
    targetPorts: list[PortNumber]
    endpointPickerRef: EndpointPicker


class InferencePool(Strict):
    apiVersion: Literal["inference.networking.k8s.io/v1"]
    kind: Literal["InferencePool"]
    metadata: Metadata
    spec: InferencePoolSpec


class GatewayName(Strict):
    name: str


class Backend(Strict):
    group: str
    kind: str
    name: str


class RouteTimeouts(Strict):
    request: str


class RouteRule(Strict):
    backendRefs: list[Backend]
    timeouts: RouteTimeouts


class HttpRouteSpec(Strict):
    parentRefs: list[GatewayName]
    rules: list[RouteRule]


class HttpRoute(Strict):
    apiVersion: Literal["gateway.networking.k8s.io/v1"]
    kind: Literal["HTTPRoute"]
    metadata: Metadata
    spec: HttpRouteSpec


class PresetSpec(Strict):
    template: dict[str, Any]


class LLMInferenceServiceConfig(Strict):
    apiVersion: Literal["serving.kserve.io/v1alpha1"]
    kind: Literal["LLMInferenceServiceConfig"]
    metadata: Metadata
    spec: PresetSpec


class PresetName(Strict):
    name: str


class ServedModel(Strict):
    name: str
    uri: str


class Router(Strict):
    route: dict[str, Any]
    gateway: dict[str, Any]
    scheduler: dict[str, Any]


class LLMInferenceServiceSpec(Strict):
    baseRefs: list[PresetName]
    model: ServedModel
    replicas: int
    router: Router
    template: dict[str, Any]


class LLMInferenceService(Strict):
    apiVersion: Literal["serving.kserve.io/v1alpha1"]
    kind: Literal["LLMInferenceService"]
    metadata: Metadata
    spec: LLMInferenceServiceSpec


CUSTOM = {
    "LeaderWorkerSet": LeaderWorkerSet,
    "ScaledObject": ScaledObject,
    "PodMonitor": PodMonitor,
    "PrometheusRule": PrometheusRule,
    "InferencePool": InferencePool,
    "HTTPRoute": HttpRoute,
    "LLMInferenceServiceConfig": LLMInferenceServiceConfig,
    "LLMInferenceService": LLMInferenceService,
}


WITHOUT_PODS = (
    "PodMonitor",
    "PrometheusRule",
    "InferencePool",
    "HTTPRoute",
)  # other projects' objects


def manifests(path: Path) -> list[dict[str, Any]]:
    return [document for document in yaml.safe_load_all(path.read_text()) if document]


ALL = [
    pytest.param(each, id=f"{path.stem}-{each['kind']}")
    for path in FILES
    for each in manifests(path)
]
OBJECTS = {
    (each["kind"], each["metadata"]["name"]): each for path in FILES for each in manifests(path)
}
DEPLOYMENT = OBJECTS["Deployment", "lmi"]
NODES = OBJECTS["LeaderWorkerSet", "lmi-nodes"]
ON_CPUS = OBJECTS["Deployment", "lmi-cpu"]
PRESET = OBJECTS["LLMInferenceServiceConfig", "lmi"]
TEMPLATES = {
    "Deployment": DEPLOYMENT["spec"]["template"],
    "LeaderWorkerSet": NODES["spec"]["leaderWorkerTemplate"]["workerTemplate"],
    "Deployment on CPUs": ON_CPUS["spec"]["template"],
}
SCALED = msgspec.convert(OBJECTS["ScaledObject", "lmi"], ScaledObject)


def as_kubernetes_own(manifest: dict[str, Any]) -> dict[str, Any]:
    """The part of a manifest that Kubernetes' schemas describe."""
    if manifest["kind"] == "LeaderWorkerSet":
        template = manifest["spec"]["leaderWorkerTemplate"]["workerTemplate"]
        return {
            "apiVersion": "v1",
            "kind": "PodTemplate",
            "metadata": manifest["metadata"],
            "template": template,
        }

    if manifest["kind"] == "ScaledObject":
        behavior = manifest["spec"]["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
        target = {"kind": "Deployment", "name": "lmi"}
        spec = {"scaleTargetRef": target, "maxReplicas": 1, "behavior": behavior}
        return {"apiVersion": "autoscaling/v2", "kind": "HorizontalPodAutoscaler", "spec": spec}

    if manifest["kind"].startswith("LLMInferenceService"):
        template = {"spec": manifest["spec"]["template"]}
        return {
            "apiVersion": "v1",
            "kind": "PodTemplate",
            "metadata": manifest["metadata"],
            "template": template,
        }

    return manifest


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize(
    "manifest", [each for each in ALL if each.values[0]["kind"] not in WITHOUT_PODS]
)
def test_a_manifest_fits_kubernetes_schemas(manifest: dict[str, Any], release: str) -> None:
    kubernetes_validate.validate(as_kubernetes_own(manifest), release, strict=True)


@pytest.mark.parametrize("manifest", [each for each in ALL if each.values[0]["kind"] in CUSTOM])
def test_a_custom_object_has_documented_fields_only(manifest: dict[str, Any]) -> None:
    msgspec.convert(manifest, CUSTOM[manifest["kind"]])


def test_the_schemas_find_a_misspelt_field() -> None:
    misspelt = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "lmi"},
        "spec": {"selektor": {}},
    }
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
    return {variable["name"]: variable.get("value", "") for variable in container["env"]}


def test_every_probe_asks_a_route_at_the_port_that_the_container_opens(
    container: dict[str, Any],
) -> None:
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports["http"] == ServerConfig().port
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["port"] == "http"
        assert container[probe]["httpGet"]["path"] in PATHS


def test_only_a_lost_server_is_restarted(container: dict[str, Any]) -> None:
    """/ping is 503 while an engine is started again, so liveness asks the route that is
    200 then.
    """

    assert (
        container["startupProbe"]["httpGet"]["path"]
        == container["readinessProbe"]["httpGet"]["path"]
        == "/ping"
    )
    assert container["livenessProbe"]["httpGet"]["path"] == "/v2/health/live"

    startup = container["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] == 3600


def test_a_pod_has_time_for_its_delay_its_drain_and_its_end(
    pod: dict[str, Any], container: dict[str, Any]
) -> None:
    delay_s = float(variables(container)["SERVING_DRAIN_DELAY"])
    drain_s = float(variables(container)["SERVING_DRAIN_TIMEOUT"])
    assert pod["terminationGracePeriodSeconds"] >= delay_s + drain_s + END_S
    readiness = container["readinessProbe"]
    assert delay_s >= readiness["periodSeconds"] * readiness["failureThreshold"]


def test_every_variable_is_one_that_lmi_its_engine_or_the_hub_reads(
    container: dict[str, Any],
) -> None:
    for name in variables(container).keys() - {
        "HF_TOKEN",
        "HF_HOME",
        "HF_MODEL_ID",
        "VLLM_HOST_IP",
    }:
        key = key_of_env(name)
        is_known = find(key) is not None or key in ("option.master_port", "download_dir")
        assert name.startswith(("OPTION_", "SERVING_")) and is_known, name


def test_what_is_written_has_a_volume_since_the_root_is_read_only(
    pod: dict[str, Any], container: dict[str, Any]
) -> None:
    assert (
        container["securityContext"]["readOnlyRootFilesystem"]
        and pod["securityContext"]["runAsNonRoot"]
    )
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    assert {"/tmp", "/cache", "/keys"} <= mounts.keys() <= {"/tmp", "/cache", "/keys", "/dev/shm"}
    assert set(mounts.values()) == {mount["name"] for mount in pod["volumes"]}
    for name in ("HF_HOME", "SERVING_DOWNLOAD_DIR"):
        assert variables(container)[name].startswith("/cache/")


def test_the_patch_puts_the_claim_in_the_place_of_the_empty_volume() -> None:
    patch = json.loads((FOLDER / "cache-patch.json").read_text())
    [volume] = patch["spec"]["template"]["spec"]["volumes"]
    assert ("PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"]) in OBJECTS

    # kubectl merges volumes by their names, and null removes a field.
    patched = copy.deepcopy(DEPLOYMENT)
    volumes = {volume["name"]: volume for volume in patched["spec"]["template"]["spec"]["volumes"]}
    target = volumes[volume["name"]]
    target |= volume
    assert target.pop("emptyDir") is None

    kubernetes_validate.validate(patched, RELEASES[-1], strict=True)


@pytest.mark.parametrize(
    ("name", "kind", "added"),
    [
        ("lmi", "Deployment", {}),
        ("lmi-cpu", "Deployment on CPUs", {}),
        ("lmi-leaders", "LeaderWorkerSet", {WORKER_INDEX: "0"}),
    ],
)
def test_a_service_selects_the_pods_that_answer(
    name: str, kind: str, added: dict[str, str]
) -> None:
    service = OBJECTS["Service", name]["spec"]
    labels = TEMPLATES[kind]["metadata"]["labels"]
    assert service["selector"] == {NAME: labels[NAME], **added}
    assert [port["targetPort"] for port in service["ports"]] == ["http"]


def test_no_service_has_the_name_that_the_controller_gives_to_its_own() -> None:
    assert ("Service", NODES["metadata"]["name"]) not in OBJECTS


def test_the_parallel_degrees_multiply_to_the_gpus_of_a_group() -> None:
    [container] = TEMPLATES["LeaderWorkerSet"]["spec"]["containers"]
    environ = variables(container)
    num_gpus = NODES["spec"]["leaderWorkerTemplate"]["size"] * int(
        container["resources"]["limits"]["nvidia.com/gpu"]
    )
    degrees = (environ["OPTION_TENSOR_PARALLEL_DEGREE"], environ["OPTION_PIPELINE_PARALLEL_DEGREE"])
    assert int(degrees[0]) * int(degrees[1]) == num_gpus
    assert int(environ["OPTION_MASTER_PORT"]) in {
        port["containerPort"] for port in container["ports"]
    }


def test_lmi_reads_what_the_controller_of_the_leaderworkerset_adds() -> None:
    keys_read = {OTHER_ENV[name] for name in LWS_VARIABLES}
    assert keys_read == {"option.master_addr", "option.nnodes", "option.node_rank"}
    assert LWS_VARIABLES.isdisjoint(
        variables(TEMPLATES["LeaderWorkerSet"]["spec"]["containers"][0])
    )
    assert NODES["spec"]["startupPolicy"] == "LeaderCreated", (
        "the leader is ready only when its workers have joined"
    )


def test_the_scaled_object_asks_for_metrics_that_lmi_writes_about_the_pods_that_it_scales() -> None:
    source = (ROOT / "lmi/server/field_metrics.py").read_text()
    target = OBJECTS[SCALED.spec.scaleTargetRef.kind, SCALED.spec.scaleTargetRef.name]
    assert target["apiVersion"] == SCALED.spec.scaleTargetRef.apiVersion

    for trigger in SCALED.spec.triggers:
        query = re.sub(r"rate\((.+)\[1m\]\)", r"\1", trigger.metadata.query)
        match = re.fullmatch(r'sum\((lmi_\w+)\{app_kubernetes_io_name="(\S+)"\}\)', query)

        assert match and re.search(f'"{match[1].removesuffix("_total")}["{{]', source)
        assert (
            target["spec"]["template"]["metadata"]["labels"]["app.kubernetes.io/name"] == match[2]
        )

    assert SCALED.spec.minReplicaCount == DEPLOYMENT["spec"]["replicas"] > 1


def test_no_pod_is_called_for_while_the_pods_that_run_have_room() -> None:
    [container] = DEPLOYMENT["spec"]["template"]["spec"]["containers"]
    running = next(trigger for trigger in SCALED.spec.triggers if trigger.name == "running")
    assert (
        0
        < int(running.metadata.threshold)
        < int(variables(container)["OPTION_MAX_ROLLING_BATCH_SIZE"])
    )


def test_the_pods_say_where_their_metrics_are() -> None:
    for template in TEMPLATES.values():
        annotations = template["metadata"]["annotations"]
        [container] = template["spec"]["containers"]
        assert annotations["prometheus.io/port"] == variables(container)["SERVING_MANAGEMENT_PORT"]
        assert annotations["prometheus.io/path"] in PATHS


@pytest.mark.parametrize("name", ["lmi", "lmi-cpu"])
def test_a_drain_of_nodes_leaves_a_pod_that_serves(name: str) -> None:
    deployment = OBJECTS["Deployment", name]["spec"]
    budget = OBJECTS["PodDisruptionBudget", name]["spec"]

    assert budget["selector"] == deployment["selector"]
    assert budget["maxUnavailable"] < deployment["replicas"]
    for spread in deployment["template"]["spec"]["topologySpreadConstraints"]:
        assert spread["labelSelector"] == deployment["selector"]


def test_only_prometheus_reaches_management_and_only_ranks_reach_ranks() -> None:
    policy = OBJECTS["NetworkPolicy", "lmi"]["spec"]
    ranks = OBJECTS["NetworkPolicy", "lmi-ranks"]["spec"]
    open_ports = {
        port["port"] for rule in policy["ingress"] if "from" not in rule for port in rule["ports"]
    }

    assert open_ports == {"http"}

    for template in TEMPLATES.values():
        assert (
            policy["podSelector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
        )

        [container] = template["spec"]["containers"]
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}

        assert str(ports["management"]) == variables(container)["SERVING_MANAGEMENT_PORT"]

    [rule] = ranks["ingress"]
    assert rule == {"from": [{"podSelector": ranks["podSelector"]}]}
    assert ranks["podSelector"]["matchLabels"] == {NAME: NODES["metadata"]["name"]}


def test_every_pod_has_keys_from_the_secret_of_which_prometheus_has_one(
    pod: dict[str, Any], container: dict[str, Any]
) -> None:
    [endpoint] = OBJECTS["PodMonitor", "lmi"]["spec"]["podMetricsEndpoints"]
    [secret] = [
        volume["secret"]["secretName"] for volume in pod["volumes"] if volume["name"] == "keys"
    ]

    assert variables(container)["OPTION_API_KEY_FILE"] == "/keys/keys"
    assert endpoint["authorization"]["credentials"]["name"] == secret
    assert (
        endpoint["port"] in {port["name"] for port in container["ports"]}
        and endpoint["path"] in PATHS
    )


def test_on_cpus_a_pod_is_given_all_that_it_may_use() -> None:
    [container] = TEMPLATES["Deployment on CPUs"]["spec"]["containers"]
    assert container["resources"]["requests"] == container["resources"]["limits"]
    assert variables(container)["OPTION_ROLLING_BATCH"] == "lmi-dist"


def test_the_inference_gateway_finds_the_pods_at_their_port() -> None:
    pool = OBJECTS["InferencePool", "lmi"]["spec"]
    route = OBJECTS["HTTPRoute", "lmi"]["spec"]
    [backend] = route["rules"][0]["backendRefs"]

    assert pool["selector"] == DEPLOYMENT["spec"]["selector"]
    assert pool["targetPorts"] == [{"number": ServerConfig().port}]
    assert (backend["kind"], backend["name"]) == ("InferencePool", "lmi")


def test_the_presets_of_kserve_and_llm_d_serve_and_end_as_the_deployment_does() -> None:
    preset = PRESET["spec"]["template"]
    decode = yaml.safe_load(LLM_D.read_text())["decode"]
    pods = [(preset, preset["containers"][0]), (decode, {**decode["containers"][0]["extraConfig"]})]

    for pod, container in pods:
        environ = variables(pod["containers"][0])
        pause_s = container["lifecycle"]["preStop"]["sleep"]["seconds"]

        assert environ["SERVING_PORT"] == "8000"
        assert (
            pod["terminationGracePeriodSeconds"]
            >= pause_s + float(environ["SERVING_DRAIN_TIMEOUT"]) + END_S
        )

        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            assert (
                container[probe]["httpGet"]["path"] in PATHS
                and container[probe]["httpGet"]["port"] == 8000
            )


def test_alerts_read_series_that_lmi_writes(tmp_path: Path) -> None:
    documented = (ROOT / "docs" / "metrics.md").read_text()
    rules = OBJECTS["PrometheusRule", "lmi"]["spec"]
    alerts = [alert for group in rules["groups"] for alert in group["rules"]]

    for alert in alerts:
        for series in re.findall(r"\b(?:lmi|process)_\w+", alert["expr"]):
            assert f"`{series.removesuffix('_bucket')}`" in documented, series

    if promtool := shutil.which("promtool"):
        file = tmp_path / "rules.yaml"
        file.write_text(yaml.safe_dump(rules))
        checked = subprocess.run([promtool, "check", "rules", file], capture_output=True, text=True)

        assert checked.returncode == 0 and f"{len(alerts)} rules found" in checked.stdout, (
            checked.stderr
        )


def test_readme_names_every_manifest() -> None:
    text = (FOLDER / "README.md").read_text()
    assert all(f"`{path.relative_to(FOLDER)}`" in text for path in (*FILES, LLM_D))
