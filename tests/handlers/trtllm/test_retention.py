"""How long keys and values are kept, in TensorRT-LLM's form."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest

from lmi.executor import KvCacheRetentionConfig, TokenRangeRetentionConfig
from tests.handlers.trtllm.double import loaded


@pytest.fixture(params=["main-2025-10", "main-2026-08"])
def retention(request: pytest.FixtureRequest) -> Iterator[Any]:
    with loaded(request.param):
        from handlers.lmi_trtllm.retention import retention

        yield retention


def test_ranges_keep_their_bounds_and_durations_become_timedeltas(retention: Any) -> None:
    ranges = (TokenRangeRetentionConfig(0, 8, 90, 1500), TokenRangeRetentionConfig(8, None, 10))
    made = retention(KvCacheRetentionConfig(ranges, 70, 30_000))
    seen = [
        (one.token_start, one.token_end, one.priority, one.duration_ms) for one in made.token_range_retention_configs
    ]
    assert seen == [(0, 8, 90, timedelta(seconds=1.5)), (8, None, 10, None)]
    assert (made.decode_retention_priority, made.decode_duration_ms) == (70, timedelta(seconds=30))


def test_the_defaults_are_those_of_the_contract(retention: Any) -> None:
    made = retention(KvCacheRetentionConfig())
    assert (made.decode_retention_priority, made.decode_duration_ms) == (35, None)
    assert list(made.token_range_retention_configs) == []


def test_overlapping_ranges_do_not_reach_the_engine() -> None:
    with pytest.raises(ValueError, match="must not overlap"):
        KvCacheRetentionConfig((TokenRangeRetentionConfig(0, 8), TokenRangeRetentionConfig(7, 9)))
