"""Answers to chats, whole or streamed.

A stream sends the role first, then the text, and the finish reason in a delta of its own. Every
delta has a content, as in vLLM, because clients read it from each: it is empty where there is no
new text. In an answer that has calls and no text it is null instead, as at OpenAI, since some
clients would make a text of an empty one.

Sources: OpenAI's API reference, and the fields that its client reads. `reasoning_content` is
DeepSeek's name of thoughts, `reasoning` that of vLLM since 0.16.
"""

import uuid
from collections import Counter
from collections.abc import Iterable
from typing import Any

from orjson import dumps

from lmi.apis.base.body import Parsed
from lmi.apis.base.formatters import text_of
from lmi.apis.openai.answer_format import OpenAIFormat
from lmi.apis.openai.base_formatter import OpenAILines, OpenAIStream, OpenAIWhole
from lmi.apis.openai.log_probs import log_prob_fields
from lmi.apis.openai.parts.answer_parts import AnswerParts
from lmi.apis.openai.parts.buffer import AnswerPart, Arguments, Text, Thought, ToolCall
from lmi.types import Delta


class ChatWhole(OpenAIWhole):
    """Writes the answer to a chat as one object."""

    kind = "chat.completion"
    id_prefix = "chatcmpl-"

    def _choice(self, number: int, whole: Delta) -> dict[str, Any]:
        assert whole.finish_reason is not None
        answer_parts = AnswerParts.of(self._format, whole.prompt)
        parts = answer_parts.feed(text_of(whole.tokens), whole.finish_reason)
        is_silent = self._format.is_forced or answer_parts.has_lost_markup
        message = whole_message(parts, is_silent=is_silent)

        log_probs = None
        if self._format.has_log_probs:
            log_probs = log_prob_fields(self._shown(whole), self._format)

        return {
            "index": number,
            "message": message,
            "logprobs": log_probs,
            "finish_reason": self._reason(whole.finish_reason, "tool_calls" in message),
            **self._ids(whole),
        }

    def _object(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return super()._object(choices) | self._prompt_fields(self._last_by_index[0])


class ChatStream(OpenAIStream):
    """Writes the answer to a chat as server-sent events."""

    kind = "chat.completion.chunk"
    id_prefix = "chatcmpl-"

    def __init__(self, parsed: Parsed[OpenAIFormat]) -> None:
        super().__init__(parsed)
        # Of each choice, by index.
        self._parts_by_index: dict[int, AnswerParts] = {}
        self._num_calls_by_index = Counter[int]()
        self._indexes_with_text: set[int] = set()

    def _choices(self, delta: Delta) -> list[dict[str, Any]]:
        index = delta.index
        end = delta.finish_reason
        is_first = index not in self._parts_by_index
        if is_first:
            self._parts_by_index[index] = AnswerParts.of(self._format, delta.prompt)

        parts = self._parts_by_index[index].feed(text_of(delta.tokens), end)
        choices = [choice(index, self._fields(index, part)) for part in parts]
        empty = self._empty_content(index, parts)
        tokens = self._shown(delta) if self._format.has_log_probs else []

        # A text may be held back, since a call may begin in it. The log-probs and ids of its tokens
        # are sent all the same.
        if not choices and end is None and (tokens or self._format.has_token_ids):
            choices.append(choice(index, {"content": empty}))

        if end is not None:
            reason = self._reason(end, self._num_calls_by_index[index] > 0)
            choices.append(choice(index, {"content": empty}, reason))

        if tokens:
            choices[0]["logprobs"] = log_prob_fields(tokens, self._format)

        if self._format.has_token_ids:
            choices[0] |= self._ids(delta)

        if is_first:
            fields = {"role": "assistant", "content": empty, **self._prompt_ids(delta)}
            choices.insert(0, choice(index, fields))

        return choices

    def _empty_content(self, index: int, parts: Iterable[AnswerPart]) -> str | None:
        """Return the content of a delta without text: null while the answer may consist of calls
        alone.
        """
        if any(isinstance(part, Text) for part in parts):
            self._indexes_with_text.add(index)

        may_call = self._format.is_forced or self._format.tool_calls is not None
        if may_call and index not in self._indexes_with_text:
            return None

        return ""

    def _fields(self, index: int, part: AnswerPart) -> dict[str, Any]:
        """Return what a part adds to the message of a choice."""
        if isinstance(part, Text):
            return {"content": part.text}

        if isinstance(part, Thought):
            return _thought(part.text)

        if isinstance(part, ToolCall):
            self._num_calls_by_index[index] += 1
            call = new_call(part.name)
        else:
            call = {"function": {"arguments": part.text}}

        number = self._num_calls_by_index[index] - 1
        return {"tool_calls": [{"index": number, **call}]}

    def _chunk(self, choice: dict[str, Any], beside: bytes = b"") -> bytes:
        """Return the record of a choice. The prompt's ids stand beside the choices, as in vLLM."""
        prompt_ids = choice["delta"].pop("prompt_token_ids", None)
        if prompt_ids is not None:
            beside = b',"prompt_token_ids":' + dumps(prompt_ids)

        return super()._chunk(choice, beside)


class ChatLines(OpenAILines, ChatStream):
    """Writes the answer to a chat as lines."""


def choice(index: int, fields: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
    """Return a choice of a chunk, which adds `fields` to its message."""
    return {"index": index, "delta": fields, "logprobs": None, "finish_reason": finish_reason}


def whole_message(parts: Iterable[AnswerPart], *, is_silent: bool = False) -> dict[str, Any]:
    """Return the message of a whole answer. Its content is null where it has no text, but calls or
    thoughts, or where it `is_silent`: it was cut before the call that it should be.
    """
    text = ""
    thoughts = ""
    calls: list[dict[str, Any]] = []
    for part in parts:
        if isinstance(part, ToolCall):
            calls.append(new_call(part.name))
        elif isinstance(part, Arguments):
            calls[-1]["function"]["arguments"] += part.text
        elif isinstance(part, Thought):
            thoughts += part.text
        else:
            text += part.text

    content: str | None = text
    if not text and (calls or thoughts or is_silent):
        content = None

    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if thoughts:
        message |= _thought(thoughts)

    if calls:
        message["tool_calls"] = calls

    return message


def _thought(text: str) -> dict[str, str]:
    """Return a text of thoughts under both names by which clients know it."""
    return {"reasoning": text, "reasoning_content": text}


def new_call(name: str) -> dict[str, Any]:
    """Return a call of a function, whose arguments follow."""
    function = {"name": name, "arguments": ""}
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}
