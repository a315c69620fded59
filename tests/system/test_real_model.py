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
    [
        {"role": "system", "content": "Answer in one word."},
        {"role": "user", "content": "日本の首都は? 🗼"},
    ],
    [
        {"role": "user", "content": "Name a colour."},
        {"role": "assistant", "content": "Blue."},
        {"role": "user", "content": "Write a Python function that adds 12345 and 67890."},
    ],
)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    options = ("option.model_name=smollm2", "option.dtype=fp32", "frontend_workers=1")
    with serve(smollm2(), *options) as server:
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
        prompt = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt"
        )
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

    body = {
        "messages": messages,
        "max_tokens": NUM_TOKENS,
        "temperature": 0,
        "return_token_ids": True,
    }
    response = server.post(body, "/v1/chat/completions")
    answer = json.loads(response.body)

    assert response.status == 200
    assert answer["prompt_token_ids"] == prompt_ids
    assert answer["choices"][0]["token_ids"] == answer_ids


# Cases of vLLM's own suites, whose values are other models'.


def test_a_prompt_is_cut_at_the_side_that_a_request_names(server: Server) -> None:
    prompt = "One, two, three, four, five, six, seven 🦙 eight"
    ids = json.loads(server.post({"prompt": prompt}, "/tokenize").body)["tokens"]

    for side, expected_ids in (("left", ids[-5:]), ("right", ids[:5])):
        fields = {
            "truncate_prompt_tokens": 5,
            "truncation_side": side,
            "return_token_ids": True,
            "max_tokens": 1,
        }
        answer = json.loads(server.post({"prompt": prompt, **fields}, "/v1/completions").body)
        assert answer["choices"][0]["prompt_token_ids"] == expected_ids


def test_each_chunk_tells_one_token_more_until_the_numbers_of_the_whole_answer(
    server: Server,
) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    fields = {
        "prompt": "The capital of France is",
        "max_tokens": NUM_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
    }
    whole = json.loads(server.post(fields, "/v1/completions").body)["usage"]
    streamed = server.post(
        {**fields, "stream": True, "stream_options": options}, "/v1/completions"
    ).body

    events = [line.removeprefix(b"data: ") for line in streamed.splitlines() if line]
    assert events.pop() == b"[DONE]"

    usages = [json.loads(event)["usage"] for event in events]
    counts = [usage["completion_tokens"] for usage in usages]

    assert counts == sorted(counts) and counts[-1] == whole["completion_tokens"] == NUM_TOKENS
    assert {usage["prompt_tokens"] for usage in usages} == {whole["prompt_tokens"]}


def test_the_fortieth_stop_string_ends_an_answer(server: Server) -> None:
    fields = {"prompt": "The capital of France is", "max_tokens": NUM_TOKENS, "temperature": 0}
    text = json.loads(server.post(fields, "/v1/completions").body)["choices"][0]["text"]
    last_word = text.split()[-1]

    stops = [*(f"never {number}" for number in range(39)), last_word]
    answer = json.loads(server.post({**fields, "stop": stops}, "/v1/completions").body)

    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["choices"][0]["text"] == text[: text.index(last_word)]


def function(name: str, about: str, argument: str) -> dict[str, object]:
    parameters = {
        "type": "object",
        "properties": {argument: {"type": "string"}},
        "required": [argument],
    }
    return {
        "type": "function",
        "function": {"name": name, "description": about, "parameters": parameters},
    }


TOOLS = [
    function("calculate", "Compute an arithmetic expression", "expression"),
    function("get_weather", "Get the current weather of a city", "city"),
]


def test_a_template_without_tools_is_told_of_them(server: Server) -> None:
    """This model rarely calls by itself: it answers, and a forced call is of the function that the
    question wants.
    """
    info = json.loads(server.request("GET", "/server_info").body)
    of_model = info["models"]["smollm2"]["model"]
    assert (of_model["tool_call_parser"], of_model["tells_tools"]) == ("generic", True)

    body = {
        "messages": [{"role": "user", "content": "Is it raining in Tokyo right now?"}],
        "tools": TOOLS,
        "max_tokens": 60,
        "temperature": 0,
    }
    response = server.post(body, "/v1/chat/completions")
    answer = json.loads(response.body)

    assert response.status == 200, answer
    assert answer["choices"][0]["message"]["content"]

    num_prompt_tokens = answer["usage"]["prompt_tokens"]

    response = server.post(
        body | {"tool_choice": "required", "parallel_tool_calls": False}, "/v1/chat/completions"
    )
    answer = json.loads(response.body)
    [call] = answer["choices"][0]["message"]["tool_calls"]

    assert call["function"]["name"] == "get_weather"
    assert "Tokyo" in json.loads(call["function"]["arguments"])["city"]
    assert answer["usage"]["prompt_tokens"] == num_prompt_tokens > 100


def test_a_changing_word_in_front_of_long_prompts_is_told_once(server: Server) -> None:
    """As Claude Code's billing header is one: nothing behind it is cached."""
    system = " ".join(f"Rule {number}: be brief." for number in range(180))
    for header in ("c40", "a1f", "b77"):
        messages = [
            {"role": "system", "content": f"version {header}\n{system}"},
            {"role": "user", "content": "Hi"},
        ]
        response = server.post({"messages": messages, "max_tokens": 1}, "/v1/chat/completions")
        assert json.loads(response.body)["usage"]["prompt_tokens"] > 1000

    miss_lines = [line for line in server.log_lines() if line.get("logger") == "lmi.engine.misses"]
    assert len(miss_lines) == 1
