"""AWS's client of streams in both directions, as a user's program has it: URL, certificate."""

import asyncio
import json
import os
import sys
from importlib.metadata import version

from aws_sdk_sagemaker_runtime_http2.client import AsyncSageMakerRuntimeHTTP2Client
from aws_sdk_sagemaker_runtime_http2.config import AsyncSageMakerRuntimeHTTP2Config
from aws_sdk_sagemaker_runtime_http2.models import (
    InputValidationError,
    InvokeEndpointWithBidirectionalStreamInput,
    ModelError,
    RequestPayloadPart,
    RequestStreamEventPayloadPart,
)
from awscrt import io
from smithy_http.aio.crt import AWSCRTHTTPClient

PACKAGE = "aws-sdk-sagemaker-runtime-http2"
LIMIT_S = 60


class TrustingHttpClient(AWSCRTHTTPClient):
    """The client's own transport, which trusts one certificate: it has no setting for that."""

    def __init__(self, certificate, **settings):
        super().__init__(**settings)
        self._certificate = certificate
        options = io.TlsContextOptions()
        with open(certificate, "rb") as file:
            options.override_default_trust_store(file.read())

        self._tls_ctx = io.ClientTlsContext(options)

    def __deepcopy__(self, memo):
        return TrustingHttpClient(self._certificate, eventloop=self._eventloop)


class Stream:
    """One stream of JSON messages."""

    def __init__(self, stream, events):
        self._stream = stream
        self._events = events

    async def send(self, message, **fields):
        await self.send_bytes(json.dumps(message).encode(), **fields)

    async def send_bytes(self, data, **fields):
        part = RequestPayloadPart(bytes_=data, **fields)
        await self._stream.input_stream.send(RequestStreamEventPayloadPart(part))

    async def receive(self):
        event = await self._events.receive()
        return None if event is None else json.loads(event.value.bytes_)

    async def receive_until_ended(self, num):
        """The messages until so many answers have ended."""
        messages = []
        while sum("end" in message for message in messages) < num:
            messages.append(await self.receive())

        return messages

    async def end(self):
        await self._stream.input_stream.close()


async def open_stream(client, **members):
    """A stream, and the head of its answer."""
    request = InvokeEndpointWithBidirectionalStreamInput(endpoint_name="demo", **members)
    stream = await client.invoke_endpoint_with_bidirectional_stream(request)
    head, events = await stream.await_output()
    return Stream(stream, events), head


async def converse(client, told):
    stream, head = await open_stream(client)
    told["variant"] = head.invoked_production_variant

    parameters = {"max_new_tokens": 5}
    body = {"inputs": "Hello", "parameters": parameters}
    await stream.send(body)
    told["whole"] = [await stream.receive()]

    text = json.dumps({"id": "a", "body": {**body, "stream": True}}).encode()
    await stream.send_bytes(text[:10], data_type="UTF8", completion_state="PARTIAL")
    await stream.send_bytes(text[10:], data_type="UTF8", completion_state="COMPLETE")
    told["streamed"] = await stream.receive_until_ended(1)

    await stream.send({"id": "b", "body": body})
    await stream.send({"id": "c", "body": body})
    messages = await stream.receive_until_ended(2)
    told["ends"] = [message["id"] for message in messages if "end" in message]

    await stream.send({"id": "d", "body": {"requestType": "NEW_SESSION"}})
    told["session"] = (await stream.receive_until_ended(1))[0]

    await stream.send({"inputs": 1})
    told["error"] = await stream.receive()

    await stream.end()
    told["after the end"] = await stream.receive()


async def chat(client, told):
    stream, _ = await open_stream(client, model_invocation_path="v1/chat/completions")
    message = {"role": "user", "content": "Hello"}
    await stream.send({"messages": [message], "max_tokens": 5})
    told["chat"] = await stream.receive()
    await stream.end()


async def be_refused(client, told):
    try:
        await open_stream(client, target_variant="other")
    except InputValidationError as error:
        told["refused"] = type(error).__name__

    try:
        await open_stream(client, model_invocation_path="nowhere")
    except ModelError as error:
        told["no such path"] = [type(error).__name__, error.original_status_code]


async def main(url, certificate):
    config = await AsyncSageMakerRuntimeHTTP2Config.resolve(
        endpoint_uri=url,
        region=os.environ["REGION"],
        aws_access_key_id=os.environ["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=os.environ["AWS_SECRET_ACCESS_KEY"],
        transport=TrustingHttpClient(certificate),
    )
    client = AsyncSageMakerRuntimeHTTP2Client(config)
    told = {"version": version(PACKAGE)}
    async with asyncio.timeout(LIMIT_S):
        await converse(client, told)
        await chat(client, told)
        await be_refused(client, told)

    print(json.dumps(told))


asyncio.run(main(*sys.argv[1:]))
