"""The size of a KV cache that no option gives."""

from __future__ import annotations

import pytest

from handlers.base.cache_budget import MIN_TOKENS, default_budget


@pytest.mark.parametrize(
    ("memory_bytes", "num_tokens"),
    [(1 << 40, 64 * 2048), (4 * 100 * 5000, 5000), (1, MIN_TOKENS)],
)
def test_the_default_budget_fits_all_sequences_in_a_quarter_of_memory(
    memory_bytes: int, num_tokens: int
) -> None:
    assert default_budget(64, 100_000, token_bytes=100, memory_bytes=memory_bytes) == num_tokens


def test_the_default_budget_of_a_short_context_is_the_context() -> None:
    assert default_budget(8, 512, token_bytes=1, memory_bytes=1 << 40) == 8 * 512
