"""The whole answer as one JSON object, under tgi_compat as a list of one.

    {"generated_text": "...", "details": {"finish_reason": "length", "generated_tokens": 8, "inputs": "", "tokens": []}}

The most probable of several sequences is the answer, its details hold the others. The newline that ends the body
is added by `Api.whole`.
Source: LMI handlers' inference API schema, key order and separators as the reference writes them.
"""

from __future__ import annotations

from orjson import dumps

from lmi.formatters.base import ErrorFields, error_fields
from lmi.formatters.lmi import LmiFormatter
from lmi.schemas.common import Parsed
from lmi.schemas.lmi import LmiFormat
from lmi.types import Answer, Answers, Delta


class LmiWhole(LmiFormatter):
    media_type = "application/json"
    is_streaming = False

    def __init__(self, parsed: Parsed[LmiFormat]) -> None:
        super().__init__(parsed)
        self._answers = Answers(self._request.num_sequences)

    def feed(self, delta: Delta) -> list[bytes]:
        return [self._whole(*self._answers.ranked())] if self._answers.add(delta) else []

    def _whole(self, best: Answer, *others: Answer) -> bytes:
        body = b'{"generated_text": %b' % dumps(self._full_text(best.text))
        if self._format.details:
            tokens, prefill = best.tokens, self._answers.all[0].prefill
            body += b', "details": %b' % self._details(best.finish_reason, len(tokens), tokens, prefill, others)
        return b"[%b}]" % body if self._format.tgi_compat else b"%b}" % body

    @staticmethod
    def error(error: ErrorFields) -> bytes:
        details = b'{"finish_reason": "error", "generated_tokens": null, "inputs": null, "tokens": null}'
        return b'{"generated_text": "", "details": %b, %b}' % (details, error_fields(error))
