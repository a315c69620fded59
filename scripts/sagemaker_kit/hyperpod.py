"""The manifest of HyperPod's inference operator: an InferenceEndpointConfig, by the schema of the
package sagemaker-hyperpod 3.12.

The operator mounts the files of a bucket or of FSx where the server looks for them, and names a
model of the hub by HF_MODEL_ID.
"""

from argparse import Namespace
from typing import Any

from scripts.sagemaker_kit import model
from scripts.sagemaker_kit.configuration import NVIDIA_INSTANCE, instance_types
from scripts.sagemaker_kit.steps import Plan, Refused

API_VERSION = "inference.sagemaker.aws.amazon.com/v1"
KIND = "InferenceEndpointConfig"
ROUTINGS = ("prefixaware", "session", "roundrobin")
PORT = 8080
READY = "/ping"
ALIVE = "/v2/health/live"
PROBE_PERIOD_S = 10
S3 = "s3://"
FSX = "fsx://"


def hyperpod(options: Namespace) -> Plan:
    """Print the manifest, which `kubectl apply -f -` takes. Nothing is sent."""
    # Help needs no package
    import yaml

    yield from ()
    return [yaml.safe_dump(manifest(options), sort_keys=False).encode()]


def manifest(options: Namespace) -> dict[str, Any]:
    metadata = {"name": options.name}
    if options.namespace:
        metadata["namespace"] = options.namespace

    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": metadata,
        "spec": _spec(options),
    }


def _spec(options: Namespace) -> dict[str, Any]:
    types = instance_types(options)
    spec: dict[str, Any] = {
        "modelName": options.name,
        "endpointName": options.name,
        "instanceType": types[0],
        "invocationEndpoint": options.path.strip("/"),
        "replicas": options.count,
        "maxDeployTimeInSeconds": options.startup_timeout,
        "modelSourceConfig": _source(options),
        "loadBalancer": {"healthCheckPath": READY},
        "metrics": {"enabled": True, "modelMetrics": {"path": "/metrics", "port": PORT}},
        "worker": _worker(options),
    }
    if len(types) > 1:
        del spec["instanceType"]
        spec["instanceTypes"] = types

    if options.routing:
        spec["intelligentRoutingSpec"] = {"enabled": True, "routingStrategy": options.routing}

    if options.capture:
        spec["dataCapture"] = {
            "s3Uri": options.capture,
            "sagemakerEndpoint": {
                "enabled": True,
                "initialSamplingPercentage": options.capture_percent,
            },
        }

    if options.certificates:
        spec["tlsConfig"] = {"tlsCertificateOutputS3Uri": options.certificates}

    if options.tag:
        tags = model.tags(options)["Tags"]
        spec["tags"] = [{"name": tag["Key"], "value": tag["Value"]} for tag in tags]

    return spec


def _source(options: Namespace) -> dict[str, Any]:
    source = options.model
    if options.hf_token_secret and "://" in source:
        raise Refused(f"--hf-token-secret goes with a model of the hub, given {source}")

    if source.startswith(S3):
        bucket, _, prefix = source.removeprefix(S3).partition("/")
        return _s3_source(options, bucket, prefix)

    if source.startswith(FSX):
        file_system, _, folder = source.removeprefix(FSX).partition("/")
        return {
            "modelSourceType": "fsx",
            "fsxStorage": {"fileSystemId": file_system},
            "modelLocation": folder,
        }

    if not model.HUB_ID.fullmatch(source):
        raise Refused(
            f"--model takes s3://BUCKET/PREFIX, fsx://FILE-SYSTEM/FOLDER or the id of a model on "
            f"the hub, given {source}"
        )

    of_hub: dict[str, Any] = {"modelId": source}
    if options.hf_token_secret:
        of_hub["tokenSecretRef"] = _secret(options.hf_token_secret)

    return {"modelSourceType": "huggingface", "huggingFaceModel": of_hub}


def _s3_source(options: Namespace, bucket: str, prefix: str) -> dict[str, Any]:
    if prefix.endswith(model.ARCHIVES):
        raise Refused(
            f"HyperPod mounts a prefix and unpacks nothing, given --model {options.model}"
        )

    if not options.region:
        raise Refused("a model in S3 needs --region, that of its bucket")

    return {
        "modelSourceType": "s3",
        "s3Storage": {"bucketName": bucket, "region": options.region},
        "modelLocation": prefix.rstrip("/"),
    }


def _secret(text: str) -> dict[str, str]:
    name, slash, key = text.partition("/")
    if not name or not slash or not key:
        raise Refused(f"--hf-token-secret takes NAME/KEY of a Kubernetes secret, given {text}")

    return {"name": name, "key": key}


def _worker(options: Namespace) -> dict[str, Any]:
    variables = model.environment(options.env)
    worker: dict[str, Any] = {
        "image": options.image,
        "modelInvocationPort": {"containerPort": PORT, "name": "http"},
        "modelVolumeMount": {"name": "model-weights", "mountPath": "/opt/ml/model"},
        "resources": _resources(options),
        "probes": {
            # A large model has until then to be fetched and loaded
            "startupProbe": _probe(READY, options.startup_timeout // PROBE_PERIOD_S),
            "readinessProbe": _probe(READY, 1),
            "livenessProbe": _probe(ALIVE, 3),
        },
    }
    if variables:
        worker["environmentVariables"] = [
            {"name": name, "value": value} for name, value in variables.items()
        ]

    return worker


def _resources(options: Namespace) -> dict[str, Any]:
    """What a replica takes of its instance."""
    num_gpus = options.gpus
    if num_gpus is None:
        num_gpus = 1 if NVIDIA_INSTANCE.match(options.instance_type) else 0

    gpus = {"nvidia.com/gpu": num_gpus} if num_gpus else {}
    requests: dict[str, Any] = dict(gpus)
    if options.cpus is not None:
        requests["cpu"] = str(options.cpus)

    if options.memory_mb is not None:
        requests["memory"] = f"{options.memory_mb}Mi"

    if not requests:
        raise Refused(f"--instance-type {options.instance_type} needs --cpus or --memory-mb")

    return {"requests": requests, "limits": gpus} if gpus else {"requests": requests}


def _probe(path: str, num_failures: int) -> dict[str, Any]:
    return {
        "httpGet": {"path": path, "port": PORT},
        "periodSeconds": PROBE_PERIOD_S,
        "timeoutSeconds": 5,
        "failureThreshold": max(num_failures, 1),
    }
