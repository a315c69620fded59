"""Inference components of the control plane: copies of a container, and adapters in them; and the
deploy kit, which creates and deletes all of it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.gateway.control_planes import BODY, IMAGE, ROLE, ControlPlane, control_plane
from tests.gateway.gateways import CREDENTIALS, REGION
from tests.gateway.small_disk import fill, on_small_disk, seen_by
from tests.gateway.test_gateway import fails
from tests.sources.fetching import needs_mount
from tests.system.container import ENVIRON, ROOT, wait_until

DEMO = ROOT / "handlers" / "lmi_dist" / "demo"
NEEDS = {"MinMemoryRequiredInMb": 1024}
RESERVATION = "arn:aws:sagemaker:eu-central-1:123456789012:training-plan/chat"
RANK = 4
DISK_BYTES = 4 << 20


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    with control_plane(tmp_path_factory.mktemp("plane")) as running:
        yield running


def create_endpoint(plane: ControlPlane) -> None:
    """An endpoint without models, for components."""
    variant = {
        "VariantName": "AllTraffic",
        "InstanceType": "ml.g6.2xlarge",
        "InitialInstanceCount": 1,
    }
    plane.control.create_endpoint_config(
        EndpointConfigName="shared", ExecutionRoleArn=ROLE, ProductionVariants=[variant]
    )
    plane.create("shared", "shared")
    plane.wait_in_service("shared")


def create(plane: ControlPlane, name: str, num_copies: int = 1, **specification: Any) -> None:
    plane.control.create_inference_component(
        InferenceComponentName=name,
        EndpointName="shared",
        VariantName="AllTraffic",
        Specification={"ComputeResourceRequirements": NEEDS, **specification},
        RuntimeConfig={"CopyCount": num_copies},
    )


def describe(plane: ControlPlane, name: str) -> dict[str, Any]:
    description: dict[str, Any] = plane.control.describe_inference_component(
        InferenceComponentName=name
    )
    return description


def wait_settled(plane: ControlPlane, name: str) -> dict[str, Any]:
    wait_until(
        lambda: describe(plane, name)["InferenceComponentStatus"] in ("InService", "Failed"),
        f"{name} is settled",
    )
    return describe(plane, name)


def delete(plane: ControlPlane, name: str) -> None:
    plane.control.delete_inference_component(InferenceComponentName=name)
    listed = plane.control.list_inference_components
    wait_until(lambda: not listed(NameContains=name)["InferenceComponents"], f"{name} is deleted")


def answer(plane: ControlPlane, component: str) -> str:
    response = plane.aws.invoke(BODY, "shared", InferenceComponentName=component)
    text: str = json.loads(response["Body"].read())["generated_text"]
    return text


def test_components_are_created_resized_updated_and_deleted(plane: ControlPlane) -> None:
    create_endpoint(plane)
    plane.model("echo")
    create(plane, "first", ModelName="echo")
    create(plane, "bad", Container={"Image": IMAGE, "ArtifactUrl": "s3://models/broken/"})

    description = wait_settled(plane, "first")
    assert description["InferenceComponentStatus"] == "InService"
    assert description["RuntimeConfig"] == {"DesiredCopyCount": 1, "CurrentCopyCount": 1}
    assert description["Specification"]["ModelName"] == "echo"
    assert answer(plane, "first") == "hello"
    reason = wait_settled(plane, "bad")["FailureReason"]
    assert "holds notes.txt" in reason and str(plane.folder) not in reason
    with fails("ValidationError", 400) as error:
        plane.aws.invoke(BODY, "shared")

    assert "Inference Component Name header is required" in error["Error"]["Message"]

    plane.control.update_inference_component_runtime_config(
        InferenceComponentName="first", DesiredRuntimeConfig={"CopyCount": 2}
    )
    assert wait_settled(plane, "first")["RuntimeConfig"]["CurrentCopyCount"] == 2

    bad = {"Container": {"Image": IMAGE, "ArtifactUrl": "s3://models/broken/"}}
    plane.control.update_inference_component(
        InferenceComponentName="first",
        Specification={"ComputeResourceRequirements": NEEDS, **bad},
    )
    description = wait_settled(plane, "first")
    assert description["InferenceComponentStatus"] == "InService"
    assert "holds notes.txt" in description["FailureReason"]
    assert description["Specification"]["ModelName"] == "echo"
    assert answer(plane, "first") == "hello"

    with fails("ValidationException", 400) as error:
        plane.control.delete_endpoint(EndpointName="shared")

    assert "must be deleted first" in error["Error"]["Message"]
    delete(plane, "first")
    delete(plane, "bad")
    plane.delete("shared")


@needs_mount
def test_a_component_whose_disk_fills_up_serves_and_is_kept_once_there_is_room(
    tmp_path: Path,
) -> None:
    control = tmp_path / "control"
    with control_plane(tmp_path, prefix=on_small_disk(control, DISK_BYTES)) as plane:
        create_endpoint(plane)
        plane.model("echo")
        create(plane, "first", ModelName="echo")
        disk = seen_by(plane.aws, control)
        wait_until(lambda: list(disk.glob("logs/shared/first-*")), "its container starts")
        filler = disk / "filler"
        fill(filler)

        def kept_status() -> str:
            state = json.loads((disk / "state.json").read_bytes())
            status: str = state["components"]["first"]["status"]
            return status

        assert wait_settled(plane, "first")["InferenceComponentStatus"] == "InService"
        assert kept_status() == "Creating"
        assert answer(plane, "first") == "hello"
        with fails("InternalFailure", 500):
            plane.control.delete_inference_component(InferenceComponentName="first")

        filler.unlink()
        wait_until(lambda: kept_status() == "InService", "it is written")
        delete(plane, "first")


def write_adapter(folder: Path) -> None:
    """Write an adapter of the demo model that changes what it answers."""
    config = json.loads((DEMO / "config.json").read_text())
    hidden_size = config["hidden_size"]
    num_outputs = config["num_attention_heads"] * (
        config.get("head_dim") or hidden_size // config["num_attention_heads"]
    )
    random = np.random.default_rng(47)
    prefix = "base_model.model.model.layers.0.self_attn.q_proj"
    tensors = {
        f"{prefix}.lora_A.weight": random.normal(size=(RANK, hidden_size)).astype(np.float32),
        f"{prefix}.lora_B.weight": random.normal(size=(num_outputs, RANK)).astype(np.float32),
    }
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    adapter = {"peft_type": "LORA", "r": RANK, "lora_alpha": 64, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(adapter))


def test_an_adapter_answers_by_its_component_also_after_the_gateway_was_killed(
    tmp_path: Path,
) -> None:
    with control_plane(tmp_path) as plane:
        write_adapter(plane.bucket / "poet")
        create_endpoint(plane)
        create(
            plane, "base", Container={"Image": IMAGE, "Environment": {"OPTION_ENABLE_LORA": "true"}}
        )
        assert wait_settled(plane, "base")["InferenceComponentStatus"] == "InService"
        plane.control.create_inference_component(
            InferenceComponentName="poet",
            EndpointName="shared",
            Specification={
                "BaseInferenceComponentName": "base",
                "Container": {"ArtifactUrl": "s3://models/poet"},
            },
        )
        description = wait_settled(plane, "poet")
        assert description["InferenceComponentStatus"] == "InService", description
        texts = [answer(plane, "base"), answer(plane, "poet")]
        assert texts[0] != texts[1]
        with fails("ValidationException", 400) as error:
            plane.control.delete_inference_component(InferenceComponentName="base")

        assert "is the base of poet" in error["Error"]["Message"]
        os.kill(plane.aws.process.pid, signal.SIGKILL)

    with control_plane(tmp_path) as plane:
        wait_settled(plane, "base")
        wait_settled(plane, "poet")
        assert [answer(plane, "base"), answer(plane, "poet")] == texts
        delete(plane, "poet")
        with fails("ValidationError", 400):
            answer(plane, "poet")


def test_the_deploy_kit_deploys_updates_invokes_and_tears_down(plane: ControlPlane) -> None:
    def kit(*words: str) -> str:
        environ = {
            **ENVIRON,
            **CREDENTIALS,
            "AWS_DEFAULT_REGION": REGION,
            "AWS_ENDPOINT_URL": plane.aws.url,
            "PYTHONPATH": str(ROOT),
        }
        command = [sys.executable, "-P", "-m", "scripts.sagemaker_kit", *words]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return done.stdout

    body = plane.folder / "body.json"
    body.write_bytes(BODY)
    deploy = ["--image", IMAGE, "--role", ROLE, "--instance-type", "ml.g6.2xlarge"]
    deploy += ["--model", "s3://models/echo/", "--poll", "0.1"]

    further = ["--subnet", "subnet-1a", "--security-group", "sg-1", "--kms-key", "alias/disk"]
    further += ["--tag", "team=chat", "--fallback", "ml.g6e.2xlarge", "--metrics-s", "60"]
    further += ["--capture", "s3://seen/chat", "--output-kms-key", "alias/answers"]
    further += ["--routing", "PREFIX_AWARE", "--prefix-length", "4096"]
    further += ["--prefix-threshold", "16"]
    further += ["--capacity-reservation", RESERVATION]
    assert kit("deploy", "chat", *deploy, *further) == "chat is InService\n"
    arn = plane.describe("chat")["EndpointArn"]
    tags = plane.control.list_tags(ResourceArn=arn)["Tags"]
    assert tags == [{"Key": "team", "Value": "chat"}]
    assert kit("update", "chat", *deploy, "--rolling", "50") == "chat is updated\n"
    [updated] = plane.control.list_models(NameContains="chat")["Models"]
    assert updated["ModelName"] != "chat" and plane.variant("chat") == "AllTraffic"
    assert kit("teardown", "chat", "--poll", "0.1") == "chat is deleted\n"
    assert plane.control.list_models(NameContains="chat")["Models"] == []
    assert plane.control.list_endpoint_configs(NameContains="chat")["EndpointConfigs"] == []

    shared = ["--component", "base", "--memory-mb", "1024"]
    assert kit("deploy", "many", *deploy, *shared) == "many is InService\n"
    answered = kit("invoke", "many", "--body", str(body), "--component", "base")
    assert json.loads(answered) == {"generated_text": "hello"}
    assert kit("teardown", "many", "--poll", "0.1") == "many is deleted\n"
    assert plane.control.list_endpoints()["Endpoints"] == []
    assert plane.control.list_models(NameContains="many")["Models"] == []
