"""The text of one answer: token ids of the engine become Tokens with text.

This joins the detokenizer and the stop strings, and decides the text at the end: the end token and a stop token have no
text, and the last Token gets the text that was held back. It knows no sockets and no wire format.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from lmi.executor import FinishReason, PromptLogProb, TokenLogProb
from lmi.text.detokenizer import Detokenizer
from lmi.text.stop import StopStrings
from lmi.text.tokenizer import Tokenizer
from lmi.types import Token

NOT_FINISHED = FinishReason.NOT_FINISHED


class AnswerText:
    """Turns the tokens of each Result into Tokens. `stopped` becomes True when a stop string has ended the answer.

    Like end tokens, stop strings count only after the first `min_tokens` tokens.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int],
        *,
        stop_sequences: Sequence[str] = (),
        stop_token_ids: Collection[int] = (),
        include_stop_str_in_output: bool = False,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
        min_tokens: int = 0,
    ) -> None:
        self._tokenizer = tokenizer
        self._special_ids = tokenizer.special_ids
        self._detokenizer = Detokenizer(
            tokenizer,
            prompt_ids,
            skip_special_tokens=skip_special_tokens,
            spaces_between_special_tokens=spaces_between_special_tokens,
        )
        self._stop = StopStrings(stop_sequences, include_stop_str_in_output) if stop_sequences else None
        self._silent_stop_ids = frozenset() if include_stop_str_in_output else frozenset(stop_token_ids)
        self._num_unchecked = min_tokens
        self._last_id = -1
        self.stopped = False

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the answer."""
        return None if self._stop is None else self._stop.matched

    def feed(
        self,
        ids: Sequence[int],
        log_probs: Sequence[float] | None = None,
        top: Sequence[Sequence[TokenLogProb]] | None = None,
        finish_reason: FinishReason = NOT_FINISHED,
    ) -> list[Token]:
        """Return the Tokens of one Result. Tokens after a stop string are dropped, also those of further Results.

        With a `finish_reason` the last Token gets the text that was held back. If the Result has no tokens, an
        additional Token with the last id gets it.
        """
        if self._stop is None and top is None and finish_reason is NOT_FINISHED and len(ids) == 1:
            return [self._plain_token(ids[0], None if log_probs is None else log_probs[0])]  # nearly every Result
        tokens: list[Token] = []
        num_spoken = len(ids) - self._is_last_silent(ids, finish_reason)
        for n, token_id in enumerate(ids):
            if self.stopped:
                break
            text = piece = self._detokenizer.feed(token_id) if n < num_spoken else ""
            if self._stop is not None:
                text = self._without_stop(self._stop, text)
            tokens.append(
                Token(token_id, text, None if log_probs is None else log_probs[n], token_id in self._special_ids)
            )
            if self._stop is not None:
                tokens[n].raw_text = piece
            if top is not None:
                tokens[n].top = [_lone_token(self._tokenizer, item.token_id, item.log_prob) for item in top[n]]
        if ids:
            self._last_id = ids[-1]
        if finish_reason is not NOT_FINISHED:
            self._release(self._detokenizer.flush(), tokens)
        return tokens

    def _plain_token(self, token_id: int, log_prob: float | None) -> Token:
        self._last_id = token_id
        return Token(token_id, self._detokenizer.feed(token_id), log_prob, token_id in self._special_ids)

    def _release(self, piece: str, tokens: list[Token]) -> None:
        """Add the text that was held back: part of a character (also to `raw_text`), and part of a stop string."""
        text = piece
        if self._stop is not None:
            text = self._stop.feed(piece) + self._stop.flush()
            self.stopped = self._stop.matched is not None
        if text and not tokens:
            tokens.append(Token(self._last_id, "", raw_text=None if self._stop is None else ""))
        if text:
            tokens[-1].text += text
        if tokens and tokens[-1].raw_text is not None:
            tokens[-1].raw_text += piece

    def _is_last_silent(self, ids: Sequence[int], finish_reason: FinishReason) -> bool:
        if finish_reason is FinishReason.END_ID:
            return bool(ids)
        return finish_reason is FinishReason.STOP_WORDS and bool(ids) and ids[-1] in self._silent_stop_ids

    def _without_stop(self, stop: StopStrings, text: str) -> str:
        if self._num_unchecked > 0:
            self._num_unchecked -= 1
            return text
        text = stop.feed(text)
        self.stopped = stop.matched is not None
        return text


def prompt_tokens(
    tokenizer: Tokenizer, prompt_ids: Sequence[int], log_probs: Sequence[PromptLogProb] | None
) -> list[Token]:
    """Return the prompt as Tokens (`prefill` on the wire), each decoded separately, with log-probs if there are any."""
    tokens = [_lone_token(tokenizer, token_id, None) for token_id in prompt_ids]
    for token, position in zip(tokens, log_probs or (), strict=False):
        token.log_prob = position.log_prob
        if position.top:
            token.top = [_lone_token(tokenizer, item.token_id, item.log_prob) for item in position.top]
    return tokens


def _lone_token(tokenizer: Tokenizer, token_id: int, log_prob: float | None) -> Token:
    return Token(token_id, tokenizer.token_text(token_id), log_prob, token_id in tokenizer.special_ids)
