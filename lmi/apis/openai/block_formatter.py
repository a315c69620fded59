"""Answers to chats that consist of blocks, as those of Anthropic's API and of Responses do: a block
for each stretch of text or thoughts, and for each call.
"""

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from orjson import dumps

from lmi.apis.base.body import Parsed
from lmi.apis.base.formatters import one_line, text_of
from lmi.apis.base.media_types import SSE
from lmi.apis.openai.answer_format import OpenAIFormat
from lmi.apis.openai.base_formatter import OpenAIFormatter
from lmi.apis.openai.parts.answer_parts import AnswerParts
from lmi.apis.openai.parts.buffer import AnswerPart, Arguments, Text, Thought, ToolCall
from lmi.apis.openai.waiting import waiting_fields
from lmi.types import AnswerEnd, Delta, WaitStatus


class BlockStream(OpenAIFormatter):
    """Writes the events of a stream. A whole answer is made in the same way, but its events are
    left out.
    """

    media_type = SSE
    is_streaming = True
    begins_early = True
    # The type of the block that has a part, by the kind of the part.
    block_types: ClassVar[Mapping[type[AnswerPart], str]]

    def __init__(self, parsed: Parsed[OpenAIFormat]) -> None:
        super().__init__(parsed)
        self._parts: AnswerParts | None = None
        self._has_begun = False
        # How far the request was before the first Delta.
        self._status = WaitStatus()
        # The block that is open, and the pieces of its text.
        self._block: dict[str, Any] = {}
        self._texts: list[str] = []

    def feed(self, delta: Delta) -> list[bytes]:
        self._count(delta)
        records: list[bytes] = []
        if self._parts is None:
            self._parts = AnswerParts.of(self._format, delta.prompt)
            records += self._begin_once()

        for part in self._parts.read(text_of(delta.tokens), delta.finish_reason):
            records += self._feed_part(part)

        whole: dict[str, Any] | None = None
        if delta.finish_reason is not None:
            last_records, whole = self._end(delta, delta.finish_reason)
            records += last_records

        if self.is_streaming:
            return records

        return [] if whole is None else [dumps(whole)]

    def _feed_part(self, part: AnswerPart) -> list[bytes]:
        """Add a part to the block that is open, or open another one for it."""
        records: list[bytes] = []
        is_other_kind = self._block.get("type") != self.block_types[type(part)]
        if isinstance(part, ToolCall) or is_other_kind:
            records += self._close()
            records += self._open(part)
            self._texts = []

        if not isinstance(part, ToolCall):
            self._texts.append(part.text)
            records.append(self._grow(part))

        return records

    @property
    def _num_unread(self) -> int:
        """The number of characters that have come behind the part that is fed."""
        return 0 if self._parts is None else self._parts.num_unread

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
        """Return an event, or b"" where there are none."""
        if not self.is_streaming:
            return b""

        return named_event(kind, {"type": kind, **fields})

    @abstractmethod
    def _begin(self) -> list[bytes]:
        """Return the events with which the answer begins, before its blocks."""

    @abstractmethod
    def _wait(self, fields: dict[str, Any]) -> bytes:
        """Return an event for the time without a token, with these `fields`: one that clients take
        for a sign of progress.
        """

    @abstractmethod
    def _open(self, part: AnswerPart) -> list[bytes]:
        """Begin the block that has this part."""

    @abstractmethod
    def _grow(self, part: Text | Thought | Arguments) -> bytes:
        """Add a part's text to the block that is open."""

    @abstractmethod
    def _close(self) -> list[bytes]:
        """End the block that is open, if there is one."""

    @abstractmethod
    def _end(self, delta: Delta, reason: AnswerEnd) -> tuple[list[bytes], dict[str, Any]]:
        """Return the last events, and the whole answer."""


def named_event(name: str, fields: Mapping[str, object]) -> bytes:
    """Return a server-sent event with a name."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), one_line(dumps(fields)))
