"""boto3 at a gateway: boto3_client.py URL... . Prints what it found at each."""

import json
import sys

import boto3
from botocore.exceptions import ClientError

PROMPT = "The quick brown"
ASKED = {"inputs": PROMPT, "parameters": {"max_new_tokens": 8}}
WRONG = {"inputs": PROMPT, "parameters": {"max_new_tokens": 0}}
SLOW = {
    "do_sample": True,
    "typical_p": 0.9,
    "top_p": 0.9,
    "repetition_penalty": 1.1,
    "details": True,
    "logprobs": 10,
}
LONG = {"inputs": PROMPT, "parameters": {"max_new_tokens": 900, "ignore_eos_token": True, **SLOW}}


class Endpoint:
    def __init__(self, url: str) -> None:
        self.client = boto3.client("sagemaker-runtime", endpoint_url=url)

    def invoke(self, body: object, **more: str):
        return self.client.invoke_endpoint(EndpointName="demo", Body=json.dumps(body), **more)

    def stream(self, body: dict):
        arguments = {"EndpointName": "demo", "Body": json.dumps(body | {"stream": True})}
        return self.client.invoke_endpoint_with_response_stream(**arguments)

    def plain(self) -> dict:
        answer = self.invoke(ASKED, CustomAttributes="trace=1", ContentType="application/json")
        return {
            "text": json.loads(answer["Body"].read())["generated_text"],
            "content_type": answer["ContentType"],
            "custom_attributes": answer["CustomAttributes"],
            "variant": answer["InvokedProductionVariant"],
        }

    def streamed(self) -> dict:
        answer = self.stream(ASKED)
        parts = [event["PayloadPart"]["Bytes"] for event in answer["Body"]]
        return {
            "lines": [json.loads(line) for line in b"".join(parts).splitlines()],
            "num_parts": len(parts),
            "longest": max(map(len, parts)),
            "content_type": answer["ContentType"],
        }

    def leave(self) -> int:
        """Read one part of a long stream and close it."""
        body = self.stream(LONG)["Body"]
        num_bytes = len(next(iter(body))["PayloadPart"]["Bytes"])
        body.close()
        return num_bytes


def refusal(call, *arguments: object) -> dict:
    try:
        call(*arguments)
    except ClientError as error:
        kind = type(error).__name__
        answer = error.response
        return {
            "class": kind,
            "status": answer["OriginalStatusCode"],
            "message": answer["OriginalMessage"],
        }

    return {}


found = []
for url in sys.argv[1:]:
    endpoint = Endpoint(url)
    found.append(
        {
            "plain": endpoint.plain(),
            "streamed": endpoint.streamed(),
            "refused": refusal(endpoint.invoke, WRONG),
            "refused_stream": refusal(endpoint.stream, WRONG),
            "left_after_bytes": endpoint.leave(),
        }
    )
print(json.dumps({"version": boto3.__version__, "found": found}))
