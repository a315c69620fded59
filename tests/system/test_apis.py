"""The laws that every API keeps on a whole server: one prompt has one greedy answer, and a stream
joins to the whole.

Each API is a row: its clients' request for a number of tokens, and the place of the text in its
answers.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from lmi.apis.table import APIS
from tests.served import Server, serve
from tests.system.container import Answer
from tests.tiny_models import tiny_model

PROMPTS = ("The quick", "She sells sea shells by the sea shore. " * 3, "Straße 狐\n\t", "a")
ELSEWHERE = {
    "openai_chat": "takes messages, no raw prompt",
    "openai_chat_lines": "takes messages, no raw prompt",
    "responses": "takes messages, no raw prompt",
    "anthropic": "takes messages, no raw prompt",
    "embeddings": "answers with no text",
    "dynamic_batch": "is there only without a rolling batch: the last test",
}


@dataclass(frozen=True)
class ApiCase:
    """`text`: the piece of text in one record of an answer. The pieces join to the whole text."""

    api: str
    path: str
    ask: Callable[[str, int], dict[str, Any]]
    text: Callable[[dict[str, Any]], str]
    is_stream: bool = False

    def answer(self, server: Server, prompt: str, num_tokens: int) -> str:
        answer = server.post(self.ask(prompt, num_tokens), self.path)
        assert answer.status == 200, answer.body
        return "".join(map(self.text, self._records(answer)))

    def _records(self, answer: Answer) -> list[dict[str, Any]]:
        """The records of a stream, or of a whole answer, which is one object or a list."""
        if not self.is_stream:
            whole = json.loads(answer.body)
            return whole if isinstance(whole, list) else [whole]

        lines = [line.removeprefix(b"data:").strip() for line in answer.body.split(b"\n") if line]
        return [json.loads(line) for line in lines if line != b"[DONE]"]


def lmi(**parameters: object) -> Callable[[str, int], dict[str, Any]]:
    return lambda prompt, num: {
        "inputs": prompt,
        "parameters": {"max_new_tokens": num, **parameters},
    }


def triton(prompt: str, num_tokens: int) -> dict[str, Any]:
    return {"text_input": prompt, "parameters": {"max_tokens": num_tokens, "temperature": 0}}


def completions(stream: bool) -> Callable[[str, int], dict[str, Any]]:
    return lambda prompt, num: {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": num,
        "temperature": 0,
        "stream": stream,
    }


def token_text(record: dict[str, Any]) -> str:
    return str(record["token"]["text"])


def choice_text(record: dict[str, Any]) -> str:
    return "".join(choice["text"] for choice in record["choices"])


ROWS = {
    "lmi": ApiCase("lmi", "/invocations", lmi(), lambda record: record["generated_text"]),
    "lmi jsonlines": ApiCase(
        "lmi", "/invocations", lmi(output_formatter="jsonlines"), token_text, True
    ),
    "lmi sse": ApiCase("lmi", "/invocations", lmi(output_formatter="sse"), token_text, True),
    "triton": ApiCase(
        "triton", "/v2/models/tiny/generate", triton, lambda record: record["text_output"]
    ),
    "triton stream": ApiCase(
        "triton_stream",
        "/v2/models/tiny/generate_stream",
        triton,
        lambda record: record["text_output"],
        True,
    ),
    "tgi": ApiCase("tgi", "/", lmi(), lambda record: record["generated_text"]),
    "tgi generate": ApiCase(
        "tgi_generate", "/generate", lmi(), lambda record: record["generated_text"]
    ),
    "tgi stream": ApiCase("tgi_generate_stream", "/generate_stream", lmi(), token_text, True),
    "completions": ApiCase(
        "openai_completions", "/v1/completions", completions(False), choice_text
    ),
    "completions stream": ApiCase(
        "openai_completions", "/v1/completions", completions(True), choice_text, True
    ),
    "completions lines": ApiCase(
        "openai_completions_lines", "/invocations", completions(True), choice_text, True
    ),
}
CASES = {name: case for name, case in ROWS.items() if case.api in APIS}


def test_every_api_has_a_row() -> None:
    assert set(APIS) <= {case.api for case in CASES.values()} | ELSEWHERE.keys()


@pytest.mark.parametrize("num_tokens", [1, 25])
@pytest.mark.parametrize("name", CASES)
def test_the_same_greedy_prompt_and_limit_give_the_same_text_at_every_api(
    tiny: Server, name: str, num_tokens: int
) -> None:
    """The pieces of a stream join to the text of a whole answer."""
    for prompt in PROMPTS:
        expected = CASES["lmi"].answer(tiny, prompt, num_tokens)
        assert CASES[name].answer(tiny, prompt, num_tokens) == expected
        assert expected or num_tokens == 1


@pytest.mark.parametrize("streaming", ["false", "true"])
def test_several_inputs_without_a_rolling_batch_have_the_texts_that_each_has_alone(
    tiny: Server, streaming: str
) -> None:
    expected = [CASES["lmi"].answer(tiny, prompt, 25) for prompt in PROMPTS]
    settings = (
        "option.dtype=fp32",
        "option.rolling_batch=disable",
        f"option.enable_streaming={streaming}",
    )
    with serve(tiny_model("llama_deep"), *settings, "frontend_workers=1") as server:
        answer = server.post({"inputs": PROMPTS, "parameters": {"max_new_tokens": 25}})

    assert answer.status == 200, answer.body

    if streaming == "true":
        texts = [
            "".join(pieces)
            for pieces in zip(*(line["outputs"] for line in answer.lines), strict=True)
        ]
    else:
        texts = [load["generated_text"] for load in json.loads(answer.body)]

    assert texts == expected
