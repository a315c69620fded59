"""Random answers that follow a guide, as a model might write them. Closing tokens are drawn often,
so that they end.
"""

from __future__ import annotations

import json
import random
from functools import cache

from llguidance import LLMatcher, LLTokenizer

from handlers.guides.matcher import new_matcher, reason_of
from handlers.guides.text import text_of
from handlers.guides.tokenizer import new_tokenizer
from handlers.guides.tokenizer_files import read_vocabulary
from lmi.executor import GuidedDecodingParams, GuideType

VOCAB_SIZE = 1024
MAX_TOKENS = 400


@cache
def tokenizer() -> LLTokenizer:
    return new_tokenizer(read_vocabulary("handlers/lmi_dist/demo"), VOCAB_SIZE)


@cache
def closing() -> frozenset[int]:
    texts = (b'"', b"}", b"]", b'"}', b'"]', b"}}")
    return frozenset(
        token_id for token_id in range(VOCAB_SIZE) if tokenizer().decode_bytes([token_id]) in texts
    )


def matcher(kind: GuideType, guide: str, *, is_compact: bool = True) -> LLMatcher:
    """Raises ValueError for a guide that is refused."""
    params = GuidedDecodingParams(kind, guide)
    return new_matcher(tokenizer(), text_of(tokenizer(), params, is_compact=is_compact))


def matcher_of_schema(schema: object, *, is_compact: bool = True) -> LLMatcher:
    return matcher(GuideType.JSON_SCHEMA, json.dumps(schema), is_compact=is_compact)


def accepts(matcher: LLMatcher, text: str) -> bool:
    copy = matcher.deep_copy()
    ids = tokenizer().tokenize_bytes(text.encode())
    return copy.try_consume_tokens(ids) == len(ids) and copy.is_accepting() and not copy.is_error()


def walk(matcher: LLMatcher, choice: random.Random) -> str | None:
    """A whole answer, or None if it has not come to its end."""
    copy = matcher.deep_copy()
    ids = []
    ends = set(tokenizer().eos_tokens)
    for place in range(MAX_TOKENS):
        mask = int.from_bytes(copy.compute_bitmask(), "little")
        assert not copy.is_error(), reason_of(copy)
        allowed = [
            token_id
            for token_id in range(VOCAB_SIZE)
            if mask >> token_id & 1 and token_id not in ends
        ]
        if copy.is_accepting() and (not allowed or choice.random() < 0.5):
            return tokenizer().decode_bytes(ids).decode()

        ids.append(
            choice.choice([token_id for token_id in allowed if token_id in closing()] or allowed)
        )
        if choice.random() > 0.3 + place / MAX_TOKENS:
            ids[-1] = choice.choice(allowed)

        assert copy.consume_token(ids[-1]), reason_of(copy)

    return None
