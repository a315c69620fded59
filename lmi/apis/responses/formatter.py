"""The answers of OpenAI's Responses: items of thoughts, text and calls, whole or as events.

A stream begins with the response without items, tells of each item when it begins, grows and ends,
and ends with the whole response.
"""

import uuid
from typing import Any

from lmi.apis.base.body import Parsed
from lmi.apis.base.media_types import JSON
from lmi.apis.openai.answer_format import OpenAIFormat
from lmi.apis.openai.block_formatter import BlockStream
from lmi.apis.openai.chat_messages import parsed_arguments
from lmi.apis.openai.log_probs import log_prob_fields
from lmi.apis.openai.parts.buffer import AnswerPart, Arguments, Text, Thought, ToolCall
from lmi.apis.responses.log_probs import TextLogProbs
from lmi.apis.responses.state import ResponseState
from lmi.types import AnswerEnd, Delta

EVENTS = {
    "message": "response.output_text",
    "reasoning": "response.reasoning_text",
    "function_call": "response.function_call_arguments",
}
CONTENTS: dict[str, dict[str, Any]] = {
    "message": {"type": "output_text", "text": "", "annotations": [], "logprobs": []},
    "reasoning": {"type": "reasoning_text", "text": ""},
}


class ItemsStream(BlockStream):
    """Writes a response as events."""

    kind = "response"
    id_prefix = "resp_"
    block_types = {
        Text: "message",
        Thought: "reasoning",
        ToolCall: "function_call",
        Arguments: "function_call",
    }

    def __init__(self, parsed: Parsed[OpenAIFormat]) -> None:
        super().__init__(parsed)
        self._state: ResponseState = parsed.format.state
        self._state.id = self._id
        self._state.created_s = self._created_s
        self._state.model = parsed.format.model
        # The place of the open item, which its events repeat.
        self._place: dict[str, Any] = {}
        self._tokens = TextLogProbs()
        # The log-probs of the open text.
        self._log_probs: list[dict[str, Any]] = []

    def feed(self, delta: Delta) -> list[bytes]:
        if self._format.has_log_probs:
            tokens = self._shown(delta)
            self._tokens.add(tokens, log_prob_fields(tokens, self._format)["content"])

        return super().feed(delta)

    def _begin(self) -> list[bytes]:
        response = self._state.response("in_progress")
        return [
            self._event("response.created", response=response),
            self._event("response.in_progress", response=response),
        ]

    def _wait(self, fields: dict[str, Any]) -> bytes:
        """Codex gives up a request after 300 s without an event. Comments do not count for it."""
        response = self._state.response("in_progress")
        return self._event("response.in_progress", response=response, **fields)

    def _open(self, part: AnswerPart) -> list[bytes]:
        output_item = _item(part)
        index = len(self._state.output)
        self._log_probs = []
        self._block = output_item
        self._place = {"item_id": output_item["id"], "output_index": index}

        records = [self._event("response.output_item.added", output_index=index, item=output_item)]
        if output_item["type"] != "function_call":
            empty_part = dict(CONTENTS[output_item["type"]])
            output_item["content"] = [empty_part]
            self._place["content_index"] = 0
            added = "response.content_part.added"
            records.append(self._event(added, **self._place, part=empty_part))

        return records

    def _grow(self, part: Text | Thought | Arguments) -> bytes:
        kind = self.block_types[type(part)]
        fields: dict[str, Any] = dict(self._place)
        if kind == "message":
            log_probs = self._tokens.take(len(part.text), self._num_unread)
            self._log_probs += log_probs
            fields["logprobs"] = log_probs
        else:
            self._tokens.forget(self._num_unread)

        return self._event(f"{EVENTS[kind]}.delta", **fields, delta=part.text)

    def _close(self, status: str = "completed") -> list[bytes]:
        output_item = self._block
        if not output_item:
            return []

        text = "".join(self._texts)
        if output_item["type"] == "function_call":
            # The answer was cut behind a call whose arguments are an object.
            if isinstance(parsed_arguments(text), dict):
                status = "completed"

            records = self._close_call(output_item, text)
        else:
            records = self._close_part(output_item, text)

        if "status" in output_item:
            output_item["status"] = status

        index = self._place["output_index"]
        records.append(
            self._event("response.output_item.done", output_index=index, item=output_item)
        )
        self._state.output.append(output_item)
        return records

    def _close_call(self, output_item: dict[str, Any], arguments: str) -> list[bytes]:
        output_item["arguments"] = arguments
        done = f"{EVENTS['function_call']}.done"
        return [self._event(done, **self._place, name=output_item["name"], arguments=arguments)]

    def _close_part(self, output_item: dict[str, Any], text: str) -> list[bytes]:
        kind = output_item["type"]
        [part] = output_item["content"]
        part["text"] = text
        log_probs = {"logprobs": self._log_probs} if kind == "message" else {}
        part |= log_probs
        return [
            self._event(f"{EVENTS[kind]}.done", **self._place, **log_probs, text=text),
            self._event("response.content_part.done", **self._place, part=part),
        ]

    def _end(self, delta: Delta, reason: AnswerEnd) -> tuple[list[bytes], dict[str, Any]]:
        status = "completed"
        details = None
        if reason is AnswerEnd.LENGTH:
            status = "incomplete"
            details = {"reason": "max_output_tokens"}

        self._log_probs += self._tokens.take_ends()
        records = self._close(status)
        response = self._state.response(status, incomplete_details=details, usage=self._usage())
        records.append(self._event(f"response.{status}", response=response))
        return records, response

    def _usage(self) -> dict[str, Any]:
        return {
            "input_tokens": self._num_prompt_tokens,
            "input_tokens_details": {"cached_tokens": self._num_cached_tokens},
            "output_tokens": self._num_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": self._num_prompt_tokens + self._num_tokens,
        }

    def _event(self, kind: str, **fields: Any) -> bytes:
        return self._state.event(kind, **fields) if self.is_streaming else b""


class ItemsWhole(ItemsStream):
    """Writes a response as one object."""

    media_type = JSON
    is_streaming = False


def _item(part: AnswerPart) -> dict[str, Any]:
    """Return the item that a part begins, without content."""
    number = uuid.uuid4().hex
    if isinstance(part, Thought):
        return {"type": "reasoning", "id": f"rs_{number}", "summary": [], "content": []}

    if isinstance(part, Text):
        return {
            "type": "message",
            "id": f"msg_{number}",
            "status": "in_progress",
            "role": "assistant",
            "content": [],
        }

    assert isinstance(part, ToolCall)
    call = {"call_id": f"call_{number[:24]}", "name": part.name, "arguments": ""}
    return {"type": "function_call", "id": f"fc_{number}", "status": "in_progress", **call}
