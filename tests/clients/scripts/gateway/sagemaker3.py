"""The SageMaker SDK 3 at a gateway: sagemaker3.py INPUT_LOCATION URL... . Prints what it found at
each.
"""

import json
import os
import sys

# The SDK writes its log to the standard output that it finds
result, sys.stdout = (
    sys.stdout,
    sys.stderr,
)

# ruff: noqa: E402
from botocore.exceptions import ClientError
from sagemaker.core.resources import Endpoint
from sagemaker.core.utils.utils import SageMakerClient

ASKED = json.dumps({"inputs": "The quick brown", "parameters": {"max_new_tokens": 8}})
WRONG = json.dumps({"inputs": "The quick brown", "parameters": {"max_new_tokens": 0}})
STREAM = json.dumps(
    {"inputs": "The quick brown", "parameters": {"max_new_tokens": 8}, "stream": True}
)


def refusal(endpoint: Endpoint) -> str:
    try:
        return str(endpoint.invoke(body=WRONG))
    except ClientError as error:
        return str(error)


def streamed(endpoint: Endpoint) -> str:
    try:
        return str(endpoint.invoke_with_response_stream(body=STREAM))
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def visit(location: str) -> dict:
    endpoint = Endpoint(endpoint_name="demo")
    accepted = endpoint.invoke_async(input_location=location)
    return {
        "plain": json.loads(
            endpoint.invoke(body=ASKED, content_type="application/json").body.read()
        )["generated_text"],
        "streamed": streamed(endpoint),
        "refused": refusal(endpoint),
        "async": {
            "OutputLocation": accepted.output_location,
            "FailureLocation": accepted.failure_location,
        },
        "status": Endpoint.get("demo").endpoint_status,
    }


def visited(url: str, location: str) -> dict:
    """Visit a gateway that the SDK finds by the variables that AWS's clients read."""
    os.environ["AWS_ENDPOINT_URL_SAGEMAKER_RUNTIME"] = os.environ["AWS_ENDPOINT_URL_SAGEMAKER"] = (
        url
    )
    # Which it keeps for the life of the process
    SageMakerClient.reset()
    return visit(location)


location, *urls = sys.argv[1:]
print(json.dumps([visited(url, location) for url in urls]), file=result)
