"""The answers of Anthropic's Messages: blocks of text, thoughts and calls, whole or as events."""

import uuid
from typing import Any

from orjson import dumps

from lmi.apis.base.body import Parsed
from lmi.apis.base.errors import ErrorFields
from lmi.apis.base.media_types import JSON
from lmi.apis.openai.answer_format import OpenAIFormat
from lmi.apis.openai.block_formatter import BlockStream, named_event
from lmi.apis.openai.chat_messages import parsed_arguments
from lmi.apis.openai.parts.buffer import AnswerPart, Arguments, Text, Thought, ToolCall
from lmi.types import AnswerEnd, Delta

STOP_REASONS = {
    AnswerEnd.LENGTH: "max_tokens",
    AnswerEnd.EOS_TOKEN: "end_turn",
    AnswerEnd.STOP_SEQUENCE: "stop_sequence",
}


class MessageStream(BlockStream):
    """Writes a message as events."""

    kind = "message"
    id_prefix = "msg_"
    block_types = {Text: "text", Thought: "thinking", ToolCall: "tool_use", Arguments: "tool_use"}

    def __init__(self, parsed: Parsed[OpenAIFormat]) -> None:
        super().__init__(parsed)
        self._ended_blocks: list[dict[str, Any]] = []

    def _usage(self) -> dict[str, Any]:
        """Return the numbers of tokens. Those of the prompt that were cached count apart."""
        num_prompt_tokens = self._num_prompt_tokens
        num_cached_tokens = self._num_cached_tokens

        # While the answer waits, the engine has told only these.
        if not num_prompt_tokens:
            num_prompt_tokens = self._status.num_prompt_tokens
            num_cached_tokens = self._status.num_cached_tokens or 0

        return {
            "input_tokens": num_prompt_tokens - num_cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": num_cached_tokens,
            "output_tokens": self._num_tokens,
        }

    def _message(self, end: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": self.kind,
            "role": "assistant",
            "model": self._format.model,
            "content": self._ended_blocks,
            **end,
            "usage": self._usage(),
        }

    def _begin(self) -> list[bytes]:
        message = self._message({"stop_reason": None, "stop_sequence": None})
        return [self._event("message_start", message=message), self._event("ping")]

    def _wait(self, fields: dict[str, Any]) -> bytes:
        """Claude Code gives up a request after 300 s of silence. It counts this event, and not
        `ping`.
        """
        nothing = {"stop_reason": None, "stop_sequence": None}
        return self._event("message_delta", delta=nothing, usage=self._usage(), **fields)

    def _open(self, part: AnswerPart) -> list[bytes]:
        kind = self.block_types[type(part)]
        if isinstance(part, ToolCall):
            call_id = f"toolu_{uuid.uuid4().hex[:24]}"
            self._block = {"type": kind, "id": call_id, "name": part.name, "input": {}}
        else:
            self._block = {"type": kind, kind: ""}
            if isinstance(part, Thought):
                self._block["signature"] = ""

        index = len(self._ended_blocks)
        return [self._event("content_block_start", index=index, content_block=self._block)]

    def _grow(self, part: Text | Thought | Arguments) -> bytes:
        kind = self.block_types[type(part)]
        delta = {"type": f"{kind}_delta", kind: part.text}
        if isinstance(part, Arguments):
            delta = {"type": "input_json_delta", "partial_json": part.text}

        return self._event("content_block_delta", index=len(self._ended_blocks), delta=delta)

    def _close(self, *, is_cut: bool = False) -> list[bytes]:
        """End the block that is open. A call whose arguments were cut gets none. A call whose
        arguments are no object becomes a text.
        """
        if not self._block:
            return []

        stop = self._event("content_block_stop", index=len(self._ended_blocks))
        block = self._block
        if not self.is_streaming:
            block = self._whole_block(block, "".join(self._texts), is_cut=is_cut)

        self._ended_blocks.append(block)
        return [stop]

    def _whole_block(self, block: dict[str, Any], text: str, *, is_cut: bool) -> dict[str, Any]:
        kind = block["type"]
        if kind != "tool_use":
            return block | {kind: text}

        value = parsed_arguments(text)
        if isinstance(value, dict):
            return block | {"input": value}

        return block if is_cut else {"type": "text", "text": text}

    def _end(self, delta: Delta, reason: AnswerEnd) -> tuple[list[bytes], dict[str, Any]]:
        """Return the last events and the whole message. An answer with calls that was not cut ends
        for them.
        """
        is_whole = reason is AnswerEnd.EOS_TOKEN
        records = self._close(is_cut=not is_whole)
        has_calls = any(block["type"] == "tool_use" for block in self._ended_blocks)
        stop_reason = "tool_use" if is_whole and has_calls else STOP_REASONS[reason]
        stop_string = delta.stop_reason if isinstance(delta.stop_reason, str) else None

        end = {"stop_reason": stop_reason, "stop_sequence": stop_string}
        records.append(self._event("message_delta", delta=end, usage=self._usage()))
        records.append(self._event("message_stop"))
        return records, self._message(end)

    @classmethod
    def error(cls, error: ErrorFields) -> bytes:
        """Return an error as an event of a stream, else as a body."""
        error_object: dict[str, Any] = {"type": error.kind, "message": error.message}
        if error.details is not None:
            error_object["details"] = error.details

        fields = {"type": "error", "error": error_object, "request_id": error.request_id}
        if cls.is_streaming:
            return named_event("error", fields)

        return dumps(fields)


class MessageWhole(MessageStream):
    """Writes a message as one object."""

    media_type = JSON
    is_streaming = False
