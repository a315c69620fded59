"""Token ids to text, one token at a time.

A piece of text never ends in half a character, and the pieces of an answer concatenate to exactly its whole text. That
text is what the tokenizer decodes from prompt and answer together, less what it decodes from the prompt alone. Bytes
that are no UTF-8 become U+FFFD as in any lenient decoder; `tokenizers` would blank a whole run of byte-fallback tokens,
with the sound characters before the bad byte, which no stream can take back. Pure: no I/O, no clock.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from lmi.text.tokenizer import Tokenizer


class Detokenizer:
    """The text of one answer: `feed` its tokens, then `flush`.

    `spaces_between_special_tokens` True (the default): special tokens that are shown read as the decoder
    spells them. Most put no space between two of them, some join all tokens by spaces. False: a special token
    right behind another one is spelled bare, so there is never a space between.
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
        # Behind a prompt that shows no text the answer stands at the start, where decoders trim a space.
        self._is_at_start = not any(self._token_texts[token_id] for token_id in prompt_ids)
        self._bare = not (skip_special_tokens or spaces_between_special_tokens)
        self._is_behind_special = bool(prompt_ids) and prompt_ids[-1] in tokenizer.special_ids
        self._is_plain = not self._is_at_start and not self._bare

    def feed(self, token_id: int) -> str:
        """The text that this token completes; "" while it holds only a part of a character."""
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
        """What is left: U+FFFD for a character that never became whole."""
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
