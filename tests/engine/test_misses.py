"""A changing beginning in front of a long prompt is told once, and nothing else is."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from lmi.engine.misses import MAX_KNOWN_WINDOWS, BeginningWatch
from lmi.executor import LoraConfig, Request

SYSTEM = random.Random(1).choices(range(30_000), k=2000)
OTHER = random.Random(2).choices(range(30_000), k=2000)


def prompt(*parts: Sequence[int], salt: str | None = None, adapter: str | None = None) -> Request:
    token_ids = tuple(token_id for part in parts for token_id in part)
    lora = None if adapter is None else LoraConfig(adapter)
    return Request(token_ids, 1, cache_salt=salt, lora_config=lora)


def num_told(
    caplog: pytest.LogCaptureFixture, *prompts: Request, num_cached_tokens: int = 16
) -> int:
    watch = BeginningWatch()
    for request in prompts:
        owner = request.lora_config and request.lora_config.name, request.cache_salt
        watch.note(request.input_token_ids, owner, num_cached_tokens)

    return len(
        [record for record in caplog.records if "differ within their first" in record.message]
    )


def test_a_prompt_that_shares_all_but_its_beginning_is_told_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    headers = ([5, 6, 7], [5, 6, 8, 9], [5, 6, 1])
    assert num_told(caplog, *(prompt([1] * 40, header, SYSTEM) for header in headers)) == 1
    assert "of one of 2044 tokens 16 were cached" in caplog.text


@pytest.mark.parametrize(
    "prompts",
    [
        pytest.param((prompt([5], SYSTEM), prompt([6], OTHER)), id="other prompts"),
        pytest.param((prompt(SYSTEM, [5]), prompt(SYSTEM, [6])), id="other ends"),
        pytest.param((prompt([5], SYSTEM[:900]), prompt([6], SYSTEM[:900])), id="short prompts"),
        pytest.param(
            (prompt([5], SYSTEM, salt="a"), prompt([6], SYSTEM, salt="b")), id="other salts"
        ),
        pytest.param((prompt([5], SYSTEM, adapter="a"), prompt([6], SYSTEM)), id="other adapters"),
    ],
)
def test_prompts_that_could_not_have_shared_more_are_not_told(
    caplog: pytest.LogCaptureFixture, prompts: tuple[Request, ...]
) -> None:
    assert num_told(caplog, *prompts) == 0


def test_a_prompt_whose_beginning_was_cached_is_not_told(caplog: pytest.LogCaptureFixture) -> None:
    assert num_told(caplog, prompt([5], SYSTEM), prompt([6], SYSTEM), num_cached_tokens=1024) == 0


def test_the_oldest_prompts_are_forgotten(caplog: pytest.LogCaptureFixture) -> None:
    draw = random.Random(3)
    other_prompts = [prompt(draw.choices(range(30_000), k=1200)) for _ in range(MAX_KNOWN_WINDOWS)]
    assert num_told(caplog, prompt([5], SYSTEM), *other_prompts, prompt([6], SYSTEM)) == 0
