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
        # Whether the API of the path takes user code. The API of the body may be OpenAI's.
        self._takes_user_code = False

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

        headers = properties(self._exchange)
        if content_type is not None:
            headers["Content-Type"] = content_type

        with nullcontext() if self._is_admitted else self._service.admitted():
            call = await self.ask(ReadInput(headers, body))
            try:
                return await call.chunk(), JSON
            except UserCodeFailed as error:
                raise MalformedRequest(f"the input formatter failed: {error}") from None

    def asked(self, api: AnyApi, message: Message[Any]) -> Message[Any]:
        """Return the message to parse. It asks for details if the model has an output formatter,
        which needs them.
        """
        config = self._service.config
        if config.model.dynamic_batch or not api.takes_user_code:
            return message

        if not has_output_formatter(config, message):
            return message

        parameters = message.fields.get("parameters") or {}
        if parameters.get("details") not in (None, False):
            return message

        with_details = parameters | {"details": True}
        return replace(message, fields=message.fields | {"parameters": with_details})

    def kept(self, message: Message[Any]) -> Message[Any]:
        """Return what `choose` needs of a message: no field where no code of the model's writes a
        response.
        """
        if self._takes_user_code and self._service.config.user_code:
            return message

        return replace(message, fields={})

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

        requests = tuple(replace(request, needs_log_probs=True) for request in parsed.requests)
        if isinstance(message.fields["inputs"], list):
            formatter: OutputFormatter = ListOutputFormatter(self, message, parsed)
        else:
            formatter = OutputFormatter(self, message, parsed)

        return formatter, replace(parsed, requests=requests)

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
        fields = dict(message.fields)
        fields.pop("inputs", None)

        first_request = self._parsed.requests[0]
        opening = Open(
            prompts=[request.prompt for request in self._parsed.requests],
            fields=fields,
            is_streaming=first_request.is_streaming,
            details=message.format.details,
            return_full_text=first_request.return_full_text,
        )
        await self._code.ask(opening)

    async def feed(self, delta: Delta) -> list[bytes]:
        return [await self._written(delta)]

    async def _written(self, delta: Delta) -> bytes:
        step = Feed(
            index=delta.index,
            tokens=delta.tokens,
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason,
            prompt_token_ids=list(delta.prompt_token_ids) if delta.num_prompt_tokens else None,
            prefill=delta.prefill,
        )
        call = await self._code.ask(step)
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
        if self.is_streaming:
            return self._lines_of_stream(delta)

        if self._num_open:
            return []

        values = b", ".join(map(as_json, self._unsent))
        return [b"[%b]\n" % values]

    def _lines_of_stream(self, delta: Delta) -> list[bytes]:
        if delta.is_followed or not any(self._unsent):
            return []

        outputs = [unsent.decode(errors="replace") for unsent in self._unsent]
        self._unsent = [b""] * len(self._unsent)
        return [orjson.dumps({"outputs": outputs}) + b"\n"]


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
        whole_records = []
        for record in self._formatter.feed(delta):
            whole_records.append(self._api.whole(self.media_type, record))

        rewritten_records = []
        for record in whole_records:
            lines = [await self._rewritten(line) for line in record.splitlines(keepends=True)]
            rewritten_records.append(b"".join(lines))

        return rewritten_records

    async def _rewritten(self, line: bytes) -> bytes:
        """Return the line with its object rewritten by the code. A line without an object stays as
        it is.
        """
        body = line.removeprefix(EVENT)
        if not body.startswith(b"{"):
            return line

        call = await self._code.ask(Respond(body))
        new_body = await call.chunk()
        if body == line:
            return new_body

        # Each line becomes the data of an event, unless it is an event already.
        events = []
        for new_line in new_body.splitlines():
            prefix = b"" if new_line.startswith(EVENT) else EVENT
            events.append(prefix + new_line + b"\n")

        return b"".join(events)


def as_json(output: bytes) -> bytes:
    """Return what the code wrote if it is JSON, else a JSON string of it."""
    try:
        orjson.loads(output)
    except orjson.JSONDecodeError:
        return orjson.dumps(output.decode(errors="replace"))

    return output.strip()


def properties(exchange: Exchange) -> dict[str, str]:
    """Return headers with capitalised names, and each `name=value` of the custom attributes, as in
    the reference.
    """
    fields = {name.title(): value for name, value in exchange.headers.items()}
    for attribute in exchange.headers.get(CUSTOM_ATTRIBUTES, "").split(";"):
        name, equals, value = attribute.partition("=")
        if equals:
            fields[name.strip()] = value.strip()

    return fields


def has_output_formatter(config: Config, message: Message[Any]) -> bool:
    """Whether the model's formatter writes the response. It does not if the request or a setting
    names a format.
    """
    code = config.user_code
    if code is None or code.output_formatter is None or config.model.output_formatter is not None:
        return False

    # In a body of OpenAI's API they may have any type.
    parameters = message.fields.get("parameters")
    if isinstance(parameters, dict) and parameters.get("output_formatter"):
        return False

    return "inputs" in message.fields or not message.fields.get("output_formatter")
