"""boto3 and langchain-aws at the SageMaker API: sagemaker.py BASE_URL.

SageMaker's front end takes `/endpoints/NAME/invocations` and hands the body and some headers to the container's
`/invocations`. Here a hook of botocore does only that step; boto3 itself sends, signs and reads.
"""

import json
import sys

import boto3
from botocore.exceptions import ClientError
from langchain_aws.llms.sagemaker_endpoint import LLMContentHandler, SagemakerEndpoint

PROMPT = "The quick brown"


def as_the_front_end(request, **_):
    request.url = request.url.replace("/endpoints/it/invocations", "/invocations")


class Handler(LLMContentHandler):
    content_type = accepts = "application/json"

    def transform_input(self, prompt, model_kwargs):
        return json.dumps({"inputs": prompt, "parameters": model_kwargs}).encode()

    def transform_output(self, output):
        return json.loads(output.read())["generated_text"]


client = boto3.client("sagemaker-runtime", endpoint_url=sys.argv[1])
client.meta.events.register("before-send.sagemaker-runtime.InvokeEndpoint", as_the_front_end)


def invoke(body: object, **more: str):
    return client.invoke_endpoint(EndpointName="it", Body=json.dumps(body), **more)


def refusal() -> int:
    try:
        invoke({"inputs": PROMPT, "parameters": {"max_new_tokens": 0}})
    except ClientError as error:
        return error.response["ResponseMetadata"]["HTTPStatusCode"]
    return 0


asked = {"inputs": PROMPT, "parameters": {"max_new_tokens": 8}}
plain = invoke(asked, CustomAttributes="trace=1")
llm = SagemakerEndpoint(
    endpoint_name="it", client=client, content_handler=Handler(), model_kwargs={"max_new_tokens": 8}
)
print(
    json.dumps(
        {
            "plain": json.loads(plain["Body"].read())["generated_text"],
            "content_type": plain["ContentType"],
            "custom_attributes": plain["CustomAttributes"],
            "lines": invoke({**asked, "stream": True})["Body"].read().decode().splitlines(),
            "langchain": llm.invoke(PROMPT),
            "refusal": refusal(),
        }
    )
)
