"""What every formatter shares: its shape, and the JSON of the LMI wire's objects.

A formatter belongs to one request: Deltas in, records out, each record one body message. It knows nothing of HTTP
statuses, sockets or where the tokens come from. The bytes are the reference's: `", "` and `": "` between things, UTF-8
not escaped, keys in a fixed order. orjson writes strings and floats, so NaN and infinities become null. Under
tgi_compat the log-prob and the special flag have TGI's names, and TGI's flag is never left out.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from typing import NamedTuple

from orjson import dumps

from lmi.types import Answer, Delta, FinishReason, GenerationRequest, Token

NO_TOKEN = Token(id=-1, text="", is_special=True)
"""Stands where an answer ends without a token of its own, as the reference writes an empty step."""


class ErrorFields(NamedTuple):
    """An error as a body names it. `kind` is in the words of the API; the LMI API has one only under tgi_compat."""

    message: str
    code: int  # HTTP's
    kind: str | None = None
    param: str | None = None  # the field at fault


class AsyncFormatter(ABC):
    """Turns the deltas of one answer into the records of its body. It may wait for other processes."""

    media_type: str
    is_streaming: bool  # False: all records together are the body
    is_verbatim: bool = False  # the body is sent as it is, without the door's line end

    @abstractmethod
    def records(self, deltas: AsyncIterator[Delta]) -> AsyncGenerator[bytes]:
        """The records that each delta completes. An empty record only begins the response."""


class Formatter(AsyncFormatter):
    """Writes the answer to one request, without waiting for anything."""

    def __init__(self, request: GenerationRequest) -> None:
        self._request = request
        self._token_json = tgi_token if request.tgi_compat else lmi_token

    @abstractmethod
    def feed(self, delta: Delta) -> list[bytes]:
        """The records that this Delta completes, in order; if not streaming, the whole body after the last."""

    async def records(self, deltas: AsyncIterator[Delta]) -> AsyncGenerator[bytes]:
        async for delta in deltas:
            for record in self.feed(delta):
                yield record

    @staticmethod
    @abstractmethod
    def error(error: ErrorFields) -> bytes:
        """The one record that says why there is no answer, or no more of it."""

    def _full_text(self, text: str) -> str:
        return self._request.prompt + text if self._request.return_full_text else text

    def _details(
        self,
        finish_reason: FinishReason | None,
        num_tokens: int,
        tokens: list[Token] | None,
        prefill: list[Token] | None,
        others: Iterable[Answer] = (),
    ) -> bytes:
        """The Details object; `tokens` is None in a stream, `others` are the sequences that are not the answer."""
        items = [
            b'"finish_reason": %b' % dumps(finish_reason),
            b'"generated_tokens": %d' % num_tokens,
            b'"inputs": %b' % dumps(self._request.prompt),
        ]
        if tokens is not None:
            items.append(b'"tokens": %b' % self._tokens(tokens))
        shown = prefill if self._request.prefill_details else None
        if shown is None and tokens is not None and self._request.tgi_compat:
            shown = []  # TGI's client refuses a whole answer without
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


def lmi_token(token: Token) -> bytes:
    if token.is_special:
        return b'{"id": %d, "text": %b, "log_prob": %b, "special_token": true}' % (
            token.id,
            dumps(token.text),
            dumps(token.log_prob),
        )
    return b'{"id": %d, "text": %b, "log_prob": %b}' % (token.id, dumps(token.text), dumps(token.log_prob))


def tgi_token(token: Token) -> bytes:
    return b'{"id": %d, "text": %b, "logprob": %b, "special": %b}' % (
        token.id,
        dumps(token.text),
        dumps(token.log_prob),
        b"true" if token.is_special else b"false",
    )


def error_fields(error: ErrorFields) -> bytes:
    """The two or three keys that every error ends with."""
    fields = b'"error": %b, "code": %d' % (dumps(error.message), error.code)
    return fields if error.kind is None else b'%b, "error_type": %b' % (fields, dumps(error.kind))


def plain_error(error: ErrorFields) -> bytes:
    """The body that answers a request which could not be read."""
    return b"{%b}" % error_fields(error)
