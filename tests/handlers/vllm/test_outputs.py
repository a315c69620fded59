"""Tokens and log-probs of the real engine against transformers on the same weights."""

from __future__ import annotations

from typing import Any

import pytest

from lmi.executor import Executor, OutputConfig
from tests.handlers.vllm.asking import PROMPT, result
from tests.tiny_models import tiny_model

pytestmark = pytest.mark.vllm

NUM_TOKENS = 24
PROMPTS = {
    "one token": (17,),
    "short": PROMPT,
    "over a block of the cache": tuple((7 * step) % 300 + 10 for step in range(200)),
}
TOLERANCE = 1e-3
TIE = 1e-4


@pytest.fixture(scope="module")
def model() -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_model("llama_wide")).eval()


def log_probs_of(model: Any, token_ids: list[int]) -> Any:
    """The log-probs of the next token at each position: (num_tokens, vocab)."""
    import torch

    with torch.inference_mode():
        return model(torch.tensor([token_ids])).logits[0].float().log_softmax(-1)


@pytest.mark.parametrize("name", PROMPTS)
def test_greedy_tokens_and_their_log_probs_are_those_of_transformers(
    engine: Executor, model: Any, name: str
) -> None:
    prompt = PROMPTS[name]
    output = OutputConfig(return_log_probs=True, num_top_log_probs=5)
    got = result(engine, input_token_ids=prompt, max_tokens=NUM_TOKENS, output_config=output)
    ids = got.output_token_ids[0]
    expected = log_probs_of(model, [*prompt, *ids])[len(prompt) - 1 : -1]
    assert got.log_probs is not None and got.top_log_probs is not None and len(ids) == NUM_TOKENS

    for row, token_id, log_prob, top in zip(
        expected, ids, got.log_probs[0], got.top_log_probs[0], strict=True
    ):
        assert row[token_id] >= row.max() - TIE, "not the best token"
        assert log_prob == pytest.approx(float(row[token_id]), abs=TOLERANCE)
        assert [top_token.log_prob for top_token in top] == pytest.approx(
            row.topk(5).values.tolist(), abs=TOLERANCE
        )
        assert [top_token.log_prob for top_token in top] == pytest.approx(
            [float(row[top_token.token_id]) for top_token in top], abs=TOLERANCE
        )

    assert got.cum_log_probs == pytest.approx([sum(got.log_probs[0])])


@pytest.mark.parametrize("num_top", [0, 3])
@pytest.mark.parametrize("name", PROMPTS)
def test_log_probs_of_the_prompt_are_those_of_transformers(
    engine: Executor, model: Any, name: str, num_top: int
) -> None:
    prompt = PROMPTS[name]
    got = result(
        engine, input_token_ids=prompt, output_config=OutputConfig(num_prompt_log_probs=num_top)
    )
    assert got.prompt_log_probs is not None and len(got.prompt_log_probs) == len(prompt)

    first, *later_log_probs = got.prompt_log_probs
    assert first.log_prob is None and first.top == []

    for row, token_id, prompt_log_prob in zip(
        log_probs_of(model, list(prompt)), prompt[1:], later_log_probs, strict=False
    ):
        assert prompt_log_prob.log_prob == pytest.approx(float(row[token_id]), abs=TOLERANCE)
        best = row.topk(num_top).values.tolist()
        assert [top.log_prob for top in prompt_log_prob.top] == pytest.approx(best, abs=TOLERANCE)


def test_a_prompt_whose_blocks_are_known_still_gets_its_log_probs(engine: Executor) -> None:
    prompt = PROMPTS["over a block of the cache"]
    result(engine, input_token_ids=prompt)
    got = result(engine, input_token_ids=prompt, output_config=OutputConfig(num_prompt_log_probs=0))
    assert got.prompt_log_probs is not None and len(got.prompt_log_probs) == len(prompt)
