"""How long a request wants its blocks to be kept, block by block. Plain Python."""

from __future__ import annotations

from typing import NamedTuple

from lmi.executor import DEFAULT_RETENTION_PRIORITY, KvCacheRetentionConfig


class Retention(NamedTuple):
    """The priority of an idle block, until it was idle for `duration_s`. Then it is the default again."""

    priority: int
    duration_s: float | None = None


def retentions(
    config: KvCacheRetentionConfig, num_prompt_tokens: int, num_tokens: int, tokens_per_block: int
) -> list[Retention | None]:
    """What a request says of each of its blocks: what it says of the block's first token. None: nothing."""
    return [_of_token(config, token, num_prompt_tokens) for token in range(0, num_tokens, tokens_per_block)]


def _of_token(config: KvCacheRetentionConfig, token: int, num_prompt_tokens: int) -> Retention | None:
    if token >= num_prompt_tokens:
        return _retention(config.decode_retention_priority, config.decode_duration_ms)
    for one in config.token_range_retention_configs:
        if one.token_start <= token and (one.token_end is None or token < one.token_end):
            return _retention(one.priority, one.duration_ms)
    return None


def _retention(priority: int, duration_ms: int | None) -> Retention:
    is_bounded = duration_ms is not None and priority != DEFAULT_RETENTION_PRIORITY
    return Retention(priority, duration_ms / 1000 if is_bounded and duration_ms is not None else None)
