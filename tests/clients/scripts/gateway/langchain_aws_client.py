"""langchain-aws at a gateway: langchain_aws_client.py URL... . Prints what it found at each."""

import json
import sys

from langchain_aws.llms.sagemaker_endpoint import LLMContentHandler, SagemakerEndpoint

PROMPT = "The quick brown"


class Text(LLMContentHandler):
    """The handler of langchain's own page, for the LMI schema."""

    content_type = accepts = "application/json"

    def transform_input(self, prompt, model_kwargs):
        return json.dumps({"inputs": prompt, "parameters": model_kwargs}).encode()

    def transform_output(self, output):
        if hasattr(output, "read"):
            return json.loads(output.read())["generated_text"]
        return json.loads(output)["token"]["text"]


class StreamedText(Text):
    def transform_input(self, prompt, model_kwargs):
        return json.dumps({"inputs": prompt, "parameters": model_kwargs, "stream": True}).encode()


def text(url: str, handler: Text) -> SagemakerEndpoint:
    return SagemakerEndpoint(
        endpoint_name="demo",
        endpoint_url=url,
        region_name="us-east-1",
        content_handler=handler,
        model_kwargs={"max_new_tokens": 8},
        streaming=isinstance(handler, StreamedText),
    )


def refusal(url: str) -> str:
    llm = text(url, Text())
    llm.model_kwargs = {"max_new_tokens": 0}
    try:
        return llm.invoke(PROMPT)
    except Exception as error:
        return str(error)


found = [
    {
        "plain": text(url, Text()).invoke(PROMPT),
        "streamed": "".join(text(url, StreamedText()).stream(PROMPT)),
        "refused": refusal(url),
    }
    for url in sys.argv[1:]
]
print(json.dumps(found))
