"""What the formatters of the LMI API share: the JSON of its tokens and details.

The bytes are the reference's: `", "` and `": "` between things, UTF-8 not escaped, keys in a fixed order. Under
tgi_compat the log-prob and the special flag have TGI's names, and TGI's flag is never left out.
"""

from __future__ import annotations

from collections.abc import Iterable

from orjson import dumps

from lmi.formatters.base import Formatter
from lmi.schemas.common import Parsed
from lmi.schemas.lmi import LmiFormat
from lmi.types import Answer, FinishReason, Token


class LmiFormatter(Formatter[LmiFormat]):
    """Writes tokens and details."""

    def __init__(self, parsed: Parsed[LmiFormat]) -> None:
        super().__init__(parsed)
        self._token_json = tgi_token if parsed.format.tgi_compat else lmi_token

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
        if shown is None and tokens is not None and self._format.tgi_compat:
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
