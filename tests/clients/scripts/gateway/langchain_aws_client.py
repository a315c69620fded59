"""langchain-aws at a gateway: langchain_aws_client.py URL... . Prints what it found at each.

Its user writes a handler for the form of requests and answers: here LMI's for texts, and OpenAI's
for chats.
"""

import json
import sys

import boto3
from langchain_aws.chat_models.sagemaker_endpoint import (
    ChatModelContentHandler,
    ChatSagemakerEndpoint,
)
from langchain_aws.llms.sagemaker_endpoint import LLMContentHandler, SagemakerEndpoint
from langchain_core.messages import AIMessage

PROMPT = "The quick brown"


class Text(LLMContentHandler):
    content_type = accepts = "application/json"

    def __init__(self, **fields: object) -> None:
        self.fields = fields

    def transform_input(self, prompt, model_kwargs):
        return json.dumps({"inputs": prompt, "parameters": model_kwargs, **self.fields}).encode()

    def transform_output(self, output):
        # A whole answer, else a line of a stream
        if hasattr(output, "read"):
            return json.loads(output.read())["generated_text"]

        return json.loads(output)["token"]["text"]


class Chat(ChatModelContentHandler):
    content_type = accepts = "application/json"

    def __init__(self, **fields: object) -> None:
        self.fields = fields

    def transform_input(self, prompt, model_kwargs):
        return json.dumps({"messages": prompt, **model_kwargs, **self.fields}).encode()

    def transform_output(self, output):
        if hasattr(output, "read"):
            return AIMessage(json.loads(output.read())["choices"][0]["message"]["content"])

        event = output.decode().removeprefix("data:").strip()
        if event in ("", "[DONE]"):
            return AIMessage("")

        return AIMessage(json.loads(event)["choices"][0]["delta"].get("content") or "")


def text(url: str, max_new_tokens: int = 8, **fields: object) -> SagemakerEndpoint:
    place = {"endpoint_name": "demo", "endpoint_url": url, "region_name": "us-east-1"}
    return SagemakerEndpoint(
        **place, content_handler=Text(**fields), model_kwargs={"max_new_tokens": max_new_tokens}
    )


def chat(url: str, **fields: object) -> ChatSagemakerEndpoint:
    place = {"endpoint_name": "demo", "client": boto3.client("sagemaker-runtime", endpoint_url=url)}
    return ChatSagemakerEndpoint(
        **place, content_handler=Chat(**fields), model_kwargs={"max_tokens": 8, "temperature": 0}
    )


def refusal(url: str) -> str:
    try:
        return text(url, max_new_tokens=0).invoke(PROMPT)
    except Exception as error:
        return str(error)


def visit(url: str) -> dict:
    return {
        "plain": text(url).invoke(PROMPT),
        "streamed": "".join(text(url, stream=True).stream(PROMPT)),
        "chat": chat(url).invoke(PROMPT).content,
        "chat_streamed": "".join(chunk.content for chunk in chat(url, stream=True).stream(PROMPT)),
        "refused": refusal(url),
    }


print(json.dumps([visit(url) for url in sys.argv[1:]]))
