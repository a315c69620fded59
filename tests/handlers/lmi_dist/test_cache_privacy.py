"""What a client learns of others through the cache: nothing smaller than a part of 16 tokens.

A victim has asked once. A stranger knows how its prompt begins, guesses the next token, and reads
every count that an answer has.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from handlers.lmi_dist import Executor
from handlers.lmi_dist.cached_blocks import TOKENS_PER_PART
from handlers.lmi_dist.native_runner import TOKENS_PER_BLOCK
from lmi.executor import OutputConfig, Request, Result, SamplingConfig
from lmi.settings.config import EngineConfig
from tests.tiny_models import tiny_model

VICTIM = tuple(
    5 + position * 7 % 250 for position in range(TOKENS_PER_BLOCK + 2 * TOKENS_PER_PART + 8)
)
WRONG = 300
FILL = (301,) * (TOKENS_PER_BLOCK + 1)


@pytest.fixture(scope="module")
def executor() -> Iterator[Executor]:
    with Executor(tiny_model("llama"), EngineConfig()) as started:
        assert started.info.capabilities.batch_invariant, "the native kernels share blocks"
        yield started


def ask(executor: Executor, *prompt: int, salt: str | None = None) -> Result:
    request = Request(
        prompt,
        2,
        sampling_config=SamplingConfig(temperature=0),
        output_config=OutputConfig(return_perf_metrics=True),
        cache_salt=salt,
    )
    [response] = executor.await_responses(executor.enqueue_request(request), 60)
    return response.get_result()


def told(result: Result) -> tuple[int, int]:
    """All that an answer says of the cache."""
    assert result.request_perf_metrics is not None
    return result.num_cached_tokens, result.request_perf_metrics.num_reused_tokens


@pytest.mark.parametrize("salt", [None, "theirs"])
def test_a_right_guess_inside_of_a_part_tells_no_more_than_a_wrong_one(
    executor: Executor, salt: str | None
) -> None:
    """The last token of a part counts only with all others of it."""
    ask(executor, *VICTIM, salt=salt)
    for num_known in (
        num_known_tokens
        for num_known_tokens in range(len(VICTIM))
        if (num_known_tokens + 1) % TOKENS_PER_PART
    ):
        guesses = [
            told(ask(executor, *VICTIM[:num_known], guess, *FILL, salt=salt))
            for guess in (VICTIM[num_known], WRONG)
        ]
        assert guesses == [(num_known // TOKENS_PER_PART * TOKENS_PER_PART,) * 2] * 2, num_known


def test_strangers_compute_the_rest_of_a_part_again_and_those_of_one_salt_do_not(
    executor: Executor,
) -> None:
    def num_computed(salt: str | None) -> int:
        executor.get_latest_iteration_stats()
        ask(executor, *VICTIM, salt=salt)
        return sum(step.num_context_tokens for step in executor.get_latest_iteration_stats())

    alone = ask(executor, *VICTIM, salt="first").output_token_ids
    assert [num_computed(salt) for salt in (None, None)][1] == len(VICTIM) % TOKENS_PER_PART
    assert [num_computed(salt) for salt in ("ours", "ours")] == [len(VICTIM), 1]
    assert {
        salt: ask(executor, *VICTIM, salt=salt).output_token_ids for salt in (None, "ours")
    } == dict.fromkeys((None, "ours"), alone)
