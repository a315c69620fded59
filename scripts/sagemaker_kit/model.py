"""A SageMaker model: the image, where its weights are, and its environment within SageMaker's
limits.
"""

import re
from argparse import Namespace
from collections.abc import Iterable, Mapping
from typing import Any

from scripts.sagemaker_kit.steps import Call, Refused

MAX_ENTRIES = 100
MAX_ENTRY_BYTES = 1024
MAX_BYTES = 32 * 1024
ADVICE = "put it into the serving.properties beside the model instead"
ARCHIVES = (".tar.gz", ".tgz")
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def create(options: Namespace, several: str | None = None, is_async: bool = False) -> Call:
    """The call that creates the model. `several` is the prefix of all models of a multi-model
    endpoint.
    """
    if not options.role:
        raise Refused("--image needs --role, the role that SageMaker takes on")

    container: dict[str, Any] = {"Image": options.image, "Mode": "SingleModel"}
    variables = environment(options.env)
    if several:
        container |= _several(options, several)
    elif options.model and "://" in options.model:
        container["ModelDataSource"] = {"S3DataSource": _in_s3(options.model)}
    elif options.model:
        _name_hub_id(options, variables)

    if is_async:
        # Async endpoints refuse answers without a length
        variables.setdefault("SERVING_BUFFER_STREAMS", "true")

    _check_environment(variables)
    if variables:
        container["Environment"] = variables

    parameters = {
        "ModelName": options.name,
        "PrimaryContainer": container,
        "ExecutionRoleArn": options.role,
    }
    return Call("sagemaker", "CreateModel", parameters | network(options) | tags(options))


def network(options: Namespace) -> dict[str, Any]:
    """What the container reaches: a VPC's subnets, nothing, or by default the Internet."""
    if bool(options.subnet) != bool(options.security_group):
        raise Refused("--subnet and --security-group go together: a VPC needs both")

    settings: dict[str, Any] = {}
    if options.subnet:
        settings["VpcConfig"] = {
            "SecurityGroupIds": options.security_group,
            "Subnets": options.subnet,
        }

    if options.network_isolation:
        settings["EnableNetworkIsolation"] = True

    return settings


def tags(options: Namespace) -> dict[str, Any]:
    """The tags of everything that is created, by which AWS shares out its costs."""
    entries = []
    for pair in options.tag:
        key, equals, value = pair.partition("=")
        if not key or not equals:
            raise Refused(f"--tag takes KEY=VALUE, given {pair}")

        entries.append({"Key": key, "Value": value})

    return {"Tags": entries} if entries else {}


def instance_type(options: Namespace) -> str:
    """The type of the instances. Raises Refused for one of EC2, which AWS would refuse only after
    the model is made.
    """
    if not options.instance_type.startswith("ml."):
        raise Refused(
            f"--instance-type takes SageMaker's types, such as ml.g6.xlarge, given "
            f"{options.instance_type}"
        )

    return str(options.instance_type)


def _several(options: Namespace, prefix: str) -> dict[str, str]:
    if options.model:
        raise Refused("--multi-model names the prefix of all models, so --model is one too many")

    if not prefix.startswith("s3://"):
        raise Refused(f"--multi-model takes s3://BUCKET/PREFIX/, given {prefix}")

    return {"Mode": "MultiModel", "ModelDataUrl": prefix.rstrip("/") + "/"}


def _in_s3(source: str) -> dict[str, str]:
    """SageMaker copies a prefix as it is and unpacks a tar.gz. The container finds the files in
    /opt/ml/model.
    """
    if not source.startswith("s3://"):
        raise Refused(f"--model takes s3://… or the id of a model on the hub, given {source}")

    if source.endswith(ARCHIVES):
        return {"S3Uri": source, "S3DataType": "S3Object", "CompressionType": "Gzip"}

    if source.endswith(".tar"):
        raise Refused(f"SageMaker unpacks .tar.gz and no other archive, given {source}")

    return {"S3Uri": source.rstrip("/") + "/", "S3DataType": "S3Prefix", "CompressionType": "None"}


def _name_hub_id(options: Namespace, variables: dict[str, str]) -> None:
    if not HUB_ID.fullmatch(options.model):
        raise Refused(
            f"--model takes s3://… or the id of a model on the hub, given {options.model}"
        )

    if options.network_isolation:
        raise Refused(
            f"--network-isolation leaves no way to the hub: copy {options.model} to S3 and name it "
            f"there"
        )

    if variables.setdefault("HF_MODEL_ID", options.model) != options.model:
        raise Refused(
            f"--model is {options.model}, and --env gives HF_MODEL_ID={variables['HF_MODEL_ID']}"
        )


def environment(pairs: Iterable[str]) -> dict[str, str]:
    """Return the entries of `--env KEY=VALUE`. A key that is given twice with two values is
    refused.
    """
    entries: dict[str, str] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not key or not equals:
            raise Refused(f"--env takes KEY=VALUE, given {pair}")

        if entries.setdefault(key, value) != value:
            raise Refused(f"--env gives {key} twice: {entries[key]} and {value}")

    return entries


def _check_environment(entries: Mapping[str, str]) -> None:
    """Refuse an environment that SageMaker would refuse, and name the entry."""
    for key, value in entries.items():
        for field_name, text in (("name", key), ("value", value)):
            if _size(text) > MAX_ENTRY_BYTES:
                key_text = key if len(key) <= 64 else f"{key[:64]}…"
                raise Refused(
                    f"the {field_name} of {key_text} has {_size(text)} bytes, "
                    f"at most {MAX_ENTRY_BYTES}: {ADVICE}"
                )

    if len(entries) > MAX_ENTRIES:
        last = list(entries)[-1]
        raise Refused(f"{last} is one of {len(entries)} variables, at most {MAX_ENTRIES}: {ADVICE}")

    total = sum(_size(key) + _size(value) for key, value in entries.items())
    if total > MAX_BYTES:
        largest = max(entries, key=lambda key: _size(entries[key]))
        raise Refused(
            f"the variables have {total} bytes, at most {MAX_BYTES}; {largest} is the largest: "
            f"{ADVICE}"
        )


def _size(text: str) -> int:
    return len(text.encode())
