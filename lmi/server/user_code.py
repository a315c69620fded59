"""User code around a request: the properties that it gets from HTTP, and the formatters of the model.

The code runs in another process (`lmi/user_code/worker.py`). A Delta is sent there only if the model has an output
formatter and the request names no other format.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from lmi.apis.base.api import AnyApi
from lmi.apis.base.formatter import AsyncFormatter
from lmi.apis.base.readers import Message, Parsed
from lmi.errors import MalformedRequest, UserCodeFailed
from lmi.http.exchange import CUSTOM_ATTRIBUTES, Exchange
from lmi.server.service import Service
from lmi.settings.config import Config
from lmi.user_code.client import Call
from lmi.user_code.formatter import JSON, ListOutputFormatter, OutputFormatter, ResponseFormatter
from lmi.user_code.messages import ReadInput


def properties(exchange: Exchange) -> dict[str, str]:
    """Return headers with capitalised names, and each `name=value` of the custom attributes, as in the reference."""
    given = {name.title(): value for name, value in exchange.headers.items()}
    pairs = (part.partition("=") for part in exchange.headers.get(CUSTOM_ATTRIBUTES, "").split(";"))
    return given | {name.strip(): value.strip() for name, equals, value in pairs if equals}


class UserFormatters:
    """The model's input and output formatter around one request, if it has any. Always `close` it.

    Both run in one call, so that the output formatter finds the object that the input formatter made.
    """

    def __init__(self, exchange: Exchange, service: Service, *, is_admitted: bool = False) -> None:
        """With `is_admitted` the caller holds a place in the queue for the request."""
        self._exchange = exchange
        self._service = service
        self._is_admitted = is_admitted
        self._call: Call | None = None
        self._takes_user_code = False  # whether the API of the path does; the body's may be OpenAI's

    def reads(self, api: AnyApi) -> bool:
        """Whether the input formatter gets the bodies of this API."""
        code = self._service.config.user_code
        return code is not None and code.has_input_formatter and api.takes_user_code

    async def read(self, api: AnyApi, body: bytes, content_type: str | None) -> tuple[bytes, str | None]:
        """Return the body and its content type, after the input formatter if there is one.

        Raises MalformedRequest with the message of an exception in the formatter.
        """
        self._takes_user_code = api.takes_user_code
        if not self.reads(api):
            return body, content_type
        named = {} if content_type is None else {"Content-Type": content_type}
        return await self._read_input(body, properties(self._exchange) | named), JSON

    async def _read_input(self, body: bytes, given: dict[str, str]) -> bytes:
        service = self._service
        assert service.user_code is not None
        with nullcontext() if self._is_admitted else service.front_end.admitted():
            self._call = await service.user_code.begin(lambda call_id: ReadInput(call_id, given, body))
            try:
                return await self._call.chunk()
            except UserCodeFailed as error:
                raise MalformedRequest(f"the input formatter failed: {error}") from None

    def asked(self, api: AnyApi, message: Message[Any]) -> Message[Any]:
        """Return the message to parse. It asks for details if the model has an output formatter, which needs them."""
        config = self._service.config
        if config.model.dynamic_batch or not api.takes_user_code or not has_output_formatter(config, message):
            return message
        parameters = message.fields.get("parameters") or {}
        if parameters.get("details") not in (None, False):
            return message
        return replace(message, fields=message.fields | {"parameters": parameters | {"details": True}})

    def choose(self, api: AnyApi, message: Message[Any], parsed: Parsed[Any]) -> tuple[AsyncFormatter, Parsed[Any]]:
        """Return the response's formatter, and the requests that it needs. `message` is as the client sent it."""
        workers = self._service.user_code
        if workers is None or not self._takes_user_code or not has_output_formatter(self._service.config, message):
            self.close()
            return api.formatter(parsed), parsed
        if not api.takes_user_code:
            return ResponseFormatter(workers, self._call, api, parsed), parsed
        kind = ListOutputFormatter if isinstance(message.fields["inputs"], list) else OutputFormatter
        requests = tuple(replace(request, needs_log_probs=True) for request in parsed.requests)
        return kind(workers, self._call, message, parsed), replace(parsed, requests=requests)

    def close(self) -> None:
        if self._call is not None:
            self._call.close()


def has_output_formatter(config: Config, message: Message[Any]) -> bool:
    """Whether the model's formatter writes the response. It does not if the request or a setting names a format."""
    code = config.user_code
    if code is None or not code.has_output_formatter or config.model.output_formatter is not None:
        return False
    parameters = message.fields.get("parameters")  # of any type in a body of OpenAI's API
    named = parameters.get("output_formatter") if isinstance(parameters, dict) else None
    return not (named or ("inputs" not in message.fields and message.fields.get("output_formatter")))
