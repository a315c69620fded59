"""The SageMaker SDK 2 at a gateway: sagemaker2.py INPUT_LOCATION URL... . Prints what it found at
each.
"""

import json
import sys

# The SDK writes its log to the standard output that it finds
result, sys.stdout = (
    sys.stdout,
    sys.stderr,
)

# ruff: noqa: E402
import boto3
from botocore.exceptions import ClientError
from sagemaker.base_deserializers import JSONDeserializer
from sagemaker.base_serializers import JSONSerializer
from sagemaker.djl_inference import DJLPredictor
from sagemaker.iterators import ByteIterator, LineIterator
from sagemaker.predictor import Predictor
from sagemaker.predictor_async import AsyncPredictor
from sagemaker.session import Session

ASKED = {"inputs": "The quick brown", "parameters": {"max_new_tokens": 8}}
WRONG = {"inputs": "The quick brown", "parameters": {"max_new_tokens": 0}}
STREAM = ASKED | {"stream": True}


def session(url: str) -> Session:
    return Session(
        sagemaker_client=boto3.client("sagemaker", endpoint_url=url),
        sagemaker_runtime_client=boto3.client("sagemaker-runtime", endpoint_url=url),
        default_bucket="none",
    )


def refusal(predictor: Predictor) -> str:
    try:
        return str(predictor.predict(WRONG))
    except ClientError as error:
        return str(error)


def visit(url: str, location: str) -> dict:
    predictor = Predictor(
        "demo", session(url), serializer=JSONSerializer(), deserializer=JSONDeserializer()
    )
    djl = DJLPredictor("demo", session(url))
    accepted = AsyncPredictor(predictor).predict_async(input_path=location)
    return {
        "plain": predictor.predict(ASKED)["generated_text"],
        "djl": djl.predict(ASKED)["generated_text"],
        "lines": [
            json.loads(line) for line in predictor.predict_stream(STREAM, iterator=LineIterator)
        ],
        "bytes": b"".join(predictor.predict_stream(STREAM, iterator=ByteIterator)).decode(),
        "refused": refusal(predictor),
        "async": {"OutputLocation": accepted.output_path, "FailureLocation": accepted.failure_path},
    }


location, *urls = sys.argv[1:]
print(json.dumps([visit(url, location) for url in urls]), file=result)
