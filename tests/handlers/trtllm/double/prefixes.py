"""Which first tokens of a prompt the KV cache has. It keeps whole answers, the latest ones."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from typing import Any

MAX_KEPT = 64


class Prefixes:
    """A key says who may share: the salt and the adapter of a request."""

    def __init__(
        self, *, is_enabled: bool, has_parts: bool, tokens_per_block: int, max_blocks: int
    ) -> None:
        """`has_parts`: a block that two prompts share in part is copied."""
        self._is_enabled = is_enabled
        self._tokens_per_block = tokens_per_block
        self._max_blocks = max_blocks
        self._unit = 1 if has_parts else tokens_per_block
        self._kept: deque[tuple[Hashable, Sequence[int]]] = deque(maxlen=MAX_KEPT)

    def note(self, key: Hashable, tokens: Sequence[int]) -> None:
        if self._is_enabled:
            self._kept.append((key, tokens))

    def num_known(self, key: Hashable, prompt: Sequence[int]) -> int:
        """How many tokens of a prompt are there. Its last one is always computed."""
        longest = max(
            (_num_equal(prompt, tokens) for key_kept, tokens in self._kept if key_kept == key),
            default=0,
        )
        longest = min(longest, len(prompt) - 1)
        return longest - longest % self._unit

    def stats(self, num_tokens: int) -> dict[str, Any]:
        num_used = min(self._max_blocks, -(-num_tokens // self._tokens_per_block))
        return {
            "maxNumBlocks": self._max_blocks,
            "freeNumBlocks": self._max_blocks - num_used,
            "usedNumBlocks": num_used,
            "tokensPerBlock": self._tokens_per_block,
            "allocTotalBlocks": num_used,
            "allocNewBlocks": num_used,
            "reusedBlocks": 0,
            "missedBlocks": 0,
            "cacheHitRate": 0.0,
        }


def _num_equal(first: Sequence[int], second: Sequence[int]) -> int:
    num = 0
    for token, other_token in zip(first, second, strict=False):
        if token != other_token:
            break

        num += 1

    return num
