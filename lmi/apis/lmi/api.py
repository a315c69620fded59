"""Answers of the LMI API: one object, or a stream with a line or event for each step; and its row.

    {"generated_text": "...", "details": {"finish_reason": "length", "generated_tokens": 8, "inputs": "", "tokens": []}}

    {"token": {"id": 304, "text": "Deep ", "log_prob": -0.05}}
    {"token": {}, "generated_text": "...", "details": {"finish_reason": "length", "generated_tokens": 9, "inputs": ""}}

The best of several sequences is the answer, and its details hold the others. The bytes are the reference's:
`", "` and `": "` as separators, UTF-8 not escaped, keys in a fixed order. With tgi_compat the log-prob and the special
flag have TGI's names, and the flag is never left out. Source: LMI handlers' inference API schema.
"""

from collections.abc import Iterable
from functools import partial

from orjson import dumps

from lmi.apis.base.api import (
    Api,
    ErrorFields,
    ErrorRules,
    Formatter,
    Forms,
    Row,
    StepFormatter,
    WholeFormatter,
    error_fields,
)
from lmi.apis.base.readers import Parsed
from lmi.apis.lmi import schema
from lmi.apis.lmi.schema import WIRE_NAMES, LmiFormat
from lmi.errors import DeadlineExceeded, EngineLost, GenerationFailed, InvalidRequest, MalformedRequest, OutOfMemory
from lmi.types import Answer, Token, ranked


class LmiFormatter(Formatter[LmiFormat]):
    """Writes tokens and details."""

    def __init__(self, parsed: Parsed[LmiFormat]) -> None:
        super().__init__(parsed)
        self._token_json = tgi_token if parsed.format.tgi_compat else lmi_token

    def _details(
        self, answer: Answer, tokens: list[Token] | None, prefill: list[Token] | None, others: Iterable[Answer] = ()
    ) -> bytes:
        """Write the Details object. `tokens` is None in a stream. `others` are the sequences besides the answer."""
        items = [
            b'"finish_reason": %b' % dumps(answer.finish_reason),
            b'"generated_tokens": %d' % len(answer.tokens),
            b'"inputs": %b' % dumps(self._request.prompt),
        ]
        if tokens is not None:
            items.append(b'"tokens": %b' % self._tokens(tokens))
        shown = prefill if self._request.prefill_details else None
        if shown is None and tokens is not None and self._format.tgi_compat:
            shown = []  # TGI's client refuses a whole answer without it
        if shown is not None:
            items.append(b'"prefill": [%b]' % b", ".join(map(self._prompt_token, shown)))
        if tokens is not None and self._request.num_top_log_probs:
            items.append(b'"top_tokens": [%b]' % b", ".join(self._tokens(token.top or ()) for token in tokens))
        if sequences := b", ".join(map(self._sequence, others)):
            items.append(b'"best_of_sequences": [%b]' % sequences)
        return b"{%b}" % b", ".join(items)

    def _sequence(self, answer: Answer) -> bytes:
        return b'{"finish_reason": %b, "generated_tokens": %d, "tokens": %b, "generated_text": %b}' % (
            dumps(answer.finish_reason),
            len(answer.tokens),
            self._tokens(answer.tokens),
            dumps(self._full_text(answer.text)),
        )

    def _tokens(self, tokens: Iterable[Token]) -> bytes:
        return b"[%b]" % b", ".join(map(self._token_json, tokens))

    def _prompt_token(self, token: Token) -> bytes:
        plain = self._token_json(token)
        if not self._request.num_prompt_log_probs:
            return plain
        return b'%b, "top_tokens": %b}' % (plain[:-1], self._tokens(token.top or ()))


class LmiWhole(LmiFormatter, WholeFormatter[LmiFormat]):
    """One object, or with tgi_compat a list of one. `Api.whole` adds the newline that ends the body."""

    def _whole(self, answers: list[Answer]) -> bytes:
        best, *others = ranked(self._request, answers)
        body = b'{"generated_text": %b' % dumps(self._full_text(best.text))
        if self._format.details:
            body += b', "details": %b' % self._details(best, best.tokens, answers[0].prefill, others)
        return b"[%b}]" % body if self._format.tgi_compat else b"%b}" % body

    @staticmethod
    def error(error: ErrorFields) -> bytes:
        details = b'{"finish_reason": "error", "generated_tokens": null, "inputs": null, "tokens": null}'
        return b'{"generated_text": "", "details": %b, %b}' % (details, error_fields(error))


class LmiStream(LmiFormatter, StepFormatter[LmiFormat]):
    """A line for each step.

    Every line ends with a newline, the last one too, because client libraries loop endlessly on a line without one.
    """

    media_type = "application/jsonlines"
    opening = b"{"
    closing = b"}\n"

    def _step(self, token: Token) -> bytes:
        fields, answer = b'"token": ' + self._token_json(token), self._answer
        if self._request.num_top_log_probs:
            fields += b', "top_tokens": ' + self._tokens(token.top or ())
        if answer.finish_reason is not None:
            fields += b', "generated_text": %b' % dumps(self._full_text(answer.text))
            if self._format.details:
                fields += b', "details": ' + self._details(answer, None, answer.prefill)
        return self.record(fields)

    @classmethod
    def error(cls, error: ErrorFields) -> bytes:
        names = (b"log_prob", b"special_token") if error.kind is None else (b"logprob", b"special")
        token = b'{"id": -1, "text": "", "%b": -1, "%b": true}' % names
        details = b'{"finish_reason": "error", "generated_tokens": null, "inputs": null}'
        fields = token, details, error_fields(error)
        return cls.record(b'"token": %b, "generated_text": "", "details": %b, %b' % fields)


class LmiEvents(LmiStream):
    """The lines as server-sent events, without event names, ids or `[DONE]`."""

    media_type = "text/event-stream"
    opening = b"data: {"
    closing = b"}\n\n"


def lmi_token(token: Token) -> bytes:
    end = b', "special_token": true}' if token.is_special else b"}"
    return b'{"id": %d, "text": %b, "log_prob": %b%b' % (token.id, dumps(token.text), dumps(token.log_prob), end)


def tgi_token(token: Token) -> bytes:
    end = b"true}" if token.is_special else b"false}"
    fields = token.id, dumps(token.text), dumps(token.log_prob), end
    return b'{"id": %d, "text": %b, "logprob": %b, "special": %b' % fields


INVALID_STATUS = 424  # other APIs answer 400
FORMS = Forms(LmiWhole, LmiEvents, LmiStream)


def _write_error(error: ErrorFields, format: LmiFormat, *, in_answer: bool) -> tuple[str, bytes]:
    kind = "generation" if in_answer and error.kind == "overloaded" else error.kind
    error = error._replace(kind=kind if format.tgi_compat else None)
    if in_answer:
        return FORMS.write_error(error, format, in_answer=format.is_streamed)
    return LmiWhole.media_type, b"{%b}" % error_fields(error)


ERRORS = ErrorRules(
    _write_error,
    (
        Row(MalformedRequest, INVALID_STATUS, "validation"),
        Row(InvalidRequest, INVALID_STATUS, "validation", in_answer=True),
        Row(GenerationFailed, 424, "generation", in_answer=True),
        Row(DeadlineExceeded, 504, "generation", in_answer=True),
        Row(OutOfMemory, 507, "generation", in_answer=True),
        Row(EngineLost, 503, "generation", in_answer=True),
    ),
    WIRE_NAMES,
    lambda status: "validation" if status < 500 else "overloaded",
)
LMI: Api[LmiFormat] = Api(
    name="lmi",
    prefixes=("/",),
    default_format=lambda model: LmiFormat(tgi_compat=model.tgi_compat),
    read=schema.read,
    parse=schema.parse,
    formatter=FORMS.formatter,
    errors=ERRORS,
    read_for_events=partial(schema.read, accepts_events=True),
    takes_user_code=True,
    json_end=b"\n",
)
