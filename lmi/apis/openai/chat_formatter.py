"""Answers to chats: OpenAI's, and the blocks of which other APIs make theirs.

A stream of a chat sends the role first, then the text, then the finish reason in a separate delta,
whose content is empty as in vLLM, because clients read it from every delta. Where an answer has
calls and no text it is null in all of them, as at OpenAI: some clients make a text of an empty one.
Sources: OpenAI's API reference; the fields that its client reads; `reasoning_content` is DeepSeek's
name of thoughts, `reasoning` that of vLLM since 0.16.
"""

import uuid
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from orjson import dumps

from lmi.apis.base.api import SSE, one_line, text_of, waiting_fields
from lmi.apis.base.readers import Parsed
from lmi.apis.openai.answer_format import OpenAIFormat
from lmi.apis.openai.formatter import (
    OpenAIFormatter,
    OpenAILines,
    OpenAIStream,
    OpenAIWhole,
    log_prob_fields,
)
from lmi.apis.openai.parts.answer_parts import AnswerParts
from lmi.apis.openai.parts.buffer import AnswerPart, Arguments, Text, Thought, ToolCall
from lmi.types import AnswerEnd, Delta, WaitStatus


class ChatWhole(OpenAIWhole):
    """Writes the answer to a chat as one object."""

    kind = "chat.completion"
    id_prefix = "chatcmpl-"

    def _choice(self, number: int, whole: Delta) -> dict[str, Any]:
        assert whole.finish_reason is not None
        reading = AnswerParts.of(self._format, whole.prompt)
        parts = reading.feed(text_of(whole.tokens), whole.finish_reason)
        is_silent = self._format.is_forced or reading.has_lost_markup
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
        return super()._object(choices) | self._of_prompt(self._last_by_index[0])


class ChatStream(OpenAIStream):
    """Writes the answer to a chat as server-sent events."""

    kind = "chat.completion.chunk"
    id_prefix = "chatcmpl-"

    def __init__(self, parsed: Parsed[OpenAIFormat]) -> None:
        super().__init__(parsed)
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

        # The text may be held back, but what belongs to its tokens is not.
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
        """Return the content of a delta that has no text: null while the answer may be
        calls alone.
        """
        if any(isinstance(part, Text) for part in parts):
            self._indexes_with_text.add(index)

        may_call = self._format.is_forced or self._format.tool_calls is not None
        return None if may_call and index not in self._indexes_with_text else ""

    def _fields(self, index: int, part: AnswerPart) -> dict[str, Any]:
        if isinstance(part, Text):
            return {"content": part.text}

        if isinstance(part, Thought):
            return _thought(part.text)

        if isinstance(part, ToolCall):
            self._num_calls_by_index[index] += 1
            call = new_call(part.name)
        else:
            call = {"function": {"arguments": part.text}}

        return {"tool_calls": [{"index": self._num_calls_by_index[index] - 1, **call}]}

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
    """Return the message of a whole answer.

    Without text its content is null if there are calls or thoughts, or if the answer `is_silent`:
    cut before its call.
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


class BlockStream(OpenAIFormatter):
    """Writes the events. A whole answer is made as a stream is, without them."""

    media_type = SSE
    is_streaming = True
    begins_early = True
    block_types: ClassVar[Mapping[type[AnswerPart], str]]

    def __init__(self, parsed: Parsed[OpenAIFormat]) -> None:
        super().__init__(parsed)
        self._parts: AnswerParts | None = None
        self._has_begun = False
        # The status before the first Delta.
        self._status = WaitStatus()
        # The block that is open, and its texts.
        self._block: dict[str, Any] = {}
        self._texts: list[str] = []

    def feed(self, delta: Delta) -> list[bytes]:
        self._count(delta)
        records: list[bytes] = []
        if self._parts is None:
            self._parts = AnswerParts.of(self._format, delta.prompt)
            records += self._begin_once()

        for part in self._parts.feed(text_of(delta.tokens), delta.finish_reason):
            is_other_kind = self._block.get("type") != self.block_types[type(part)]
            if isinstance(part, ToolCall) or is_other_kind:
                records += [*self._close(), *self._open(part)]
                self._texts = []

            if not isinstance(part, ToolCall):
                self._texts.append(part.text)
                records.append(self._grow(part))

        if delta.finish_reason is None:
            return records if self.is_streaming else []

        ending, whole = self._end(delta, delta.finish_reason)
        return [*records, *ending] if self.is_streaming else [dumps(whole)]

    def waiting(self, status: WaitStatus, waited_s: float) -> list[bytes]:
        self._status = status
        beginning = self._begin_once()
        return [*beginning, self._wait(waiting_fields(status, waited_s))]

    def _begin_once(self) -> list[bytes]:
        if self._has_begun:
            return []

        self._has_begun = True
        return self._begin()

    def _event(self, kind: str, **fields: Any) -> bytes:
        return named_event(kind, {"type": kind, **fields}) if self.is_streaming else b""

    @abstractmethod
    def _begin(self) -> list[bytes]:
        """Return the events of an answer without blocks."""

    @abstractmethod
    def _wait(self, fields: dict[str, Any]) -> bytes:
        """Return the event that clients take for progress, with further `fields`, while there is no
        token.
        """

    @abstractmethod
    def _open(self, part: AnswerPart) -> list[bytes]: ...

    @abstractmethod
    def _grow(self, part: Text | Thought | Arguments) -> bytes: ...

    @abstractmethod
    def _close(self) -> list[bytes]:
        """End the block that is open, if there is one."""

    @abstractmethod
    def _end(self, delta: Delta, reason: AnswerEnd) -> tuple[list[bytes], dict[str, Any]]:
        """Return the last events, and the whole answer."""


def named_event(name: str, fields: Mapping[str, object]) -> bytes:
    """Return a server-sent event with a name."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), one_line(dumps(fields)))
