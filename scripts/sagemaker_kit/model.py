"""A SageMaker model: the image, where its weights are, and its environment."""

import re
from argparse import Namespace
from typing import Any

from scripts.sagemaker_kit import environment
from scripts.sagemaker_kit.steps import Call, Refused

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def create(given: Namespace, several: str | None = None, is_async: bool = False) -> Call:
    """The call that creates the model. `several` is the prefix of all models of a multi-model endpoint."""
    if not given.role:
        raise Refused("--image needs --role, the role that SageMaker takes on")
    container: dict[str, Any] = {"Image": given.image, "Mode": "SingleModel"}
    variables = environment.parse(given.env)
    if several:
        container |= _several(given, several)
    elif given.model and "://" in given.model:
        container["ModelDataSource"] = {"S3DataSource": _in_s3(given.model)}
    elif given.model:
        _name_hub_id(given, variables)
    if is_async:
        variables.setdefault("SERVING_BUFFER_STREAMS", "true")  # async endpoints refuse answers without a length
    environment.check(variables)
    if variables:
        container["Environment"] = variables
    isolation = {"EnableNetworkIsolation": True} if given.network_isolation else {}
    parameters = {"ModelName": given.name, "PrimaryContainer": container, "ExecutionRoleArn": given.role}
    return Call("sagemaker", "CreateModel", parameters | isolation)


def instance_type(given: Namespace) -> str:
    """The type of the instances. Raises Refused for one of EC2, which AWS would refuse only after the model is made."""
    if not given.instance_type.startswith("ml."):
        raise Refused(f"--instance-type takes SageMaker's types, such as ml.g6.xlarge, given {given.instance_type}")
    return str(given.instance_type)


def _several(given: Namespace, prefix: str) -> dict[str, str]:
    if given.model:
        raise Refused("--multi-model names the prefix of all models, so --model is one too many")
    if not prefix.startswith("s3://"):
        raise Refused(f"--multi-model takes s3://BUCKET/PREFIX/, given {prefix}")
    return {"Mode": "MultiModel", "ModelDataUrl": prefix.rstrip("/") + "/"}


def _in_s3(source: str) -> dict[str, str]:
    """SageMaker copies a prefix as it is and unpacks a tar.gz. The container finds the files in /opt/ml/model."""
    if not source.startswith("s3://"):
        raise Refused(f"--model takes s3://… or the id of a model on the hub, given {source}")
    if source.endswith((".tar.gz", ".tgz")):
        return {"S3Uri": source, "S3DataType": "S3Object", "CompressionType": "Gzip"}
    if source.endswith(".tar"):
        raise Refused(f"SageMaker unpacks .tar.gz and no other archive, given {source}")
    return {"S3Uri": source.rstrip("/") + "/", "S3DataType": "S3Prefix", "CompressionType": "None"}


def _name_hub_id(given: Namespace, variables: dict[str, str]) -> None:
    if not HUB_ID.fullmatch(given.model):
        raise Refused(f"--model takes s3://… or the id of a model on the hub, given {given.model}")
    if given.network_isolation:
        raise Refused(f"--network-isolation leaves no way to the hub: copy {given.model} to S3 and name it there")
    if variables.setdefault("HF_MODEL_ID", given.model) != given.model:
        raise Refused(f"--model is {given.model}, and --env gives HF_MODEL_ID={variables['HF_MODEL_ID']}")
