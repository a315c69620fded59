"""The answer token by token, each a line of JSON.

    {"token": {"id": 304, "text": "Deep ", "log_prob": -0.05}}
    {"token": {}, "generated_text": "...", "details": {"finish_reason": "length", "generated_tokens": 9, "inputs": ""}}

Every line ends in a newline, the last too: client libraries loop for ever on an unterminated one. Every line carries a
token; where the end brings none, the last line has the token -1. U+0085, U+2028 and U+2029 are escaped,
since clients that split text into lines (httpx does) would cut a record there.
Source: LMI handlers' inference API schema, key order and separators as the reference writes them.
"""

from __future__ import annotations

from typing import ClassVar

from orjson import dumps

from lmi.formatters.base import NO_TOKEN, ErrorFields, error_fields
from lmi.formatters.lmi import LmiFormatter
from lmi.schemas.common import Parsed
from lmi.schemas.lmi import LmiFormat
from lmi.types import Delta, FinishReason, Token

ESCAPES = {char.encode(): b"\\u%04x" % ord(char) for char in "\x85\u2028\u2029"}


class LmiStream(LmiFormatter):
    media_type = "application/jsonlines"
    is_streaming = True
    opening: ClassVar[bytes] = b"{"
    closing: ClassVar[bytes] = b"}\n"

    def __init__(self, parsed: Parsed[LmiFormat]) -> None:
        super().__init__(parsed)
        self._has_top = bool(self._request.num_top_log_probs)
        self._texts: list[str] = []
        self._prefill: list[Token] | None = None

    def feed(self, delta: Delta) -> list[bytes]:
        if delta.prefill is not None:
            self._prefill = delta.prefill
        records = []
        for token in delta.tokens:
            self._texts.append(token.text)
            records.append(self._record(self._token_fields(token)))
        if delta.finish_reason is not None:
            last = delta.tokens[-1] if delta.tokens else NO_TOKEN
            records[-1:] = [self._record(self._token_fields(last) + self._end_fields(delta.finish_reason))]
        return records

    def _token_fields(self, token: Token) -> bytes:
        fields = b'"token": ' + self._token_json(token)
        return fields + b', "top_tokens": ' + self._tokens(token.top or ()) if self._has_top else fields

    def _end_fields(self, finish_reason: FinishReason) -> bytes:
        fields = b', "generated_text": %b' % dumps(self._full_text("".join(self._texts)))
        if not self._format.details:
            return fields
        return b'%b, "details": %b' % (fields, self._details(finish_reason, len(self._texts), None, self._prefill))

    @classmethod
    def _record(cls, fields: bytes) -> bytes:
        return cls.opening + one_line(fields) + cls.closing

    @classmethod
    def error(cls, error: ErrorFields) -> bytes:
        names = (b"log_prob", b"special_token") if error.tgi_type is None else (b"logprob", b"special")
        token = b'{"id": -1, "text": "", "%b": -1, "%b": true}' % names
        details = b'{"finish_reason": "error", "generated_tokens": null, "inputs": null}'
        return cls._record(
            b'"token": %b, "generated_text": "", "details": %b, %b' % (token, details, error_fields(error))
        )


def one_line(fields: bytes) -> bytes:
    """JSON without the characters that some clients take for the end of a line."""
    if not fields.isascii():
        for char, escape in ESCAPES.items():
            fields = fields.replace(char, escape)
    return fields
