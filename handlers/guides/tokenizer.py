"""The vocabulary as llguidance reads it."""

import json
import re
from contextlib import suppress

from llguidance import LLTokenizer, TokenizerWrapper

from lmi.executor import GuidedDecodingConfig

BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# It marks the begin of a word.
WORD = "\u2581"
# The decoders of tokens that are written with both.
WORD_DECODER = re.compile('"type": "(Metaspace|ByteFallback)"')


def new_tokenizer(config: GuidedDecodingConfig, vocab_size: int) -> LLTokenizer:
    """`vocab_size` is the width of the logits, which may be wider than the vocabulary. It may also
    be narrower.
    """
    num_texts = len(config.encoded_vocab)
    stop_ids = config.stop_token_ids or ()
    end_ids = [token_id for token_id in stop_ids if 0 <= token_id < num_texts] or None

    num_tokens = max(vocab_size, num_texts)
    if config.tokenizer_str is not None:
        # llguidance may not know the tokenizer's decoder.
        with suppress(ValueError):
            return LLTokenizer(config.tokenizer_str, n_vocab=num_tokens, eos_token=end_ids)

    greedy = _Greedy(config, end_ids)
    return LLTokenizer(TokenizerWrapper(greedy), n_vocab=num_tokens, eos_token=end_ids)


class _Greedy:
    """A tokenizer of which only the texts of tokens are known, with the names that llguidance's
    wrapper asks for. It takes the longest token each time.
    """

    bos_token_id = None

    def __init__(self, config: GuidedDecodingConfig, end_ids: list[int] | None) -> None:
        tokenizer = json.loads(config.tokenizer_str or "{}")
        special_ids = set(end_ids or ())
        for token in tokenizer.get("added_tokens", ()):
            if token["special"]:
                special_ids.add(token["id"])

        decoder = json.dumps(tokenizer.get("decoder"))
        has_words = WORD_DECODER.search(decoder) is not None

        self.tokens: list[bytes] = []
        for token_id, text in enumerate(config.encoded_vocab):
            is_special = token_id in special_ids
            self.tokens.append(b"" if is_special else _bytes_of(text, has_words=has_words))

        self.special_token_ids = sorted(special_ids)
        if end_ids:
            self.eos_token_id = end_ids[0]
        else:
            self.eos_token_id = self.tokens.index(b"") if b"" in self.tokens else 0

        self._ids = {text: token_id for token_id, text in enumerate(self.tokens) if text}
        self._max_bytes = max(map(len, self.tokens))

    def __call__(self, text: bytes) -> list[int]:
        ids = []
        begin = 0
        while begin < len(text):
            token = self._longest_token(text[begin : begin + self._max_bytes])
            if not token:
                break

            ids.append(self._ids[token])
            begin += len(token)

        return ids

    def _longest_token(self, text: bytes) -> bytes:
        """The longest token with which a text begins, b"" if there is none."""
        for length in range(len(text), 0, -1):
            if text[:length] in self._ids:
                return text[:length]

        return b""


def _bytes_of(text: str, *, has_words: bool) -> bytes:
    """What a token writes."""
    if not has_words:
        return text.encode("utf-8", "ignore")

    byte = BYTE.fullmatch(text)
    if byte is not None:
        return bytes.fromhex(byte[1])

    return text.replace(WORD, " ").encode()
