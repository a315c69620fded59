"""The largest batch that pays, by how long steps of each size take."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from handlers.lmi_dist import batch
from handlers.lmi_dist.batch import choose_batch, measured
from handlers.lmi_dist.executor import EmbeddedExecutor
from handlers.lmi_dist.loading import load_runner
from lmi.settings.config import EngineConfig
from tests.tiny_models import tiny_model


class Steps:
    """Steps of a machine that reads weights in `read_s`, and computes a row in `row_s`."""

    def __init__(
        self, read_s: float, row_s: float, disturbed: Callable[[int], float] = lambda number: 0.0
    ) -> None:
        self.sizes: list[int] = []
        self._read_s = read_s
        self._row_s = row_s
        self._disturbed = disturbed

    def __call__(self, num_rows: int) -> float:
        self.sizes.append(num_rows)
        return max(self._read_s, num_rows * self._row_s) + self._disturbed(len(self.sizes))


# A large one, bound by reading its weights: each row more is nearly free
# The same up to 20 rows: 32 make 1.6 times the tokens of 16, 64 no more than those
@pytest.mark.parametrize(
    ("read_s", "row_s", "size"),
    [
        # A small model: the gap stays short in any case
        (0.001, 0.0001, 64),
        # A real one on two cores, bound by what it computes from five rows on
        (0.015, 0.003, 16),
        (0.020, 0.007, 8),
        (
            0.200,
            0.003,
            64,
        ),
        (
            0.200,
            0.010,
            32,
        ),
        # Nothing pays, and a step takes long
        (2.000, 0.5, 8),
    ],
)
def test_a_batch_grows_while_its_gap_is_short_or_it_makes_more_tokens(
    read_s: float, row_s: float, size: int
) -> None:
    choice = choose_batch(Steps(read_s, row_s), 8, 64, budget_s=10.0)
    assert choice.num_sequences == size
    assert "ms" in choice.why


def test_a_small_model_is_measured_once() -> None:
    steps = Steps(0.0005, 0.00005)
    assert choose_batch(steps, 8, 64, budget_s=0.3).num_sequences == 64
    assert steps.sizes == [8]


def test_a_step_that_lost_its_core_says_little() -> None:
    steps = Steps(0.015, 0.001, disturbed=lambda number: 0.1 if number in (1, 4) else 0.0)
    assert choose_batch(steps, 8, 64, budget_s=10.0).num_sequences == 32


def test_a_step_that_waits_for_a_core_is_no_longer_than_one_that_has_it() -> None:
    class Waiting:
        def forward(self, plan: Any) -> None:
            """Have no core for a while, as where other processes have them."""
            time.sleep(0.2)

    step_s = measured(Waiting())  # type: ignore[arg-type]
    assert step_s(8) < 0.1


def test_measuring_ends_with_its_time() -> None:
    steps = Steps(0.5, 0.001)
    choice = choose_batch(steps, 8, 64, budget_s=0.3)
    assert choice.num_sequences == 8 and "too long to try more" in choice.why
    assert steps.sizes == [8]


def test_a_batch_has_room_for_the_widest_beam_search() -> None:
    assert choose_batch(Steps(0.02, 0.02), 24, 64, budget_s=10.0).num_sequences == 24


@pytest.mark.parametrize(
    ("config", "size"),
    [
        (EngineConfig(), 16),
        # As a server has it
        (EngineConfig(max_num_sequences=64, is_batch_default=True), 16),
        (EngineConfig(max_num_sequences=64), 64),
        (EngineConfig(max_beam_width=24), 24),
    ],
)
def test_only_what_nobody_said_is_chosen(
    monkeypatch: pytest.MonkeyPatch, config: EngineConfig, size: int
) -> None:
    monkeypatch.setattr(batch, "measured", lambda runner: Steps(0.015, 0.003))
    _, limits = load_runner(str(tiny_model("llama")), config, lambda stage, share: None)
    assert limits.num_slots == size
    assert limits.num_cache_tokens == 64 * 1024, "the cache of prompts is as large as for 64"


def test_an_engine_says_which_batch_it_has_chosen_and_why_and_an_option_overrules_it() -> None:
    with EmbeddedExecutor(str(tiny_model("llama")), EngineConfig()) as executor:
        assert executor.info.max_num_sequences == 64
        assert (
            "a step of 64 takes" in executor.info.batch_reason
            or "tokens/s" in executor.info.batch_reason
        )

    with EmbeddedExecutor(str(tiny_model("llama")), EngineConfig(max_num_sequences=5)) as executor:
        assert (executor.info.max_num_sequences, executor.info.batch_reason) == (5, "")
