"""User code around a request of an engine: the model's input formatter, and formatters of a
response that it writes.
"""

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import orjson

from lmi.apis.base.api import JSON, JSONLINES, AnyApi, AsyncFormatter
from lmi.apis.base.readers import Message, Parsed
from lmi.apis.lmi import name_of_several
from lmi.errors import MalformedRequest, Unsupported, UserCodeFailed
from lmi.http.exchange import CUSTOM_ATTRIBUTES, Exchange
from lmi.server.service import Service
from lmi.settings.config import Config
from lmi.types import Delta
from lmi.user_code.calls import Call, Feed, Open, ReadInput, Respond, ToWorker

EVENT = b"data: "


class UserFormatters:
    """The model's input and output formatter around one request, if it has any, in one call. Always
    `close` it.
    """

    def __init__(self, exchange: Exchange, service: Service, *, is_admitted: bool) -> None:
        """With `is_admitted` the caller holds a place in the queue for the request."""
        self._exchange = exchange
        self._service = service
        self._is_admitted = is_admitted
        self._call: Call | None = None
        self._takes_user_code = (
            False  # whether the API of the path does; the body's may be OpenAI's
        )

    def reads(self, api: AnyApi) -> bool:
        """Whether the input formatter gets the bodies of this API."""
        code = self._service.config.user_code
        return code is not None and code.input_formatter is not None and api.takes_user_code

    async def read(
        self, api: AnyApi, body: bytes, content_type: str | None
    ) -> tuple[bytes, str | None]:
        """Return body and content type, after the input formatter if any, whose exceptions become
        MalformedRequest.
        """
        self._takes_user_code = api.takes_user_code
        if not self.reads(api):
            return body, content_type

        given = properties(self._exchange) | (
            {} if content_type is None else {"Content-Type": content_type}
        )
        with nullcontext() if self._is_admitted else self._service.admitted():
            call = await self.ask(ReadInput(given, body))
            try:
                return await call.chunk(), JSON
            except UserCodeFailed as error:
                raise MalformedRequest(f"the input formatter failed: {error}") from None

    def asked(self, api: AnyApi, message: Message[Any]) -> Message[Any]:
        """Return the message to parse. It asks for details if the model has an output formatter,
        which needs them.
        """
        config = self._service.config
        if (
            config.model.dynamic_batch
            or not api.takes_user_code
            or not has_output_formatter(config, message)
        ):
            return message

        parameters = message.fields.get("parameters") or {}
        if parameters.get("details") not in (None, False):
            return message

        return replace(
            message, fields=message.fields | {"parameters": parameters | {"details": True}}
        )

    def kept(self, message: Message[Any]) -> Message[Any]:
        """Return what `choose` needs of a message: no field where no code of the model's writes a
        response.
        """
        return (
            message
            if self._takes_user_code and self._service.config.user_code
            else replace(message, fields={})
        )

    def choose(
        self, api: AnyApi, message: Message[Any], parsed: Parsed[Any], of_answer: Parsed[Any]
    ) -> tuple[AsyncFormatter, Parsed[Any]]:
        """Return the response's formatter, and the requests that it needs. `message` is as the
        client sent it.

        `of_answer` has the requests without what only engines need.
        """
        if not self._takes_user_code or not has_output_formatter(self._service.config, message):
            self.close()
            return api.formatter(of_answer), parsed

        if not api.takes_user_code:
            return ResponseFormatter(self, api, of_answer), parsed

        kind = (
            ListOutputFormatter if isinstance(message.fields["inputs"], list) else OutputFormatter
        )
        requests = tuple(replace(request, needs_log_probs=True) for request in parsed.requests)
        return kind(self, message, parsed), replace(parsed, requests=requests)

    async def ask(self, message: ToWorker) -> Call:
        """Send the message, the first one of a new call if there is none."""
        if self._call is None:
            assert self._service.user_code is not None
            self._call = await self._service.user_code.begin(message)
        else:
            self._call.send(message)

        return self._call

    def close(self) -> None:
        if self._call is not None:
            self._call.close()


class CallFormatter(AsyncFormatter):
    """Writes a response with the model's own code, in the call in which the input formatter ran, if
    there is one.
    """

    is_verbatim = True

    def __init__(self, code: UserFormatters) -> None:
        self._code = code

    def close(self) -> None:
        self._code.close()


class OutputFormatter(CallFormatter):
    """Writes the response to one prompt. The content type is the one that the process of user code
    names, if any.
    """

    media_type = ""

    def __init__(self, code: UserFormatters, message: Message[Any], parsed: Parsed[Any]) -> None:
        if parsed.requests[0].num_sequences > 1:
            name = name_of_several(message.fields["parameters"])
            raise Unsupported(name, "the model's own output formatter writes one sequence")

        super().__init__(code)
        self.is_streaming = parsed.requests[0].is_streaming
        self._message = message
        self._parsed = parsed
        self._has_begun = False

    async def begin(self) -> None:
        message = self._message
        request = self._parsed.requests[0]
        prompts = [each.prompt for each in self._parsed.requests]
        fields = {name: value for name, value in message.fields.items() if name != "inputs"}
        settings = request.is_streaming, message.format.details, request.return_full_text
        await self._code.ask(Open(prompts, fields, *settings))

    async def feed(self, delta: Delta) -> list[bytes]:
        return [await self._written(delta)]

    async def _written(self, delta: Delta) -> bytes:
        ids = list(delta.prompt_token_ids) if delta.num_prompt_tokens else None
        reasons = delta.finish_reason, delta.stop_reason
        call = await self._code.ask(Feed(delta.index, delta.tokens, *reasons, ids, delta.prefill))
        if not self._has_begun:
            self._has_begun = True
            head = await call.head()
            self.media_type = self.media_type or head.media_type

        return await call.chunk()


class ListOutputFormatter(OutputFormatter):
    """Writes the response to a list of prompts: a JSON list of what the code writes for each, a
    JSON value or a string.

    A stream has lines like `{"outputs": ["what was written", ""]}`.
    """

    def __init__(self, code: UserFormatters, message: Message[Any], parsed: Parsed[Any]) -> None:
        super().__init__(code, message, parsed)
        self.media_type = JSONLINES if self.is_streaming else JSON
        self._unsent = [b""] * len(parsed.requests)
        self._num_open = len(parsed.requests)

    async def feed(self, delta: Delta) -> list[bytes]:
        self._unsent[delta.index] += await self._written(delta)
        self._num_open -= delta.finish_reason is not None
        if not self.is_streaming:
            return [] if self._num_open else [b"[%b]\n" % b", ".join(map(as_json, self._unsent))]

        if delta.is_followed or not any(self._unsent):
            return []

        written, self._unsent = self._unsent, [b""] * len(self._unsent)
        return [
            orjson.dumps({"outputs": [each.decode(errors="replace") for each in written]}) + b"\n"
        ]


class ResponseFormatter(CallFormatter):
    """Writes the response of an OpenAI API, each object of which the user's output formatter
    rewrites.
    """

    def __init__(self, code: UserFormatters, api: AnyApi, parsed: Parsed[Any]) -> None:
        super().__init__(code)
        self._formatter = api.formatter(parsed)
        self._api = api
        self.media_type = self._formatter.media_type
        self.is_streaming = self._formatter.is_streaming

    async def feed(self, delta: Delta) -> list[bytes]:
        records = [
            self._api.whole(self.media_type, record) for record in self._formatter.feed(delta)
        ]
        return [
            b"".join([await self._rewritten(line) for line in record.splitlines(keepends=True)])
            for record in records
        ]

    async def _rewritten(self, line: bytes) -> bytes:
        """Return the line with its object rewritten by the code. A line without an object stays as
        it is.
        """
        body = line.removeprefix(EVENT)
        if not body.startswith(b"{"):
            return line

        call = await self._code.ask(Respond(body))
        written = await call.chunk()
        if body == line:
            return written

        lines = written.splitlines()  # each becomes the data of an event, unless it is one already
        return b"".join(
            (each if each.startswith(EVENT) else EVENT + each) + b"\n" for each in lines
        )


def as_json(written: bytes) -> bytes:
    """Return what was written if it is JSON, else a JSON string of it."""
    try:
        orjson.loads(written)
    except orjson.JSONDecodeError:
        return orjson.dumps(written.decode(errors="replace"))

    return written.strip()


def properties(exchange: Exchange) -> dict[str, str]:
    """Return headers with capitalised names, and each `name=value` of the custom attributes, as in
    the reference.
    """
    given = {name.title(): value for name, value in exchange.headers.items()}
    pairs = (part.partition("=") for part in exchange.headers.get(CUSTOM_ATTRIBUTES, "").split(";"))
    return given | {name.strip(): value.strip() for name, equals, value in pairs if equals}


def has_output_formatter(config: Config, message: Message[Any]) -> bool:
    """Whether the model's formatter writes the response. It does not if the request or a setting
    names a format.
    """
    code = config.user_code
    if code is None or code.output_formatter is None or config.model.output_formatter is not None:
        return False

    parameters = message.fields.get("parameters")  # of any type in a body of OpenAI's API
    named = parameters.get("output_formatter") if isinstance(parameters, dict) else None
    return not (
        named or ("inputs" not in message.fields and message.fields.get("output_formatter"))
    )
