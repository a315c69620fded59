"""The plan of a batch transform job: every line of the input is a request, every line of the output its answer."""

import time
from argparse import Namespace
from typing import Any

from scripts.sagemaker_kit import model
from scripts.sagemaker_kit.log_tail import last_lines
from scripts.sagemaker_kit.steps import Call, Failed, Plan, Refused, Wait

LINES = "application/jsonlines"
UNDER_WAY = frozenset({"InProgress", "Stopping"})
LONGEST_S = 3600  # that SageMaker waits for one answer


def transform(given: Namespace) -> Plan:
    """Create the model if --image is given, else use the one that NAME was deployed with. Run the job and wait."""
    if given.image:
        yield model.create(given)
    elif given.role or given.model or given.env or given.network_isolation:
        raise Refused("--role, --model, --env and --network-isolation describe a new model, which needs --image")
    job = f"{given.name[:47]}-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}"
    yield Call("sagemaker", "CreateTransformJob", _parameters(given, job))
    describe = Call("sagemaker", "DescribeTransformJob", {"TransformJobName": job})
    described = yield Wait(describe, "TransformJobStatus", UNDER_WAY)
    status = described.get("TransformJobStatus", "Completed")
    if status != "Completed":
        lines = yield from last_lines("/aws/sagemaker/TransformJobs", f"{job}/")
        raise Failed("\n".join([f"{job} is {status}: {described.get('FailureReason', 'no reason is named')}", *lines]))
    return [f"{given.output.rstrip('/')}/\n".encode()]


def _parameters(given: Namespace, job: str) -> dict[str, Any]:
    """The container says by /execution-parameters how many requests it takes at once, so the job does not."""
    source = {"S3DataSource": {"S3DataType": "S3Prefix", "S3Uri": given.input}}
    return {
        "TransformJobName": job,
        "ModelName": given.name,
        "ModelClientConfig": {"InvocationsTimeoutInSeconds": LONGEST_S},
        "TransformInput": {"DataSource": source, "ContentType": LINES, "SplitType": "Line"},
        "TransformOutput": {"S3OutputPath": given.output, "Accept": LINES, "AssembleWith": "Line"},
        "TransformResources": {"InstanceType": model.instance_type(given), "InstanceCount": given.count},
    }
