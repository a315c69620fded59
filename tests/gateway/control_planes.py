"""A gateway with the control plane, and what a client of AWS does there: models, configurations and
endpoints whose containers are servers with the echo engine.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.gateway.gateways import Gateway, gateway
from tests.system.container import wait_until, write_model

IMAGE = "123456789012.dkr.ecr.eu-central-1.amazonaws.com/lmi:echo"
ROLE = "arn:aws:iam::123456789012:role/sagemaker"
WAIT = {"Delay": 0.1, "MaxAttempts": 600}
BODY = json.dumps({"inputs": "hello", "parameters": {"max_new_tokens": 5}}).encode()
STREAM = json.dumps(
    {"inputs": "hello", "parameters": {"max_new_tokens": 5}, "stream": True}
).encode()


@dataclass
class ControlPlane:
    """A gateway whose control plane has the bucket `models`, a folder with a good model, `echo`,
    and one that cannot be served, `broken`.
    """

    aws: Gateway
    folder: Path
    bucket: Path

    @property
    def control(self) -> Any:
        return self.aws.control

    def model(self, name: str, key: str = "echo", **environment: str) -> None:
        container = {
            "Image": IMAGE,
            "ModelDataSource": {
                "S3DataSource": {
                    "S3Uri": f"s3://models/{key}/",
                    "S3DataType": "S3Prefix",
                    "CompressionType": "None",
                }
            },
            "Environment": environment,
        }
        self.control.create_model(ModelName=name, ExecutionRoleArn=ROLE, PrimaryContainer=container)

    def config(self, name: str, *models: str, **members: Any) -> None:
        """A configuration whose variants are named as their models."""
        variants = []
        for model in models:
            variants.append(
                {
                    "VariantName": model,
                    "ModelName": model,
                    "InitialInstanceCount": 1,
                    "InstanceType": "ml.g6.2xlarge",
                    "InitialVariantWeight": 1.0,
                    **members,
                }
            )

        self.control.create_endpoint_config(EndpointConfigName=name, ProductionVariants=variants)

    def create(self, name: str, config: str) -> None:
        self.control.create_endpoint(EndpointName=name, EndpointConfigName=config)

    def describe(self, name: str) -> dict[str, Any]:
        description: dict[str, Any] = self.control.describe_endpoint(EndpointName=name)
        return description

    def wait_in_service(self, name: str) -> None:
        waiter = self.control.get_waiter("endpoint_in_service")
        waiter.wait(EndpointName=name, WaiterConfig=WAIT)

    def wait_settled(self, name: str) -> dict[str, Any]:
        """Wait until no change is under way, and return the description."""
        under_way = ("Creating", "Updating", "SystemUpdating", "RollingBack", "Deleting")
        wait_until(
            lambda: self.describe(name)["EndpointStatus"] not in under_way, f"{name} is settled"
        )
        return self.describe(name)

    def delete(self, name: str) -> None:
        self.control.delete_endpoint(EndpointName=name)
        waiter = self.control.get_waiter("endpoint_deleted")
        waiter.wait(EndpointName=name, WaiterConfig=WAIT)

    def variant(self, name: str, **parameters: str) -> str:
        """Return the variant that answers an invocation."""
        answer = self.aws.invoke(BODY, name, **parameters)
        assert json.loads(answer["Body"].read())["generated_text"] == "hello"
        variant: str = answer["InvokedProductionVariant"]
        return variant


@contextmanager
def control_plane(
    folder: Path,
    *flags: str,
    environ: Mapping[str, str] | None = None,
    prefix: Sequence[str] = (),
) -> Iterator[ControlPlane]:
    """Run a gateway whose control plane keeps its state below `folder`. `prefix` begins its
    command.
    """
    bucket = folder / "bucket"
    if not bucket.exists():
        (bucket / "echo").mkdir(parents=True)
        write_model(bucket / "echo")
        (bucket / "broken").mkdir()
        (bucket / "broken" / "notes.txt").write_text("no model")

    command = ["--control-dir", str(folder / "control"), "--bucket", f"models={bucket}", *flags]
    with gateway(*command, environ=environ, prefix=prefix) as aws:
        yield ControlPlane(aws, folder, bucket)
