"""Turns token ids into text, one token at a time.

A piece of text never ends inside a character, and the pieces of an answer concatenate to its whole text. That text is
what the tokenizer decodes from prompt and answer together, without what it decodes from only the prompt. Bytes that are
not UTF-8 become U+FFFD. `tokenizers` would replace a whole run of byte-fallback tokens, including valid characters
before the bad byte, which a stream has already sent. Nothing here does I/O or reads a clock.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from lmi.text.tokenizer import Tokenizer


class Detokenizer:
    """The text of one answer: `feed` its tokens, then `flush`.

    With `spaces_between_special_tokens` (the default) special tokens that are shown are spelled by the decoder. Most
    decoders put no space between two of them, and some join all tokens with spaces. With False a special token directly
    after another has its name in the vocabulary, without a space.
    """

    __slots__ = ("_bare", "_is_at_start", "_is_behind_special", "_is_plain", "_pending", "_token_texts", "_tokenizer")

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int] = (),
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._token_texts = tokenizer.token_texts_without_special if skip_special_tokens else tokenizer.token_texts
        self._pending = b""  # the first bytes of a character
        # After a prompt without visible text the answer is at the start, where decoders trim a space.
        self._is_at_start = not any(self._token_texts[token_id] for token_id in prompt_ids)
        self._bare = not (skip_special_tokens or spaces_between_special_tokens)
        self._is_behind_special = bool(prompt_ids) and prompt_ids[-1] in tokenizer.special_ids
        self._is_plain = not self._is_at_start and not self._bare

    def feed(self, token_id: int) -> str:
        """Return the text that this token completes, "" while there is only a part of a character."""
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
        text, self._pending = self._pending.decode(errors="replace"), b""
        return text

    def _unusual_text(self, token_id: int) -> str | bytes:
        piece = self._token_texts[token_id]
        if self._bare:
            is_special = token_id in self._tokenizer.special_ids
            if is_special and self._is_behind_special:
                piece = self._tokenizer.token_name(token_id)
            self._is_behind_special = is_special
        if self._is_at_start and piece:
            self._is_at_start = False
            self._is_plain = not self._bare
            return self._tokenizer.decode([token_id]) if isinstance(piece, str) else piece
        return piece
