"""boto3's sessions: boto3_session.py URL. Opens one, asks in it, closes it, and asks once more."""

import json
import sys

import boto3
from botocore.exceptions import ClientError

client = boto3.client("sagemaker-runtime", endpoint_url=sys.argv[1])
ASKED = {"inputs": "The quick brown", "parameters": {"max_new_tokens": 8}}


def invoke(body: object, session: str) -> dict:
    return client.invoke_endpoint(EndpointName="demo", SessionId=session, Body=json.dumps(body))


def refusal(session: str) -> str:
    try:
        invoke(ASKED, session)
    except ClientError as error:
        return error.response["OriginalMessage"]

    return ""


opened = invoke({"requestType": "NEW_SESSION"}, "NEW_SESSION")["NewSessionId"]
session = opened.partition(";")[0]
answer = invoke(ASKED, session)
stream = {
    "EndpointName": "demo",
    "SessionId": session,
    "Body": json.dumps(ASKED | {"stream": True}),
}
parts = [
    event["PayloadPart"]["Bytes"]
    for event in client.invoke_endpoint_with_response_stream(**stream)["Body"]
]
closed = invoke({"requestType": "CLOSE"}, session)
found = {
    "opened": opened,
    "text": json.loads(answer["Body"].read())["generated_text"],
    "streamed": json.loads(b"".join(parts).splitlines()[-1])["generated_text"],
    "fields": sorted(name for name in answer if name.endswith("SessionId")),
    "closed": closed["ClosedSessionId"],
    "refused": refusal(session),
}
print(json.dumps(found))
