"""The answers of the LMI API: one object, with the best of several sequences, or a line or event
for each step.

    {"generated_text": "...",
     "details": {"finish_reason": "length", "generated_tokens": 8, "inputs": "", "tokens": []}}

    {"token": {"id": 304, "text": "Deep ", "log_prob": -0.05}}
    {"token": {}, "generated_text": "...",
     "details": {"finish_reason": "length", "generated_tokens": 9, "inputs": ""}}

The bytes are the reference's: `", "` and `": "` as separators, UTF-8 not escaped, keys in a fixed
order.
"""

from collections.abc import Iterable, Sequence

from orjson import dumps

from lmi.apis.base.body import Parsed
from lmi.apis.base.errors import ErrorFields
from lmi.apis.base.formatters import Formatter, StepFormatter, WholeFormatter
from lmi.apis.lmi.schema import LmiFormat
from lmi.types import Answer, Token, ranked


def lmi_token(token: Token) -> bytes:
    """Write a token under the LMI API's names. The special flag is left out where it is false."""
    end = b', "special_token": true}' if token.is_special else b"}"
    fields = token.id, dumps(token.text), dumps(token.log_prob), end
    return b'{"id": %d, "text": %b, "log_prob": %b%b' % fields


def tgi_token(token: Token) -> bytes:
    """Write a token under TGI's names."""
    end = b"true}" if token.is_special else b"false}"
    fields = token.id, dumps(token.text), dumps(token.log_prob), end
    return b'{"id": %d, "text": %b, "logprob": %b, "special": %b' % fields


def error_fields(error: ErrorFields) -> bytes:
    """Return the two or three keys that every error ends with."""
    fields = b'"error": %b, "code": %d' % (dumps(error.message), error.code)
    if error.kind is None:
        return fields

    return b'%b, "error_type": %b' % (fields, dumps(error.kind))


class LmiFormatter(Formatter[LmiFormat]):
    """Writes what whole answers and streams have alike."""

    def __init__(self, parsed: Parsed[LmiFormat]) -> None:
        super().__init__(parsed)
        self._token_json = tgi_token if parsed.format.tgi_compat else lmi_token

    def _details(
        self,
        answer: Answer,
        prefill: list[Token] | None,
        lesser_answers: Sequence[Answer] | None = None,
    ) -> bytes:
        """Write the Details object. A whole answer has the `lesser_answers` beside the best one. A
        stream has none, and has written its tokens before.
        """
        is_whole = lesser_answers is not None
        items = [
            b'"finish_reason": %b' % dumps(answer.finish_reason),
            b'"generated_tokens": %d' % len(answer.tokens),
            b'"inputs": %b' % dumps(self._request.prompt),
        ]
        if is_whole:
            items.append(b'"tokens": %b' % self._tokens(answer.tokens))

        if not self._request.prefill_details:
            prefill = None

        # TGI's client refuses a whole answer without a prefill.
        if prefill is None and is_whole and self._format.tgi_compat:
            prefill = []

        if prefill is not None:
            items.append(b'"prefill": [%b]' % b", ".join(map(self._prompt_token, prefill)))

        if is_whole and self._request.num_top_log_probs:
            top_tokens = [self._tokens(token.top or ()) for token in answer.tokens]
            items.append(b'"top_tokens": [%b]' % b", ".join(top_tokens))

        if lesser_answers:
            sequences = b", ".join(map(self._sequence, lesser_answers))
            items.append(b'"best_of_sequences": [%b]' % sequences)

        return b"{%b}" % b", ".join(items)

    def _sequence(self, answer: Answer) -> bytes:
        """Write one of the sequences beside the best."""
        fields = (
            b'"finish_reason": %b' % dumps(answer.finish_reason),
            b'"generated_tokens": %d' % len(answer.tokens),
            b'"tokens": %b' % self._tokens(answer.tokens),
            b'"generated_text": %b' % dumps(self._full_text(answer.text)),
        )
        return b"{%b}" % b", ".join(fields)

    def _tokens(self, tokens: Iterable[Token]) -> bytes:
        return b"[%b]" % b", ".join(map(self._token_json, tokens))

    def _prompt_token(self, token: Token) -> bytes:
        """Write a token of the prompt, with its alternatives if the request asks for them."""
        plain = self._token_json(token)
        if not self._request.num_prompt_log_probs:
            return plain

        return b'%b, "top_tokens": %b}' % (plain[:-1], self._tokens(token.top or ()))


class LmiWhole(LmiFormatter, WholeFormatter[LmiFormat]):
    """One object, or with tgi_compat a list of one. `Api.whole` adds the newline that ends the
    body.
    """

    def _whole(self, answers: list[Answer]) -> bytes:
        best, *lesser_answers = ranked(self._request, answers)
        body = b'{"generated_text": %b' % dumps(self._full_text(best.text))
        if self._format.details:
            body += b', "details": %b' % self._details(best, answers[0].prefill, lesser_answers)

        body += b"}"
        return b"[%b]" % body if self._format.tgi_compat else body

    @staticmethod
    def error(error: ErrorFields) -> bytes:
        details = (
            b'{"finish_reason": "error", "generated_tokens": null, "inputs": null, "tokens": null}'
        )
        return b'{"generated_text": "", "details": %b, %b}' % (details, error_fields(error))


class LmiStream(LmiFormatter, StepFormatter[LmiFormat]):
    """A line for each step.

    Every line ends with a newline, the last one too, because client libraries loop endlessly on a
    line without one.
    """

    media_type = "application/jsonlines"
    opening = b"{"
    closing = b"}\n"

    def _step(self, token: Token) -> bytes:
        fields = b'"token": ' + self._token_json(token)
        answer = self._answer
        if self._request.num_top_log_probs:
            fields += b', "top_tokens": ' + self._tokens(token.top or ())

        if answer.finish_reason is not None:
            fields += b', "generated_text": %b' % dumps(self._full_text(answer.text))
            if self._format.details:
                fields += b', "details": ' + self._details(answer, answer.prefill)

        return self.record(fields)

    @classmethod
    def error(cls, error: ErrorFields) -> bytes:
        token = b'{"id": -1, "text": "", "logprob": -1, "special": true}'
        if error.kind is None:
            token = b'{"id": -1, "text": "", "log_prob": -1, "special_token": true}'

        details = b'{"finish_reason": "error", "generated_tokens": null, "inputs": null}'
        fields = token, details, error_fields(error)
        return cls.record(b'"token": %b, "generated_text": "", "details": %b, %b' % fields)


class LmiEvents(LmiStream):
    """The lines as server-sent events, without event names, ids or `[DONE]`."""

    media_type = "text/event-stream"
    opening = b"data: {"
    closing = b"}\n\n"
