"""llguidance's form of a vocabulary."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from llguidance import LLTokenizer, TokenizerWrapper

from lmi.executor import GuidedDecodingConfig

BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
WORD = "\u2581"  # marks the begin of a word


def new_tokenizer(config: GuidedDecodingConfig, vocab_size: int) -> LLTokenizer:
    """`vocab_size` is the width of the logits, which may be wider than the vocabulary. It may also be narrower."""
    end_ids = [one for one in config.stop_token_ids or () if 0 <= one < len(config.encoded_vocab)] or None
    num_tokens = max(vocab_size, len(config.encoded_vocab))
    if config.tokenizer_str is not None:
        with suppress(ValueError):  # of a decoder that llguidance does not know
            return LLTokenizer(config.tokenizer_str, n_vocab=num_tokens, eos_token=end_ids)
    greedy = _Greedy(config, end_ids)
    return LLTokenizer(TokenizerWrapper(greedy), n_vocab=num_tokens, eos_token=end_ids)


class _Greedy:
    """A tokenizer of which only the texts of tokens are known. It takes the longest token each time."""

    bos_token_id = None

    def __init__(self, config: GuidedDecodingConfig, end_ids: list[int] | None) -> None:
        described = json.loads(config.tokenizer_str or "{}")
        special = {token["id"] for token in described.get("added_tokens", ()) if token["special"]}.union(end_ids or ())
        has_words = bool({"Metaspace", "ByteFallback"} & set(_decoders(described.get("decoder"))))
        self.tokens = [
            b"" if token_id in special else _written(text, has_words=has_words)
            for token_id, text in enumerate(config.encoded_vocab)
        ]
        self.special_token_ids = sorted(special)
        self.eos_token_id = end_ids[0] if end_ids else next((n for n, text in enumerate(self.tokens) if not text), 0)
        self._ids = {text: token_id for token_id, text in enumerate(self.tokens) if text}
        self._max_bytes = max(map(len, self.tokens))

    def __call__(self, text: bytes) -> list[int]:
        ids, at = [], 0
        while at < len(text):
            ends = range(min(len(text), at + self._max_bytes), at, -1)
            end = next((end for end in ends if text[at:end] in self._ids), None)
            if end is None:
                break
            ids.append(self._ids[text[at:end]])
            at = end
        return ids


def _written(text: str, *, has_words: bool) -> bytes:
    if has_words:
        return bytes.fromhex(found[1]) if (found := BYTE.fullmatch(text)) else text.replace(WORD, " ").encode()
    return text.encode("utf-8", "ignore")


def _decoders(decoder: Mapping[str, Any] | None) -> Iterator[str]:
    if decoder is not None:
        yield decoder["type"]
        for one in decoder.get("decoders", ()):
            yield from _decoders(one)
