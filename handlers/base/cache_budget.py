"""How many tokens of keys and values an engine keeps where no option says it."""

# The least cache: one block.
MIN_TOKENS = 16


def default_budget(
    max_num_sequences: int, max_length: int, token_bytes: int, memory_bytes: int
) -> int:
    """Tokens of cache: room for all sequences at 2048 tokens each, at most a quarter of memory, at
    least one block.
    """
    num_useful_tokens = max_num_sequences * min(max_length, 2048)
    num_affordable_tokens = memory_bytes // 4 // token_bytes
    return max(min(num_useful_tokens, num_affordable_tokens), MIN_TOKENS)
