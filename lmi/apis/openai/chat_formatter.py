"""Answers of chat completions, with fields for content, thoughts and calls.

    {"id": "chatcmpl-…", "object": "chat.completion", …, "choices": [{"index": 0, "message": {"role": "assistant",
     "content": "Hi", "refusal": null}, "logprobs": null, "finish_reason": "stop"}], "usage": {…}}

A stream sends the role first, then the text, then the finish reason in a separate delta, whose content is empty as in
vLLM, because clients read it from every delta. Source: OpenAI's API reference; `reasoning_content` is DeepSeek's.
"""

from __future__ import annotations

import uuid
from typing import Any

from orjson import dumps

from lmi.apis.base.formatter import text_of
from lmi.apis.base.readers import Parsed
from lmi.apis.openai.calls.reader import AnswerPart, Arguments, Text, Thought
from lmi.apis.openai.formatter import REASONS, OpenAILines, OpenAIStream, OpenAIWhole, log_prob, name_of, shown_tokens
from lmi.apis.openai.parts import AnswerParts
from lmi.apis.openai.schema import OpenAIFormat
from lmi.types import Answer, AnswerEnd, Delta, Token


class MessageSplitter:
    """Splits one sequence's text into the fields of deltas."""

    def __init__(self, format: OpenAIFormat, prompt: str) -> None:
        self._parts = AnswerParts(format, prompt)
        self._num_told = 0  # calls

    def feed(self, text: str, is_last: bool) -> list[dict[str, Any]]:
        """Return the fields of the next deltas, one dict for each."""
        return [self._fields(part) for part in self._parts.feed(text, is_last)]

    def _fields(self, part: AnswerPart) -> dict[str, Any]:
        if isinstance(part, Thought):
            return {"reasoning_content": part.text}
        if isinstance(part, Text):
            return {"content": part.text}
        if isinstance(part, Arguments):
            return {"tool_calls": [{"index": self._num_told - 1, "function": {"arguments": part.text}}]}
        self._num_told += 1
        call_id, function = f"call_{uuid.uuid4().hex[:24]}", {"name": part.name, "arguments": ""}
        call = {"index": self._num_told - 1, "id": call_id, "type": "function", "function": function}
        return {"tool_calls": [call]}

    def end(self, finish_reason: AnswerEnd) -> str:
        reason = REASONS[finish_reason]
        return "tool_calls" if self._num_told and reason == "stop" else reason


class ChatWhole(OpenAIWhole):
    kind = "chat.completion"
    id_prefix = "chatcmpl-"

    def _choice(self, number: int, index: int, answer: Answer) -> dict[str, Any]:
        splitter = MessageSplitter(self._format, self._last[index].prompt)
        message = whole_message(splitter.feed(answer.text, is_last=True))
        assert answer.finish_reason is not None
        log_probs = None
        if self._format.has_log_probs:
            log_probs = log_prob_fields(shown_tokens(answer.tokens, answer.finish_reason), self._format)
        return {
            "index": number,
            "message": message,
            "logprobs": log_probs,
            "finish_reason": splitter.end(answer.finish_reason),
            **self._ids(answer.tokens),
        }

    def _object(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return super()._object(choices) | self._of_prompt(0)


class ChatStream(OpenAIStream):
    kind = "chat.completion.chunk"
    id_prefix = "chatcmpl-"

    def __init__(self, parsed: Parsed[OpenAIFormat]) -> None:
        super().__init__(parsed)
        self._splitters: dict[int, MessageSplitter] = {}

    def _choices(self, delta: Delta) -> list[dict[str, Any]]:
        deltas: list[dict[str, Any]] = []
        if delta.index not in self._splitters:
            self._splitters[delta.index] = MessageSplitter(self._format, delta.prompt)
            deltas.append({"role": "assistant", "content": "", **self._prompt_ids(delta)})
        splitter, num_opening = self._splitters[delta.index], len(deltas)
        deltas += splitter.feed(text_of(delta.tokens), delta.finish_reason is not None)
        tokens = shown_tokens(delta.tokens, delta.finish_reason) if self._format.has_log_probs else []
        is_told = tokens or (self._format.has_token_ids and delta.finish_reason is None)
        if is_told and len(deltas) == num_opening:
            deltas.append({"content": ""})  # the text is held back, but its tokens are not
        choices = [choice(delta.index, fields) for fields in deltas]
        if tokens:
            choices[num_opening]["logprobs"] = log_prob_fields(tokens, self._format)
        if delta.finish_reason is not None:
            choices.append(choice(delta.index, {"content": ""}, splitter.end(delta.finish_reason)))
        if self._format.has_token_ids:
            choices[num_opening] |= self._ids(delta.tokens)
        return choices

    def _chunk(self, choice: dict[str, Any], beside: bytes = b"") -> bytes:
        """Return the record of a choice. The prompt's ids stand beside the choices, as in vLLM."""
        if (ids := choice["delta"].pop("prompt_token_ids", None)) is not None:
            beside = b',"prompt_token_ids":' + dumps(ids)
        return super()._chunk(choice, beside)


class ChatLines(OpenAILines, ChatStream):
    pass


def choice(index: int, fields: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
    return {"index": index, "delta": fields, "logprobs": None, "finish_reason": finish_reason}


def whole_message(deltas: list[dict[str, Any]]) -> dict[str, Any]:
    """Join a stream's deltas to one message. Its content is null if there are only calls or thoughts."""
    texts: dict[str, str] = {}
    calls: list[dict[str, Any]] = []
    for fields in deltas:
        for name in ("content", "reasoning_content"):
            if name in fields:
                texts[name] = texts.get(name, "") + fields[name]
        for call in fields.get("tool_calls", ()):
            if call["index"] == len(calls):
                calls.append({"id": call["id"], "type": call["type"], "function": dict(call["function"])})
            else:
                calls[-1]["function"]["arguments"] += call["function"]["arguments"]
    nothing = None if calls or texts else ""
    message: dict[str, Any] = {"role": "assistant", "content": texts.get("content", nothing), "refusal": None}
    if "reasoning_content" in texts:
        message["reasoning_content"] = texts["reasoning_content"]
    return message | ({"tool_calls": calls} if calls else {})


def log_prob_fields(tokens: list[Token], format: OpenAIFormat) -> dict[str, Any]:
    content = [
        token_fields(token, format) | {"top_logprobs": [token_fields(other, format) for other in token.top or ()]}
        for token in tokens
    ]
    return {"content": content, "refusal": None}


def token_fields(token: Token, format: OpenAIFormat) -> dict[str, Any]:
    return {"token": name_of(token, format), "logprob": log_prob(token), "bytes": list(token.spelling.encode())}
