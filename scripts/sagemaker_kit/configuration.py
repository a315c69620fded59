"""An endpoint's configuration: its instances, how requests reach them, and what is kept of them."""

import re
from argparse import Namespace
from collections.abc import Iterable
from typing import Any

from scripts.sagemaker_kit import model
from scripts.sagemaker_kit.steps import Refused

VARIANT = "AllTraffic"
# By AWS's pages its vLLM images, whose CUDA ours has, want the driver of this one
CUDA_AMI = "al2-ami-sagemaker-inference-gpu-3-1"
NVIDIA_INSTANCE = re.compile(r"ml\.[gp][4-9]")
PREFIX_AWARE = "PREFIX_AWARE"


def create(options: Namespace) -> dict[str, Any]:
    """The parameters of CreateEndpointConfig."""
    configuration: dict[str, Any] = {
        "EndpointConfigName": options.name,
        "ProductionVariants": [_variant(options)],
        **model.tags(options),
    }
    if options.component:
        configuration["ExecutionRoleArn"] = options.role
        configuration |= model.network(options)

    if options.kms_key:
        configuration["KmsKeyId"] = options.kms_key

    if options.async_output:
        output = {"S3OutputPath": options.async_output, **_output_key(options)}
        configuration["AsyncInferenceConfig"] = {"OutputConfig": output}

    if options.capture:
        configuration["DataCaptureConfig"] = _capture(options)

    if options.metrics_s is not None:
        configuration["MetricsConfig"] = {
            "EnableEnhancedMetrics": True,
            "EnableDetailedObservability": True,
            "MetricPublishFrequencyInSeconds": options.metrics_s,
        }

    return configuration


def instance_types(options: Namespace) -> list[str]:
    """The first type of instances, and those that are taken when it has no room, in their order."""
    first = model.instance_type(options)
    return [first, *(_sagemaker_type("--fallback", name) for name in options.fallback)]


def timeouts(options: Namespace) -> dict[str, int]:
    return {
        "ModelDataDownloadTimeoutInSeconds": options.download_timeout,
        "ContainerStartupHealthCheckTimeoutInSeconds": options.startup_timeout,
    }


def _variant(options: Namespace) -> dict[str, Any]:
    variant: dict[str, Any] = {
        "VariantName": VARIANT,
        "InitialInstanceCount": options.count,
        **_instances(options),
    }
    if not options.component:
        variant |= {
            "ModelName": options.name,
            "InitialVariantWeight": 1.0,
            **timeouts(options),
        }

    if not options.async_output and not options.multi_model:
        variant["RoutingConfig"] = _routing(options)

    if options.capacity_reservation:
        variant["CapacityReservationConfig"] = {
            "CapacityReservationPreference": "capacity-reservations-only",
            "MlReservationArn": options.capacity_reservation,
        }

    return variant


def _instances(options: Namespace) -> dict[str, Any]:
    """One type of instances, or pools of which SageMaker takes the first that has room."""
    types = instance_types(options)
    if len(types) > 1:
        pools = [
            {"InstanceType": name, "Priority": priority}
            for priority, name in enumerate(types, start=1)
        ]
        instances: dict[str, Any] = {"InstancePools": pools}
    else:
        instances = {"InstanceType": types[0]}

    ami_version = options.ami_version or _default_ami(types)
    if ami_version:
        instances["InferenceAmiVersion"] = ami_version

    return instances


def _sagemaker_type(flag: str, name: str) -> str:
    if not name.startswith("ml."):
        raise Refused(f"{flag} takes SageMaker's types, such as ml.g6.xlarge, given {name}")

    return name


def _default_ami(types: Iterable[str]) -> str | None:
    return CUDA_AMI if all(NVIDIA_INSTANCE.match(name) for name in types) else None


def _routing(options: Namespace) -> dict[str, Any]:
    limits = {
        "PrefixLength": options.prefix_length,
        "ConcurrencyThreshold": options.prefix_threshold,
    }
    named = {name: value for name, value in limits.items() if value is not None}
    if named and options.routing != PREFIX_AWARE:
        raise Refused(
            f"--prefix-length and --prefix-threshold go with --routing {PREFIX_AWARE}, "
            f"given {options.routing}"
        )

    if options.routing == PREFIX_AWARE and len(named) < len(limits):
        raise Refused(f"--routing {PREFIX_AWARE} needs --prefix-length and --prefix-threshold")

    routing: dict[str, Any] = {"RoutingStrategy": options.routing}
    return routing | ({"PrefixAwareRoutingConfig": named} if named else {})


def _capture(options: Namespace) -> dict[str, Any]:
    """Requests and answers are captured as text where they are JSON, else as base64."""
    return {
        "EnableCapture": True,
        "InitialSamplingPercentage": options.capture_percent,
        "DestinationS3Uri": options.capture,
        "CaptureOptions": [{"CaptureMode": "Input"}, {"CaptureMode": "Output"}],
        "CaptureContentTypeHeader": {
            "JsonContentTypes": ["application/json", "application/jsonlines"]
        },
        **_output_key(options),
    }


def _output_key(options: Namespace) -> dict[str, str]:
    return {"KmsKeyId": options.output_kms_key} if options.output_kms_key else {}
