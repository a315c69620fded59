"""A chat over SageMaker's API, streamed. AWS may join and cut the parts of a stream anywhere, so
split at lines.
"""

import json
import os

import boto3

client = boto3.client("sagemaker-runtime")
messages = [{"role": "user", "content": "What is the capital of France?"}]
answer = client.invoke_endpoint_with_response_stream(
    EndpointName=os.environ.get("ENDPOINT", "chat"),
    ContentType="application/json",
    Body=json.dumps({"messages": messages, "temperature": 0, "stream": True}),
)
rest = b""
for event in answer["Body"]:
    *lines, rest = (rest + event["PayloadPart"]["Bytes"]).split(b"\n")
    for line in filter(None, lines):
        for choice in json.loads(line)["choices"]:
            print(choice["delta"].get("content") or "", end="", flush=True)
print()
