"""Answers of Anthropic's Messages: blocks of thoughts, text and calls, whole or as events; and its rows.

    {"id": "msg_…", "type": "message", "role": "assistant", "model": "m", "content": [{"type": "text", "text": "Hi"}],
     "stop_reason": "end_turn", "stop_sequence": null, "usage": {"input_tokens": 4, …}}

A stream begins with the message without blocks, opens, continues and closes one block after the other, and tells the
end and the usage last. A block of thoughts has an empty signature, because nobody here checks one.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

from orjson import dumps

from lmi.apis.anthropic import schema
from lmi.apis.base.api import Api, ErrorRules, Forms, Row
from lmi.apis.base.formatter import JSON, SSE, ErrorFields, named_event, text_of
from lmi.apis.base.readers import Parsed
from lmi.apis.openai import chat_schema
from lmi.apis.openai.calls.reader import AnswerPart, Arguments, Text, Thought, ToolCall
from lmi.apis.openai.formatter import OpenAIFormatter
from lmi.apis.openai.parts import AnswerParts
from lmi.apis.openai.schema import OpenAIFormat, default_format
from lmi.errors import GenerationFailed, Overloaded, PromptTooLong, UnknownAdapter, UnknownModel
from lmi.types import AnswerEnd, Delta

ENDS = {
    AnswerEnd.LENGTH: "max_tokens",
    AnswerEnd.EOS_TOKEN: "end_turn",
    AnswerEnd.STOP_SEQUENCE: "stop_sequence",
}
BLOCK_TYPES = {Text: "text", Thought: "thinking", ToolCall: "tool_use", Arguments: "tool_use"}


class MessageFormatter(OpenAIFormatter):
    """Writes what whole messages and streams share."""

    kind = "message"
    id_prefix = "msg_"

    def _usage(self) -> dict[str, Any]:
        """Return the numbers of tokens. Those of the prompt that were cached count apart."""
        return {
            "input_tokens": self._num_prompt_tokens - self._num_cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": self._num_cached_tokens,
            "output_tokens": self._num_tokens,
        }

    def _message(self, content: list[dict[str, Any]], end: dict[str, Any]) -> dict[str, Any]:
        head = {"id": self._id, "type": self.kind, "role": "assistant", "model": self._format.model}
        return head | {"content": content} | end | {"usage": self._usage()}

    @classmethod
    def error(cls, error: ErrorFields) -> bytes:
        return dumps({"type": "error", **_error(error)})


class MessageWhole(MessageFormatter):
    """The answer as one object."""

    media_type = JSON
    is_streaming = False

    def __init__(self, parsed: Parsed[OpenAIFormat]) -> None:
        super().__init__(parsed)
        self._texts: list[str] = []

    def feed(self, delta: Delta) -> list[bytes]:
        self._count(delta)
        self._texts.append(text_of(delta.tokens))
        if delta.finish_reason is None:
            return []
        content = _content(AnswerParts(self._format, delta.prompt).feed("".join(self._texts), is_last=True))
        has_calls = any(block["type"] == "tool_use" for block in content)
        return [dumps(self._message(content, _end(delta, has_calls)))]


class MessageStream(MessageFormatter):
    """The answer as events."""

    media_type = SSE
    is_streaming = True

    def __init__(self, parsed: Parsed[OpenAIFormat]) -> None:
        super().__init__(parsed)
        self._parts: AnswerParts | None = None
        self._index = -1  # of the last block
        self._open = ""  # the type of the open block
        self._has_calls = False

    def feed(self, delta: Delta) -> list[bytes]:
        self._count(delta)
        records: list[bytes] = []
        if self._parts is None:
            self._parts = AnswerParts(self._format, delta.prompt)
            message = self._message([], {"stop_reason": None, "stop_sequence": None})
            records += [event("message_start", message=message), event("ping")]
        for part in self._parts.feed(text_of(delta.tokens), delta.finish_reason is not None):
            records += self._events(part)
        if delta.finish_reason is not None:
            end = _end(delta, self._has_calls)
            records += [*self._close(), event("message_delta", delta=end, usage=self._usage()), event("message_stop")]
        return records

    def _events(self, part: AnswerPart) -> list[bytes]:
        kind, records = BLOCK_TYPES[type(part)], list[bytes]()
        if isinstance(part, ToolCall) or kind != self._open:
            records = self._close()
            self._index += 1
            self._open = kind
            records.append(event("content_block_start", index=self._index, content_block=_block(part)))
        if isinstance(part, ToolCall):
            self._has_calls = True
            return records
        return [*records, event("content_block_delta", index=self._index, delta=_delta(part))]

    def _close(self) -> list[bytes]:
        is_open, self._open = bool(self._open), ""
        return [event("content_block_stop", index=self._index)] if is_open else []

    @classmethod
    def error(cls, error: ErrorFields) -> bytes:
        return event("error", **_error(error))


def event(kind: str, **fields: object) -> bytes:
    return named_event(kind, {"type": kind, **fields})


def _error(error: ErrorFields) -> dict[str, Any]:
    return {"error": {"type": error.kind, "message": error.message}, "request_id": error.request_id}


def _block(part: AnswerPart) -> dict[str, Any]:
    """Return the block that a part begins, without its text."""
    if isinstance(part, ToolCall):
        return {"type": "tool_use", "id": f"toolu_{uuid.uuid4().hex[:24]}", "name": part.name, "input": {}}
    if isinstance(part, Thought):
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "text", "text": ""}


def _delta(part: Thought | Text | Arguments) -> dict[str, str]:
    if isinstance(part, Arguments):
        return {"type": "input_json_delta", "partial_json": part.text}
    kind = BLOCK_TYPES[type(part)]
    return {"type": f"{kind}_delta", kind: part.text}


def _content(parts: Iterable[AnswerPart]) -> list[dict[str, Any]]:
    """Return the blocks of a whole answer. A call whose arguments are cut, or are no object, is shown as their text."""
    blocks: list[dict[str, Any]] = []
    for part in parts:
        kind = BLOCK_TYPES[type(part)]
        if isinstance(part, Arguments):
            value = chat_schema.parsed_arguments(part.text)
            is_object = isinstance(value, dict)
            blocks[-1] = blocks[-1] | {"input": value} if is_object else {"type": "text", "text": part.text}
            continue
        if isinstance(part, ToolCall) or not blocks or blocks[-1]["type"] != kind:
            blocks.append(_block(part))
        if not isinstance(part, ToolCall):
            blocks[-1][kind] += part.text
    return blocks


def _end(delta: Delta, has_calls: bool) -> dict[str, Any]:
    """Return the reason of the end, and the stop string that was found."""
    assert delta.finish_reason is not None
    is_called = has_calls and delta.finish_reason is AnswerEnd.EOS_TOKEN
    reason = "tool_use" if is_called else ENDS[delta.finish_reason]
    return {"stop_reason": reason, "stop_sequence": delta.stop_reason if isinstance(delta.stop_reason, str) else None}


KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}
TOO_LONG = "prompt is too long: "  # by which agents know that they must shorten a conversation
FORMS = Forms(MessageWhole, MessageStream)
ANTHROPIC: Api[OpenAIFormat] = Api(
    name="anthropic",
    paths=("/v1/messages",),
    default_format=default_format,
    read=chat_schema.read,
    parse=schema.parse,
    formatter=FORMS.formatter,
    errors=ErrorRules(
        FORMS.write_error,
        (
            Row(UnknownModel, 404),
            Row(UnknownAdapter, 404),
            Row(PromptTooLong, 400, opening=TOO_LONG),
            Row(Overloaded, 529),  # its clients know this status, and come back after Retry-After
            Row(GenerationFailed, 500),
        ),
        schema.MESSAGES.wire_names(),
        lambda status: KINDS.get(status, "invalid_request_error" if status < 500 else "api_error"),
    ),
)
COUNT_TOKENS = replace(ANTHROPIC, name="anthropic_count", parse=partial(schema.parse, is_counted=True), paths=())
