"""The default size of a KV cache."""

from __future__ import annotations

MIN_TOKENS = 16  # one block


def default_budget(max_num_sequences: int, max_length: int, token_bytes: int, memory_bytes: int) -> int:
    """Tokens of cache: room for all sequences at 2048 tokens each, at most a quarter of memory, at least one block."""
    wanted = max_num_sequences * min(max_length, 2048)
    return max(min(wanted, memory_bytes // 4 // token_bytes), MIN_TOKENS)
