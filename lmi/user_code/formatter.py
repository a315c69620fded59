"""Formatters that ask the process of user code to write their records. `FormatterHooks` chooses one
in place of that of the API, where the model's code has an output formatter.
"""

from typing import Any

import orjson

from lmi.apis.base.api import AnyApi
from lmi.apis.base.body import Message, Parsed
from lmi.apis.base.formatters import AsyncFormatter
from lmi.apis.base.media_types import JSON, JSONLINES
from lmi.apis.lmi.schema import name_of_several
from lmi.errors import Unsupported
from lmi.types import Delta
from lmi.user_code.calls import Feed, Open, Respond, SharedCall

EVENT = b"data: "
# Code whose text begins with one of these has written server-sent events.
EVENT_FIELDS = (b"data:", b"event:")


class UserCodeFormatter(AsyncFormatter):
    """Writes a response with the model's own code. Its messages belong to one call, in which the
    input formatter ran before, if there is one.
    """

    is_verbatim = True

    def __init__(self, call: SharedCall) -> None:
        self._call = call

    def close(self) -> None:
        self._call.close()


class OutputFormatter(UserCodeFormatter):
    """Writes the response to one prompt: what the code writes for each Delta, as it is."""

    # Until the first answer of the code names one.
    media_type = ""

    def __init__(self, call: SharedCall, message: Message[Any], parsed: Parsed[Any]) -> None:
        if parsed.requests[0].num_sequences > 1:
            name = name_of_several(message.fields["parameters"])
            raise Unsupported(name, "the model's own output formatter writes one sequence")

        super().__init__(call)
        self.is_streaming = parsed.requests[0].is_streaming
        self._message = message
        self._requests = parsed.requests
        # Whether the head of the response has come.
        self._has_head = False

    async def begin(self) -> None:
        """Tell the code about the request. It answers with the head, which comes with the first
        record.
        """
        fields = dict(self._message.fields)
        fields.pop("inputs", None)

        opening = Open(
            prompts=[request.prompt for request in self._requests],
            fields=fields,
            is_streaming=self.is_streaming,
            details=self._message.format.details,
            return_full_text=self._requests[0].return_full_text,
            adapter=self._call.adapter,
        )
        await self._call.send(opening)

    async def feed(self, delta: Delta) -> list[bytes]:
        return [await self._write(delta)]

    async def _write(self, delta: Delta) -> bytes:
        """Return what the code writes for a Delta."""
        step = Feed(
            index=delta.index,
            tokens=delta.tokens,
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason,
            prompt_token_ids=list(delta.prompt_token_ids) if delta.num_prompt_tokens else None,
            prefill=delta.prefill,
        )
        call = await self._call.send(step)
        if not self._has_head:
            head = await call.head()
            self._has_head = True
            self.media_type = self.media_type or head.media_type

        return await call.chunk()


class ListOutputFormatter(OutputFormatter):
    """Writes the response to a list of prompts: a JSON list of what the code writes for each, a
    JSON value or a string.

    A stream has lines like `{"outputs": ["what was written", ""]}`.
    """

    def __init__(self, call: SharedCall, message: Message[Any], parsed: Parsed[Any]) -> None:
        super().__init__(call, message, parsed)
        self.media_type = JSONLINES if self.is_streaming else JSON
        # What was written for each prompt and is not sent.
        self._unsent = [b""] * len(parsed.requests)
        # The number of prompts whose answers have not ended.
        self._num_running = len(parsed.requests)

    async def feed(self, delta: Delta) -> list[bytes]:
        self._unsent[delta.index] += await self._write(delta)
        if delta.finish_reason is not None:
            self._num_running -= 1

        if self.is_streaming:
            # What comes at once stands in one line.
            return [] if delta.is_followed else self._take_line()

        if self._num_running:
            return []

        values = b", ".join(map(as_json, self._unsent))
        return [b"[%b]\n" % values]

    def _take_line(self) -> list[bytes]:
        """Return a line with what is not sent, or none if that is nothing."""
        if not any(self._unsent):
            return []

        outputs = [unsent.decode(errors="replace") for unsent in self._unsent]
        self._unsent = [b""] * len(self._unsent)
        return [orjson.dumps({"outputs": outputs}) + b"\n"]


class RewritingFormatter(UserCodeFormatter):
    """Writes the response of an OpenAI API. The code rewrites each of its objects."""

    def __init__(self, call: SharedCall, api: AnyApi, parsed: Parsed[Any]) -> None:
        super().__init__(call)
        self._formatter = api.formatter(parsed)
        self._api = api
        self.media_type = self._formatter.media_type
        self.is_streaming = self._formatter.is_streaming

    async def feed(self, delta: Delta) -> list[bytes]:
        records = []
        for record in self._formatter.feed(delta):
            whole_record = self._api.whole(self.media_type, record)
            lines = whole_record.splitlines(keepends=True)
            records.append(b"".join([await self._rewrite(line) for line in lines]))

        return records

    async def _rewrite(self, line: bytes) -> bytes:
        """Return the line with its object rewritten by the code. A line without an object stays as
        it is.
        """
        body = line.removeprefix(EVENT)
        if not body.startswith(b"{"):
            return line

        call = await self._call.send(Respond(body, self._call.adapter))
        new_body = await call.chunk()
        return new_body if body == line else as_event(new_body)


def as_event(output: bytes) -> bytes:
    """Return what the code wrote as the lines of an event, without the blank line that ends it.

    Each line becomes a line of the event's data, unless the code wrote events: these stay as they
    are.
    """
    if output.lstrip().startswith(EVENT_FIELDS):
        return output.strip() + b"\n"

    return b"".join([EVENT + line + b"\n" for line in output.splitlines()])


def as_json(output: bytes) -> bytes:
    """Return what the code wrote if it is JSON, else a JSON string of it."""
    try:
        orjson.loads(output)
    except orjson.JSONDecodeError:
        return orjson.dumps(output.decode(errors="replace"))

    return output.strip()
