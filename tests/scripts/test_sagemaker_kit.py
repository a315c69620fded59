"""`scripts/sagemaker`: what it would send, what it refuses to send, and what it does with AWS's
answers.
"""

from __future__ import annotations

import base64
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import boto3
import pytest
import yaml
from botocore import xform_name
from botocore.exceptions import ClientError
from botocore.stub import Stubber

from scripts.sagemaker_kit.__main__ import main
from scripts.sagemaker_kit.driver import carry_out, rehearse
from scripts.sagemaker_kit.service_model import faults
from scripts.sagemaker_kit.steps import Call, Failed, Step, Wait
from scripts.sagemaker_kit.words import parse
from tests.scripts.aws import Reply, aws, part

ROOT = Path(__file__).parents[2]
IMAGE = "123456789012.dkr.ecr.eu-west-1.amazonaws.com/lmi:chat"
ROLE = "arn:aws:iam::123456789012:role/sagemaker"
GPU = "ml.g6.xlarge"
DEPLOY = ("deploy", "chat", "--image", IMAGE, "--role", ROLE, "--instance-type", GPU)
UPDATE = ("update", *DEPLOY[1:])
ROLLING = ("--rolling", "25", "--wait-s", "120", "--alarm", "chat-errors", "--alarm", "chat-slow")
HYPERPOD = ("hyperpod", "chat", "--image", IMAGE, "--instance-type", GPU)
TRANSFORM = (
    "transform",
    "chat",
    "--instance-type",
    GPU,
    "--input",
    "s3://data/in",
    "--output",
    "s3://data/out",
)
COMPONENT = ("--component", "base", "--memory-mb", "16384", "--gpus", "1")
VPC = ("--subnet", "subnet-1a", "--subnet", "subnet-1b", "--security-group", "sg-1")
POOLS = ("--fallback", "ml.g6e.xlarge", "--fallback", "ml.g5.xlarge")
PREFIX_AWARE = ("--routing", "PREFIX_AWARE", "--prefix-length", "4096", "--prefix-threshold", "16")
RESERVATION = "arn:aws:sagemaker:eu-west-1:123456789012:training-plan/chat"
REPOSITORY = "123456789012.dkr.ecr.eu-west-1.amazonaws.com/lmi"

COMMANDS: dict[str, Sequence[str]] = {
    "push": ("push", "chat", "--repository", REPOSITORY),
    "demo": DEPLOY,
    "hub id": (*DEPLOY, "--model", "Qwen/Qwen3-8B", "--env", "HF_TOKEN=t", "--count", "2"),
    "prefix": (*DEPLOY, "--model", "s3://models/llama", "--network-isolation"),
    "archive": (*DEPLOY, "--model", "s3://models/llama.tar.gz", "--startup-timeout", "3600"),
    "async": (*DEPLOY, "--async", "s3://answers/chat"),
    "multi-model": (*DEPLOY, "--multi-model", "s3://models/all"),
    "component": (*DEPLOY, *COMPONENT, "--network-isolation"),
    "VPC": (*DEPLOY, *VPC),
    "component in a VPC": (*DEPLOY, *COMPONENT, *VPC),
    "tags": (*DEPLOY, "--tag", "team=chat", "--tag", "stage="),
    "pools": (*DEPLOY, *POOLS),
    "reservation": (*DEPLOY, "--capacity-reservation", RESERVATION),
    "keys": (
        *DEPLOY,
        "--kms-key",
        "alias/disk",
        "--output-kms-key",
        "alias/answers",
        "--async",
        "s3://answers/chat",
    ),
    "capture": (*DEPLOY, "--capture", "s3://seen/chat", "--capture-percent", "5"),
    "prefix-aware routing": (*DEPLOY, *PREFIX_AWARE),
    "metrics": (*DEPLOY, "--metrics-s", "30"),
    "scaling": (*DEPLOY, "--max-count", "4"),
    "update": UPDATE,
    "rolling update": (*UPDATE, *ROLLING),
    "update of a component": (*UPDATE, *COMPONENT, *ROLLING),
    "update with alarms": (*UPDATE, "--alarm", "chat-errors", "--wait-s", "60", "--keep-count"),
    "scaling of a component": (*DEPLOY, *COMPONENT, "--min-count", "0", "--max-count", "4"),
    "teardown of what scales": ("teardown", "chat", "--scaled"),
    "adapter": (
        "adapter",
        "chat",
        "--component",
        "poet",
        "--base",
        "base",
        "--artifact",
        "s3://models/poet.tar.gz",
    ),
    "transform": TRANSFORM,
    "transform of a new model": (
        *TRANSFORM,
        "--image",
        IMAGE,
        "--role",
        ROLE,
        "--model",
        "s3://models/llama",
    ),
    "invoke": ("invoke", "chat", "--body", "BODY"),
    "invoke a component": ("invoke", "chat", "--body", "BODY", "--component", "poet"),
    "invoke a target model": ("invoke", "chat", "--body", "BODY", "--target-model", "llama.tar.gz"),
    "stream": ("invoke", "chat", "--body", "BODY", "--stream"),
    "invoke async": ("invoke", "chat", "--body", "BODY", "--async"),
    "invoke async from S3": ("invoke", "chat", "--body", "s3://data/body.json", "--async"),
    "teardown": ("teardown", "chat"),
}


@pytest.fixture
def body(tmp_path: Path) -> Path:
    path = tmp_path / "body.json"
    path.write_text('{"inputs": "Hello"}')
    return path


def steps_of(words: Sequence[str]) -> list[Step]:
    plan, options = parse(words)
    return rehearse(plan(options))


def calls_of(words: Sequence[str]) -> list[Call]:
    steps = [step.call if isinstance(step, Wait) else step for step in steps_of(words)]
    return [step for step in steps if isinstance(step, Call)]


def parameters_of(words: Sequence[str], operation: str) -> dict[str, Any]:
    return next(call.parameters for call in calls_of(words) if call.operation == operation)


def dry_run(words: Sequence[str], capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    assert main([*words, "--dry-run"]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    return [json.loads(line) for line in printed.out.splitlines()]


def refusal(words: Sequence[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main([*words, "--dry-run"]) == 2
    printed = capsys.readouterr()
    assert printed.out == "", "nothing would have been sent"
    return printed.err


@pytest.mark.parametrize("name", COMMANDS)
def test_botocore_takes_every_call_of_every_word(name: str, body: Path) -> None:
    for call in calls_of([str(body) if word == "BODY" else word for word in COMMANDS[name]]):
        client = boto3.client(
            call.service,
            region_name="eu-west-1",
            aws_access_key_id="nobody",
            aws_secret_access_key="nothing",
        )
        method = xform_name(call.operation)
        with Stubber(client) as stubber, pytest.raises(ClientError, match="arrived"):
            stubber.add_client_error(method, "arrived", expected_params=call.parameters)
            getattr(client, method)(**call.parameters)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_value_fits_the_pattern_the_list_and_the_limits_of_the_service_model(
    name: str, body: Path
) -> None:
    for call in calls_of([str(body) if word == "BODY" else word for word in COMMANDS[name]]):
        assert list(faults(call.service, call.operation, call.parameters)) == []


@pytest.mark.parametrize(
    ("operation", "parameters", "named"),
    [
        ("CreateModel", {"ModelName": "a b"}, "CreateModel.ModelName is 'a b', its pattern is"),
        (
            "CreateModel",
            {"ModelName": "a" * 64},
            "CreateModel.ModelName is 64 in length, allowed is 0 to 63",
        ),
        ("CreateModel", {}, 'Missing required parameter in input: "ModelName"'),
        ("CreateModel", {"ModelName": "a", "Colour": 1}, 'Unknown parameter in input: "Colour"'),
        (
            "CreateTransformJob",
            {
                "TransformJobName": "a",
                "ModelName": "a",
                "ModelClientConfig": {"InvocationsTimeoutInSeconds": 3601},
                "TransformInput": {
                    "DataSource": {"S3DataSource": {"S3DataType": "Folder", "S3Uri": "s3://a/b"}}
                },
                "TransformOutput": {"S3OutputPath": "s3://a/c"},
                "TransformResources": {"InstanceType": GPU, "InstanceCount": 1},
            },
            "InvocationsTimeoutInSeconds is 3601, allowed is 1 to 3600",
        ),
        ("ListInferenceComponents", {"SortBy": "Size"}, "SortBy is 'Size', which botocore"),
    ],
)
def test_the_walk_of_the_service_model_finds_each_kind_of_fault(
    operation: str, parameters: dict[str, Any], named: str
) -> None:
    assert named in [fault.text for fault in faults("sagemaker", operation, parameters)][0]


def test_a_dry_run_prints_one_line_of_json_for_each_call_in_order(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = dry_run(DEPLOY, capsys)
    assert [(line["service"], line["operation"]) for line in lines] == [
        ("sagemaker", "CreateModel"),
        ("sagemaker", "CreateEndpointConfig"),
        ("sagemaker", "CreateEndpoint"),
        ("sagemaker", "DescribeEndpoint"),
    ]

    assert lines[0]["parameters"] == {
        "ModelName": "chat",
        "PrimaryContainer": {"Image": IMAGE, "Mode": "SingleModel"},
        "ExecutionRoleArn": ROLE,
    }

    assert lines[1]["parameters"]["ProductionVariants"] == [
        {
            "VariantName": "AllTraffic",
            "ModelName": "chat",
            "InferenceAmiVersion": "al2-ami-sagemaker-inference-gpu-3-1",
            "InstanceType": GPU,
            "InitialInstanceCount": 1,
            "InitialVariantWeight": 1.0,
            "ModelDataDownloadTimeoutInSeconds": 1800,
            "ContainerStartupHealthCheckTimeoutInSeconds": 1800,
            "RoutingConfig": {"RoutingStrategy": "LEAST_OUTSTANDING_REQUESTS"},
        }
    ]


def test_a_dry_run_shows_steps_of_docker_as_commands_without_the_password(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = dry_run(COMMANDS["push"], capsys)
    assert [line.get("operation") for line in lines[:2]] == [
        "CreateRepository",
        "GetAuthorizationToken",
    ]

    assert lines[2:] == [
        {
            "command": [
                "docker",
                "login",
                "--username",
                "AWS",
                "--password-stdin",
                REPOSITORY.partition("/")[0],
            ]
        },
        {"command": ["docker", "tag", "lmi", f"{REPOSITORY}:chat"]},
        {"command": ["docker", "push", f"{REPOSITORY}:chat"]},
    ]


def test_a_dry_run_of_invoke_shows_the_body_as_text(
    body: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    [line] = dry_run(("invoke", "chat", "--body", str(body), "--stream"), capsys)
    assert line["parameters"] == {
        "EndpointName": "chat",
        "ContentType": "application/json",
        "Body": '{"inputs": "Hello"}',
    }


@pytest.mark.parametrize(
    ("model", "source"),
    [
        ("s3://models/llama", ("s3://models/llama/", "S3Prefix", "None")),
        ("s3://models/llama/", ("s3://models/llama/", "S3Prefix", "None")),
        ("s3://models/llama.tar.gz", ("s3://models/llama.tar.gz", "S3Object", "Gzip")),
        ("s3://models/llama.tgz", ("s3://models/llama.tgz", "S3Object", "Gzip")),
    ],
)
def test_sagemaker_brings_a_model_from_s3_and_unpacks_an_archive(
    model: str, source: tuple[str, str, str]
) -> None:
    container = parameters_of((*DEPLOY, "--model", model), "CreateModel")["PrimaryContainer"]
    s3_source = container["ModelDataSource"]["S3DataSource"]
    assert (s3_source["S3Uri"], s3_source["S3DataType"], s3_source["CompressionType"]) == source
    assert "Environment" not in container


def test_the_container_itself_fetches_a_model_from_the_hub() -> None:
    container = parameters_of(
        (*DEPLOY, "--model", "Qwen/Qwen3-8B", "--env", "HF_TOKEN=t"), "CreateModel"
    )
    assert container["PrimaryContainer"]["Environment"] == {
        "HF_TOKEN": "t",
        "HF_MODEL_ID": "Qwen/Qwen3-8B",
    }


def test_an_async_endpoint_gets_whole_answers_unless_the_user_says_otherwise() -> None:
    words = COMMANDS["async"]
    container = parameters_of(words, "CreateModel")["PrimaryContainer"]
    assert container["Environment"] == {"SERVING_BUFFER_STREAMS": "true"}

    configuration = parameters_of(words, "CreateEndpointConfig")
    assert configuration["AsyncInferenceConfig"] == {
        "OutputConfig": {"S3OutputPath": "s3://answers/chat"}
    }

    with_variable = parameters_of((*words, "--env", "SERVING_BUFFER_STREAMS=false"), "CreateModel")[
        "PrimaryContainer"
    ]

    assert with_variable["Environment"] == {"SERVING_BUFFER_STREAMS": "false"}


def test_a_multi_model_endpoint_has_the_prefix_of_all_models() -> None:
    container = parameters_of(COMMANDS["multi-model"], "CreateModel")["PrimaryContainer"]
    assert container == {"Image": IMAGE, "Mode": "MultiModel", "ModelDataUrl": "s3://models/all/"}


def test_with_a_component_the_model_is_reserved_by_it_and_not_by_the_endpoint() -> None:
    configuration = parameters_of(COMMANDS["component"], "CreateEndpointConfig")
    assert configuration["ExecutionRoleArn"] == ROLE and configuration["EnableNetworkIsolation"]
    assert "ModelName" not in configuration["ProductionVariants"][0]

    component = parameters_of(COMMANDS["component"], "CreateInferenceComponent")
    assert component["Specification"]["ModelName"] == "chat"
    assert component["Specification"]["ComputeResourceRequirements"] == {
        "MinMemoryRequiredInMb": 16384,
        "NumberOfAcceleratorDevicesRequired": 1,
    }
    assert (
        component["Specification"]["StartupParameters"][
            "ContainerStartupHealthCheckTimeoutInSeconds"
        ]
        == 1800
    )


def variant_of(*flags: str) -> dict[str, Any]:
    configuration = parameters_of((*DEPLOY, *flags), "CreateEndpointConfig")
    variant: dict[str, Any] = configuration["ProductionVariants"][0]
    return variant


def test_instances_with_nvidias_gpus_get_the_driver_of_the_images_cuda_and_others_do_not() -> None:
    cuda = "al2-ami-sagemaker-inference-gpu-3-1"
    assert variant_of()["InferenceAmiVersion"] == cuda
    assert variant_of("--instance-type", "ml.p5.48xlarge")["InferenceAmiVersion"] == cuda
    assert "InferenceAmiVersion" not in variant_of("--instance-type", "ml.c7i.2xlarge")

    named = "al2023-ami-sagemaker-inference-gpu-4-1"
    assert variant_of("--ami-version", named)["InferenceAmiVersion"] == named


def test_fallbacks_are_pools_in_the_order_of_the_flags() -> None:
    variant = variant_of(*POOLS)
    assert "InstanceType" not in variant
    assert variant["InstancePools"] == [
        {"InstanceType": GPU, "Priority": 1},
        {"InstanceType": "ml.g6e.xlarge", "Priority": 2},
        {"InstanceType": "ml.g5.xlarge", "Priority": 3},
    ]


def test_prefix_aware_routing_takes_its_limits() -> None:
    assert variant_of(*PREFIX_AWARE)["RoutingConfig"] == {
        "RoutingStrategy": "PREFIX_AWARE",
        "PrefixAwareRoutingConfig": {"PrefixLength": 4096, "ConcurrencyThreshold": 16},
    }


def test_a_vpc_is_the_models_and_with_components_the_configurations_too() -> None:
    vpc = {"SecurityGroupIds": ["sg-1"], "Subnets": ["subnet-1a", "subnet-1b"]}
    assert parameters_of((*DEPLOY, *VPC), "CreateModel")["VpcConfig"] == vpc
    assert "VpcConfig" not in parameters_of((*DEPLOY, *VPC), "CreateEndpointConfig")

    component = (*DEPLOY, *COMPONENT, *VPC)
    assert parameters_of(component, "CreateEndpointConfig")["VpcConfig"] == vpc


def test_tags_are_on_everything_that_is_created() -> None:
    calls = calls_of((*DEPLOY, *COMPONENT, "--tag", "team=chat"))
    created = [call for call in calls if call.operation.startswith("Create")]
    assert len(created) == 4
    for call in created:
        assert call.parameters["Tags"] == [{"Key": "team", "Value": "chat"}], call.operation


def test_an_update_has_names_of_its_own_and_deletes_what_was_served_before() -> None:
    calls = calls_of(UPDATE)
    assert [call.operation for call in calls] == [
        "DescribeEndpoint",
        "DescribeEndpointConfig",
        "CreateModel",
        "CreateEndpointConfig",
        "UpdateEndpoint",
        "DescribeEndpoint",
        "DeleteEndpointConfig",
        "DeleteModel",
    ]

    name = calls[4].parameters["EndpointConfigName"]
    assert re.fullmatch(r"chat-\d{8}-\d{6}", name)
    assert calls[4].parameters == {"EndpointName": "chat", "EndpointConfigName": name}
    assert calls[2].parameters["ModelName"] == name
    assert calls[3].parameters["ProductionVariants"][0]["ModelName"] == name
    assert calls[7].parameters == {"ModelName": "chat"}


def test_a_rolling_update_replaces_a_share_of_the_instances_and_watches_alarms() -> None:
    assert parameters_of((*UPDATE, *ROLLING), "UpdateEndpoint")["DeploymentConfig"] == {
        "RollingUpdatePolicy": {
            "MaximumBatchSize": {"Type": "CAPACITY_PERCENT", "Value": 25},
            "WaitIntervalInSeconds": 120,
        },
        "AutoRollbackConfiguration": {
            "Alarms": [{"AlarmName": "chat-errors"}, {"AlarmName": "chat-slow"}]
        },
    }

    at_once = parameters_of((*UPDATE, "--alarm", "chat-errors"), "UpdateEndpoint")
    assert at_once["DeploymentConfig"]["BlueGreenUpdatePolicy"] == {
        "TrafficRoutingConfiguration": {"Type": "ALL_AT_ONCE", "WaitIntervalInSeconds": 0}
    }


def test_an_update_that_sagemaker_takes_back_deletes_what_it_has_made_and_says_why() -> None:
    def answer(step: Step) -> Any:
        if isinstance(step, Wait):
            return {
                "EndpointStatus": "InService",
                "EndpointConfigName": "chat",
                "FailureReason": "did not pass the health check",
            }

        assert isinstance(step, Call)
        done.append((step.operation, *step.parameters.values()))
        return {"EndpointConfigName": "chat"}

    done: list[tuple[Any, ...]] = []
    plan, options = parse(UPDATE)
    with pytest.raises(Failed, match="chat went back .*: did not pass the health check"):
        carry_out(plan(options), answer)

    name = done[2][1]
    assert done[-2:] == [("DeleteEndpointConfig", name), ("DeleteModel", name)]


def test_an_update_of_a_component_replaces_its_copies_and_the_model_that_they_have() -> None:
    calls = calls_of(COMMANDS["update of a component"])
    assert [call.operation for call in calls] == [
        "DescribeInferenceComponent",
        "CreateModel",
        "UpdateInferenceComponent",
        "DescribeInferenceComponent",
        "DeleteModel",
    ]
    parameters = calls[2].parameters
    assert parameters["InferenceComponentName"] == "base"
    assert parameters["Specification"]["ModelName"] == calls[1].parameters["ModelName"]
    assert parameters["RuntimeConfig"] == {"CopyCount": 1}
    policy = parameters["DeploymentConfig"]["RollingUpdatePolicy"]
    assert policy["MaximumBatchSize"] == {"Type": "CAPACITY_PERCENT", "Value": 25}
    assert calls[4].parameters == {"ModelName": "chat"}


def test_an_update_may_keep_the_number_of_instances_that_scaling_has_set() -> None:
    parameters = parameters_of((*UPDATE, "--keep-count"), "UpdateEndpoint")
    assert parameters["RetainAllVariantProperties"] is True


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (
            ("--rolling", "51"),
            "--rolling takes 5 to 50 percent of the instances or copies, given 51",
        ),
        ((*COMPONENT, "--alarm", "slow"), "--alarm of a --component needs --rolling"),
        (("--component", "base"), "--component needs --memory-mb"),
        (("--wait-s", "5"), "--wait-s goes with --rolling or --alarm"),
        (("--rolling", "50", "--wait-s", "3601"), "WaitIntervalInSeconds is 3601"),
        (("--rolling", "50", "--alarm", " "), "AlarmName is ' ', its pattern is"),
    ],
)
def test_flags_of_an_update_that_break_a_rule_are_refused(
    flags: Sequence[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert reason in refusal((*UPDATE, *flags), capsys)


def test_scaling_follows_the_requests_of_an_instance_or_of_a_components_copy() -> None:
    instances = parameters_of((*DEPLOY, "--max-count", "4"), "RegisterScalableTarget")
    assert instances["ResourceId"] == "endpoint/chat/variant/AllTraffic"
    assert (instances["MinCapacity"], instances["MaxCapacity"]) == (1, 4)

    flags = (*COMPONENT, "--min-count", "0", "--max-count", "4", "--target-concurrency", "3")
    copies = parameters_of((*DEPLOY, *flags), "PutScalingPolicy")
    assert copies["ResourceId"] == "inference-component/base"
    assert copies["TargetTrackingScalingPolicyConfiguration"]["TargetValue"] == 3
    assert variant_of(*flags)["ManagedInstanceScaling"] == {
        "Status": "ENABLED",
        "MinInstanceCount": 0,
        "MaxInstanceCount": 4,
    }


def test_only_what_is_asked_for_reaches_a_second_service() -> None:
    assert {call.service for call in calls_of(DEPLOY)} == {"sagemaker"}
    assert {call.service for call in calls_of(("teardown", "chat"))} == {"sagemaker"}
    first = calls_of(("teardown", "chat", "--scaled"))[1]
    assert first.operation == "DeregisterScalableTarget"


@pytest.mark.parametrize(
    "flags, reason",
    [
        (("--subnet", "subnet-1"), "--subnet and --security-group go together"),
        (("--tag", "team"), "--tag takes KEY=VALUE, given team"),
        (("--fallback", "g5.xlarge"), "--fallback takes SageMaker's types"),
        (("--prefix-length", "4096"), "go with --routing PREFIX_AWARE"),
        (("--routing", "PREFIX_AWARE"), "needs --prefix-length and --prefix-threshold"),
        ((*PREFIX_AWARE, "--prefix-length", "10"), "valid min value: 1024"),
        (("--tag", "team=a;b"), "Tags[0].Value is 'a;b', its pattern is"),
        (("--min-count", "1"), "--min-count goes with --max-count"),
        (("--min-count", "0", "--max-count", "2"), "only a --component scales to none"),
        (("--max-count", "2", "--count", "3"), "given 3 of 1 to 2"),
        (("--capture", "s3://seen", "--capture-percent", "101"), "is 101, allowed is 0 to 100"),
    ],
)
def test_flags_of_the_configuration_that_break_a_rule_are_refused(
    flags: Sequence[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert reason in refusal((*DEPLOY, *flags), capsys)


def manifest_of(*flags: str) -> dict[str, Any]:
    plan, options = parse((*HYPERPOD, *flags))
    [text] = carry_out(plan(options), lambda step: pytest.fail(f"{step} is sent"))
    parsed: dict[str, Any] = yaml.safe_load(text)
    return parsed


def test_a_manifest_for_hyperpod_mounts_the_model_and_asks_where_the_server_answers() -> None:
    manifest = manifest_of("--model", "s3://models/llama/8b/", "--region", "eu-west-1")
    assert (manifest["kind"], manifest["metadata"]) == ("InferenceEndpointConfig", {"name": "chat"})

    spec = manifest["spec"]
    assert spec["instanceType"] == GPU and spec["invocationEndpoint"] == "invocations"
    assert spec["modelSourceConfig"] == {
        "modelSourceType": "s3",
        "s3Storage": {"bucketName": "models", "region": "eu-west-1"},
        "modelLocation": "llama/8b",
    }
    worker = spec["worker"]
    assert worker["resources"]["limits"] == {"nvidia.com/gpu": 1}
    assert worker["modelVolumeMount"]["mountPath"] == "/opt/ml/model"
    assert worker["probes"]["readinessProbe"]["httpGet"] == {"path": "/ping", "port": 8080}


def test_a_manifest_for_hyperpod_without_gpus_says_what_a_replica_takes() -> None:
    flags = ("--instance-type", "ml.c7i.2xlarge", "--cpus", "4", "--memory-mb", "8192")
    spec = manifest_of("--model", "Qwen/Qwen3-8B", *flags)["spec"]
    requests = {"cpu": "4", "memory": "8192Mi"}
    assert spec["worker"]["resources"] == {"requests": requests}


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (("s3://models/llama/",), "a model in S3 needs --region"),
        (("s3://models/a.tar.gz", "--region", "eu-west-1"), "HyperPod mounts a prefix"),
        (("./llama",), "--model takes s3://BUCKET/PREFIX, fsx://"),
        (("a/b", "--hf-token-secret", "hub"), "--hf-token-secret takes NAME/KEY"),
        (("a/b", "--instance-type", "ml.c7i.large"), "needs --cpus or --memory-mb"),
        (("a/b", "--instance-type", "g6.xlarge"), "--instance-type takes SageMaker's types"),
    ],
)
def test_flags_of_a_manifest_that_break_a_rule_are_refused(
    flags: Sequence[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert reason in refusal((*HYPERPOD, "--model", *flags), capsys)


def test_an_adapter_names_its_base_and_its_archive() -> None:
    assert parameters_of(COMMANDS["adapter"], "CreateInferenceComponent")["Specification"] == {
        "BaseInferenceComponentName": "base",
        "Container": {"ArtifactUrl": "s3://models/poet.tar.gz"},
    }


def test_a_transform_job_sends_each_line_as_a_request_and_leaves_the_rates_to_the_container() -> (
    None
):
    job = parameters_of(TRANSFORM, "CreateTransformJob")
    assert job["ModelName"] == "chat" and job["TransformJobName"].startswith("chat-")
    assert job["TransformInput"]["SplitType"] == job["TransformOutput"]["AssembleWith"] == "Line"
    assert (
        job["TransformInput"]["ContentType"]
        == job["TransformOutput"]["Accept"]
        == "application/jsonlines"
    )
    assert not job.keys() & {"MaxConcurrentTransforms", "BatchStrategy", "MaxPayloadInMB"}
    assert [call.operation for call in calls_of(TRANSFORM)] == [
        "CreateTransformJob",
        "DescribeTransformJob",
    ]
    assert calls_of(COMMANDS["transform of a new model"])[0].operation == "CreateModel"


@pytest.mark.parametrize(
    ("entries", "named"),
    [
        ([f"V{number}=x" for number in range(101)], "V100 is one of 101 variables, at most 100"),
        (
            ["OPTION_CHAT_TEMPLATE=" + "x" * 1025],
            "the value of OPTION_CHAT_TEMPLATE has 1025 bytes, at most 1024",
        ),
        (
            ["OPTION_CHAT_TEMPLATE=" + "ü" * 513],
            "the value of OPTION_CHAT_TEMPLATE has 1026 bytes, at most 1024",
        ),
        (["A" * 1025 + "=x"], "the name of AAAA"),
        (
            [f"V{number:02}=" + "x" * 1000 for number in range(33)],
            "the variables have 33099 bytes, at most 32768; V00",
        ),
    ],
)
def test_an_environment_that_sagemaker_refuses_is_refused_before_any_call(
    entries: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    message = refusal((*DEPLOY, *(word for entry in entries for word in ("--env", entry))), capsys)
    assert named in message and "serving.properties" in message and message.count("\n") == 1


def test_an_environment_at_its_limits_passes(capsys: pytest.CaptureFixture[str]) -> None:
    entries = [f"V{number:02}=x" for number in range(99)] + ["L=" + "x" * 1024]
    dry_run((*DEPLOY, *(word for entry in entries for word in ("--env", entry))), capsys)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ((*DEPLOY, "--model", "gs://a/b"), "gs://a/b"),
        ((*DEPLOY, "--model", "/opt/models/llama"), "/opt/models/llama"),
        ((*DEPLOY, "--model", "s3://a/b.tar"), ".tar.gz"),
        ((*DEPLOY, "--model", "a/b", "--network-isolation"), "no way to the hub"),
        ((*DEPLOY, "--model", "a/b", "--env", "HF_MODEL_ID=c/d"), "HF_MODEL_ID=c/d"),
        ((*DEPLOY, "--model", "a/b", "--multi-model", "s3://a/"), "--multi-model"),
        ((*DEPLOY, "--multi-model", "models"), "s3://BUCKET/PREFIX/"),
        ((*DEPLOY, "--multi-model", "s3://a/", "--async", "s3://b/c"), "--async"),
        ((*DEPLOY, "--component", "base"), "--memory-mb"),
        ((*DEPLOY, *COMPONENT, "--async", "s3://b/c"), "--component"),
        ((*DEPLOY, "--env", "A"), "KEY=VALUE"),
        ((*DEPLOY, "--env", "A=1", "--env", "A=2"), "A twice"),
        ((*DEPLOY, "--startup-timeout", "3601"), "allowed is 60 to 3600"),
        (("deploy", "my chat", *DEPLOY[2:]), "my chat"),
        (
            (*DEPLOY[:-4], "--role", "arn:aws:iam::12:role/admin", "--instance-type", GPU),
            "arn:aws:iam::12:role/admin",
        ),
        ((*DEPLOY[:-1], "g6"), "ml.g6.xlarge, given g6"),
        ((*TRANSFORM[:3], "g6.xlarge", *TRANSFORM[4:]), "given g6.xlarge"),
        (("push", "chat", "--repository", "lmi"), "dkr.ecr"),
        ((*COMMANDS["push"], "--region", "us-east-1"), "eu-west-1"),
        (
            ("adapter", "chat", "--component", "p", "--base", "b", "--artifact", "s3://a/b/"),
            "tar.gz",
        ),
        ((*TRANSFORM, "--model", "a/b"), "--image"),
        ((*TRANSFORM, "--image", IMAGE), "--role"),
        (("invoke", "chat", "--body", "nothing.json"), "nothing.json: No such file"),
        (("invoke", "chat", "--body", "s3://a/b"), "--async"),
        (
            ("invoke", "chat", "--body", "s3://a/b", "--async", "--target-model", "m"),
            "--target-model",
        ),
    ],
)
def test_flags_that_cannot_be_carried_out_are_one_line_and_exit_code_2(
    words: Sequence[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    message = refusal(words, capsys)
    assert named in message and message.count("\n") == 1, message


def test_an_instance_type_that_botocore_does_not_know_is_a_warning(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([*DEPLOY[:-1], "ml.g99.xlarge", "--dry-run"]) == 0
    assert "ml.g99.xlarge" in capsys.readouterr().err


def test_teardown_deletes_adapters_bases_endpoint_and_what_it_serves_in_this_order() -> None:
    def answer(step: Step) -> Any:
        call = step.call if isinstance(step, Wait) else step
        assert isinstance(call, Call)

        done.append((call.operation, *call.parameters.values()))
        name = call.parameters.get("InferenceComponentName")
        if call.operation == "ListInferenceComponents":
            page = {"base": "poet"}.get(call.parameters.get("NextToken", ""), "base")
            return {
                "InferenceComponents": [{"InferenceComponentName": page}],
                **({"NextToken": "base"} if page == "base" else {}),
            }

        if isinstance(step, Wait):
            return None

        if call.operation == "DescribeEndpoint":
            return {"EndpointConfigName": "chat-20261130-173355"}

        if call.operation == "DescribeEndpointConfig":
            models = ("chat-20261130-173355", "of-somebody-else")
            return {"ProductionVariants": [{"ModelName": name} for name in models]}

        return {
            "Specification": {"BaseInferenceComponentName": "base"}
            if name == "poet"
            else {"ModelName": "chat-20261130-180900"}
        }

    done: list[tuple[Any, ...]] = []
    plan, options = parse(["teardown", "chat"])
    carry_out(plan(options), answer)

    assert done[4:] == [
        ("DeleteInferenceComponent", "poet"),
        ("DescribeInferenceComponent", "poet"),
        ("DeleteInferenceComponent", "base"),
        ("DescribeInferenceComponent", "base"),
        ("DescribeEndpoint", "chat"),
        ("DescribeEndpointConfig", "chat-20261130-173355"),
        ("DeleteEndpoint", "chat"),
        ("DescribeEndpoint", "chat"),
        ("DeleteEndpointConfig", "chat-20261130-173355"),
        ("DeleteModel", "chat-20261130-173355"),
        ("DeleteModel", "chat-20261130-180900"),
    ]


@pytest.mark.parametrize(
    ("words", "described", "group"),
    [
        (
            COMMANDS["adapter"],
            {
                "InferenceComponentName": "poet",
                "InferenceComponentStatus": "Failed",
                "FailureReason": "rank 64",
            },
            {"logGroupName": "/aws/sagemaker/InferenceComponents/poet"},
        ),
        (
            TRANSFORM,
            {"TransformJobStatus": "Failed", "FailureReason": "rank 64"},
            {"logGroupName": "/aws/sagemaker/TransformJobs"},
        ),
    ],
)
def test_an_adapter_or_a_job_that_fails_says_why_and_shows_its_log(
    words: Sequence[str], described: dict[str, Any], group: dict[str, str]
) -> None:
    def answer(step: Step) -> Any:
        if isinstance(step, Wait):
            return described

        assert isinstance(step, Call)

        if step.operation == "DescribeLogStreams":
            assert step.parameters.items() >= group.items()
            return {"logStreams": [{"logStreamName": "the stream"}]}

        return {"events": [{"message": "the last line\n"}]}

    plan, options = parse(words)
    with pytest.raises(Failed, match=r"(?s) is Failed: rank 64\nthe last line"):
        carry_out(plan(options), answer)


# Against a server in place of AWS, as a user runs it.


def environ_of(url: str = "") -> dict[str, str]:
    """The environment of a user, with an account if `url` stands in for AWS."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    own_variables = {
        "PYTHONPATH": str(ROOT),
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": os.devnull,
    }

    account = {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": "nobody",
        "AWS_SECRET_ACCESS_KEY": "nothing",
        "AWS_DEFAULT_REGION": "eu-west-1",
    }

    return (
        environ
        | own_variables
        | {"AWS_SHARED_CREDENTIALS_FILE": os.devnull}
        | (account if url else {})
    )


def run(words: Sequence[str], url: str = "", **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "scripts.sagemaker_kit", *words]
    return subprocess.run(
        command, env=environ_of(url) | environ, capture_output=True, text=True, timeout=60
    )


def test_deploy_waits_for_in_service_and_prints_each_new_status() -> None:
    statuses = [
        Reply({"EndpointStatus": status}) for status in ("Creating", "Creating", "InService")
    ]
    with aws({"DescribeEndpoint": statuses}) as served:
        done = run((*DEPLOY, "--poll", "0.01"), served.url)

    assert (done.returncode, done.stdout) == (0, "chat is InService\n"), done.stderr
    assert [line.split()[-1] for line in done.stderr.splitlines()] == ["Creating", "InService"]
    assert [name for name, _ in served.calls[:3]] == [
        "CreateModel",
        "CreateEndpointConfig",
        "CreateEndpoint",
    ]


def test_deploy_prints_why_an_endpoint_failed_and_the_last_lines_of_its_log() -> None:
    replies = {
        "DescribeEndpoint": [
            Reply({"EndpointStatus": "Failed", "FailureReason": "did not pass the health check"})
        ],
        "DescribeLogStreams": [Reply({"logStreams": [{"logStreamName": "AllTraffic/i-1"}]})],
        "GetLogEvents": [
            Reply({"events": [{"message": "loading\n"}, {"message": "lmi: no config.json\n"}]})
        ],
    }
    with aws(replies) as served:
        done = run(DEPLOY, served.url)

    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.splitlines()[1:] == [
        "scripts/sagemaker: chat is Failed: did not pass the health check",
        "loading",
        "lmi: no config.json",
        "scripts/sagemaker teardown chat deletes what was created",
    ]
    assert served.calls[-1][1]["logGroupName"] == "/aws/sagemaker/Endpoints/chat"


def test_an_error_of_aws_is_one_line_and_stops_the_plan() -> None:
    with aws(
        {"CreateModel": [Reply({"__type": "ValidationException", "message": "already there"}, 400)]}
    ) as served:
        done = run(DEPLOY, served.url)

    assert done.returncode == 1 and len(served.calls) == 1
    assert done.stderr == "scripts/sagemaker: CreateModel: ValidationException: already there\n"


def test_teardown_goes_on_where_something_is_gone_already() -> None:
    gone = [
        Reply({"__type": "ValidationException", "message": 'Could not find endpoint "chat".'}, 400)
    ]
    with aws(
        {"DeleteEndpoint": gone, "DescribeEndpoint": gone, "DeleteEndpointConfig": gone}
    ) as served:
        done = run(("teardown", "chat", "--poll", "0.01"), served.url)

    assert (done.returncode, done.stdout) == (0, "chat is deleted\n"), done.stderr
    assert served.calls[-1] == ("DeleteModel", {"ModelName": "chat"})


def test_push_gives_docker_the_registrys_password_on_its_standard_input(tmp_path: Path) -> None:
    docker = tmp_path / "docker"
    log_file = tmp_path / "said"
    docker.write_text(
        f'#!/bin/sh\necho "$@" >>{log_file}\n[ "$1" != login ] || {{ cat; echo; }} >>{log_file}\n'
    )
    docker.chmod(0o755)
    exists = [Reply({"__type": "RepositoryAlreadyExistsException", "message": "it is there"}, 400)]
    token = {"authorizationToken": base64.b64encode(b"AWS:hunter2").decode()}
    with aws(
        {
            "CreateRepository": exists,
            "GetAuthorizationToken": [Reply({"authorizationData": [token]})],
        }
    ) as served:
        done = run(COMMANDS["push"], served.url, PATH=f"{tmp_path}:{os.environ['PATH']}")

    assert (done.returncode, done.stdout) == (0, f"{REPOSITORY}:chat\n"), done.stderr
    assert log_file.read_text().splitlines()[1:] == [
        "hunter2",
        f"tag lmi {REPOSITORY}:chat",
        f"push {REPOSITORY}:chat",
    ]
    assert "eu-west-1/ecr/" in served.headers[0]["authorization"]


INVOKE = "/endpoints/chat/invocations"
STREAM = {"Content-Type": "application/vnd.amazon.eventstream"}


def invoke(
    body: Path, replies: dict[str, list[Reply]], *flags: str
) -> tuple[subprocess.CompletedProcess[str], Any]:
    """Send it as on a laptop: with an address, without credentials and without a region."""
    with aws(replies) as served:
        return run(
            ("invoke", "chat", "--body", str(body), "--endpoint-url", served.url, *flags)
        ), served


def test_invoke_prints_the_answer_and_needs_neither_credentials_nor_a_region(body: Path) -> None:
    done, served = invoke(body, {INVOKE: [Reply({"generated_text": "hi"})]})
    assert (done.returncode, json.loads(done.stdout)) == (0, {"generated_text": "hi"}), done.stderr
    assert served.calls == [(INVOKE, b'{"inputs": "Hello"}')]
    assert served.headers[0]["content-type"] == "application/json"


def test_invoke_prints_the_parts_of_a_stream_also_when_they_cut_a_character(body: Path) -> None:
    pieces = tuple(part(piece) for piece in (b'{"token": "\xc3', b'\xbc"}\n', b'{"token": "!"}\n'))
    done, served = invoke(
        body, {f"{INVOKE}-response-stream": [Reply(headers=STREAM, pieces=pieces)]}, "--stream"
    )
    assert (done.returncode, done.stdout) == (0, '{"token": "ü"}\n{"token": "!"}\n'), done.stderr


def test_a_stream_that_breaks_leaves_its_parts_and_has_exit_code_1(body: Path) -> None:
    cut = Reply(headers=STREAM, pieces=(part(b"some\n"),), is_cut=True)
    done, served = invoke(body, {f"{INVOKE}-response-stream": [cut]}, "--stream")
    assert (done.returncode, done.stdout) == (1, "some\n")
    assert (
        done.stderr.startswith("scripts/sagemaker: the stream broke: ")
        and done.stderr.count("\n") == 1
    )
    assert len(served.calls) == 1


def test_invoke_async_prints_where_the_answer_will_be(body: Path) -> None:
    places = {
        "X-Amzn-SageMaker-OutputLocation": "s3://a/1.out",
        "X-Amzn-SageMaker-FailureLocation": "s3://a/1-error.out",
    }
    path = "/endpoints/chat/async-invocations"
    done, served = invoke(body, {path: [Reply({"InferenceId": "1"}, 202, places)]}, "--async")

    assert json.loads(done.stdout) == {
        "InferenceId": "1",
        "OutputLocation": "s3://a/1.out",
        "FailureLocation": "s3://a/1-error.out",
    }
    assert served.calls == [(path, b'{"inputs": "Hello"}')]


def test_what_the_container_refused_is_printed_and_never_sent_again(body: Path) -> None:
    refused = {
        "Message": "Received client error (400)",
        "OriginalStatusCode": 400,
        "OriginalMessage": '{"error": "x"}\n',
    }
    done, served = invoke(body, {INVOKE: [Reply(refused, 424, {"x-amzn-ErrorType": "ModelError"})]})

    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.splitlines() == [
        "scripts/sagemaker: InvokeEndpoint: ModelError: Received client error (400)",
        'the container said 400: {"error": "x"}',
    ]

    busy, served = invoke(
        body, {INVOKE: [Reply({"Message": "m"}, 503, {"x-amzn-ErrorType": "ServiceUnavailable"})]}
    )

    assert busy.returncode == 1 and len(served.calls) == 1


def test_the_target_model_and_the_component_travel_as_headers(body: Path) -> None:
    _, served = invoke(body, {}, "--target-model", "llama.tar.gz", "--component", "poet")
    assert served.headers[0]["x-amzn-sagemaker-target-model"] == "llama.tar.gz"
    assert served.headers[0]["x-amzn-sagemaker-inference-component"] == "poet"


def test_a_reader_who_has_enough_ends_it_without_a_traceback(body: Path) -> None:
    with aws({INVOKE: [Reply(b"x" * 1_000_000)]}) as served:
        command = [
            sys.executable,
            "-P",
            "-m",
            "scripts.sagemaker_kit",
            "invoke",
            "chat",
            "--body",
            str(body),
        ]
        text = f"{shlex.join([*command, '--endpoint-url', served.url])} | head -c 10"
        done = subprocess.run(
            ["bash", "-c", text], env=environ_of(), capture_output=True, text=True, timeout=60
        )

    assert (done.stdout, done.stderr) == ("x" * 10, "")


def test_nothing_listens_is_one_line(body: Path) -> None:
    done = run(("invoke", "chat", "--body", str(body), "--endpoint-url", "http://127.0.0.1:9"))
    assert (
        done.returncode == 1
        and "http://127.0.0.1:9" in done.stderr
        and done.stderr.count("\n") == 1
    )


def test_every_word_explains_itself() -> None:
    for word in (
        "push",
        "deploy",
        "update",
        "adapter",
        "transform",
        "invoke",
        "hyperpod",
        "teardown",
    ):
        with pytest.raises(SystemExit, match="0"):
            main([word, "--help"])


def test_the_command_installs_and_runs_from_any_folder() -> None:
    script = ROOT / "scripts" / "sagemaker"
    assert os.access(script, os.X_OK) and "set -euo pipefail" in script.read_text()
    subprocess.run(["bash", "-n", str(script)], check=True)
