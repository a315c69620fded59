"""SmolLM2-135M-Instruct behind a whole server: what a model of our own making cannot show."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence

import pytest

from tests.real_model import smollm2
from tests.served import Server, serve

NUM_TOKENS = 24
CONVERSATIONS: tuple[list[dict[str, str]], ...] = (
    [{"role": "user", "content": "What is the capital of France?"}],
    [{"role": "system", "content": "Answer in one word."}, {"role": "user", "content": "日本の首都は? 🗼"}],
    [
        {"role": "user", "content": "Name a colour."},
        {"role": "assistant", "content": "Blue."},
        {"role": "user", "content": "Write a Python function that adds 12345 and 67890."},
    ],
)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serve(smollm2(), "option.model_name=smollm2", "frontend_workers=1") as server:
        yield server


@pytest.fixture(scope="module")
def greedy_ids() -> Callable[[list[dict[str, str]]], tuple[list[int], list[int]]]:
    """Greedy decoding by transformers: the ids of a conversation, and those of its answer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # the server computes in float32 from the weights in bfloat16 that the folder has
    model = AutoModelForCausalLM.from_pretrained(smollm2(), dtype=torch.bfloat16).float()
    tokenizer = AutoTokenizer.from_pretrained(smollm2())

    def generate(messages: list[dict[str, str]]) -> tuple[list[int], list[int]]:
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")
        prompt_ids = prompt["input_ids"]
        ids = model.generate(prompt_ids, max_new_tokens=NUM_TOKENS, do_sample=False)
        num_prompt_tokens = prompt_ids.shape[1]
        return ids[0, :num_prompt_tokens].tolist(), ids[0, num_prompt_tokens:].tolist()

    return generate


@pytest.mark.parametrize("messages", CONVERSATIONS, ids=("plain", "unicode", "turns"))
def test_a_chat_has_the_tokens_of_transformers(
    server: Server,
    greedy_ids: Callable[[Sequence[dict[str, str]]], tuple[list[int], list[int]]],
    messages: list[dict[str, str]],
) -> None:
    prompt_ids, answer_ids = greedy_ids(messages)

    body = {"messages": messages, "max_tokens": NUM_TOKENS, "temperature": 0, "return_token_ids": True}
    response = server.post(body, "/v1/chat/completions")
    answer = json.loads(response.body)

    assert response.status == 200
    assert answer["prompt_token_ids"] == prompt_ids
    assert answer["choices"][0]["token_ids"] == answer_ids
