"""boto3's invoke_endpoint_async: boto3_async.py URL INPUT_LOCATION.

Prints where each answer will be. boto3 1.43 has no inline body.
"""

import json
import sys

import boto3

url, location = sys.argv[1:]
client = boto3.client("sagemaker-runtime", endpoint_url=url)
INLINE = {"inputs": "The quick brown", "parameters": {"max_new_tokens": 8}}
WRONG = {"inputs": "The quick brown", "parameters": {"max_new_tokens": 0}}


def accepted(**what: object) -> dict:
    answer = client.invoke_endpoint_async(
        EndpointName="demo", ContentType="application/json", **what
    )
    fields = ("InferenceId", "OutputLocation", "FailureLocation")
    return {field: answer[field] for field in fields} | {
        "status": answer["ResponseMetadata"]["HTTPStatusCode"]
    }


found = {"location": accepted(InputLocation=location, InferenceId="mine")}
if "Body" in client.meta.service_model.operation_model("InvokeEndpointAsync").input_shape.members:
    found["inline"] = accepted(
        Body=json.dumps(INLINE), Filename="inline.json", S3OutputPathExtension="a/b"
    )
    found["wrong"] = accepted(Body=json.dumps(WRONG))
print(json.dumps(found))
