"""The text of one answer: token ids of the engine become Tokens with text.

The end token and a stop token have no text, and the last Token gets the text that was held back.
"""

import codecs
import re
from bisect import bisect_left
from collections.abc import Sequence

from lmi.executor import FinishReason, PromptLogProb, SamplingConfig, TokenLogProb
from lmi.text.tokenizer import Tokenizer
from lmi.types import GenerationRequest, Token

NOT_FINISHED = FinishReason.NOT_FINISHED


class AnswerText:
    """Turns the tokens of each Result into Tokens. `stop_string` is the one that has ended the
    answer.

    Like end tokens, stop strings count only after the first `min_tokens` tokens.
    """

    def __init__(
        self, tokenizer: Tokenizer, request: GenerationRequest, prompt_ids: Sequence[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._special_ids = tokenizer.special_ids
        self._detokenizer = Detokenizer(tokenizer, request, prompt_ids)

        is_included = request.include_stop_str_in_output
        self._stop: StopStrings | None = None
        if request.stop_sequences:
            self._stop = StopStrings(request.stop_sequences, is_included)

        self._silent_stop_ids = frozenset[int]()
        if not is_included:
            self._silent_stop_ids = frozenset(request.stop_token_ids)

        self._num_unchecked = request.sampling.min_tokens or 0
        self._last_id = -1

    @property
    def stop_string(self) -> str | None:
        """The text that ended the answer, if one did."""
        return None if self._stop is None else self._stop.matched

    def feed(
        self,
        ids: Sequence[int],
        log_probs: Sequence[float] | None = None,
        top: Sequence[Sequence[TokenLogProb]] | None = None,
        finish_reason: FinishReason = NOT_FINISHED,
    ) -> list[Token]:
        """Return the Tokens of one Result. Tokens after a stop string are dropped, also those of
        further Results.

        With a `finish_reason` the last Token gets the text that was held back. If the Result has no
        tokens, an additional Token with the last id gets it.
        """
        # Nearly every Result has one token, and nothing else to consider.
        has_nothing_else = self._stop is None and top is None and finish_reason is NOT_FINISHED
        if has_nothing_else and len(ids) == 1:
            self._last_id = token_id = ids[0]
            log_prob = None if log_probs is None else log_probs[0]
            piece = self._detokenizer.feed(token_id)
            token = Token(token_id, piece, log_prob, token_id in self._special_ids)
            if token.is_special and not piece:
                token.name = self._tokenizer.token_text(token_id)

            return [token]

        tokens: list[Token] = []
        num_spoken = self._num_spoken(ids, finish_reason)
        for n, token_id in enumerate(ids):
            if self.stop_string is not None:
                break

            piece = self._detokenizer.feed(token_id) if n < num_spoken else ""
            log_prob = None if log_probs is None else log_probs[n]
            token = Token(token_id, piece, log_prob, token_id in self._special_ids)
            if n >= num_spoken or (token.is_special and not piece):
                token.name = self._tokenizer.token_text(token_id)

            if self._stop is not None:
                token.raw_text = piece
                if self._num_unchecked > 0:
                    self._num_unchecked -= 1
                else:
                    token.text = self._stop.feed(piece)

            if top is not None:
                token.top = _alternatives(self._tokenizer, top[n])

            tokens.append(token)

        if ids:
            self._last_id = ids[-1]

        if finish_reason is not NOT_FINISHED:
            self._release(self._detokenizer.flush(), tokens)

        return tokens

    def _num_spoken(self, ids: Sequence[int], finish_reason: FinishReason) -> int:
        """Return how many of the tokens have a text: all but an end or stop token at the end."""
        if not ids:
            return 0

        is_end_token = finish_reason is FinishReason.END_ID
        is_stop_token = (
            finish_reason is FinishReason.STOP_WORDS and ids[-1] in self._silent_stop_ids
        )
        return len(ids) - (is_end_token or is_stop_token)

    def _release(self, piece: str, tokens: list[Token]) -> None:
        """Add the text that was held back: part of a character (also to `raw_text`), and part of a
        stop string.
        """
        text = piece
        if self._stop is not None:
            text = self._stop.feed(piece) + self._stop.flush()

        if text and not tokens:
            raw_text = None if self._stop is None else ""
            tokens.append(Token(self._last_id, "", raw_text=raw_text))

        if text:
            tokens[-1].text += text

        if tokens and tokens[-1].raw_text is not None:
            tokens[-1].raw_text += piece


def prompt_tokens(
    tokenizer: Tokenizer, prompt_ids: Sequence[int], log_probs: Sequence[PromptLogProb] | None
) -> list[Token]:
    """Return the prompt as Tokens (`prefill` on the wire), with log-probs if there are any.

    They are decoded as those of an answer that shows its special tokens, so a character that is cut
    between tokens stands in the last of them. Alternatives are decoded alone.
    """
    detokenizer = Detokenizer(tokenizer, _SHOWS_SPECIAL_TOKENS, ())
    special_ids = tokenizer.special_ids
    tokens: list[Token] = []
    for token_id in prompt_ids:
        text = detokenizer.feed(token_id)
        tokens.append(Token(token_id, text, None, token_id in special_ids))

    if tokens:
        tokens[-1].text += detokenizer.flush()

    for token, position in zip(tokens, log_probs or (), strict=False):
        token.log_prob = position.log_prob
        if position.top:
            token.top = _alternatives(tokenizer, position.top)

    return tokens


_SHOWS_SPECIAL_TOKENS = GenerationRequest(
    max_new_tokens=None, sampling=SamplingConfig(), skip_special_tokens=False
)


def _alternatives(tokenizer: Tokenizer, top: Sequence[TokenLogProb]) -> list[Token]:
    """Return the best tokens of one position, each decoded alone."""
    tokens: list[Token] = []
    for alternative in top:
        token_id = alternative.token_id
        text = tokenizer.token_text(token_id)
        is_special = token_id in tokenizer.special_ids
        tokens.append(Token(token_id, text, alternative.log_prob, is_special))

    return tokens


class Detokenizer:
    """Turns the token ids of one answer into text: `feed` each, then `flush`.

    A piece of text never ends inside a character, and the pieces of an answer concatenate to its
    whole text. That is what the tokenizer decodes from prompt and answer together, without what it
    decodes from only the prompt. Bytes that are not UTF-8 become U+FFFD. `tokenizers` would replace
    a whole run of byte-fallback tokens, including valid characters before the bad byte, which a
    stream has already sent.

    With `spaces_between_special_tokens` (the default) special tokens that are shown are spelled by
    the decoder. Most decoders put no space between two of them, and some join all tokens with
    spaces. With False a special token directly after another has its name in the vocabulary,
    without a space.
    """

    __slots__ = (
        "_bare",
        "_is_at_start",
        "_is_behind_special",
        "_is_plain",
        "_pending",
        "_token_texts",
        "_tokenizer",
    )

    def __init__(
        self, tokenizer: Tokenizer, request: GenerationRequest, prompt_ids: Sequence[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._token_texts = tokenizer.token_texts
        if request.skip_special_tokens:
            self._token_texts = tokenizer.token_texts_without_special

        # The first bytes of a character.
        self._pending = b""
        # After a prompt without visible text the answer is at the start, where decoders trim a
        # space.
        self._is_at_start = not any(self._token_texts[token_id] for token_id in prompt_ids)
        self._bare = not (request.skip_special_tokens or request.spaces_between_special_tokens)
        self._is_behind_special = bool(prompt_ids) and prompt_ids[-1] in tokenizer.special_ids
        self._is_plain = not self._is_at_start and not self._bare

    def feed(self, token_id: int) -> str:
        """Return the text that this token completes, "" while there is only a part of a
        character.
        """
        piece = self._token_texts[token_id] if self._is_plain else self._unusual_text(token_id)
        if isinstance(piece, str):
            if not self._pending:
                return piece

            piece = piece.encode()

        data = self._pending + piece
        text, num_used = codecs.utf_8_decode(data, "replace", False)
        self._pending = data[num_used:]
        return text

    def flush(self) -> str:
        """Return U+FFFD for a character that is still incomplete, else ""."""
        text = self._pending.decode(errors="replace")
        self._pending = b""
        return text

    def _unusual_text(self, token_id: int) -> str | bytes:
        piece = self._token_texts[token_id]
        if self._bare:
            is_special = token_id in self._tokenizer.special_ids
            if is_special and self._is_behind_special:
                piece = self._tokenizer.token_name(token_id)

            self._is_behind_special = is_special

        if not self._is_at_start or not piece:
            return piece

        self._is_at_start = False
        self._is_plain = not self._bare
        if isinstance(piece, bytes):
            return piece

        return self._tokenizer.decode([token_id])


class StopStrings:
    """`feed` returns the text to pass on. `matched` is the stop string that was found, after which
    no text follows.

    The cuts between the pieces of a text make no difference. The stop string that is complete first
    ends the answer; if two end at the same character, the longer one does. Only text that may still
    become a stop string is held back: the longest end of the text that is the beginning of one. How
    many there are hardly counts in how long it takes.
    """

    __slots__ = ("_first_char", "_held", "_is_included", "_max_held", "_stops", "matched")

    def __init__(self, stops: Sequence[str], include_stop_str_in_output: bool = False) -> None:
        self._stops = sorted(stops)
        self._is_included = include_stop_str_in_output
        first_chars = [re.escape(stop[0]) for stop in stops]
        self._first_char = re.compile("[" + "".join(first_chars) + "]")
        self._max_held = max(map(len, stops)) - 1
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """Return the text that cannot be part of a stop string any more, or all text before a
        complete one.
        """
        if self.matched is not None:
            return ""

        if not self._held and self._first_char.search(text) is None:
            return text

        num_searched = len(self._held)
        text = self._held + text
        self._held = ""
        matches: list[tuple[int, int, str]] = []
        for stop in self._stops:
            start = text.find(stop, max(0, num_searched - len(stop) + 1))
            if start >= 0:
                matches.append((start + len(stop), start, stop))

        if matches:
            end, start, self.matched = min(matches)
            return text[: end if self._is_included else start]

        end = self._begin_of_stop(text)
        self._held = text[end:]
        return text[:end]

    def _begin_of_stop(self, text: str) -> int:
        """Return where the longest end of the text begins that may become a stop string."""
        for match in self._first_char.finditer(text, max(0, len(text) - self._max_held)):
            if self._begins_with(text[match.start() :]):
                return match.start()

        return len(text)

    def _begins_with(self, beginning: str) -> bool:
        """Whether a stop string begins so. Such a one comes right behind the place of `beginning`
        in their order.
        """
        place = bisect_left(self._stops, beginning)
        return place < len(self._stops) and self._stops[place].startswith(beginning)

    def flush(self) -> str:
        """Return the text that was held back and did not become a stop string."""
        text = self._held
        self._held = ""
        return text
