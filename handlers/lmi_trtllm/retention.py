"""Translates how long a request wants its keys and values to be kept."""

from __future__ import annotations

from datetime import timedelta

from tensorrt_llm.llmapi import KvCacheRetentionConfig as TheirConfig

from lmi.executor import KvCacheRetentionConfig, TokenRangeRetentionConfig


def retention(config: KvCacheRetentionConfig) -> TheirConfig:
    """TensorRT-LLM's form, where a duration is a timedelta. Ours has refused ranges that overlap and bad priorities."""
    return TheirConfig(
        token_range_retention_configs=[_range(one) for one in config.token_range_retention_configs],
        decode_retention_priority=config.decode_retention_priority,
        decode_duration_ms=_duration(config.decode_duration_ms),
    )


def _range(one: TokenRangeRetentionConfig) -> TheirConfig.TokenRangeRetentionConfig:
    return TheirConfig.TokenRangeRetentionConfig(
        token_start=one.token_start,
        token_end=one.token_end,
        priority=one.priority,
        duration_ms=_duration(one.duration_ms),
    )


def _duration(duration_ms: int | None) -> timedelta | None:
    return None if duration_ms is None else timedelta(milliseconds=duration_ms)
