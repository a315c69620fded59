"""User code around a request of an engine: the model's input formatter reads the body, and its
output formatter writes the answer.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from lmi.adapters.files import HEADER, QUERY, SCRIPT
from lmi.adapters.registry import AdapterRegistry
from lmi.apis.base.api import AnyApi
from lmi.apis.base.body import BodyOutline, Message, Parsed
from lmi.apis.base.formatters import AsyncFormatter
from lmi.apis.base.media_types import JSON
from lmi.errors import MalformedRequest, UserCodeFailed
from lmi.http.exchange import Exchange
from lmi.server.hooks import Content, RequestHooks
from lmi.settings.config import Config
from lmi.user_code.calls import AdapterCode, ReadInput, SharedCall, UserCodeWorkers
from lmi.user_code.formatter import ListOutputFormatter, OutputFormatter, RewritingFormatter
from lmi.user_code.properties import properties_of


class FormatterHooks(RequestHooks):
    """The formatters of a model's file, around a request to a path whose API takes user code.

    Both formatters run in one call, so that the second finds the object that the first made.
    """

    def __init__(
        self,
        exchange: Exchange,
        config: Config,
        workers: UserCodeWorkers,
        admit: Callable[[], AbstractContextManager[None]],
        adapters: AdapterRegistry | None = None,
    ) -> None:
        """`admit` holds a place in the queue while the input formatter runs. `adapters` may have
        code of their own.
        """
        assert config.user_code is not None
        self._exchange = exchange
        self._model = config.model
        self._admit = admit
        self._workers = workers
        self._adapters = adapters if config.user_code.runs_adapters else None
        self._call = SharedCall(workers)
        self._writes = config.user_code.output_formatter is not None
        self.changes_bodies = config.user_code.input_formatter is not None

    async def change_body(self, body: bytes, content_type: str | None) -> Content:
        """Return the body that the input formatter makes. Raises MalformedRequest for an exception
        in it.
        """
        if self._adapters is not None:
            await self._choose_code(self._adapters, body)

        if not self.changes_bodies:
            return Content(body, content_type)

        properties = properties_of(self._exchange)
        if content_type is not None:
            properties["Content-Type"] = content_type

        with self._admit():
            call = await self._call.send(ReadInput(properties, body, self._call.adapter))
            try:
                return Content(await call.chunk(), JSON)
            except UserCodeFailed as error:
                raise MalformedRequest(f"the input formatter failed: {error}") from None

    async def _choose_code(self, adapters: AdapterRegistry, body: bytes) -> None:
        """Let the formatters of the request's adapter act, where it has any of its own. Raises
        UserCodeFailed if its code cannot be imported.
        """
        entry = None
        for name in self._names_of_adapter(body):
            entry = entry or adapters.folder.read(name)

        if entry is None:
            return

        adapter = AdapterCode.of(entry.name, Path(entry.path, SCRIPT))
        if adapter is None:
            return

        kinds = await self._workers.formatters_of(adapter)
        self._call.adapter = adapter
        self._writes = self._writes or "output_formatter" in kinds
        self.changes_bodies = self.changes_bodies or "input_formatter" in kinds

    def _names_of_adapter(self, body: bytes) -> Iterator[str]:
        """Yield the names that may be that of the request's adapter, the first one that counts
        first. Of a list the first name counts.
        """
        headers = self._exchange.headers
        fields = BodyOutline.of(body) or BodyOutline()
        names: list[object] = [headers.get(HEADER), self._exchange.query.get(QUERY)]
        for value in (fields.value("adapters"), fields.value("model")):
            is_list = isinstance(value, list) and value
            names.append(value[0] if is_list else value)  # type: ignore[index]

        for name in names:
            if name and isinstance(name, str):
                yield name

    def change_message(self, api: AnyApi, message: Message[Any]) -> Message[Any]:
        """Ask for details, if the output formatter will write the answer: it needs them."""
        if self._model.dynamic_batch or not api.takes_user_code:
            return message

        if not self._writes_answer(message):
            return message

        parameters = message.fields.get("parameters") or {}
        if parameters.get("details") not in (None, False):
            return message

        with_details = parameters | {"details": True}
        return replace(message, fields=message.fields | {"parameters": with_details})

    def message_to_keep(self, message: Message[Any]) -> Message[Any]:
        """Return the whole message, which the output formatter gets."""
        return message

    def change_requests(
        self, api: AnyApi, message: Message[Any], parsed: Parsed[Any]
    ) -> Parsed[Any]:
        """Ask for log-probs, if the output formatter will be given tokens, which have them."""
        if not api.takes_user_code or not self._writes_answer(message):
            return parsed

        requests = tuple(replace(request, needs_log_probs=True) for request in parsed.requests)
        return replace(parsed, requests=requests)

    def formatter(
        self, api: AnyApi, message: Message[Any], parsed: Parsed[Any], for_answer: Parsed[Any]
    ) -> AsyncFormatter:
        if not self._writes_answer(message):
            # The code has done its part, and its process need not hold the call.
            self.close()
            return api.formatter(for_answer)

        if not api.takes_user_code:
            return RewritingFormatter(self._call, api, for_answer)

        if isinstance(message.fields["inputs"], list):
            return ListOutputFormatter(self._call, message, parsed)

        return OutputFormatter(self._call, message, parsed)

    def close(self) -> None:
        self._call.close()

    def _writes_answer(self, message: Message[Any]) -> bool:
        """Whether the model's output formatter writes the answer. It does not if the request or a
        setting names a format.
        """
        if not self._writes or self._model.output_formatter is not None:
            return False

        # In a body of OpenAI's API they may have any type.
        parameters = message.fields.get("parameters")
        if isinstance(parameters, dict) and parameters.get("output_formatter"):
            return False

        return "inputs" in message.fields or not message.fields.get("output_formatter")
