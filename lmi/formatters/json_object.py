"""The whole answer as one JSON object, under tgi_compat as a list of one.

    {"generated_text": "...", "details": {"finish_reason": "length", "generated_tokens": 8, "inputs": "", "tokens": []}}

No trailing newline. Source: LMI handlers' inference API schema, key order and separators as the reference writes them.
"""

from __future__ import annotations

from orjson import dumps

from lmi.formatters.base import ErrorFields, Formatter, error_fields
from lmi.types import Answer, Delta, GenerationRequest


class JsonObject(Formatter):
    media_type = "application/json"
    is_streaming = False

    def __init__(self, request: GenerationRequest) -> None:
        super().__init__(request)
        self._answer = Answer()

    def feed(self, delta: Delta) -> list[bytes]:
        self._answer.add(delta)
        return [] if delta.finish_reason is None else [self.whole(self._answer)]

    def whole(self, answer: Answer) -> bytes:
        body = b'{"generated_text": %b' % dumps(self._full_text(answer.text))
        if self._request.details:
            tokens = answer.tokens
            body += b', "details": %b' % self._details(answer.finish_reason, len(tokens), tokens, answer.prefill)
        return b"[%b}]" % body if self._request.tgi_compat else b"%b}" % body

    @staticmethod
    def error(error: ErrorFields) -> bytes:
        details = b'{"finish_reason": "error", "generated_tokens": null, "inputs": null, "tokens": null}'
        return b'{"generated_text": "", "details": %b, %b}' % (details, error_fields(error))
