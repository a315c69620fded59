"""The line about throughput."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from lmi.shared.state import Block, EngineRecord
from lmi.supervisor.throughput import Throughput

Look = Callable[[Throughput, list[EngineRecord], float], list[tuple[object, ...]]]
FIELDS = ("prefill_tokens_per_s", "decode_tokens_per_s", "running", "waiting", "kv_cache_usage")


@pytest.fixture
def engines(tmp_path: Path) -> list[EngineRecord]:
    return Block.create(tmp_path / "state", num_engines=2, num_frontends=1).engines


@pytest.fixture
def look(caplog: pytest.LogCaptureFixture) -> Look:
    """A function that looks at a time and returns what was said."""

    def look(
        throughput: Throughput, engines: list[EngineRecord], now: float
    ) -> list[tuple[object, ...]]:
        caplog.clear()
        with caplog.at_level(logging.INFO):
            throughput.look(engines, now)

        return [tuple(vars(line)[name] for name in FIELDS) for line in caplog.records]

    return look


def test_a_busy_interval_has_one_line_for_all_engines_and_an_idle_one_has_none(
    engines: list[EngineRecord], look: Look
) -> None:
    throughput = Throughput(10.0, 0.0)
    assert look(throughput, engines, 10) == []

    for engine in engines:
        engine.num_context_tokens = 600
        engine.num_generation_tokens = 50
        engine.num_running = 2
        engine.num_used_blocks = 1
        engine.max_num_blocks = 8

    assert look(throughput, engines, 19) == [], "the interval is not over"
    assert look(throughput, engines, 20) == [(120.0, 10.0, 4, 0, 0.125)]
    assert look(throughput, engines, 30) == [(0.0, 0.0, 4, 0, 0.125)], "they hang, which is no rest"

    for engine in engines:
        engine.num_running = 0

    assert look(throughput, engines, 40) == []
    assert look(throughput, engines[:1], 50) == [], "a model was unloaded"


def test_without_an_interval_nothing_is_said(engines: list[EngineRecord], look: Look) -> None:
    engines[0].num_running = 1
    assert look(Throughput(None, 0.0), engines, 100) == []
